"""What the routes share: the engine, the model's way with text, limits, counts."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from openk3._io import Clock, SystemClock
from openk3.api.auth import ApiKeys
from openk3.api.openai.errors import ApiError
from openk3.api.openai.metrics import Metrics
from openk3.engine.service import AsyncEngine
from openk3.text.image import ImageProcessor
from openk3.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openk3.engine.grammar import Grammars


@dataclass(frozen=True)
class ServeOptions:
    """Limits of a server and what it accepts."""

    max_body_bytes: int = 32 << 20
    """Of one request; pictures come inside."""
    max_requests: int = 1024
    """Open at once; beyond it callers get 503."""
    max_image_pixels: int = 1 << 25
    """Of one request's pictures together."""
    max_images: int = 64
    """Of one request."""
    body_timeout_s: float = 60.0
    """Until a request's body is there; then 408."""
    queue_timeout_s: float = 600.0
    """Until the first token; then 503."""
    time_limit_s: float = 3600.0
    """Of one request; then it ends with what it has and finish_reason "abort"."""
    stall_timeout_s: float = 60.0
    """A reader that takes nothing for so long is cut off."""
    grace_s: float = 30.0
    """What running requests get at shutdown."""
    default_max_tokens: int = 131_072
    """New tokens when a caller names no number; the context ends an answer earlier."""
    allow_origins: tuple[str, ...] = ()
    """Pages of other origins that may call from a browser (CORS); none by default."""
    official_sampling: bool = False
    """Refuse what Moonshot's own service refuses: temperature other than 1, top_p other than
    0.95, n other than 1, penalties."""


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
    aliases: tuple[str, ...] = ()
    hash_block: int = 0
    """The least prompt that can be reused; 0 if not known."""
    clock: Clock = field(default_factory=SystemClock)
    new_id: Callable[[], str] = lambda: secrets.token_hex(12)

    @cached_property
    def metrics(self) -> Metrics:
        """Prometheus counters."""
        return Metrics(self.model, self.hash_block)

    @cached_property
    def grammars(self) -> "Grammars":
        """The grammar compiler. Raises BackendError without xgrammar."""
        from openk3.engine.grammar import Grammars

        return Grammars(self.tokenizer, self.vocab_size)

    @property
    def max_context(self) -> int:
        """The longest sequence the engine can hold."""
        return self.service.stats().max_context

    def require_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name is not None and name not in (self.model, *self.aliases):
            raise ApiError(
                404, f"model {name!r:.100} does not exist; this server has {self.model!r}",
                "model_not_found", "model",
            )  # fmt: skip

    def require_room(self, num_tokens: int) -> None:
        """Raises ApiError 400 for a prompt that leaves no room for an answer."""
        if num_tokens >= self.max_context:
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens; the context holds {self.max_context}, the "
                "answer included",
                "context_length_exceeded",
                "messages",
            )
