"""`k3 data build` makes token shards, `k3 data info` verifies and describes them."""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openk3.cli import common
from openk3.errors import ConfigError, nearest

if TYPE_CHECKING:
    from openk3.data.dataset import Dataset
    from openk3.data.sources import Source
    from openk3.text.tokenizer import Tokenizer

_USAGE = """usage: k3 data build PATH ... --out FOLDER (--vocab-size N | --tokenizer FILE) [options]
       k3 data draw FOLDER [--count N]
       k3 data info FOLDER [--json]

  build   text files, JSONL files or folders of source files -> tokenizer and token shards;
          --pictures: a JSONL file of pictures and captions
  draw    pictures of shapes and digits with captions, to try the former
  info    verify every checksum of a dataset folder and say what it holds"""


def main(argv: list[str]) -> int:
    """Run `k3 data ...`. Returns the exit code."""
    actions = {"build": _build, "draw": _draw, "info": _info}
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in actions:
        hint = nearest(argv[0], set(actions))
        print(f"k3 data: unknown action {argv[0]!r}{hint}\n\n{_USAGE}", file=sys.stderr)
        return 2
    return actions[argv[0]](argv[1:])


def _build(argv: list[str]) -> int:
    options = _build_parser().parse_args(argv)
    from openk3.text.tokenizer import load

    started = time.monotonic()
    tokenizer = load(options.tokenizer) if options.tokenizer else None
    make = _build_pictures if options.pictures else _build_text
    dataset = make(options, tokenizer)
    _report(dataset, options.json, seconds=round(time.monotonic() - started, 1))
    return 0


def _build_text(options: argparse.Namespace, tokenizer: "Tokenizer | None") -> "Dataset":
    from openk3.data.build import build

    return build(
        _source(options),
        options.out,
        tokenizer=tokenizer,
        vocab_size=options.vocab_size,
        held_out=options.held_out,
        end_of_text=options.end_of_text,
        note=" ".join(map(str, options.paths)) or f"local corpus of {options.local_corpus:g} MB",
    )


def _build_pictures(options: argparse.Namespace, tokenizer: "Tokenizer | None") -> "Dataset":
    from openk3.data.build_pictures import build_pictures, read_records
    from openk3.text.image import ImageProcessor

    if len(options.paths) != 1:
        raise ConfigError("--pictures takes one JSONL file of records")
    return build_pictures(
        read_records(options.paths[0]),
        options.out,
        processor=ImageProcessor(patch_size=options.patch_size),
        tokenizer=tokenizer,
        vocab_size=options.vocab_size,
        held_out=options.held_out,
        note=f"pictures of {options.paths[0]}",
    )


def _draw(argv: list[str]) -> int:
    parser = common.parser("data draw", "Draw pictures of shapes and digits, with captions.")
    parser.add_argument("path", type=Path, metavar="FOLDER", help="must not exist yet")
    parser.add_argument("--count", type=common.positive, default=16000, help="default: 16000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    from openk3.data.drawings import write_drawings

    records = write_drawings(options.path, options.count, seed=options.seed)
    print(f"{options.count:,} pictures; next: k3 data build --pictures {records} ...")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = common.parser("data build", "Make a dataset folder of token shards from text.")
    add = parser.add_argument
    paths = "text files, .jsonl files, or folders whose files are one document each"
    add("paths", nargs="*", type=Path, metavar="PATH", help=paths)
    corpus = "instead of paths: so many MB of Python sources found on this machine"
    add("--local-corpus", type=_megabytes, metavar="MB", help=corpus)
    add("--out", type=Path, required=True, metavar="FOLDER", help="must not exist yet")
    vocabulary = "train a K3-style tokenizer with so many ids"
    add("--vocab-size", type=common.positive, metavar="N", help=vocabulary)
    tokenizer = "or use this one: tokenizer.json, a tiktoken rank file, or a folder with either"
    add("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    share = "share of documents kept for evaluation, by a hash of their names (default: 0.02)"
    add("--held-out", type=float, default=0.02, metavar="SHARE", help=share)
    field = "field of a JSONL record that holds the text (default: text)"
    add("--field", default="text", metavar="NAME", help=field)
    cut = "cut longer documents, after a line where possible (default: 1M)"
    add("--document-bytes", type=common.positive, default=1 << 20, metavar="N", help=cut)
    pictures = "PATH is a JSONL file of {image, text}: see docs/vision.md"
    add("--pictures", action="store_true", help=pictures)
    patch = "pixels along a patch of the model that will look at the pictures (default: 14)"
    add("--patch-size", type=common.positive, default=14, metavar="N", help=patch)
    end = "special token that ends each document (default: [EOS])"
    add("--end-of-text", default="[EOS]", metavar="NAME", help=end)
    common.add_json(parser)
    return parser


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of MB above 0")
    return value


def _source(options: argparse.Namespace) -> "Source":
    from openk3.data.corpus import LocalCorpus
    from openk3.data.sources import Files

    if bool(options.paths) == (options.local_corpus is not None):
        raise ConfigError("give either paths or --local-corpus MB")
    if options.paths:
        return Files(options.paths, field=options.field, max_bytes=options.document_bytes)
    return LocalCorpus(round(options.local_corpus * 1e6))


def _info(argv: list[str]) -> int:
    parser = common.parser("data info", "Verify a dataset folder and say what it holds.")
    parser.add_argument("path", type=Path, metavar="FOLDER", help="made by k3 data build")
    common.add_json(parser)
    options = parser.parse_args(argv)
    from openk3.data.dataset import Dataset

    _report(Dataset(options.path, verify=True), options.json, checksums="ok")
    return 0


def _report(dataset: "Dataset", as_json: bool, **more: Any) -> None:
    summary = {**dataset.summary(), **more}
    if as_json:
        sys.stdout.write(common.json_text(summary))
        return
    head = ("split", "documents", "bytes", "tokens", "bytes/token")
    rows = [
        (
            name,
            f"{split['num_documents']:,}",
            f"{split['num_bytes']:,}",
            f"{split['num_tokens']:,}",
            f"{split['bytes_per_token']:.3f}",
        )
        for name, split in summary["splits"].items()
    ]
    print(f"{dataset.path}: {summary['note']}")
    print(f"vocabulary {dataset.vocab_size:,}, " + ", ".join(f"{k} {v}" for k, v in more.items()))
    print(common.table(rows, head))
    if summary["skipped"]:
        skipped = (f"{count:,} {reason}" for reason, count in summary["skipped"].items())
        print("skipped: " + ", ".join(skipped))
