"""What the verbs that let a model speak share: options, opening the model, what it is asked for."""

import gc
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.engine.types import EngineConfig, SamplingParams
from openk3.obs.progress import Progress

if TYPE_CHECKING:
    from openk3.checkpoint.experts import CacheStats
    from openk3.engine.llm import LLM

ALONE = EngineConfig(hash_block=16, max_running=1, compiled="later")
"""For one reader, who neither waits for a compiler nor wants a turn computed that was before."""


def add_options(parser: ArgumentParser, max_tokens: int | None) -> None:
    """The model and how it speaks. max_tokens None leaves that default to the verb."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder or a model folder")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest")
    parser.add_argument("--top-p", type=float, default=0.95, help="keep this much probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--expert-cache-gb", type=float, metavar="GB",
                        help="leave the experts of a model folder on disk, behind a cache of so "
                        "many 10^9 bytes, so that the model may be larger than memory")  # fmt: skip


def open_llm(options: Namespace) -> "LLM":
    """The model that `options` name, with a progress bar for folders in the published format."""
    gc.disable()  # looking through what stays, again and again, takes a tenth of the start
    try:
        return _open(options)
    finally:
        gc.freeze()
        gc.enable()


def _open(options: Namespace) -> "LLM":
    from openk3.engine.llm import LLM

    path = options.model
    opening = partial(
        LLM,
        path,
        ALONE,
        device=options.device,
        dtype=options.dtype,
        expert_cache_gb=options.expert_cache_gb,
    )
    if size := sum(file.stat().st_size for file in path.glob("*.safetensors")):
        with Progress(size, "loading", "B") as bar:
            return opening(progress=bar.advance)
    return opening()


def stream_stats(llm: "LLM") -> "CacheStats | None":
    """Counts of the expert cache, if experts are streamed."""
    from openk3.checkpoint import experts

    return experts.stream_stats(llm.model) if llm.model else None


def sampling(options: Namespace) -> SamplingParams:
    """How `options` want tokens chosen. Raises InputError naming one that cannot be."""
    limit = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    return SamplingParams(
        temperature=options.temperature, top_p=options.top_p, seed=options.seed, **limit
    )
