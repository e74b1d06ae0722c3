"""Distributed Muon moves weights as one process does, whatever holds which rows."""

import pytest
import torch
from dist_workers import best_device, crew

from openk3.optim.muon import Muon, MuonParameter
from openk3.parallel.layout import Layout, expert_spans, row_spans

pytestmark = pytest.mark.dist

MODEL = {
    "per head": ((40, 24), (8,)),
    "keys and values": ((60, 16), (6, 4)),
    "experts": ((8, 12, 8), (12,)),
    "stacks cut in heads": ((8, 6, 5), (2, 4)),
    "whole": ((24, 32), (24,)),
    "tall": ((50, 3), (50,)),
    "square": ((16, 16), (16,)),
    "two rows": ((2, 16), (2,)),
}
LAYOUTS = [
    Layout(shard=4, expert=4),
    Layout(shard=4, expert=2),
    Layout(shard=4),
    Layout(replicate=2, shard=2, expert=2),
    Layout(shard=2, expert=2),
]


def values(seed):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=g) for n, (shape, _) in MODEL.items()}


def train_rows(world, layout, bucket_elements):
    """This process's rows of weights and momenta after three steps, and the numbers it moved."""
    from openk3.parallel.mesh import Mesh
    from openk3.parallel.muon import ShardedMuon
    from openk3.parallel.zero import Piece

    mesh = Mesh(layout, world.device)
    pieces, parameters = {}, []
    for name, whole in values(0).items():
        rows = whole.shape[0]
        spans = expert_spans(rows, layout) if whole.ndim == 3 else row_spans(rows, layout.state)
        pieces[name] = Piece(tuple(whole.shape), spans, mesh.place)
        weight = whole[slice(*pieces[name].rows)].clone().to(world.device)
        parameters.append(MuonParameter(name, weight, MODEL[name][1]))
    muon = ShardedMuon(
        parameters,
        weight_decay=0.1,
        pieces=pieces,
        group=mesh.state,
        bucket_elements=bucket_elements,
    )
    for step in range(3):
        grads = values(10 + step)
        for p in parameters:
            p.weight.grad = grads[p.name][slice(*pieces[p.name].rows)].to(world.device)
        muon.step(0.02)
    held = {p.name: (pieces[p.name].rows, p.weight.cpu()) for p in parameters}
    momenta = {n: b.cpu() for n, b in muon.state().items()}
    return held, momenta, len(muon._buckets)


@pytest.fixture(scope="module")
def want():
    parameters = [MuonParameter(n, w.clone(), MODEL[n][1]) for n, w in values(0).items()]
    muon = Muon(parameters, weight_decay=0.1)
    for step in range(3):
        grads = values(10 + step)
        for p in parameters:
            p.weight.grad = grads[p.name]
        muon.step(0.02)
    return {p.name: p.weight for p in parameters}, muon.state()


@pytest.mark.parametrize("bucket_elements", [1 << 24, 100])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_rows_of_every_layout_are_those_of_one_process(layout, bucket_elements, want):
    size = layout.world
    found = crew(size, best_device(size)).run(train_rows, layout, bucket_elements)
    for held, momenta, num_buckets in found:
        assert (num_buckets > 1) == (bucket_elements == 100)
        for name, ((start, stop), weight) in held.items():
            for got, whole in ((weight, want[0][name]), (momenta[name], want[1][name])):
                off = (got - whole[start:stop]).norm() / whole.norm()
                assert off < 1e-5, (name, float(off))
