"""Backend agentenv against a real server of its protocol, in both SDK generations of it."""

import asyncio

import pytest

httpx = pytest.importorskip("httpx", reason="the sandbox extra is not installed")
pytest.importorskip("fastapi", reason="the serve extra is not installed")

from openk3.errors import (  # noqa: E402
    BackendError,
    ConfigError,
    ConflictError,
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
)
from openk3.sandbox import Limits, Sandbox, State  # noqa: E402
from openk3.sandbox.agentenv.link import RemoteConnection  # noqa: E402
from openk3.sandbox.agentenv.service import Service, raise_for  # noqa: E402
from sandbox_server import running_server  # noqa: E402

KEY = "e2b_" + "cd" * 20


@pytest.mark.parametrize("generation", [1, 2])
def test_the_same_interface_over_the_wire(home, gvisor, monkeypatch, generation):
    with running_server(home, KEY, sdk_generation=generation) as url:
        monkeypatch.setenv("E2B_API_URL", url)
        monkeypatch.setenv("E2B_API_KEY", KEY)
        asyncio.run(_exercise())
        monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
        with pytest.raises(DeniedError):
            asyncio.run(Sandbox.create())


async def _exercise() -> None:
    box = await Sandbox.create(timeout=600, env={"A": "b"}, metadata={"m": "1"})
    assert (box.info.backend, box.info.metadata) == ("agentenv", {"m": "1"})
    result = await box.run("echo $A; echo e >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("b\n", "e\n", 3)
    assert (await box.run("cat", input="stdin")).stdout == "stdin"
    assert (await box.run("sleep 500", timeout=1)).timed_out
    data = bytes(range(256)) * 2000
    assert (await box.files.write("d/ü", data)).size == len(data)
    assert await box.files.read("d/ü") == data
    assert [entry.name for entry in await box.files.list("d")] == ["ü"]
    assert not await box.files.mkdir("d")
    with pytest.raises(NotFoundError):
        await box.files.read("missing")
    with pytest.raises(NotFoundError):
        await box.attach(pid=99_999)
    job = await box.start("read x; echo got $x", stdin=True, detach=True, tag="t")
    await box.pause()
    assert box.info.state == State.PAUSED
    with pytest.raises(ConflictError, match="not running"):
        await box.run("true")
    with pytest.raises(ConflictError):
        await box.pause()
    await box.resume(timeout=600)
    again = await box.attach(pid=job.pid)
    await again.send(b"word\n")
    assert (await again.wait()).stdout == "got word\n"
    (copy,) = await box.fork(1, timeout=600)
    assert await copy.files.read("d/ü") == data
    (other,) = await copy.fork(1, timeout=600)
    await other.close()
    await other.close()
    assert await copy.files.read("d/ü") == data
    with pytest.raises(BackendError, match="memory"):
        await copy.fork(1, memory=False)
    assert await (await Sandbox.connect(other.id)).kill()
    saved = await box.snapshot()
    other = await Sandbox.create(saved.id, timeout=600)
    assert other.id in [row.id for row in await Sandbox.list()]
    await Sandbox.delete_snapshot(saved.id)
    with pytest.raises(NotFoundError):
        await Sandbox.delete_snapshot(saved.id)
    for each in (copy, other, box):
        assert await each.kill()
        assert not await each.kill()
    with pytest.raises(NotFoundError):
        await Sandbox.connect(box.id)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (502, '{"sandboxId":"x","message":"The sandbox was not found","code":502}', ConflictError),
        (404, "sandbox not found", ConflictError),  # AgentENV: unknown
        (410, "sandbox is paused", ConflictError),  # AgentENV: paused
        (404, '{"code":"not_found","message":"no such file"}', NotFoundError),
        (429, '{"code":429,"message":"slow down"}', LimitError),
    ],
)
def test_answers_of_different_services_become_the_same_errors(status, body, kind):
    with pytest.raises(kind):
        raise_for(status, body, inside=True)


def test_what_the_protocol_cannot_say_is_an_error(monkeypatch):
    monkeypatch.delenv("E2B_API_URL", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_URL"):
        asyncio.run(Sandbox.create(backend="agentenv"))
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with pytest.raises(BackendError, match="cannot reach"):
        asyncio.run(Sandbox.create())
    with pytest.raises(BackendError, match="idle_pause"):
        asyncio.run(Sandbox.create(idle_pause=5))
    with pytest.raises(BackendError, match="limits"):
        asyncio.run(Sandbox.create(limits=Limits(cpus=2)))


def test_a_stream_that_breaks_off_is_told(monkeypatch):
    monkeypatch.setenv("E2B_API_URL", "http://service")

    def answer(request: "httpx.Request") -> "httpx.Response":
        body = b'\x00\x00\x00\x00\x1e{"event":{"start":{"pid":42}}}'
        return httpx.Response(200, content=body)

    async def go() -> None:
        service = Service(httpx.MockTransport(answer))
        link = RemoteConnection(service, "s", "t", "user")
        messages = [message async for message in link.stream("process.Process/Start", {})]
        assert messages == [{"event": {"start": {"pid": 42}}}]
        with pytest.raises(InputError):
            raise_for(400, "{}")

    asyncio.run(go())
