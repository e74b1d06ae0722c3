"""Triton kernel of the softmax cross-entropy: logits become their own gradient.

Two readings and one writing of the logits where plain torch makes ten passes in float32.
"""

import triton
import triton.language as tl


@triton.jit
def loss_rows(
    logits, targets, losses, V, IGNORE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """losses [N] float32 = log sum exp - target logit, logits [N, V] = softmax - one hot, in place.

    Rows whose target is IGNORE get loss and gradient zero.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * V
    target = tl.load(targets + row)
    peak = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(base + col, mask=col < V, other=-1e30).to(tl.float32)
        top = tl.maximum(peak, x)
        total = total * tl.exp(peak - top) + tl.exp(x - top)
        peak = top
    top = tl.max(peak, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    counted = target != IGNORE
    picked = tl.load(base + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counted, lse - picked, 0.0))
    tl.debug_barrier()  # the target's logit is read before its place is overwritten
    for start in tl.range(0, V, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(base + col, mask=col < V, other=-1e30).to(tl.float32)
        grad = tl.exp(x - lse) - tl.where(col == target, 1.0, 0.0)
        grad = tl.where(counted, grad, 0.0)
        tl.store(base + col, grad.to(logits.dtype.element_ty), mask=col < V)
