"""Choosing tokens: every position of every row by its own parameters and its own randomness.

The noise of a position depends on the request's seed, the position and the token id, on nothing
else: neither on the batch nor on preemption. So a draft is verified by choosing a token at its
position as always and comparing: what comes out with drafts is what comes out without.

Legend: R rows (positions to sample), V vocabulary.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.engine.types import Request, SamplingParams, TokenLogprobs

MASK = 0xFFFFFFFF


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

    def __init__(self, ids: Tensor, finite: Tensor, logprobs: "_Logprobs | None") -> None:
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


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of host numbers; the host does not wait until a GPU has it."""
    pinned = device.type == "cuda"
    made = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return made.to(device, non_blocking=True) if pinned else made


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, which a GPU's is only once an event behind it has come."""
    return x.to("cpu", non_blocking=True) if x.is_cuda else x


def choose(logits_RV: Tensor, rows: Sequence[Row], seed: int) -> list[Choice]:
    """One token per row. logits [R, V] of any float dtype; `seed` is for requests without one."""
    return start_choosing(logits_RV, rows, seed).wait()


def start_choosing(logits_RV: Tensor, rows: Sequence[Row], seed: int) -> Chosen:
    """`choose`, without waiting for a device."""
    raw = logits_RV.float()
    finite = _peak(raw).isfinite()
    scores = _edited(raw, rows)
    noisy = [i for i, row in enumerate(rows) if row.request.params.temperature > 0]
    if noisy:
        scores = _with_noise(scores, noisy, rows, seed)
    chosen = _likeliest(scores)
    return Chosen(chosen, finite, _logprobs(raw, chosen, rows))


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
    penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
    return bool(penalised or p.logit_bias or (row.constrained and row.request.constraint))


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


def _with_noise(scores: Tensor, noisy: list[int], rows: Sequence[Row], seed: int) -> Tensor:
    """Scores whose largest is a sample, for the rows `noisy`: the Gumbel trick."""
    params = [rows[i].request.params for i in noisy]
    every = len(noisy) == len(rows)
    some = scores if every else scores[on_device(noisy, scores.device)]
    heat = on_device([[p.temperature] for p in params], scores.device, torch.float32)
    # the largest is moved to 0 first: no temperature, however small, then makes an infinity
    some = (some - some.amax(-1, keepdim=True)) / heat
    some = _filtered(some, params)
    keys = [_key(rows[i], seed) for i in noisy]
    some = some - (-_uniform(keys, some.shape[1], some.device).log()).log()
    return some if every else scores.index_copy(0, on_device(noisy, scores.device), some)


def _filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-inf where top-k, top-p or min-p leaves a token out. The likeliest always stays."""
    if all(p.top_k == 0 and p.top_p == 1 and p.min_p == 0 for p in params):
        return scores
    device, vocab = scores.device, scores.shape[1]
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    top_k = on_device([[p.top_k or vocab] for p in params], device)
    top_p = on_device([[p.top_p] for p in params], device, torch.float32)
    min_p = on_device([[p.min_p] for p in params], device, torch.float32)
    out = torch.arange(vocab, device=device) >= top_k
    out |= (probs.cumsum(-1) - probs >= top_p) & (top_p < 1)
    out |= probs < min_p * probs[:, :1]
    out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(out).scatter(-1, index, out), -torch.inf)


def _key(row: Row, seed: int) -> tuple[int, int]:
    """Two 32-bit words for a position of a request."""
    own = row.request.params.seed
    text = f"{own}" if own is not None else f"{seed}/{row.request.id}"
    word = hashlib.blake2b(f"{text}@{row.position}".encode(), digest_size=8).digest()
    return int.from_bytes(word[:4], "little"), int.from_bytes(word[4:], "little")


def _uniform(keys: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> Tensor:
    """[R, V] numbers inside (0, 1), a function of the row's key and the token id alone."""
    low = on_device([[key[0]] for key in keys], device)
    high = on_device([[key[1]] for key in keys], device)
    x = _mix(torch.arange(vocab, device=device) ^ low)
    x = _mix((x + high) & MASK)
    return ((x >> 9).float() + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that spreads every bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


@dataclass
class _Logprobs:
    """The model's log-probabilities on their way to the host, for the rows that ask for them."""

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


def _logprobs(raw: Tensor, chosen: Tensor, rows: Sequence[Row]) -> _Logprobs | None:
    return _of(raw, chosen, [row.request.params.logprobs for row in rows])


def _of(raw: Tensor, chosen: Tensor, wanted: list[int | None]) -> _Logprobs | None:
    most = max((w for w in wanted if w is not None), default=None)
    if most is None:
        return None
    logp = raw.log_softmax(-1)
    own = logp.gather(-1, chosen[:, None])[:, 0]
    values, ids = logp.topk(min(most, raw.shape[1]))
    return _Logprobs(to_host(own), to_host(values), to_host(ids), wanted)


SCORED_AT_ONCE = 256
"""Positions of a prompt whose logits are held together."""


class Scores:
    """Log-probabilities of given tokens, on their way to the host."""

    def __init__(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor], ids: Sequence[int], top: int
    ):
        """head maps hidden states [R, d] to logits [R, V]; ids: the token behind each of them."""
        targets = on_device(list(ids), hidden.device, torch.int64)
        self._parts: list[_Logprobs | None] = []
        for first in range(0, len(ids), SCORED_AT_ONCE):
            here = slice(first, first + SCORED_AT_ONCE)
            own = targets[here]
            self._parts.append(_of(head(hidden[here]).float(), own, [top] * len(own)))
        self._landed = torch.cuda.Event() if hidden.is_cuda else None
        if self._landed is not None:
            self._landed.record()

    def wait(self) -> tuple[TokenLogprobs, ...]:
        """One for each id."""
        if self._landed is not None:
            self._landed.synchronize()
        found = (one for part in self._parts if part for one in part.read())
        return tuple(one for one in found if one is not None)
