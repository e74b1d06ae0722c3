"""`k3 chat` talks with a model: in K3's chat format, or plainly with one that completes text."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from openk3.cli import common, speak
from openk3.cli.conversation import Call, Conversation, can_chat, read_tools
from openk3.cli.screen import Screen, write
from openk3.errors import InputError, OpenK3Error, nearest
from openk3.text.xtml.notices import EFFORTS

HELP = """/image FILE   put a picture into your next message
/effort LEVEL low, high or max: how much to think
/new          start afresh
/help         print this
Ctrl-C stops an answer, Ctrl-D leaves. When the model calls a tool, type what the tool says, or
!COMMAND to run it here: it reads the call's arguments, JSON, on its standard input."""
PLAIN_HELP = "type a beginning and the model goes on; an empty line starts afresh, Ctrl-D leaves"
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
    speaker = speak.open_speaker(
        options.model, options.device, options.dtype, expert_cache_gb=options.expert_cache_gb
    )
    style = _style(options, speaker)
    if options.max_tokens is None:
        options.max_tokens = MAX_TOKENS[style]
    if style == "plain":
        return _write_together(speaker, options)
    conversation = Conversation(
        speaker,
        options,
        thinking=options.thinking != "off",
        effort=options.effort,
        tools=tools,
        system=options.system,
    )
    return _talk(conversation, options)


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


def _style(options: Namespace, speaker: speak.Speaker) -> str:
    from openk3.checkpoint.trained import is_training_output

    able = can_chat(speaker.tokenizer)
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


def _talk(conversation: Conversation, options: Namespace) -> int:
    _hint(HELP)
    while True:
        said = len(conversation.messages)
        try:
            line = _read("> ")
            if line is None:
                return 0
            _take(conversation, line, options)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            sys.stderr.write("\n")
        except OpenK3Error as error:
            if not sys.stdin.isatty():
                raise
            del conversation.messages[said:]
            sys.stderr.write(f"k3 chat: {error}\n")


def _take(conversation: Conversation, line: str, options: Namespace) -> None:
    if line.startswith("/"):
        _command(conversation, *line.split(maxsplit=1))
    elif line.strip():
        conversation.say(line)
        _turn(conversation, options)


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
    else:
        known = nearest(name, {"/image", "/effort", "/new", "/help"})
        raise InputError(
            f"{name} {value}".strip() + f" is no command here{known}; /help lists them, and a line "
            "that begins with a space is said as it is"
        )


def _turn(conversation: Conversation, options: Namespace) -> None:
    """The model's answer, and what its tools say, until it calls none."""
    while True:
        screen = Screen(fold=options.thinking == "fold")
        try:
            calls = conversation.answer(screen.show)
        finally:
            screen.end()
        if conversation.was_cut:
            sys.stderr.write("(not ended; --max-tokens N lets an answer be longer)\n")
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


def _write_together(speaker: speak.Speaker, options: Namespace) -> int:
    _hint(PLAIN_HELP)
    ids: list[int] = []
    while (line := _read("> ")) is not None:
        if not line.strip():
            ids = []
            continue
        ids += speaker.tokenizer.encode(line)
        sys.stdout.write(line)
        ids += speaker.complete(ids, options, write)
        sys.stdout.write("\n")
    return 0


def _hint(text: str) -> None:
    if sys.stdin.isatty():
        sys.stderr.write(f"{text}\n")


def _read(prompt: str) -> str | None:
    if sys.stdin.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
