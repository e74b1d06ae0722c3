"""The model's own log-probabilities, of tokens that were chosen or given.

Legend: R rows (positions), V vocabulary, K alternatives, d model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.engine.transfer import on_device, to_host
from openk3.engine.types import TokenLogprobs

SCORED_AT_ONCE = 256
"""Positions of a prompt whose logits are held together."""


@dataclass
class Logprobs:
    """On their way to the host, for the rows that ask for them."""

    own: Tensor
    """[R]"""
    values: Tensor
    """[R, K], largest first"""
    ids: Tensor
    """[R, K]"""
    wanted: list[int | None]

    def read(self) -> list[TokenLogprobs | None]:
        """Once they have come."""
        rows = zip(
            self.wanted, *(x.tolist() for x in (self.own, self.values, self.ids)), strict=True
        )
        return [
            None
            if count is None
            else TokenLogprobs(own, tuple(zip(ids[:count], values[:count], strict=True)))
            for count, own, values, ids in rows
        ]


def start_logprobs(raw: Tensor, ids: Tensor, wanted: list[int | None]) -> Logprobs | None:
    """Of ids [R] under logits [R, V] float32; wanted: each row's alternatives, None for nothing."""
    most = max((w for w in wanted if w is not None), default=None)
    if most is None:
        return None
    logp = raw.log_softmax(-1)
    own = logp.gather(-1, ids[:, None])[:, 0]
    values, likeliest = logp.topk(min(most, raw.shape[1]))
    return Logprobs(to_host(own), to_host(values), to_host(likeliest), wanted)


class Scores:
    """Log-probabilities of given tokens, on their way to the host."""

    def __init__(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor], ids: Sequence[int], top: int
    ):
        """head maps hidden states [R, d] to logits [R, V]; ids: the token behind each of them."""
        targets = on_device(ids, hidden.device)
        self._parts: list[Logprobs | None] = []
        for first in range(0, len(ids), SCORED_AT_ONCE):
            here = slice(first, first + SCORED_AT_ONCE)
            own = targets[here]
            self._parts.append(start_logprobs(head(hidden[here]).float(), own, [top] * len(own)))
        self._landed = torch.cuda.Event() if hidden.is_cuda else None
        if self._landed is not None:
            self._landed.record()

    def wait(self) -> tuple[TokenLogprobs, ...]:
        """One for each id."""
        if self._landed is not None:
            self._landed.synchronize()
        found = (one for part in self._parts if part for one in part.read())
        return tuple(one for one in found if one is not None)
