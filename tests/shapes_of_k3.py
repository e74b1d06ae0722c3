"""Published parameter names and shapes of a text model, written out from the format's table."""

from openk3.config.model import ModelConfig


def published_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, h = c.hidden_size, c.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, d)}
    for i in range(c.num_hidden_layers):
        for part in ("self_attention", "mlp"):
            shapes[f"layers.{i}.{part}_res_norm.weight"] = (d,)
            shapes[f"layers.{i}.{part}_res_proj.weight"] = (1, d)
        shapes[f"layers.{i}.input_layernorm.weight"] = (d,)
        shapes[f"layers.{i}.post_attention_layernorm.weight"] = (d,)
        mixer = _kda(c) if c.is_kda(i) else _mla(c, h)
        shapes |= {f"layers.{i}.self_attn.{k}": v for k, v in mixer.items()}
        ffn = _moe(c) if c.is_moe(i) else _mlp("mlp", d, c.intermediate_size)
        shapes |= {f"layers.{i}.{k}": v for k, v in ffn.items()}
    return shapes | {
        "norm.weight": (d,),
        "output_attn_res_norm.weight": (d,),
        "output_attn_res_proj.weight": (1, d),
        "lm_head.weight": (c.vocab_size, d),
    }


def _kda(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, w, head = c.hidden_size, c.kda_dim, c.linear_attn.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{p}_proj.weight": (w, d) for p in "qkvg"}
    shapes |= {f"{p}_conv1d.weight": (w, 1, 4) for p in "qkv"}
    return shapes | {
        "o_proj.weight": (d, w),
        "f_a_proj.weight": (head, d),
        "f_b_proj.weight": (w, head),
        "b_proj.weight": (c.linear_attn.num_heads, d),
        "A_log": (c.linear_attn.num_heads,),
        "dt_bias": (w,),
        "o_norm.weight": (head,),
    }


def _mla(c: ModelConfig, h: int) -> dict[str, tuple[int, ...]]:
    return {
        "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (h * c.qk_head_dim, c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (h * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "g_proj.weight": (h * c.v_head_dim, c.hidden_size),
        "o_proj.weight": (c.hidden_size, h * c.v_head_dim),
    }


def _mlp(name: str, d: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, d),
        f"{name}.up_proj.weight": (inner, d),
        f"{name}.down_proj.weight": (d, inner),
    }


def _moe(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    e, m, z, d = (
        c.num_experts,
        c.moe_intermediate_size,
        c.routed_expert_hidden_size,
        c.hidden_size,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (e, d),
        "routed_expert_down_proj.weight": (z, d),
        "routed_expert_up_proj.weight": (d, z),
        "routed_expert_norm.weight": (z,),
        "experts.w1": (e, m, z),
        "experts.w3": (e, m, z),
        "experts.w2": (e, z, m),
    }
    shapes |= _mlp("shared_experts", d, c.num_shared_experts * m)
    return {f"block_sparse_moe.{k}": v for k, v in shapes.items()}
