"""Templates from folders and from OCI and docker archives, which may be hostile."""

import hashlib
import io
import json
import tarfile

import pytest

from openk3.errors import InputError, NotFoundError
from openk3.sandbox.store.home import Home
from openk3.sandbox.templates import catalog, sources


def _tar(members: dict[str, bytes | str | None]) -> bytes:
    """name -> content, None for a folder, str for a symlink's target."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as out:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            out.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return raw.getvalue()


def _oci(layers: list[bytes]) -> bytes:
    blobs: dict[str, bytes] = {}

    def blob(data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return f"sha256:{digest}"

    manifest = {"layers": [{"digest": blob(layer)} for layer in layers]}
    index = {"manifests": [{"digest": blob(json.dumps(manifest).encode())}]}
    return _tar({"index.json": json.dumps(index).encode(), **blobs})


LAYERS = [
    _tar({"etc": None, "etc/one": b"1", "etc/two": b"2", "d": None, "d/old": b"x"}),
    _tar({"etc/.wh.one": b"", "d/.wh..wh..opq": b"", "d/new": b"y", "link": "etc/two"}),
]


@pytest.mark.parametrize("kind", ["oci", "docker", "plain"])
def test_archives_become_roots(tmp_path, kind):
    home = Home(tmp_path / "home")
    archive = tmp_path / "image.tar"
    if kind == "oci":
        archive.write_bytes(_oci(LAYERS))
    elif kind == "docker":
        manifest = json.dumps([{"Layers": ["a/layer.tar", "b/layer.tar"]}]).encode()
        parts = {"manifest.json": manifest, "a/layer.tar": LAYERS[0], "b/layer.tar": LAYERS[1]}
        archive.write_bytes(_tar(parts))
    else:
        archive.write_bytes(_tar({"etc": None, "etc/two": b"2", "d": None, "d/new": b"y"}))
    root = sources.add(home, "img", str(archive)).root
    assert (root / "etc/two").read_text() == "2"
    assert not (root / "etc/one").exists()
    assert [place.name for place in (root / "d").iterdir()] == ["new"]
    assert "user:x:1000" in (root / "etc/passwd").read_text()
    assert (root / "proc").is_dir()
    assert catalog.get(home, "img").root == root


@pytest.mark.parametrize(
    "layer",
    [
        {"../out": b"bad"},
        {"link": "/", "link/out": b"bad"},
        {"link": "..", "link/../../out": b"bad"},
        {"link": "/", "link/.wh.out": b""},
    ],
)
def test_hostile_archives_stay_inside(tmp_path, layer):
    home = Home(tmp_path / "home")
    (tmp_path / "out").write_text("kept")
    archive = tmp_path / "image.tar"
    archive.write_bytes(_oci([_tar(layer)]))
    with pytest.raises(InputError, match="outside"):
        sources.add(home, "img", str(archive))
    assert (tmp_path / "out").read_text() == "kept"
    assert list(home.tmp.iterdir()) == []
    with pytest.raises(NotFoundError):
        catalog.get(home, "img")


def test_folders_and_names(tmp_path):
    home = Home(tmp_path / "home")
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin/tool").write_text("x")
    first = sources.add(home, "mine", str(source))
    (source / "bin/tool").write_text("changed")
    (source / "bin/more").write_text("y")
    second = sources.add(home, "mine", str(source))
    assert first.id != second.id
    assert (first.root / "bin/tool").read_text() == "x"  # what was made stays as it is
    assert catalog.get(home, "mine").id == second.id
    assert catalog.get(home, first.id).root == first.root
    for name in ("../up", "UP", ""):
        with pytest.raises(InputError, match="template name"):
            sources.add(home, name, str(source))
    with pytest.raises(InputError, match="folder, an OCI archive"):
        sources.add(home, "mine", str(tmp_path / "missing"))
