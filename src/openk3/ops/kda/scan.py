"""The serial part of chunkwise KDA: the state passed from chunk to chunk, with its own backward.

Legend: M chunks in all, H heads, C tokens a chunk, K and V head widths, N sequences.
"""

import torch
from torch import Tensor


def chunk_scan(
    W: Tensor, U: Tensor, k_out: Tensor, decay: Tensor, state: Tensor, active: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """R = U - W S and S' = Diag(decay) S + k_out^T R over the chunks of N sequences.

    W, k_out [M,H,C,K], U [M,H,C,V], decay [M,H,K], state [N,H,K,V] (sequences longest first);
    active[c] sequences have a chunk at step c and their chunks are stored together.
    Returns (state before each chunk [M,H,K,V], R [M,H,C,V], final state [N,H,K,V]).
    """
    return _ChunkScan.apply(W, U, k_out, decay, state, active)


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, W, U, k_out, decay, state, active):
        W, U, k_out = W.contiguous(), U.contiguous(), k_out.contiguous()
        heads = W.shape[1]
        before = U.new_empty(W.shape[0], heads, W.shape[3], U.shape[3])
        R = torch.empty_like(U)
        S = state.contiguous().clone()
        start = 0
        for n in active:
            here = slice(start, start + n)
            before[here] = S[:n]
            flat = before[here].flatten(0, 1)
            r = torch.baddbmm(U[here].flatten(0, 1), W[here].flatten(0, 1), flat, alpha=-1)
            R[here] = r.view_as(R[here])
            kept = flat * decay[here].flatten(0, 1)[..., None]
            new = torch.baddbmm(kept, k_out[here].flatten(0, 1).transpose(1, 2), r)
            S[:n] = new.view_as(S[:n])
            start += n
        ctx.save_for_backward(W, k_out, decay, before, R)
        ctx.active = active
        return before, R, S

    @staticmethod
    def backward(ctx, d_before, d_R, d_final):
        W, k_out, decay, before, R = ctx.saved_tensors
        d_after = torch.empty_like(before)  # gradient of the state each chunk leaves behind
        d_R = d_R.clone()  # grows into the gradient of U
        dS = d_final.contiguous().clone()
        stop = W.shape[0]
        for n in reversed(ctx.active):
            here = slice(stop - n, stop)
            d_after[here] = dS[:n]
            flat = d_after[here].flatten(0, 1)
            dr = torch.baddbmm(d_R[here].flatten(0, 1), k_out[here].flatten(0, 1), flat)
            d_R[here] = dr.view_as(d_R[here])
            kept = torch.addcmul(
                d_before[here].flatten(0, 1), flat, decay[here].flatten(0, 1)[..., None]
            )
            new = torch.baddbmm(kept, W[here].flatten(0, 1).transpose(1, 2), dr, alpha=-1)
            dS[:n] = new.view_as(dS[:n])
            stop -= n
        d_W = -(d_R @ before.transpose(-1, -2))
        d_k_out = R @ d_after.transpose(-1, -2)
        d_decay = (before * d_after).sum(-1)
        return d_W, d_R, d_k_out, d_decay, dS, None
