"""Short causal depthwise convolution with SiLU, on q, k and v of KDA (K3 report §2.1.1).

Legend: B batch, T tokens, D channels, W taps, N sequences.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_kind, check_tensor
from openk3.ops.packed import Gather, Scatter, check_offsets, sequence_lengths, spaced_layout
from openk3.ops.precision import wide_dtype
from openk3.ops.triton_support import triton_runs


def _triton() -> Any:
    from openk3.ops.triton_conv import short_conv_triton

    return short_conv_triton


def _triton_usable(
    *, device: torch.device, dtype: torch.dtype, taps: int = 4, **_: Any
) -> tuple[bool, str]:
    if dtype == torch.float64 or taps != 4:
        return False, f"the kernel takes 16- or 32-bit floats and 4 taps, not {dtype} and {taps}"
    return triton_runs(device)


BACKENDS = triton_or_reference("conv", _triton_usable, _triton, lambda: short_conv_reference)


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """SiLU(y), y_t = sum_j weight[j] x_{t-W+1+j}, in float32, cast back once.

    x [B, T, D]; weight [D, 1, W] or [D, W] float32; initial_state [N, W, D], the last W inputs
    before each sequence (zeros if None; the oldest of the W is never read); cu_seqlens [N + 1] for
    a packed row (then B = 1). Returns (y [B, T, D], final state [N, W, D] in x's dtype or None).
    Raises InputError, BackendError.
    """
    if x.ndim != 3 or weight.ndim not in (2, 3):
        raise InputError(f"x {list(x.shape)}, weight {list(weight.shape)}: not [B,T,D], [D,1,W]")
    (batch, tokens, dim), taps = x.shape, weight.shape[-1]
    check_kind("x", x)
    shape = (dim, taps) if weight.ndim == 2 else (dim, 1, taps)
    check_tensor("conv weight", weight, shape, x.device)
    num = check_offsets(batch, tokens, cu_seqlens)
    if initial_state is not None:
        check_tensor("conv initial_state", initial_state, (num, taps, dim), x.device)
    chosen = BACKENDS.resolve(backend, device=x.device, dtype=x.dtype, taps=taps)
    return chosen.load()(
        x,
        weight,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """`short_conv` in plain torch."""
    batch, tokens, dim = x.shape
    taps = weight.shape[-1]
    lengths = sequence_lengths(batch, tokens, cu_seqlens)
    wide = wide_dtype(x)
    weight_DW = weight.reshape(dim, taps).to(wide)
    if cu_seqlens is None and initial_state is None:
        padded = F.pad(x, (0, 0, taps - 1, 0))
        final = (
            F.pad(x, (0, 0, max(taps - tokens, 0), 0))[:, -taps:] if output_final_state else None
        )
        return _filter(padded.to(wide), weight_DW, tokens).to(x.dtype), final
    num = len(lengths)
    if initial_state is None:
        initial_state = x.new_zeros(num, taps, dim)
    if cu_seqlens is None:
        history = torch.cat([initial_state.to(x.dtype), x], 1)
        y = _filter(history[:, 1:].to(wide), weight_DW, tokens)
        return y.to(x.dtype), history[:, -taps:] if output_final_state else None
    # each sequence behind the W inputs before it, in one long row that is filtered at once
    spaced = spaced_layout(tuple(lengths), taps, x.device)
    row = Scatter.apply(x[0], spaced.slots, tokens + num * taps)
    row = row.index_copy(0, spaced.gaps, initial_state.to(x.dtype).flatten(0, 1))
    y = _filter(row[1:].to(wide), weight_DW, row.shape[0] - taps)
    y = Gather.apply(y, spaced.slots - taps)[None].to(x.dtype)
    return y, row[spaced.ends].unflatten(0, (num, taps)) if output_final_state else None


def _filter(padded: Tensor, weight_DW: Tensor, tokens: int) -> Tensor:
    """padded [..., W - 1 + tokens, D] -> SiLU of the W-tap sum at the last `tokens` positions."""
    taps = weight_DW.shape[1]
    y = padded[..., :tokens, :] * weight_DW[:, 0]
    for j in range(1, taps):
        y = torch.addcmul(y, padded[..., j : j + tokens, :], weight_DW[:, j])
    return F.silu(y)
