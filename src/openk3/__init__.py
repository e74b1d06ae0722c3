"""OpenK3: the whole Kimi K3 system (arXiv 2607.24653) as one open Python project.

The package root is lazy (PEP 562): `import openk3` loads no torch, and nothing below imports it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from openk3._version import __version__

if TYPE_CHECKING:
    from openk3.checkpoint import load, save
    from openk3.model import K3

__all__ = ["K3", "__version__", "load", "save"]

_LAZY = {"load": "openk3.checkpoint", "save": "openk3.checkpoint", "K3": "openk3.model"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'openk3' has no attribute {name!r}")
