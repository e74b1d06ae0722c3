"""Expert layers cut over ranks, beside the same layer on one device, in any precision."""

import torch

from openk3.model.moe import Experts
from openk3.ops import moe

LATENT, INNER = 8, 12


class Toy(Experts):
    """Stacked experts of O(1) activations."""

    def __init__(self, num_experts, seed=0, dtype=torch.float32, latent=LATENT, inner=INNER):
        torch.nn.Module.__init__(self)
        rng = torch.Generator().manual_seed(seed)
        scale = (LATENT / latent) ** 0.5
        draw = lambda *shape: torch.nn.Parameter(  # noqa: E731
            (torch.randn(shape, generator=rng) * scale).to(dtype)
        )
        self.num_experts = num_experts
        self.w1 = draw(num_experts, inner, latent)
        self.w3 = draw(num_experts, inner, latent)
        self.w2 = draw(num_experts, latent, inner)
        self.betas = 4.0, 25.0


def draw_tokens(num_tokens, num_experts, top_k, seed, favourites=None, padding=0.0, latent=LATENT):
    """x [T, L], ids [T, k], logits [T, k] of one rank; `favourites` restricts the experts."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, latent, generator=rng)
    pool = torch.arange(num_experts) if favourites is None else torch.tensor(favourites)
    rows = [pool[torch.randperm(len(pool), generator=rng)[:top_k]] for _ in range(num_tokens)]
    ids = torch.stack(rows) if rows else torch.zeros(0, top_k, dtype=torch.int64)
    if padding:
        ids[torch.rand(num_tokens, generator=rng) < padding] = -1
    return x, ids, torch.randn(num_tokens, top_k, generator=rng)


def one_device(parts, num_experts, seed=0, **widths):
    """Forward and backward of all ranks' tokens at once, in float64.

    Returns (per rank [out, dx, dlogits], gradients of w1, w3, w2).
    """
    experts = Toy(num_experts, seed, torch.float64, **widths)
    found, total = [], torch.zeros((), dtype=torch.float64)
    for rank, (x, ids, logits) in enumerate(parts):
        x, logits = x.double().requires_grad_(), logits.double().requires_grad_()
        real = (ids >= 0).all(1)
        weights = logits.softmax(-1)
        out = torch.zeros(x.shape, dtype=torch.float64)
        if real.any():
            part = moe.expert_mlp(
                x[real], ids[real], weights[real],
                experts.w1, experts.w3, experts.w2, *experts.betas,
            )  # fmt: skip
            out = out.index_copy(0, real.nonzero()[:, 0], part)
        total = total + (out * probe(rank, *out.shape).double()).sum()
        found.append((x, logits, out))
    if total.requires_grad:
        total.backward()
    zero = lambda t: torch.zeros_like(t) if t.grad is None else t.grad  # noqa: E731
    per_rank = [(out.detach(), zero(x), zero(logits)) for x, logits, out in found]
    return per_rank, [zero(w) for w in (experts.w1, experts.w3, experts.w2)]


def probe(rank, num_tokens, latent=LATENT):
    """The weights [T, L] with which a rank's outputs enter the loss."""
    return torch.randn(num_tokens, latent, generator=torch.Generator().manual_seed(100 + rank))
