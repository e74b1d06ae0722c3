"""Measured coefficients of the routed experts' products, per GPU type: `costs.json`.

What the host may decide on is static: the GPU and the number of rows an expert gets on average. It
chooses whose products run and how high tiles may be. What depends on the counts of a batch, which
tiles cover an expert's rows and in what order, is decided on the device: the tiles of least total
time, where a tile of h times 64 rows takes `heights[h - 1]`. `benchmarks/calibrate_moe.py` measures
an entry and writes it; nothing changes while a program runs.
"""

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from openk3.ops.moe.row_plan import UNIT, Shape


class Choice(NamedTuple):
    """Which implementation makes which product; all false: grouped_mm everywhere."""

    fused_situ: bool = False
    """Gate and up as one product of our kernel with SiTU in its epilogue."""
    triton_rows: bool = False
    """The other products over rows by our kernel."""
    triton_grads: bool = False
    """Weight gradients by our kernel."""
    shape: Shape = Shape()

    @property
    def align(self) -> int:
        """Our kernels want every expert's rows to start at a multiple of 64."""
        return UNIT if any(self[:3]) else 1


class Costs(NamedTuple):
    """Coefficients of one GPU type."""

    training: tuple[tuple[int, Choice], ...]
    """(rows an expert from which on, choice), rising; forward and backward together."""
    inference: tuple[tuple[int, Choice], ...]
    """The same for forward passes under `torch.inference_mode`."""

    def choose(self, rows_per_expert: float, *, training: bool) -> Choice:
        choices = self.training if training else self.inference
        return [c for start, c in choices if start <= rows_per_expert][-1]


UNMEASURED = Costs(((0, Choice()),), ((0, Choice()),))


@cache
def measured() -> dict[str, Costs]:
    """The entries of `costs.json` by GPU name."""
    text = files("openk3.ops.moe").joinpath("costs.json").read_text(encoding="utf-8")
    return {gpu: parse_costs(entry) for gpu, entry in json.loads(text).items()}


def parse_costs(entry: dict) -> Costs:
    """An entry's "training" and "inference": lists of {"from", "products", "heights", "group"}."""

    def row(item: dict) -> tuple[int, Choice]:
        situ, rows, grads = (name in item["products"] for name in ("situ", "rows", "grads"))
        shape = Shape(tuple(item["heights"]), item["group"])
        return item["from"], Choice(situ, rows, grads, shape)

    return Costs(*(tuple(map(row, entry[key])) for key in ("training", "inference")))


def costs_of(gpu: str) -> Costs:
    """The coefficients of the GPU called `gpu`; of an unmeasured one, grouped_mm everywhere."""
    return measured().get(gpu, UNMEASURED)
