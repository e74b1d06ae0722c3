"""Rows about the inside of a run: expert load, AttnRes weights, decay. They change no number."""

from collections.abc import Iterator

from openk3.model.k3 import K3
from openk3.model.probe import Summary
from openk3.obs.rows import AttnResRow, BalanceRow, DecayRow, Row, max_violation
from openk3.parallel.world import World


class Observer:
    """Collects between two rows: loads of every step, the rest from the step that `probe` saw."""

    def __init__(self, model: K3, world: World) -> None:
        self.model, self.world = model, world
        self._load = {layer: r.load.clone().zero_() for layer, r in model.routers().items()}
        self.probe = Summary(model.config.linear_attn.gate_lower_bound)

    def add_load(self) -> None:
        """Take the step's expert loads before the model forgets them."""
        for layer, router in self.model.routers().items():
            self._load[layer] += router.load

    def rows(self, step: int, tokens: int, flops: float, seconds: float) -> Iterator[Row]:
        """What was collected, and forget the loads. Every process must exhaust this."""
        axes = {"step": step, "tokens": tokens, "flops": flops, "seconds": seconds}
        for layer, load in self._load.items():
            counts = self.world.sum(load).tolist()
            load.zero_()
            yield BalanceRow(layer=layer, load=counts, max_violation=max_violation(counts), **axes)
        if self.probe.attn_res:
            yield AttnResRow(weights=dict(self.probe.attn_res), **axes)
        edges = self.probe.edges.tolist()
        for layer, histogram in self.probe.decay.items():
            yield DecayRow(layer=layer, edges=edges, counts=histogram, **axes)
