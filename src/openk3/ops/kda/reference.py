"""Kimi Delta Attention in plain torch: the recurrence, and the chunkwise form equal to it.

K3 report §2.1.1. Per head, with state S [K, V], decay alpha = exp(g) and key k of unit length:

    S <- Diag(alpha) S ;  S <- S + beta k (v - S^T k)^T ;  o = S^T q          (eq. 1)

The chunkwise (WY) form (eq. 3-4) writes C steps as one affine map of the state, so that all but a
short scan over chunks is batched matrix products. With G the running sum of g inside a chunk:

    A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)  (i > j);     T = (I + A)^-1
    W = T (beta k exp(G)),  U = T (beta v),  R = U - W S
    o = (q exp(G)) S + tril(q k^T decay) R,      S' = Diag(exp(G_C)) S + (k exp(G_C - G))^T R

Decays are formed tile by tile of 16 tokens around the tile's midpoint: the gate's lower bound of -5
(eq. 5) keeps every exponent within +-80, so float32 never overflows and any chunk size is exact.

Legend: B batch, T tokens, H heads, K and V head widths, N sequences, C chunk, M chunks in all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.kda.layout import ChunkLayout, chunk_layout
from openk3.ops.kda.scan import chunk_scan
from openk3.ops.norm import l2_norm
from openk3.ops.precision import wide_dtype

TILE = 16


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) (g + dt_bias)), eq. 5. g [B,T,H,K], A_log [H]."""
    heads, width = g.shape[-2:]
    if dt_bias is not None:
        g = g + dt_bias.view(heads, width)
    return lower_bound * torch.sigmoid(A_log.exp().view(heads, 1) * g)


def activate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Raw projections -> unit q (times scale) and k, v, log-decay, beta; float32 (or float64)."""
    wide = wide_dtype(q)
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    decay = log_decay(g, A_log.to(wide), None if dt_bias is None else dt_bias.to(wide), lower_bound)
    return l2_norm(q) * scale, l2_norm(k), v, decay, torch.sigmoid(beta)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lengths: Sequence[int],
    *,
    state_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The recurrence, token by token, on activated inputs.

    q, k, g [B,T,H,K], v [B,T,H,V], beta [B,T,H], state [N,H,K,V]; lengths of the N sequences.
    state_positions [P]: flat token indices (b * T + t); the states after those tokens come back
    as [P,H,K,V]. Returns (o [B,T,H,V], final state [N,H,K,V], states or None).
    """
    wanted = set() if state_positions is None else set(state_positions.tolist())
    kept: dict[int, Tensor] = {}
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    outs, finals, start = [], [], 0
    for n, length in enumerate(lengths):
        s = state[n]
        for t in range(start, start + length):
            q_HK, k_HK, v_HV, g_HK, beta_H = (x[t] for x in flat)
            s = s * g_HK.exp()[..., None]
            error_HV = v_HV - torch.einsum("hkv,hk->hv", s, k_HK)
            s = s + beta_H[:, None, None] * k_HK[..., None] * error_HV[:, None, :]
            outs.append(torch.einsum("hkv,hk->hv", s, q_HK))
            if t in wanted:
                kept[t] = s
        finals.append(s)
        start += length
    states = None
    if state_positions is not None:
        kept_P = [kept[t] for t in state_positions.tolist()]
        states = torch.stack(kept_P) if kept_P else state.new_zeros(0, *state.shape[1:])
    out = torch.stack(outs).view_as(v) if outs else torch.zeros_like(v)
    return out, torch.stack(finals) if finals else state, states


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lengths: Sequence[int],
    *,
    chunk_size: int = 32,
    state_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The chunkwise form on activated inputs; arguments and results as `recurrent`."""
    layout = chunk_layout(tuple(lengths), chunk_size, q.device)
    q, k, v, g, beta = (layout.to_chunks(x) for x in (q, k, v, g, beta[..., None]))
    G = g.cumsum(2)  # [M,H,C,K], running log-decay inside the chunk
    decay, last = G.exp(), G[:, :, -1:]
    qk, kk = _decayed_products(q, k, G)
    T = unit_lower_inverse(torch.tril(kk * beta, -1))
    W = T @ (beta * k * decay)
    U = T @ (beta * v)
    k_out = k * (last - G).exp()
    S, R, final = chunk_scan(W, U, k_out, last[:, :, 0].exp(), state[layout.order], layout.active)
    o = (q * decay) @ S + qk.tril() @ R
    states = None
    if state_positions is not None:
        states = _states_after(layout, state_positions, k, G, S, R)
    shape = (layout.num_tokens, v.shape[1], v.shape[3])
    return layout.to_tokens(o, shape), final[layout.inverse_order], states


def _decayed_products(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """sum_d x_id k_jd exp(G_id - G_jd) for x = q and x = k; rows i >= j are meaningful. [M,H,C,C].

    Row tiles of 16: relative to the tile's midpoint both factors have exponents of at most 40 in
    size, except columns of earlier tiles, whose factor only shrinks.
    """
    size = k.shape[2]
    qk_rows, kk_rows = [], []
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        middle = G[:, :, (start + stop - 1) // 2, None]
        rows = (G[:, :, start:stop] - middle).exp()
        columns = k[:, :, :stop] * (middle - G[:, :, :stop]).exp()
        both = torch.cat([q[:, :, start:stop] * rows, k[:, :, start:stop] * rows], 2)
        product = torch.nn.functional.pad(both @ columns.transpose(-1, -2), (0, size - stop))
        qk_rows.append(product[:, :, : stop - start])
        kk_rows.append(product[:, :, stop - start :])
    if len(qk_rows) == 1:
        return qk_rows[0], kk_rows[0]
    return torch.cat(qk_rows, 2), torch.cat(kk_rows, 2)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(
            lower, eye.expand_as(lower), upper=False, unitriangular=True
        )
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        across = inverse.transpose(-1, -2)
        return -torch.tril(across @ grad @ across, -1)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower-triangular `lower` [..., C, C]."""
    return _UnitLowerInverse.apply(lower)


def _states_after(
    layout: ChunkLayout, positions: Tensor, k: Tensor, G: Tensor, S: Tensor, R: Tensor
) -> Tensor:
    """States [P,H,K,V] after the tokens at flat `positions`."""
    slots = layout.slots[positions.to(layout.slots.device)]
    size = G.shape[2]
    chunk, offset = slots // size, slots % size
    G, k, S, R = G[chunk], k[chunk], S[chunk], R[chunk]
    here = G.gather(2, offset.view(-1, 1, 1, 1).expand(-1, G.shape[1], 1, G.shape[3]))
    seen = torch.arange(size, device=offset.device) <= offset[:, None]
    weighted = k * (here - G).clamp(max=0).exp() * seen[:, None, :, None]
    return here.exp().transpose(-1, -2) * S + weighted.transpose(-1, -2) @ R
