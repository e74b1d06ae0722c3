"""The report as one HTML file: no network, no scripts, readable in light and dark."""

from collections.abc import Iterator
from html import escape
from importlib import resources
from typing import Any

from openk3.config.dump import to_toml
from openk3.obs.console import duration
from openk3.report.curves import over_time
from openk3.report.figures import Figure
from openk3.report.history import AXES, History
from openk3.report.inside import of_the_model
from openk3.report.scale import short
from openk3.report.svg import draw

SHOWN_SAMPLES = 4


def render(history: History) -> str:
    """The whole page. Every text of the run is escaped."""
    style = resources.files("openk3.report").joinpath("page.css").read_text("utf-8")
    sections = [_header(history), *_curves(history), *_inside(history), *_samples(history)]
    sections += [*_evaluations(history), *_events(history), *_settings(history)]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(history.name)}: OpenK3 run</title>",
            f"<style>\n{style}</style></head>\n<body>",
            *sections,
            "</body></html>\n",
        ]
    )


def _header(history: History) -> str:
    facts = history.summary()
    of = f" of {facts['total_steps']:,}" if facts["total_steps"] else ""
    tiles = [("steps", f"{facts['steps']:,}{of}")]
    for split, value in facts["bits_per_byte"].items():
        tiles.append((f"bits per byte, {split}", _decimals(value["last"], 3)))
    if facts["loss"] is not None:
        tiles.append(("training loss, nats", f"{facts['loss']:.3f}"))
    tiles += [("tokens", short(facts["tokens"])), ("FLOPs", short(facts["flops"]))]
    tiles.append(("wall time", duration(facts["seconds"])))
    if facts["tokens_per_s"] is not None:
        tiles.append(("tokens/s, median", f"{facts['tokens_per_s']:,.0f}"))
    if facts["skipped_steps"]:
        tiles.append(("skipped steps", str(facts["skipped_steps"])))
    if facts["attempts"] > 1:
        tiles.append(("attempts", str(facts["attempts"])))
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    return f'<h1>{escape(history.name)}</h1>\n<div class="tiles">{cells}</div>'


def _curves(history: History) -> Iterator[str]:
    charts = {axis: over_time(history, axis) for axis in AXES}
    if not charts["step"]:
        yield "<p>No training step has been recorded yet.</p>"
        return
    for axis in AXES:
        checked = " checked" if axis == "step" else ""
        yield f'<input type="radio" name="axis" id="axis-{axis}"{checked}>'
    words = "".join(f'<label for="axis-{axis}">{axis}</label>' for axis in AXES)
    yield f'<h2>Training</h2><p class="axes">over {words}</p><div class="grid">'
    for i, chart in enumerate(charts["step"]):
        views = "".join(f'<div class="on-{axis}">{draw(charts[axis][i])}</div>' for axis in AXES)
        yield _card(chart, views)
    yield "</div>"


def _inside(history: History) -> Iterator[str]:
    figures = of_the_model(history)
    if figures:
        cards = "\n".join(_card(figure, draw(figure)) for figure in figures)
        yield f'<h2>Inside the model</h2><div class="grid">{cards}</div>'


def _card(figure: Figure, picture: str) -> str:
    note = f"<figcaption>{escape(figure.note)}</figcaption>" if figure.note else ""
    return f"<figure><h3>{escape(figure.title)}</h3>{picture}{note}</figure>"


def _samples(history: History) -> Iterator[str]:
    rows = history.of("sample")
    if not rows:
        return
    yield "<h2>Samples</h2>"
    yield from map(_sample, rows[: -SHOWN_SAMPLES - 1 : -1])
    if older := rows[:-SHOWN_SAMPLES]:
        body = "".join(map(_sample, reversed(older)))
        yield f"<details><summary>{len(older)} earlier samples</summary>{body}</details>"


def _sample(row: dict[str, Any]) -> str:
    words = f"<b>{escape(row['prompt'])}</b>{escape(row['text'])}"
    return f'<p class="when">step {row["step"]:,}</p><pre>{words}</pre>'


def _evaluations(history: History) -> Iterator[str]:
    rows = [
        (f"{r['step']:,}", r["split"], _decimals(r["bits_per_byte"], 4), _decimals(r["loss"], 4))
        for r in history.of("eval")
    ]
    rows += [("", r["name"], _decimals(r["bits_per_byte"], 4), "") for r in history.of("baseline")]
    if rows:
        table = _table(("step", "held-out set", "bits per byte", "nats per token"), rows)
        yield f"<details><summary>Evaluations ({len(rows)})</summary>{table}</details>"


def _decimals(value: float | None, digits: int) -> str:
    # a number that was not finite is kept as None
    return "not finite" if value is None else f"{value:.{digits}f}"


def _events(history: History) -> Iterator[str]:
    rows = [(f"{r['step']:,}", r["what"], r.get("detail", "")) for r in history.of("event")]
    if rows:
        table = _table(("step", "event", ""), rows)
        yield f"<details><summary>Events ({len(rows)})</summary>{table}</details>"


def _settings(history: History) -> Iterator[str]:
    yield _folded("Configuration", to_toml(history.config))
    for number, attempt in enumerate(history.attempts, 1):
        yield _folded(f"Environment, attempt {number}", to_toml(attempt))


def _folded(title: str, words: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(words)}</pre></details>"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
