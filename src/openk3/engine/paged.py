"""The model's sequence operations over paged memory: rows that decode, then prompts' chunks.

Everything runs as one packed row [1, N, ...]: first B decoding rows of T tokens each (a new token
and its drafts, filled up to T), then the tokens of the prefill chunks.

Legend: B decoding rows, T tokens each, C prefill chunks, N tokens in all, H heads, W taps.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openk3.engine.page_memory import PageMemory
from openk3.model.ports import KdaInputs, KdaWeights, MixerState
from openk3.ops.conv import short_conv
from openk3.ops.kda import kda
from openk3.ops.kda.decode import Pending, kda_decode
from openk3.ops.mla.chunks import Held, attend_chunks
from openk3.ops.mla.paged import attend_paged
from openk3.ops.norm import gated_head_norm


@dataclass
class DecodeRows:
    """Rows that continue by T tokens. All tensors keep their shape, for CUDA graphs."""

    tokens: int
    """T"""
    table: Tensor
    """[B, pages] int32, latent pages"""
    starts: Tensor
    """[B] int64, position of a row's first token"""
    lengths: Tensor
    """[B] int64, positions held afterwards; 0 marks padding"""
    states: Tensor
    """[KDA groups, B] int32, live state pages; -1 marks padding"""
    windows: Tensor | None = None
    """[B] int32, rows of the pending windows, when drafts are verified"""
    accepted: Tensor | None = None
    """[B] int32, tokens of the pending window to replay first"""
    advance: Tensor | None = None
    """[B] int32, tokens of the new window to move the states on by at once"""

    @property
    def num_tokens(self) -> int:
        return self.tokens * len(self.starts)


@dataclass
class PrefillRows:
    """The chunks, and the states wanted inside of them."""

    first: int
    """their first token in the packed row"""
    held: Held
    """all positions of the chunks' sequences"""
    states: Tensor
    """[KDA groups, C] int64, live state pages"""
    inner_flat: Tensor | None = None
    """[P] their last tokens, relative to the first prefill token"""
    inner_pages: Tensor | None = None
    """[KDA groups, P] int64, where they go"""
    inner_tails: Tensor | None = None
    """[P, W] int64, their last W inputs: rows of the chunks' old tails [C * W] and the tokens
    behind them"""

    @property
    def cu_seqlens(self) -> Tensor:
        """[C + 1] int32, relative to the first prefill token."""
        return self.held.cu_queries


@dataclass
class PagedSequence:
    """A SequenceContext over the pool. `page` and `offset` [N] say where each latent goes."""

    memory: PageMemory
    page: Tensor
    offset: Tensor
    decode: DecodeRows | None = None
    prefill: PrefillRows | None = None
    pending: dict[int, Pending] = field(default_factory=dict)
    """By KDA layer; empty when nothing is drafted."""
    first: int = 0
    """The first position that decoding rows see."""

    def kda(self, x: KdaInputs, weights: KdaWeights, state: MixerState | None) -> Tensor:
        parts = []
        split = 0
        if self.decode is not None:
            split = self.decode.num_tokens
            parts.append(self._decode_kda(KdaInputs(*(y[:, :split] for y in x)), weights))
        if self.prefill is not None:
            parts.append(self._prefill_kda(KdaInputs(*(y[:, split:] for y in x)), weights))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _decode_kda(self, x: KdaInputs, weights: KdaWeights) -> Tensor:
        rows = self.decode
        assert rows is not None
        heads = x.gate.shape[2]
        S, conv = self.memory.states(weights.layer)
        shape = (len(rows.starts), rows.tokens)
        q, k, v = (y.view(*shape, heads, -1) for y in (x.q, x.k, x.v))
        o = kda_decode(
            q,
            k,
            v,
            x.g.view(*shape, heads, -1),
            x.beta.view(*shape, heads),
            x.gate.view(*shape, heads, -1),
            conv_weight=weights.conv,
            conv_state=conv,
            state=S,
            slots=rows.states[self.memory.group_of(weights.layer)],
            A_log=weights.A_log,
            dt_bias=weights.dt_bias,
            lower_bound=weights.lower_bound,
            norm_weight=weights.norm,
            eps=weights.eps,
            pending=self.pending.get(weights.layer),
            accepted=rows.accepted,
            windows=rows.windows,
            advance=rows.advance,
        )
        return o.flatten(0, 1)[None]

    def _prefill_kda(self, x: KdaInputs, weights: KdaWeights) -> Tensor:
        rows = self.prefill
        assert rows is not None
        group = self.memory.group_of(weights.layer)
        S, conv = self.memory.states(weights.layer)
        live = rows.states[group]
        old = conv[live].flatten(3).unbind(1)
        outs, tails = [], []
        for y, tap, tail in zip((x.q, x.k, x.v), weights.conv, old, strict=True):
            options = {"cu_seqlens": rows.cu_seqlens, "output_final_state": True}
            out, new = short_conv(y, tap, initial_state=tail, **options)
            outs.append(out.unflatten(-1, (x.gate.shape[2], -1)))
            tails.append(new)
        q, k, v = outs
        result: Any = kda(
            q,
            k,
            v,
            x.g,
            x.beta,
            A_log=weights.A_log,
            dt_bias=weights.dt_bias,
            lower_bound=weights.lower_bound,
            initial_state=S[live],
            cu_seqlens=rows.cu_seqlens,
            output_final_state=True,
            state_positions=rows.inner_flat,
        )
        if rows.inner_pages is not None:
            S[rows.inner_pages[group]] = result[2].float()
            inner = [
                torch.cat([tail.flatten(0, 1), y[0].to(tail.dtype)])[rows.inner_tails]
                for y, tail in zip((x.q, x.k, x.v), old, strict=True)
            ]
            conv[rows.inner_pages[group]] = torch.stack(inner, 1).view(-1, *conv.shape[1:])
        S[live] = result[1]
        conv[live] = torch.stack(tails, 1).view(-1, *conv.shape[1:])
        return gated_head_norm(result[0], weights.norm, x.gate, weights.eps)

    def attend(
        self,
        layer: int,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        state: MixerState | None,
        return_max_logits: bool = False,
    ) -> Tensor:
        assert not return_max_logits, "maximal logits are tracked in training only"
        pages = self.memory.latents(layer)
        pages[self.page, self.offset] = torch.cat([latent, k_rope], -1)[0]
        parts = []
        rows = self.decode
        if rows is not None:
            own = q[0, : rows.num_tokens].unflatten(0, (-1, rows.tokens))
            held = rows.table, rows.starts, rows.lengths
            o = attend_paged(own, kv_b, pages, *held, first=self.first)
            parts.append(o.flatten(0, 1))
        if self.prefill is not None:
            own = q[0, self.prefill.first :]
            parts.append(attend_chunks(own, kv_b, pages, self.prefill.held))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]
