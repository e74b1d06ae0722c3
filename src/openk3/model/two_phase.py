"""The trunk for inference, with each block's mixes of the finished blocks made at once (§5.2).

K3's sublayers each mix all finished blocks and the running sum. For the finished blocks' part the
queries of a whole block are known when it starts, so one pass over those blocks serves all of them
(`openk3.ops.attn_res.two_phase`). Where that would move more bytes (few finished blocks), the
block's layers mix as they do in training. Equal to `K3.trunk` up to rounding; no gradients.

Legend: B batch, T tokens, d model width, Q queries of a block.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from openk3.model.block import K3Layer, attn_res
from openk3.model.k3 import K3
from openk3.model.ports import Context
from openk3.ops.attn_res.two_phase import block_partials, merge_running, plan_bytes
from openk3.ops.norm import rms_norm


def trunk(model: K3, x: Tensor, ctx: Context) -> Tensor:
    """Embeddings [B, T, d] -> final hidden states [B, T, d]."""
    bank: list[Tensor] = []
    running = x
    for layers in blocks(model):
        finished = [*bank, running]
        sizes = len(finished), 2 * len(layers), x.shape[:-1].numel(), x.shape[-1]
        if plan_bytes(*sizes, x.element_size()).two_phase_wins:
            bank, running = finished, block(layers, finished, ctx)
            continue
        for layer in layers:
            bank, running = layer(bank, running, ctx)
    norm, proj = model.output_attn_res_norm, model.output_attn_res_proj
    return model.norm(attn_res(bank, running, norm, proj, ctx, "output"))


def blocks(model: K3) -> Iterator[list[K3Layer]]:
    """The layers of each AttnRes block."""
    layers = [cast(K3Layer, layer) for layer in model.layers]
    starts = [i for i, layer in enumerate(layers) if layer.starts_block]
    for first, end in itertools.pairwise([*starts, len(layers)]):
        yield layers[first:end]


def block(layers: Sequence[K3Layer], finished: Sequence[Tensor], ctx: Context) -> Tensor:
    """The sum of a block [B, T, d], from the finished ones before it, each [B, T, d]."""
    pairs = [
        pair
        for layer in layers
        for pair in (
            (layer.self_attention_res_proj, layer.self_attention_res_norm),
            (layer.mlp_res_proj, layer.mlp_res_norm),
        )
    ]
    queries = torch.cat([proj.weight for proj, _ in pairs])
    norms = torch.stack([norm.weight for _, norm in pairs])
    eps = pairs[0][1].eps
    shape = finished[0].shape
    partials, lse = block_partials([x.flatten(0, 1) for x in finished], queries, norms, eps)

    def mixed(index: int, running: Tensor, out: torch.nn.Module) -> Tensor:
        """What a sublayer reads."""
        after = cast(Tensor, out.weight), cast(float, out.eps)
        own = partials[index], lse[index], running.flatten(0, 1)
        return merge_running(*own, queries[index], norms[index], eps, out_norm=after).view(shape)

    running = finished[-1]
    for i, layer in enumerate(layers):
        out = layer.input_layernorm
        if i:
            running = running + layer.self_attn(mixed(2 * i, running, out), ctx)
        else:  # the block has no sum yet
            running = layer.self_attn(rms_norm(partials[0].view(shape), out.weight, out.eps), ctx)
        running = running + layer.ffn(
            mixed(2 * i + 1, running, layer.post_attention_layernorm), ctx
        )
    return running
