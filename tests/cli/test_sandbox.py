"""`k3 sandbox` through its own entry point."""

import os
import re
import signal
import subprocess
import sys

import pytest

from openk3.cli import main
from sandbox_fixtures import gvisor, home  # noqa: F401 (fixtures)


def k3(*words: str, at, stdin: bytes = b"") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "openk3", "sandbox", *words]
    env = {**os.environ, "OPENK3_SANDBOX_HOME": str(at.path)}
    return subprocess.run(command, input=stdin, capture_output=True, env=env, check=False)


def test_a_sandbox_lives_between_commands(home, gvisor):  # noqa: F811
    made = k3("new", "--env", "A=b", "--timeout", "600", at=home)
    assert made.returncode == 0, made.stderr
    box_id = made.stdout.decode().strip()
    done = k3("run", box_id, "--", "cat > f; echo $A; exit 3", at=home, stdin=b"content")
    assert (done.stdout, done.returncode) == (b"b\n", 3)
    assert k3("pause", box_id, at=home).returncode == 0
    assert b"paused" in k3("ls", at=home).stdout
    assert k3("run", box_id, "cat", "f", at=home).stdout == b"content"
    copy_id = k3("fork", box_id, at=home).stdout.decode().strip()
    saved = k3("snapshot", box_id, "--name", "s", at=home).stdout.decode().strip()
    assert saved.startswith("snap")
    assert k3("kill", box_id, copy_id, saved, at=home).returncode == 0
    again = k3("kill", box_id, at=home)
    assert (again.returncode, again.stderr) == (1, f"no sandbox {box_id}\n".encode())
    assert k3("ls", at=home).stdout == b""


def test_server_tells_what_the_sdk_needs_and_stops_when_interrupted(home, gvisor):  # noqa: F811
    command = [sys.executable, "-m", "openk3", "sandbox", "serve", "--port", "0"]
    env = {**os.environ, "OPENK3_SANDBOX_HOME": str(home.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as server:
        assert server.stdout
        line = server.stdout.readline()
        assert re.search(r"E2B_API_URL=http://127.0.0.1:\d+ .*KEY=e2b_[0-9a-f]{40}\n", line)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130, -signal.SIGINT)
    refused = k3("serve", "--host", "0.0.0.0", "--no-key", at=home)
    assert refused.returncode == 1
    assert b"refusing" in refused.stderr


def test_wrong_usage_is_told(capsys):
    with pytest.raises(SystemExit) as left:
        main(["sandbox", "frob"])
    assert left.value.code == 2
    assert "frob" in capsys.readouterr().err
