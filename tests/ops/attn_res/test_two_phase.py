"""Two-phase AttnRes is the one-phase mix, and the planner's bytes are what the kernels move."""

import pytest
import torch

from kernel_checks import relative_error
from openk3.errors import BackendError, InputError
from openk3.ops.attn_res import two_phase
from openk3.ops.attn_res.reference import mix_reference
from openk3.ops.norm.reference import rms_norm_reference

EPS = 1e-5


def draw(num_sources, num_queries, tokens, dim, dtype, score=3.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    blocks = [
        (torch.randn(tokens, dim, generator=rng) * (0.5 + i)).to(dtype) for i in range(num_sources)
    ]
    queries = (torch.randn(num_queries, dim, generator=rng) * score / dim**0.5).to(dtype)
    norms = (1 + 0.1 * torch.randn(num_queries, dim, generator=rng)).to(dtype)
    return blocks, queries, norms, torch.randn(tokens, dim, generator=rng).to(dtype)


def implementations():
    kernels = pytest.importorskip("openk3.ops.attn_res.triton_two_phase", exc_type=ImportError)
    return {"reference": two_phase._Reference, "triton": kernels}


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(
    ("num_sources", "num_queries", "tokens", "dtype", "tolerance"),
    [
        (1, 3, 1, torch.float32, 2e-6),
        (3, 5, 5, torch.float32, 2e-6),
        (8, 24, 3, torch.float32, 2e-6),
        (9, 2, 2, torch.float32, 2e-6),
        (4, 17, 5, torch.bfloat16, 8e-3),  # the interpreter's bfloat16 casts truncate
    ],
)
def test_partials_are_the_mix_of_the_finished_blocks(
    name, num_sources, num_queries, tokens, dtype, tolerance
):
    blocks, queries, norms, _ = draw(num_sources, num_queries, tokens, 128, dtype)
    mixed, lse = implementations()[name].block_partials(blocks, queries, norms, EPS)
    assert mixed.shape == (num_queries, tokens, 128)
    wide = [v.double() for v in blocks]
    for q in range(num_queries):
        wanted, _ = mix_reference(wide, queries[q].double(), norms[q].double(), EPS)
        assert relative_error(mixed[q], wanted) < tolerance
    scores = torch.stack(
        [
            (v / (v.pow(2).mean(-1, keepdim=True) + EPS).sqrt()) @ (queries * norms).double().T
            for v in wide
        ]
    )
    if dtype == torch.float32:
        torch.testing.assert_close(lse.T.double(), scores.logsumexp(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("score", [1.0, 50.0])
def test_merge_equals_one_phase(name, score):
    """With scores of 50 the softmax is nearly one-hot on either side."""
    blocks, queries, norms, running = draw(3, 2, 4, 192, torch.float32, score, seed=1)
    impl = implementations()[name]
    mixed, lse = impl.block_partials(blocks, queries, norms, EPS)
    for q in range(2):
        one, _ = mix_reference(
            [v.double() for v in (*blocks, running)], queries[q].double(), norms[q].double(), EPS
        )
        two = impl.merge_running(mixed[q], lse[q], running, queries[q], norms[q], EPS, None)
        assert relative_error(two, one) < 1e-5
        weight = 1 + 0.1 * norms[0]
        normed = impl.merge_running(
            mixed[q], lse[q], running, queries[q], norms[q], EPS, (weight, EPS)
        )
        assert relative_error(normed, rms_norm_reference(one, weight.double(), EPS)) < 1e-5


def test_planner():
    """24 queries: two phases from 5 finished blocks on, and half the bytes from 7 on."""
    for num_finished in range(1, 17):
        plan = two_phase.plan_bytes(num_finished, 24, tokens=8192, dim=7168)
        assert plan.one_phase == (24 * (num_finished + 2) - 1) * 8192 * 7168 * 2
        assert plan.two_phase == (num_finished + 24 + 3 * 23) * 8192 * 7168 * 2
        assert plan.two_phase_wins == (num_finished >= 5)
        assert (plan.one_phase >= 2 * plan.two_phase) == (num_finished >= 7)
    assert not two_phase.plan_bytes(8, 1, tokens=1, dim=64).two_phase_wins


def test_refusals():
    blocks, queries, norms, running = draw(2, 2, 3, 64, torch.float32)
    with pytest.raises(InputError, match=r"queries must be \[2, 64\]"):
        two_phase.block_partials(blocks, queries[:, :32], norms[:, :32])
    with pytest.raises(InputError, match="at most 32"):
        two_phase.block_partials(blocks, queries.repeat(17, 1), norms.repeat(17, 1))
    with pytest.raises(InputError, match=r"sources must be \[3, 64\]"):
        two_phase.block_partials([blocks[0], blocks[1][:1]], queries, norms)
    with pytest.raises(InputError, match="1 to 16 sources"):
        two_phase.block_partials([], queries, norms)
    with pytest.raises(BackendError, match="CUDA device"):
        two_phase.block_partials(blocks, queries, norms, backend="triton")
    with pytest.raises(InputError, match=r"\[T, D\]"):
        two_phase.merge_running(running[None], running[:, 0], running[None], queries[0], norms[0])
    with pytest.raises(InputError, match=r"partial must be \[3, 64\]"):
        two_phase.merge_running(running[:1], running[:, 0], running, queries[0], norms[0])
    with pytest.raises(InputError, match=r"must be \[64\]"):
        two_phase.merge_running(running, running[:, 0], running, queries[0, :32], norms[0])
    assert two_phase.plan_bytes(1, 1, 1, 1, 1).one_phase == 2
    with pytest.raises(InputError, match="at least 1"):
        two_phase.plan_bytes(0, 1, 1, 1)
