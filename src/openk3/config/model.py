"""The shape of a Kimi K3 model, and its published `config.json`.

Field names are the published ones. Layer lists are 1-based, as published: layer index i (0-based)
is Gated MLA iff i + 1 is in `linear_attn.full_attn_layers`, else KDA.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from openk3.config.check import number_fields, require
from openk3.config.hf import read_model, write_model


@dataclass(frozen=True, kw_only=True)
class LinearAttnConfig:
    """Kimi Delta Attention (K3 report §2.1.1) and the layout of the hybrid."""

    full_attn_layers: tuple[int, ...]
    """1-based numbers of the Gated MLA layers; every other layer is KDA."""
    num_heads: int
    """KDA heads."""
    head_dim: int
    """Key and value width of one KDA head."""
    short_conv_kernel_size: int = 4
    """Taps of the causal depthwise convolution on q, k and v."""
    gate_lower_bound: float = -5.0
    """Smallest log-decay of one step (eq. 5); 16 steps then stay inside float32's range."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2 and its projector (K3 report §2.4)."""

    patch_size: int = 14
    """Pixels along one side of a patch."""
    init_pos_emb_height: int = 64
    """Rows of the learned position table."""
    init_pos_emb_width: int = 64
    """Columns of the learned position table."""
    init_pos_emb_time: int = 4
    """Frames of the fixed time table."""
    vt_num_attention_heads: int = 12
    """Attention heads."""
    vt_num_hidden_layers: int = 27
    """Transformer blocks."""
    vt_hidden_size: int = 1024
    """Width of the tower."""
    vt_intermediate_size: int = 4096
    """Inner width of its MLP."""
    qkv_hidden_size: int = 1536
    """Heads times head width of q, k and v each."""
    merge_kernel_size: tuple[int, int] = (2, 2)
    """Patches merged into one token, (rows, columns)."""
    mm_hidden_size: int = 1024
    """Width the projector receives per patch; equals vt_hidden_size."""
    projector_ln_eps: float = 1e-5
    """Epsilon of the projector's RMSNorm."""
    text_hidden_size: int = 7168
    """Width the projector produces; equals hidden_size."""

    def __post_init__(self) -> None:
        number_fields(self, "vision_config")
        require(
            self.projector_ln_eps > 0,
            f"vision_config.projector_ln_eps ({self.projector_ln_eps}) must be positive",
        )
        require(
            self.qkv_hidden_size % self.vt_num_attention_heads == 0,
            f"vision_config.qkv_hidden_size ({self.qkv_hidden_size}) must be a multiple of "
            f"vt_num_attention_heads ({self.vt_num_attention_heads})",
        )
        require(
            self.qkv_hidden_size // self.vt_num_attention_heads % 4 == 0,
            "vision_config: the head width qkv_hidden_size / vt_num_attention_heads must be a "
            "multiple of 4 (2-D rotary pairs)",
        )
        require(
            self.mm_hidden_size == self.vt_hidden_size,
            f"vision_config.mm_hidden_size ({self.mm_hidden_size}) must equal vt_hidden_size "
            f"({self.vt_hidden_size})",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number that fixes the architecture (K3 report §2)."""

    vocab_size: int
    """Rows of the embedding and of the untied output head."""
    hidden_size: int
    """Model width d."""
    num_hidden_layers: int
    """Decoder layers, each an attention and an FFN."""
    num_attention_heads: int
    """Gated MLA heads."""
    intermediate_size: int
    """Inner width of the dense FFN in the first layers."""
    linear_attn: LinearAttnConfig
    """KDA and the hybrid's layer list."""
    q_lora_rank: int
    """MLA query latent."""
    kv_lora_rank: int
    """MLA key-value latent (what the cache holds)."""
    qk_nope_head_dim: int
    """Per-head part of an MLA key."""
    qk_rope_head_dim: int
    """Part of an MLA key shared by all heads; content like the rest, never rotated."""
    v_head_dim: int
    """MLA value width."""
    num_experts: int
    """Routed experts of an MoE layer."""
    num_experts_per_token: int
    """Routed experts a token visits."""
    num_shared_experts: int
    """Experts every token visits, fused as one MLP of full model width."""
    moe_intermediate_size: int
    """Inner width of one expert."""
    routed_expert_hidden_size: int
    """Latent width the routed experts work in (eq. 11)."""
    attn_res_block_size: int
    """Layers per AttnRes block."""
    first_k_dense_replace: int = 1
    """Leading layers with a dense FFN instead of experts."""
    routed_scaling_factor: float = 1.0
    """Factor on the normalised router weights."""
    activation_situ_beta: float = 4.0
    """SiTU cap of the gate (eq. 12)."""
    activation_situ_linear_beta: float | None = 25.0
    """SiTU cap of the up projection; None leaves it uncapped."""
    rms_norm_eps: float = 1e-5
    """Epsilon of the RMSNorms (the two MLA latent norms use 1e-6)."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    max_position_embeddings: int = 1048576
    """Longest sequence the model accepts; there are no position embeddings."""
    num_nextn_predict_layers: int = 0
    """Multi-token-prediction layers after the trunk (0 or 1)."""
    bos_token_id: int = 163584
    """Beginning of text."""
    eos_token_id: int = 163586
    """End of message; generation stops here."""
    pad_token_id: int = 163839
    """Padding."""
    media_placeholder_token_id: int = 163605
    """Token that expands to the rows of an image."""
    vision: VisionConfig | None = None
    """Vision tower, or None for a text model."""
    quantization: dict[str, Any] | None = field(default=None, hash=False)
    """The published quantization_config, kept as it was read."""

    def __post_init__(self) -> None:
        number_fields(self, "", zero_ok=_ZERO_OK)
        positive = ("rms_norm_eps", "initializer_range", "activation_situ_beta",
                    "activation_situ_linear_beta")  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} ({value}) must be positive")
        _check_layers(self)
        _check_experts(self)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self, name)
            require(
                0 <= token < self.vocab_size,
                f"{name} ({token}) must lie in [0, vocab_size = {self.vocab_size})",
            )
        if self.vision is not None:
            require(
                self.vision.text_hidden_size == self.hidden_size,
                f"vision_config.text_hidden_size ({self.vision.text_hidden_size}) must equal "
                f"hidden_size ({self.hidden_size})",
            )
            require(
                0 <= self.media_placeholder_token_id < self.vocab_size,
                f"media_placeholder_token_id ({self.media_placeholder_token_id}) must lie in "
                f"[0, vocab_size = {self.vocab_size})",
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key: the per-head part and the shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_dim(self) -> int:
        """KDA heads times head width."""
        return self.linear_attn.num_heads * self.linear_attn.head_dim

    @property
    def mtp_intermediate_size(self) -> int:
        """Inner width of the MTP layer's dense FFN: what a token activates in an MoE layer."""
        return (self.num_shared_experts + self.num_experts_per_token) * self.moe_intermediate_size

    def is_kda(self, layer: int) -> bool:
        """Whether the 0-based `layer` mixes tokens by KDA rather than by Gated MLA."""
        return layer + 1 not in self.linear_attn.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based `layer` has experts rather than a dense FFN."""
        return layer >= self.first_k_dense_replace

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, published: dict[str, Any]) -> "ModelConfig":
        """Read a published `config.json`, whole or its bare text_config.

        Raises ConfigError naming the key when one is unknown, missing, or asks for an architecture
        that is not Kimi K3's.
        """
        return cls(**read_model(published, cls, LinearAttnConfig, VisionConfig))

    def to_hf(self) -> dict[str, Any]:
        """The published `config.json`, nested as K3's own."""
        return write_model(self)


_ZERO_OK = (
    "num_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "media_placeholder_token_id",
    "qk_rope_head_dim",
)


def _check_layers(config: ModelConfig) -> None:
    linear, num_layers = config.linear_attn, config.num_hidden_layers
    number_fields(linear, "linear_attn_config")
    full = linear.full_attn_layers
    require(
        list(full) == sorted(set(full)) and all(1 <= n <= num_layers for n in full),
        f"linear_attn_config.full_attn_layers ({list(full)}) must be increasing 1-based layer "
        f"numbers within 1..num_hidden_layers = {num_layers}",
    )
    require(
        -5.0 <= linear.gate_lower_bound < 0,
        f"linear_attn_config.gate_lower_bound ({linear.gate_lower_bound}) must lie in [-5, 0): "
        "16 steps of a stronger decay leave float32's range",
    )
    require(
        config.num_nextn_predict_layers <= 1,
        f"num_nextn_predict_layers ({config.num_nextn_predict_layers}) must be 0 or 1",
    )
    require(
        config.first_k_dense_replace <= num_layers,
        f"first_k_dense_replace ({config.first_k_dense_replace}) must not exceed "
        f"num_hidden_layers ({num_layers})",
    )


def _check_experts(config: ModelConfig) -> None:
    # Quantile Balancing reads the (k+1)-th score, so at least one expert must stay unchosen.
    require(
        config.num_experts_per_token < config.num_experts,
        f"num_experts_per_token ({config.num_experts_per_token}) must be smaller than "
        f"num_experts ({config.num_experts})",
    )
