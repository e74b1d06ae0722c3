"""`k3 sandbox` through its own entry point."""

import os
import re
import select
import signal
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from openk3.cli import main
from sandbox_fixtures import gvisor, home  # noqa: F401 (fixtures)


def k3(*words: str, at, stdin: bytes = b"") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "openk3", "sandbox", *words]
    env = {**os.environ, "OPENK3_SANDBOX_HOME": str(at.path)}
    return subprocess.run(
        command, input=stdin, capture_output=True, env=env, check=False, timeout=120
    )


def test_a_sandbox_lives_between_commands(home, gvisor):  # noqa: F811
    made = k3("new", "--env", "A=b", "--timeout", "600", at=home)
    assert made.returncode == 0, made.stderr
    box_id = made.stdout.decode().strip()
    done = k3("run", box_id, "--", "cat > f; echo $A; exit 3", at=home, stdin=b"content")
    assert (done.stdout, done.returncode) == (b"b\n", 3)
    assert k3("pause", box_id, at=home).returncode == 0
    assert b"paused" in k3("ls", at=home).stdout
    assert k3("resume", box_id, at=home).returncode == 0
    assert b"running" in k3("ls", at=home).stdout
    assert k3("run", box_id, "cat", "f", at=home).stdout == b"content"
    assert k3("pause", box_id, at=home).returncode == 0  # what follows resumes it by itself
    copy_id = k3("fork", box_id, at=home).stdout.decode().strip()
    saved = k3("snapshot", box_id, "--name", "s", at=home).stdout.decode().strip()
    assert saved.startswith("snap")
    assert k3("kill", box_id, copy_id, saved, at=home).returncode == 0
    again = k3("kill", box_id, at=home)
    assert (again.returncode, again.stderr) == (1, f"no sandbox {box_id}\n".encode())
    assert k3("ls", at=home).stdout == b""


def test_setup_tests_the_backend_and_makes_a_template(home, gvisor, tmp_path):  # noqa: F811
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "note").write_text("mine\n")
    done = k3("setup", "--template", "mine", "--from", str(tmp_path / "root"), at=home)
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode()
    assert re.search(r"gvisor: \S*runsc, version \S+\n", said)
    assert re.search(r"self-test passed in [\d.]+ s: .*memory", said)
    assert re.search(r"template mine-\w+ is warm", said)
    box_id = k3("new", "mine", "--timeout", "600", at=home).stdout.decode().strip()
    python = k3("kill", box_id, at=home)
    assert python.returncode == 0
    refused = k3("setup", "--from", str(tmp_path / "missing"), at=home)
    assert (refused.returncode, b"OCI archive" in refused.stderr) == (1, True)


def test_shell_is_a_terminal_inside(home, gvisor):  # noqa: F811
    box_id = k3("new", "--timeout", "600", at=home).stdout.decode().strip()
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (33, 101))
    command = [sys.executable, "-m", "openk3", "sandbox", "shell", box_id]
    env = {**os.environ, "OPENK3_SANDBOX_HOME": str(home.path)}
    shell = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)

    def answer(typed: str, expected: str) -> None:
        os.write(ours, typed.encode())
        seen = b""
        while expected.encode() not in seen:
            assert select.select([ours], [], [], 60)[0], f"{expected!r} is not in {seen!r}"
            seen += os.read(ours, 4096)

    try:
        answer("", "$")
        answer("stty size\n", "33 101")
        termios.tcsetwinsize(ours, (44, 55))
        shell.send_signal(signal.SIGWINCH)
        answer("until [ \"$(stty size)\" = '44 55' ]; do :; done; echo now-$((6 * 7))\n", "now-42")
        # The sleeper itself says that it runs: before it has the terminal, ^C would reach bash.
        answer("sh -c 'echo go-$((6 * 7)); exec sleep 1000'\n", "go-42")
        answer("\x03echo interrupted-$((6 * 7))\n", "interrupted-42")
        os.write(ours, b"exit 5\n")
        with suppress(OSError):  # how a terminal says that everybody has left
            while True:
                os.read(ours, 4096)
        assert shell.wait(60) == 5
    finally:
        shell.kill()
        shell.wait()
    os.close(ours)
    refused = k3("shell", box_id, at=home)
    assert b"needs a terminal" in refused.stderr
    assert k3("kill", box_id, at=home).returncode == 0


def test_server_tells_what_the_sdk_needs_and_stops_when_interrupted(home, gvisor):  # noqa: F811
    command = [sys.executable, "-m", "openk3", "sandbox", "serve", "--port", "0"]
    env = {**os.environ, "OPENK3_SANDBOX_HOME": str(home.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as server:
        try:
            assert server.stdout
            line = server.stdout.readline()
            assert re.search(r"E2B_API_URL=http://127.0.0.1:\d+ .*KEY=e2b_[0-9a-f]{40}\n", line)
            server.send_signal(signal.SIGINT)
            assert server.wait(60) in (0, 130, -signal.SIGINT)
        finally:
            server.kill()
    refused = k3("serve", "--host", "0.0.0.0", "--no-key", at=home)
    assert refused.returncode == 1
    assert b"refusing" in refused.stderr


def test_wrong_usage_is_told(capsys):
    with pytest.raises(SystemExit) as left:
        main(["sandbox", "frob"])
    assert left.value.code == 2
    assert "frob" in capsys.readouterr().err
