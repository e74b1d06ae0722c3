"""The fake says what it is and keeps the interface's promises."""

import asyncio

import pytest

from openk3.errors import BackendError, ConflictError, NotFoundError
from openk3.sandbox import Result, Sandbox, State


def test_answers_files_and_life():
    async def go() -> None:
        box = await Sandbox.create(backend="inprocess", env={"A": "1"})
        assert (box.info.isolation, box.info.backend) == ("none", "inprocess")
        box.answers["pytest"] = lambda _, cmd: Result("1 passed\n", "", 0)
        box.answers["cat f"] = lambda fake, _: fake.content["/home/user/f"].decode()
        await box.files.write("f", "hello")
        assert (await box.run("cat f")).stdout == "hello"
        assert (await box.run("pytest -q")).exit_code == 0
        assert (await box.run("rm")).exit_code == 127
        assert box.commands == ["cat f", "pytest -q", "rm"]
        with pytest.raises(BackendError):
            await box.start("sleep 1")
        (copy,) = await box.fork(1)
        await copy.files.write("f", "changed")
        saved = await box.snapshot()
        assert await box.files.read_text("f") == "hello"
        await box.pause()
        assert box.info.state == State.PAUSED
        with pytest.raises(ConflictError):
            await box.files.read("f")
        generation = box.info.generation
        await box.resume()
        assert box.info.generation != generation
        again = await Sandbox.create(saved.id, backend="inprocess")
        assert [entry.path for entry in await again.files.list("/home", depth=3)] == [
            "/home/user",
            "/home/user/f",
        ]
        assert (await again.files.move("f", "d/g")).path == "/home/user/d/g"
        assert await box.kill()
        assert not await box.kill()
        with pytest.raises(NotFoundError):
            await box.run("cat f")

    asyncio.run(go())
