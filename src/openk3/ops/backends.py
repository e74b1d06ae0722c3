"""Backend tables: which implementations an op has, what each needs, and which one runs here.

An op asks its table at each call, with the device, dtype and widths of that call: predicates are
cheap and cache what is not. The first choice of a kind is logged, and `k3 doctor` shows the tables.
An explicit choice that cannot be honoured is an error.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openk3.errors import BackendError, nearest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One implementation of an op."""

    name: str
    needs: str
    """What it needs, in words."""
    usable: Callable[..., tuple[bool, str]]
    """Keyword facts about the call -> (whether it can run here, why or why not).

    Takes facts it does not know (`**_`): all tables are asked the same ones by `k3 doctor`.
    """
    load: Callable[[], Any]
    """Import and return the implementation, a function or what holds several; called only when
    chosen."""


class BackendTable:
    """The implementations of one op, best first; `reference` is always usable.

    What stands behind it is only chosen by name.
    """

    def __init__(self, op: str, backends: list[Backend]) -> None:
        self.op = op
        self.backends = backends
        self._said: set[tuple[str, str]] = set()

    def explain(self, **facts: Any) -> list[tuple[str, bool, str]]:
        """(name, usable, reason) of every backend for these facts."""
        return [(b.name, *b.usable(**facts)) for b in self.backends]

    def resolve(self, requested: str | None = None, **facts: Any) -> Backend:
        """The requested backend, or the first usable one. Raises BackendError."""
        name = self._choose(requested, **facts)
        return next(b for b in self.backends if b.name == name)

    def _choose(self, requested: str | None, **facts: Any) -> str:
        if requested is not None:
            self._check_explicit(requested, facts)
            return requested
        for backend in self.backends:
            usable, reason = backend.usable(**facts)
            if usable:
                self._say_once(backend.name, reason)
                return backend.name
        raise AssertionError(f"{self.op}: the reference backend must always be usable")

    # What torch.compiler.assume_constant_result does, without importing the compiler for everyone:
    # a compiled graph need not look into predicates.
    _choose._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def _check_explicit(self, requested: str, facts: dict[str, Any]) -> None:
        by_name = {b.name: b for b in self.backends}
        if requested not in by_name:
            raise BackendError(
                f"{self.op}: no backend {requested!r}{nearest(requested, set(by_name))}; "
                f"there are {', '.join(by_name)}"
            )
        usable, reason = by_name[requested].usable(**facts)
        if not usable:
            raise BackendError(f"{self.op}: backend {requested!r} cannot run here: {reason}")

    def _say_once(self, name: str, reason: str) -> None:
        if (name, reason) not in self._said:
            self._said.add((name, reason))
            log.info("%s: backend %s (%s)", self.op, name, reason)


def always(**_: Any) -> tuple[bool, str]:
    """The predicate of a reference backend."""
    return True, "plain torch, always available"


def triton_or_reference(
    op: str,
    usable: Callable[..., tuple[bool, str]],
    triton: Callable[[], Any],
    reference: Callable[[], Any],
    *,
    needs: str = "an NVIDIA GPU and the triton package",
) -> BackendTable:
    """The table of an op with Triton kernels, `usable` where that says so, and a reference."""
    backends = [Backend("triton", needs, usable, triton)]
    return BackendTable(op, [*backends, Backend("reference", "nothing", always, reference)])
