"""Cross-entropy of a linear head, a chunk of tokens at a time.

Logits [tokens, vocabulary] are never held whole: each chunk's logits become its loss and its
gradients at once, in the same buffer.

Legend: N tokens, d width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.checks import check_kind, check_range, check_tensor, readable
from openk3.ops.precision import wide_dtype
from openk3.ops.triton_support import launch, power_of_two, triton_runs

IGNORE = -100


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(hidden head^T)[target], float32 scalar.

    hidden [..., d], head [V, d], targets [...] int64, -100 where a token does not count. Divide by
    the number of counted targets for a mean. chunk_tokens None: as many as make 1.5 GB of logits
    on a GPU, where the float32 sum of the head's gradient is read and written once a chunk, and
    1024 on a CPU. Raises InputError, also on a target outside [0, V) where targets are on the host.
    """
    if chunk_tokens is None:
        row = head.shape[0] * hidden.element_size()
        chunk_tokens = max(1024, 1_500_000_000 // row) if hidden.is_cuda else 1024
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    _check(hidden, head, targets, chunk_tokens)
    return _LinearCrossEntropy.apply(flat, head, wanted, chunk_tokens)


def token_losses(
    hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_tokens: int = 1024
) -> Tensor:
    """-log p of every target [...] float32 without gradient; 0 where the target is -100."""
    _check(hidden, head, targets, chunk_tokens)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    losses = []
    with torch.no_grad():
        for h, t in zip(flat.split(chunk_tokens), wanted.split(chunk_tokens), strict=True):
            logits = (h @ head.T).float()
            losses.append(F.cross_entropy(logits, t.long(), reduction="none"))
    return torch.cat(losses).view(targets.shape)


def _check(hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int) -> None:
    check_kind("hidden", hidden)
    check_tensor("head", head, (head.shape[0], hidden.shape[-1]), hidden.device)
    if head.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise InputError(f"head is {head.dtype} but hidden {hidden.dtype}")
    check_tensor("targets", targets, hidden.shape[:-1], hidden.device, kind="integer")
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    if readable(targets):
        check_range("targets", targets[targets != IGNORE], 0, head.shape[0])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        need_hidden, need_head = ctx.needs_input_grad[:2]
        wide = wide_dtype(hidden)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_head = torch.zeros_like(head, dtype=wide) if need_head else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            here = slice(start, start + chunk_tokens)
            h, t = hidden[here], targets[here]
            probs, losses = _chunk(h @ head.T, t, wide)
            total += losses
            if d_hidden is not None:
                d_hidden[here] = probs.to(head.dtype) @ head
            if d_head is not None:
                _accumulate(d_head, probs.to(h.dtype).T, h)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.head_dtype = head.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        d_hidden, d_head = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype),
            None if d_head is None else (d_head * grad).to(ctx.head_dtype),
            None,
            None,
        )


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; on a GPU in the product's epilogue."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _chunk(logits: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """(gradient of the loss by the logits, in the logits' own buffer; summed loss)."""
    if logits.is_cuda and logits.dtype != torch.float64 and triton_runs(logits.device)[0]:
        return chunk_triton(logits, targets)
    logits = logits.to(wide)
    counted = targets != IGNORE
    index = targets.clamp(min=0)[:, None].long()
    peak = logits.amax(-1, keepdim=True)
    logits -= peak
    picked = logits.gather(1, index)
    probs = logits.exp_()
    total = probs.sum(-1, keepdim=True)
    loss = (total.log() - picked).squeeze(1).masked_fill(~counted, 0).sum()
    probs /= total
    probs.scatter_add_(1, index, torch.full_like(picked, -1.0))
    probs.masked_fill_(~counted[:, None], 0)
    return probs, loss


def chunk_triton(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`_chunk` by one kernel, in the logits' own dtype."""
    from openk3.ops import loss_kernels

    num_rows, vocab = logits.shape
    losses = logits.new_empty(num_rows, dtype=torch.float32)
    block = min(4096, power_of_two(vocab, 32))
    launch(
        loss_kernels.loss_rows, (num_rows,), logits, targets.contiguous(), losses, vocab,
        IGNORE=IGNORE, BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return logits, losses.sum()
