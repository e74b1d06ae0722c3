"""gVisor machines of an ordinary user: user namespaces instead of root."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import openk3
from openk3.sandbox import engines

NOBODY = 65534
SCRIPT = Path(__file__).with_name("ordinary_user.py")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with the code and runsc that every user can enter, and a home for `nobody`."""
    folder = Path(tempfile.mkdtemp(prefix="openk3-user-"))
    folder.chmod(0o755)
    shutil.copytree(Path(openk3.__file__).parent, folder / "openk3")
    shutil.copy2(SCRIPT, folder)
    shutil.copy2(engines.find("gvisor").program, folder / "runsc")
    (folder / "user").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder / "user", NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def _as_user() -> list[str]:
    """A command prefix that is an ordinary user, for whoever runs the tests."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("becoming another user needs setpriv (util-linux)")
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def _python(prefix: list[str]) -> str:
    """An interpreter that user can start: this one may lie in root's home."""
    wanted = "import sys; sys.exit(sys.version_info < (3, 11))"
    for program in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable):
        if os.path.exists(program):
            command = [*prefix, program, "-c", wanted]
            if not subprocess.run(command, capture_output=True, check=False).returncode:
                return program
    pytest.skip("no Python 3.11 or newer that an ordinary user can start")


def test_an_ordinary_user_has_the_same_machine(gvisor, place):
    prefix = _as_user()
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(place / "user"),
        "OPENK3_RUNSC": str(place / "runsc"),
        "PYTHONPATH": str(place),
    }
    home = place / "user" / "home"
    done = subprocess.run(
        [*prefix, _python(prefix), str(place / SCRIPT.name), str(home)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["uid"] != 0
    if not first["ok"]:
        pytest.skip(f"ordinary users cannot have gVisor machines here: {first['reason']}")
    assert (first["memory"], first["cpu_limit"], first["disk_limit"]) == (True, False, True)
    (row,) = rest
    assert row["stdout"].startswith("0\nkept\n")  # one user inside, who is not one outside
    assert int(row["stdout"].split()[-1]) > 0  # the counter still counts
    assert row["stderr"].count("No such file") == 2
    assert "No space left" in row["full"]
    assert row["boxes"] == row["images"] == row["layers"] == row["tmp"] == []
    assert (home.stat().st_mode & 0o777) == 0o700
    assert (home / "keeper.log").read_text() == ""
