"""ModelConfig: the published file both ways, and refusals that name the field."""

import contextlib
import copy
import math

import pytest

from openk3.config import LADDER, ModelConfig, preset
from openk3.errors import ConfigError


@pytest.mark.parametrize("name", LADDER)
def test_published_layout_round_trips(name):
    config = preset(name)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_k3_layer_lists():
    linear = preset("k3").to_hf()["text_config"]["linear_attn_config"]
    assert len(linear["kda_layers"]) == 69
    assert linear["full_attn_layers"][-3:] == [88, 92, 93]
    assert not preset("k3").is_kda(92)
    assert preset("k3").is_kda(0)


def test_bare_text_config_is_read_too():
    text = preset("nano").to_hf()["text_config"]
    assert ModelConfig.from_hf(text).hidden_size == preset("nano").hidden_size


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("hidden_sise",), 7, "did you mean 'hidden_size'"),
        (("mla_use_nope",), False, "mla_use_nope"),
        (("num_key_value_heads",), 3, "num_key_value_heads"),
        (("hidden_size",), "64", "hidden_size"),
        (("num_experts_per_token",), 32, "num_experts_per_token"),
        (("pad_token_id",), 10**9, "pad_token_id"),
        (("linear_attn_config", "kda_layers"), [1, 2, 3, 3], "exactly once"),
        (("linear_attn_config", "full_attn_layers"), [4, 9], "exactly once"),
        (("linear_attn_config", "gate_lower_bound"), -7.0, "gate_lower_bound"),
        (("linear_attn_config", "use_full_rank_gate"), False, "use_full_rank_gate"),
    ],
)
def test_a_wrong_field_is_named(path, value, named):
    published = copy.deepcopy(preset("nano").to_hf())
    target = published["text_config"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(published)


def test_a_foreign_model_is_refused():
    with pytest.raises(ConfigError, match="llama"):
        ModelConfig.from_hf({"model_type": "llama", "hidden_size": 64})


def test_missing_field_is_named():
    published = preset("nano").to_hf()
    del published["text_config"]["q_lora_rank"]
    with pytest.raises(ConfigError, match="q_lora_rank"):
        ModelConfig.from_hf(published)


def test_unknown_preset_suggests():
    with pytest.raises(ConfigError, match="did you mean 'nano'"):
        preset("nanno")


WEIRD = [None, -1, 0, 10**9, 10**30, "x", [], {}, [None], [10**9], ["x"], {"a": 1}, 1.5, math.nan]


def fields_of(table, path=()):
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from fields_of(value, (*path, key))


@pytest.mark.parametrize("field", list(fields_of(preset("k3").to_hf())), ids=".".join)
def test_no_value_of_any_field_is_worse_than_refused(field):
    for value in WEIRD:
        published = copy.deepcopy(preset("k3").to_hf())
        target = published
        for key in field[:-1]:
            target = target[key]
        target[field[-1]] = value
        with contextlib.suppress(ConfigError):
            assert ModelConfig.from_hf(published).num_hidden_layers == 93
