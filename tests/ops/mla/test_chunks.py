"""Prefill over pages: each chunk as if its sequence were alone and dense."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from kernel_checks import relative_error
from openk3.errors import BackendError, InputError
from openk3.ops.mla import attend, chunks
from openk3.ops.mla.chunks import attend_chunks, hold

HEADS, NOPE, ROPE, LATENT, PAGE, PAGES = 3, 8, 16, 32, 8, 24


def flash(q, k, v, held, scale):
    """What torch's flash attention computes, as on a GPU: queries are a sequence's last."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    cu_q, cu_k = held.cu_queries.tolist(), held.cu_keys.tolist()
    found = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        own = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        found.append(F.scaled_dot_product_attention(*own, mask, scale=scale).transpose(0, 1))
    return torch.cat(found)


@pytest.fixture(params=["chunk by chunk", "at once", "at once, a head at a time"])
def path(request, monkeypatch):
    if request.param != "chunk by chunk":
        monkeypatch.setattr(chunks, "chunk_by_chunk", chunks.all_at_once)
        monkeypatch.setattr(chunks, "_flash", flash)
    if "head" in request.param:
        monkeypatch.setattr(chunks, "MAX_EXPANDED", 64)


def problem(totals, counts, value, dtype=torch.float64):
    """Dense latents of each sequence, the same in poisoned pages in a random order, and queries."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=dtype)

    pages = torch.full((PAGES, PAGE, LATENT + ROPE), torch.nan, dtype=dtype)
    order = torch.randperm(PAGES, generator=rng).tolist()
    table = torch.full((len(totals), max(totals) // PAGE + 2), order[-1])
    dense = [normal(1, total, LATENT + ROPE) for total in totals]
    for c, total in enumerate(totals):
        for i in range(0, total, PAGE):
            table[c, i // PAGE] = page = order.pop(0)
            pages[page, : min(PAGE, total - i)] = dense[c][0, i : i + PAGE]
    held = hold(table, torch.tensor([totals, counts]), totals, counts, PAGE)
    q, kv_b = normal(sum(counts), HEADS, NOPE + ROPE), normal(HEADS * (NOPE + value), LATENT)
    return q, kv_b, pages, held, dense


@pytest.mark.parametrize("value", [12, 40])
@pytest.mark.parametrize(
    ("totals", "counts"),
    [([1], [1]), ([8, 17], [8, 17]), ([40, 9, 33, 1], [7, 9, 1, 1]), ([64], [24])],
)
def test_each_chunk_sees_its_own_sequence(path, totals, counts, value):
    q, kv_b, pages, held, dense = problem(totals, counts, value)
    o = attend_chunks(q, kv_b, pages, held)
    assert o.shape == (sum(counts), HEADS, value)
    for own, keys, found in zip(q.split(counts), dense, o.split(counts), strict=True):
        wanted = attend(own[None], keys[..., :LATENT], keys[..., LATENT:], kv_b)
        assert relative_error(found, wanted[0]) < 1e-12


def test_what_does_not_fit_is_refused():
    q, kv_b, pages, held, _ = problem([9], [4], 12)
    with pytest.raises(InputError, match="4 queries were announced, not 3"):
        attend_chunks(q[:3], kv_b, pages, held)
    with pytest.raises(InputError, match="do not fit 3 heads"):
        attend_chunks(q[..., :8], kv_b, pages, held)
    with pytest.raises(BackendError, match="flash attention needs an NVIDIA GPU"):
        attend_chunks(q, kv_b, pages, held, backend="flash")
