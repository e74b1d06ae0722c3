"""What happens to a sandbox without anybody asking: its machine ends, its time is up, it idles."""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from openk3.errors import OpenK3Error
from openk3.sandbox import events

if TYPE_CHECKING:
    from openk3.sandbox.keeper.keeper import Keeper

PING_EVERY_S, PING_TIMEOUT_S = 20.0, 60.0
RETRY_PAUSE_S = 30.0
EXIT_WAIT_S = 5.0


class Watch:
    """The chores of one keeper."""

    def __init__(self, keeper: "Keeper") -> None:
        self.keeper = keeper
        self.last_activity = time.monotonic()
        self.num_oom_kills = 0

    def touch(self) -> None:
        """A client did something."""
        self.last_activity = time.monotonic()

    async def machine(self) -> None:
        """The machine ending by itself ends the sandbox, or drops it to its last generation."""
        keeper = self.keeper
        while not keeper.done.is_set():
            closed = keeper.link.closed
            await closed.wait()
            await keeper.generations.settled()
            if closed is keeper.link.closed:
                await self._exited()
                await keeper.crash(keeper.machine.death_reason())

    async def _exited(self) -> None:
        """The pipes close first; the program's end and the kernel's count of OOM kills follow."""
        if self.keeper.machine.exit:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.keeper.machine.exit), EXIT_WAIT_S)

    async def time(self) -> None:
        """Deadlines, idle pause and a sign of life, once a second."""
        keeper, last_ping = self.keeper, time.monotonic()
        while not keeper.done.is_set():
            await asyncio.sleep(1.0)
            if not keeper.home.box(keeper.record.id).exists():
                await keeper.end("its folder was deleted")
            if keeper.busy or not keeper.committed:
                continue
            if keeper.machine.group.oom_kills() > self.num_oom_kills:
                self.num_oom_kills = keeper.machine.group.oom_kills()
                events.emit(keeper.home, "oom_kill", keeper.record.id, count=self.num_oom_kills)
            if keeper.link.routes:
                self.touch()
            idle = keeper.record.idle_pause
            if keeper.record.deadline and time.time() >= keeper.record.deadline:
                await self.deadline(keeper.record.on_timeout)
            elif idle and time.monotonic() - self.last_activity > idle:
                await self.deadline("pause")
            elif time.monotonic() - last_ping > PING_EVERY_S:
                last_ping = time.monotonic()
                await self._ping()

    async def deadline(self, action: str) -> None:
        """`kill` or `pause` the sandbox; a pause that is refused is tried again later."""
        keeper = self.keeper
        if action == "kill":
            await keeper.end("its time was up")
            return
        memory = keeper.machine.plan.backend == "gvisor"
        if not memory and not keeper.record.allow_files_only:
            await keeper.end("its time was up and this backend cannot pause processes")
            return
        try:
            await keeper.generations.checkpoint(stay=False, memory=memory)
        except (OpenK3Error, OSError) as error:
            events.emit(keeper.home, "pause_failed", keeper.record.id, reason=str(error))
            keeper.record.deadline = time.time() + RETRY_PAUSE_S
            self.touch()

    async def _ping(self) -> None:
        try:
            await self.keeper.link.call("ping", PING_TIMEOUT_S)
        except TimeoutError:
            if not self.keeper.busy:
                await self.keeper.crash("unresponsive")
        except ConnectionError:
            return  # `machine` deals with it
