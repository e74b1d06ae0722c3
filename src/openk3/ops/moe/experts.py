"""The routed experts as one grouped product over tokens sorted by expert (K3 report eq. 11).

Legend: T tokens, k experts a token, R = T k rows, E experts, L latent width, F expert inner width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops import mx
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_range, check_tensor
from openk3.ops.moe.expert_linear import check_grouped, expert_linear
from openk3.ops.moe.situ import situ_glu
from openk3.ops.precision import outside_autocast, wide_dtype
from openk3.ops.triton_support import triton_runs


@dataclass(frozen=True)
class Permutation:
    """Rows sorted by expert: row r of the sorted order is flat choice order[r] = t * k + j."""

    order: Tensor
    """[R] int64."""
    inverse: Tensor
    """[R] int64, its inverse."""
    offsets: Tensor
    """[E] int32, end of each expert's rows."""


def sort_by_expert(ids: Tensor, num_experts: int) -> Permutation:
    """ids [T, k] integers in [0, num_experts) -> the stable expert-sorted order."""
    check_range("ids", ids, 0, num_experts)
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(flat.numel(), device=flat.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would wait for the device
    return Permutation(order, inverse, counts.cumsum(0).to(torch.int32))


class _Permute(torch.autograd.Function):
    """x[order]; the gradient is a gather by the inverse, so it is deterministic."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def permute(x: Tensor, perm: Permutation, top_k: int) -> Tensor:
    """x [T, L] -> rows [R, L], each token once for each of its experts, grouped by expert."""
    repeated = x[:, None].expand(-1, top_k, -1).reshape(x.shape[0] * top_k, x.shape[1])
    return _Permute.apply(repeated, perm.order, perm.inverse)


def combine(rows: Tensor, perm: Permutation, weights: Tensor) -> Tensor:
    """rows [R, L] grouped by expert, weights [T, k] -> weighted sums [T, L], added in float32."""
    back = _Permute.apply(rows, perm.inverse, perm.order).view(*weights.shape, rows.shape[1])
    wide = wide_dtype(rows)
    with outside_autocast(rows.device):
        return torch.einsum("tkl,tk->tl", back.to(wide), weights.to(wide)).to(rows.dtype)


def grouped_mlp(
    rows: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    *,
    mxfp8_inputs: bool = False,
) -> Tensor:
    """w2(SiTU(w1 x, w3 x)) of each row's expert. rows [R, L] grouped by expert -> [R, L].

    offsets [E] int32; w1, w3 [E, F, L], w2 [E, L, F]. mxfp8_inputs rounds the input of each
    product to MXFP8, with a straight-through gradient. Raises InputError.
    """
    check_grouped(rows, w1, offsets)
    check_tensor("w3", w3, w1.shape, rows.device)
    check_tensor("w2", w2, (w1.shape[0], w1.shape[2], w1.shape[1]), rows.device)
    rows = mx.fake_quantize(rows, "mxfp8") if mxfp8_inputs else rows
    gate = expert_linear(rows, w1, offsets)
    up = expert_linear(rows, w3, offsets)
    inner = situ_glu(gate, up, beta1, beta2)
    inner = mx.fake_quantize(inner, "mxfp8") if mxfp8_inputs else inner
    return expert_linear(inner, w2, offsets)


def _triton() -> Any:
    from openk3.ops.moe.routed import routed_experts

    return routed_experts


def _triton_usable(
    *, device: torch.device, dtype: torch.dtype, num_experts: int, widths: tuple[int, int], **_: Any
) -> tuple[bool, str]:
    usable, reason = triton_runs(device)
    if not usable:
        return False, reason
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False, f"grouped_mm and tensor descriptors need compute capability 9.0; {reason}"
    if dtype != torch.bfloat16 or num_experts > 1024 or any(w % 8 for w in widths):
        return False, (
            f"the kernels take bfloat16, up to 1024 experts and widths 8 n, not {dtype}, "
            f"{num_experts}, {widths}"
        )
    from openk3.ops.moe.costs import measured

    if torch.cuda.get_device_name(device) not in measured():
        reason += "; costs.json has no such GPU, so grouped_mm makes every product"
    return True, reason


BACKENDS = triton_or_reference(
    "experts",
    _triton_usable,
    _triton,
    lambda: expert_mlp_reference,
    needs="a Hopper or newer GPU and the triton package",
)


def expert_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    *,
    backend: str | None = None,
) -> Tensor:
    """sum_j weights[t, j] * w2(SiTU(w1 x_t, w3 x_t)) over each token's experts (eq. 11).

    x [T, L]; ids, weights [T, k]; w1, w3 [E, F, L], w2 [E, L, F]. Accumulated in float32, returned
    [T, L] in x's dtype. Raises InputError, BackendError.
    """
    if w1.ndim != 3 or ids.ndim != 2 or not ids.shape[1]:
        raise InputError(
            f"w1 {list(w1.shape)}, ids {list(ids.shape)} must be [E, F, L] and [T, k], k at least 1"
        )
    num_experts, inner, latent = w1.shape
    check_tensor("x", x, (ids.shape[0], latent), w1.device)
    check_tensor("ids", ids, ids.shape, w1.device, kind="integer")
    check_tensor("weights", weights, ids.shape, w1.device)
    check_tensor("w3", w3, w1.shape, w1.device)
    check_tensor("w2", w2, (num_experts, latent, inner), w1.device)
    if not x.dtype == w1.dtype == w2.dtype == w3.dtype:
        raise InputError(f"x, w1, w3, w2 must have one dtype, not {x.dtype} and {w1.dtype}, ...")
    facts = {"dtype": x.dtype, "num_experts": num_experts, "widths": (latent, inner)}
    chosen = BACKENDS.resolve(backend, device=x.device, **facts)
    return chosen.load()(x, ids, weights, w1, w3, w2, beta1, beta2)


def expert_mlp_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
) -> Tensor:
    """Plain torch."""
    perm = sort_by_expert(ids, w1.shape[0])
    rows = permute(x, perm, ids.shape[1])
    return combine(grouped_mlp(rows, perm.offsets, w1, w3, w2, beta1, beta2), perm, weights)
