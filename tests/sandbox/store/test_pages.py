"""The page store keeps each page once and gives back every byte."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import CheckpointError
from openk3.sandbox.store import pages


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3 * 4096 + 7)), max_size=5), st.data())
def test_any_files_come_back(tmp_path_factory, shapes, data):
    root = tmp_path_factory.mktemp("pages")
    store = root / "store"
    store.mkdir()
    rng = random.Random(data.draw(st.integers(0, 99)))
    files = []
    for number, (kind, size) in enumerate(shapes):
        block = rng.randbytes(4096) if kind else bytes(4096)
        file = root / f"f{number}"
        file.write_bytes((block * (kind + 1))[:size] + rng.randbytes(min(size, 5)))
        files.append(file)
    pages.pack(store, "g1", files)
    assert pages.pack(store, "g2", files) == 0
    out = root / "out"
    out.mkdir()
    for image in ("g1", "g2"):
        pages.unpack(store, image, out)
        assert all((out / file.name).read_bytes() == file.read_bytes() for file in files)


def test_a_moved_page_costs_nothing_and_sweeping_spares_shared_packs(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    blocks = [os.urandom(4096) for _ in range(50)]
    (tmp_path / "pages.img").write_bytes(b"".join(blocks))
    assert pages.pack(store, "g1", [tmp_path / "pages.img"]) == 50 * 4096
    (tmp_path / "pages.img").write_bytes(os.urandom(4096) + b"".join(blocks[1:]))
    assert pages.pack(store, "g2", [tmp_path / "pages.img"]) == 4096
    pages.sweep(store, {"g2"})  # takes the recipe of g1 only: its pack still serves g2
    assert len(list(store.iterdir())) == 5
    out = tmp_path / "out"
    out.mkdir()
    pages.unpack(store, "g2", out)
    assert (out / "pages.img").read_bytes() == (tmp_path / "pages.img").read_bytes()
    with pytest.raises(CheckpointError, match="g1"):
        pages.unpack(store, "g1", out)
    pages.sweep(store, set())
    assert list(store.iterdir()) == []


def test_a_pack_cut_short_is_told(tmp_path):
    (tmp_path / "f").write_bytes(os.urandom(40960))
    pages.pack(tmp_path, "g1", [tmp_path / "f"])
    pack = next(tmp_path.glob("*.pack"))
    with open(pack, "r+b") as handle:
        handle.truncate(4096)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="cut short"):
        pages.unpack(tmp_path, "g1", tmp_path / "out")
