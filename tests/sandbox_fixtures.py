"""A sandbox home per test process, real gVisor machines in it, and proof that nothing is left."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from box_checks import TIDY, settled
from openk3.errors import BackendError
from openk3.sandbox import Pool, Sandbox, engines, recovery
from openk3.sandbox.probe import probe
from openk3.sandbox.store.home import Home, mounts_below

HANGS_AFTER_S = 150.0
T = TypeVar("T")


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    # not below pytest's own folder: it is kept for later, and a template is 100 MB
    folder = Path(tempfile.mkdtemp(prefix="openk3-box-"))
    home = Home(folder / "home")
    try:
        yield home
        recovery.sweep(home)
        left = settled(home)
        assert left == TIDY, left
        log = home.path / "keeper.log"
        said = log.read_text() if log.exists() else ""
        assert not said, f"a keeper met what it did not expect:\n{said[-4000:]}"
    finally:
        for box in home.boxes.iterdir():
            recovery.force_end(home, box.name)
        assert not mounts_below(folder)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def gvisor(home: Home) -> str:
    """The backend's name, or a skip with the true reason."""
    try:
        try:
            engines.find("gvisor")
        except BackendError:
            engines.fetch("gvisor")
    except BackendError as error:
        pytest.skip(f"no runsc to test with: {error}")

    async def test() -> None:
        pool = Pool(home)
        found = await probe(pool, "gvisor")
        if not found.ok:
            pytest.skip(f"gVisor does not work on this machine: {found.reason}")
        await pool.warm("python")
        await pool.close()

    asyncio.run(test())
    return "gvisor"


@pytest.fixture(scope="session")
def bwrap(home: Home) -> str:
    """The backend's name, or a skip with the true reason."""
    try:
        try:
            engines.find("bwrap")
        except BackendError:
            engines.fetch("bwrap")
    except BackendError as error:
        pytest.skip(f"no bwrap to test with: {error}")
    found = asyncio.run(probe(Pool(home), "bwrap"))
    if not found.ok:
        pytest.skip(f"bubblewrap does not work on this machine: {found.reason}")
    return "bwrap"


class Bounded:
    """An event loop on which nothing waits for ever: what hangs is shown where it hangs."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(HANGS_AFTER_S):
                return await work

        return self.runner.run(bounded())


@pytest.fixture(scope="module")
def aio() -> Iterator[Bounded]:
    """One event loop for a module's machines."""
    with asyncio.Runner() as runner:
        yield Bounded(runner)


@pytest.fixture(scope="module")
def pool(home: Home, gvisor: str, aio: Bounded) -> Iterator[Pool]:
    async def make() -> Pool:
        return Pool(home)

    async def tidy(pool: Pool) -> None:
        await pool.close()
        for record in recovery.records(home):
            await pool.kill(record.id)

    pool = aio.run(make())
    yield pool
    aio.run(tidy(pool))


@pytest.fixture(scope="module")
def box(pool: Pool, aio: Bounded) -> Iterator[Sandbox]:
    """One machine that a module's tests share."""
    box = aio.run(Sandbox.create(pool=pool, timeout=1200))
    yield box
    aio.run(box.kill())


@pytest.fixture(scope="module", params=["gvisor", "bwrap"])
def either(request: pytest.FixtureRequest, home: Home, aio: Bounded) -> Iterator[Sandbox]:
    """A machine of each local backend in turn."""
    backend = request.getfixturevalue(request.param)

    async def make() -> tuple[Pool, Sandbox]:
        pool = Pool(home)
        return pool, await Sandbox.create(pool=pool, backend=backend, timeout=1200)

    async def end() -> None:
        await box.kill()
        await pool.close()

    pool, box = aio.run(make())
    yield box
    aio.run(end())


@pytest.fixture
def fresh(pool: Pool, aio: Bounded) -> Iterator[Sandbox]:
    """A machine of a test's own."""
    box = aio.run(Sandbox.create(pool=pool, timeout=1200))
    yield box
    aio.run(box.kill())
