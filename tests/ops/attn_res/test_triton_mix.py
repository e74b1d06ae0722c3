"""The AttnRes kernels in Triton's interpreter: output and every gradient against float64.

The kernels round bfloat16 by hand in the interpreter, whose own casts truncate.
"""

import pytest
import torch

from kernel_checks import gradients, relative_error
from openk3.errors import BackendError, InputError
from openk3.ops.attn_res import mix, mix_norm
from openk3.ops.attn_res.reference import mix_reference
from openk3.ops.norm.reference import rms_norm_reference
from openk3.ops.rows import dense

triton_mix = pytest.importorskip("openk3.ops.attn_res.triton_mix", exc_type=ImportError)
EPS = 1e-5


def draw(num_sources, tokens, dim, dtype, seed=0, score=3.0):
    """query, norm weight, sources of unlike sizes; scores of about `score`."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    sources = [normal(tokens, dim) * (0.5 + i) for i in range(num_sources)]
    query = normal(dim) * score / dim**0.5
    return [x.to(dtype) for x in (query, 1 + 0.1 * normal(dim), *sources)], normal(tokens, dim)


def run_kernel(query, norm_weight, *sources):
    return triton_mix.mix(sources, query, norm_weight, EPS)[0]


def run_exact(query, norm_weight, *sources):
    return mix_reference(sources, query, norm_weight, EPS)[0]


@pytest.mark.parametrize(
    ("num_sources", "tokens", "dim"), [(1, 1, 64), (2, 5, 64), (3, 1, 448), (9, 3, 64)]
)
def test_output_and_gradients(num_sources, tokens, dim):
    inputs, d_out = draw(num_sources, tokens, dim, torch.float32)
    got = gradients(run_kernel, inputs, d_out)
    wanted = gradients(run_exact, [x.double() for x in inputs], d_out)
    assert [relative_error(a, b) < 3e-6 for a, b in zip(got, wanted, strict=True)] == [True] * len(
        got
    )


@pytest.mark.parametrize(("group", "ahead", "resident"), [(1, 0, 0), (2, 1, 2), (3, 3, 3)])
def test_every_schedule_computes_the_same(group, ahead, resident):
    inputs, d_out = draw(4, 3, 192, torch.float32, seed=1)
    query, weight, *sources = inputs
    exact = gradients(run_exact, [x.double() for x in inputs], d_out)
    config = triton_mix.Launch(1, 1, group, ahead, resident)
    out, _, stats = triton_mix.launch_forward(sources, query, weight, EPS, keep=True, config=config)
    d_sources, d_query, d_weight = triton_mix.launch_backward(
        sources, query, weight, d_out.float(), stats, config
    )
    for got, wanted in zip((out, d_query, d_weight, *d_sources), exact, strict=True):
        assert relative_error(got, wanted) < 3e-6


@pytest.mark.parametrize("score", [0.0, 50.0])
def test_half_precision_gradients_stay_at_rounding_error(score):
    """Equal scores (a zero query, as at the start of training) and nearly one-hot weights."""
    inputs, d_out = draw(4, 3, 192, torch.bfloat16, seed=2, score=score)
    d_out = d_out.bfloat16().double()
    got = gradients(run_kernel, inputs, d_out)
    wanted = gradients(run_exact, [x.double() for x in inputs], d_out)
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < 4e-3 or float(b.norm()) < 1e-9


def test_the_query_gradient_survives_cancellation():
    """Sources that differ by 1 %: both its sums cancel to 1 %, float32's 1e-7 becomes 1e-3.

    A delta taken from the rounded output would start from 5e-4 and end near 1.
    """
    inputs, d_out = draw(3, 4, 192, torch.bfloat16, seed=3)
    base = inputs[2].float()
    noise = torch.Generator().manual_seed(4)
    scale = [1 + 0.01 * torch.randn(base.shape, generator=noise) for _ in range(3)]
    close = [(base * factor).bfloat16() for factor in scale]
    inputs, d_out = [*[x.float() for x in inputs[:2]], *close], d_out.bfloat16().double()
    got = gradients(run_kernel, inputs, d_out)
    wanted = gradients(run_exact, [x.double() for x in inputs], d_out)
    assert relative_error(got[1], wanted[1]) < 5e-3


def test_fused_norm_matches_the_two_steps():
    inputs, d_out = draw(2, 3, 192, torch.float32, seed=5)
    out_weight = torch.randn(192, generator=torch.Generator().manual_seed(6))

    def fused(query, weight, out_weight, *sources):
        return triton_mix.mix_norm(sources, query, weight, EPS, out_weight, 1e-5)

    def steps(query, weight, out_weight, *sources):
        mixed, _ = mix_reference(sources, query, weight, EPS)
        return rms_norm_reference(mixed, out_weight, 1e-5)

    inputs = [*inputs[:2], out_weight, *inputs[2:]]
    got = gradients(fused, inputs, d_out)
    wanted = gradients(steps, [x.double() for x in inputs], d_out)
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < 3e-6
    with torch.no_grad():
        assert torch.equal(fused(*inputs), got[0])


def test_weights_and_batch_shape():
    (query, weight, *sources), _ = draw(3, 6, 64, torch.float32, seed=7)
    shaped = [v.view(2, 3, 64) for v in sources]
    mixed, weights = triton_mix.mix(shaped, query[None], weight, EPS, return_weights=True)
    exact, exact_weights = mix_reference([v.double() for v in shaped], query, weight, EPS)
    assert relative_error(mixed, exact) < 1e-6
    torch.testing.assert_close(weights.double(), exact_weights, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["strided", "half", "double", "odd start"])
def test_rows_and_vectors_of_any_layout(layout):
    """Packed rows are read as words: a vector of another kind is made one that fits."""
    inputs, _ = draw(2, 3, 192, torch.bfloat16, seed=8)
    vectors, sources = [*inputs[:2], inputs[1] + 1], inputs[2:]
    if layout == "strided":
        vectors = [torch.stack([v, -v], -1)[..., 0] for v in vectors]
    elif layout == "odd start":
        vectors, sources = (
            [torch.cat([v.new_ones(1), v.flatten()])[1:].view(v.shape) for v in group]
            for group in (vectors, sources)
        )
    else:
        vectors = [v.to(torch.float16 if layout == "half" else torch.float64) for v in vectors]
    query, weight, out_weight = vectors
    got = triton_mix.mix_norm(sources, query, weight, EPS, out_weight, EPS)
    mixed, _ = mix_reference([v.double() for v in sources], query, weight, EPS)
    assert relative_error(got, rms_norm_reference(mixed, out_weight.double(), EPS)) < 8e-3
    aligned = [x.storage_offset() * x.element_size() % 16 == 0 for x in map(dense, sources)]
    assert aligned == [True, True]


def test_no_tokens():
    inputs, d_out = draw(2, 0, 64, torch.float32)
    out, d_query, d_weight, *d_sources = gradients(run_kernel, inputs, d_out)
    assert out.shape == (0, 64)
    assert not d_query.any()
    assert not d_weight.any()
    assert all(d.shape == (0, 64) for d in d_sources)


def test_what_cannot_run_is_refused():
    (query, weight, *sources), _ = draw(2, 1, 64, torch.float32)
    with pytest.raises(BackendError, match="CUDA device"):
        mix(sources, query, weight, backend="triton")
    with pytest.raises(InputError, match=r"query must be \[64\]"):
        mix(sources, query[:32], weight)
    with pytest.raises(InputError, match="out_weight"):
        mix_norm(sources, query, weight, EPS, weight[:32], EPS)
