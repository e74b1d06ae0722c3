"""The `k3` command. Only the chosen verb's module is imported, so `k3 --help` never loads torch."""

import io
import os
import sys
from importlib import import_module

from openk3._version import __version__
from openk3.errors import OpenK3Error, nearest

# verb -> (module with `main(argv) -> int`, one line for --help)
VERBS: dict[str, tuple[str, str]] = {
    "doctor": ("openk3.cli.doctor", "what this machine has and what runs on it"),
    "quickstart": ("openk3.cli.quickstart", "train a small K3 here, in minutes, and let it speak"),
    "pretrain": ("openk3.cli.pretrain", "train a model from a recipe; stop and resume any time"),
    "generate": ("openk3.cli.generate", "continue a text"),
    "chat": ("openk3.cli.chat", "talk with a model: tools, pictures, thinking"),
    "serve": ("openk3.cli.serve", "answer OpenAI's and Anthropic's clients; a chat page"),
    "bench": ("openk3.cli.bench", "load a server and report its latencies"),
    "report": ("openk3.cli.report", "a run as one HTML page, and PNG plots"),
    "inspect": ("openk3.cli.inspect", "parameters, FLOPs and memory of a model; what files hold"),
    "plan": ("openk3.cli.plan", "what a parallel run costs: balanced experts, without devices"),
    "convert": ("openk3.cli.convert", "rewrite a model folder: formats, layouts, shards"),
    "sandbox": ("openk3.cli.sandbox", "isolated machines that pause, resume, fork, snapshot"),
    "data": ("openk3.cli.data", "build token shards from text, verify and describe them"),
}


def usage() -> str:
    """The text of `k3 --help`."""
    lines = ["usage: k3 VERB [options]      (k3 VERB --help explains one verb)", ""]
    lines += [f"  {verb:<12}{what}" for verb, (_, what) in VERBS.items()]
    lines += ["", "  --version   print the version", "  --help      print this"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 no reader."""
    argv = sys.argv[1:] if argv is None else argv
    _open_streams()
    verb = argv[0] if argv else "--help"
    try:
        code = _run(verb, argv)
        sys.stdout.flush()
        return code
    except OpenK3Error as error:
        print(f"k3 {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"k3 {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left: `k3 inspect k3 | head`
        _drop_output()
        return 141
    except OSError as error:  # a path that cannot be read or written, a full disk behind stdout
        _drop_output()
        print(f"k3 {verb}: {error}", file=sys.stderr)
        return 1


def _run(verb: str, argv: list[str]) -> int:
    if verb in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if verb == "--version":
        print(f"openk3 {__version__}")
        return 0
    if verb not in VERBS:
        print(f"k3: unknown verb {verb!r}{nearest(verb, set(VERBS))}\n\n{usage()}", file=sys.stderr)
        return 2
    return import_module(VERBS[verb][0]).main(argv[1:])


def _open_streams() -> None:
    """Give closed streams somewhere to go, and let no character of a text end the program."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (lives as long as we do)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _drop_output() -> None:
    """Send what stdout still holds nowhere, so that Python's exit does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
