"""The table of reported faults in docs/sandbox.md names exactly the tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_reported_fault_has_its_test_and_every_such_test_its_row():
    page = (TESTS.parent / "docs" / "sandbox.md").read_text()
    named = set(re.findall(r"`(test_reported_\w+)`", page))
    files = [*TESTS.glob("sandbox/**/test_*.py"), *TESTS.glob("api/test_*.py")]
    files.remove(Path(__file__))
    there = {
        name for file in files for name in re.findall(r"def (test_reported_\w+)", file.read_text())
    }
    assert named == there
