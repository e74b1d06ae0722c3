"""Measured choices of the routed experts' products, per GPU type (`benchmarks/moe.py --only
products,routed` prints what an entry is made of).

What the host may decide on is static: the GPU and the number of rows an expert gets on average.
What depends on the counts of a batch (tile sizes, their order) is decided on the device.
"""

from typing import NamedTuple


class Choice(NamedTuple):
    """Which implementation makes which product; all false: grouped_mm everywhere."""

    fused_situ: bool = False
    """Gate and up as one Triton product with SiTU in its epilogue."""
    triton_rows: bool = False
    """The other products over rows by our kernel."""
    triton_grads: bool = False
    """Weight gradients by our kernel."""

    @property
    def align(self) -> int:
        """Our kernels want every expert's rows to start at a multiple of 64."""
        return 64 if any(self) else 1


class Costs(NamedTuple):
    """Coefficients of one GPU type."""

    small: float
    """Time of a 64-row tile over that of a 128-row tile. Below 1, remainders of up to 64 rows take
    one; were it below 0.5, whole experts would."""
    training: tuple[tuple[int, Choice], ...]
    """(rows an expert from which on, choice), rising; forward and backward together."""
    inference: tuple[tuple[int, Choice], ...]
    """The same for forward passes under `torch.inference_mode`."""

    def choose(self, rows_per_expert: float, *, training: bool) -> Choice:
        choices = self.training if training else self.inference
        return [c for start, c in choices if start <= rows_per_expert][-1]


_ANY_HOPPER = Costs(0.65, ((0, Choice()),), ((0, Choice()),))

COSTS: dict[str, Costs] = {
    # 64 rows an expert: products 1.11x to 1.26x of grouped_mm, equal and Zipf loads alike; 1170
    # rows, the routed path: forward 1.03x, 1.12x, 1.14x (equal, Zipf, skewed loads), with backward
    # 0.95x, 1.01x, 1.00x (torch 2.11, 2026-11-30)
    "NVIDIA H200": Costs(
        0.65,
        training=((0, Choice(True, True, True)), (512, Choice())),
        inference=((0, Choice(True, True, True)),),
    ),
}


def costs_of(gpu: str) -> Costs:
    """The coefficients of the GPU called `gpu`; of an unmeasured one, grouped_mm everywhere."""
    return COSTS.get(gpu, _ANY_HOPPER)
