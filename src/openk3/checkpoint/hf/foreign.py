"""Recognises checkpoints of other models and other quantisations, so that refusals name them."""

from collections.abc import Iterable
from typing import Any

_MODEL_TYPES = {
    "kimi_k2": "Kimi K2",
    "kimi_k25": "Kimi K2.5",
    "kimi_vl": "Kimi-VL",
    "deepseek_v3": "DeepSeek V3 or Kimi K2",
}
_TENSOR_ENDINGS = {
    ".weight_scale_inv": "block-scaled fp8",
    ".qzeros": "GPTQ or AWQ",
    ".qweight": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    "gate_up_proj_blocks": "gpt-oss MXFP4",
    ".lora_A.weight": "LoRA adapter",
}


def foreign_config(raw: dict[str, Any]) -> str | None:
    """What a `config.json` describes if it is not Kimi K3 in MXFP4, BF16 or F32; else None."""
    nested = raw.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else raw
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return f"the model is {_MODEL_TYPES[model_type]} (model_type {model_type!r})"
    if model_type == "kimi_linear" and "attn_res_block_size" not in text:
        return "the model is Kimi Linear (model_type 'kimi_linear' without AttnRes)"
    quantization = text.get("quantization_config") or raw.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors":
        return f"the weights are quantised as {method!r}"
    if layout != "mxfp4-pack-quantized":
        return f"the weights are quantised as compressed-tensors {layout!r}"
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits", 4) if isinstance(weights, dict) else 4
        if bits != 4:
            return f"quantization_config.config_groups.{name}.weights.num_bits is {bits!r}, not 4"
    return None


def foreign_tensors(names: Iterable[str], dtypes: dict[str, str]) -> str | None:
    """What tensor names or dtypes give away about a foreign quantisation; else None."""
    for name in names:
        for ending, layout in _TENSOR_ENDINGS.items():
            if name.endswith(ending):
                return f"tensor {name!r} belongs to the {layout} layout"
        if dtypes[name].startswith("F8_"):
            return f"tensor {name!r} is fp8 ({dtypes[name]})"
    return None
