"""What the routes share: the engine, the model's way with text, limits, counts."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from openk3._io import Clock, SystemClock
from openk3.api.auth import ApiKeys
from openk3.api.openai.errors import ApiError, bad
from openk3.api.openai.metrics import Metrics
from openk3.api.openai.options import ServeOptions
from openk3.engine.service import AsyncEngine
from openk3.text.image import ImageProcessor
from openk3.text.special_tokens import END_OF_MSG, EOS
from openk3.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openk3.engine.grammar import Grammars


@dataclass
class Serving:
    """The state of a server."""

    service: AsyncEngine
    tokenizer: Tokenizer
    model: str
    """The name that `/v1/models` shows and requests may give."""
    vocab_size: int
    """Of the logits."""
    keys: ApiKeys = field(default_factory=ApiKeys)
    processor: ImageProcessor | None = None
    """None for a model that sees no pictures."""
    options: ServeOptions = field(default_factory=ServeOptions)
    clock: Clock = field(default_factory=SystemClock)
    new_id: Callable[[], str] = lambda: secrets.token_hex(12)

    @cached_property
    def metrics(self) -> Metrics:
        """Prometheus counters."""
        return Metrics(self.model)

    @cached_property
    def grammars(self) -> "Grammars":
        """The grammar compiler. Raises BackendError without xgrammar."""
        from openk3.engine.grammar import Grammars

        return Grammars(self.tokenizer, self.vocab_size)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; a vocabulary for plain text may lack that of messages."""
        known = self.tokenizer.special_tokens
        return tuple(known[name] for name in (END_OF_MSG, EOS) if name in known)

    @property
    def max_context(self) -> int:
        """The longest sequence the engine can hold."""
        return self.service.stats().max_context

    def require_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name not in (None, self.model):
            raise ApiError(
                404, f"model {name!r:.100} does not exist; this server has {self.model!r}",
                "model_not_found", "model",
            )  # fmt: skip

    def require_ids(self, ids: Iterable[int], param: str) -> None:
        """Raises ApiError 400 for a number that is no token id."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise bad(f"{token_id} is no token id below {self.vocab_size}", param)

    def require_room(self, num_tokens: int, param: str = "messages", lead: str = "") -> None:
        """Raises ApiError 400 for a prompt that leaves no room for an answer.

        lead: before the number, as "at least ".
        """
        if num_tokens >= self.max_context:
            raise ApiError(
                400,
                f"the prompt has {lead}{num_tokens} tokens; the context holds {self.max_context}, "
                "the answer included",
                "context_length_exceeded",
                param,
            )
