"""The optional MTP layer: what it may see, what it must guess, and that it trains."""

import pytest
import torch

from openk3.checkpoint.hf.layout import parameters
from openk3.config import preset
from openk3.config.sizes import parts
from openk3.errors import InputError
from openk3.model import K3
from openk3.model.mtp import later_targets
from openk3.ops.loss import linear_cross_entropy
from openk3.optim.groups import assign_all


@pytest.fixture(scope="module")
def model():
    return K3(preset("nano", num_nextn_predict_layers=1, initializer_range=0.1), seed=1)


def test_targets_move_one_on_inside_a_document():
    targets = torch.tensor([[5, 6, -100, 7, 8, 9]])
    assert later_targets(targets).tolist() == [[6, -100, -100, 8, 9, -100]]


@torch.no_grad()
def test_a_guess_depends_on_the_past_and_the_next_token_only(model):
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (1, 21), generator=rng)
    changed = ids.clone()
    changed[0, 11] += 1
    outs = []
    for row in (ids, changed):
        hidden = model.eval().hidden(row[:, :-1])
        outs.append(model.mtp_hidden(hidden, row[:, 1:]))
    torch.testing.assert_close(outs[0][:, :10], outs[1][:, :10], atol=1e-5, rtol=1e-5)
    assert (outs[0][:, 10] - outs[1][:, 10]).abs().max() > 1e-3


def test_every_mtp_parameter_trains_and_has_a_group(model):
    ids = torch.randint(0, 1000, (1, 40), generator=torch.Generator().manual_seed(1))
    hidden = model.train().hidden(ids[:, :-1])
    guessed = model.mtp_hidden(hidden, ids[:, 1:])
    targets = later_targets(ids[:, 1:])
    linear_cross_entropy(guessed, model.lm_head.weight, targets).backward()
    assert all(p.grad is not None for p in model.mtp.parameters())
    names = [n for n, _ in model.named_parameters()]
    assert [a.name for a in assign_all(model.named_parameters(), model.config)] == names
    assert set(model.max_logits()) == {3, 4}


def test_a_model_without_the_layer_says_so():
    with pytest.raises(InputError, match="num_nextn_predict_layers"):
        K3(preset("nano")).mtp_hidden(torch.zeros(1, 1, 128), torch.zeros(1, 1, dtype=torch.int64))


def test_sizes_and_the_file_layout_know_the_layer(model):
    held = sum(p.numel() for p in model.mtp.parameters())
    part = next(p for p in parts(model.config) if p.name == "MTP layer")
    assert part.params == held
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n.startswith("mtp.")}
    listed = {p.name: p.shape for p in parameters(model.config) if p.name.startswith("mtp.")}
    assert listed == shapes
