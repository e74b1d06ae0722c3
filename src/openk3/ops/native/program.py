"""A recorded pass over a few tokens: C++ kernels over buffers that do not move, one call to run.

Each method records one operation of `source/`; those between two `phase` calls may run side by
side. The numbers of a run say what its rows are (see `numbers`).

Legend: N rows (tokens of all segments), d width, H heads, E experts, k experts a token, L latent
width, F inner width.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.native.build import load

MAX_SOURCES = 16


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence."""

    ids: Sequence[int]
    start: int
    """Position of the first."""
    states: Sequence[int]
    """Page of each KDA group, changed in place."""
    pages: Sequence[int]
    """Of its latents."""
    saves: Sequence[tuple[int, Sequence[int]]] = ()
    """(tokens into it, pages): states to keep on the way, in order."""
    wanted: range = range(0)
    """The tokens whose logits are asked for."""
    window: int = -1
    """Row of the pending windows, when drafts are verified; see `openk3.ops.kda.decode`."""
    accepted: int = 0
    advance: int = 0


def numbers(segments: Sequence[Segment], groups: int) -> Any:
    """What `Program.run` takes: int64 array of everything that differs from pass to pass."""
    ids: list[int] = []
    wanted: list[int] = []
    rest: list[int] = []
    for s in segments:
        wanted += [len(ids) + i for i in s.wanted]
        ids += s.ids
        rest += [len(s.ids), s.start, s.window, s.accepted, s.advance, len(s.pages), len(s.saves)]
        rest += [*s.states, *s.pages]
        for count, pages in s.saves:
            rest += [count, *pages]
    flat = [len(ids), groups, len(wanted), len(segments), *ids, *wanted, *rest]
    return (c_int64 * len(flat))(*flat)


class _Args(ctypes.Structure):
    """Arguments by name; tensors are float32 and contiguous, and stay alive with the program."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return pointer(value)
    if isinstance(value, tuple):
        return (c_void_p * len(value))(*map(pointer, value))
    return value


def pointer(x: Tensor) -> int:
    """The address of a float32 tensor's numbers. Raises InputError if they lie apart."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        raise InputError(f"the CPU kernels take contiguous float32, not {x.dtype} on {x.device}")
    return x.data_ptr()


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class KdaArgs(_Args):
    """Of `Program.kda`. q, k, v, g, gate [N, H * D], beta [N, H]; conv: three [H * D, 1, 4]."""

    _fields_ = [
        *_fields(c_void_p, "q k v g beta gate"),
        ("taps", c_void_p * 3),
        *_fields(c_void_p, "A_log dt_bias norm out pool"),
        *_fields(c_void_p, "pending_q pending_k pending_v pending_g pending_beta"),
        *_fields(c_int64, "page_bytes conv_offset group heads width capacity"),
        *_fields(c_float, "lower_bound scale eps"),
    ]


class MlaArgs(_Args):
    """Of `Program.latents` and `attend`. q [N, H * (nope + rope)], kv_a [N, latent + rope]."""

    _fields_ = [
        *_fields(c_void_p, "q kv_a gate norm kv_b out pool"),
        *_fields(c_int64, "page_bytes page_tokens heads nope rope value latent"),
        *_fields(c_float, "eps scale"),
    ]


class MoeArgs(_Args):
    """Of `Program.experts`. scores [N, E], latent and out [N, L]; gate, up [N * k, F] and mixed
    [N * k, L] are room for its work."""

    _fields_ = [
        *_fields(c_void_p, "scores bias latent w1 w3 w2 norm gate up mixed out"),
        *_fields(c_int64, "experts top_k width inner"),
        *_fields(c_float, "scaling beta1 beta2 eps"),
    ]


@dataclass
class Program:
    """Operations in the order they were recorded. Raises BackendError without a compiler."""

    kept: list[Any] = field(default_factory=list)
    """Tensors whose numbers are used."""

    def __post_init__(self) -> None:
        self._library = _declared()
        self._handle = self._library.k3_new()

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.k3_free(handle)

    def run(self, numbers: Any, threads: int) -> None:
        """Everything, once, with the GIL released. `numbers` is of the function of that name."""
        self._library.k3_run(self._handle, numbers, threads)

    def phase(self) -> None:
        """What follows waits for what came before."""
        self._library.k3_phase(self._handle)

    def embed(self, table: Tensor, out: Tensor) -> None:
        """out [N, d] = table[ids]."""
        self._record("embed", table, out, out.shape[1])

    def linear(
        self, x: Tensor, weight: Tensor, out: Tensor, *, add: bool = False, wanted: bool = False
    ) -> None:
        """out [N, o] (+)= x [N, d] weight [o, d]^T; with `wanted` of the wanted rows only."""
        self._record("linear", x, weight, out, *weight.shape[::-1], int(add), int(wanted))

    def mix_norm(
        self, sources: Sequence[Tensor], query: Tensor, norm: Tensor, eps: float,
        out_norm: Tensor, out_eps: float, out: Tensor,
    ) -> None:  # fmt: skip
        """`openk3.ops.attn_res.mix_norm` of every row; of one source its norm alone. Raises
        InputError for more than MAX_SOURCES."""
        if not 1 <= len(sources) <= MAX_SOURCES:
            raise InputError(f"mix_norm takes 1 to {MAX_SOURCES} sources, not {len(sources)}")
        self.kept += sources
        table = (c_void_p * len(sources))(*map(pointer, sources))
        dim = out.shape[1]
        self._record("mix_norm", table, len(sources), query, norm, eps, out_norm, out_eps, dim, out)

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out = `openk3.ops.norm.rms_norm` of every row of x [N, d]; may be in place."""
        self._record("norm", x, weight, eps, out.shape[1], out)

    def situ(
        self, gate: Tensor, up: Tensor, out: Tensor, beta1: float, beta2: float | None
    ) -> None:
        """out = `openk3.ops.moe.situ_glu` of every row; may be in place."""
        self._record("situ", gate, up, out, out.shape[1], beta1, beta2 or 0.0)

    def kda(self, **args: Any) -> None:
        """One KDA layer between its projections."""
        self._record_args("kda", KdaArgs, args)

    def mla(self, **args: Any) -> None:
        """One MLA layer between its projections: latents to their pages, then attention."""
        self._record_args("latents", MlaArgs, args)
        self.phase()
        self._record_args("attend", MlaArgs, args)

    def experts(self, **args: Any) -> None:
        """The routed experts of one layer, from the router's logits to the normed sum."""
        self._record_args("experts", MoeArgs, args)

    def _record(self, name: str, *args: Any) -> None:
        self.kept += [x for x in args if isinstance(x, Tensor)]
        getattr(self._library, f"k3_{name}")(self._handle, *map(_plain, args))

    def _record_args(self, name: str, kind: type[_Args], args: dict[str, Any]) -> None:
        for x in args.values():
            self.kept += x if isinstance(x, tuple) else [x] if isinstance(x, Tensor) else []
        getattr(self._library, f"k3_{name}")(self._handle, byref(kind(**args)))


def _declared() -> ctypes.CDLL:
    """The library, with the types of its functions."""
    library = load()
    p, n, f = c_void_p, c_int64, c_float
    library.k3_new.restype = p
    for name, types in {
        "new": [],
        "free": [p],
        "phase": [p],
        "run": [p, POINTER(c_int64), c_int],
        "embed": [p, p, p, n],
        "linear": [p, p, p, p, n, n, c_int, c_int],
        "mix_norm": [p, p, c_int, p, p, f, p, f, n, p],
        "norm": [p, p, p, f, n, p],
        "situ": [p, p, p, p, n, f, f],
        "kda": [p, POINTER(KdaArgs)],
        "latents": [p, POINTER(MlaArgs)],
        "attend": [p, POINTER(MlaArgs)],
        "experts": [p, POINTER(MoeArgs)],
    }.items():
        function = getattr(library, f"k3_{name}")
        function.argtypes = types
    return library
