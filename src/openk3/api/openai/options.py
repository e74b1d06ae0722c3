"""Settings of a server (importable without the serve extra, so that `--help` shows them)."""

from dataclasses import dataclass
from math import isfinite
from urllib.parse import urlsplit

from openk3.errors import ConfigError


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

    def __post_init__(self) -> None:
        """Raises ConfigError on a value that no server could run with."""
        for name in ("max_body_bytes", "max_requests", "max_image_pixels", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_images < 0:
            raise ConfigError(f"max_images must be at least 0, not {self.max_images}")
        for name in ("body_timeout_s", "queue_timeout_s", "time_limit_s", "stall_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be finite and above 0, not {getattr(self, name)}")
        if not (isfinite(self.grace_s) and self.grace_s >= 0):
            raise ConfigError(f"grace_s must be finite and at least 0, not {self.grace_s}")
        for origin in self.allow_origins:
            if origin != "*" and origin != _origin(origin):
                raise ConfigError(
                    f"allow_origins: {origin!r} is no origin; browsers send them as "
                    "https://name or http://name:port"
                )


def _origin(text: str) -> str | None:
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme and parts.netloc else None
