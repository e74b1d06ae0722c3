"""Quantile Balancing (K3 report §2.3, eq. 14, app. C and D).

Each expert's next bias is the k/n-quantile, over the tokens of a step, of r = cutoff - score: the
bias at which exactly a share k/n of the tokens would choose it. The exact estimator sorts; the
histogram estimator counts r in bins, so that counts of any partition of the tokens add up to the
same integers.

Legend: T tokens, E experts.
"""

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_tensor
from openk3.ops.triton_support import triton_runs

NUM_BINS = 1000


def exact_bias(scores: Tensor, cutoff: Tensor, top_k: int) -> Tensor:
    """The mean-centred bias [E] from all tokens at once, at least one. scores [T, E], cutoff [T].

    Raises InputError.
    """
    check_tensor("cutoff", cutoff, scores.shape[:1], scores.device)
    if not scores.shape[0]:
        raise InputError("exact_bias needs at least one token")
    tokens, num_experts = scores.shape
    at = top_k / num_experts * (tokens - 1)
    least = min(int(at) + 2, tokens)  # as many of each expert's [E, T] margins are ever looked at
    margins = (cutoff - scores.T).topk(least, dim=1, largest=False).values
    bias = torch.lerp(margins[:, int(at)], margins[:, -1], at - int(at))
    return bias - bias.mean()


def count_margins(
    scores: Tensor, cutoff: Tensor, bias: Tensor, valid: Tensor | None = None
) -> Tensor:
    """Histogram of r = cutoff - score per expert, int64 [E, 1000], over [min(bias)-1, max(bias)+1].

    scores [T, E], cutoff [T], bias [E] the bias the cutoffs were made with, valid [T] bool masks
    padding. Counts of several parts of a step simply add. On a GPU nothing waits for the device.
    """
    tokens, num_experts = scores.shape
    check_tensor("cutoff", cutoff, (tokens,), scores.device)
    check_tensor("bias", bias, (num_experts,), scores.device)
    if valid is not None:
        check_tensor("valid", valid, (tokens,), scores.device, kind="bool")
    if scores.is_cuda and triton_runs(scores.device)[0]:
        from openk3.ops.moe.triton_router import count_margins_triton

        return count_margins_triton(scores, cutoff, bias, valid)
    if valid is not None:
        scores, cutoff = scores[valid], cutoff[valid]
    low, width = bin_range(bias)
    bins = ((cutoff[:, None] - scores - low) / width).long().clamp_(0, NUM_BINS - 1)
    flat = bins + torch.arange(num_experts, device=bins.device) * NUM_BINS
    counts = torch.bincount(flat.view(-1), minlength=num_experts * NUM_BINS)
    return counts.view(num_experts, NUM_BINS)


def histogram_bias(counts: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The next mean-centred bias [E] float32 from the step's counts [E, 1000] (app. D).

    Linear interpolation inside the bin that holds the quantile; off by at most one bin. With no
    token counted the bias stays as it is.
    """
    check_tensor("counts", counts, (bias.shape[0], NUM_BINS), bias.device, kind="integer")
    total = counts.sum(1, keepdim=True)
    if int(total.max()) == 0:
        return bias
    low, width = bin_range(bias)
    target = total.double() * (top_k / counts.shape[0])
    below = counts.cumsum(1)
    index = (below < target).sum(1, keepdim=True).clamp_(max=NUM_BINS - 1)
    inside = counts.gather(1, index).clamp_(min=1)
    before = below.gather(1, index) - counts.gather(1, index)
    fraction = ((target - before) / inside).clamp_(0, 1)
    quantile = low.double() + (index + fraction) * width.double()
    centred = quantile - quantile.mean()
    return centred.squeeze(1).float()


def bin_range(bias: Tensor) -> tuple[Tensor, Tensor]:
    """(lower edge, bin width): scores lie in (0, 1), so r lies in [min(bias)-1, max(bias)+1]."""
    low = bias.min() - 1
    return low, (bias.max() + 1 - low) / NUM_BINS


def max_violation(load: Tensor) -> float:
    """max(load) / mean(load) - 1 of the tokens per expert [E]; 0 is perfect balance."""
    load = load.double()
    return float(load.max() / load.mean().clamp(min=1e-12) - 1)
