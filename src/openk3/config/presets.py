"""The model ladder: one dial, the rung, from a laptop's `nano` to the published `k3`.

A rung fixes width, depth, heads and experts; everything else keeps K3's proportions: a latent of
half the width, experts of 3/7 of it, a dense first layer of 11 experts, 3 KDA layers to 1 Gated MLA
layer, and MLA last.
"""

from dataclasses import dataclass

from openk3.config.model import LinearAttnConfig, ModelConfig, VisionConfig
from openk3.errors import ConfigError, nearest


@dataclass(frozen=True)
class Rung:
    """What the dial turns."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    experts: int
    top_k: int
    block: int
    """Layers per AttnRes block; K3 has 8 blocks."""
    vocab: int


LADDER: dict[str, Rung] = {
    "nano": Rung(128, 5, 4, 32, 16, 4, 2, 1536),
    "micro": Rung(512, 9, 8, 64, 64, 4, 2, 8192),
    "mini": Rung(1024, 17, 14, 128, 128, 8, 3, 32768),
    "small": Rung(1792, 25, 24, 128, 224, 8, 4, 65536),
    "base": Rung(3584, 49, 48, 128, 448, 16, 7, 163840),
    "k3": Rung(7168, 93, 96, 128, 896, 16, 12, 163840),
}
PUBLISHED_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
                "zp_dtype": None,
                "observer": "minmax",
                "observer_kwargs": {},
                "actorder": None,
                "block_structure": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def preset(name: str, **changes: object) -> ModelConfig:
    """A rung of the ladder, with some ModelConfig fields changed. Raises ConfigError."""
    if name not in LADDER:
        raise ConfigError(
            f"no preset {name!r}{nearest(name, set(LADDER))}; there are {', '.join(LADDER)}"
        )
    config = _published() if name == "k3" else scaled(LADDER[name])
    return config.replace(**changes) if changes else config


def scaled(rung: Rung) -> ModelConfig:
    """A model of K3's proportions at the size of `rung`, text only."""
    inner = _multiple(rung.hidden * 3 / 7, 32)
    specials = rung.vocab - 256  # K3 keeps the last 256 ids for special tokens
    return ModelConfig(
        vocab_size=rung.vocab,
        hidden_size=rung.hidden,
        num_hidden_layers=rung.layers,
        num_attention_heads=rung.heads,
        intermediate_size=11 * inner,
        linear_attn=LinearAttnConfig(
            full_attn_layers=hybrid_layers(rung.layers),
            num_heads=rung.heads,
            head_dim=rung.head_dim,
        ),
        q_lora_rank=_multiple(rung.hidden * 3 / 14, 16),
        kv_lora_rank=max(2 * rung.head_dim, _multiple(rung.hidden / 14, 16)),
        qk_nope_head_dim=rung.head_dim,
        qk_rope_head_dim=rung.head_dim // 2,
        v_head_dim=rung.head_dim,
        num_experts=rung.experts,
        num_experts_per_token=rung.top_k,
        num_shared_experts=2,
        moe_intermediate_size=inner,
        routed_expert_hidden_size=rung.hidden // 2,
        attn_res_block_size=rung.block,
        max_position_embeddings=1048576,
        bos_token_id=specials,
        eos_token_id=specials + 2,
        pad_token_id=rung.vocab - 1,
        media_placeholder_token_id=specials + 21,
    )


def hybrid_layers(num_layers: int) -> tuple[int, ...]:
    """1-based MLA layers: every fourth, and always the last (K3 report §2.1.2)."""
    return tuple(sorted({*range(4, num_layers + 1, 4), num_layers}))


def _published() -> ModelConfig:
    return ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=93,
        num_attention_heads=96,
        intermediate_size=33792,
        linear_attn=LinearAttnConfig(
            full_attn_layers=hybrid_layers(93), num_heads=96, head_dim=128
        ),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        attn_res_block_size=12,
        vision=VisionConfig(),
        quantization=PUBLISHED_QUANTIZATION,
    )


def _multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)
