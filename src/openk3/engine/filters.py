"""Top-k, top-p and min-p: which tokens may be chosen at all.

Of equal scores the smaller id is likelier. What a row keeps depends on that row alone. On a CPU the
likeliest tokens are looked at first, and more of them until no row needs more: ordering a whole
vocabulary takes as long as a small model's step. A GPU orders it all rather than ask the host.

Legend: R rows, V vocabulary, K candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from openk3.engine.transfer import on_device
from openk3.engine.types import SamplingParams

FIRST_CANDIDATES, MORE_CANDIDATES = 512, 8
"""Tokens that are looked at first, and by what their number grows."""


def is_filtered(params: SamplingParams) -> bool:
    """Whether any filter is on."""
    return params.top_k != 0 or params.top_p != 1 or params.min_p != 0


def candidates(scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Scores [R, V] -> (ids [R or 1, K] in rising order, their scores [R, K]).

    Scores that a filter leaves out are -inf; it also leaves out every id that is not returned.
    """
    vocab = scores.shape[1]
    probs = scores.softmax(-1)
    count = vocab if scores.is_cuda else FIRST_CANDIDATES
    while 4 * count <= vocab:
        ordered, ids = scores.topk(count)
        kept = _num_kept(probs.gather(-1, ids), params)
        least, last = ordered.gather(-1, kept - 1), ordered[:, -1:]
        if bool(((least > last) | last.isneginf()).all()):
            ids = ids.sort(-1).values
            return ids, _cut(scores.gather(-1, ids), least, kept)
        count *= MORE_CANDIDATES
    kept = _num_kept(_falling(probs), params)
    least = _falling(scores).gather(-1, kept - 1)
    return torch.arange(vocab, device=scores.device)[None], _cut(scores, least, kept)


def _falling(x: Tensor) -> Tensor:
    """Rows in falling order. On a CPU by numpy, which is four times faster."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy())).flip(-1)
    return x.sort(descending=True).values


def _cut(scores: Tensor, least: Tensor, kept: Tensor) -> Tensor:
    """Scores down to `least` [R, 1], `kept` [R, 1] of them (the first of equals); others -inf."""
    above, equal = scores > least, scores == least
    room = kept - above.sum(-1, keepdim=True)
    return scores.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -torch.inf)


def _num_kept(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, 1] how many of the tokens with these falling probabilities pass; the first always."""
    device, count = probs.device, probs.shape[1]
    top_k = on_device([[min(p.top_k or count, count)] for p in params], device)
    top_p = on_device([[p.top_p] for p in params], device, torch.float32)
    min_p = on_device([[p.min_p] for p in params], device, torch.float32)
    passes = torch.arange(count, device=device) < top_k
    passes &= (probs.cumsum(-1) - probs < top_p) | (top_p == 1)
    passes &= probs >= min_p * probs[:, :1]
    passes[:, 0] = True
    return passes.long().cumprod(-1).sum(-1, keepdim=True)
