"""A run folder becomes a page that stands alone, escapes what the model wrote, and draws truly."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest

from openk3 import report
from openk3.cli import main
from openk3.errors import BackendError, ConfigError
from openk3.obs import RunFolder, rows
from openk3.report import History, png, write_report
from openk3.report.curves import over_time
from openk3.report.figures import Bars, HeatMap, LineChart, Series
from openk3.report.inside import of_the_model
from openk3.report.svg import draw

NASTY = "</pre><script>alert('x')</script> & é ☃"


def axes(step: int) -> dict:
    return {"step": step, "tokens": 512 * step, "flops": 1e9 * step, "seconds": 0.5 * step}


def step_row(step: int, **more) -> rows.StepRow:
    look = {"lr": 1e-3, "grad_norm": 1.0, "step_seconds": 0.5, "tokens_per_s": 1024.0}
    return rows.StepRow(**axes(step), **({"loss": 8.0 / step + 1} | look | more))


def inside_rows(step: int, num_experts: int = 4):
    for layer in (1, 2):
        load = [10 * (layer + e) for e in range(num_experts)]
        worst = rows.max_violation(load)
        yield rows.BalanceRow(**axes(step), layer=layer, load=load, max_violation=worst)
    weights = {"layers.0.ffn": [0.25, 0.75], "layers.1.attn": [0.1, 0.2, 0.7], "output": [0.5, 0.5]}
    yield rows.AttnResRow(**axes(step), weights=weights)
    for layer in (0, 1):
        yield rows.DecayRow(**axes(step), layer=layer, edges=[-5.0, -1.0, 0.0], counts=[1, 3])


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "a & b", {"train": {"steps": 60}, "note": NASTY}) as run:
        run.metrics.write(rows.BaselineRow(**axes(0), name="5-byte n-gram", bits_per_byte=2.0))
        for step in range(1, 41):
            bad = {"bad": "spike", "loss": 1e6} if step == 7 else {}
            run.metrics.write(step_row(step, memory_bytes=1 << 30, max_logit=9.0, mfu=0.4, **bad))
            if step % 10 == 0:
                held = {"num_tokens": 10, "num_bytes": 30}
                look = {"split": "heldout", "loss": 2.0, "bits_per_byte": 20.0 / step}
                run.metrics.write(rows.EvalRow(**axes(step), **look, **held))
                for row in inside_rows(step):
                    run.metrics.write(row)
                run.metrics.write(rows.SampleRow(**axes(step), prompt="<b>", text=NASTY))
                run.metrics.write(rows.EventRow(**axes(step), what="checkpoint", detail="1 MB"))
    return run.path


def pictures(page: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_page_stands_alone_and_escapes(run):
    (page_path,) = write_report(run, plots=False)
    page = page_path.read_text("utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page
    assert "<h1>a &amp; b</h1>" in page
    assert not re.search(r"""(src|href)=|url\(|https?://""", page)
    titles = [picture.get("aria-label") for picture in pictures(page)]
    for title in ("Loss", "Bits per byte", "Learning rate", "Gradient norm", "Throughput"):
        assert titles.count(title) == 4  # over steps, tokens, FLOPs and time
    for title in ("Expert load at step 40", "AttnRes weights at step 40", "KDA log-decay by layer"):
        assert titles.count(title) == 1
    for word in ("1 steps were skipped", "5-byte n-gram 2", "checkpoint", "spike", "prefers-color"):
        assert word in page


def test_summary(run):
    facts = History.load(run).summary()
    assert (facts["steps"], facts["total_steps"], facts["skipped_steps"]) == (40, 60, 1)
    assert facts["bits_per_byte"] == {"heldout": {"last": 0.5, "best": 0.5}}
    assert facts["baselines"] == {"5-byte n-gram": 2.0}
    assert facts["loss"] < 10  # the skipped step's million is left out
    assert facts["tokens_per_s"] == 1024.0


def test_skipped_steps_are_crosses_and_not_in_the_curve(run):
    loss = over_time(History.load(run), "step")[0]
    assert loss.marks == [(7, "step 7: spike")]
    assert max(y for s in loss.series for y in s.y if y is not None) < 10


def test_superseded_rows_are_not_drawn(run):
    with RunFolder.resume(run, 20) as again:
        again.metrics.write(step_row(21, loss=3.0))
    history = History.load(run)
    loss = over_time(history, "step")[0]
    assert max(loss.series[0].x) == 21
    assert loss.rules == ((20, "resumed"),)
    assert history.summary()["attempts"] == 2


def test_other_axes_put_rows_elsewhere(run):
    history = History.load(run)
    ends = {axis: max(over_time(history, axis)[0].series[0].x) for axis in ("tokens", "time")}
    assert ends == {"tokens": 512 * 40, "time": 20.0}


def test_live_and_empty_runs(tmp_path):
    with RunFolder.create(tmp_path, {}) as run:
        assert "No training step" in write_report(tmp_path, plots=False)[0].read_text("utf-8")
        run.metrics.write(step_row(1, loss=math.nan, grad_norm=math.inf))
        page = write_report(tmp_path, plots=False)[0].read_text("utf-8")
        assert "nan" not in page.partition("<body>")[2]
        run.metrics.write(step_row(2))
        with open(tmp_path / "metrics.jsonl", "ab") as live:
            live.write(b'{"kind": "st')
        assert History.load(tmp_path).summary()["steps"] == 2


def test_many_experts_are_grouped(tmp_path):
    with RunFolder.create(tmp_path, {}) as run:
        for row in inside_rows(1, num_experts=896):
            run.metrics.write(row)
    (load, *_) = of_the_model(History.load(tmp_path))
    assert isinstance(load, HeatMap)
    assert len(load.columns) == 64
    assert all(row == sorted(row, reverse=True) for row in load.values)
    assert all(math.isclose(sum(row) / 64, 1.0) for row in load.values)


def test_attn_res_sources_are_aligned(run):
    figure = next(f for f in of_the_model(History.load(run)) if f.name == "attn_res")
    assert figure.columns == ["embedding", "block 1", "running"]
    assert figure.rows[:2] == ["0.ffn", "1.attn"]
    assert figure.values[:2] == [[0.25, None, 0.75], [0.1, 0.2, 0.7]]


def test_png_plots(run, monkeypatch):
    pytest.importorskip("matplotlib", reason="PNG plots need the plot extra")
    curves, inside = report.over_time, report.of_the_model
    monkeypatch.setattr(report, "over_time", lambda history, axis: curves(history, axis)[:4])
    monkeypatch.setattr(report, "of_the_model", lambda history: inside(history)[::2])
    _page, *plots = write_report(run)
    names = "loss bits_per_byte lr grad_norm expert_load decay attn_res".split()
    assert [path.stem for path in plots] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    monkeypatch.setattr(png, "available", lambda: False)
    assert len(write_report(run)) == 1
    with pytest.raises(BackendError, match=r"openk3\[plot\]"):
        write_report(run, plots=True)


def test_verb(run, tmp_path, capsys):
    assert main(["report", str(run), "--no-plots"]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    out = tmp_path / "there" / "page.html"
    assert main(["report", str(run), "--no-plots", "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] == 40
    assert facts["files"] == [str(out)]
    assert out.is_file()


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "is no run folder" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        write_report(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def line_chart(series, **more) -> LineChart:
    look = {"name": "n", "title": "<t>", "x_label": "x & y", "y_label": "y"}
    return LineChart(series=series, **(look | more))


def test_curves_fall_where_they_should():
    svg = ET.fromstring(draw(line_chart([Series(name="a", x=[0, 5, 10], y=[0.0, None, 1.0])])))
    paths = [e.get("d") for e in svg.iter() if e.tag.endswith("path")]
    assert len(paths) == 2  # the gap breaks the line
    (x0, y0), (x1, y1) = [tuple(map(float, p[1:].split())) for p in paths]
    assert x0 == 58
    assert x1 == 560 - 14
    assert y1 < y0


def test_level_words_do_not_touch():
    levels = [(1.0, "a"), (1.01, "b"), (1.02, "c")]
    chart = line_chart([Series(name="s", x=[0, 1], y=[0.0, 5.0])], levels=levels)
    svg = ET.fromstring(draw(chart))
    ys = [float(e.get("y")) for e in svg.iter() if e.get("class") == "small"]
    assert min(a - b for a, b in itertools.pairwise(ys)) >= 11.9


def test_heat_map_and_bars_are_valid_svg():
    look = {"name": "n", "title": "t", "x_label": "x", "y_label": "y"}
    heat = HeatMap(
        **look,
        columns=["<a>", "b"],
        rows=["r"],
        values=[[0.0, None]],
        low=0.0,
        high=0.0,
    )
    cells = [e for e in ET.fromstring(draw(heat)).iter() if e.tag.endswith("title")]
    assert [cell.text for cell in cells] == ["r, <a>: 0"]
    bars = ET.fromstring(draw(Bars(**look, edges=[0.0, 1.0, 2.0], heights=[1.0, 3.0])))
    heights = [float(e.get("height")) for e in bars.iter() if e.get("class") == "bar"]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)


def test_a_run_whose_numbers_are_not_finite_has_a_page(tmp_path):
    bad = {"loss": math.nan, "bits_per_byte": math.nan}
    with RunFolder.create(tmp_path / "run", {"train": {"steps": 1}}) as run:
        run.metrics.write(rows.BaselineRow(**axes(0), name="other", bits_per_byte=math.nan))
        run.metrics.write(step_row(1, loss=math.nan, bad="the loss is nan"))
        run.metrics.write(
            rows.EvalRow(**axes(1), split="heldout", num_tokens=10, num_bytes=30, **bad)
        )
    page = write_report(run.path, plots=False)[0].read_text()
    assert page.count("not finite") == 4  # the tile, both numbers of the evaluation, the baseline
