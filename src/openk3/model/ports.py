"""Where the outside world plugs into the model: four small protocols, each with a local default.

The model knows no process group and no cache pool. Expert parallelism, context parallelism, paged
caches and 4-bit or streamed experts implement these from other folders.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from openk3.ops import moe
from openk3.ops.conv import short_conv
from openk3.ops.kda import kda
from openk3.ops.mla import attend


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

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """x [T, L], ids and weights [T, k] -> [T, L]."""
        ...


class LocalDispatcher:
    """All experts are here."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        return experts.routed(x, ids, weights)


def routed_by_sorting(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`ExpertWeights.routed` by way of `sorted_rows`, where nothing faster is at hand."""
    perm = moe.sort_by_expert(ids, experts.num_experts)
    rows = moe.permute(x, perm, ids.shape[1])
    return moe.combine(experts.sorted_rows(rows, perm.offsets), perm, weights)


class SequenceContext(Protocol):
    """The three operations that look along the sequence. Arguments as in `openk3.ops`."""

    def conv(self, x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Any]:
        """Short convolution with SiLU: (y [B,T,D], final state or None)."""
        ...

    def kda(self, *inputs: Tensor, state: Tensor | None, **options: Any) -> Any:
        """KDA of q, k, v, g, beta: (o [B,T,H,V], final state or None)."""
        ...

    def attend(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, **options: Any
    ) -> Any:
        """Gated MLA's attention core."""
        ...


@dataclass(frozen=True)
class LocalSequence:
    """Whole sequences on one device, one per row or packed by `cu_seqlens`."""

    cu_seqlens: Tensor | None = None
    keep_state: bool = False

    def conv(self, x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Any]:
        return short_conv(
            x,
            weight,
            initial_state=state,
            cu_seqlens=self.cu_seqlens,
            output_final_state=self.keep_state,
        )

    def kda(self, *inputs: Tensor, state: Tensor | None, **options: Any) -> Any:
        return kda(
            *inputs,
            initial_state=state,
            cu_seqlens=self.cu_seqlens,
            output_final_state=self.keep_state,
            **options,
        )

    def attend(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, **options: Any
    ) -> Any:
        return attend(q, latent, k_rope, kv_b, cu_seqlens=self.cu_seqlens, **options)


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
