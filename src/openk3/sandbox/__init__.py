"""Resumable sandboxes: pause, resume, fork and snapshot isolated machines. Imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openk3.sandbox.pool import Pool
    from openk3.sandbox.process import Process
    from openk3.sandbox.requests import ProcessRequest, SandboxRequest
    from openk3.sandbox.sandbox import Sandbox
    from openk3.sandbox.types import Entry, Info, Limits, Network, Result, SnapshotInfo, State

__all__ = [
    "Entry",
    "Info",
    "Limits",
    "Network",
    "Pool",
    "Process",
    "ProcessRequest",
    "Result",
    "Sandbox",
    "SandboxRequest",
    "SnapshotInfo",
    "State",
]

_HOME = {
    "Pool": "pool",
    "Process": "process",
    "ProcessRequest": "requests",
    "Sandbox": "sandbox",
    "SandboxRequest": "requests",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"openk3.sandbox.{_HOME.get(name, 'types')}"), name)
    raise AttributeError(f"module 'openk3.sandbox' has no attribute {name!r}")
