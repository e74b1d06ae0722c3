"""Block AttnRes, the norms and the fused loss on a GPU against float64; bitwise repeats."""

import pytest
import torch

from kernel_checks import gradients, poison, relative_error
from openk3.ops.attn_res import mix, mix_norm
from openk3.ops.attn_res.two_phase import block_partials, merge_running
from openk3.ops.loss import linear_cross_entropy
from openk3.ops.norm import rms_norm

pytestmark = pytest.mark.gpu
BF16 = 6e-3


def normal(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=rng, device="cuda") * scale).to(dtype)


def run(eps, backend, norm):
    def call(query, key_weight, out_weight, *sources):
        if norm:
            return mix_norm(sources, query, key_weight, eps, out_weight, eps, backend=backend)
        return mix(sources, query, key_weight, eps, backend=backend) + 0 * out_weight

    return call


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("sources", "tokens", "dim", "dtype"),
    [
        (1, 63, 7168, torch.bfloat16),
        (2, 1000, 7168, torch.bfloat16),
        (3, 1, 7168, torch.bfloat16),
        (5, 257, 7168, torch.bfloat16),
        (9, 1000, 7168, torch.bfloat16),
        (12, 300, 7168, torch.bfloat16),
        (4, 555, 4160, torch.bfloat16),
        (16, 140, 512, torch.bfloat16),
        (4, 1000, 512, torch.bfloat16),
        (4, 100, 7168, torch.float32),
    ],
)
def test_mix_and_gradients(sources, tokens, dim, dtype, norm):
    values = [normal(tokens, dim, seed=i, dtype=dtype, scale=1 + i) for i in range(sources)]
    query = normal(dim, seed=20, dtype=dtype, scale=3 * dim**-0.5)
    key_weight = normal(dim, seed=21, dtype=dtype, scale=0.1) + 1
    out_weight = normal(dim, seed=22, dtype=dtype, scale=0.1) + 1
    inputs, d_out = [query, key_weight, out_weight, *values], normal(tokens, dim, seed=23)
    exact = gradients(run(1e-5, "reference", norm), [t.double() for t in inputs], d_out)
    results = []
    for _ in range(2):
        poison("cuda", 64)
        results.append(gradients(run(1e-5, "triton", norm), inputs, d_out))
    limit = BF16 if dtype == torch.bfloat16 else 2e-5
    names = ["out", "query", "key_weight", "out_weight", *[f"v{i}" for i in range(sources)]]
    for name, a, b, wanted in zip(names, *results, exact, strict=True):
        if sources == 1 and name in ("query", "key_weight"):
            assert a.abs().max() < 1e-2, "a lone source's weight is one"
        elif norm or name != "out_weight":
            assert relative_error(a, wanted) < limit, name
        assert torch.equal(a, b), f"{name} differs between two runs"


def test_forward_of_sixteen_wide_sources():
    """Forward only: gradients of more than 12 rows this wide take a minute to compile."""
    values = [normal(140, 7168, seed=i, scale=1 + i) for i in range(16)]
    query, weight = normal(7168, seed=20, scale=3 * 7168**-0.5), normal(7168, seed=21)
    exact = mix([v.double() for v in values], query.double(), weight.double(), backend="reference")
    poison("cuda", 64)
    assert relative_error(mix(values, query, weight, backend="triton"), exact) < BF16


@pytest.mark.parametrize(("finished", "tokens"), [(1, 100), (3, 257), (8, 1000)])
def test_two_phases_equal_one(finished, tokens):
    dim, queries = 7168, 24
    blocks = [normal(tokens, dim, seed=i) for i in range(finished)]
    running = normal(tokens, dim, seed=30, scale=2)
    query = normal(queries, dim, seed=31, scale=3 * dim**-0.5)
    weight = normal(queries, dim, seed=32, scale=0.1) + 1
    out_norm = (normal(dim, seed=33, scale=0.1) + 1, 1e-5)
    poison("cuda", 64)
    partial, lse = block_partials(blocks, query, weight, backend="triton")
    for q in (0, 7, 23):
        one, _ = mix([v.double() for v in blocks], query[q].double(), weight[q].double(),
                     backend="reference", return_weights=True)  # fmt: skip
        assert relative_error(partial[q], one) < BF16
        for norm in (None, out_norm):
            got = merge_running(
                partial[q], lse[q], running, query[q], weight[q], out_norm=norm, backend="triton"
            )
            sources = [v.double() for v in (*blocks, running)]
            wanted = mix(sources, query[q].double(), weight[q].double(), backend="reference")
            if norm is not None:
                wanted = rms_norm(wanted, norm[0].double(), norm[1], backend="reference")
            assert relative_error(got, wanted) < BF16


@pytest.mark.parametrize("tokens", [1, 63, 1000])
def test_norm(tokens):
    x, weight, d_out = normal(tokens, 3584), normal(3584, seed=1), normal(tokens, 3584, seed=2)

    def call(backend):
        return lambda x, w: rms_norm(x, w, 1e-5, backend=backend)

    exact = gradients(call("reference"), (x.double(), weight.double()), d_out)
    poison("cuda", 64)
    got = gradients(call("triton"), (x, weight), d_out)
    assert max(relative_error(a, b) for a, b in zip(got, exact, strict=True)) < BF16


def test_fused_loss_of_the_whole_vocabulary():
    hidden, head = normal(100, 512), normal(163840, 512, seed=1, scale=0.2)
    targets = torch.randint(0, 163840, (100,), device="cuda")
    targets[::7] = -100
    one = torch.ones((), device="cuda")

    def plain(h, w):
        return torch.nn.functional.cross_entropy(h @ w.T, targets, reduction="sum")

    exact = gradients(plain, (hidden.double(), head.double()), one)
    poison("cuda", 64)
    got = gradients(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk_tokens=33), (hidden, head), one
    )
    assert relative_error(got[0], exact[0]) < 1e-4
    assert max(relative_error(a, b) for a, b in zip(got[1:], exact[1:], strict=True)) < 1e-2
