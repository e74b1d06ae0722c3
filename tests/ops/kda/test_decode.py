"""A decoding step: the layer's separate ops, token by token; slots, windows and rollback."""

from itertools import pairwise

import pytest
import torch

from kernel_checks import relative_error
from openk3.errors import InputError
from openk3.ops.conv import short_conv
from openk3.ops.kda import decode, decode_reference, kda
from openk3.ops.kda.decode import Pending, kda_decode, pack_taps
from openk3.ops.norm import gated_head_norm

HEADS, WIDTH, SLOTS = 2, 16, 5
INNER = HEADS * WIDTH


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    """The kernel runs in Triton's interpreter, which the table would rightly refuse."""
    if request.param == "triton":
        module = pytest.importorskip("openk3.ops.kda.triton_decode", exc_type=ImportError)
        monkeypatch.setattr(decode_reference, "step_reference", module.step_triton)
    return "reference"


class Layer:
    """Weights, T tokens of projections for two sequences, and the layer's own answer for them."""

    def __init__(self, tokens, seed=0):
        self.rng = torch.Generator().manual_seed(seed)
        self.conv = [self.normal(INNER, 1, 4) for _ in range(3)]
        self.weights = {
            "conv_weight": pack_taps(self.conv, HEADS),
            "A_log": self.normal(HEADS) * 0.5,
            "dt_bias": self.normal(INNER) * 0.5,
            "norm_weight": 1 + 0.1 * self.normal(WIDTH),
            "lower_bound": -5.0,
        }
        self.x = [self.normal(2, tokens, HEADS, WIDTH) for _ in range(4)]
        self.x.append(self.normal(2, tokens, HEADS))
        self.x.append(self.normal(2, tokens, HEADS, WIDTH))
        self.conv_state = self.normal(SLOTS, 3, 4, HEADS, WIDTH)
        self.state = self.normal(SLOTS, HEADS, WIDTH, WIDTH)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.rng)

    def separate_ops(self, slots):
        """(o, convolution inputs, final state) of all tokens, in float64."""
        w = self.weights
        q, k, v, g, beta, gate = (t.double() for t in self.x)
        convolved, inputs = [], []
        for index, t in enumerate((q, k, v)):
            old = self.conv_state[slots, index].double().flatten(2)
            y, final = short_conv(
                t.flatten(2),
                self.conv[index],
                initial_state=old,
                output_final_state=True,
            )
            convolved.append(y.unflatten(-1, (HEADS, WIDTH)))
            inputs.append(final.unflatten(-1, (HEADS, WIDTH)))
        o, final = kda(
            *convolved,
            g,
            beta,
            A_log=w["A_log"].double(),
            dt_bias=w["dt_bias"].double(),
            initial_state=self.state[slots].double(),
            output_final_state=True,
        )
        return gated_head_norm(o, w["norm_weight"], gate, 1e-5), torch.stack(inputs, 1), final

    def pool(self):
        """Both states of a slot side by side in one page, with room to spare, as an engine has."""
        inputs, square = self.conv_state[0].numel(), self.state[0].numel()
        pages = torch.full((SLOTS, inputs + square + 24), torch.nan)
        conv_state = pages[:, square + 8 : square + 8 + inputs].view(self.conv_state.shape)
        state = pages[:, :square].view(self.state.shape)
        conv_state.copy_(self.conv_state)
        state.copy_(self.state)
        return {"conv_state": conv_state, "state": state}

    def tokens(self, start, stop):
        return [t[:, start:stop] for t in self.x]


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3, 4, 5, 6], [0, 6], [0, 2, 3, 6]])
def test_steps_are_the_separate_ops(backend, cuts):
    layer, slots = Layer(6), torch.tensor([3, 1])
    pool = layer.pool()
    pieces = [
        kda_decode(*layer.tokens(a, b), **pool, slots=slots, **layer.weights, backend=backend)
        for a, b in pairwise(cuts)
    ]
    o, inputs, final = layer.separate_ops(slots)
    assert relative_error(torch.cat(pieces, 1), o) < 3e-6
    assert relative_error(pool["conv_state"][slots], inputs) < 1e-7
    assert relative_error(pool["state"][slots], final) < 3e-6
    untouched = [0, 2, 4]
    assert torch.equal(pool["state"][untouched], layer.state[untouched])
    assert torch.equal(pool["conv_state"][untouched], layer.conv_state[untouched])


def test_padding_rows_give_zeros_and_touch_nothing(backend):
    layer, pool = Layer(2), Layer(2).pool()
    slots = torch.tensor([-1, 4])
    o = kda_decode(*layer.tokens(0, 2), **pool, slots=slots, **layer.weights, backend=backend)
    assert torch.equal(o[0], torch.zeros_like(o[0]))
    assert torch.equal(pool["state"][:4], layer.state[:4])
    wanted, _, final = layer.separate_ops(torch.tensor([0, 4]))
    assert relative_error(o[1], wanted[1]) < 3e-6
    assert relative_error(pool["state"][4], final[1]) < 3e-6


@pytest.mark.parametrize("kept", [[0, 3], [2, 1], [3, 3]])
def test_a_window_is_replayed_up_to_what_was_accepted(backend, kept):
    """Window 1 (3 tokens) runs; `kept` of it are accepted; window 2 starts behind those."""
    slots, accepted = torch.tensor([2, 0]), torch.tensor(kept)
    layer = Layer(8)
    pool = layer.pool()
    pending = Pending(*(torch.full((SLOTS, 4, *t.shape[2:]), torch.nan) for t in layer.x[:5]))
    options = {**pool, "slots": slots, "pending": pending, **layer.weights, "backend": backend}
    first = kda_decode(*layer.tokens(0, 3), accepted=torch.zeros(2, dtype=torch.int64), **options)
    assert torch.equal(pool["state"], layer.state)
    # the second window's tokens are those that follow the accepted prefix
    rows = [torch.arange(n, n + 4) for n in kept]
    window = [torch.stack([t[b, r] for b, r in enumerate(rows)]) for t in layer.x]
    second = kda_decode(*window, accepted=accepted, **options)
    o, _, _ = layer.separate_ops(slots)
    assert relative_error(first, o[:, :3]) < 3e-6
    wanted = torch.stack([o[b, r] for b, r in enumerate(rows)])
    assert relative_error(second, wanted) < 3e-6
    # the checkpoint stands exactly behind the accepted prefix
    for b, n in enumerate(kept):
        layer_n = Layer(8)
        layer_n.x = [t[:, :n] for t in layer_n.x]
        _, inputs, final = layer_n.separate_ops(slots)
        assert relative_error(pool["state"][slots[b]], final[b]) < 3e-6
        assert relative_error(pool["conv_state"][slots[b]], inputs[b]) < 1e-7
    for cache, t in zip(pending, window, strict=False):
        assert torch.equal(cache[slots], t)


@pytest.mark.parametrize("advance", [None, [9, 4]])
def test_windows_that_exceed_a_tile_together(backend, advance):
    slots, kept = torch.tensor([2, 0]), [5, 12]
    layer = Layer(22)
    pool = layer.pool()
    pending = Pending(*(torch.full((SLOTS, 12, *t.shape[2:]), torch.nan) for t in layer.x[:5]))
    options = {**pool, "slots": slots, "pending": pending, **layer.weights, "backend": backend}
    kda_decode(*layer.tokens(0, 12), accepted=torch.zeros(2, dtype=torch.int64), **options)
    rows = [torch.arange(n, n + 9) for n in kept]
    window = [torch.stack([t[b, r] for b, r in enumerate(rows)]) for t in layer.x]
    moves = None if advance is None else torch.tensor(advance)
    second = kda_decode(*window, accepted=torch.tensor(kept), advance=moves, **options)
    o, _, _ = layer.separate_ops(slots)
    wanted = torch.stack([o[b, r] for b, r in enumerate(rows)])
    assert relative_error(second, wanted) < 3e-6
    for b, n in enumerate(kept):
        seen = Layer(22)
        seen.x = [t[:, : n + (0 if advance is None else advance[b])] for t in seen.x]
        _, inputs, final = seen.separate_ops(slots)
        assert relative_error(pool["state"][slots[b]], final[b]) < 3e-6
        assert relative_error(pool["conv_state"][slots[b]], inputs[b]) < 1e-7
    for cache, t in zip(pending, window, strict=False):
        assert torch.equal(cache[slots, :9], t)


@pytest.mark.parametrize("advance", [[0, 1], [2, 3]])
def test_states_may_move_on_into_the_new_window(backend, advance):
    """What they become is what the next window's replay would have made of them."""
    slots = torch.tensor([2, 0])
    layer = Layer(9)
    pool = layer.pool()
    pending = Pending(*(torch.full((SLOTS, 4, *t.shape[2:]), torch.nan) for t in layer.x[:5]))
    options = {**pool, "slots": slots, "pending": pending, **layer.weights, "backend": backend}
    kda_decode(*layer.tokens(0, 3), accepted=torch.zeros(2, dtype=torch.int64), **options)
    moves = torch.tensor(advance)
    second = kda_decode(
        *layer.tokens(2, 5), accepted=torch.tensor([2, 2]), advance=moves, **options
    )
    assert relative_error(second, layer.separate_ops(slots)[0][:, 2:5]) < 3e-6
    for b, n in enumerate(advance):
        seen = Layer(9)
        seen.x = [t[:, : 2 + n] for t in seen.x]
        _, inputs, final = seen.separate_ops(slots)
        assert relative_error(pool["state"][slots[b]], final[b]) < 3e-6
        assert relative_error(pool["conv_state"][slots[b]], inputs[b]) < 1e-7


def test_windows_may_live_elsewhere_than_the_states(backend):
    slots, windows, none = torch.tensor([3, 1]), torch.tensor([0, 1]), torch.zeros(2).int()
    outs = []
    for place, count in ((slots, SLOTS), (windows, 2)):
        layer = Layer(6)
        pending = Pending(*(torch.full((count, 3, *t.shape[2:]), torch.nan) for t in layer.x[:5]))
        options = {"slots": slots, "windows": place, "pending": pending, **layer.weights}
        options |= {**layer.pool(), "backend": backend}
        kda_decode(*layer.tokens(0, 3), accepted=none, **options)
        outs.append(kda_decode(*layer.tokens(3, 6), accepted=torch.tensor([3, 1]), **options))
        outs.append(options["state"].clone())
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


@pytest.mark.parametrize("tokens", [1, 3])
def test_raw_weights_are_read_where_they_lie(backend, tokens):
    layer = Layer(tokens)
    raw = layer.conv
    apart = [torch.stack([w, w], -1)[..., 0] for w in raw]
    turned = [raw[0], raw[1].mT.contiguous().mT, raw[2]]
    outs = []
    for weight in (pack_taps(raw, HEADS), raw, apart, turned, [raw[0].double(), *raw[1:]]):
        options = {**layer.pool(), "slots": torch.tensor([3, 1]), **layer.weights}
        options |= {"conv_weight": weight, "backend": backend}
        outs.append(kda_decode(*layer.x, **options))
    assert [torch.equal(o, outs[0]) for o in outs] == [True] * len(outs)


def test_wrong_raw_weights_are_refused():
    layer = Layer(2)
    options = {**layer.pool(), "slots": torch.tensor([3, 1]), **layer.weights}
    for wrong in (torch.zeros(8, 4), torch.zeros(8, 2, 4), torch.zeros(HEADS * 7, 1, 4)):
        with pytest.raises(InputError, match="conv_weight"):
            kda_decode(*layer.x, **options | {"conv_weight": [wrong, *layer.conv[1:]]})
    with pytest.raises(InputError, match="three"):
        kda_decode(*layer.x, **options | {"conv_weight": layer.conv[:2]})


def test_more_tokens_than_a_tile_are_left_to_the_reference():
    facts = {"device": torch.device("cpu"), "width": 128}
    for window, reason in ((17, "windows of 16 tokens"), (16, "CUDA")):
        (_, usable, why), _ = decode.BACKENDS.explain(**facts, window=window)
        assert not usable
        assert reason in why


def test_wrong_shapes_are_named():
    layer, pool = Layer(1), Layer(1).pool()
    options = {**pool, "slots": torch.tensor([0, 1]), **layer.weights}
    with pytest.raises(InputError, match="conv_state must be"):
        kda_decode(*layer.x, **options | {"conv_state": pool["conv_state"][:, :, :3]})
    with pytest.raises(InputError, match="dt_bias must be"):
        kda_decode(*layer.x, **options | {"dt_bias": layer.weights["dt_bias"][1:]})
    with pytest.raises(InputError, match="state must be float32"):
        kda_decode(*layer.x, **options | {"state": pool["state"].double()})
    with pytest.raises(InputError, match="belong together"):
        kda_decode(*layer.x, **options, accepted=torch.zeros(2, dtype=torch.int64))
    pending = Pending(*(torch.zeros(SLOTS, 0, *t.shape[2:]) for t in layer.x[:5]))
    with pytest.raises(InputError, match="do not fit"):
        kda_decode(*layer.x, **options, pending=pending, accepted=torch.zeros(2, dtype=torch.int64))


ONES = torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        (r"slots must lie in \[0, 5\); one is 5", {"slots": torch.tensor([0, 5])}),
        ("slots must be distinct", {"slots": ONES}),
        ("slots must be of integers", {"slots": torch.tensor([0.0, 1.0])}),
        (r"slots must be \[2\]", {"slots": ONES[:1]}),
        ("slots must be a tensor, not list", {"slots": [0, 1]}),
        ("dt_bias must be a tensor, not NoneType", {"dt_bias": None}),
        ("conv_weight must be", {"conv_weight": torch.ones(4)}),
        ("lower_bound", {"lower_bound": 1.0}),
        (r"accepted must lie in \[0, 4\); one is 4", {"accepted": 4 * ONES}),
        (r"accepted must lie in \[0, 4\); one is -1", {"accepted": -ONES}),
        ("accepted must be of integers", {"accepted": torch.ones(2)}),
        (r"windows must lie in \[0, 5\); one is 7", {"windows": torch.tensor([0, 7])}),
        ("windows must be distinct", {"windows": ONES}),
        (r"advance must lie in \[0, 3\); one is 3", {"advance": 3 * ONES}),
    ],
)
def test_wrong_slots_and_counts_are_named(named, wrong):
    """Where they lie on the host; the states are as they were."""
    layer = Layer(2)
    pool = layer.pool()
    pending = Pending(*(torch.zeros(SLOTS, 3, *t.shape[2:]) for t in layer.x[:5]))
    options = {**pool, "slots": torch.tensor([3, 1]), **layer.weights}
    options |= {"pending": pending, "accepted": ONES}
    with pytest.raises(InputError, match=named):
        kda_decode(*layer.x, **options | wrong)
    assert torch.equal(pool["state"], layer.state)


def test_padding_rows_may_name_any_window():
    layer = Layer(2)
    pending = Pending(*(torch.zeros(SLOTS, 3, *t.shape[2:]) for t in layer.x[:5]))
    options = {**layer.pool(), "slots": torch.tensor([-1, 1]), **layer.weights}
    options |= {"pending": pending, "windows": torch.tensor([99, 1])}
    o = kda_decode(*layer.x, **options, accepted=torch.tensor([-7, 0]))
    assert not o[0].any()
    assert o[1].isfinite().all()
