"""The engine behind asyncio: streams, aborts, failures, shutdown."""

import asyncio

import pytest

from openk3.engine.service import AsyncEngine
from openk3.engine.types import Request, SamplingParams
from openk3.errors import BackendError, ConflictError, InputError, LimitError
from scripted_engine import ScriptedEngine


def request(name: str, max_tokens: int = 5, size: int = 3) -> Request:
    return Request(name, tuple(range(size)), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def counting(_: Request) -> range:
    return range(1, 100_000)


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(stream) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    async for outputs in stream:
        for output in outputs:
            got.setdefault(output.request_id, []).extend(output.new_ids)
    return got


def test_requests_run_together_and_each_gets_its_own():
    async def go():
        engine = ScriptedEngine(counting)
        async with AsyncEngine(engine) as service:
            streams = [
                await service.submit([request(f"{i}-{j}", 3 + i) for j in range(2)])
                for i in range(4)
            ]
            results = await asyncio.gather(*map(collect, streams))
        for i, result in enumerate(results):
            assert result == {f"{i}-{j}": list(range(1, 4 + i)) for j in range(2)}
        assert engine.aborts == []  # a normal end aborts nothing
        assert set(engine.ended.values()) == {1}

    run(go())


def test_a16_a_closed_stream_is_aborted_within_two_steps():
    async def go():
        engine = ScriptedEngine(counting)
        async with AsyncEngine(engine) as service:
            stream = await service.submit([request("a", 20_000), request("b", 20_000)])
            await anext(stream)
            engine.gate.clear()
            steps = engine.steps
            stream.close()
            stream.close()  # a second time is nothing
            engine.gate.set()
            assert await collect(await service.submit([request("next", 2)])) == {"next": [1, 2]}
        assert sorted(engine.aborts) == ["a", "b"]
        assert engine.steps <= steps + 2 + 2  # two of the stream that was closed, two of the next
        assert engine.running == {}

    run(go())


def test_one_request_of_a_stream_can_be_ended_alone():
    async def go():
        engine = ScriptedEngine(counting)
        async with AsyncEngine(engine) as service:
            stream = await service.submit([request("a", 20_000), request("b", 20_000)])
            first = sum(len(o.new_ids) for o in await anext(stream) if o.request_id == "b")
            engine.gate.clear()
            stream.abort("a")
            engine.gate.set()
            got = await collect(stream)
        assert set(got) == {"b"}
        assert first + len(got["b"]) == 20_000
        assert engine.aborts == ["a"]
        stream.abort("b")  # it has ended
        assert engine.aborts == ["a"]

    run(go())


def test_a_refused_request_takes_its_siblings_along_and_harms_no_other():
    async def go():
        engine = ScriptedEngine(counting, max_context=30_000, max_queued=4)
        async with AsyncEngine(engine) as service:
            stream = await service.submit([request("ok", 20_000)])
            with pytest.raises(InputError, match="30000 tokens"):
                await service.submit([request("x"), request("y", size=30_000)])
            with pytest.raises(LimitError):
                await service.submit([request(f"q{i}") for i in range(5)])
            assert len((await collect(stream))["ok"]) == 20_000
        assert engine.running == {}

    run(go())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_ends_its_requests_with_an_error():
    async def go():
        engine = ScriptedEngine(counting)
        engine.fail_at_step = 4
        service = AsyncEngine(engine)
        await service.start()
        stream = await service.submit([request("a", 50)])
        outputs = [o async for batch in stream for o in batch]
        assert outputs[-1].finish_reason == "error"
        assert "the engine stopped" in str(outputs[-1].error)
        assert not service.is_healthy
        assert "scripted failure" in str(service.failure)
        with pytest.raises(BackendError, match="not running"):
            await service.submit([request("b")])
        await service.close()

    run(go())


def test_a_reader_far_behind_is_cut_off_and_bounded():
    async def go():
        engine = ScriptedEngine(counting)
        async with AsyncEngine(engine, max_unread=4_000) as service:
            slow = await service.submit([request("slow", 20_000)])
            for name in "fgh":  # never behind by more than all that it asked for
                stream = await service.submit([request(name, 3_000)])
                assert len((await collect(stream))[name]) == 3_000
            outputs = [o async for batch in slow for o in batch]
        assert [o.finish_reason for o in outputs] == ["error"]
        assert "behind" in str(outputs[0].error)
        assert engine.aborts == ["slow"]

    run(go())


@pytest.mark.parametrize(("grace", "reason"), [(30.0, "length"), (0.0, "abort")])
def test_shutdown_lets_requests_finish_or_hands_them_back(grace, reason):
    async def go():
        engine = ScriptedEngine(counting)
        service = AsyncEngine(engine)
        await service.start()
        stream = await service.submit([request("a", 20_000)])
        await anext(stream)
        closing = asyncio.create_task(service.close(grace))
        await asyncio.sleep(0)
        with pytest.raises(ConflictError, match="shutting down"):
            await service.submit([request("b")])
        outputs = [o async for batch in stream for o in batch]
        await closing
        assert outputs[-1].finish_reason == reason
        assert engine.running == {}

    run(go())


def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    async def go():
        engine = ScriptedEngine(counting)
        async with AsyncEngine(engine) as service:
            running = await service.submit([request("r", 20_000)])
            engine.gate.clear()
            waiting = asyncio.create_task(service.submit([request("w", 500)]))
            await asyncio.sleep(0)
            waiting.cancel()
            engine.gate.set()
            await collect(running)
            await collect(await service.submit([request("after", 1)]))
        assert "w" not in engine.running
        assert engine.running == {}

    run(go())
