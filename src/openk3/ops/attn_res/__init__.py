"""Block AttnRes: a softmax over earlier blocks replaces the residual stream (K3 report §2.2)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from openk3.errors import InputError
from openk3.ops.attn_res.reference import mix_reference
from openk3.ops.backends import Backend, BackendTable, always


def _reference() -> Any:
    return mix_reference


BACKENDS = BackendTable("attn_res", [Backend("reference", "nothing", always, _reference)])


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
    Returns h [..., d] and, if asked, the weights [..., sources] float32. Raises InputError.
    """
    if not 1 <= len(sources) <= 16:
        raise InputError(f"mix takes 1 to 16 sources, not {len(sources)}")
    dim = sources[0].shape[-1]
    if any(v.shape != sources[0].shape or v.dtype != sources[0].dtype for v in sources):
        raise InputError("mix: all sources must have one shape and dtype")
    if query.numel() != dim or norm_weight.shape != (dim,):
        raise InputError(
            f"mix: query {list(query.shape)} and norm_weight {list(norm_weight.shape)} must have "
            f"the sources' width {dim}"
        )
    chosen = BACKENDS.resolve(backend, device=sources[0].device, dtype=sources[0].dtype, dim=dim)
    mixed, weights = chosen.load()(sources, query, norm_weight, eps)
    return (mixed, weights) if return_weights else mixed
