"""KDA reference: the chunkwise form is the recurrence, forward and backward."""

import pytest
import torch

from openk3.errors import BackendError, InputError
from openk3.ops.kda import kda, reference

F64 = torch.float64


def raw_inputs(batch, tokens, heads, width, value_width=None, *, seed=0, gate=3.0, dtype=F64):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=dtype)

    return {
        "q": draw(batch, tokens, heads, width),
        "k": draw(batch, tokens, heads, width),
        "v": draw(batch, tokens, heads, value_width or width),
        "g": draw(batch, tokens, heads, width) * gate,
        "beta": draw(batch, tokens, heads),
        "A_log": draw(heads) * 0.5,
        "dt_bias": draw(heads * width),
    }


def activated(raw):
    return reference.activate(*raw.values(), -5.0, raw["q"].shape[-1] ** -0.5)


@pytest.mark.parametrize("chunk_size", [7, 16, 32, 48, 64, 100])
@pytest.mark.parametrize("lengths", [[37, 0, 5, 64, 1], [64, 64], [1], [1000 % 190, 63]])
def test_chunkwise_is_the_recurrence(chunk_size, lengths):
    tokens = sum(lengths)
    active = activated(raw_inputs(1, tokens, 3, 8, 12))
    state = torch.randn(len(lengths), 3, 8, 12, dtype=F64)
    wanted = torch.randperm(tokens)[:5]
    o, final, states = reference.recurrent(*active, state, lengths, state_positions=wanted)
    o_c, final_c, states_c = reference.chunkwise(
        *active, state, lengths, chunk_size=chunk_size, state_positions=wanted
    )
    torch.testing.assert_close(o_c.view_as(o), o, atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(final_c, final, atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(states_c, states, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_both_ends_of_the_gate_in_float32(gate):
    """alpha = e^-5 at every token, and alpha = 1: finite, and equal to float64."""
    raw = raw_inputs(2, 130, 2, 16, dtype=torch.float32)
    raw["g"] = torch.full_like(raw["g"], gate)
    o, final = kda(**raw, output_final_state=True)
    exact, exact_final = kda(**{n: x.double() for n, x in raw.items()}, output_final_state=True)
    torch.testing.assert_close(o.double(), exact, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(final.double(), exact_final, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [3, 23])
def test_gradients(tokens):
    raw = raw_inputs(1, tokens, 2, 4, 3)
    cu_seqlens = torch.tensor([0, tokens // 3, tokens // 3, tokens])
    state = torch.randn(3, 2, 4, 3, dtype=F64)
    inputs = [x.requires_grad_() for x in (*raw.values(), state)]

    def run(q, k, v, g, beta, A_log, dt_bias, initial):
        o, final, states = kda(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=initial,
            cu_seqlens=cu_seqlens,
            output_final_state=True,
            state_positions=torch.tensor([tokens // 2]),
        )
        return o, final, states

    assert torch.autograd.gradcheck(run, inputs, fast_mode=tokens > 10)


def test_packed_row_equals_separate_rows():
    raw = raw_inputs(1, 100, 2, 16)
    packed, _ = kda(**raw, cu_seqlens=torch.tensor([0, 41, 100]))
    per_token = ("q", "k", "v", "g", "beta")
    for here in (slice(0, 41), slice(41, 100)):
        alone = {n: x[:, here] if n in per_token else x for n, x in raw.items()}
        torch.testing.assert_close(packed[:, here], kda(**alone)[0])


def test_a_sequence_in_two_pieces_equals_one():
    raw = raw_inputs(2, 50, 2, 16)
    per_token = ("q", "k", "v", "g", "beta")
    whole, end = kda(**raw, output_final_state=True)
    state, pieces = None, []
    for here in (slice(0, 21), slice(21, 22), slice(22, 50)):
        piece = {n: x[:, here] if n in per_token else x for n, x in raw.items()}
        o, state = kda(**piece, initial_state=state, output_final_state=True)
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k", (2, 9, 2, 8)), ("g", (2, 8, 2)), ("beta", (2, 8, 2, 1)), ("A_log", (3,))],
)
def test_wrong_shapes_are_named(name, shape):
    raw = raw_inputs(2, 8, 2, 8)
    raw[name] = torch.zeros(shape)
    with pytest.raises(InputError, match=name):
        kda(**raw)


@pytest.mark.parametrize("name", ["k", "g", "beta", "A_log"])
def test_integers_are_refused(name):
    raw = raw_inputs(1, 8, 2, 8)
    with pytest.raises(InputError, match=f"{name} must be of floating point"):
        kda(**raw | {name: raw[name].int()})


@pytest.mark.parametrize(
    "offsets", [[0, 4], [1, 8], [0, 6, 5, 8], [0.0, 8.0], [False], [[0, 8]], [], None]
)
def test_wrong_cu_seqlens_are_refused(offsets):
    wrong = [0, 8] if offsets is None else torch.tensor(offsets)
    with pytest.raises(InputError, match="cu_seqlens"):
        kda(**raw_inputs(1, 8, 2, 8), cu_seqlens=wrong)


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        (r"state_positions must lie in .*; one is 30", {"state_positions": torch.tensor([0, 30])}),
        (r"state_positions must lie in .*; one is -1", {"state_positions": torch.tensor([-1])}),
        ("state_positions must be of integers", {"state_positions": torch.tensor([True])}),
        (r"initial_state must be \[2, 2, 8, 8\]", {"initial_state": torch.zeros(1, 2, 8, 8)}),
        ("initial_state must be of floating", {"initial_state": torch.zeros(2, 2, 8, 8).int()}),
        (r"dt_bias must be \[16\]", {"dt_bias": torch.zeros(2, 4)}),
        ("dt_bias is on meta", {"dt_bias": torch.zeros(16, device="meta")}),
        ("q must be of floating point", {"q": torch.ones(2, 9, 2, 8).int()}),
        (r"v \[2, 9, 2\]", {"v": torch.zeros(2, 9, 2)}),
        ("none of H, K, V zero", {"v": torch.zeros(2, 9, 2, 0)}),
        ("lower_bound", {"lower_bound": 1.0}),
        ("lower_bound", {"lower_bound": float("nan")}),
    ],
)
def test_wrong_values_are_named(named, wrong, tokens):
    raw = raw_inputs(2, 9, 2, 8) | wrong
    raw = {n: x[:, :tokens] if n in ("q", "k", "v", "g", "beta") else x for n, x in raw.items()}
    if "v" in wrong and tokens == 3:
        named = named.replace("9", "3")
    with pytest.raises(InputError, match=named):
        kda(**raw)


@pytest.mark.parametrize("tokens", [0, 3, 9])
def test_no_positions_give_no_states(tokens):
    positions = torch.empty(0, dtype=torch.int64)
    _, _, states = kda(**raw_inputs(2, tokens, 2, 8), state_positions=positions)
    assert states.shape == (0, 2, 8, 8)


def test_an_impossible_backend_is_an_error():
    with pytest.raises(BackendError, match="no backend 'cudnn'"):
        kda(**raw_inputs(1, 8, 2, 8), backend="cudnn")
