"""Short causal depthwise convolution with SiLU, on q, k and v of KDA (K3 report §2.1.1).

Legend: B batch, T tokens, D channels, W taps, N sequences.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.packed import Gather, Scatter, sequence_lengths, spaced_layout
from openk3.ops.precision import wide_dtype


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """SiLU(y), y_t = sum_j weight[j] x_{t-W+1+j}, in float32, cast back once.

    x [B, T, D]; weight [D, 1, W] or [D, W] float32; initial_state [N, W, D], the last W inputs
    before each sequence (zeros if None; the oldest of the W is never read); cu_seqlens [N + 1] for
    a packed row (then B = 1). Returns (y [B, T, D], final state [N, W, D] in x's dtype or None).
    """
    batch, tokens, dim = x.shape
    taps = weight.shape[-1]
    if weight.numel() != dim * taps:
        raise InputError(f"conv weight {list(weight.shape)} does not fit {dim} channels")
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
    if initial_state.shape != (num, taps, dim):
        raise InputError(
            f"conv initial_state must be [{num}, {taps}, {dim}], not {list(initial_state.shape)}"
        )
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
