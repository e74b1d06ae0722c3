"""`k3 convert` rewrites a model folder: number formats, layouts, shards; logits prove it."""

import sys
import time
from typing import TYPE_CHECKING, Any

from openk3.cli import common
from openk3.obs.progress import Progress

if TYPE_CHECKING:
    from openk3.checkpoint.hf.folder import Survey
    from openk3.checkpoint.hf.save import Target

_DTYPES = {"keep": None, "bfloat16": "BF16", "float32": "F32"}


def main(argv: list[str]) -> int:
    """Run `k3 convert`. Returns the exit code."""
    parser = common.parser(
        "convert",
        "Write the model SOURCE anew as TARGET. Reads and writes one tensor at a time.\n\n"
        "published: one matrix per expert and the names of the real files.\n"
        "stacked:   this project's own names, the experts of a layer in one tensor.\n"
        "training:  a run folder whose checkpoint of step 0 holds the weights, in float32.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a model folder, a training run or a checkpoint of one"
    )
    parser.add_argument("target", metavar="TARGET", help="a folder that does not exist yet")
    parser.add_argument("--experts", choices=("keep", "mxfp4", "dense"), default="keep",
                        help="pack the routed experts as MXFP4, or unpack them")  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="keep",
                        help="of weights that are not MXFP4 and not always float32")  # fmt: skip
    parser.add_argument(
        "--layout", choices=("published", "stacked", "training"), default="published"
    )
    parser.add_argument("--expert-ranks", type=common.positive, default=1, metavar="R",
                        help="cut shards so that each of R ranks has its own experts")  # fmt: skip
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB",
                        help="largest size of a file, in 10^9 bytes (default: 5)")  # fmt: skip
    parser.add_argument("--verify", action="store_true",
                        help="compare the logits of both folders")  # fmt: skip
    common.add_json(parser)
    common.add_threads(parser)
    options = parser.parse_args(argv)
    common.use_threads(options.threads)

    from openk3.checkpoint.bridge import open_model, to_training
    from openk3.checkpoint.convert import check, convert, lossless, verify

    found, _ = open_model(options.source)
    how = _target(options, found)
    started = time.monotonic()
    with Progress(check(found, how), "converting", "B") as bar:
        if options.layout == "training":
            to_training(options.source, options.target, progress=bar.advance)
        else:
            convert(options.source, options.target, how, progress=bar.advance)
    written, _ = open_model(options.target)
    facts = _facts(options, written, time.monotonic() - started)
    if options.verify:
        verdict = verify(options.source, options.target)
        facts["verify"] = {**vars(verdict), "lossless": lossless(found, how)}
        facts["verify"]["ok"] = verdict.max_difference == 0 or not facts["verify"]["lossless"]
    sys.stdout.write(common.json_text(facts) if options.json else _render(facts))
    return 0 if facts.get("verify", {}).get("ok", True) else 1


def _target(options: Any, found: "Survey") -> "Target":
    from openk3.checkpoint.hf.save import Target

    packed = found.packed_experts if options.experts == "keep" else options.experts == "mxfp4"
    if options.layout == "training":
        return Target(layout="stacked", dtype="F32")
    return Target(
        layout=options.layout,
        mxfp4_experts=packed,
        dtype=_DTYPES[options.dtype],
        expert_ranks=options.expert_ranks,
        max_shard_bytes=options.max_shard_gb * 1e9,
    )


def _facts(options: Any, written: "Survey", seconds: float) -> dict[str, Any]:
    size = sum(entry.num_bytes for entry in written.entries.values())
    return {
        "source": options.source,
        "target": options.target,
        "tensors": len(written.entries),
        "shards": len(written.shards),
        "bytes": size,
        "seconds": round(seconds, 3),
    }


def _render(facts: dict[str, Any]) -> str:
    text = (
        f"{facts['target']}: {facts['tensors']:,} tensors, {facts['bytes']:,} bytes in "
        f"{facts['shards']} shards, {facts['seconds']:.1f} s\n"
    )
    verdict = facts.get("verify")
    if verdict is None:
        return text
    expected = (
        "the conversion keeps every value" if verdict["lossless"] else ("the conversion rounds")
    )
    return text + (
        f"logits over {verdict['num_tokens']} tokens ({expected}): largest difference "
        f"{verdict['max_difference']:.3g}, KL {verdict['kl']:.3g} nats, same choice "
        f"{verdict['same_choice']:.1%}: {'ok' if verdict['ok'] else 'WRONG'}\n"
    )
