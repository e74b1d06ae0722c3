"""Every tensor of the published checkpoint, from a ModelConfig alone; and the two-way name map.

The model's parameter names are the published ones below `language_model.model.` (below
`language_model.` for `lm_head`, as they are for `vision_tower` and `mm_projector`). Two things
differ: routed experts are one stacked parameter `...experts.w1` [E, out, in] where files have one
matrix per expert, and `A_log` has one entry per head where files pad it with zeros to 128.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from openk3.config import ModelConfig, VisionConfig

EXPERT_MATRICES = ("w1", "w3", "w2")  # gate, up, down
MX_BLOCK = 32
FLOAT32_ENDINGS = (
    ".A_log",
    ".dt_bias",
    "_conv1d.weight",
    ".o_norm.weight",
    ".e_score_correction_bias",
)
_TOWERS = ("vision_tower.", "mm_projector.")
_EXPERT_FILE_NAME = re.compile(
    r"(?P<layer>.+\.block_sparse_moe\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\."
    r"(?P<part>weight|weight_packed|weight_scale)"
)
_STACK_FILE_NAME = re.compile(
    r"(?P<parameter>.+\.block_sparse_moe\.experts\.w[123])\.(?P<part>weight_packed|weight_scale)"
)
_EXPERT_PARAMETER = re.compile(r".+\.block_sparse_moe\.experts\.w[123]")


class Tensor(NamedTuple):
    """A tensor as a safetensors header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """BF16, F16, F32 or U8."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}[self.dtype]


class Slot(NamedTuple):
    """Where a file's tensor belongs in the model."""

    parameter: str
    expert: int | None = None
    part: str = "weight"
    """weight, or weight_packed and weight_scale of an MXFP4 expert."""


@dataclass(frozen=True)
class Parameter:
    """One parameter or buffer of the model."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_expert(self) -> bool:
        """Whether it stacks the matrices of all routed experts of a layer."""
        return is_expert(self.name)

    @property
    def dtype(self) -> str:
        """Published dtype before any quantisation."""
        return "F32" if is_float32(self.name) else "BF16"


def is_expert(parameter: str) -> bool:
    """Whether a model parameter stacks routed experts."""
    return _EXPERT_PARAMETER.fullmatch(parameter) is not None


def is_float32(parameter: str) -> bool:
    """Whether files and models of any dtype keep this parameter in float32."""
    return parameter.endswith(FLOAT32_ENDINGS)


def to_file(parameter: str, expert: int | None = None, part: str = "weight") -> str:
    """Published name of a model parameter, or of one expert's slice of it."""
    if expert is not None:
        stem, matrix = parameter.rsplit(".", 1)
        return f"language_model.model.{stem}.{expert}.{matrix}.{part}"
    if parameter.startswith(_TOWERS):
        return parameter
    if parameter.startswith("lm_head."):
        return f"language_model.{parameter}"
    return f"language_model.model.{parameter}"


def stacked_name(parameter: str, part: str = "weight") -> str:
    """Name of a whole parameter in a file of the stacked layout: the model's own."""
    return parameter if part == "weight" else f"{parameter}.{part}"


def from_file(name: str) -> Slot:
    """The model's slot of a tensor name in a file: published, text-only without
    `language_model.`, or stacked."""
    parameter = name.removeprefix("language_model.").removeprefix("model.")
    if match := _EXPERT_FILE_NAME.fullmatch(parameter):
        return Slot(f"{match['layer']}.{match['matrix']}", int(match["expert"]), match["part"])
    if match := _STACK_FILE_NAME.fullmatch(parameter):
        return Slot(match["parameter"], None, match["part"])
    return Slot(parameter)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Names and shapes of every parameter and saved buffer of the model, in forward order."""
    d = config.hidden_size
    yield Parameter("embed_tokens.weight", (config.vocab_size, d))
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer(config, layer):
            yield Parameter(f"layers.{layer}.{name}", shape)
    yield Parameter("output_attn_res_norm.weight", (d,))
    yield Parameter("output_attn_res_proj.weight", (1, d))
    yield Parameter("norm.weight", (d,))
    yield Parameter("lm_head.weight", (config.vocab_size, d))
    if config.num_nextn_predict_layers:
        for name, shape in _mtp(config):
            yield Parameter(f"mtp.{name}", shape)
    if config.vision is not None:
        for name, shape in _vision(config.vision):
            yield Parameter(name, shape)


def published(config: ModelConfig, *, mxfp4_experts: bool = True) -> Iterator[Tensor]:
    """Every tensor of the published checkpoint of this config, stack by stack."""
    for parameter in parameters(config):
        yield from published_parts(parameter, mxfp4_experts=mxfp4_experts)


def published_parts(parameter: Parameter, *, mxfp4_experts: bool) -> Iterator[Tensor]:
    """The file tensors of one parameter; an expert stack gives one or two per expert.

    All slices of a kind follow each other, so that a file in this order holds whole stacks.
    """
    if not parameter.is_expert:
        shape = parameter.shape
        if parameter.name.endswith(".A_log"):
            shape = (padded_heads(shape[0]),)
        yield Tensor(to_file(parameter.name), shape, parameter.dtype)
        return
    num_experts, rows, columns = parameter.shape
    parts = [("weight", (rows, columns), "BF16")]
    if mxfp4_experts:
        parts = [
            ("weight_packed", (rows, columns // 2), "U8"),
            ("weight_scale", (rows, columns // MX_BLOCK), "U8"),
        ]
    for part, shape, dtype in parts:
        for expert in range(num_experts):
            yield Tensor(to_file(parameter.name, expert, part), shape, dtype)


def padded_heads(num_heads: int) -> int:
    """Length of a file's A_log: the next power of two (96 heads are stored as 128)."""
    return 1 << (num_heads - 1).bit_length()


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = config.hidden_size
    yield "self_attention_res_norm.weight", (d,)
    yield "self_attention_res_proj.weight", (1, d)
    yield "input_layernorm.weight", (d,)
    mixer = _kda(config) if config.is_kda(layer) else _mla(config)
    for name, shape in mixer:
        yield f"self_attn.{name}", shape
    yield "mlp_res_norm.weight", (d,)
    yield "mlp_res_proj.weight", (1, d)
    yield "post_attention_layernorm.weight", (d,)
    if config.is_moe(layer):
        for name, shape in _moe(config):
            yield f"block_sparse_moe.{name}", shape
    else:
        for name, shape in _mlp(d, config.intermediate_size):
            yield f"mlp.{name}", shape


def _kda(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, inner = config.hidden_size, config.kda_dim
    heads, head_dim = config.linear_attn.num_heads, config.linear_attn.head_dim
    for x in "qkv":
        yield f"{x}_proj.weight", (inner, d)
    for x in "qkv":
        yield f"{x}_conv1d.weight", (inner, 1, config.linear_attn.short_conv_kernel_size)
    yield "f_a_proj.weight", (head_dim, d)
    yield "f_b_proj.weight", (inner, head_dim)
    yield "b_proj.weight", (heads, d)
    yield "A_log", (heads,)
    yield "dt_bias", (inner,)
    yield "o_norm.weight", (head_dim,)
    yield "g_proj.weight", (inner, d)
    yield "o_proj.weight", (d, inner)


def _mla(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, heads = config.hidden_size, config.num_attention_heads
    kv_head = config.qk_nope_head_dim + config.v_head_dim
    yield "q_a_proj.weight", (config.q_lora_rank, d)
    yield "q_a_layernorm.weight", (config.q_lora_rank,)
    yield "q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (config.kv_lora_rank + config.qk_rope_head_dim, d)
    yield "kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * kv_head, config.kv_lora_rank)
    yield "g_proj.weight", (heads * config.v_head_dim, d)
    yield "o_proj.weight", (d, heads * config.v_head_dim)


def _mtp(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = config.hidden_size
    yield "hnorm.weight", (d,)
    yield "enorm.weight", (d,)
    yield "eh_proj.weight", (d, 2 * d)
    yield "input_layernorm.weight", (d,)
    for name, shape in _mla(config):
        yield f"self_attn.{name}", shape
    yield "post_attention_layernorm.weight", (d,)
    for name, shape in _mlp(d, config.mtp_intermediate_size):
        yield f"mlp.{name}", shape
    yield "norm.weight", (d,)


def _mlp(width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate_proj.weight", (inner, width)
    yield "up_proj.weight", (inner, width)
    yield "down_proj.weight", (width, inner)


def _moe(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, latent = config.hidden_size, config.routed_expert_hidden_size
    experts, inner = config.num_experts, config.moe_intermediate_size
    yield "gate.weight", (experts, d)
    yield "gate.e_score_correction_bias", (experts,)
    yield "routed_expert_down_proj.weight", (latent, d)
    yield "routed_expert_up_proj.weight", (d, latent)
    yield "routed_expert_norm.weight", (latent,)
    if config.num_shared_experts:
        for name, shape in _mlp(d, config.num_shared_experts * inner):
            yield f"shared_experts.{name}", shape
    shapes = {"w1": (inner, latent), "w3": (inner, latent), "w2": (latent, inner)}
    for matrix in EXPERT_MATRICES:
        yield f"experts.{matrix}", (experts, *shapes[matrix])


def _vision(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, patch = vision.vt_hidden_size, vision.vt_intermediate_size, vision.patch_size
    merged = vision.mm_hidden_size * prod(vision.merge_kernel_size)
    tower = "vision_tower"
    yield f"{tower}.patch_embed.proj.weight", (width, 3, patch, patch)
    rows, columns = vision.init_pos_emb_height, vision.init_pos_emb_width
    yield f"{tower}.patch_embed.pos_emb.weight", (rows, columns, width)
    for block in range(vision.vt_num_hidden_layers):
        stem = f"{tower}.encoder.blocks.{block}"
        yield f"{stem}.norm0.weight", (width,)
        yield f"{stem}.wqkv.weight", (3 * vision.qkv_hidden_size, width)
        yield f"{stem}.wo.weight", (width, vision.qkv_hidden_size)
        yield f"{stem}.norm1.weight", (width,)
        yield f"{stem}.mlp.fc0.weight", (inner, width)
        yield f"{stem}.mlp.fc1.weight", (width, inner)
    yield f"{tower}.encoder.final_layernorm.weight", (width,)
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (vision.text_hidden_size, merged)
    yield "mm_projector.post_norm.weight", (vision.text_hidden_size,)
