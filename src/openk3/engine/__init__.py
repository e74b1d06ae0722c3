"""The serving engine: a pool of pages for two kinds of memory, a scheduler, and a runner."""

from typing import TYPE_CHECKING

from openk3.engine.types import EngineConfig, Output, Request, SamplingParams

if TYPE_CHECKING:
    from openk3.engine.engine import Engine
    from openk3.engine.llm import LLM

__all__ = ["LLM", "Engine", "EngineConfig", "Output", "Request", "SamplingParams"]


def __getattr__(name: str) -> object:
    """`Engine` and `LLM` need torch, and are imported when asked for."""
    if name == "Engine":
        from openk3.engine.engine import Engine

        return Engine
    if name == "LLM":
        from openk3.engine.llm import LLM

        return LLM
    raise AttributeError(name)
