"""docs/parallel.md says what the code says."""

import re
from pathlib import Path

import pytest

from openk3.config.presets import preset
from openk3.config.recipe import ParallelRecipe
from openk3.errors import ConfigError
from openk3.parallel import watchdog
from openk3.parallel.layout import Layout, check, resolve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallel.md").read_text("utf-8")


def test_every_named_file_is_there():
    for name in re.findall(r"`((?:parallel|train|checkpoint)/\w+\.py)`", PAGE):
        assert (ROOT / "src/openk3" / name).is_file(), name
    for name in re.findall(r"\b(?:runs|recipes|docs)/[\w-]+\.(?:sh|toml|md)\b", PAGE):
        assert (ROOT / name).is_file(), name


def test_every_field_of_the_section_is_told():
    for name in ParallelRecipe.__dataclass_fields__:
        assert f"`{name}`" in PAGE, name


@pytest.mark.parametrize(
    "refused",
    [
        lambda: resolve(ParallelRecipe(zero=1, shard=3), 4),
        lambda: resolve(ParallelRecipe(zero=1, expert=3), 4),
        lambda: check(Layout(shard=32), preset("nano"), batch_sequences=32),
    ],
)
def test_messages_are_real(refused):
    with pytest.raises(ConfigError) as caught:
        refused()
    shown = [line.strip().removesuffix(" ...") for line in PAGE.splitlines() if line[:4] == " " * 4]
    assert any(line and str(caught.value).startswith(line) for line in shown)


def test_times_are_those_of_the_watchdog():
    assert f"without: {watchdog.LOST_S:.0f} s" in PAGE
    assert f"breaks: {watchdog.BEATS * 2} s" in PAGE
