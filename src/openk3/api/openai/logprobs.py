"""Log-probabilities in the two shapes that OpenAI's endpoints have."""

from collections.abc import Iterable
from typing import Any

from openk3.engine.types import TokenLogprobs
from openk3.errors import InputError
from openk3.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def clipped(value: float) -> float:
    """A log-probability as JSON can carry it."""
    return max(value, FLOOR) if value == value else FLOOR


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except InputError:  # a logit beyond the vocabulary
        return b""


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = _bytes(tokenizer, token_id)
    text = raw.decode("utf-8", "replace")
    return {"token": text, "logprob": clipped(logprob), "bytes": list(raw)}


def chat(
    tokenizer: Tokenizer, ids: Iterable[int], found: Iterable[TokenLogprobs]
) -> list[dict[str, Any]]:
    """Entries of `choices[].logprobs.content`, one for each generated token, thoughts included."""
    return [
        {
            **_token(tokenizer, token_id, one.chosen),
            "top_logprobs": [_token(tokenizer, i, value) for i, value in one.top],
        }
        for token_id, one in zip(ids, found, strict=True)
    ]


def legacy(
    tokenizer: Tokenizer, ids: Iterable[int], found: Iterable[TokenLogprobs | None], offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions; `offset` is where the text of the first begins.

    A prompt's first token has no probability: null."""
    tokens, offsets = [], []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, one in zip(ids, found, strict=True):
        text = _bytes(tokenizer, token_id).decode("utf-8", "replace")
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if one is None else clipped(one.chosen))
        if one is None:
            tops.append(None)
            continue
        named = {_bytes(tokenizer, i).decode("utf-8", "replace"): clipped(v) for i, v in one.top}
        tops.append(named)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops,
            "text_offset": offsets}  # fmt: skip
