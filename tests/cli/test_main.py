"""The `k3` command itself: quick help, exit codes, one line per error."""

import io
import os
import subprocess
import sys
import types

import pytest

from openk3 import cli
from openk3._version import __version__
from openk3.cli import common
from openk3.errors import ConfigError, DataError

HELP = """
import sys, time
start = time.process_time()
import openk3.cli
try:
    code = openk3.cli.main(sys.argv[1:])
except SystemExit as left:
    code = left.code
print(code, "torch" in sys.modules, time.process_time() - start, file=sys.stderr)
"""


@pytest.mark.parametrize("argv", [["--help"], *([verb, "--help"] for verb in cli.VERBS)], ids=str)
def test_help_is_quick_and_loads_no_torch(argv):
    done = subprocess.run([sys.executable, "-c", HELP, *argv], capture_output=True, text=True)
    code, torch, seconds = done.stderr.split()[-3:]
    assert (code, torch) == ("0", "False")
    assert float(seconds) < 0.5
    assert "usage: k3" in done.stdout


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"openk3 {__version__}\n"


def test_wrong_usage_is_two(capsys):
    assert cli.main([]) == 2
    assert cli.main(["inspekt"]) == 2
    assert "did you mean 'inspect'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("shard 3 is short"), 1, "k3 fake: shard 3 is short\n"),
        (KeyboardInterrupt(), 130, "k3 fake: interrupted\n"),
    ],
)
def test_errors_become_exit_codes(monkeypatch, capsys, error, code, said):
    def fail(_):
        raise error

    monkeypatch.setitem(sys.modules, "openk3.cli.fake", types.SimpleNamespace(main=fail))
    monkeypatch.setitem(cli.VERBS, "fake", ("openk3.cli.fake", "fails"))
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_left_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "openk3", "inspect", "k3"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line():
    command = [sys.executable, "-m", "openk3", "inspect", "nano"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "k3 inspect: [Errno 28] No space left on device\n"


def test_closed_streams_are_no_traceback():
    code = "import os, sys; os.close(0); os.close(1); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", code, sys.executable, "-m", "openk3", "inspect", "nano"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_text_that_the_terminal_cannot_show_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    speaks = types.SimpleNamespace(main=lambda _: print("\u6f22 \udcff") or 0)
    monkeypatch.setitem(sys.modules, "openk3.cli.fake", speaks)
    monkeypatch.setitem(cli.VERBS, "fake", ("openk3.cli.fake", "speaks"))
    assert cli.main(["fake"]) == 0
    assert stream.buffer.getvalue() == b"\\u6f22 \\udcff\n"


def test_words_and_options_come_in_any_order():
    parser = common.parser("fake", "")
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--max-tokens", type=int)
    options = parser.parse_args(["runs/a", "--max-tokens", "3", "def "])
    assert vars(options) == {"model": "runs/a", "prompt": "def ", "max_tokens": 3}


def test_more_threads_than_a_machine_starts_are_refused():
    with pytest.raises(ConfigError, match="at most 1024"):
        common.use_threads(10**6)
