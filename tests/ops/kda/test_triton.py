"""The Triton kernels in Triton's interpreter: outputs, states and every gradient against float64.

The interpreter multiplies float32 (it has no bf16 products); tests/gpu has the rest.
"""

import pytest
import torch

from kernel_checks import relative_error
from openk3.errors import BackendError
from openk3.ops.kda import kda
from openk3.ops.kda.call import KdaCall

triton_op = pytest.importorskip("openk3.ops.kda.triton_op", exc_type=ImportError)
NAMES = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"]


def draw(batch, tokens, heads, width, num_seqs, *, seed=0, gate=2.0):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    x = {name: normal(batch, tokens, heads, width) for name in ("q", "k", "v", "g")}
    x["g"] *= gate
    x["beta"] = normal(batch, tokens, heads)
    x["A_log"], x["dt_bias"] = normal(heads) * 0.5, normal(heads * width) * 0.5
    x["initial_state"] = normal(num_seqs, heads, width, width)
    return x


def run_triton(x, *, segment=0, **options):
    plain = {"lower_bound": -5.0, "scale": x["q"].shape[-1] ** -0.5, "output_final_state": True}
    return triton_op.kda_triton(KdaCall(**x, **plain | options), segment)


def run_exact(x, **options):
    wide = {name: t.double() for name, t in x.items()}
    return kda(**wide, backend="reference", output_final_state=True, **options)


def check(x, *, segment=0, cu_seqlens=None, tolerance=5e-5, skip=()):
    """Output, final state and all gradients of a random functional of both.

    Exponents reach 115 in base 2, where float32 has steps of 8e-6: hence the tolerance.
    """
    results = []
    for wide, run in ((False, run_triton), (True, run_exact)):
        leaves = {n: (t.double() if wide else t).detach().requires_grad_() for n, t in x.items()}
        options = {} if wide else {"segment": segment}
        o, final = run(leaves, cu_seqlens=cu_seqlens, **options)
        rng = torch.Generator().manual_seed(7)
        d_o = torch.randn(o.shape, generator=rng).to(o.dtype)
        d_final = torch.randn(final.shape, generator=rng).to(final.dtype)
        grads = torch.autograd.grad([o, final], list(leaves.values()), [d_o, d_final])
        results.append(dict(zip(["o", "final", *x], [o, final, *grads], strict=True)))
    got, wanted = results
    errors = {n: relative_error(got[n], wanted[n]) for n in got if n not in skip}
    assert {n: e for n, e in errors.items() if not e < tolerance} == {}


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 130])
def test_lengths(tokens):
    check(draw(1, tokens, 1, 16, 1, seed=tokens))


def test_batch_and_heads():
    check(draw(2, 70, 3, 16, 2))


def test_head_width_64():
    check(draw(1, 70, 1, 64, 1))


@pytest.mark.parametrize("segment", [0, 64])
def test_packed_documents(segment):
    """Empty ones, shorter than a tile, longer than a block; cut into segments and not."""
    offsets = [0, 5, 5, 21, 201, 201, 202]
    check(draw(1, 202, 1, 16, 6), cu_seqlens=torch.tensor(offsets), segment=segment)


def test_segments_with_weak_decay():
    """alpha about 0.9999 over five segments: the transitions matter to the end."""
    x = draw(1, 300, 1, 16, 1)
    x["g"] -= 10.0
    x["dt_bias"] *= 0
    check(x, segment=64, skip=("g", "A_log", "dt_bias"))


def test_slowest_decay_gradients_of_the_gate():
    """Where gradients of g nearly cancel, they are small against what cancels."""
    x = draw(1, 40, 1, 16, 1)
    x["g"] -= 4.0
    check(x, tolerance=3e-4)


def test_steepest_decay():
    """alpha = e^-5 at every token: factors reach e^+-80."""
    x = draw(1, 70, 1, 16, 1)
    x["g"], x["dt_bias"] = torch.full_like(x["g"], 30.0), torch.zeros_like(x["dt_bias"])
    check(x, skip=("g", "A_log", "dt_bias"))  # zero but for rounding: sigmoid' vanishes
    o, _ = run_triton(x)
    assert o.isfinite().all()


def test_equal_keys_without_decay():
    """The worst case of the tile inverse: its powers reach 20 and cancel."""
    x = draw(1, 40, 1, 16, 1)
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x["g"] -= 30.0
    x["beta"] += 6.0
    check(x, tolerance=1e-4, skip=("g", "A_log", "dt_bias"))


def test_no_bias_no_initial_state():
    x = draw(1, 20, 2, 16, 1)
    x["dt_bias"] = x["initial_state"] = None
    o, final = run_triton(x)
    wanted = kda(
        **{n: t if t is None else t.double() for n, t in x.items()}, output_final_state=True
    )
    assert relative_error(o, wanted[0]) < 3e-6
    assert relative_error(final, wanted[1]) < 3e-6


def test_views_of_wider_tensors():
    """Strided q, k, v, g and beta are read in place."""
    x = draw(1, 33, 2, 16, 1)
    wide = torch.randn(1, 33, 5, 2, 16)
    for index, name in enumerate(("q", "k", "v", "g")):
        wide[:, :, index] = x[name]
    strided = x | {name: wide[:, :, index] for index, name in enumerate(("q", "k", "v", "g"))}
    strided["beta"] = x["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(run_triton(strided), run_triton(x), strict=True):
        assert torch.equal(a, b)


def test_unwritten_memory_is_never_read():
    """torch.empty filled with NaN: everything returned is finite."""
    x = draw(1, 150, 1, 16, 3)
    x = {n: t.requires_grad_() for n, t in x.items()}
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        outs = run_triton(x, cu_seqlens=torch.tensor([0, 70, 73, 150]), segment=64)
        grads = torch.autograd.grad(sum(t.sum() for t in outs), list(x.values()))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = was
    assert [bool(t.isfinite().all()) for t in (*outs, *grads)] == [True] * 10


@pytest.mark.parametrize("segment", [0, 64])
def test_states_at_positions(segment):
    x = draw(1, 202, 2, 16, 4)
    offsets = torch.tensor([0, 5, 5, 133, 202])
    positions = torch.tensor([4, 132, 68, 0, 69, 201, 150, 131, 68])
    with torch.no_grad():
        o, final, states = run_triton(
            x, cu_seqlens=offsets, state_positions=positions, segment=segment
        )
        wanted = run_exact(x, cu_seqlens=offsets, state_positions=positions)
    for a, b in zip((o, final, states), wanted, strict=True):
        assert relative_error(a, b) < 5e-6


def test_states_at_positions_of_a_batch():
    x = draw(2, 64, 1, 16, 2)
    positions = torch.tensor([63, 64, 127, 100])
    with torch.no_grad():
        *_, states = run_triton(x, state_positions=positions, output_final_state=False)
        *_, wanted = run_exact(x, state_positions=positions)
    assert relative_error(states, wanted) < 5e-6


def test_no_tokens():
    x = draw(2, 0, 1, 16, 2)
    o, final = run_triton(x)
    assert o.shape == (2, 0, 1, 16)
    assert torch.equal(final, x["initial_state"])


def test_custom_ops_are_registered_properly():
    x = [t.requires_grad_() for t in draw(1, 20, 1, 16, 1).values()]
    torch.library.opcheck(triton_op.kda_forward, (*x, None, -5.0, 0.25, True, True, 0))


def test_compiled_graph_does_not_break():
    x = draw(1, 20, 1, 16, 1)
    compiled = torch.compile(lambda y: run_triton(y)[0] * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), run_triton(x)[0] * 2)


def test_a_cpu_cannot_be_made_to_run_it():
    with pytest.raises(BackendError, match="CUDA"):
        kda(**{n: t.bfloat16() for n, t in draw(1, 4, 1, 64, 1).items()}, backend="triton")


def test_choosing_a_backend_does_not_break_a_graph():
    x = draw(1, 4, 1, 16, 1)
    compiled = torch.compile(lambda y: kda(**y)[0] * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), kda(**x)[0] * 2)
