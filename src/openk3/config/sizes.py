"""What a configuration costs: parameters, FLOPs and memory, by arithmetic alone.

FLOPs are those of matrix products, two per multiply-add, in the recurrent form of KDA and the
expanded form of MLA; norms, gates and activations are left out.
"""

from dataclasses import dataclass

from openk3.config.model import ModelConfig, VisionConfig

COUNTING_RULE = """\
total: every parameter of the published files, vision included; A_log as stored, padded with zeros
to a power of two. activated: what a text token passes through, so all text parameters with only the
chosen routed experts and with the output head, without the input embedding, the vision tower and
its projector."""
BITS_MXFP4 = 4 + 8 / 32
"""Bits of one MXFP4 weight: four, and a byte of scale for each 32."""


@dataclass(frozen=True)
class Part:
    """One kind of module, all its instances together."""

    name: str
    params: int
    """Parameters."""
    activated: int
    """Of them, those a text token passes through."""
    macs: int
    """Multiply-adds per text token, whatever the context."""
    note: str = ""
    """How many instances, of what."""


def parts(config: ModelConfig) -> list[Part]:
    """The whole model in the order a token meets it."""
    d, vocab = config.hidden_size, config.vocab_size
    num_kda, num_mla, num_moe, num_dense = layer_counts(config)
    found = [
        Part("input embedding", vocab * d, 0, 0, f"{vocab} x {d}"),
        _kda(config, num_kda),
        _mla(config, num_mla),
        _mixes(config),
        *_dense(config, num_dense),
        *(_moe(config, num_moe) if num_moe else []),
        Part("final norm", d, d, 0),
        Part("output head", vocab * d, vocab * d, vocab * d, "untied"),
    ]
    if config.num_nextn_predict_layers:
        found.append(_mtp(config))
    return found + (_vision(config.vision) if config.vision is not None else [])


def layer_counts(config: ModelConfig) -> tuple[int, int, int, int]:
    """Layers with KDA, with Gated MLA, with experts, with a dense FFN."""
    layers = range(config.num_hidden_layers)
    num_kda, num_moe = sum(map(config.is_kda, layers)), sum(map(config.is_moe, layers))
    return num_kda, len(layers) - num_kda, num_moe, len(layers) - num_moe


def _kda(c: ModelConfig, count: int) -> Part:
    d, dim, linear = c.hidden_size, c.kda_dim, c.linear_attn
    heads, head_dim, taps = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size
    wide = 5 * d * dim + d * head_dim + head_dim * dim + d * heads  # q k v g o, decay, beta
    conv = 3 * dim * taps
    small = stored_a_log(heads) + dim + head_dim  # A_log, dt_bias, o_norm
    # A step of the recurrence decays the state (half a multiply-add), reads it twice, writes once.
    recurrence = 7 * heads * head_dim * head_dim // 2
    params = count * (wide + conv + small)
    note = f"{count} layers, {heads} heads of {head_dim}"
    return Part("KDA", params, params, count * (wide + conv + recurrence), note)


def stored_a_log(num_heads: int) -> int:
    """Length of A_log in a published file: 96 heads are stored as 128, zeros behind."""
    return 1 << (num_heads - 1).bit_length()


def _mla(c: ModelConfig, count: int) -> Part:
    d, heads, out = c.hidden_size, c.num_attention_heads, c.num_attention_heads * c.v_head_dim
    wide = d * c.q_lora_rank + c.q_lora_rank * heads * c.qk_head_dim
    wide += d * (c.kv_lora_rank + c.qk_rope_head_dim)
    wide += c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    wide += 2 * d * out  # output gate and o_proj
    params = count * (wide + c.q_lora_rank + c.kv_lora_rank)
    return Part("Gated MLA", params, params, count * wide, f"{count} layers, {heads} heads")


def _mixes(c: ModelConfig) -> Part:
    d, sites = c.hidden_size, 2 * c.num_hidden_layers + 1
    # Each site has a query and a key norm, each sublayer a norm of its input.
    params = d * (2 * sites + 2 * c.num_hidden_layers)
    macs = 2 * d * sum(sources_of_mixes(c))
    return Part("AttnRes and norms", params, params, macs, f"{sites} mixes")


def sources_of_mixes(config: ModelConfig) -> list[int]:
    """How many sources each AttnRes mix reads, in order; the first site of layer 0 reads none."""
    counts, bank = [], 0
    for layer in range(config.num_hidden_layers):
        counts.append(bank + 1 if bank else 0)
        bank += layer % config.attn_res_block_size == 0
        counts.append(bank + 1)
    return [*counts, bank + 1]


def _dense(c: ModelConfig, count: int) -> list[Part]:
    params = count * 3 * c.hidden_size * c.intermediate_size
    note = f"{count} layers of {c.intermediate_size}"
    return [Part("dense FFN", params, params, params, note)] if count else []


def _mtp(c: ModelConfig) -> Part:
    """The extra layer guesses a second token; one token at a time does not pass through it."""
    d = c.hidden_size
    params = _mla(c, 1).params + 3 * d * c.mtp_intermediate_size + 2 * d * d + 5 * d
    return Part("MTP layer", params, 0, 0, "1 layer")


def _moe(c: ModelConfig, count: int) -> list[Part]:
    d, latent, inner = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size
    router = count * c.num_experts * d
    bridge = count * 2 * d * latent
    shared = count * 3 * d * c.num_shared_experts * inner
    one = count * 3 * latent * inner
    chosen, k = c.num_experts_per_token * one, c.num_experts_per_token
    with_bias, with_norm = router + count * c.num_experts, bridge + count * latent
    return [
        Part("router", with_bias, with_bias, router, f"{count} layers"),
        Part("latent in and out", with_norm, with_norm, bridge, f"{d} <-> {latent}"),
        Part("shared experts", shared, shared, shared, f"{c.num_shared_experts} of {inner}"),
        Part("routed experts", c.num_experts * one, chosen, chosen, f"{k} of {c.num_experts}"),
    ]


def _vision(v: VisionConfig) -> list[Part]:
    dim, merged = (
        v.vt_hidden_size,
        v.vt_hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1],
    )
    block = 4 * dim * v.qkv_hidden_size + 2 * dim * v.vt_intermediate_size + 2 * dim
    table = v.init_pos_emb_height * v.init_pos_emb_width * dim
    tower = dim * 3 * v.patch_size**2 + table + v.vt_num_hidden_layers * block + dim
    projector = merged * merged + merged * v.text_hidden_size + v.text_hidden_size
    return [
        Part("vision tower", tower, 0, 0, f"{v.vt_num_hidden_layers} blocks of {dim}"),
        Part("vision projector", projector, 0, 0, f"{merged} -> {v.text_hidden_size}"),
    ]


def total_params(config: ModelConfig, *, vision: bool = True) -> int:
    """Every parameter, or only those of the text model."""
    return sum(p.params for p in parts(config) if vision or not p.name.startswith("vision"))


def activated_params(config: ModelConfig) -> int:
    """Parameters a text token passes through, by the rule at the top of this module."""
    return sum(p.activated for p in parts(config))


def flops_per_token(config: ModelConfig, context: float = 0) -> float:
    """Forward FLOPs of one token that attends to `context` tokens, itself included."""
    return 2 * sum(p.macs for p in parts(config)) + context * flops_per_token_of_context(config)


def flops_per_token_of_context(config: ModelConfig) -> int:
    """Forward FLOPs that each attended token adds: scores and values of the MLA layers."""
    _, num_mla, _, _ = layer_counts(config)
    return 2 * num_mla * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)


def training_flops_per_token(config: ModelConfig, sequence_tokens: int) -> float:
    """Forward and backward FLOPs of a token, averaged over a sequence: three times the forward.

    Recomputation is not counted, so that a fraction of peak made from it is a model's (MFU).
    """
    return 3 * flops_per_token(config, (sequence_tokens + 1) / 2)


@dataclass(frozen=True)
class Memory:
    """Bytes a sequence keeps between tokens."""

    kda_state: int
    """Recurrent states, float32, once per sequence."""
    conv_state: int
    """Last inputs of the short convolutions, once per sequence."""
    mla_per_token: int
    """Latent cache, for each token of context."""

    def at(self, tokens: int) -> int:
        """All of it for one sequence of that many tokens."""
        return self.kda_state + self.conv_state + tokens * self.mla_per_token


def sequence_memory(config: ModelConfig, dtype_bytes: int = 2) -> Memory:
    """What one sequence keeps, with `dtype_bytes` per element of the cache (bfloat16: 2)."""
    linear = config.linear_attn
    num_kda, num_mla, _, _ = layer_counts(config)
    taps = linear.short_conv_kernel_size - 1
    return Memory(
        kda_state=num_kda * linear.num_heads * linear.head_dim**2 * 4,
        conv_state=num_kda * 3 * config.kda_dim * taps * dtype_bytes,
        mla_per_token=num_mla * (config.kv_lora_rank + config.qk_rope_head_dim) * dtype_bytes,
    )


def weight_bytes(config: ModelConfig, *, mxfp4_experts: bool) -> int:
    """Bytes of the weights in bfloat16, the few float32 ones as such; experts in MXFP4 if asked."""
    num_kda, _, num_moe, _ = layer_counts(config)
    linear = config.linear_attn
    per_kda = config.kda_dim * (3 * linear.short_conv_kernel_size + 1)
    per_kda += stored_a_log(linear.num_heads) + linear.head_dim
    float32 = num_kda * per_kda + num_moe * config.num_experts
    experts = sum(p.params for p in parts(config) if p.name == "routed experts")
    size = 2 * total_params(config) + 2 * float32
    return size - int(experts * (16 - BITS_MXFP4) / 8) if mxfp4_experts else size
