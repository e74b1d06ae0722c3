"""Passes on a CPU as one call: the model recorded as a program of C++ kernels.

What CUDA graphs are to a GPU (`graphs`): the same operations over the same memory, without Python
between them. A decoding step reads each weight once and spends next to nothing beside.

`_Recorder` follows `openk3.model` layer by layer. Legend: N rows, d model width.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openk3.engine import batch
from openk3.engine.memory import PageMemory
from openk3.engine.plan import UNKNOWN, Chunk
from openk3.engine.types import EngineConfig
from openk3.errors import BackendError, ConfigError
from openk3.model.block import K3Layer
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention, ShortConv
from openk3.model.layers import RMSNorm, SituMLP
from openk3.model.mla import GatedMLA
from openk3.model.moe import Experts, LatentMoE, Router
from openk3.model.ports import LocalDispatcher
from openk3.ops.kda.decode import Pending
from openk3.ops.mla import multiplications
from openk3.ops.native import BACKENDS
from openk3.ops.native.program import Program, Segment, numbers

log = logging.getLogger(__name__)

MAX_ROWS = 2048
"""Tokens of a pass: room for their activations is held."""
THREAD_BYTES = 4 << 20
"""Weights a token reads that are worth a thread."""
KNOWN = {
    K3, K3Layer, RMSNorm, nn.Linear, nn.Embedding, nn.ModuleList, SituMLP, KimiDeltaAttention,
    ShortConv, GatedMLA, LatentMoE, Router, Experts,
}  # fmt: skip
"""What the recording knows to compute. Anything else, an adapter say, would be left out."""
APART = ("vision_tower", "mm_projector", "mtp")
"""Parts of a model that are not on the way from a token to its logits."""


class NativePasses:
    """Runs chunks through the model's recording. Its memory is the runner's pool and windows."""

    def __init__(
        self, model: K3, memory: PageMemory, pending: dict[int, Pending], config: EngineConfig
    ) -> None:
        self.model, self.memory, self.pending = model, memory, pending
        self.max_rows = min(MAX_ROWS, config.max_batch_tokens)
        self.max_wanted = min(self.max_rows, config.max_running * (config.num_drafts + 1))
        parts = (part for name, part in model.named_children() if name not in APART)
        modules = [module for part in parts for module in part.modules()]
        self._tables: list[tuple[Any, str]] = [
            (table, name)
            for module in modules
            for table in (module._parameters, module._buffers)
            for name, x in table.items()
            if x is not None
        ]
        self._work = _multiplications(model)
        self.threads = max(1, 4 * self._work // THREAD_BYTES)
        sizes = model.config
        self._mla = (
            sizes.num_attention_heads, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim,
            sizes.v_head_dim, sizes.kv_lora_rank,
        )  # fmt: skip
        self._record()

    def _record(self) -> None:
        self._places = self._weights()
        rows = self.max_rows, self.max_wanted
        self._recorder = _Recorder(self.model, self.memory, self.pending, *rows)

    def _weights(self) -> list[int]:
        """Where the weights are: loading new ones may move them."""
        return [table[name].data_ptr() for table, name in self._tables]

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a pass of these chunks can be run: all tokens known, no pictures' among them, and
        none so many behind so many that attention were much cheaper in its expanded form."""
        if sum(len(chunk.token_ids) for chunk in chunks) > self.max_rows:
            return False
        return not any(
            _sees(chunk) or chunk.token_ids == (UNKNOWN,) or self._expands(chunk)
            for chunk in chunks
        )

    def _expands(self, chunk: Chunk) -> bool:
        """Whether the form of attention that is recorded would more than double a chunk's work."""
        tokens = len(chunk.token_ids)
        expanded, absorbed = multiplications(tokens, chunk.start + tokens, *self._mla)
        layers = len(self.memory.mla_layers)
        return layers * absorbed > 2 * (tokens * self._work + layers * expanded)

    def run(
        self, decode: Sequence[Chunk], prefill: Sequence[Chunk], accepted: Mapping[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the tokens that choose, decoding rows first, and hidden states [N, d] of
        all, without any that fill up; both are valid until the next call."""
        if self._weights() != self._places:
            self._record()
        segments = [self._decoding(chunk, accepted) for chunk in decode]
        segments += [_segment(chunk) for chunk in prefill]
        flat = numbers(segments, self.memory.geometry.kda_groups)
        threads = min(torch.get_num_threads(), self.threads)
        self._recorder.program.run(flat, threads)
        wanted = sum(len(segment.wanted) for segment in segments)
        rows = sum(len(segment.ids) for segment in segments)
        return self._recorder.logits[:wanted], self._recorder.hidden[:rows]

    def _decoding(self, chunk: Chunk, accepted: Mapping[int, int]) -> Segment:
        if not self.pending:
            return _segment(chunk)
        replayed = accepted.get(chunk.slot, 0)
        return _segment(chunk, window=(chunk.slot, replayed, batch.advance(chunk)))


def _multiplications(model: K3) -> int:
    """Of one token with weights, in all layers: experts that it is not sent to left out."""
    share = model.config.num_experts_per_token / model.config.num_experts
    sizes = [(n, p.numel()) for n, p in model.layers.named_parameters()]
    return int(sum(size * (share if ".experts." in name else 1) for name, size in sizes))


def _sees(chunk: Chunk) -> bool:
    """Whether a chunk has tokens of a prompt with pictures, whose embeddings are not of its ids."""
    if chunk.request.media is None:
        return False
    known = chunk.start + len(chunk.token_ids) - chunk.num_drafts
    return not chunk.samples or chunk.start < known - len(chunk.output_ids)


def _segment(chunk: Chunk, window: tuple[int, int, int] = (-1, 0, 0)) -> Segment:
    count = len(chunk.token_ids)
    return Segment(
        chunk.token_ids,
        chunk.start,
        chunk.state_pages,
        chunk.latent_pages,
        [(point.position - chunk.start, point.pages) for point in batch.inside(chunk)],
        range(count - chunk.num_drafts - 1, count) if chunk.samples else range(0),
        *window,
    )


def native_passes(
    model: K3, memory: PageMemory, pending: dict[int, Pending], config: EngineConfig
) -> NativePasses | None:
    """Compiled passes where they can be had; None where not, or if `config.compiled` is False.

    Raises ConfigError if that is True and they cannot be had.
    """
    if config.compiled is False:
        return None
    problem = unfit(model)
    if config.num_drafts and config.draft == "mtp":
        problem = problem or "a draft layer reads hidden states of plain steps"
    if problem is None:
        try:
            made = NativePasses(model, memory, pending, config)
            log.info("steps of up to %d tokens run as compiled C++ code", made.max_rows)
            return made
        except BackendError as error:
            problem = str(error)
    if config.compiled:
        raise ConfigError(f"compiled = true cannot be honoured: {problem}")
    if model.lm_head.weight.device.type == "cpu":
        log.info("steps run as Python, several times slower: %s", problem)
    return None


def unfit(model: K3) -> str | None:
    """Why a model cannot be recorded, or None."""
    weight = model.lm_head.weight
    attn = model.config.linear_attn
    usable, reason = BACKENDS.backends[0].usable(
        device=weight.device, dtype=weight.dtype, taps=attn.short_conv_kernel_size
    )
    if not usable:
        return reason
    for name, part in model.named_children():
        for module in part.modules() if name not in APART else ():
            if type(module) not in KNOWN or module._forward_hooks or module._forward_pre_hooks:
                return f"{type(module).__name__} modules, or hooks on modules, are not compiled"
            if isinstance(module, LatentMoE) and (
                type(module.dispatcher) is not LocalDispatcher
                or type(module.experts) is not Experts
            ):
                return "experts that are packed or lie elsewhere are not compiled"
    kinds = {p.dtype for n, p in model.named_parameters() if n.partition(".")[0] not in APART}
    return None if kinds == {torch.float32} else f"weights of {kinds} are not compiled"


class _Recorder:
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


PENDING = ("pending_q", "pending_k", "pending_v", "pending_g", "pending_beta")
