"""metrics.jsonl survives kills, full disks and resumes, and never loses a whole row."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.errors import DataError, InputError, StorageError
from openk3.obs import metrics
from openk3.obs.metrics import MetricsWriter, read_rows
from openk3.obs.rows import EventRow

AXES = {"tokens": 8, "flops": 1e6, "seconds": 1.0}


def step(number: int, **more) -> dict:
    return {"kind": "step", "step": number, **more}


def steps(path) -> list[int]:
    return [row["step"] for row in read_rows(path) if row["kind"] == "step"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def fill(path, last: int) -> None:
    writer = MetricsWriter(path)
    for number in range(1, last + 1):
        writer.write(step(number))
    writer.close()


def test_header_rows_and_non_finite_numbers(path):
    writer = MetricsWriter(path)
    writer.write(step(1, loss=float("nan"), text="é\n\u2028"))
    writer.write(EventRow(step=1, **AXES, what="done"))
    writer.sync()
    writer.close()
    header, first, event = read_rows(path)
    assert (header["kind"], header["schema"]) == ("header", 1)
    assert first == step(1, loss=None, text="é\n\u2028")
    assert event == {"kind": "event", "step": 1, **AXES, "what": "done", "detail": ""}
    assert len(path.read_text("utf-8").split("\n")) == 4


@pytest.mark.parametrize(
    "torn", [b'{"kind": "st', b"\x00" * 70000, b'{"kind": "step", "step": 4', b"7"]
)
def test_a_torn_last_line_is_ignored_then_cut(path, torn):
    fill(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps(path) == [1, 2, 3]
    writer = MetricsWriter(path)
    assert path.read_bytes() == whole
    assert writer.torn_bytes == len(torn)
    writer.mark_resume(3, 2)
    writer.write(step(4))
    writer.close()
    assert steps(path) == [1, 2, 3, 4]
    assert read_rows(path)[-2]["torn_bytes"] == len(torn)


def test_a_whole_row_without_its_newline_is_kept(path):
    fill(path, 3)
    os.truncate(path, path.stat().st_size - 1)
    writer = MetricsWriter(path)
    writer.write(step(4))
    writer.close()
    assert steps(path) == [1, 2, 3, 4]


@given(cut=st.integers(0, 200))
def test_cut_anywhere_every_whole_row_before_it_survives(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    fill(path, 5)
    data = path.read_bytes()[: max(0, path.stat().st_size - cut)]
    path.write_bytes(data)
    whole = max(0, data.count(b"\n") - 1)
    MetricsWriter(path).close()
    assert steps(path) in (list(range(1, whole + 1)), list(range(1, whole + 2)))


def test_rows_after_the_resumed_step_are_superseded_but_stay(path):
    fill(path, 5)
    writer = MetricsWriter(path)
    writer.mark_resume(3, attempt=2)
    writer.write(step(4, again=True))
    writer.close()
    kept = [row for row in read_rows(path) if row["kind"] == "step"]
    assert [row["step"] for row in kept] == [1, 2, 3, 4]
    assert kept[-1]["again"]
    assert len([r for r in read_rows(path, superseded=True) if r["kind"] == "step"]) == 6


def test_a_second_writer_is_refused(path):
    first = MetricsWriter(path)
    with pytest.raises(StorageError, match="another process is writing"):
        MetricsWriter(path)
    first.close()
    first.close()
    MetricsWriter(path).close()


def test_a_full_disk_leaves_whole_lines(path, monkeypatch):
    writer = MetricsWriter(path)
    writer.write(step(1))
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as patched:
        patched.setattr(metrics.os, "write", lambda file, data: write(file, data[:10]))
        with pytest.raises(StorageError, match="disk is full"):
            writer.write(step(2))
    assert path.read_bytes() == before
    writer.write(step(2))
    writer.close()
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("row", [{"step": 1}, {"kind": "step"}, {"kind": "step", "step": "1"}])
def test_rows_need_kind_and_step(path, row):
    writer = MetricsWriter(path)
    with pytest.raises(InputError, match="kind and an integer step"):
        writer.write(row)
    writer.close()


def test_bad_files_are_named(path):
    with pytest.raises(DataError, match="cannot read"):
        read_rows(path)
    fill(path, 3)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], "{broken", *lines[2:]]))
    with pytest.raises(DataError, match="line 3"):
        read_rows(path)
    path.write_text(json.dumps({"kind": "header", "schema": 99}) + "\n")
    with pytest.raises(DataError, match="schema 99"):
        read_rows(path)
    path.write_text(json.dumps(step(1)) + "\n")
    with pytest.raises(DataError, match="first line is not a header"):
        read_rows(path)


def test_sinks_receive_every_row_and_are_closed(path):
    class Collect:
        rows, closed = [], 0

        def log(self, row):
            self.rows.append(row)

        def close(self):
            self.closed += 1

    sink = Collect()
    writer = MetricsWriter(path, [sink])
    writer.write(step(1, loss=2.0))
    writer.close()
    assert sink.rows == [step(1, loss=2.0)]
    assert sink.closed == 1


def test_kill_nine_while_writing(path):
    code = (
        "import sys; from openk3.obs.metrics import MetricsWriter; w = MetricsWriter(sys.argv[1])\n"
        "for n in range(1, 10**7):\n"
        "    w.write({'kind': 'step', 'step': n, 'pad': 'x' * 500})\n"
        "    if n == 200: print('go', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    writer = MetricsWriter(path)
    writer.close()
    seen = steps(path)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 200
