"""k3 chat as a process at a terminal: keys, the prompt, Ctrl-C, the end."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import openk3
from model_folders import CONFIG
from openk3.model import K3
from openk3.text import train_tokenizer

LIMIT_S = 120.0
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from openk3.cli import main
sys.exit(main(sys.argv[1:]))
"""
ENV = os.environ | {
    "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1", "TERM": "dumb",
}  # fmt: skip


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model folder that goes on until it is stopped: no special token is ever the likeliest."""
    path = tmp_path_factory.mktemp("endless") / "model"
    words = ["some words to merge, some words to keep"] * 4
    tokenizer = train_tokenizer.train(words, 640)
    model = K3(CONFIG.replace(vocab_size=640, max_position_embeddings=1 << 20), seed=0)
    with torch.no_grad():
        model.lm_head.weight[[CONFIG.eos_token_id, *tokenizer.special_tokens.values()]] = 0
    openk3.save(model, path)
    tokenizer.save(path)
    return path


class Typist:
    """Somebody at the terminal of a command."""

    def __init__(self, *argv):
        self.fd, theirs = pty.openpty()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *argv], env=ENV, **streams)
        os.close(theirs)
        self.seen = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def press_ctrl_c(self):
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, pattern):
        """Read up to what matches; returns the text before and with it."""
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert select.select([self.fd], [], [], LIMIT_S)[0], f"{pattern} not in {self.seen!r}"
            self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(endless, style):
    options = ["--style", style, "--temperature", "0", "--max-tokens", "1000000"]
    at = Typist("chat", str(endless), *options)
    at.wait_for("> $")
    for line in ("some words", "to keep"):
        at.type(f"{line}\n")
        at.wait_for(r"\n.{400}")
        at.press_ctrl_c()
        at.wait_for("\n> $")
    at.type("\x1b[A\n" if style == "plain" else "/effort low\n")
    if style == "plain":
        assert "to keep" in at.wait_for(r"\n.{100}")  # the line before the last was recalled
        at.press_ctrl_c()
    at.wait_for("\n> $")
    at.type("\x04")
    assert at.process.wait(LIMIT_S) == 0
    os.close(at.fd)
