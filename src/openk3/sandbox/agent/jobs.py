"""Commands: start, stream, time out, kill as whole families, outlive their caller when asked to."""

import os
import resource
import signal
import subprocess
from typing import Any

from openk3.sandbox import frames
from openk3.sandbox.agent.job import Job, Output, spawn
from openk3.sandbox.agent.loop import Channel, Loop
from openk3.sandbox.agent.tracker import alive, kill_all, make_tracker, send_signal
from openk3.sandbox.agent.users import Users

KEEP_FINISHED = 64  # finished detached commands whose result can still be asked for


class Jobs:
    """All commands of one sandbox."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.users = Users()
        self.env: dict[str, str] = {}
        self.limits: dict[str, Any] = {}
        self.tracker = make_tracker()
        self.jobs: dict[str, Job] = {}
        self._count = 0
        loop.on_child = self.reap

    # -- starting ---------------------------------------------------------------------------

    def start(self, channel: Channel, spec: dict[str, Any]) -> None:
        """CALL start: see `Sandbox.start` for the fields of `spec`."""
        running = sum(not job.finished for job in self.jobs.values())
        if running >= self.limits.get("commands", 256):
            return channel.error("limit", f"{running} commands run already; wait or kill some")
        self._count += 1
        name = f"j{self._count}-{os.urandom(3).hex()}"
        try:
            job = spawn(name, spec, self.users, self.tracker, self.env, self.loop)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.tracker.forget(name)
            return channel.error("input", f"cannot start {spec.get('cmd')!r}: {error}")
        self.jobs[name] = job
        for output in job.outputs:
            self._listen(job, output)
        self._attach(job, channel)
        channel.event({"pid": job.pid, "job": name})
        if timeout := spec.get("timeout"):
            self.loop.after(timeout, lambda: self._time_out(job))
        return None

    # -- output -----------------------------------------------------------------------------

    def _listen(self, job: Job, output: Output) -> None:
        def ready() -> None:
            self._pump(job, output)

        self.loop.watch(output.fd, ready)

    def _pump(self, job: Job, output: Output) -> bool:
        """Move one piece from the pipe. True when the pipe had nothing more to give now."""
        room = min((channel.credit for channel in job.channels), default=frames.PIECE)
        if room <= 0:
            self.loop.unwatch(output.fd)  # resumes in _credit
            return False
        try:
            piece = os.read(output.fd, min(room, frames.PIECE))
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose last user is gone answers EIO
            piece = b""
        if not piece:
            self._close(output)
            self._maybe_finish(job)
            return True
        if not job.finished:
            self._deliver(job, output, piece)
        return False

    def _deliver(self, job: Job, output: Output, piece: bytes) -> None:
        job.num_output += len(piece)
        for channel in job.channels:
            channel.data(output.stream, piece)
        if not job.channels:
            output.keep(piece)
        limit = job.spec.get("output_limit") or self.limits.get("output_bytes")
        if limit and job.num_output > limit and job.reason is None:
            job.reason = "output_limit"
            kill_all(self.tracker, job.name)

    def _close(self, output: Output) -> None:
        if output.open:
            output.open = False
            self.loop.unwatch(output.fd)
            os.close(output.fd)

    def _credit(self, job: Job) -> None:
        for output in job.outputs:
            if output.open and output.fd not in self.loop.readers:
                self._listen(job, output)
        self._maybe_finish(job)

    # -- ending -----------------------------------------------------------------------------

    def reap(self) -> None:
        """SIGCHLD: collect every dead child; this process is init here."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for job in self.jobs.values():
                if job.pid == pid and job.status is None:
                    job.status = status
                    job.process.returncode = os.waitstatus_to_exitcode(status)
                    self._maybe_finish(job)
                    break

    def _maybe_finish(self, job: Job) -> None:
        """End once the leader is dead and its output delivered, whoever else holds the pipe."""
        if job.status is None or job.finished:
            return
        for output in job.outputs:
            while output.open:
                if min((channel.credit for channel in job.channels), default=1) <= 0:
                    return
                if self._pump(job, output):
                    break
            if job.finished:
                return
        job.finished = True
        if job.stdin:
            job.stdin.close()
        for channel in job.channels:
            channel.end(job.result())
        if job.channels or not job.detached:
            self._forget(job)
        job.channels = []
        self._trim()

    def _forget(self, job: Job) -> None:
        self.jobs.pop(job.name, None)
        self.tracker.forget(job.name)

    def _trim(self) -> None:
        finished = [job for job in self.jobs.values() if job.finished]
        for job in finished[:-KEEP_FINISHED]:
            self._forget(job)

    def _time_out(self, job: Job) -> None:
        if not job.finished:
            job.timed_out = True
            self.kill_family(job)

    def kill_family(self, job: Job) -> None:
        kill_all(self.tracker, job.name)
        if alive(job.pid) and job.status is None:
            send_signal([job.pid], signal.SIGKILL)
        self.reap()

    def _cancel(self, job: Job, channel: Channel) -> None:
        job.channels = [other for other in job.channels if other is not channel]
        self.loop.channels.pop(channel.number, None)
        if not job.detached and not job.channels and not job.finished:
            job.reason = "cancelled"
            self.kill_family(job)
        elif not job.finished:
            self._credit(job)

    def detach_all(self) -> None:
        """The callers' machine was switched off: what runs goes on, for others to attach to."""
        for job in self.jobs.values():
            job.detached = True
            job.channels = []
            self._credit(job)

    # -- talking to a running command -------------------------------------------------------

    def find(self, selector: dict[str, Any]) -> Job | None:
        for job in reversed(self.jobs.values()):
            if selector.get("job") == job.name or selector.get("pid") == job.pid:
                return job
            if selector.get("tag") and selector["tag"] == job.spec.get("tag"):
                return job
        return None

    def _attach(self, job: Job, channel: Channel) -> None:
        job.channels.append(channel)
        channel.on_credit = lambda: self._credit(job)
        channel.on_cancel = lambda: self._cancel(job, channel)
        channel.on_data = lambda piece: channel.grant(len(piece))  # nobody reads it
        if stdin := job.stdin:
            channel.on_data = lambda piece: stdin.feed(channel, piece)
            channel.on_eof = stdin.end

    def attach(self, channel: Channel, job: Job) -> None:
        """CALL attach: the kept tail first, then live output."""
        job.detached = True
        channel.event({"pid": job.pid, "job": job.name})
        for output in job.outputs:
            if output.tail:
                channel.data(output.stream, output.tail)
                output.tail = b""
        if job.finished:
            channel.end(job.result())
            self._forget(job)
        else:
            self._attach(job, channel)

    def signal(self, job: Job, number: int, family: bool) -> int:
        if family and number == signal.SIGKILL:
            self.kill_family(job)
            return 1
        pids = self.tracker.pids(job.name) if family else [job.pid]
        return send_signal([pid for pid in pids if alive(pid)], number)

    def listing(self) -> list[dict[str, Any]]:
        keys = ("cmd", "cwd", "env", "tag", "tty")
        return [
            {**{key: job.spec.get(key) for key in keys}, **job.result(), "job": job.name}
            for job in self.jobs.values()
        ]

    def apply_limits(self, limits: dict[str, Any]) -> None:
        """Limits every later command inherits. Root inside is exempt from the process count."""
        self.limits = limits
        count = int(limits.get("processes", 256))
        if limits.get("inherit", True):
            resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
