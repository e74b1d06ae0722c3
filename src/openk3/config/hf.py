"""The two-way translation between ModelConfig's fields and the published `config.json`.

What K3 fixes is checked, never guessed: a config that asks for rotary positions, another activation
or grouped routing is refused by the name of its key.
"""

import dataclasses
import reprlib
from typing import Any

from openk3.errors import ConfigError, nearest

# Keys whose value is part of the architecture this code implements. Absent means "as published".
FIXED_TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
FIXED_LINEAR: dict[str, Any] = {"use_full_rank_gate": True}
FIXED_VISION: dict[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
# Keys that say nothing about the forward pass: library defaults that travel in published files.
INERT = frozenset(
    """
    _name_or_path _attn_implementation add_cross_attention architectures auto_map bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype torch_dtype early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label label2id ignore_index image_placeholder is_decoder is_encoder_decoder length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16 use_cache transformers_version
    """.split()
)
# Fields of ModelConfig that live elsewhere than text_config under their own name.
NOT_TEXT = frozenset({"linear_attn", "vision", "quantization", "media_placeholder_token_id"})
TOP_LEVEL = frozenset({"text_config", "vision_config", "quantization_config", "model_type"})
TOP_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


def read_model(
    published: dict[str, Any], model: Any, linear_type: Any, vision_type: Any
) -> dict[str, Any]:
    """Keyword arguments of `model` (ModelConfig) from a published config; ConfigError by key."""
    top, text = (published, published.get("text_config"))
    if text is None:
        top, text = {}, published
    text = dict(_object(text, "text_config"))
    model_type = (top or text).get("model_type", "kimi_k3")
    if model_type not in ("kimi_k3", "kimi_linear") or "linear_attn_config" not in text:
        raise ConfigError(
            f"model_type {model_type!r} without a linear_attn_config is not a Kimi K3 model; this "
            "project reads model_type 'kimi_k3' only"
        )
    if top:
        known = INERT | TOP_LEVEL | set(TOP_TOKENS) | {"media_placeholder_token_id"}
        _refuse_unknown(top, known, "config.json")
    names = {f.name for f in dataclasses.fields(model)} - NOT_TEXT
    extra = {"num_key_value_heads", "linear_attn_config", "quantization_config"}
    _check_fixed(text, FIXED_TEXT, "text_config")
    _refuse_unknown(text, INERT | names | extra | set(FIXED_TEXT), "text_config")
    heads = text.get("num_attention_heads")
    if text.get("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"text_config.num_key_value_heads ({text['num_key_value_heads']}) must equal "
            f"num_attention_heads ({heads})"
        )
    fields: dict[str, Any] = {name: text[name] for name in names if name in text}
    linear = _object(text["linear_attn_config"], "text_config.linear_attn_config")
    fields["linear_attn"] = _read_linear(linear, text.get("num_hidden_layers"), linear_type)
    quantization = text.get("quantization_config") or top.get("quantization_config")
    if quantization is not None:
        fields["quantization"] = _object(quantization, "quantization_config")
    if "media_placeholder_token_id" in top:
        fields["media_placeholder_token_id"] = top["media_placeholder_token_id"]
    if top.get("vision_config"):
        vision = _object(top["vision_config"], "vision_config")
        fields["vision"] = _read_vision(vision, vision_type)
    _require_all(model, fields, "text_config")
    return fields


def write_model(config: Any) -> dict[str, Any]:
    """The published `config.json` of a ModelConfig, nested like K3's own."""
    text = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in NOT_TEXT
    }
    text |= FIXED_TEXT
    text["architectures"] = ["KimiLinearForCausalLM"]
    text["dtype"] = "bfloat16"
    text["num_key_value_heads"] = config.num_attention_heads
    linear = dataclasses.asdict(config.linear_attn) | FIXED_LINEAR
    full = list(config.linear_attn.full_attn_layers)
    linear["full_attn_layers"] = full
    linear["kda_layers"] = [n for n in range(1, config.num_hidden_layers + 1) if n not in full]
    text["linear_attn_config"] = linear
    if config.quantization is not None:
        text["quantization_config"] = config.quantization
    published: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": config.media_placeholder_token_id,
        "text_config": text,
    }
    published |= {name: text[name] for name in TOP_TOKENS}
    if config.vision is not None:
        vision = dataclasses.asdict(config.vision) | FIXED_VISION
        vision["merge_kernel_size"] = list(config.vision.merge_kernel_size)
        published["vision_config"] = vision
    return published


def _read_linear(raw: dict[str, Any], num_layers: Any, linear_type: Any) -> Any:
    where = "text_config.linear_attn_config"
    _check_fixed(raw, FIXED_LINEAR, where)
    names = {f.name for f in dataclasses.fields(linear_type)}
    _refuse_unknown(raw, names | {"kda_layers"} | set(FIXED_LINEAR), where)
    fields = {name: raw[name] for name in names if name in raw}
    _require_all(linear_type, fields, where)
    fields["full_attn_layers"] = _integers(raw["full_attn_layers"], f"{where}.full_attn_layers")
    if "kda_layers" in raw and isinstance(num_layers, int):
        kda = _integers(raw["kda_layers"], f"{where}.kda_layers")
        listed = sorted([*kda, *fields["full_attn_layers"]])
        if len(listed) != num_layers or listed != list(range(1, num_layers + 1)):
            raise ConfigError(
                f"{where}: kda_layers and full_attn_layers must cover 1..num_hidden_layers "
                f"({num_layers}) exactly once; together they list {reprlib.repr(listed)}"
            )
    return linear_type(**fields)


def _read_vision(raw: dict[str, Any], vision_type: Any) -> Any:
    _check_fixed(raw, FIXED_VISION, "vision_config")
    names = {f.name for f in dataclasses.fields(vision_type)}
    _refuse_unknown(raw, INERT | names | {"model_type"} | set(FIXED_VISION), "vision_config")
    fields = {name: raw[name] for name in names if name in raw}
    if "merge_kernel_size" in fields:
        where = "vision_config.merge_kernel_size"
        fields["merge_kernel_size"] = _integers(fields["merge_kernel_size"], where)
    return vision_type(**fields)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, not {reprlib.repr(value)}")
    return value


def _integers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise ConfigError(f"{where} must be a list of integers, not {reprlib.repr(value)}")
    return tuple(value)


def _check_fixed(raw: dict[str, Any], fixed: dict[str, Any], where: str) -> None:
    for key, value in fixed.items():
        if key in raw and raw[key] != value:
            raise ConfigError(f"{where}.{key} is {reprlib.repr(raw[key])}; Kimi K3 has {value!r}")


def _refuse_unknown(raw: dict[str, Any], known: frozenset[str] | set[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, set(known))}")


def _require_all(kind: Any, fields: dict[str, Any], where: str) -> None:
    for item in dataclasses.fields(kind):
        no_default = (
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        )
        if no_default and item.name not in fields:
            raise ConfigError(f"{where}.{item.name} is missing")
