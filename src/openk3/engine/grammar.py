"""Output that must have a form: JSON of a schema, or calls of declared tools (by xgrammar).

A completion is one structural tag from its first token on: the think channel is free, then come the
channels. K3's markers are matched as token ids and never as text, so neither an argument nor an
answer can spell one, and every completion parses back into what the grammar meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from openk3.engine.grammar_formats import Formats, guarded, sequence
from openk3.errors import BackendError, InputError
from openk3.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from openk3.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

CACHE_BYTES = 256 << 20


class Grammars:
    """Compiles constraints for one vocabulary and keeps what it compiled. Threads may share it.

    vocab_size: of the model's logits. Raises BackendError where xgrammar is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise BackendError(
                "constrained output needs xgrammar: pip install 'openk3[serve]'"
            ) from None
        ids = {name: tokenizer.special_id(name) for name in (OPEN, CLOSE, SEP, END_OF_MSG)}
        self._formats = Formats(ids, xgrammar)
        self._info = xgrammar.TokenizerInfo(
            _vocabulary(tokenizer, vocab_size, ids),
            vocab_size=vocab_size,
            stop_token_ids=[ids[END_OF_MSG]],
        )
        self._compiler = xgrammar.GrammarCompiler(
            self._info, max_threads=1, cache_limit_bytes=CACHE_BYTES
        )

    def compile(
        self,
        *,
        thinking: bool,
        schema: Mapping[str, Any] | bool | None = None,
        strict: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        calls: Literal["none", "auto", "required"] = "none",
        parallel: bool = True,
    ) -> Grammar:
        """What a completion must look like.

        Args:
            thinking: it begins inside the think channel, else inside the response.
            schema: of the answer, a compact JSON text; None leaves the answer free.
            strict: objects have no properties but those that their schema names.
            tools: OpenAI-style declarations of what may be called.
            calls: whether the answer may, or must, be followed by calls.
            parallel: more than one call is allowed.

        Raises:
            InputError: a schema that no grammar can be made of; the message says why.
        """
        make = self._formats
        elements = []
        if thinking:
            elements += [make.free(), *make.close("think"), *make.open("response")]
        if schema is None:
            elements.append(make.free())
        else:
            elements.append(make.json(schema, "response_format", strict=strict))
        elements += make.close("response")
        if calls != "none" and tools:
            section = make.calls(tools, parallel)
            if calls == "auto":
                section = {"type": "optional", "content": section}
            elements.append(section)
        elements += make.close("message")
        tag = {"type": "structural_tag", "format": sequence(elements)}
        compiled = guarded(self._compiler.compile_structural_tag, json.dumps(tag))
        return Grammar(compiled, self._info.vocab_size)


class Grammar:
    """A compiled form that any number of requests may follow."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size

    def start(self) -> Follower:
        """A constraint for one request."""
        return Follower(self._compiled, self._vocab_size)


class Follower:
    """The `Constraint` of one request (`openk3.engine.types`)."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    def allowed(self) -> torch.Tensor | None:
        """bool [vocab] of the ids that may come next; None once the message has ended."""
        import torch

        if self._matcher.is_terminated():
            return None
        self._matcher.fill_next_token_bitmask(self._words)
        bits = self._words[0, :, None] >> torch.arange(32, dtype=torch.int32)
        return (bits & 1).flatten()[: self._vocab_size].bool()

    def accept(self, token_id: int) -> None:
        """Raises InputError for an id that was not allowed."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token_id):
            raise InputError(f"token {token_id} does not fit the grammar")


def _vocabulary(tokenizer: Tokenizer, size: int, markers: Mapping[str, int]) -> list[bytes]:
    """The bytes of each id; markers get bytes that no text has, other special tokens none."""
    vocabulary = []
    for token_id in range(min(size, tokenizer.vocab_size)):
        name = tokenizer.special_name(token_id)
        if name is None:
            vocabulary.append(_bytes(tokenizer, token_id))
        else:  # an empty token is never allowed
            vocabulary.append(b"\xff\xff" + name.encode() if name in markers else b"")
    return vocabulary


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except InputError:  # a hole in the vocabulary
        return b""
