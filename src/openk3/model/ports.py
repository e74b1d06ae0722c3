"""Where the outside world plugs into the model: four small protocols, each with a local default.

The model knows no process group and no cache pool. Expert parallelism, context parallelism, paged
caches and 4-bit or streamed experts implement these from other folders.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from openk3.ops import moe
from openk3.ops.conv import short_conv
from openk3.ops.kda import kda
from openk3.ops.mla import attend
from openk3.ops.norm import gated_head_norm


class ExpertWeights(Protocol):
    """The routed experts of one layer, however they are kept."""

    num_experts: int

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, L] grouped by expert, offsets [E] int32 (end of each group) -> [R, L]."""
        ...

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, L], ids and weights [T, k] -> the weighted sum of each token's experts [T, L]."""
        ...


class TokenDispatcher(Protocol):
    """Brings tokens to their experts and the weighted results back."""

    skips_padding: bool
    """Whether it takes ids of -1: tokens that go nowhere and get zeros."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """x [T, L], ids and weights [T, k] -> [T, L]."""
        ...


class LocalDispatcher:
    """All experts are here."""

    skips_padding = False

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        return experts.routed(x, ids, weights)


def routed_by_sorting(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`ExpertWeights.routed` by way of `sorted_rows`, where nothing faster is at hand."""
    perm = moe.sort_by_expert(ids, experts.num_experts)
    rows = moe.permute(x, perm, ids.shape[1])
    return moe.combine(experts.sorted_rows(rows, perm.offsets), perm, weights)


class KdaInputs(NamedTuple):
    """The projections of T tokens in one KDA layer, raw."""

    q: Tensor
    """[B, T, H * K]"""
    k: Tensor
    """[B, T, H * K]"""
    v: Tensor
    """[B, T, H * V]"""
    g: Tensor
    """[B, T, H, K] decay logits"""
    beta: Tensor
    """[B, T, H] logits"""
    gate: Tensor
    """[B, T, H, V] output gate logits"""


class KdaWeights(NamedTuple):
    """What a KDA layer holds between its projections."""

    layer: int
    conv: tuple[Tensor, Tensor, Tensor]
    """taps of q, k and v, [H * K, 1, W] each"""
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float
    norm: Tensor
    """[V]"""
    eps: float


class SequenceContext(Protocol):
    """The two operations that look along the sequence, with the memory they need."""

    def kda(self, x: KdaInputs, weights: KdaWeights, state: "MixerState | None") -> Tensor:
        """Convolutions, recurrence, head norm and output gate: [B,T,H,V]."""
        ...

    def attend(
        self,
        layer: int,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        state: "MixerState | None",
        return_max_logits: bool = False,
    ) -> Any:
        """Gated MLA's attention core over all that was seen; arguments as `openk3.ops.mla`."""
        ...


@dataclass(frozen=True)
class LocalSequence:
    """Whole sequences on one device, one per row or packed by `cu_seqlens`."""

    cu_seqlens: Tensor | None = None

    def kda(self, x: KdaInputs, weights: KdaWeights, state: "MixerState | None") -> Tensor:
        old = None if state is None else state.kda(weights.layer)
        keep = state is not None
        heads, (conv_q, conv_k, conv_v) = x.gate.shape[2], weights.conv
        q, tail_q = self._conv(x.q, conv_q, old and old.conv_q, keep)
        k, tail_k = self._conv(x.k, conv_k, old and old.conv_k, keep)
        v, tail_v = self._conv(x.v, conv_v, old and old.conv_v, keep)
        result: Any = kda(
            q.unflatten(-1, (heads, -1)),
            k.unflatten(-1, (heads, -1)),
            v.unflatten(-1, (heads, -1)),
            x.g,
            x.beta,
            A_log=weights.A_log,
            dt_bias=weights.dt_bias,
            lower_bound=weights.lower_bound,
            initial_state=old and old.S,
            cu_seqlens=self.cu_seqlens,
            output_final_state=keep,
        )
        o, S = result
        if state is not None:
            state.set_kda(weights.layer, KdaState(tail_q, tail_k, tail_v, S))
        return gated_head_norm(o, weights.norm, x.gate, weights.eps)

    def _conv(self, x: Tensor, weight: Tensor, tail: Tensor | None, keep: bool) -> Any:
        options = {"cu_seqlens": self.cu_seqlens, "output_final_state": keep}
        return short_conv(x, weight, initial_state=tail, **options)

    def attend(
        self,
        layer: int,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        state: "MixerState | None",
        return_max_logits: bool = False,
    ) -> Any:
        form = "expanded"
        if state is not None:
            latent, k_rope = state.extend(layer, latent, k_rope)
            form = None
        return attend(
            q,
            latent,
            k_rope,
            kv_b,
            cu_seqlens=self.cu_seqlens,
            form=form,
            return_max_logits=return_max_logits,
        )


@dataclass
class KdaState:
    """What one KDA layer remembers: the last W inputs of each convolution, and S."""

    conv_q: Tensor
    """[N, W, H * K]"""
    conv_k: Tensor
    """[N, W, H * K]"""
    conv_v: Tensor
    """[N, W, H * V]"""
    S: Tensor
    """[N, H, K, V] float32"""


class MixerState(Protocol):
    """The memory of a sequence between forward passes."""

    num_tokens: int
    """How many it has seen."""

    def advance(self, num_tokens: int) -> None:
        """Called when all layers have seen that many more."""
        ...

    def kda(self, layer: int) -> KdaState | None:
        """The state of a KDA layer, or None before the first token."""
        ...

    def set_kda(self, layer: int, state: KdaState) -> None:
        """Replace it after a forward pass."""
        ...

    def extend(self, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Append latent [B,T,R] and k_rope [B,T,rope]; return all S positions of both."""
        ...


class Probe(Protocol):
    """An observer of one forward pass (`k3 report`); sees detached tensors."""

    def mixed(self, name: str, weights: Tensor) -> None:
        """AttnRes weights [..., sources] of one sublayer."""
        ...

    def decayed(self, layer: int, g: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
        """Raw decay logits [B,T,H,K] of one KDA layer and its gate parameters."""
        ...


@dataclass
class Context:
    """What every layer is handed besides its input."""

    sequence: SequenceContext = field(default_factory=LocalSequence)
    state: MixerState | None = None
    valid: Tensor | None = None
    """[B, T] bool; False marks padding, which is not counted for balancing."""
    probe: Probe | None = None
