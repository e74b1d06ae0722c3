"""New queries behind cached positions, a few at a time when all at once would be too many."""

import pytest
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


@pytest.mark.parametrize(
    ("tokens", "keys", "form"), [(1, 9, "absorbed"), (8, 64, "absorbed"), (40, 64, "expanded")]
)
def test_few_tokens_behind_many_positions_are_absorbed(monkeypatch, tokens, keys, form):
    """Where the count of multiplications says so, and the scores may be held at once."""
    rng = torch.Generator().manual_seed(0)
    q, latent = (
        torch.randn(1, tokens, 3, 12, generator=rng),
        torch.randn(1, keys, 16, generator=rng),
    )
    rope, kv_b = torch.randn(1, keys, 4, generator=rng), torch.randn(3 * 14, 16, generator=rng)
    assert mla.cheaper_form(q, latent, rope, kv_b) == form
    chosen = mla.attend(q, latent, rope, kv_b, form=None)
    assert torch.equal(chosen, mla.attend(q, latent, rope, kv_b, form=form))
    monkeypatch.setattr(mla, "MAX_SCORES", 3 * tokens * keys - 1)
    assert mla.cheaper_form(q, latent, rope, kv_b) == "expanded"


def test_multiplications():
    """Counted by hand: 2 tokens, 5 keys, 3 heads, widths 7 + 1 and 4, latents of 6."""
    expanded = 5 * 3 * 6 * (7 + 4) + 2 * 5 * 3 * (7 + 1 + 4)
    absorbed = 2 * 3 * 6 * (7 + 4) + 2 * 5 * 3 * (6 + 1 + 6)
    assert mla.multiplications(2, 5, 3, 7, 1, 4, 6) == (expanded, absorbed)
