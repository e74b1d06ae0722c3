"""Run reports: one self-contained HTML page and, with matplotlib, PNG plots."""

from pathlib import Path

from openk3._io import atomic_file
from openk3.report import page, png
from openk3.report.curves import over_time
from openk3.report.history import History
from openk3.report.inside import of_the_model

__all__ = ["History", "write_report"]


def write_report(
    run: str | Path, out: str | Path | None = None, *, plots: bool | None = None
) -> list[Path]:
    """Write RUN/report.html (or `out`) and, beside it in plots/, a PNG of every figure.

    `plots` None draws PNGs where matplotlib is installed. Returns the files written, the page
    first. Works on a live run. Raises ConfigError or DataError on a folder that is no run, and
    BackendError when plots are asked for without matplotlib.
    """
    history = History.load(run)
    target = Path(out) if out is not None else Path(run) / "report.html"
    with atomic_file(target, "w") as handle:
        handle.write(page.render(history))
    written = [target]
    if png.available() if plots is None else plots:
        for figure in [*over_time(history, "step"), *of_the_model(history)]:
            written.append(target.parent / "plots" / f"{figure.name}.png")
            png.save(figure, written[-1])
    return written
