"""`k3 bench serve` loads an OpenAI-compatible server and reports its latencies."""

import argparse
import asyncio
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from openk3._io import write_json
from openk3.cli import common
from openk3.errors import BackendError, InputError


def main(argv: list[str]) -> int:
    """Run `k3 bench ...`. Returns the exit code; 1 if a request failed."""
    options = _parser().parse_args(argv)
    return options.action(options)


def _parser() -> argparse.ArgumentParser:
    parser = common.parser("bench", "Measure a server.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    about = "Load a server: k3 bench serve --url http://127.0.0.1:8000 --rate 4"
    sub = verbs.add_parser("serve", help="load a server and report latencies", description=about)
    sub.add_argument("--url", default="http://127.0.0.1:8000", type=_root,
                     help="with or without /v1 at its end")  # fmt: skip
    sub.add_argument("--model", help="its name there (default: the first that it lists)")
    sub.add_argument("--key", default=os.environ.get("OPENK3_API_KEY"), help="API key")
    sub.add_argument("--num-prompts", type=common.positive, default=100, metavar="N")
    sub.add_argument("--rate", type=float, default=float("inf"), metavar="R",
                     help="requests a second (default: all at once)")  # fmt: skip
    sub.add_argument("--burstiness", type=float, default=1.0,
                     help="1 is a Poisson process; less comes in bursts")  # fmt: skip
    sub.add_argument("--input", type=_range, default=(128, 128), metavar="N[:M]",
                     help="tokens of a prompt, or their range")  # fmt: skip
    sub.add_argument("--output", type=_range, default=(32, 32), metavar="N[:M]",
                     help="tokens of an answer, or their range")  # fmt: skip
    sub.add_argument("--shared-prefix", type=int, default=0, metavar="N",
                     help="tokens with which every prompt begins")  # fmt: skip
    sub.add_argument("--trace", type=Path, metavar="FILE",
                     help="replay JSON lines (timestamp in ms, input_length or prompt, "
                     "output_length, hash_ids) instead")  # fmt: skip
    sub.add_argument("--speed", type=float, default=1.0, help="replay so many times faster")
    sub.add_argument("--max-concurrency", type=int, default=0, metavar="N", help="0: any number")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--save", type=Path, metavar="FILE", help="write the report as JSON")
    common.add_json(sub)
    sub.set_defaults(action=serve)
    return parser


def serve(options: argparse.Namespace) -> int:
    """Run the load and print the report."""
    common.require_extra("serve", "httpx")
    from openk3.api.openai import bench

    if options.rate <= 0 or options.burstiness <= 0 or options.speed <= 0:
        raise InputError("--rate, --burstiness and --speed must be above 0")
    model, vocab_size = _ask(options)
    if options.trace:
        jobs = bench.trace_jobs(options.trace, vocab_size=vocab_size, speed=options.speed)
    else:
        jobs = bench.random_jobs(
            options.num_prompts,
            rate=options.rate,
            input_tokens=options.input,
            output_tokens=options.output,
            shared_prefix=options.shared_prefix,
            vocab_size=vocab_size,
            burstiness=options.burstiness,
            seed=options.seed,
        )
    running = bench.run(
        options.url, model, jobs, key=options.key, concurrency=options.max_concurrency
    )
    outcomes, duration = asyncio.run(running)
    report = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": "openai",
        "model_id": model,
        "num_prompts": len(jobs),
        "request_rate": "inf" if options.rate == float("inf") else options.rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency or None,
        **bench.summary(outcomes, duration),
    }
    if options.save:
        write_json(options.save, report)
    sys.stdout.write(common.json_text(report) if options.json else _table(report))
    return 1 if report["failed"] else 0


def _ask(options: argparse.Namespace) -> tuple[str, int]:
    """The model's name and how many token ids are safe to send."""
    import httpx

    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    try:
        answer = httpx.get(f"{options.url}/v1/models", headers=headers, timeout=30)
        answer.raise_for_status()
        models = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise BackendError(f"{options.url} does not answer as a server should: {error}") from None
    named = [m for m in models if options.model in (None, m["id"])]
    if not named:
        raise InputError(f"--model {options.model} is not one of {[m['id'] for m in models]}")
    # special tokens are at the top of a vocabulary
    return named[0]["id"], int(named[0].get("num_ordinary_tokens", 1000))


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    bounds = common.positive(low), common.positive(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text}: the first number is the smaller")
    return bounds


def _table(report: dict[str, Any]) -> str:
    counts = ("completed", "failed", "duration", "total_input_tokens", "total_cached_tokens",
              "total_output_tokens", "request_throughput", "output_throughput",
              "total_token_throughput")  # fmt: skip
    facts = [[name.replace("_", " "), common.short(report[name])] for name in counts]
    columns = ("mean", "median", "p90", "p99")
    rows = [
        [name, *(f"{report[f'{column}_{name}_ms']:.2f}" for column in columns)]
        for name in ("ttft", "tpot", "itl", "e2el")
        if f"mean_{name}_ms" in report
    ]
    text = common.table(facts) + "\n\n"
    if rows:
        text += common.table(rows, head=("ms", *columns)) + "\n"
    return text + "".join(f"{error}\n" for error in report["errors"])
