"""The code in docs/kda.md and docs/moe.md runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "num_blocks"), [("kda.md", 2), ("moe.md", 1)])
def test_the_page_runs(page, num_blocks):
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.S | re.M)
    assert len(blocks) == num_blocks
    exec("\n".join(blocks), {})


@pytest.mark.parametrize("page", ["kda.md", "moe.md"])
def test_the_page_names_files_that_exist(page):
    source = DOCS.parent / "src" / "openk3" / "ops"
    for name in re.findall(r"`(\w+\.py)`", (DOCS / page).read_text("utf-8")):
        places = [*source.glob(f"**/{name}"), *(DOCS.parent / "benchmarks").glob(name)]
        assert places, f"{page} names {name}"
