"""One command: how it is started, and what is known of it until its result is fetched."""

import fcntl
import functools
import os
import subprocess
import termios
from typing import Any

from openk3.sandbox import frames
from openk3.sandbox.agent.loop import Channel, Loop
from openk3.sandbox.agent.stdin import Stdin
from openk3.sandbox.agent.terminal import Size, Terminal, set_size
from openk3.sandbox.agent.tracker import MARK, GroupTracker, ScanTracker
from openk3.sandbox.agent.users import User, Users

TAIL = 64 << 10  # bytes of output kept for whoever attaches later

Tracker = GroupTracker | ScanTracker


class Output:
    """One pipe of a job. Bytes go to attached channels; without any, the newest are kept."""

    def __init__(self, stream: int, fd: int) -> None:
        self.stream, self.fd = stream, fd
        self.open = True
        self.tail = b""

    def keep(self, piece: bytes) -> None:
        self.tail = (self.tail + piece)[-TAIL:]


class Job:
    """One command and everything it started."""

    def __init__(self, name: str, spec: dict[str, Any], process: subprocess.Popen[bytes]) -> None:
        self.name, self.spec, self.process = name, spec, process
        self.pid = process.pid
        self.outputs: list[Output] = []
        self.stdin: Stdin | None = None
        self.terminal: Terminal | None = None
        self.channels: list[Channel] = []
        self.detached = bool(spec.get("detach"))
        self.status: int | None = None  # as os.waitpid gives it
        self.finished = False
        self.timed_out = False
        self.reason: str | None = None
        self.num_output = 0

    def result(self) -> dict[str, Any]:
        code = os.waitstatus_to_exitcode(self.status) if self.status is not None else None
        if code is None:
            return {"pid": self.pid, "exit_code": None, "running": True}
        return {
            "pid": self.pid,
            "exit_code": 128 - code if code < 0 else code,
            "signal": -code if code < 0 else None,
            "timed_out": self.timed_out,
            "reason": self.reason,
        }


def spawn(
    name: str, spec: dict[str, Any], users: Users, tracker: Tracker, env: dict[str, str], loop: Loop
) -> Job:
    """Start the command that `spec` (a ProcessRequest) describes, in a session of its own.

    Raises OSError, ValueError or SubprocessError when it cannot be started.
    """
    user = users.find(spec.get("user"))
    cwd = spec.get("cwd") or (user.home if os.path.isdir(user.home) else "/")
    argv = _argv(spec["cmd"])
    tty = spec.get("tty")
    master = slave = None
    if tty:
        master, slave = _open_terminal(tuple(tty))
    stdin = slave if tty else subprocess.PIPE if spec.get("stdin") else subprocess.DEVNULL
    out = slave if tty else subprocess.PIPE
    tracker.enter(name)
    try:
        process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=out,
            stderr=out,
            cwd=cwd,
            env={**_environment(user, spec), **env, **(spec.get("env") or {}), MARK: name},
            start_new_session=True,
            user=user.uid,
            group=user.gid,
            extra_groups=[user.gid] if not users.single else None,
            preexec_fn=_own_terminal if tty else None,
        )
    except BaseException:
        if master is not None:
            os.close(master)
        raise
    finally:
        tracker.leave()
        if slave is not None:
            os.close(slave)
    job = Job(name, spec, process)
    if master is not None:
        job.outputs = [Output(frames.STREAM_TTY, master)]
        job.stdin = Stdin(loop, os.dup(master), terminal=True)
        members = functools.partial(tracker.pids, name)
        job.terminal = Terminal(loop, job.outputs[0], job.pid, members)
    else:
        _take_pipes(job, loop)
    for output in job.outputs:
        os.set_blocking(output.fd, False)
    return job


def _open_terminal(size: Size) -> tuple[int, int]:
    master, slave = os.openpty()
    try:
        set_size(master, size)
    except BaseException:
        os.close(master)
        os.close(slave)
        raise
    os.set_blocking(master, False)
    return master, slave


def _environment(user: User, spec: dict[str, Any]) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "SHELL": user.shell,
        "LANG": "C.UTF-8",
        **({"TERM": "xterm-256color"} if spec.get("tty") else {}),
    }


def _take_pipes(job: Job, loop: Loop) -> None:
    """Plain descriptors in place of Popen's file objects, which would close them."""
    process = job.process
    for stream, pipe in ((frames.STREAM_OUT, process.stdout), (frames.STREAM_ERR, process.stderr)):
        assert pipe, "Popen was given pipes"
        job.outputs.append(Output(stream, os.dup(pipe.fileno())))
        pipe.close()
    if process.stdin:
        handle = os.dup(process.stdin.fileno())
        process.stdin.close()
        os.set_blocking(handle, False)
        job.stdin = Stdin(loop, handle, terminal=False)


def _argv(cmd: str | list[str]) -> list[str]:
    if isinstance(cmd, str):
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        return [shell, "-l", "-c", cmd]
    if not cmd:
        raise ValueError("an empty command")
    return list(cmd)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
