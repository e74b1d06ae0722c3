"""A load generator for OpenAI-compatible servers: requests at a rate, or replayed from a trace.

What it reports has the names of vLLM's serving benchmark, so that results stand side by side.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx

from openk3.errors import DataError

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Job:
    """One request to send."""

    at_s: float
    """After the start."""
    prompt: list[int] | str
    max_tokens: int


@dataclass
class Outcome:
    """What became of one request. Seconds since it was sent."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """Of each piece of text."""
    latency: float = 0.0
    error: str | None = None


def random_jobs(
    number: int,
    *,
    rate: float,
    input_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    shared_prefix: int = 0,
    vocab_size: int = 1000,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[Job]:
    """Random ids, lengths uniform between two bounds, arrivals a gamma process of `rate` a second.

    burstiness: shape of the gamma distribution; 1 is a Poisson process, less comes in bursts.
    rate: may be infinite; then all are sent at once.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(shared_prefix)]
    gaps = (
        [0.0] * number
        if rate == float("inf")
        else [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(number)]
    )
    return [
        Job(
            at,
            prefix + [rng.randrange(vocab_size) for _ in range(rng.randint(*input_tokens))],
            rng.randint(*output_tokens),
        )
        for at in accumulate(gaps)
    ]


def trace_jobs(path: str | Path, *, vocab_size: int = 1000, speed: float = 1.0) -> list[Job]:
    """Jobs from JSON lines: `timestamp` in ms, `output_length`, and `prompt` or `input_length`.

    With `hash_ids` (as Mooncake's traces have them) equal ids give equal blocks of 512 tokens, so
    that prefixes are shared as they were. Raises DataError naming the line, or for no lines.
    """
    jobs = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            prompt = row["prompt"] if "prompt" in row else _ids(row, vocab_size)
            at = float(row.get("timestamp", 0)) / 1000 / speed
            if not (isinstance(prompt, str | list) and prompt and 0 <= at < float("inf")):
                raise ValueError("the prompt is empty, or timestamp is no time")
            jobs.append(Job(at, prompt, max(1, int(row["output_length"]))))
        except KeyError as error:
            raise DataError(f"{path}, line {number}: has no {error.args[0]}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    if not jobs:
        raise DataError(f"{path} has no requests")
    return jobs


def _ids(row: dict[str, Any], vocab_size: int) -> list[int]:
    length = int(row["input_length"])
    blocks = row.get("hash_ids") or [random.getrandbits(60) for _ in range(-(-length // 512))]
    ids = [i for block in blocks for i in _block(block, vocab_size)]
    return ids[:length]


def _block(seed: int, vocab_size: int) -> Iterator[int]:
    rng = random.Random(seed)
    return (rng.randrange(vocab_size) for _ in range(512))


async def run(
    url: str, model: str, jobs: Sequence[Job], *, key: str | None = None, concurrency: int = 0
) -> tuple[list[Outcome], float]:
    """Send every job at its time, at most `concurrency` at once (0: any number).

    Returns outcomes in the order of the jobs, and the seconds it all took.
    """
    gate = asyncio.Semaphore(concurrency or len(jobs) or 1)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=httpx.Timeout(3600, connect=60), limits=limits
    ) as client:
        started = time.perf_counter()

        async def one(job: Job) -> Outcome:
            await asyncio.sleep(max(0.0, started + job.at_s - time.perf_counter()))
            async with gate:
                return await _send(client, model, job)

        outcomes = await asyncio.gather(*map(one, jobs))
        return list(outcomes), time.perf_counter() - started


async def _send(client: httpx.AsyncClient, model: str, job: Job) -> Outcome:
    outcome = Outcome()
    body = {"model": model, "prompt": job.prompt, "max_tokens": job.max_tokens, "stream": True,
            "temperature": 0.0, "ignore_eos": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    sent = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                outcome.error = f"{answer.status_code}: {text:.200}"
                return outcome
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _note(outcome, json.loads(line[6:]), time.perf_counter() - sent)
    except (httpx.HTTPError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = time.perf_counter() - sent
    return outcome


def _note(outcome: Outcome, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        outcome.error = str(chunk["error"].get("message"))
    if chunk.get("choices"):
        outcome.arrivals.append(now)
    if usage := chunk.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        outcome.cached_tokens = details.get("cached_tokens") or 0


def summary(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Throughput and latencies; times in milliseconds, throughput a second."""
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.arrivals]
    total_in = sum(outcome.prompt_tokens for outcome in good)
    total_out = sum(outcome.output_tokens for outcome in good)
    ttfts = [outcome.arrivals[0] for outcome in good]
    tpots = [
        (outcome.latency - outcome.arrivals[0]) / (outcome.output_tokens - 1)
        for outcome in good
        if outcome.output_tokens > 1
    ]
    itls = [b - a for outcome in good for a, b in pairwise(outcome.arrivals)]
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "total_cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "request_throughput": len(good) / duration,
        "output_throughput": total_out / duration,
        "total_token_throughput": (total_in + total_out) / duration,
        **_spread("ttft", ttfts),
        **_spread("tpot", tpots),
        **_spread("itl", itls),
        **_spread("e2el", [outcome.latency for outcome in good]),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:10],
    }


def _spread(name: str, seconds: Iterable[float]) -> dict[str, float]:
    values = sorted(1000 * value for value in seconds)
    if not values:
        return {}
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        **{f"p{p}_{name}_ms": percentile(values, p) for p in PERCENTILES},
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, interpolated between neighbours."""
    at = (len(values) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)
