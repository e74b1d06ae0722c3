"""Block AttnRes: a softmax over earlier blocks replaces the residual stream (K3 report §2.2)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from openk3.ops.attn_res.reference import check_sources, mix_reference
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_tensor
from openk3.ops.norm import rms_norm
from openk3.ops.triton_support import row_kernel_runs

__all__ = ["BACKENDS", "mix", "mix_norm"]


class _Reference:
    """Plain torch; the weights come with the result."""

    @staticmethod
    def mix(sources, query, norm_weight, eps, return_weights):
        return mix_reference(sources, query, norm_weight, eps)

    @staticmethod
    def mix_norm(sources, query, norm_weight, eps, out_weight, out_eps):
        mixed, _ = mix_reference(sources, query, norm_weight, eps)
        return rms_norm(mixed, out_weight, out_eps, backend="reference")


def _triton() -> Any:
    from openk3.ops.attn_res import triton_mix

    return triton_mix


BACKENDS = triton_or_reference("attn_res", row_kernel_runs, _triton, lambda: _Reference)


def mix(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    return_weights: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """h = sum_i softmax_i(query . RMSNorm(v_i)) v_i over the sources (eq. 8-10).

    sources: 1 to 16 tensors [..., d] of one shape and dtype; query [d] or [1, d]; norm_weight [d].
    Returns h [..., d] and, if asked, the weights [..., sources] float32 (differentiable only with
    the reference backend). Raises InputError, BackendError.
    """
    chosen = _choose(sources, query, norm_weight, backend)
    mixed, weights = chosen.mix(sources, query, norm_weight, eps, return_weights)
    return (mixed, weights) if return_weights else mixed


def mix_norm(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
    out_weight: Tensor,
    out_eps: float,
    *,
    backend: str | None = None,
) -> Tensor:
    """rms_norm(mix(...), out_weight, out_eps): what a sublayer reads, with no pass in between.

    Arguments as of `mix`; out_weight [d]. Returns [..., d]. Raises InputError, BackendError.
    """
    chosen = _choose(sources, query, norm_weight, backend)
    check_tensor("out_weight", out_weight, sources[0].shape[-1:], sources[0].device)
    return chosen.mix_norm(sources, query, norm_weight, eps, out_weight, out_eps)


def _choose(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, backend: str | None
) -> Any:
    first = check_sources(sources)
    dim = first.shape[-1]
    check_tensor("query", query.reshape(-1), (dim,), first.device)
    check_tensor("norm_weight", norm_weight, (dim,), first.device)
    chosen = BACKENDS.resolve(backend, device=first.device, dtype=first.dtype, dim=dim)
    return chosen.load()
