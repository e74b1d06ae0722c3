"""A model recorded as a program of C++ kernels over the engine's pages.

Follows `openk3.model` layer by layer: what its modules compute, with their weights where they lie.

Legend: N rows (tokens of all chunks), d model width.
"""

import torch
from torch import Tensor

from openk3.engine.page_memory import PageMemory
from openk3.model.block import K3Layer
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention
from openk3.model.layers import RMSNorm, SituMLP
from openk3.model.mla import GatedMLA
from openk3.model.moe import Experts, LatentMoE
from openk3.ops.kda.decode import Pending
from openk3.ops.native.program import Program

PENDING = ("pending_q", "pending_k", "pending_v", "pending_g", "pending_beta")


class Recorder:
    """Records a model over a pool: passes of `max_rows` tokens, `max_wanted` of which choose."""

    def __init__(
        self,
        model: K3,
        memory: PageMemory,
        pending: dict[int, Pending],
        max_rows: int,
        max_wanted: int,
    ) -> None:
        self.model, self.memory, self.pending, self.max_rows = model, memory, pending, max_rows
        self.program = Program()
        self.logits = torch.empty(max_wanted, model.config.vocab_size)
        self.hidden = self._room(model.config.hidden_size)
        self._rooms: dict[tuple[str, int], Tensor] = {}
        self._trunk()

    def _room(self, width: int, rows: int = 1) -> Tensor:
        return torch.empty(self.max_rows * rows, width)

    def _shared(self, name: str, width: int, rows: int = 1) -> Tensor:
        """Room that every layer uses again."""
        key = name, width * rows
        if key not in self._rooms:
            self._rooms[key] = self._room(width, rows)
        return self._rooms[key]

    def _trunk(self) -> None:
        model, program = self.model, self.program
        dim = model.config.hidden_size
        running, bank, h = self._room(dim), [], self.hidden
        program.embed(model.embed_tokens.weight, running)
        for layer in model.layers:
            assert isinstance(layer, K3Layer)
            bank, running = self._layer(layer, bank, running, h)
        program.phase()
        norm, proj = model.output_attn_res_norm, model.output_attn_res_proj
        self._mix_norm([*bank, running], norm, proj.weight, model.norm, h)
        program.phase()
        program.linear(h, model.lm_head.weight, self.logits, wanted=True)

    def _mix_norm(
        self, sources: list[Tensor], norm: RMSNorm, query: Tensor, out_norm: RMSNorm, out: Tensor
    ) -> None:
        self.program.mix_norm(
            sources, query, norm.weight, norm.eps, out_norm.weight, out_norm.eps, out
        )

    def _layer(
        self, layer: K3Layer, bank: list[Tensor], running: Tensor, h: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """As `K3Layer.forward`; h [N, d] is room for what a sublayer reads."""
        program = self.program
        program.phase()
        sources = [*bank, running] if bank else [running]
        norm, proj = layer.self_attention_res_norm, layer.self_attention_res_proj
        self._mix_norm(sources, norm, proj.weight, layer.input_layernorm, h)
        if layer.starts_block:
            bank, running = [*bank, running], self._room(h.shape[1])
        mixer = layer.self_attn
        o = self._kda(mixer, h) if isinstance(mixer, KimiDeltaAttention) else self._mla(mixer, h)
        program.phase()
        program.linear(o, mixer.o_proj.weight, running, add=not layer.starts_block)
        program.phase()
        norm, proj = layer.mlp_res_norm, layer.mlp_res_proj
        self._mix_norm([*bank, running], norm, proj.weight, layer.post_attention_layernorm, h)
        program.phase()
        if hasattr(layer, "mlp"):
            self._mlp(layer.mlp, h, running)
        else:
            self._moe(layer.block_sparse_moe, h, running)
        return bank, running

    def _linear(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        out = self._shared(name, weight.shape[0])
        self.program.linear(x, weight, out)
        return out

    def _kda(self, mixer: KimiDeltaAttention, h: Tensor) -> Tensor:
        program, memory = self.program, self.memory
        program.phase()
        names = ("q", "k", "v", "f_a", "b", "g")
        x = {n: self._linear(n, h, getattr(mixer, f"{n}_proj").weight) for n in names}
        program.phase()
        decay = self._linear("f_b", x["f_a"], mixer.f_b_proj.weight)
        program.phase()
        weights = mixer.weights()
        out = self._shared("o", mixer.heads * mixer.width)
        index = memory.kda_layers.index(mixer.layer) % memory.geometry.layers_per_group
        window = self.pending.get(mixer.layer)
        pending = {} if window is None else dict(zip(PENDING, window, strict=True))
        program.kda(
            q=x["q"], k=x["k"], v=x["v"], g=decay, beta=x["b"], gate=x["g"],
            taps=weights.conv, A_log=weights.A_log, dt_bias=weights.dt_bias, norm=weights.norm,
            out=out, pool=memory.pool[index].data_ptr(), **pending,
            page_bytes=memory.geometry.page_bytes, conv_offset=memory.S_bytes,
            group=memory.group_of(mixer.layer), heads=mixer.heads, width=mixer.width,
            capacity=0 if window is None else window.q.shape[1],
            lower_bound=weights.lower_bound, scale=mixer.width**-0.5, eps=weights.eps,
        )  # fmt: skip
        return out

    def _mla(self, mixer: GatedMLA, h: Tensor) -> Tensor:
        program, memory = self.program, self.memory
        program.phase()
        q_a = self._linear("q_a", h, mixer.q_a_proj.weight)
        kv_a = self._linear("kv_a", h, mixer.kv_a_proj_with_mqa.weight)
        gate = self._linear("g", h, mixer.g_proj.weight)
        program.phase()
        norm = mixer.q_a_layernorm
        program.norm(q_a, norm.weight, norm.eps, q_a)
        program.phase()
        q = self._linear("q_b", q_a, mixer.q_b_proj.weight)
        value = gate.shape[1] // mixer.heads
        out = self._shared("o", gate.shape[1])
        index = memory.mla_layers.index(mixer.layer)
        program.mla(
            q=q, kv_a=kv_a, gate=gate, norm=mixer.kv_a_layernorm.weight,
            kv_b=mixer.kv_b_proj.weight, out=out, pool=memory.pool[index].data_ptr(),
            page_bytes=memory.geometry.page_bytes, page_tokens=memory.geometry.page_tokens,
            heads=mixer.heads, nope=mixer.key_width - mixer.rope, rope=mixer.rope, value=value,
            latent=mixer.latent, eps=mixer.kv_a_layernorm.eps, scale=mixer.key_width**-0.5,
        )  # fmt: skip
        return out

    def _mlp(self, mlp: SituMLP, h: Tensor, running: Tensor) -> None:
        gate = self._linear("gate", h, mlp.gate_proj.weight)
        up = self._linear("up", h, mlp.up_proj.weight)
        self.program.phase()
        self.program.situ(gate, up, gate, *mlp.betas)
        self.program.phase()
        self.program.linear(gate, mlp.down_proj.weight, running, add=True)

    def _moe(self, moe: LatentMoE, h: Tensor, running: Tensor) -> None:
        program, experts, router = self.program, moe.experts, moe.gate
        assert isinstance(experts, Experts)
        num, inner, width = experts.w1.shape
        scores = self._linear("scores", h, router.weight)
        latent = self._linear("latent", h, moe.routed_expert_down_proj.weight)
        if moe.shared_experts is not None:
            self._mlp(moe.shared_experts, h, running)
        program.phase()
        mixed = self._shared("mixed", width)
        top_k, (beta1, beta2) = router.top_k, experts.betas
        program.experts(
            scores=scores, bias=router.e_score_correction_bias, latent=latent,
            w1=experts.w1, w3=experts.w3, w2=experts.w2,
            norm=moe.routed_expert_norm.weight, gate=self._shared("inner", inner, top_k),
            up=self._shared("inner_up", inner, top_k), mixed=self._shared("each", width, top_k),
            out=mixed, experts=num, top_k=top_k, width=width, inner=inner,
            scaling=router.scaling, beta1=beta1, beta2=beta2 or 0.0,
            eps=moe.routed_expert_norm.eps,
        )  # fmt: skip
        program.phase()
        program.linear(mixed, moe.routed_expert_up_proj.weight, running, add=True)
