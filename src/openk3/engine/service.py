"""The engine behind asyncio: one thread steps it, any number of coroutines follow their requests.

    async with AsyncEngine(engine) as service:
        stream = await service.submit([Request(...)])
        async for outputs in stream: ...

Everything that touches the engine happens on its thread, between two steps. A stream that is closed
before its requests are through (a client went away) has them aborted there, so that at most the
step that is running still works for it. A reader that falls behind holds up nobody: what it has not
read waits as one list of ids, and beyond `max_unread` its requests are aborted.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from openk3.engine.stream import Stream
from openk3.engine.types import Output, Request, Stats
from openk3.errors import BackendError, ConflictError, OpenK3Error
from openk3.obs import log

MAX_UNREAD = 1 << 16


class SteppedEngine(Protocol):
    """What a service drives: `openk3.engine.Engine`, or a scripted one."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Output]: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> Stats: ...


class AsyncEngine:
    """Runs an engine on a thread of its own, from `start` to `close`."""

    def __init__(
        self,
        engine: SteppedEngine,
        *,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        self.engine = engine
        self._max_unread = max_unread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Stream] = {}  # on the loop's side
        self._asked: set[asyncio.Future[None]] = set()
        self._active: set[str] = set()  # on the thread's side
        self._idle = asyncio.Event()
        self._stats = engine.stats()
        self.draining = False
        """No new requests are taken."""
        self.failure: str | None = None
        """Why the engine stopped, if it failed."""

    async def __aenter__(self) -> "AsyncEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin stepping; the running event loop is where outputs arrive."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether the engine runs."""
        return self._thread.is_alive() and self.failure is None

    def stats(self) -> Stats:
        """The engine's counters as they were after its last step."""
        return self._stats

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Start requests together.

        Raises what the engine's `add` raises (InputError, LimitError; then none of them runs),
        ConflictError while shutting down, BackendError when the engine has failed.
        """
        self._require_running()
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()
        self._asked.add(accepted)
        stream = Stream(requests, self._abort, self._max_unread)
        self._streams |= {request.id: stream for request in requests}
        self._idle.clear()
        self._do(lambda: self._add(requests, accepted))
        try:
            await accepted
        except BaseException:  # refused, or the caller was cancelled while it waited
            stream.close()
            self._forget(request.id for request in requests)
            raise
        finally:
            self._asked.discard(accepted)
        return stream

    def drain(self, grace_s: float | None = None) -> None:
        """Take no new requests; end those that run after `grace_s` seconds. Any thread may call."""
        self.draining = True
        if grace_s is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, grace_s, self.abort_all)

    def abort_all(self) -> None:
        """End every request; its stream gets a last output with finish_reason "abort"."""
        ids = list(self._streams)
        self._deliver([Output(request_id, (), "abort") for request_id in ids])
        self._abort(ids)

    async def close(self, grace_s: float = 0.0) -> None:
        """Let running requests finish for `grace_s` seconds, end the others, stop the thread."""
        self.drain()
        if self._thread.is_alive() and grace_s > 0:
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                log.get("engine").warning("shutdown: %d requests end early", len(self._streams))
        self.abort_all()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _require_running(self) -> None:
        if self.failure is not None or not (self.draining or self._thread.is_alive()):
            why = "it failed, the server's log says why" if self.failure else "it never started"
            raise BackendError(f"the engine is not running: {why}")
        if self.draining:
            raise ConflictError("the server is shutting down; send this to another one")

    # The loop's side.

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if output.finish_reason is not None:
                self._forget([output.request_id])
            if stream is not None:
                stream.push(output)

    def _forget(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _abort(self, ids: Sequence[str]) -> None:
        self._forget(ids)
        self._do(lambda: self._abort_now(ids))

    def _do(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._next():
                outputs = self.engine.step()
                self._stats = self.engine.stats()
                if outputs:
                    ended = [o.request_id for o in outputs if o.finish_reason is not None]
                    self._active.difference_update(ended)
                    self._call(lambda outputs=outputs: self._deliver(outputs))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self._call(lambda: self._fail(reason))
            raise

    def _next(self) -> bool:
        """Do what was asked for; wait while there is nothing to step. False to stop."""
        while True:
            with self._wake:
                while not (self._commands or self._active or self._stopping):
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if commands:
                self._stats = self.engine.stats()
            if self._active:
                return True
            if self._stopping:
                return False

    def _add(self, requests: Sequence[Request], accepted: "asyncio.Future[None]") -> None:
        added: list[str] = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request.id)
        except OpenK3Error as error:
            refusal = error
            for request_id in added:
                self.engine.abort(request_id)
            self._call(lambda: accepted.done() or accepted.set_exception(refusal))
            return
        self._active.update(added)
        self._call(lambda: accepted.done() or accepted.set_result(None))

    def _abort_now(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            if request_id in self._active:  # else it has ended by itself meanwhile
                self._active.discard(request_id)
                self.engine.abort(request_id)

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None, "the thread starts in start()"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        log.get("engine").error("the engine stopped: %s", reason)
        for accepted in self._asked:
            accepted.done() or accepted.set_exception(BackendError("the engine stopped"))
        ids = list(self._streams)
        self._deliver([Output(i, (), "error", error="the engine stopped") for i in ids])
