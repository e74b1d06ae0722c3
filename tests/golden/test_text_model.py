"""The whole text model against the authors' own code: logits, greedy tokens, decoding."""

import pytest
import torch

from openk3.config import ModelConfig
from openk3.model import K3, DenseCache


@pytest.fixture(scope="module")
def model(golden):
    description, t = golden("text_model")
    model = K3(ModelConfig.from_hf(description["config"]), seed=None)
    state = model.state_dict()
    for name in state:
        published = name if name.startswith("lm_head") else f"model.{name}"
        if ".experts.w" in name:
            prefix, kind = published.rsplit(".", 1)
            num = state[name].shape[0]
            state[name] = torch.stack([t[f"weight/{prefix}.{e}.{kind}.weight"] for e in range(num)])
        else:
            state[name] = t[f"weight/{published}"].view_as(state[name])
    model.load_state_dict(state)
    return model.eval()


def close(ours, theirs, atol=5e-4):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@torch.no_grad()
def test_logits_and_greedy_tokens(model, golden):
    _, t = golden("text_model")
    close(model(t["input/ids"]), t["output/logits"])
    close(model(t["input/ids"], logits_for="last"), t["output/logits"][:, -1:])
    ids = model.generate(t["input/ids"], max_new_tokens=16, temperature=0, stop_ids=[])
    assert torch.equal(ids[:, 21:], t["output/greedy_tokens"])


@torch.no_grad()
def test_packed_rows_equal_separate_rows(model, golden):
    _, t = golden("text_model")
    packed = t["input/ids"].reshape(1, -1)
    logits = model(packed, cu_seqlens=torch.tensor([0, 21, 42], dtype=torch.int32))
    close(logits.view(2, 21, -1), t["output/logits"])


@torch.no_grad()
def test_incremental_decoding(model, golden):
    description, t = golden("text_decode")
    cache, start, pieces = DenseCache(), 0, []
    for tokens in description["schedule"]:
        pieces.append(model(t["input/ids"][:, start : start + tokens], state=cache))
        start += tokens
    logits = torch.cat(pieces, 1)
    close(logits, t["output/logits_incremental"])
    close(logits, t["output/logits_full"])
    for layer, state in cache.kda_states.items():
        close(state.S, t[f"output/layer{layer}_state_KV"])
        close(state.conv_q.transpose(1, 2), t[f"output/layer{layer}_conv_q"])
