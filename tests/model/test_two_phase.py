"""Mixing the finished blocks once a block is mixing them at every sublayer."""

import pytest
import torch

from openk3.config import preset
from openk3.model import K3, two_phase
from openk3.model.ports import Context


def lively(layers, block):
    """AttnRes queries, zero at the start, are drawn too."""
    attn = preset("nano").linear_attn.__class__(
        full_attn_layers=(4, layers), num_heads=2, head_dim=16
    )
    sizes = {"num_hidden_layers": layers, "attn_res_block_size": block, "initializer_range": 0.04}
    model = K3(preset("nano", linear_attn=attn, **sizes), seed=0).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                weight.normal_(std=0.1, generator=rng)
    return model


@pytest.mark.parametrize(("layers", "block", "batch"), [(10, 2, 2), (10, 3, 1), (7, 7, 1)])
@pytest.mark.parametrize("always", [False, True])
def test_it_is_the_trunk(layers, block, batch, always, monkeypatch):
    model = lively(layers, block)
    x = torch.randn(batch, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    used = []
    real = two_phase.plan_bytes

    def plan(*sizes):
        bytes_ = real(*sizes)
        bytes_ = bytes_._replace(two_phase=0) if always else bytes_
        used.append((sizes[:2], bytes_.two_phase_wins))
        return bytes_

    monkeypatch.setattr(two_phase, "plan_bytes", plan)
    monkeypatch.setattr("openk3.ops.attn_res.two_phase.RATE", 1.0)  # else small models never do
    with torch.no_grad():
        wanted, got = (
            f(x, Context()) for f in (model.trunk, lambda *a: two_phase.trunk(model, *a))
        )
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    assert len(used) == -(-layers // block)
    assert [count for (count, _), _ in used] == list(range(1, len(used) + 1))
    assert any(wins for _, wins in used) == (always or len(used) > 3)
