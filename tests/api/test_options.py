"""Limits that no server could run with are told at the start."""

import pytest

from openk3.api.openai.options import ServeOptions
from openk3.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        *((name, 0, 1) for name in ("max_body_bytes", "max_requests", "max_image_pixels",
                                    "default_max_tokens")),
        *((name, wrong, 0.5) for wrong in (0.0, -1.0, NAN, INF)
          for name in ("body_timeout_s", "queue_timeout_s", "time_limit_s", "stall_timeout_s")),
        ("max_images", -1, 0),
        *(("grace_s", wrong, 0.0) for wrong in (-1.0, NAN, INF)),
        *(("allow_origins", (wrong,), ("https://a.example", "http://localhost:3000", "*"))
          for wrong in ("https://a.example/", "a.example", "localhost:3000", "http://", "")),
    ],
)  # fmt: skip
def test_a_limit_that_cannot_work_is_named(name, wrong, right):
    ServeOptions(**{name: right})
    with pytest.raises(ConfigError, match=name):
        ServeOptions(**{name: wrong})
