"""Each recorded operation beside its reference, on sizes that fill no vector, and row by row."""

import math

import pytest
import torch

from openk3.errors import InputError
from openk3.ops import moe
from openk3.ops.attn_res import mix_norm
from openk3.ops.kda.decode import Pending, kda_decode, pack_taps
from openk3.ops.mla import attend
from openk3.ops.moe.experts import expert_mlp_reference
from openk3.ops.moe.router import route_reference
from openk3.ops.native import build
from openk3.ops.native.program import Program, Segment, numbers
from openk3.ops.norm import rms_norm

pytestmark = pytest.mark.skipif(not build.available()[0], reason=build.available()[1])
THREADS = 2


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def room(*shape):
    return torch.full(shape, torch.nan)


def rows_of(count, **options):
    """Numbers of a pass of `count` tokens of one sequence without memory."""
    return numbers([Segment(range(count), 0, (), (), **options)], 0)


def run(program, count, **options):
    program.run(rows_of(count, **options), THREADS)


@pytest.mark.parametrize(("width", "outs"), [(1, 1), (5, 7), (33, 35), (64, 96), (100, 131)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 16, 21, 31, 64, 75])
def test_linear(rng, width, outs, count):
    x, w = torch.randn(count, width, generator=rng), torch.randn(outs, width, generator=rng)
    y, more = room(count, outs), torch.randn(count, outs, generator=rng)
    wanted = y.new_full((count, outs), torch.nan)
    before = more.clone()
    program = Program()
    program.linear(x, w, y)
    program.linear(x, w, more, add=True)
    program.linear(x, w, wanted, wanted=True)
    chosen = range(count - 1, count)
    run(program, count, wanted=chosen)
    truth = (x.double() @ w.double().T).float()
    torch.testing.assert_close(y, truth, atol=2e-6 * math.sqrt(width), rtol=2e-6)
    torch.testing.assert_close(more, truth + before, atol=2e-6 * math.sqrt(width), rtol=2e-6)
    torch.testing.assert_close(wanted[:1], y[chosen], atol=2e-6 * math.sqrt(width), rtol=2e-6)
    assert bool(wanted[1:].isnan().all())


@pytest.mark.parametrize("count", [1, 3, 11, 70])
def test_the_same_to_the_last_bit_at_every_call_and_for_any_threads(rng, count):
    x, w = torch.randn(count, 77, generator=rng), torch.randn(150, 77, generator=rng)
    y = room(count, 150)
    program = Program()
    program.linear(x, w, y)
    seen = []
    for threads in (1, 2, 3):
        program.run(rows_of(count), threads)
        seen.append(y.clone())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_nothing_is_done_for_no_rows(rng):
    w, y = torch.randn(4, 4, generator=rng), room(2, 4)
    program = Program()
    program.embed(w, y)
    program.phase()
    program.linear(y, w, y, wanted=True)
    run(program, 0)
    assert bool(y.isnan().all())


def test_phases_wait_for_each_other(rng):
    """A chain of products through one buffer after the other, over many rows and threads."""
    table = torch.randn(64, 48, generator=rng)
    weights = [torch.randn(48, 48, generator=rng) / 7 for _ in range(12)]
    buffers = [room(64, 48) for _ in range(13)]
    program = Program()
    program.embed(table, buffers[0])
    for w, x, y in zip(weights, buffers, buffers[1:], strict=False):
        program.phase()
        program.linear(x, w, y)
    wanted = table.double()
    for w in weights:
        wanted = wanted @ w.double().T
    for threads in (1, 2, 5):
        buffers[-1].fill_(torch.nan)
        program.run(rows_of(64), threads)
        torch.testing.assert_close(buffers[-1], wanted.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num", [1, 2, 5, 16])
@pytest.mark.parametrize("dim", [1, 19, 64])
def test_mix_norm(rng, num, dim):
    sources = [torch.randn(3, dim, generator=rng) for _ in range(num)]
    query, norm, out_norm = (torch.randn(dim, generator=rng) for _ in range(3))
    out = room(3, dim)
    program = Program()
    program.mix_norm(sources, query, norm, 1e-5, out_norm, 1e-6, out)
    run(program, 3)
    doubles = [x.double() for x in (query, norm, out_norm)]
    wanted = mix_norm([x.double() for x in sources], doubles[0], doubles[1], 1e-5, doubles[2], 1e-6)
    torch.testing.assert_close(out, wanted.float(), atol=3e-6, rtol=3e-6)


def test_norm_in_place_and_embed(rng):
    table, weight = torch.randn(9, 21, generator=rng), torch.randn(21, generator=rng)
    out = room(4, 21)
    program = Program()
    program.embed(table, out)
    program.phase()
    program.norm(out, weight, 1e-5, out)
    program.run(numbers([Segment((8, 0, 3), 0, (), ()), Segment((5,), 7, (), ())], 0), THREADS)
    torch.testing.assert_close(out, rms_norm(table[[8, 0, 3, 5]], weight, 1e-5))


@pytest.mark.parametrize("beta2", [25.0, None])
def test_situ_of_every_magnitude(beta2):
    size = torch.logspace(-12, 3, 40)
    signed = torch.cat([-size, torch.zeros(1), size])
    gate, up = (x.flatten()[None].clone() for x in torch.meshgrid(signed, signed, indexing="ij"))
    out = room(*gate.shape)
    program = Program()
    program.situ(gate, up, out, 4.0, beta2)
    run(program, 1)
    wanted = moe.situ_glu(gate.double(), up.double(), 4.0, beta2).float()
    torch.testing.assert_close(out, wanted, atol=1e-30, rtol=2e-6)


def test_nan_stays_nan(rng):
    gate = torch.tensor([[torch.nan, 1.0, torch.nan, 0.0]])
    up = torch.tensor([[1.0, torch.nan, torch.nan, 1.0]])
    out, mixed = room(1, 4), room(1, 4)
    program = Program()
    program.situ(gate, up, out, 4.0, 25.0)
    program.mix_norm([gate, up], gate[0], gate[0], 1e-5, torch.ones(4), 1e-5, mixed)
    run(program, 1)
    assert out.isnan().tolist() == [[True, True, True, False]]
    assert bool(mixed.isnan().all())


class Kda:
    """A KDA layer's weights and memory, and projections of so many tokens."""

    def __init__(self, rng, heads, width, tokens, pages=9):
        def normal(*shape):
            return torch.randn(*shape, generator=rng)

        inner = heads * width
        self.heads, self.width = heads, width
        self.conv = tuple(normal(inner, 1, 4) for _ in range(3))
        self.A_log, self.dt_bias = normal(heads) * 0.5, normal(inner) * 0.5
        self.norm = 1 + 0.1 * normal(width)
        self.q, self.k, self.v, self.g, self.gate = (normal(tokens, inner) for _ in range(5))
        self.beta = normal(tokens, heads)
        self.offset = heads * width * width + 3  # floats
        self.pool = normal(pages, self.offset + 12 * inner + 5)
        self.out = room(tokens, inner)

    def memory(self, pool):
        S = pool[:, : self.heads * self.width**2].unflatten(1, (self.heads, self.width, -1))
        conv = pool[:, self.offset : self.offset + 12 * self.heads * self.width]
        return S, conv.unflatten(1, (3, 4, self.heads, self.width))

    def program(self, pending=None):
        program = Program()
        names = ("pending_q", "pending_k", "pending_v", "pending_g", "pending_beta")
        program.kda(
            q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, gate=self.gate,
            taps=self.conv, A_log=self.A_log, dt_bias=self.dt_bias, norm=self.norm,
            out=self.out, pool=self.pool,
            **({} if pending is None else dict(zip(names, pending, strict=True))),
            page_bytes=self.pool.shape[1] * 4, conv_offset=self.offset * 4, group=1,
            heads=self.heads, width=self.width,
            capacity=0 if pending is None else pending.q.shape[1],
            lower_bound=-5.0, scale=self.width**-0.5, eps=1e-5,
        )  # fmt: skip
        return program

    def reference(self, pool, first, count, page, **options):
        """o of one segment; its memory in `pool` is moved on."""
        S, conv = self.memory(pool)
        wide = [x[first : first + count].view(1, count, self.heads, -1)
                for x in (self.q, self.k, self.v, self.g)]  # fmt: skip
        return kda_decode(
            *wide, self.beta[None, first : first + count],
            self.gate[first : first + count].view(1, count, self.heads, -1),
            conv_weight=pack_taps(self.conv, self.heads), conv_state=conv, state=S,
            slots=torch.tensor([page]), A_log=self.A_log, dt_bias=self.dt_bias,
            lower_bound=-5.0, norm_weight=self.norm, eps=1e-5, backend="reference", **options,
        ).flatten(2)[0]  # fmt: skip


@pytest.mark.parametrize(("heads", "width"), [(1, 3), (3, 20), (2, 64), (2, 100)])
def test_kda_segments_and_saved_states(rng, heads, width):
    """Segments of several lengths; one leaves its state after 2 and after 5 tokens."""
    layer = Kda(rng, heads, width, 9)
    wanted = layer.pool.clone()
    saves = [(2, (0, 6)), (5, (0, 7))]
    segments = [
        Segment((0,), 4, (8, 3), ()),
        Segment(range(6), 0, (8, 1), (), saves),
        Segment((0, 1), 9, (8, 5), ()),
    ]
    layer.program().run(numbers(segments, 2), THREADS)
    parts = [layer.reference(wanted, 0, 1, 3)]
    for first, count, save in ((1, 2, 6), (3, 3, 7), (6, 1, None)):
        parts.append(layer.reference(wanted, first, count, 1))
        if save is not None:
            wanted[save] = wanted[1]
    parts.append(layer.reference(wanted, 7, 2, 5))
    torch.testing.assert_close(layer.out, torch.cat(parts), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(layer.memory(layer.pool), layer.memory(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("accepted", "advance"), [(0, 0), (2, 0), (3, 0), (1, 2), (0, 1)])
def test_kda_windows(rng, accepted, advance):
    """The accepted tokens of the last window are replayed, the new ones wait in it."""
    layer = Kda(rng, 2, 24, 3)

    def window():
        own = torch.Generator().manual_seed(1)
        rows = [torch.randn(4, 3, 2, 24, generator=own) for _ in range(4)]
        return Pending(*rows, torch.randn(4, 3, 2, generator=own))

    ours, theirs = window(), window()
    wanted = layer.pool.clone()
    count = 2 if advance else 3
    own = Segment(range(count), 5, (0, 4), (), window=2, accepted=accepted, advance=advance)
    layer.program(ours).run(numbers([own], 2), THREADS)
    o = layer.reference(
        wanted, 0, count, 4, pending=theirs, accepted=torch.tensor([accepted]),
        windows=torch.tensor([2]), advance=torch.tensor([advance]),
    )  # fmt: skip
    torch.testing.assert_close(layer.out[:count], o, atol=1e-5, rtol=1e-5)
    for x, y in zip(layer.memory(layer.pool), layer.memory(wanted), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("page", "pieces"),
    [(8, [(0, 1)]), (8, [(0, 9), (30, 1), (16, 3)]), (300, [(290, 30), (5, 1)]), (4, [(0, 37)])],
)
@pytest.mark.parametrize("sizes", [(3, 8, 5, 12, 33), (1, 4, 0, 2, 16)])
def test_mla_over_pages(rng, page, pieces, sizes):
    """Positions before a piece lie in pages, whatever lies behind its end is not looked at."""
    heads, nope, rope, value, latent = sizes

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    total = sum(count for _, count in pieces)
    pool = room(80, page * (latent + rope) + 3)
    q, kv_a = normal(total, heads * (nope + rope)), normal(total, latent + rope)
    gate, out = normal(total, heads * value), room(total, heads * value)
    norm, kv_b = normal(latent), normal(heads * (nope + value), latent)
    free = torch.randperm(80, generator=rng).tolist()
    segments, wanted, first = [], [], 0
    for start, count in pieces:
        pages = [free.pop() for _ in range(-(-(start + count) // page))]
        dense = normal(start + count, latent + rope)
        new = kv_a[first : first + count]
        dense[start:, latent:] = new[:, latent:]
        dense[start:, :latent] = rms_norm(new[:, :latent], norm, 1e-6)
        for at in range(start):
            place = at % page * (latent + rope)
            pool[pages[at // page], place : place + latent + rope] = dense[at]
        segments.append(Segment(range(count), start, (), pages))
        own = q[None, first : first + count].unflatten(-1, (heads, -1)).double()
        seen = dense[None].double()
        o = attend(own, seen[..., :latent], seen[..., latent:], kv_b.double())
        wanted.append(o[0].flatten(1) * gate[first : first + count].double().sigmoid())
        first += count
    program = Program()
    program.mla(
        q=q, kv_a=kv_a, gate=gate, norm=norm, kv_b=kv_b, out=out, pool=pool,
        page_bytes=pool.shape[1] * 4, page_tokens=page, heads=heads, nope=nope, rope=rope,
        value=value, latent=latent, eps=1e-6, scale=(nope + rope) ** -0.5,
    )  # fmt: skip
    program.run(numbers(segments, 0), THREADS)
    torch.testing.assert_close(out, torch.cat(wanted).float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("beta2", [25.0, None])
@pytest.mark.parametrize(
    ("count", "experts", "top_k", "width", "inner"),
    [(1, 3, 1, 5, 7), (4, 8, 3, 20, 33), (23, 8, 2, 64, 40), (90, 3, 2, 21, 70)],
)
def test_experts(rng, count, experts, top_k, width, inner, beta2):
    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    router, x, latent = normal(experts, 11), normal(count, 11), normal(count, width)
    bias, norm = normal(experts) * 0.3, normal(width)
    w1, w3, w2 = (normal(experts, inner, width), normal(experts, inner, width),
                  normal(experts, width, inner))  # fmt: skip
    scores, out = x @ router.T, room(count, width)
    pairs = count * top_k
    program = Program()
    program.experts(
        scores=scores, bias=bias, latent=latent, w1=w1, w3=w3, w2=w2, norm=norm,
        gate=room(pairs, inner), up=room(pairs, inner), mixed=room(pairs, width), out=out,
        experts=experts, top_k=top_k, width=width, inner=inner, scaling=2.5, beta1=4.0,
        beta2=beta2 or 0.0, eps=1e-5,
    )  # fmt: skip
    run(program, count)
    routing = route_reference(x, router, bias, top_k, 2.5)
    wide = [y.double() for y in (latent, w1, w3, w2)]
    mixed = expert_mlp_reference(
        wide[0], routing.ids, routing.weights.double(), *wide[1:], 4.0, beta2
    )
    torch.testing.assert_close(
        out, rms_norm(mixed, norm.double(), 1e-5).float(), atol=2e-5, rtol=2e-5
    )


def test_what_the_kernels_cannot_read_is_refused():
    program = Program()
    good = torch.zeros(4, 4)
    for bad in (good.double(), good[:, ::2], good.to(torch.bfloat16)):
        with pytest.raises(InputError, match="contiguous float32"):
            program.linear(good, bad, good)
    with pytest.raises(InputError, match="1 to 16 sources, not 17"):
        program.mix_norm([good] * 17, good[0], good[0], 1e-5, good[0], 1e-5, good)
