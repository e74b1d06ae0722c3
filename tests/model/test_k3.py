"""The model's own promises: decoding equals the full pass, packing isolates, counting is once."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from openk3.config import preset
from openk3.errors import DivergedError, InputError
from openk3.model import K3, DenseCache, cast, keeps_float32
from openk3.model.probe import Summary
from openk3.ops.loss import linear_cross_entropy
from small_models import lively_model


@pytest.fixture(scope="module")
def model():
    return lively_model(seed=1)


def draw_ids(model, *shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, shape, generator=rng)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[40], [17, 1, 1, 1, 20], [1] * 6 + [5, 7, 22], [39, 1]])
def test_any_split_of_a_sequence_gives_the_same_logits(model, pieces):
    ids = draw_ids(model, 2, 40)
    cache, start, logits = DenseCache(), 0, []
    for tokens in pieces:
        logits.append(model(ids[:, start : start + tokens], state=cache))
        start += tokens
    torch.testing.assert_close(torch.cat(logits, 1), model(ids), atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_documents_of_a_packed_row_do_not_see_each_other(model):
    ids = draw_ids(model, 1, 70)
    cu_seqlens = torch.tensor([0, 33, 34, 70], dtype=torch.int32)
    packed = model(ids, cu_seqlens=cu_seqlens)
    alone = torch.cat([model(ids[:, a:b]) for a, b in ((0, 33), (33, 34), (34, 70))], 1)
    torch.testing.assert_close(packed, alone, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_the_model_is_causal(model):
    ids = draw_ids(model, 1, 50)
    changed = ids.clone()
    changed[0, 30:] = draw_ids(model, 20, seed=9)
    same = model(ids)[:, :30], model(changed)[:, :30]
    torch.testing.assert_close(*same, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_whole_model_is_one_compiled_graph(model):
    torch.compiler.reset()
    ids = draw_ids(model, 2, 9)
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids))


def test_every_parameter_gets_a_gradient():
    model = K3(preset("nano"), seed=2)
    ids = draw_ids(model, 1, 512)
    linear_cross_entropy(model.hidden(ids), model.lm_head.weight, ids).backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    # the first layer has a single source, so its pair exists (as published) but is never read
    assert without == {
        "layers.0.self_attention_res_norm.weight",
        "layers.0.self_attention_res_proj.weight",
    }


def test_initialisation():
    model = K3(preset("nano"), seed=3)
    named = dict(model.named_parameters())
    assert not any(named[n].any() for n in named if n.endswith(("_res_proj.weight", "A_log")))
    step = torch.nn.functional.softplus(named["layers.0.self_attn.dt_bias"])
    assert step.min() > 0.9e-3
    assert step.max() < 1.1e-1
    again = dict(K3(preset("nano"), seed=3).named_parameters())
    assert all(torch.equal(named[n], again[n]) for n in named)
    other = dict(K3(preset("nano"), seed=4).named_parameters())
    assert not torch.equal(named["lm_head.weight"], other["lm_head.weight"])


def test_cast_leaves_the_float32_tensors_alone():
    model = cast(K3(preset("nano")), torch.bfloat16)
    kept = {n for n, p in model.state_dict().items() if p.dtype == torch.float32}
    assert kept == {n for n in model.state_dict() if keeps_float32(n)}
    assert any("conv1d" in n for n in kept)
    assert any("e_score_correction_bias" in n for n in kept)


class TestBalancing:
    def setup_method(self):
        self.model = K3(preset("nano"), seed=5).train()
        self.ids = draw_ids(self.model, 1, 64)

    def counted(self):
        return {int(r.load.sum()) for r in self.model.routers().values()}

    def test_counts_once_per_token_in_training_only(self):
        self.model.hidden(self.ids)
        assert self.counted() == {64 * 4}
        self.model.eval().hidden(self.ids)
        assert self.counted() == {64 * 4}

    def test_padding_is_not_counted(self):
        valid = torch.arange(64)[None] < 40
        self.model.hidden(self.ids, valid=valid)
        assert self.counted() == {40 * 4}
        margins = next(iter(self.model.routers().values())).margin_counts
        assert margins.sum(1).unique().tolist() == [40]

    def test_recomputation_is_not_counted(self):
        h = checkpoint(self.model.hidden, self.ids, use_reentrant=False)
        h.sum().backward()
        assert self.counted() == {64 * 4}

    def test_the_bias_changes_only_at_the_update(self):
        router = next(iter(self.model.routers().values()))
        self.model.hidden(self.ids)
        assert not router.e_score_correction_bias.any()
        self.model.update_balancing()
        assert router.e_score_correction_bias.any()
        assert abs(float(router.e_score_correction_bias.mean())) < 1e-6
        assert not router.margin_counts.any()
        assert "layers.1.block_sparse_moe.gate.e_score_correction_bias" in self.model.state_dict()


def test_max_logits_accumulate_until_reset_in_training_only():
    model = K3(preset("nano", initializer_range=0.1), seed=6).train()
    model.track_max_logits()
    ids = draw_ids(model, 1, 30)
    model.hidden(ids)
    both = model.max_logits(reset=False)
    assert set(both) == {3, 4}
    assert all(peak.isfinite().all() and peak.shape == (4,) for peak in both.values())
    model.hidden(draw_ids(model, 1, 30, seed=1))
    longer = model.max_logits()
    assert all((longer[i] >= both[i]).all() for i in both)
    assert any((longer[i] > both[i]).any() for i in both)
    model.eval().hidden(ids)
    assert model.max_logits()[3].isinf().all()


@torch.no_grad()
def test_probe_sees_weights_that_sum_to_one(model):
    probe = Summary(-5.0)
    model.hidden(draw_ids(model, 1, 20), probe=probe)
    assert len(probe.attn_res) == 2 * 5 - 1 + 1
    assert all(abs(sum(w) - 1) < 1e-5 for w in probe.attn_res.values())
    assert {sum(c) for c in probe.decay.values()} == {20 * model.config.kda_dim}


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (torch.tensor([[1, 99999]]), "99999"),
        (torch.tensor([[-1]]), "-1"),
        (torch.zeros(3, dtype=torch.int64), "B, T"),
        (torch.zeros(1, 3), "integers"),
    ],
)
def test_bad_ids_are_refused(model, ids, named):
    with pytest.raises(InputError, match=named):
        model(ids)


def test_a_sequence_over_the_limit_is_refused():
    model = K3(preset("nano", max_position_embeddings=16))
    with pytest.raises(InputError, match="max_position_embeddings"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(InputError, match="limit of 16"):
        model.generate(torch.zeros(1, 10, dtype=torch.int64), max_new_tokens=20, stop_ids=[])


def test_generation_stops_pads_and_repeats_with_its_seed(model):
    prompt = draw_ids(model, 3, 5)
    first = model.generate(prompt, max_new_tokens=12, seed=7, stop_ids=[])
    assert torch.equal(first, model.generate(prompt, max_new_tokens=12, seed=7, stop_ids=[]))
    stop = int(first[0, 6])
    stopped = model.generate(prompt, max_new_tokens=12, seed=7, stop_ids=[stop])
    row = stopped[0].tolist()
    assert set(row[row.index(stop, 5) + 1 :]) <= {model.config.pad_token_id}


def test_the_smallest_temperature_is_greedy(model):
    prompt = draw_ids(model, 2, 5)
    cold = model.generate(prompt, max_new_tokens=4, temperature=1e-45, stop_ids=[])
    assert torch.equal(cold, model.generate(prompt, max_new_tokens=4, temperature=0, stop_ids=[]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_model_says_so(temperature):
    ill = K3(preset("nano"), seed=0)
    torch.nn.init.constant_(ill.lm_head.weight, math.nan)
    with pytest.raises(DivergedError, match="not finite"):
        ill.generate(torch.zeros(1, 1, dtype=torch.int64), temperature=temperature)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"max_new_tokens": -1},
        {"seed": 2**63},
    ],
)
def test_bad_sampling_is_refused(model, options):
    with pytest.raises(InputError):
        model.generate(torch.zeros(1, 1, dtype=torch.int64), **options)


@pytest.mark.parametrize("training", [True, False])
def test_generate_leaves_the_mode_as_it_was_also_after_an_error(training):
    model = K3(preset("nano")).train(training)

    def stop(ids):
        assert not model.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.zeros(1, 2, dtype=torch.int64), on_token=stop)
    assert model.training is training
