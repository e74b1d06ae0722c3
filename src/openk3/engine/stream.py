"""What a coroutine reads of its requests while the engine goes on (`openk3.engine.service`)."""

import asyncio
from collections.abc import Callable, Sequence

from openk3.engine.types import Output, Request


class Stream:
    """The outputs of some requests, merged. Made by `AsyncEngine.submit`."""

    def __init__(
        self,
        requests: Sequence[Request],
        on_abort: Callable[[Sequence[str]], None],
        max_unread: int,
    ) -> None:
        """on_abort: told the ids of requests that nobody wants any more."""
        self._on_abort = on_abort
        self._open = {request.id for request in requests}
        self._unread: list[Output] = []
        self._num_unread = 0
        self._max_unread = max_unread
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return not self._open

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[Output]:
        """What came since the last call, at least one output."""
        while not self._unread:
            if self.is_done:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        outputs, self._unread, self._num_unread = self._unread, [], 0
        return outputs

    def abort(self, request_id: str) -> None:
        """End one of the requests; no output of it follows. Does nothing for one that has ended."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._unread = [o for o in self._unread if o.request_id != request_id]
            self._on_abort([request_id])
            self._news.set()

    def close(self) -> None:
        """End what is still running."""
        for request_id in list(self._open):
            self.abort(request_id)

    def push(self, output: Output) -> None:
        """Add an output; a reader that is too far behind loses what is still running."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._unread.append(output)
        self._num_unread += 1 + len(output.new_ids)
        self._news.set()
        if self._num_unread > self._max_unread and self._open:
            ids = sorted(self._open)
            self.close()
            reason = f"the reader is more than {self._max_unread} tokens behind"
            self._unread += [Output(i, (), "error", error=reason) for i in ids]
