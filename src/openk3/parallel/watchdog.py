"""No silent hangs: a process that dies, freezes or hangs ends the run, and the others say which.

Every process tells a small key-value store where it is, step and phase, whenever that changes, and
again and again that it is alive. A thread looks after three things:

    a beat that stops for LOST_S seconds       that process died or is frozen
    no progress here for `seconds`             some process hangs: the one that is furthest behind
    a verdict that another process has reached

Then the reason is logged and this process ends, so torchrun can end the others and start again.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from openk3.errors import LostProcessError, OpenK3Error
from openk3.obs import log
from openk3.parallel import world
from openk3.parallel.launcher import START_S
from openk3.parallel.world import Pulse, World

LOST_S = 20.0
"""A process that has not been heard of for so long is lost; less where `seconds` is less."""
BEATS = 4
"""Silent beats that mark the lost process where a connection broke."""
EXIT_CODE = 70
VERDICT = "verdict"
_OWN_FILES = (__file__, world.__file__)
_STORE_GONE = (RuntimeError, ConnectionError)
_KEEPER_GONE = "the store of this run is gone, and with it its keeper: torchrun, or rank 0"


def locate_main_thread() -> tuple[str, bool]:
    """`file:line function` of the main thread, and whether it waits in a collective there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back  # it is just telling
    if frame is None:
        return "its end", False
    code, line = frame.f_code, frame.f_lineno
    waits = "torch/distributed/" in code.co_filename or code.co_name == "wait"
    return f"{Path(code.co_filename).name}:{line} {code.co_name}", waits


class Watchdog:
    """Watches the run from one process. `beat` is one look around; a thread repeats it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        pulse: Pulse,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        locate: Callable[[], tuple[str, bool]] = locate_main_thread,
    ) -> None:
        """seconds: without progress, after which the run has hung."""
        self.store, self.rank, self.size, self.pulse = store, rank, size, pulse
        self.seconds, self.lost_s = seconds, min(LOST_S, seconds)
        self.interval = min(2.0, self.lost_s / 10)
        self._clock, self._pause, self._locate, self._beats = clock, pause, locate, 0
        self._progress = (pulse.count, clock())
        self._heard: dict[int, tuple[int, float]] = {}
        self._others = [(rank + i) % size for i in range(1, size)]

    def beat(self) -> str | None:
        """Tell where this process is and look at the others; why the run must end, or None."""
        self.tell()
        if self.store.check([VERDICT]):
            return self.store.get(VERDICT).decode()
        if self.pulse.count != self._progress[0]:
            self._progress = (self.pulse.count, self._clock())
        stalled = self._clock() - self._progress[1]
        # one neighbour each is enough: before every row of dead ones stands one that lives
        found = self._lost([*self._neighbour()], self.lost_s)
        if found is None and stalled >= self.limit:
            found = self._behind()
        return None if found is None else self._conclude(found)

    @property
    def limit(self) -> float:
        """Seconds without progress that are too many now."""
        return self.seconds if self.pulse.step else max(self.seconds, START_S)

    def explain(self) -> str | None:
        """After a collective has failed here: why, or None if this process failed first."""
        for _ in range(2 * BEATS):
            self.tell()
            if self.store.check([VERDICT]):
                return self.store.get(VERDICT).decode()
            # the connection is broken already, so less silence is proof enough
            if found := self._lost(self._others, BEATS * self.interval):
                return self._conclude(found)
            self._pause(self.interval)
        return None

    def fail(self, error: BaseException) -> str:
        """Let the others know that this process failed."""
        kind = type(error).__name__
        return self._conclude(f"rank {self.rank} failed in {self.pulse}: {kind}: {error}")

    def tell(self, *, left: bool = False) -> None:
        """Say that this process is alive, and where it is, or that it has left in good order."""
        self._beats += 1
        at, waits = self._locate()
        place = {"beat": self._beats, "step": self.pulse.step, "phase": self.pulse.phase}
        place |= {"count": self.pulse.count, "at": at, "waits": waits, "left": left}
        self.store.set(f"pulse/{self.rank}", json.dumps(place))

    def _conclude(self, reason: str) -> str:
        """The first reason is everyone's."""
        return self.store.compare_set(VERDICT, "", reason).decode()

    def _ask(self, rank: int) -> dict[str, Any] | None:
        key = f"pulse/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _neighbour(self) -> Iterator[int]:
        """The next process that has not left, if there is one."""
        for rank in self._others:
            place = self._ask(rank)
            if place is None or not place["left"]:
                yield rank
                return

    def _lost(self, ranks: list[int], patience: float) -> str | None:
        now = self._clock()
        for rank in ranks:
            place = self._ask(rank)
            beat = 0 if place is None else place["beat"]
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
            silent = now - self._heard[rank][1]
            if place is not None and not place["left"] and silent >= patience:
                return (
                    f"rank {rank} died or is frozen: it has not been heard of for {silent:.0f} s, "
                    f"and was last in {_where(place)}"
                )
        return None

    def _behind(self) -> str:
        asked = {r: self._ask(r) for r in range(self.size)}
        places = {r: place for r, place in asked.items() if place and not place["left"]}
        behind = [r for r, place in asked.items() if place is None]
        if not behind:
            least = min(place["count"] for place in places.values())
            behind = [r for r, place in places.items() if place["count"] == least]
            # in one phase some wait in a collective for one that has not come so far
            behind = [r for r in behind if not places[r]["waits"]] or behind
        told = "; ".join(f"rank {r} {_hangs(asked[r])}" for r in behind[:4])
        more = f" and {len(behind) - 4} more" if len(behind) > 4 else ""
        waiting = next((r for r in places if r not in behind), None)
        others = "" if waiting is None else f"; rank {waiting} waits in {_where(places[waiting])}"
        setting = "" if self.limit > self.seconds else " (run.hang_seconds)"
        return f"no progress for {self.limit:.0f} s{setting}: {told}{more}{others}"


def _hangs(place: dict[str, Any] | None) -> str:
    return "has not begun" if place is None else f"hangs in {_where(place)}"


def _where(place: dict[str, Any]) -> str:
    return f"step {place['step']}, phase {place['phase']}, at {place['at']}"


class watched:  # noqa: N801  (used as a function)
    """Watch a run of several processes while the block runs.

    A failure in the block becomes LostProcessError where another process is the cause.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self._done = threading.Event()

    def __enter__(self) -> None:
        if self.world.size == 1:
            return
        rank, size, self.pulse = self.world.rank, self.world.size, self.world.pulse
        store = _connect(size, self.seconds)
        self._dog = Watchdog(store, rank, size, self.pulse, self.seconds)
        self._thread = threading.Thread(
            target=_look_around, args=(self._dog, self._done), daemon=True
        )
        self._thread.start()
        self.pulse.listener = self._dog.tell

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.world.size == 1:
            return
        self.pulse.listener = None
        self._done.set()
        self._thread.join()
        if error is None or world.RAISED_EVERYWHERE in getattr(error, "__notes__", ()):
            with suppress(*_STORE_GONE):  # its keeper may have left before
                self._dog.tell(left=True)
            return
        reason = None
        try:
            # a broken connection is a RuntimeError to torch, and so is much else
            if isinstance(error, RuntimeError) and not isinstance(error, OpenK3Error):
                reason = self._dog.explain()
            if reason is None:
                error.add_note(self._dog.fail(error))
        except _STORE_GONE as gone:
            reason = f"{_KEEPER_GONE}; rank {self.world.rank} was in {self.pulse} ({gone})"
        if reason is not None:
            raise LostProcessError(reason) from error


def _look_around(dog: Watchdog, done: threading.Event) -> None:
    while not done.wait(dog.interval):
        try:
            verdict = dog.beat()
        except _STORE_GONE as error:
            verdict = f"{_KEEPER_GONE} ({error})"
        if verdict is not None and not done.is_set():
            log.get("watchdog").error("rank %d, in %s, ends: %s", dog.rank, dog.pulse, verdict)
            os._exit(EXIT_CODE)  # the main thread waits for a process that will never answer


def _connect(size: int, seconds: float) -> dist.Store:
    """A connection of our own to the store that the processes met at."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=False,
        timeout=timedelta(seconds=max(5.0, seconds)),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"watchdog/{attempt}", store)
