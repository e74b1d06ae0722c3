"""Every file that the README and the pages under docs/ link to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [link for link in links if "://" not in link]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_the_tour_has_at_most_ten_stops():
    stops = re.findall(r"^\d+\. ", (ROOT / "docs/tour.md").read_text(), re.MULTILINE)
    assert 5 <= len(stops) <= 10
