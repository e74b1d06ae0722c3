"""Child processes of a keeper. As process 1 of its namespace it reaps everything itself."""

import asyncio
import os
import signal
import time
from contextlib import suppress

DYING_S = 120.0
# $K3_GROUPS lists cgroup.procs files to enter before becoming the program
_ENTER = 'for f in $K3_GROUPS; do echo $$ >"$f" || exit 97; done; exec "$@"'


class Children:
    """Spawn, await and kill. One instance per process: it owns SIGCHLD."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[int]] = {}
        self.early: dict[int, int] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            future = self.waiting.pop(pid, None)
            if future is None:
                self.early[pid] = code
            elif not future.done():
                future.set_result(code)

    def spawn(
        self,
        argv: list[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        groups: list[str] | None = None,
    ) -> tuple[int, asyncio.Future[int]]:
        """Start a program; (pid, future of its exit code, negative for a signal)."""
        null = os.open("/dev/null", os.O_RDWR)
        env = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}
        if groups:
            env["K3_GROUPS"] = " ".join(groups)
            argv = ["/bin/sh", "-c", _ENTER, "sh", *argv]
        actions = [
            (os.POSIX_SPAWN_DUP2, null if stdin is None else stdin, 0),
            (os.POSIX_SPAWN_DUP2, null if stdout is None else stdout, 1),
            (os.POSIX_SPAWN_DUP2, 2 if stderr is None else stderr, 2),
        ]
        try:
            pid = os.posix_spawnp(argv[0], argv, env, file_actions=actions)
        finally:
            os.close(null)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if pid in self.early:
            future.set_result(self.early.pop(pid))
        else:
            self.waiting[pid] = future
        self.early.clear()
        return pid, future

    async def run(self, argv: list[str], timeout: float) -> tuple[int, str]:
        """Run to the end: (exit code, what it printed). Killed after `timeout` seconds: -9."""
        out = os.memfd_create("out", os.MFD_CLOEXEC)
        try:
            pid, future = self.spawn(argv, stdout=out, stderr=out)
            try:
                code = await asyncio.wait_for(asyncio.shield(future), timeout)
            except TimeoutError:
                with suppress(ProcessLookupError):  # it ended just now
                    os.kill(pid, signal.SIGKILL)
                code = await future
            size = min(os.fstat(out).st_size, 65536)
            return code, os.pread(out, size, 0).decode(errors="replace")
        finally:
            os.close(out)

    async def kill_everything(self) -> None:
        """SIGKILL every other process of this pid namespace and wait until they are gone.

        Only ever called by process 1 of a namespace made for one sandbox.
        """
        assert os.getpid() == 1, "kill_everything outside of a keeper's own pid namespace"
        end, pause = time.monotonic() + DYING_S, 0.001
        while time.monotonic() < end:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self.reap()
            if not any(name.isdigit() and name != "1" for name in os.listdir("/proc")):
                return
            await asyncio.sleep(pause)  # one that writes to a slow disk dies when that is done
            pause = min(2 * pause, 0.05)
        raise OSError("processes of the sandbox do not die")
