"""Files of a gVisor sandbox: content, odd names, tricks with paths, full disks."""

import asyncio
import os
import resource

import pytest

from openk3.errors import (
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
    StorageError,
)
from openk3.sandbox import Limits, Sandbox
from openk3.sandbox.files import safe_name


@pytest.fixture(scope="module")
def box(either):
    return either


def test_write_read_stat_move_remove(aio, box):
    async def go() -> None:
        data = bytes(range(256)) * 3000
        entry = await box.files.write("deep/er/x.bin", data, mode=0o640)
        assert (entry.path, entry.size, entry.mode) == (
            "/home/user/deep/er/x.bin",
            len(data),
            0o640,
        )
        assert entry.uid == 1000
        assert await box.files.read("deep/er/x.bin") == data
        part = [p async for p in box.files.stream("deep/er/x.bin", offset=250, limit=10)]
        assert b"".join(part) == data[250:260]
        with pytest.raises(LimitError):
            await box.files.read("deep/er/x.bin", max_bytes=1000)
        await box.files.write("deep/er/x.bin", "short")
        assert (await box.files.stat("deep/er/x.bin")).mode == 0o640
        assert (await box.files.move("deep/er/x.bin", "new/y")).path == "/home/user/new/y"
        assert not await box.files.exists("deep/er/x.bin")
        assert [(e.name, e.kind) for e in await box.files.list(depth=2)].count(("y", "file")) == 1
        assert await box.files.mkdir("new/dir")
        assert not await box.files.mkdir("new/dir")
        await box.files.remove("new")
        with pytest.raises(NotFoundError):
            await box.files.read("new/y")
        with pytest.raises(InputError, match="regular"):
            await box.files.read("/home")
        with pytest.raises(InputError, match="directory"):
            await box.files.list("/etc/passwd")

    aio.run(go())


def test_reported_path_tricks_stay_inside(aio, box, tmp_path):
    """Symlinks, `..` and writes through links reach the sandbox's own files, never the host's."""
    secret = tmp_path / "secret"
    secret.write_text("host secret")

    async def go() -> None:
        await box.run(
            f"ln -s {secret} link; ln -s {tmp_path} dir; ln -s / slash; ln -s /etc/hosts h"
        )
        for path in ("link", str(secret), f"slash{secret}", f"../../../..{secret}", "dir/secret"):
            with pytest.raises(NotFoundError):
                await box.files.read(path)
        with pytest.raises(DeniedError):
            await box.files.write("h", "changed")
        await box.run(f"mkdir -p {tmp_path}", user="root")
        await box.files.write("link", "inside", user="root")
        assert secret.read_text() == "host secret"
        assert sorted(os.listdir(tmp_path)) == ["secret"]
        inside = await box.files.read_text("/etc/passwd")
        assert "user:x:1000" in inside
        assert inside != open("/etc/passwd").read()  # noqa: SIM115
        for path in ("a\0b", "a" * 5000, "/proc/self/mem/x", "/dev/null"):
            with pytest.raises(OpenK3Error):
                await box.files.write(path, "x")
        with pytest.raises(InputError):
            await box.files.read("/dev/zero")
        await box.run("mkfifo pipe")
        with pytest.raises(InputError):
            await box.files.read("pipe")

    aio.run(go())


def test_symlink_race_cannot_reach_the_host(aio, box, tmp_path):
    (tmp_path / "f").write_text("host")

    async def go() -> None:
        await box.run("mkdir a; echo in > a/f")
        flip = await box.start(
            f"while true; do mv a b; ln -s {tmp_path} a; rm a; mv b a; done 2>/dev/null"
        )
        for _ in range(60):
            try:
                assert await box.files.read("a/f") == b"in\n"
                await box.files.write("a/g", "x")
            except (NotFoundError, DeniedError, InputError):
                continue
        await flip.kill()

    aio.run(go())
    assert sorted(os.listdir(tmp_path)) == ["f"]


@pytest.mark.parametrize(
    "name", ["new\nline", "漢字🙂", "e\u0301", " spaced ", "-rf", "quote'\"", "x" * 255]
)
def test_reported_odd_names_round_trip(aio, box, name):
    async def go() -> None:
        await box.files.write(f"odd/{name}", name)
        assert name in [entry.name for entry in await box.files.list("odd")]
        assert await box.files.read_text(f"odd/{name}") == name
        await box.files.remove(f"odd/{name}")

    aio.run(go())


def test_paths_as_long_as_there_can_be_work_and_longer_ones_are_refused(aio, box):
    deep = "/".join(["d" * 199] * 20)

    async def go() -> None:
        room = 4095 - len("/home/user/") - len(deep) - 1
        name = "n" * min(room, 255)
        await box.files.write(f"{deep}/{name}", "deep")
        assert await box.files.read_text(f"{deep}/{name}") == "deep"
        for path in (f"{deep}/{'n' * 300}", f"{deep}/{deep}", "x" * 4096):
            with pytest.raises(InputError, match="too long"):
                await box.files.write(path, "x")
            with pytest.raises(InputError, match="too long"):
                await box.files.read(path)
        await box.files.remove("d" * 199)
        assert not await box.files.exists("d" * 199)

    aio.run(go())


def test_names_that_are_no_text_survive(aio, box):
    async def go() -> None:
        await box.run("mkdir raw; printf x > raw/$'\\xff\\xfe'")
        (entry,) = await box.files.list("raw")
        assert os.fsencode(entry.name) == b"\xff\xfe"
        assert await box.files.read(entry.path) == b"x"

    aio.run(go())


def test_reported_many_files_in_one_call(aio, box, tmp_path):
    async def go() -> None:
        files = {f"many/{n % 10}/{n}": f"content {n}" for n in range(500)}
        await box.files.write_many(files)
        count = await box.run("find many -type f | wc -l; cat many/7/497")
        assert count.stdout == "500\ncontent 497"
        assert await box.files.download("many", tmp_path / "out") == 500
        assert (tmp_path / "out" / "7" / "497").read_text() == "content 497"
        os.chmod(tmp_path / "out" / "0" / "0", 0o755)
        assert await box.files.upload(tmp_path / "out", "again") == 500
        assert (await box.files.stat("again/0/0")).mode == 0o755

    aio.run(go())


def test_download_takes_no_symlink_and_no_way_out(aio, box, tmp_path):
    async def go() -> None:
        await box.run("mkdir d; echo x > d/f; ln -s /etc/passwd d/link")
        (tmp_path / "d").mkdir()
        (tmp_path / "target").write_text("kept")
        (tmp_path / "d" / "f").symlink_to(tmp_path / "target")
        with pytest.raises(OSError, match="symbolic"):
            await box.files.download("d", tmp_path / "d")
        assert (tmp_path / "target").read_text() == "kept"
        assert await box.files.download("d", tmp_path / "e") == 1

    aio.run(go())
    for name in ("..", "a/b", "", ".", "x\0"):
        with pytest.raises(InputError):
            safe_name(name)


def test_watch_reports_changes(aio, box):
    async def go() -> set[tuple[str, str]]:
        await box.files.mkdir("w")
        seen: set[tuple[str, str]] = set()
        watch = box.files.watch("w", recursive=True)
        first = asyncio.ensure_future(anext(watch))
        while not first.done():
            await box.run("mkdir -p w/sub; echo x >> w/sub/f; sleep 0.05")
        await first
        await box.run("echo y > w/late; rm w/late")
        async for event in watch:
            seen.add((event["name"], event["type"]))
            if ("late", "remove") in seen:
                break
        await watch.aclose()
        return seen

    assert ("late", "create") in aio.run(go())


def test_reported_full_disk_is_an_error_of_that_sandbox_and_room_returns(aio, either):
    pool, backend = either.pool, either.info.backend

    async def go() -> None:
        box = await Sandbox.create(pool=pool, backend=backend, limits=Limits(disk_mb=24))
        with pytest.raises(StorageError, match="No space"):
            await box.files.write("big", b"x" * (40 << 20))
        assert [e.name for e in await box.files.list()] == []
        filled = await box.run("head -c 60000000 /dev/zero > big")
        assert "No space left" in filled.stderr
        await box.run("rm big")
        await box.files.write("small", "fits")
        await box.pause(memory=box.info.capabilities.memory)
        await box.resume()
        assert await box.files.read_text("small") == "fits"
        await box.kill()

    aio.run(go())


def test_reported_upload_of_any_size_in_bounded_memory(aio, box):
    async def pieces():
        for _ in range(200):
            yield b"0123456789abcdef" * 65536

    async def go() -> None:
        entry = await box.files.write("big", pieces())
        assert entry.size == 200 << 20
        await box.files.remove("big")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    aio.run(go())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # KiB
