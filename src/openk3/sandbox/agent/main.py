"""Process 1 of a sandbox: answers calls on standard input until that closes."""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openk3.sandbox import frames
from openk3.sandbox.agent.fileops import FileOps, explain
from openk3.sandbox.agent.job import Job
from openk3.sandbox.agent.jobs import Jobs
from openk3.sandbox.agent.loop import Channel, Loop
from openk3.sandbox.agent.tracker import send_signal
from openk3.sandbox.agent.watching import Watches

VERSION = 1


class Agent:
    """Dispatches calls. `quiesce` makes it silent until the next `hello` or `thaw`."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.jobs = Jobs(loop)
        self.files = FileOps(self.jobs.users)
        self.watches = Watches(loop, self.jobs.users)
        self.table: dict[str, Callable[[Channel, dict[str, Any]], None]] = {
            "hello": self.hello,
            "ping": lambda channel, _: channel.end({"time": time.time()}),
            "quiesce": self.quiesce,
            "sync": lambda channel, _: (os.sync(), channel.end()),
            "start": self.jobs.start,
            "attach": self._on_job(self.jobs.attach),
            "stdin": self._on_job(self._stdin),
            "signal": self._on_job(self._signal),
            "resize": self._on_job(self._resize),
            "jobs": lambda channel, _: channel.end(self.jobs.listing()),
            "watch": self._watch,
        }

    def handle(self, number: int, kind: int, payload: bytes) -> None:
        """One frame from the keeper."""
        if kind == frames.CALL:
            self._call(number, json.loads(payload))
            return
        channel = self.loop.channels.get(number)
        if channel is None:
            return  # it has ended; this crossed our END on the way
        if kind == frames.CREDIT:
            channel.credit += frames.credit_of(payload)
            if channel.on_credit:
                channel.on_credit()
        elif kind == frames.DATA and channel.on_data:
            channel.on_data(payload)
        elif kind == frames.EOF and channel.on_eof:
            channel.on_eof()
        elif kind == frames.CANCEL and channel.on_cancel:
            channel.on_cancel()

    def _call(self, number: int, params: dict[str, Any]) -> None:
        channel = self.loop.channels[number] = Channel(self.loop, number)
        op = params.pop("op", None)
        try:
            if op in self.files.table:
                self.files.call(op, channel, params)
            elif op in self.table:
                self.table[op](channel, params)
            else:
                channel.error("input", f"the agent knows no operation {op!r}")
        except (KeyError, TypeError, ValueError, OSError) as error:
            channel.error("input", f"{op}: missing or unusable parameter: {error}")

    def hello(self, channel: Channel, params: dict[str, Any]) -> None:
        """A new machine, or a new life of a paused one: take the identity that came with it."""
        generation = params["generation"]
        users = self.jobs.users
        users.default, users.single = params["user"], params["single_user"]
        self.jobs.env = {
            **params["env"],
            "K3_SANDBOX_ID": params["sandbox_id"],
            "K3_GENERATION": generation,
        }
        self.jobs.apply_limits(params["limits"])
        os.makedirs("/run/k3", exist_ok=True)
        Path("/run/k3/generation").write_text(generation + "\n")
        _set_hostname(params["hostname"])
        if params.get("detach_all"):
            self.jobs.detach_all()
        # "Reseed": ignored by default, handled by the Python template's sitecustomize.
        for job in list(self.jobs.jobs.values()):
            send_signal(self.jobs.tracker.pids(job.name), signal.SIGURG)
        channel.end({"version": VERSION, "generation": generation})

    def quiesce(self, channel: Channel, params: dict[str, Any]) -> None:
        """Answer, then say nothing more until spoken to: the pipes are about to be replaced."""
        del params
        self.loop.channels.pop(channel.number, None)
        before = time.monotonic()
        self.loop.send(frames.pack_json(channel.number, frames.END, {"quiet": True}))
        waiting: list[tuple[int, int, bytes]] = []
        while not waiting:
            waiting = self.loop.read_frames()
        self.loop.shift_timers(time.monotonic() - before)
        for frame in waiting:
            self.handle(*frame)

    def _on_job(self, act: Callable[..., None]) -> Callable[[Channel, dict[str, Any]], None]:
        def call(channel: Channel, params: dict[str, Any]) -> None:
            job = self.jobs.find(params)
            if job is None:
                who = {key: params.get(key) for key in ("job", "pid", "tag") if params.get(key)}
                channel.error("not_found", f"no command with {who} runs in this sandbox")
            elif act == self.jobs.attach:
                act(channel, job)
            else:
                act(channel, job, params)

        return call

    def _stdin(self, channel: Channel, job: Job, params: dict[str, Any]) -> None:
        """CALL stdin: DATA goes to the command; EOF ends the call, and the input if asked to."""

        stdin = job.stdin
        if stdin is None or not stdin.open:
            return channel.error("input", f"command {job.pid} has no open standard input")

        def end() -> None:
            if params.get("close"):
                stdin.end()
            channel.end()

        channel.on_data = lambda piece: stdin.feed(channel, piece)
        channel.on_eof = end
        return None

    def _signal(self, channel: Channel, job: Job, params: dict[str, Any]) -> None:
        number = int(params.get("signal", signal.SIGKILL))
        if not 0 < number < signal.NSIG:
            raise ValueError(f"no signal has number {number}")
        sent = self.jobs.signal(job, number, bool(params.get("family", True)))
        channel.end({"signalled": sent})

    def _resize(self, channel: Channel, job: Job, params: dict[str, Any]) -> None:
        if job.terminal:
            job.terminal.resize(tuple(params["tty"]))
        channel.end()

    def _watch(self, channel: Channel, params: dict[str, Any]) -> None:
        try:
            self.watches.start(channel, params)
        except (OSError, ValueError) as error:
            channel.error(*explain(error, params.get("path", "")))


def _set_hostname(name: str) -> None:
    raw = name.encode()
    ctypes.CDLL(None).sethostname(raw, len(raw))  # refused without privilege: cosmetic only


def main() -> None:
    """Serve standard input until it closes."""
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    loop = Loop(fd_in, fd_out)
    agent = Agent(loop)
    while True:
        for frame in loop.turn():
            agent.handle(*frame)
