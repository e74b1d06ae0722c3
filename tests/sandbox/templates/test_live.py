"""Machines from templates that were not made from this computer's Python."""

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from openk3.errors import BackendError
from openk3.sandbox import Sandbox, engines
from openk3.sandbox.store.home import Home
from openk3.sandbox.templates import sources
from openk3.sandbox.templates.elf import libraries

PROGRAMS = ("sh", "cat", "ls", "sleep")


def _layer(files: dict[str, Path]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as out:
        for name, source in files.items():
            out.add(os.path.realpath(source), name.lstrip("/"))
    return gzip.compress(raw.getvalue(), 1)


def _image(place: Path, layers: list[bytes]) -> None:
    """An OCI archive with compressed layers, as registries' tools write it."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return f"sha256:{digest}"

    manifest = {"schemaVersion": 2, "layers": [{"digest": blob(layer)} for layer in layers]}
    index = {"manifests": [{"digest": blob(json.dumps(manifest).encode())}]}
    blobs["index.json"] = json.dumps(index).encode()
    with tarfile.open(place, "w") as out:
        for name, data in blobs.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def test_machine_from_an_oci_archive(aio, pool, tmp_path):
    programs = {f"/bin/{name}": Path(str(shutil.which(name))) for name in PROGRAMS}
    needed = libraries(*(Path(os.path.realpath(path)) for path in programs.values()))
    (tmp_path / "note").write_text("from the second layer\n")
    base = {**programs, **{str(path): path for path in needed.values()}}
    _image(tmp_path / "image.tar", [_layer(base), _layer({"/etc/note": tmp_path / "note"})])
    template = sources.add(pool.home, "tiny", str(tmp_path / "image.tar"))

    async def go() -> None:
        box = await Sandbox.create("tiny", pool=pool)
        assert box.info.template == template.id
        assert (await box.run("cat /etc/note; ls /usr/bin/python3")).stdout == (
            "from the second layer\n"
        )
        sleeper = await box.start("sleep 1; echo woke", detach=True, tag="s")
        sleeper.let_go()
        await box.run("echo mine > f")
        await box.pause()
        await box.resume()
        assert (await (await box.attach(tag="s")).wait()).stdout == "woke\n"
        assert (await box.run("cat f")).stdout == "mine\n"
        await box.kill()

    aio.run(go())


FAKE = """#!/bin/sh
echo "$@" > {said}
[ "$2" = {fails} ] && {{ echo "E: no such suite" >&2; exit 1; }}
for root; do [ -d "$root" ] && mkdir -p "$root/bin" "$root/dev" && mknod "$root/dev/null" c 1 3
done; exit 0
"""


def test_debootstrap_is_asked_for_this_machines_mirror(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    home = Home(tmp_path / "home")
    said = tmp_path / "said"
    program = tmp_path / "debootstrap"
    program.write_text(FAKE.format(said=said, fails="wheezy"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    line = "deb [signed-by=/keys/d.gpg] http://mirror.example/debian trixie main"
    monkeypatch.setattr(engines, "mirror_lines", lambda suite: [line])
    root = sources.add(home, "trixie", "debootstrap:trixie").root
    words = said.read_text().split()
    assert words[:3] == ["--variant=minbase", "--keyring=/keys/d.gpg", "trixie"]
    assert words[4:] == ["http://mirror.example/debian"]
    assert "user:x:1000" in (root / "etc/passwd").read_text()
    program.write_text(FAKE.format(said=said, fails="--keyring=/keys/d.gpg"))
    with pytest.raises(BackendError, match="no such suite"):
        sources.add(home, "old", "debootstrap:wheezy")
    assert [place.name for place in home.tmp.iterdir()] == []
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendError, match="apt-get install debootstrap"):
        sources.add(home, "other", "debootstrap:sid")


@pytest.mark.slow
@pytest.mark.skipif("OPENK3_LONG" not in os.environ, reason="fetches 100 MB; set OPENK3_LONG=1")
def test_machine_from_debootstrap(aio, pool):
    if not shutil.which("debootstrap"):
        pytest.skip("debootstrap is not installed on this machine")
    try:
        sources.add(pool.home, "debian", "debootstrap:bookworm")
    except BackendError as error:
        pytest.skip(f"this machine cannot reach a Debian mirror: {error}")

    async def go() -> None:
        box = await Sandbox.create("debian", pool=pool)
        done = await box.run("cat /etc/debian_version; dpkg -s apt | head -1")
        assert done.stdout.startswith("12."), done
        assert "Package: apt" in done.stdout
        await box.pause()
        await box.resume()
        assert (await box.run("perl -e 'print 6*7'")).stdout == "42"
        await box.kill()

    aio.run(go())
