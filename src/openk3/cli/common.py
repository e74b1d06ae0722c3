"""What verbs share: parsers, recipes with flags, threads, tables, JSON. Imports no torch."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from openk3.config.dump import describe, to_dict, to_toml
from openk3.config.load import resolve, take_flags
from openk3.errors import BackendError, ConfigError

T = TypeVar("T")
MOST_THREADS = 1024


class _Parser(argparse.ArgumentParser):
    """Takes options and positional words in any order, unless words belong to a verb of its own."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if any(a.nargs in (argparse.PARSER, argparse.REMAINDER) for a in self._actions):
            return super().parse_args(args, namespace)
        return self.parse_intermixed_args(args, namespace)


def parser(verb: str, about: str) -> argparse.ArgumentParser:
    """An argument parser for `k3 verb`; wrong usage leaves with exit code 2."""
    return _Parser(
        prog=f"k3 {verb}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_json(to: argparse.ArgumentParser) -> None:
    """The option every reporting verb has."""
    to.add_argument("--json", action="store_true", help="print JSON on stdout and nothing else")


def require_extra(extra: str, *modules: str) -> None:
    """Raises BackendError naming the extra to install when one of its modules is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise BackendError(f"this needs {', '.join(missing)}: pip install 'openk3[{extra}]'")


def add_threads(to: argparse.ArgumentParser) -> None:
    """The option every computing verb has; see `use_threads`."""
    to.add_argument(
        "--threads", type=_count, default=0, metavar="N", help="CPU threads (default: all cores)"
    )


def use_threads(threads: int) -> None:
    """Compute with so many CPU threads; 0 leaves the choice to torch. Call before any work.

    Raises ConfigError for more than MOST_THREADS.
    """
    if threads == 0:
        return
    if threads > MOST_THREADS:  # OpenMP ends the process when it cannot start them
        raise ConfigError(f"threads ({threads}) must be at most {MOST_THREADS}")
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; 0 means all cores")
    return value


def parse_recipe(
    to: argparse.ArgumentParser, cls: type[T], argv: Sequence[str]
) -> tuple[T, argparse.Namespace]:
    """Read `RECIPE.toml ... --section.key value ...` and the verb's own options.

    Returns the configuration and the parsed options. `--dry-run` prints the configuration as TOML
    (JSON beside `--json`) and leaves with exit code 0. Raises ConfigError.
    """
    to.add_argument("recipes", nargs="*", metavar="RECIPE", help="TOML files, later ones win")
    to.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    if {"-h", "--help"} & set(argv):
        to.epilog = "Settings of a recipe, as flags:\n\n" + describe(cls)
    settings, rest = take_flags(cls, argv, own_options(to))
    options = to.parse_args(rest)
    config = resolve(cls, options.recipes, settings)
    if options.dry_run:
        as_json = getattr(options, "json", False)
        sys.stdout.write(json_text(to_dict(config)) if as_json else to_toml(config))
        raise SystemExit(0)
    return config, options


def own_options(parser: argparse.ArgumentParser) -> set[str]:
    """The options that `parser` reads itself; every other flag is a field of a configuration."""
    return {option for action in parser._actions for option in action.option_strings}


def json_text(value: Any) -> str:
    """Indented JSON with a newline at its end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def table(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), left: Sequence[int] = (0,)
) -> str:
    """Columns of text, right-aligned but for those numbered in `left`."""
    lines = [list(head), *map(list, rows)] if head else [list(row) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def join(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    text = [join(line) for line in lines]
    if head:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def short(value: float) -> str:
    """`2.78T`, `104.19B`, `1.36M`, `512`: three or more significant digits."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f}{letter}"
    return f"{value:.4g}"


def binary(num_bytes: float) -> str:
    """`414.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def positive(text: str) -> int:
    """argparse type: an integer of at least 1; `128K` and `1M` are binary multiples."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    try:
        value = int(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
