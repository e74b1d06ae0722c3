"""Every bit of every weight counts."""

import pytest
import torch
from torch import nn

from openk3.engine import fingerprint
from small_models import lively_model


def test_equal_models_agree_and_one_changed_bit_anywhere_is_seen():
    model = lively_model(seed=3)
    seen = {fingerprint.of_weights(model)}
    assert seen == {fingerprint.of_weights(lively_model(seed=3))}
    weights = model.state_dict()
    for n, weight in enumerate(weights.values()):
        data = weight.view(-1).view(torch.uint8)
        data[n * 131 % len(data)] ^= 1
        seen.add(fingerprint.of_weights(model))
    assert len(seen) == len(weights) + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool])
def test_places_count_in_rows_of_any_length_and_alignment(dtype, monkeypatch):
    monkeypatch.setattr(fingerprint, "AT_ONCE", 16)
    base = torch.zeros(80)
    base[13] = 1
    found = set()
    for first in range(5):
        holder = nn.Module()
        holder.register_buffer("w", base.to(dtype)[first : first + 37])
        same = nn.Module()
        same.register_buffer("w", base[first : first + 37].to(dtype))
        assert fingerprint.of_weights(holder) == fingerprint.of_weights(same)
        found.add(fingerprint.of_weights(holder))
    assert len(found) == 5


def test_names_shapes_and_types_count():
    found = set()
    for name, shape, dtype in (
        ("a", (4,), torch.float32), ("b", (4,), torch.float32),
        ("a", (2, 2), torch.float32), ("a", (4,), torch.int32), ("a", (), torch.float32),
    ):  # fmt: skip
        holder = nn.Module()
        holder.register_buffer(name, torch.zeros(shape, dtype=dtype))
        found.add(fingerprint.of_weights(holder))
    assert len(found) == 5
