"""One-sided transport and tiled products: ranks are threads, kernels run in the interpreter.

Only one thread works at a time; it hands over at a barrier, as a GPU's stream would.
"""

import threading

import pytest
import torch

from kernel_checks import relative_error
from moe_cases import Toy, draw_tokens, one_device, probe
from openk3.errors import InputError
from openk3.parallel.experts import keep_block
from openk3.parallel.moonep import MoonEPDispatcher
from openk3.parallel.moonep.dispatch import allocate
from openk3.parallel.moonep.token_map import lay_out, map_tokens

symmetric = pytest.importorskip("openk3.parallel.moonep.symmetric", exc_type=ImportError)
LATENT = INNER = 64
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are threads on a CPU")


class SharedBlock:
    """`Memory` of ranks that are threads of this process."""

    def __init__(self, rank, blocks, turn, meeting):
        self.rank, self.num_ranks, self.base = rank, len(blocks), blocks[rank]
        self.addresses = torch.tensor([b.data_ptr() for b in blocks])
        self.turn, self.meeting, self.num_barriers = turn, meeting, 0

    def barrier(self):
        self.num_barriers += 1
        self.turn.release()
        self.meeting.wait(60)
        self.turn.acquire()


def run(num_ranks, shapes, work):
    """[work(memory) of each rank]; memory starts as NaN."""
    num_bytes = symmetric.memory_bytes(shapes, num_ranks)
    blocks = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(num_ranks)]
    turn, meeting = threading.Lock(), threading.Barrier(num_ranks)
    results, failures = [None] * num_ranks, []

    def live(rank):
        with turn:
            try:
                results[rank] = work(SharedBlock(rank, blocks, turn, meeting))
            except Exception as failure:  # noqa: BLE001  (raised below)
                failures.append(failure)
                meeting.abort()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


# (tokens, their favourite experts) of each rank
HOT = [(6, [0, 1]), (3, [0, 1]), (4, [0, 1])]
EMPTY = [(0, None), (5, [0, 2, 3])]


def tokens_of(case, rank, padding):
    num_tokens, favourites = case[rank]
    return draw_tokens(num_tokens, 2 * len(case), 2, 3 + rank, favourites, padding, LATENT)


@pytest.mark.parametrize(("case", "padding", "steps"), [(HOT, 0.3, 1), (EMPTY, 0.0, 2)])
def test_outputs_and_all_gradients_are_those_of_one_device(case, padding, steps):
    num_ranks, num_experts = len(case), 2 * len(case)
    shapes = symmetric.Shapes(num_experts, 2, 6, LATENT, INNER, torch.float32)

    def work(memory):
        dispatcher = MoonEPDispatcher(None, num_experts, symmetric.Symmetric(shapes, memory))
        results = []
        for _ in range(steps):
            toy = Toy(num_experts, latent=LATENT, inner=INNER)
            experts = keep_block(toy, memory.rank, num_ranks)
            x, ids, logits = tokens_of(case, memory.rank, padding)
            leaf, scores = x.requires_grad_(), logits.requires_grad_()
            out = dispatcher(leaf, ids, scores.softmax(-1), experts)
            (out * probe(memory.rank, len(x), LATENT)).sum().backward()
            grads = [w.grad for w in (experts.w1, experts.w3, experts.w2)]
            results.append([out.detach(), leaf.grad, scores.grad, *grads])
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
        return results[0]

    found = run(num_ranks, shapes, work)
    parts = [tokens_of(case, rank, padding) for rank in range(num_ranks)]
    per_rank, weight_grads = one_device(parts, num_experts, latent=LATENT, inner=INNER)
    for rank in range(num_ranks):
        for got, wanted in zip(found[rank][:3], per_rank[rank], strict=True):
            assert relative_error(got, wanted) < 1e-5
        for got, wanted in zip(found[rank][3:], weight_grads, strict=True):
            assert relative_error(got, wanted[2 * rank : 2 * rank + 2]) < 1e-5


def test_as_many_rows_arrive_as_copies_travel_and_all_come_back():
    shapes = symmetric.Shapes(4, 2, 7, 8, 8, torch.float32)
    parts = [draw_tokens(tokens, 4, 2, 11 + tokens, [0, 1, 2], latent=8) for tokens in (7, 4)]

    def work(memory):
        transport = symmetric.Symmetric(shapes, memory)
        x, ids, _ = parts[memory.rank]
        counts = transport.share_counts(torch.bincount(ids.view(-1), minlength=4))
        layout = lay_out(counts, allocate(counts), transport.align)
        tokens = map_tokens(ids, layout, memory.rank)
        pairs = torch.arange(ids.numel(), dtype=torch.float32).view_as(ids)
        route = transport.open(layout, tokens, pairs)
        arrived = int((route.first_row == torch.arange(transport.num_rows)).sum())
        rows = transport.scatter(route, (x * 8).round())
        assert not rows.isnan().any()
        assert torch.equal(transport.gather(route, rows), 2 * (x * 8).round())
        assert torch.equal(transport.gather_values(route, route.weights), pairs)
        return int(tokens.travels.sum()), arrived

    travelled, arrived = zip(*run(2, shapes, work), strict=True)
    assert sum(travelled) == sum(arrived) < 22  # of 22 pairs some share a rank


def test_more_tokens_than_the_memory_was_made_for_are_refused():
    shapes = symmetric.Shapes(2, 1, 3, 8, 8, torch.float32)

    def work(memory):
        x, ids, logits = draw_tokens(4, 2, 1, 0, latent=8)
        dispatcher = MoonEPDispatcher(None, 2, symmetric.Symmetric(shapes, memory))
        dispatcher(x, ids, logits, keep_block(Toy(2, latent=8, inner=8), 0, 1))

    with pytest.raises(InputError, match=r"tokens 4 do not fit .*max_tokens=3"):
        run(1, shapes, work)
