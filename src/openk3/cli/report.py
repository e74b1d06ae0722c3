"""`k3 report` turns a run folder into a page."""

import sys
from pathlib import Path

from openk3.cli import common


def main(argv: list[str]) -> int:
    """Run `k3 report`. Returns the exit code."""
    parser = common.parser(
        "report", "Write a run's report.html, and PNG plots where matplotlib is installed."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder; it may be running")
    parser.add_argument("--out", type=Path, metavar="FILE", help="page to write (RUN/report.html)")
    plots = parser.add_mutually_exclusive_group()
    plots.add_argument("--plots", action="store_true", default=None, help="insist on PNG plots")
    plots.add_argument("--no-plots", dest="plots", action="store_false", help="only the page")
    common.add_json(parser)
    options = parser.parse_args(argv)

    from openk3.report import History, write_report

    written = write_report(options.run, options.out, plots=options.plots)
    if options.json:
        facts = History.load(options.run).summary() | {"files": [str(path) for path in written]}
        sys.stdout.write(common.json_text(facts))
    else:
        more = f" and {len(written) - 1} PNG plots in {written[-1].parent}" if written[1:] else ""
        sys.stdout.write(f"{written[0]}{more}\n")
    return 0
