"""`k3 chat` takes turns with a model that completes text: each line goes on with what stands."""

import sys

from openk3.cli import common, speak

HELP = "type a beginning and the model goes on; an empty line starts afresh, Ctrl-D leaves"


def main(argv: list[str]) -> int:
    """Run `k3 chat`. Returns the exit code."""
    parser = common.parser("chat", f"Write a text together with a model: {HELP}.")
    speak.add_options(parser, max_tokens=64)
    common.add_threads(parser)
    options = parser.parse_args(argv)
    common.use_threads(options.threads)
    speaker = speak.open_speaker(options.model, options.device, options.dtype)
    asking = sys.stdin.isatty()
    if asking:
        sys.stderr.write(f"{HELP}\n")
    ids: list[int] = []
    while (line := _read(asking)) is not None:
        if not line.strip():
            ids = []
            continue
        ids += speaker.tokenizer.encode(line)
        sys.stdout.write(line)
        ids += speaker.complete(ids, options, _say)
        sys.stdout.write("\n")
    return 0


def _read(asking: bool) -> str | None:
    if asking:
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _say(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
