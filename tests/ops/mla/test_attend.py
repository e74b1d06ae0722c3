"""New queries behind cached positions, a few at a time when all at once would be too many."""

import torch

from openk3.ops import mla


def test_pieces_of_queries_are_the_whole(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 3, 12, generator=rng)
    latent = torch.randn(2, 20, 16, generator=rng)
    rope = torch.randn(2, 20, 4, generator=rng)
    kv_b = torch.randn(3 * (8 + 6), 16, generator=rng)
    whole = mla.attend(q, latent, rope, kv_b)
    for limit in (1, 2 * 3 * 20 * 2, 2 * 3 * 20 * 4):
        monkeypatch.setattr(mla, "MAX_MASKED", limit)
        torch.testing.assert_close(mla.attend(q, latent, rope, kv_b), whole, atol=1e-6, rtol=1e-5)
    absorbed = mla.attend(q, latent, rope, kv_b, form="absorbed")
    torch.testing.assert_close(absorbed, whole, atol=1e-5, rtol=1e-4)
