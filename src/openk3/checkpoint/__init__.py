"""Files in and out: training checkpoints and the published Hugging Face layout.

Lazy (PEP 562), so that names, headers and folders can be looked at without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openk3.checkpoint.hf.load import load
    from openk3.checkpoint.hf.save import save

__all__ = ["load", "save"]

_LAZY = {"load": "openk3.checkpoint.hf.load", "save": "openk3.checkpoint.hf.save"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'openk3.checkpoint' has no attribute {name!r}")
