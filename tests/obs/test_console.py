"""The step line, its speed and its time left; the log; the progress bar; the sinks."""

import io
import logging
import subprocess
import sys
import types

import pytest

from openk3.errors import BackendError, ConfigError
from openk3.obs import Console, Progress, log, rows, sinks
from openk3.obs.console import duration


def row(step: int, **changes) -> rows.StepRow:
    values = {
        "step": step,
        "tokens": 100 * step,
        "flops": 1e9 * step,
        "seconds": 2.0 * step,
        "loss": 2.34567,
        "lr": 3e-3,
        "grad_norm": 0.912,
        "step_seconds": 0.5,
        "tokens_per_s": 200.0,
    }
    return rows.StepRow(**(values | changes))


def test_the_whole_line():
    line = Console(1000).line(
        row(120, bits_per_byte=1.25, mfu=0.412, memory_bytes=3 << 29, memory_total_bytes=10 << 30)
    )
    assert line == (
        "step 120/1000 12.0% | loss 2.3457 | bpb 1.2500 | lr 3.00e-03 | gnorm 0.91 | 200 tok/s | "
        "mfu 41.2% | mem 1.50 GiB 15% | eta ?"
    )


def test_unknowns_are_left_out_and_bad_steps_say_so():
    line = Console(10).line(row(10, bad="non-finite loss", loss=float("nan")))
    assert line == (
        "step 10/10 100.0% | loss nan | lr 3.00e-03 | gnorm 0.91 | 200 tok/s | eta ? | "
        "SKIPPED: non-finite loss"
    )


def test_warm_up_steps_do_not_count_and_eta_includes_evaluation():
    said: list[str] = []
    console = Console(100, warmup_steps=2, emit=said.append)
    console.step(row(1, step_seconds=60.0, seconds=60.0))
    console.step(row(2, step_seconds=60.0, seconds=120.0))
    assert console.tokens_per_s is None
    console.step(row(3, seconds=120.5))
    console.step(row(4, seconds=123.0))  # 2 s of evaluation after a step of 0.5 s
    assert console.tokens_per_s == 200.0
    assert console.eta(4) == 96 * 1.5
    assert said[-1].endswith("eta 2:24")


def test_every_thins_out_but_keeps_first_last_and_bad():
    said: list[str] = []
    console = Console(25, every=10, emit=said.append)
    for step in range(3, 26):
        console.step(row(step, bad="spike" if step == 7 else None))
    assert [int(line.split()[1].split("/")[0]) for line in said] == [3, 7, 10, 20, 25]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0:00"), (247, "4:07"), (3723, "1:02:03"), (183845, "2d 03:04:05")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_log_to_stream_and_file(tmp_path):
    stream, file = io.StringIO(), tmp_path / "logs" / "attempt_1.log"
    log.setup(file, stream=stream)
    log.get("train").info("one")
    log.get().warning("two")
    log.setup(file, quiet=True, stream=stream, rank=3)
    log.get("data").info("three")
    log.get("data").warning("four")
    log.close()
    assert stream.getvalue() == "one\nWARNING: two\n[rank 3] WARNING: four\n"
    lines = file.read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "INFO openk3.train: one",
        "WARNING openk3: two",
        "INFO openk3.data: three",
        "WARNING openk3.data: four",
    ]
    assert logging.getLogger("openk3").handlers == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Ticks:
    time = 0.0

    def now(self) -> float:
        return self.time


def test_progress_draws_on_a_terminal_only():
    quiet, screen, clock = io.StringIO(), Terminal(), Ticks()
    for stream in (quiet, screen):
        clock.time = 0.0
        with Progress(2000, "hashing", "B", stream=stream, clock=clock) as bar:
            for _ in range(1000):
                clock.time += 0.01
                bar.advance(2)
    assert quiet.getvalue() == ""
    drawn = screen.getvalue().split("\r\x1b[K")
    assert 90 <= len(drawn) <= 110  # ten a second for ten seconds
    assert drawn[-1] == f"hashing {'█' * 30} 100% 2k/2k B eta 0:00\n"
    assert " 50% 1k/2k B eta 0:05" in screen.getvalue()


def test_progress_of_nothing():
    screen = Terminal()
    with Progress(0, "empty", stream=screen):
        pass
    assert "100% 0/0" in screen.getvalue()


def test_scalars_by_tracker_name():
    axes = {"tokens": 8, "flops": 1e6, "seconds": 1.0}
    balance = rows.BalanceRow(step=1, **axes, layer=3, load=[1, 2], max_violation=0.5)
    assert sinks.scalars(balance.to_dict()) == {"balance/3/max_violation": 0.5}
    named = sinks.scalars(row(2, bad="spike").to_dict())
    assert named["step/loss"] == 2.34567
    assert named["step/tokens"] == 200
    assert "step/bad" not in named
    evaluated = rows.EvalRow(
        step=1, **axes, split="held", loss=1.0, bits_per_byte=2.0, num_tokens=3, num_bytes=4
    )
    assert sinks.scalars(evaluated.to_dict())["eval/held/bits_per_byte"] == 2.0


def test_sinks_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no tracker 'wandbb' \(did you mean 'wandb'\?\)"):
        sinks.make(["wandbb"], tmp_path, "id", {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BackendError, match=r"pip install 'openk3\[track\]'"):
        sinks.make(["wandb"], tmp_path, "id", {})
    sent = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *args: sent.append(args), flush=lambda: None, close=lambda: None
    )
    summary = types.SimpleNamespace(Writer=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    (sink,) = sinks.make(["tensorboard"], tmp_path, "id", {})
    sink.log(row(5).to_dict())
    sink.close()
    assert ("step/loss", 2.34567, 5) in sent


def test_no_tracker_is_imported_unasked():
    code = (
        "import sys, openk3.obs, openk3.obs.sinks\n"
        "print({'wandb', 'trackio', 'tensorboard', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
