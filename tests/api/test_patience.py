"""Connections on which no whole request comes, over a real socket."""

import asyncio
import resource
from contextlib import asynccontextmanager

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the serve extra is not installed")

from openk3.api.patience import allow_many_files, impatient  # noqa: E402
from openk3.api.serving import listen  # noqa: E402

WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def protocols():
    from uvicorn.protocols.http.h11_impl import H11Protocol

    found = [H11Protocol]
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return found
    return [*found, HttpToolsProtocol]


@asynccontextmanager
async def connected(protocol, limit_s, app, **options):
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, http=impatient(protocol, limit_s, **options), log_level="error",
                            lifespan="off", timeout_keep_alive=60)  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.001)
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def ok(scope, receive, send):
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("protocol", protocols())
@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-y"])
def test_headers_that_never_end_are_408_also_behind_a_whole_request(protocol, sent):
    async def run() -> None:
        async with connected(protocol, 0.2, ok) as (reader, writer):
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")  # and the connection ends
        if sent:
            async with connected(protocol, 0.2, ok) as (reader, writer):
                writer.write(WHOLE)
                await reader.readuntil(b"ok")
                for byte in sent:  # no byte gives it more time
                    writer.write(bytes([byte]))
                assert (await reader.read()).startswith(b"HTTP/1.1 408 ")

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("protocol", protocols())
def test_a_request_that_came_whole_has_all_the_time_it_wants(protocol):
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        await gate.wait()
        await ok(scope, receive, send)

    async def run() -> None:
        async with connected(protocol, 0.4, slow) as (reader, writer):
            for _ in range(2):
                gate.clear()
                writer.write(WHOLE)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.readexactly(1), 0.6)
                gate.set()
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            with pytest.raises(TimeoutError):  # uvicorn's limit for idle connections is another
                await asyncio.wait_for(reader.read(), 0.6)

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("protocol", protocols())
@pytest.mark.parametrize("last", [False, True])
def test_an_answer_that_nobody_reads_is_dropped(protocol, last):
    """Slow readers are waited for as long as they read."""
    size, lost = 64 << 20, asyncio.Event()

    class Told(protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    async def large(scope, receive, send):
        headers = [(b"content-length", str(size).encode()), *([(b"connection", b"close")] * last)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})

    async def run() -> None:
        async with connected(Told, 1.0, large) as (reader, writer):
            writer.write(WHOLE)
            for _ in range(4):
                await reader.readexactly(size // 8)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(lost.wait(), 0.3)
            await asyncio.wait_for(lost.wait(), 10)

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("protocol", protocols())
def test_beyond_so_many_callers_new_ones_are_told_to_come_back(protocol):
    async def run() -> None:
        async with connected(protocol, 60, ok, max_callers=2) as (reader, writer):
            where = writer.get_extra_info("peername")
            other = await asyncio.open_connection(*where)
            refused, more = await asyncio.open_connection(*where)
            assert (await refused.read()).startswith(b"HTTP/1.1 503 ")
            more.close()
            for said, asked in ((reader, writer), other):
                asked.write(WHOLE)
                assert (await said.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            other[1].close()
            await other[0].read()
            again, asked = await asyncio.open_connection(*where)
            asked.write(WHOLE)
            assert (await again.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            asked.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_limit_of_open_files_is_raised_as_far_as_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        callers = allow_many_files()
        assert callers == min(before[1], 1 << 16) - 416
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 1 << 16), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
