"""Documents from files: order, names, cutting, and what is skipped or refused."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.helpers import write_files
from openk3.data.sources import Document, Files, cut, is_text
from openk3.errors import ConfigError, DataError


def test_folders_are_walked_in_order_and_counted(tmp_path: Path) -> None:
    write_files(
        tmp_path / "src",
        {
            "b.py": b"b = 1\n",
            "a.txt": "ärger\n".encode(),
            "sub/c.md": b"# c\n",
            "sub/image.png": b"\x89PNG\0\0",
            "latin.txt": b"\xe4rger\n",
            "empty.py": b" \n",
            ".git/config": b"hidden\n",
            ".hidden": b"hidden\n",
            "__pycache__/x.py": b"hidden\n",
        },
    )
    source = Files([tmp_path / "src"])
    for _ in range(2):  # a source can be read again, and its counts do not add up
        assert [name for name, _ in source] == ["src/a.txt", "src/b.py", "src/sub/c.md"]
        assert source.skipped == Counter(binary=2, empty=1)


def test_json_lines_by_field(tmp_path: Path) -> None:
    records = [{"body": "one"}, {"body": "zwei ü \ud800"}, {"body": ""}]
    lines = "\n\n".join(map(json.dumps, records))
    (tmp_path / "x.jsonl").write_text(lines)
    source = Files([tmp_path / "x.jsonl"], field="body")
    assert list(source) == [
        Document("x.jsonl:1", b"one"),
        Document("x.jsonl:3", "zwei ü ?".encode()),
    ]
    assert source.skipped == Counter(empty=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"x\.jsonl, line 2: not valid JSON"),
        ('{"txt": "a"}', r"line 2: no field 'text' \(did you mean 'txt'\?\); it has \['txt'\]"),
        ('{"text": 5}', "line 2: field 'text' is int, a string is needed"),
        ("[1]", "line 2: no field 'text'"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=message):
        list(Files([tmp_path]))


def test_bad_paths_and_sizes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder: .*nowhere"):
        Files([tmp_path, tmp_path / "nowhere"])
    with pytest.raises(DataError, match="none was given"):
        Files([])
    with pytest.raises(ConfigError, match="the least is 16"):
        Files([tmp_path], max_bytes=3)


@given(text=st.text(alphabet="ab \nü€😀", max_size=200), max_bytes=st.integers(16, 60))
@settings(max_examples=100, deadline=None)
def test_cut_keeps_every_byte(text: str, max_bytes: int) -> None:
    raw = text.encode()
    pieces = list(cut(Document("n", raw), max_bytes))
    assert b"".join(piece.text for piece in pieces) == raw
    assert all(len(piece.text) <= max_bytes and is_text(piece.text) for piece in pieces)
    assert len({piece.name for piece in pieces}) == len(pieces)


def test_cut_prefers_line_ends() -> None:
    pieces = list(cut(Document("n", b"0123456789\n" * 3), 25))
    assert pieces == [
        Document("n#0", b"0123456789\n0123456789\n"),
        Document("n#1", b"0123456789\n"),
    ]


def test_is_text() -> None:
    assert is_text("grüße\n".encode())
    assert not is_text(b"a\0b")
    assert not is_text(b"\xff\xfe")
