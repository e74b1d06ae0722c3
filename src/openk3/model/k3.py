"""Kimi K3 (arXiv 2607.24653), the whole architecture on one page.

    token -> embedding -> 93 layers of [ AttnRes mix -> KDA or Gated MLA -> AttnRes mix -> MoE ]
          -> AttnRes mix -> RMSNorm -> head

    picture -> MoonViT-V2 -> projector -> rows in place of embeddings

Three KDA layers to one Gated MLA layer, MLA last; the first FFN is dense, the rest are Stable
LatentMoE. No positions are encoded anywhere; the head is not tied to the embedding. Parameter names
are the published ones, except that the experts of a layer are stacked.

Legend: B batch, T tokens, d model width.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.errors import InputError
from openk3.model.block import K3Layer, attn_res
from openk3.model.generate import generate as generate_tokens
from openk3.model.init import init_weights
from openk3.model.layers import RMSNorm, linear
from openk3.model.media import Prompt, make_room, require_vision, splice
from openk3.model.mla import GatedMLA
from openk3.model.moe import Router
from openk3.model.mtp import MTPLayer
from openk3.model.ports import Context, LocalSequence, MixerState, Probe
from openk3.model.vision import Projector, VisionTower
from openk3.ops.checks import readable


class K3(nn.Module):
    """A Kimi K3 of any size. `seed` None leaves the weights uninitialised (to be loaded)."""

    def __init__(self, config: ModelConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(K3Layer(config, i) for i in range(config.num_hidden_layers))
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.output_attn_res_norm = RMSNorm(dim, eps)
        self.output_attn_res_proj = linear(dim, 1)
        self.norm = RMSNorm(dim, eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.vision is not None:
            self.vision_tower = VisionTower(config.vision)
            self.mm_projector = Projector(config.vision)
        self.mtp = MTPLayer(config) if config.num_nextn_predict_layers else None
        if seed is not None:
            init_weights(self, config.initializer_range, seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        state: MixerState | None = None,
        logits_for: Literal["all", "last"] = "all",
    ) -> Tensor:
        """Next-token logits [B, T, vocab] of input_ids [B, T] int64 (or [B, 1, vocab] for "last").

        cu_seqlens [N + 1] packs N documents in one row (B = 1). With `state` the T tokens continue
        the sequences it remembers. pixel_values and grid_thws are the items at the media ids, in
        order (see `images`): one id per row of an item, or at B = 1 one per item; then T grows.
        Raises InputError on ids or lengths out of range, or pictures that do not fit the ids.
        """
        h = self.hidden(
            input_ids,
            cu_seqlens=cu_seqlens,
            pixel_values=pixel_values,
            grid_thws=grid_thws,
            state=state,
        )
        return self.lm_head(h if logits_for == "all" else h[:, -1:])

    def hidden(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        state: MixerState | None = None,
        valid: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """[B, T, d] after the final norm; losses take it with `lm_head.weight`.

        valid [B, T] bool: False marks padding, which Quantile Balancing must not count.
        """
        if grid_thws is not None:
            prompt = Prompt(input_ids, cu_seqlens, valid)
            input_ids, cu_seqlens, valid = make_room(prompt, grid_thws, self.config)
        self._check(input_ids, cu_seqlens, state)
        x = self.embed_tokens(input_ids)
        if pixel_values is not None or grid_thws is not None:
            x = splice(x, input_ids, self.images(pixel_values, grid_thws), self.config)
        h = self.trunk(x, Context(LocalSequence(cu_seqlens), state, valid, probe))
        if state is not None:
            state.advance(input_ids.shape[1])
        return h

    def images(self, pixel_values: Tensor | None, grid_thws: Tensor | None) -> Tensor:
        """Rows [R, d] of items, as they stand for embeddings (K3 report §2.4).

        pixel_values [patches, 3, P, P] in [-1, 1], grid_thws [items, 3] int64 (frames, rows and
        columns of patches): what `openk3.text.image` makes of pictures. Raises InputError.
        """
        require_vision(self.config)
        if pixel_values is None or grid_thws is None:
            raise InputError("pixel_values and grid_thws must be given together")
        return self.mm_projector(self.vision_tower(pixel_values, grid_thws))

    def trunk(self, x: Tensor, ctx: Context) -> Tensor:
        """Embeddings [B, T, d] -> final hidden states [B, T, d]."""
        bank: list[Tensor] = []
        running = x
        for layer in self.layers:
            bank, running = layer(bank, running, ctx)
        norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
        return self.norm(attn_res(bank, running, norm, proj, ctx, "output"))

    def mtp_hidden(
        self, hidden: Tensor, next_ids: Tensor, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """[B, T, d] whose head output at t predicts the token at t + 2.

        hidden [B, T, d] as `hidden()` returns it; next_ids [B, T] int64, the tokens at t + 1.
        Raises InputError unless num_nextn_predict_layers is 1.
        """
        if self.mtp is None:
            raise InputError("this model has no MTP layer (num_nextn_predict_layers is 0)")
        ctx = Context(LocalSequence(cu_seqlens))
        return self.mtp(hidden, self.embed_tokens(next_ids), ctx)

    def _check(self, ids: Tensor, cu_seqlens: Tensor | None, state: MixerState | None) -> None:
        if ids.ndim != 2 or ids.is_floating_point():
            raise InputError(
                f"input_ids must be integers [B, T], not {ids.dtype} {list(ids.shape)}"
            )
        limit = self.config.max_position_embeddings
        if cu_seqlens is None:
            past = 0 if state is None else state.num_tokens
            if past + ids.shape[1] > limit:
                raise InputError(
                    f"a sequence of {past + ids.shape[1]} tokens exceeds the model's limit of "
                    f"{limit} (max_position_embeddings)"
                )
        if readable(ids) and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise InputError(
                    f"token id {wrong} lies outside the vocabulary [0, {self.config.vocab_size})"
                )

    def routers(self) -> dict[int, Router]:
        """The router of every MoE layer, by layer index."""
        return {m.layer: m for m in self.modules() if isinstance(m, Router)}

    def update_balancing(self, reduce: Callable[[Tensor], None] | None = None) -> None:
        """Apply Quantile Balancing once per optimizer step (K3 report eq. 14).

        `reduce` adds the counts of all layers [layers, E, 1000] int32, in place, over exactly the
        ranks whose tokens differ; it is called once. A step has fewer than 2^31 tokens.
        """
        routers = list(self.routers().values())
        if reduce is not None and routers:
            counts = torch.stack([r.margin_counts.to(torch.int32) for r in routers])
            reduce(counts)
            for router, total in zip(routers, counts, strict=True):
                router.margin_counts.copy_(total)
        for router in routers:
            router.update_bias()

    def track_max_logits(self, on: bool = True) -> None:
        """Record every MLA head's largest attention logit in training-mode passes."""
        for mla in self._mla_layers().values():
            mla.track_max_logits = on

    def max_logits(self, *, reset: bool = True) -> dict[int, Tensor]:
        """Largest scaled logit of each MLA head [H] since the last reset, by layer index."""
        peaks = {}
        for index, mla in self._mla_layers().items():
            peaks[index] = mla.max_logits.clone()
            if reset:
                mla.max_logits.fill_(-torch.inf)
        return peaks

    def _mla_layers(self) -> dict[int, GatedMLA]:
        return {m.layer: m for m in self.layers.modules() if isinstance(m, GatedMLA)}

    generate = generate_tokens
