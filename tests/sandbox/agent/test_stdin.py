"""Standard input of a command: everybody who feeds it is told what was taken, in order."""

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from openk3.sandbox.agent.loop import Channel, Loop
from openk3.sandbox.agent.stdin import Stdin


class FakeLoop:
    def __init__(self) -> None:
        self.channels: dict[int, FakeChannel] = {}
        self.ready: Callable[[], None] | None = None

    def watch(self, fd: int, callback: Callable[[], None], events: int) -> None:
        self.ready = callback

    def unwatch(self, fd: int) -> None:
        self.ready = None


class FakeChannel:
    def __init__(self, loop: FakeLoop, number: int) -> None:
        self.number, self.granted = number, 0
        loop.channels[number] = self

    def grant(self, num_bytes: int) -> None:
        self.granted += num_bytes


@pytest.fixture
def ends() -> Iterator[tuple[Any, Stdin, list[Any]]]:
    loop = FakeLoop()
    reading, writing = os.pipe2(os.O_NONBLOCK)
    stdin = Stdin(cast(Loop, loop), writing, terminal=False)
    channels = [FakeChannel(loop, number) for number in (1, 2)]
    yield reading, stdin, channels
    stdin.close()
    os.close(reading)


def _drain(reading: int, stdin: Stdin) -> bytes:
    loop, seen = cast(Any, stdin.loop), b""
    while True:
        try:
            piece = os.read(reading, 1 << 16)
        except BlockingIOError:
            return seen
        if not piece:
            return seen
        seen += piece
        if loop.ready:
            loop.ready()


def test_two_that_feed_a_full_pipe_are_both_granted_all_they_gave(ends):
    reading, stdin, (one, two) = ends
    stdin.feed(cast(Channel, one), b"a" * 100_000)
    stdin.feed(cast(Channel, two), b"b" * 100_000)
    assert one.granted + two.granted < 200_000
    assert _drain(reading, stdin) == b"a" * 100_000 + b"b" * 100_000
    assert (one.granted, two.granted) == (100_000, 100_000)
    stdin.end()
    assert not stdin.open


def test_what_nobody_reads_is_granted_too(ends):
    _, stdin, (one, two) = ends
    stdin.feed(cast(Channel, one), b"a" * 200_000)
    stdin.close()
    stdin.feed(cast(Channel, two), b"b")
    assert (one.granted, two.granted) == (200_000, 1)


def test_a_caller_that_left_is_not_spoken_to(ends):
    reading, stdin, (one, _) = ends
    stdin.feed(cast(Channel, one), b"a" * 100_000)
    before = one.granted
    del stdin.loop.channels[1]
    assert _drain(reading, stdin) == b"a" * 100_000
    assert one.granted == before
