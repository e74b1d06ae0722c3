"""docs/vision.md is executed, in small: draw, build, train, look, convert, ask."""

import io
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openk3 import cli
from openk3.errors import DataError
from openk3.text.image import open_image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vision.md").read_text("utf-8")
SMALLER = {
    "--count 16000": "--count 60",
    "recipes/vision.toml": f"{ROOT / 'recipes' / 'vision.toml'} --train.steps 2 --run.threads 1",
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which every command of the page has run."""
    folder = tmp_path_factory.mktemp("vision")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in "".join(blocks("sh")).splitlines():
            for large, small in SMALLER.items():
                line = line.replace(large, small)
            words = shlex.split(line)
            out = io.StringIO()
            patch.setattr("sys.stdout", out)
            assert words[0] == "k3"
            assert cli.main(words[1:]) == 0, line
            said.append(out.getvalue())
    return folder, said


def test_commands(place):
    folder, said = place
    draw, build, train, look, convert = said
    assert "next: k3 data build --pictures" in draw
    assert re.search(r"heldout +\d+", build)
    assert re.search(r"captions \d+\.\d% right of \d+ held out", train)
    assert "k3 generate runs/vision --image FILE" in train
    assert look.endswith("\n")
    assert (folder / "models" / "vision" / "preprocessor_config.json").exists()
    assert convert


def test_the_whole_story_as_a_script(tmp_path):
    settings = {"K3": f"{sys.executable} -m openk3", "PYTHONPATH": str(ROOT / "src"),
                "COUNT": "40", "STEPS": "1", "OUT": str(tmp_path / "out")}  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "runs/vision.sh")],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"captions \d+\.\d% right of \d+ held out", done.stdout)


def test_examples(place, monkeypatch, capsys):
    folder, _ = place
    monkeypatch.chdir(folder)
    code = blocks("python")
    expected = re.findall(r"^# -> (.*)$", "\n".join(code), re.MULTILINE)
    namespace = {}
    for block in code:
        exec(compile(block, "docs/vision.md", "exec"), namespace)
    assert capsys.readouterr().out.splitlines() == expected


def test_generate_json_and_several_pictures(place, monkeypatch, capsys):
    folder, _ = place
    monkeypatch.chdir(folder)
    first, second = "data/drawings/000001.png", "data/drawings/000002.png"
    argv = ["generate", "models/vision", "a ", "--image", first, "--image", second]
    assert cli.main([*argv, "--json", "--temperature", "0", "--max-tokens", "3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompt"] == "a "
    assert facts["tokens"] <= 3


def test_bad_pictures_and_models_end_with_a_sentence(place, monkeypatch, capsys, tmp_path):
    folder, _ = place
    monkeypatch.chdir(folder)
    (tmp_path / "bad.png").write_bytes(b"nonsense")
    assert cli.main(["generate", "runs/vision", "--image", str(tmp_path / "bad.png")]) == 1
    assert "bad.png is none of PNG" in capsys.readouterr().err
    assert cli.main(["data", "build", "a", "b", "--pictures", "--out", "c"]) == 1
    assert "--pictures takes one JSONL file" in capsys.readouterr().err


def declares(width, height):
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind, data):
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_the_refusals_are_the_real_ones(tmp_path):
    (shown,) = blocks("text")
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image.save(
        tmp_path / "a.gif", save_all=True, append_images=[image.rotate(90), image.rotate(180)]
    )
    image.convert("CMYK").save(tmp_path / "a.jpg")
    (tmp_path / "a.svg").write_text("<svg/>")
    image.save(tmp_path / "a.png")
    (tmp_path / "bomb").mkdir()
    (tmp_path / "bomb" / "a.png").write_bytes(declares(12000, 9000))
    (tmp_path / "bomb" / "b.png").write_bytes(declares(30000, 30000))
    with pytest.raises(DataError, match=r"b\.png declares more pixels than are decoded"):
        open_image(tmp_path / "bomb" / "b.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    messages = []
    for name in ("bomb/a.png", "a.png", "a.gif", "a.jpg", "a.svg"):
        with pytest.raises(DataError) as caught:
            open_image(tmp_path / name)
        messages.append(str(caught.value).replace(f"{tmp_path}/", "").replace("bomb/", ""))
    lines = shown.splitlines()
    assert all(
        m.startswith(line.removesuffix("...")) for m, line in zip(messages, lines, strict=True)
    )
