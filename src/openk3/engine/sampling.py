"""Choosing tokens: every position of every row by its own parameters and its own randomness.

The noise of a position depends on the request's seed, the position and the token id, on nothing
else: neither on the batch nor on preemption. So a draft is verified by choosing a token at its
position as always and comparing: what comes out with drafts is what comes out without.

Legend: R rows (positions to sample), V vocabulary, K candidates.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.engine.filters import candidates, is_filtered
from openk3.engine.logprobs import Logprobs, start_logprobs
from openk3.engine.transfer import on_device, to_host
from openk3.engine.types import Request, TokenLogprobs


@dataclass(frozen=True)
class Row:
    """One position to choose a token for."""

    request: Request
    position: int
    """Tokens before it."""
    output_ids: Sequence[int]
    """Those of them that were generated."""
    constrained: bool = False
    """Whether the request's grammar applies: it knows the state behind `output_ids` only."""


@dataclass(frozen=True)
class Choice:
    """What a row chose; error is set when its logits were not finite."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Chosen:
    """Tokens that a device chooses while the host goes on; `wait` for what they are."""

    def __init__(self, ids: Tensor, finite: Tensor, logprobs: Logprobs | None) -> None:
        self.ids = ids
        """[R] int64, on the device"""
        self._logprobs = logprobs
        parts = [ids, finite.to(ids.dtype)]
        self._numbers = to_host(torch.stack(parts))
        self._landed = torch.cuda.Event() if ids.is_cuda else None
        if self._landed is not None:
            self._landed.record()

    def wait(self) -> list[Choice]:
        """One for each row."""
        if self._landed is not None:
            self._landed.synchronize()
        ids, good = self._numbers.tolist()
        logprobs = self._logprobs.read() if self._logprobs else [None] * len(ids)
        return [
            Choice(token, logprob)
            if fine
            else Choice(token, error="the model's logits are not finite for this request")
            for token, fine, logprob in zip(ids, good, logprobs, strict=True)
        ]


def choose(logits_RV: Tensor, rows: Sequence[Row], seed: int) -> list[Choice]:
    """One token per row. logits [R, V] of any float dtype; `seed` is for requests without one."""
    return start_choosing(logits_RV, rows, seed).wait()


def start_choosing(logits_RV: Tensor, rows: Sequence[Row], seed: int) -> Chosen:
    """`choose`, without waiting for a device."""
    raw = logits_RV.float()
    finite = _peak(raw).isfinite()
    chosen = _chosen(_edited(raw, rows), rows, seed)
    wanted = [row.request.params.logprobs for row in rows]
    return Chosen(chosen, finite, start_logprobs(raw, chosen, wanted))


def _peak(raw: Tensor) -> Tensor:
    """[R] the largest logits, NaN if one is. On a CPU by numpy: torch waits for its threads."""
    return torch.from_numpy(raw.numpy().max(-1)) if raw.device.type == "cpu" else raw.amax(-1)


def _likeliest(scores: Tensor) -> Tensor:
    """[R] int64; NaN counts as the largest. On a CPU by numpy, whose argmax is ten times faster."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _edited(raw: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits after biases, penalties and grammars."""
    edits = [i for i, row in enumerate(rows) if _is_edited(row)]
    if not edits:
        return raw
    scores = raw.clone()
    for i in edits:
        _edit(scores[i], rows[i])
    return scores


def _is_edited(row: Row) -> bool:
    p = row.request.params
    return bool(p.penalises or p.logit_bias or (row.constrained and row.request.constraint))


def _edit(scores_V: Tensor, row: Row) -> None:
    """Bias, penalise and mask one row in place."""
    p, device = row.request.params, scores_V.device
    if p.repetition_penalty != 1:
        seen = on_device(sorted({*row.request.prompt_ids, *row.output_ids}), device)
        old = scores_V[seen]
        scale = p.repetition_penalty
        scores_V[seen] = torch.where(old > 0, old / scale, old * scale)
    if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
        counts = Counter(row.output_ids)
        ids = on_device(list(counts), device)
        times = on_device(list(counts.values()), device, torch.float32)
        scores_V[ids] -= p.presence_penalty + p.frequency_penalty * times
    if p.logit_bias:
        ids = on_device(list(p.logit_bias), device)
        scores_V[ids] += on_device(list(p.logit_bias.values()), device, torch.float32)
    if row.constrained and row.request.constraint is not None:
        allowed = row.request.constraint.allowed()
        if allowed is not None:
            scores_V.masked_fill_(~allowed.to(device), -torch.inf)


def _chosen(scores: Tensor, rows: Sequence[Row], seed: int) -> Tensor:
    """[R] int64: the likeliest token, or a sample for rows with a temperature."""
    params = [row.request.params for row in rows]
    kinds = [is_filtered(p) if p.temperature > 0 else None for p in params]
    chosen = _likeliest(scores) if None in kinds else scores.new_empty(len(rows), dtype=torch.int64)
    for filtered in (False, True):
        some = [i for i, kind in enumerate(kinds) if kind is filtered]
        if len(some) == len(rows):
            return _sample(scores, rows, seed, filtered)
        if some:
            at = on_device(some, scores.device)
            picked = _sample(scores[at], [rows[i] for i in some], seed, filtered)
            chosen = chosen.index_copy(0, at, picked)
    return chosen


def _sample(scores: Tensor, rows: Sequence[Row], seed: int, filtered: bool) -> Tensor:
    """[R] int64: ids that are the largest with noise (the Gumbel trick)."""
    params, device = [row.request.params for row in rows], scores.device
    heat = on_device([[p.temperature] for p in params], device, torch.float32)
    heat = heat.clamp_min(torch.finfo(torch.float32).tiny)  # 0 / 0 would be no number
    # the largest is moved to 0 first: no temperature, however small, then makes an infinity
    scores = (scores - scores.amax(-1, keepdim=True)) / heat
    ids = torch.arange(scores.shape[1], device=device)[None]
    if filtered:
        ids, scores = candidates(scores, params)
    noise = _uniform([_key(row, seed) for row in rows], ids)
    best = _likeliest(scores - (-noise.log()).log())
    return ids.expand_as(scores).gather(-1, best[:, None])[:, 0]


def _key(row: Row, seed: int) -> tuple[int, int]:
    """Two 32-bit words for a position of a request."""
    own = row.request.params.seed
    text = f"{own}" if own is not None else f"{seed}/{row.request.id}"
    word = hashlib.blake2b(f"{text}@{row.position}".encode(), digest_size=8).digest()
    return int.from_bytes(word[:4], "little"), int.from_bytes(word[4:], "little")


def _uniform(keys: Sequence[tuple[int, int]], ids: Tensor) -> Tensor:
    """Numbers inside (0, 1) for ids [R or 1, K], a function of the row's key and the id alone."""
    low = on_device([[_signed(key[0])] for key in keys], ids.device, torch.int32)
    high = on_device([[_signed(key[1])] for key in keys], ids.device, torch.int32)
    x = _mix(ids.int() ^ low)
    x = _mix(x + high)
    return (((x >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32, which wraps) that spreads every bit."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (word >> 31 << 32)
