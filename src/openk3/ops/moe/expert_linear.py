"""A linear layer of each expert over rows grouped by expert, in plain torch.

Legend: R rows, E experts.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.checks import check_tensor, readable


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [R, in] with rows grouped by expert, weight [E, out, in], offsets [E] int32 -> [R, out].

    offsets: the end of each expert's rows, rising. Rows past the last one's come out unset. Raises
    InputError; on a GPU the values of offsets are trusted.
    """
    check_grouped(x, weight, offsets)
    return expert_linear(x, weight, offsets)


def check_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    """Raises InputError unless the arguments of `grouped_linear` fit."""
    check_tensor("rows", x, (x.shape[0], weight.shape[-1]), weight.device)
    check_tensor("offsets", offsets, weight.shape[:1], x.device, kind="integer")
    if readable(offsets):
        ends = [0, *offsets.tolist(), x.shape[0]]
        if any(a > b for a, b in pairwise(ends)):
            raise InputError(f"offsets must rise from 0 to R = {x.shape[0]} at most: {ends[1:-1]}")


def expert_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_linear` of arguments that are known to fit."""
    product = _compiled if torch.compiler.is_compiling() else _product
    return product(x, weight, offsets)


def _product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if _grouped_mm_takes(x, weight):
        dense = weight if 1 in weight.stride()[1:] else weight.contiguous()
        return F.grouped_mm(x.contiguous(), dense.transpose(1, 2), offs=offsets.int())
    pieces = zip(_pieces(x, offsets), weight.unbind(0), strict=True)
    used = [F.linear(rows, w) for rows, w in pieces]
    unused = x.shape[0] - sum(len(rows) for rows in used)
    return torch.cat([*used, x.new_empty(unused, weight.shape[1])])


def _pieces(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert."""
    ends = offsets.tolist()
    return x[: ends[-1]].split([b - a for a, b in zip([0, *ends], ends, strict=False)])


def _grouped_mm_takes(x: Tensor, weight: Tensor) -> bool:
    """grouped_mm wants float32 or bf16 and strides that are multiples of 16 bytes."""
    wanted = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    step = 16 // x.element_size()
    return x.dtype in wanted and x.shape[1] % step == 0 and weight.shape[1] % step == 0


# As an op of its own while a graph is compiled: lengths of pieces are no constants, and torch's own
# fake grouped_mm refuses float32. The gradient is the same two products.


@torch.library.custom_op(
    "openk3::grouped_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
)
def _compiled(x, weight, offsets):
    return _product(x, weight, offsets)


@_compiled.register_fake
def _(x, weight, offsets):
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "openk3::grouped_linear_weight_grad",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor offsets) -> Tensor",
)
def _weight_grad(grad, x, offsets):
    pairs = zip(_pieces(grad, offsets), _pieces(x, offsets), strict=True)
    return torch.stack([g.mT @ rows for g, rows in pairs])


@_weight_grad.register_fake
def _(grad, x, offsets):
    return x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])


def _backward(ctx, grad):
    x, weight, offsets = ctx.saved_tensors
    return _compiled(grad, weight.mT, offsets), _weight_grad(grad, x, offsets), None


_compiled.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
