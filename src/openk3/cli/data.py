"""`k3 data build` makes token shards, `k3 data info` verifies and describes them."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openk3.errors import ConfigError, nearest

if TYPE_CHECKING:
    from openk3.data.dataset import Dataset
    from openk3.data.sources import Source

_USAGE = """usage: k3 data build PATH ... --out FOLDER (--vocab-size N | --tokenizer FILE) [options]
       k3 data info FOLDER [--json]

  build   text files, JSONL files or folders of source files -> tokenizer and token shards
  info    verify every checksum of a dataset folder and say what it holds"""


def main(argv: list[str]) -> int:
    """Run `k3 data ...`. Returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    actions = {"build": _build, "info": _info}
    if argv[0] not in actions:
        hint = nearest(argv[0], set(actions))
        print(f"k3 data: unknown action {argv[0]!r}{hint}\n\n{_USAGE}", file=sys.stderr)
        return 2
    return actions[argv[0]](argv[1:])


def _build(argv: list[str]) -> int:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Make a dataset folder of token shards from text."""

        out: Path
        """Folder to make; it must not exist."""
        paths: tyro.conf.Positional[tuple[Path, ...]] = ()
        """Text files, .jsonl files, or folders whose files are one document each."""
        vocab_size: int | None = None
        """Train a K3-style tokenizer with so many ids."""
        tokenizer: Path | None = None
        """Use this one instead: tokenizer.json, a tiktoken rank file, or a folder with one."""
        held_out: float = 0.02
        """Share of documents kept for evaluation, chosen by a hash of their names."""
        field: str = "text"
        """Field of a JSONL record that holds the text."""
        document_bytes: int = 1 << 20
        """Documents longer than this are cut, after a line where possible."""
        local_corpus: float | None = None
        """Instead of paths: so many MB of Python sources found on this machine."""
        end_of_text: str = "[EOS]"
        """Special token that ends each document."""
        json: bool = False
        """Print the report as JSON."""

    options = tyro.cli(Options, args=argv, prog="k3 data build")
    from openk3.data.build import build
    from openk3.text.tokenizer import load

    started = time.monotonic()
    dataset = build(
        _source(options.paths, options.local_corpus, options.field, options.document_bytes),
        options.out,
        tokenizer=load(options.tokenizer) if options.tokenizer else None,
        vocab_size=options.vocab_size,
        held_out=options.held_out,
        end_of_text=options.end_of_text,
        note=" ".join(map(str, options.paths)) or f"local corpus of {options.local_corpus} MB",
    )
    _report(dataset, options.json, seconds=round(time.monotonic() - started, 1))
    return 0


def _source(
    paths: tuple[Path, ...], local_corpus: float | None, field: str, document_bytes: int
) -> "Source":
    from openk3.data.corpus import LocalCorpus
    from openk3.data.sources import Files

    if bool(paths) == (local_corpus is not None):
        raise ConfigError("give either paths or --local-corpus MB")
    if local_corpus is not None:
        return LocalCorpus(round(local_corpus * 1e6))
    return Files(paths, field=field, max_bytes=document_bytes)


def _info(argv: list[str]) -> int:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Verify every checksum of a dataset folder and say what it holds."""

        path: tyro.conf.Positional[Path]
        """Folder made by `k3 data build`."""
        json: bool = False
        """Print the report as JSON."""

    options = tyro.cli(Options, args=argv, prog="k3 data info")
    from openk3.data.dataset import Dataset

    _report(Dataset(options.path, verify=True), options.json, checksums="ok")
    return 0


def _report(dataset: "Dataset", as_json: bool, **more: Any) -> None:
    summary = {**dataset.summary(), **more}
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
        return
    print(f"{dataset.path}: vocabulary {dataset.vocab_size}, {dataset.source.get('note', '')}")
    for name, split in summary["splits"].items():
        print(
            f"  {name:<8} {split['num_documents']:>8,} documents {split['num_bytes']:>14,} bytes "
            f"{split['num_tokens']:>14,} tokens  {split['bytes_per_token']:.3f} bytes/token"
        )
    skipped = summary["skipped"]
    if skipped:
        print("  skipped  " + ", ".join(f"{n:,} {reason}" for reason, n in skipped.items()))
    print("  " + ", ".join(f"{key} {value}" for key, value in more.items()))
