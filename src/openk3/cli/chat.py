"""`k3 chat` talks with a model: in K3's chat format, or plainly with one that completes text."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.cli import common, speak
from openk3.cli.conversation import Call, Conversation, PlainText, read_tools
from openk3.cli.screen import Screen, say, write
from openk3.errors import InputError, OpenK3Error, nearest
from openk3.text.xtml.notices import EFFORTS

if TYPE_CHECKING:
    from openk3.text.tokenizer import Tokenizer

HELP = """/image FILE   put a picture into your next message
/effort LEVEL low, high or max: how much to think
/new          start afresh
/help         print this
Ctrl-C stops an answer, Ctrl-D leaves. When the model calls a tool, type what the tool says, or
!COMMAND to run it here: it reads the call's arguments, JSON, on its standard input."""
PLAIN_HELP = """type a beginning and the model goes on; an empty line starts afresh
Ctrl-C stops the model, Ctrl-D leaves"""
TAKES = {
    "/image": "the FILE of a picture",
    "/effort": "low, high or max, with --thinking show or fold",
}
MAX_TOKENS = {"chat": 1024, "plain": 64}


def main(argv: list[str]) -> int:
    """Run `k3 chat`. Returns the exit code."""
    parser = common.parser("chat", f"Talk with a model. Lines that are not words to it:\n\n{HELP}")
    speak.add_options(parser, max_tokens=None)
    _add_options(parser)
    common.add_threads(parser)
    options = parser.parse_args(argv)
    if options.effort and options.thinking == "off":
        parser.error("--effort says how much to think; it needs --thinking show or fold")
    common.use_threads(options.threads)
    tools = read_tools(options.tools) if options.tools else []
    params = speak.sampling(options)
    llm = speak.open_llm(options)
    style = _style(options, llm.tokenizer)
    if options.max_tokens is None:
        params = replace(params, max_tokens=MAX_TOKENS[style])
    if style == "plain":
        text = PlainText(llm, params)
        return _listen(PLAIN_HELP, lambda line: _go_on(text, line))
    talk = Conversation(
        llm,
        params,
        thinking=options.thinking != "off",
        effort=options.effort,
        tools=tools,
        system=options.system,
    )
    fold = options.thinking == "fold"
    return _listen(HELP, lambda line: _take(talk, line, fold))


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--style", choices=("auto", "chat", "plain"), default="auto",
                        help="plain goes on with what you type; auto takes it for training runs "
                        "and for vocabularies without chat tokens")  # fmt: skip
    parser.add_argument("--tools", type=Path, metavar="FILE",
                        help="JSON list of tools the model may call")  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--thinking", choices=("show", "fold", "off"), default="show",
                        help="fold says only how long it thought; off asks for none")  # fmt: skip
    parser.add_argument("--effort", choices=EFFORTS, help="how much to think")


def _style(options: Namespace, tokenizer: "Tokenizer") -> str:
    from openk3.checkpoint.trained import is_training_output

    able = tokenizer.can_chat
    if options.style == "chat" and not able:
        raise InputError(f"the vocabulary of {options.model} has no chat tokens; --style plain")
    if options.style != "auto":
        style = options.style
    else:
        style = "chat" if able and not is_training_output(options.model) else "plain"
    idle = [name for name in ("tools", "system", "effort") if getattr(options, name)]
    if style == "plain" and idle:
        raise InputError(f"--{idle[0]} has no place in plain text; --style chat if it can chat")
    return style


def _listen(help_text: str, take: Callable[[str], None]) -> int:
    """Hand over line after line. At a terminal an interrupt or an error ends what one began."""
    if sys.stdin.isatty():
        sys.stderr.write(f"{help_text}\n")
    while True:
        try:
            line = _read("> ")
            if line is None:
                return 0
            take(line)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            sys.stderr.write("\n")
        except OpenK3Error as error:
            if not sys.stdin.isatty():
                raise
            sys.stderr.write(f"k3 chat: {error}\n")


def _go_on(text: PlainText, line: str) -> None:
    if not line.strip():
        text.ids = []
        return
    write(line)
    text.go_on(line, say)
    write("\n")


def _take(conversation: Conversation, line: str, fold: bool) -> None:
    if line.startswith("/"):
        _command(conversation, *line.split(maxsplit=1))
    elif line.strip():
        said = len(conversation.messages)
        conversation.say(line)
        try:
            _turn(conversation, fold)
        except OpenK3Error:
            del conversation.messages[said:]
            raise


def _command(conversation: Conversation, name: str, value: str = "") -> None:
    value = value.strip()
    if name == "/image" and value:
        conversation.show(Path(value).expanduser())
    elif name == "/effort" and value in EFFORTS and conversation.thinking:
        conversation.effort = value
    elif name == "/new":
        conversation.restart()
    elif name == "/help":
        sys.stderr.write(f"{HELP}\n")
    elif name in TAKES:
        raise InputError(f"{name} takes {TAKES[name]}, not {value!r}")
    else:
        known = nearest(name, {"/image", "/effort", "/new", "/help"})
        raise InputError(
            f"{name} {value}".strip() + f" is no command here{known}; /help lists them, and a line "
            "that begins with a space is said as it is"
        )


def _turn(conversation: Conversation, fold: bool) -> None:
    """The model's answer, and what its tools say, until it calls none."""
    while True:
        screen = Screen(fold=fold)
        try:
            calls = conversation.answer(screen.show)
        finally:
            screen.end()
        if conversation.was_cut:
            longer = "; --max-tokens N lets an answer be longer"
            why = longer if conversation.at_limit else ", but the model says no more"
            sys.stderr.write(f"(not ended{why})\n")
        for call in calls:
            words = _read(f"{call.tool}> ")
            if words is None:
                return
            conversation.reply(call, _run(words[1:], call) if words.startswith("!") else words)
        if not calls:
            return


def _run(command: str, call: Call) -> str:
    """What a shell command prints; a failure is told with its exit code and standard error."""
    done = subprocess.run(
        command, shell=True, input=call.arguments, capture_output=True, text=True, errors="replace"
    )
    if done.returncode == 0:
        return done.stdout
    return f"{done.stdout}{done.stderr}exit code {done.returncode}\n"


def _read(prompt: str) -> str | None:
    """The next line; None at the end. At a terminal it can be edited, and earlier ones recalled."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (it takes part in `input`)
        try:
            return input(prompt)
        except EOFError:
            write("\n")
            return None
    if sys.stdin.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
