"""The routed experts of a Stable LatentMoE layer as one differentiable op (K3 report eq. 11, §5.2).

Kept for the backward pass: the tokens [T, L], the routing, and gate and up [R, 2 F] (with
`recompute` not even those). Never kept: permuted tokens, activations, the experts' outputs.
The gradient of a router weight is <d_out w2, act>, taken from the un-scaled gradient and the
recomputed activation, and w2's gradient from the activation scaled by that weight.

Legend: T tokens, k choices, E experts, L latent width, F inner width, R rows.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.moe import grouped
from openk3.ops.moe.costs import Choice, costs_of
from openk3.ops.moe.row_plan import (
    Plan,
    combine_rows,
    gather_rows,
    make_plan,
    pick_pairs,
    unflatten_plan,
)
from openk3.ops.moe.triton_situ import Betas, situ_backward, situ_forward


def _rows(choice: Choice, x: Tensor, w: Tensor, plan: Plan, transposed: bool) -> Tensor:
    products = grouped.TritonProducts if choice.triton_rows else grouped.TorchProducts
    return products.rows(x, w, plan, transposed=transposed)


def _grad(choice: Choice, a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    products = grouped.TritonProducts if choice.triton_grads else grouped.TorchProducts
    return products.weight_grad(a, b, plan)


def _gate_up(
    choice: Choice, xp: Tensor, w1: Tensor, w3: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    both = grouped.joined(w1, w3)
    if both is None:
        return _rows(choice, xp, w1, plan, True), _rows(choice, xp, w3, plan, True)
    gate_up = _rows(choice, xp, both, plan, True)
    return gate_up[:, : w1.shape[1]], gate_up[:, w1.shape[1] :]


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
        betas: Betas, choice: Choice, recompute: bool,
    ):  # fmt: skip
        plan = make_plan(ids, w1.shape[0], align=choice.align, shape=choice.shape)
        xp, _ = gather_rows(x, plan)
        keep = any(ctx.needs_input_grad) and not recompute
        gate = up = None
        if choice.fused_situ:
            act, gate_up = grouped.TritonProducts.situ(xp, w1, w3, plan, betas, keep)
            if gate_up is not None:
                gate, up = gate_up.chunk(2, 1)
        else:
            gate, up = _gate_up(choice, xp, w1, w3, plan)
            act = situ_forward(gate, up, betas, plan.last_row)
        y = _rows(choice, act, w2, plan, True)
        saved = (gate, up) if keep else (None, None)
        ctx.save_for_backward(x, weights, w1, w3, w2, *saved, *plan.tensors())
        ctx.betas, ctx.choice = betas, choice
        return combine_rows(y, plan, x.shape[0], weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, weights, w1, w3, w2, gate, up, *tables = ctx.saved_tensors
        choice, inner = ctx.choice, w1.shape[1]
        plan = unflatten_plan(tables, weights.shape[-1], len(choice.shape.heights))
        if gate is None:
            xp, _ = gather_rows(x, plan)
            gate, up = _gate_up(choice, xp, w1, w3, plan)
            del xp
        dy, row_weight = gather_rows(grads[0].contiguous(), plan, weights)
        d_act = _rows(choice, dy, w2, plan, False)
        d_gate, d_up = _gradient_buffers(gate, inner)
        d_row = situ_backward(gate, up, d_act, d_gate, d_up, ctx.betas, row_weight, plan.last_row)
        assert d_row is not None, "weighted rows return their gradient"
        dw2 = _grad(choice, dy, d_act, plan)
        del dy, d_act, gate, up
        dxp = _input_grad(choice, d_gate, d_up, w1, w3, plan)
        dx = combine_rows(dxp, plan, x.shape[0])
        del dxp
        xp, _ = gather_rows(x, plan)
        together = grouped.joined(w1, w3) is not None
        dw1, dw3 = _gate_up_grads(choice, d_gate, d_up, xp, plan, together)
        return dx, pick_pairs(d_row, plan), None, dw1, dw3, dw2, None, None, None


def _gradient_buffers(gate: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """d_gate, d_up laid out as gate and up are: halves of one [R, 2 F], or two tensors."""
    if gate.stride(0) == inner:
        return torch.empty_like(gate), torch.empty_like(gate)
    both = gate.new_empty(gate.shape[0], 2 * inner)
    return both[:, :inner], both[:, inner:]


def _whole(d_gate: Tensor, d_up: Tensor) -> Tensor | None:
    """[R, 2 F] if d_gate and d_up are its halves."""
    rows, inner = d_gate.shape
    if d_gate.stride(0) != 2 * inner:
        return None
    return torch.as_strided(d_gate, (rows, 2 * inner), (2 * inner, 1))


def _input_grad(
    choice: Choice, d_gate: Tensor, d_up: Tensor, w1: Tensor, w3: Tensor, plan: Plan
) -> Tensor:
    whole, both = _whole(d_gate, d_up), grouped.joined(w1, w3)
    if whole is not None and both is not None:
        return _rows(choice, whole, both, plan, False)
    products = grouped.TritonProducts if choice.triton_rows else grouped.TorchProducts
    return products.sum_of_rows(d_gate, w1, d_up, w3, plan)


def _gate_up_grads(
    choice: Choice, d_gate: Tensor, d_up: Tensor, xp: Tensor, plan: Plan, together: bool
) -> tuple[Tensor, Tensor]:
    """`together`: as halves of one tensor, like the weights. A gradient laid out otherwise than its
    weight would be copied when it is accumulated."""
    whole = _whole(d_gate, d_up) if together else None
    if whole is None:
        return _grad(choice, d_gate, xp, plan), _grad(choice, d_up, xp, plan)
    both = _grad(choice, whole, xp, plan)
    return both[:, : d_gate.shape[1]], both[:, d_gate.shape[1] :]


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    beta1: float = 4.0, beta2: float | None = 25.0, *,
    choice: Choice | None = None, recompute: bool = False,
) -> Tensor:  # fmt: skip
    """`expert_mlp` without a host decision, and with the memory-saving gradient.

    x [T, L]; ids [T, k], weights [T, k] float32; w1, w3 [E, F, L], w2 [E, L, F]; returns [T, L].
    Let w1 and w3 be w13[:, :F] and w13[:, F:] of one tensor [E, 2 F, L]: they are then one product.
    Weights whose rows are not dense are copied for the call. `recompute` drops gate and up too and
    makes them again in the backward pass.
    """
    if choice is None:
        # not by whether gradients are wanted: a checkpointed pass and its repetition must agree
        training = not torch.is_inference_mode_enabled()
        choice = default_choice(x.device, ids.numel() / max(1, w1.shape[0]), training=training)
    return _RoutedExperts.apply(
        x.contiguous(),
        weights.float().contiguous(),
        ids,
        *map(_dense_rows, (w1, w3, w2)),
        Betas(beta1, beta2),
        choice,
        recompute,
    )


def _dense_rows(w: Tensor) -> Tensor:
    """w [E, N, K], or a copy if the experts' rows are not those of one matrix, 16 bytes aligned."""
    rows = w.stride()[1:] == (w.shape[2], 1) and w.stride(0) % w.shape[2] == 0
    aligned = w.storage_offset() * w.element_size() % 16 == 0
    return w if rows and aligned else w.clone(memory_format=torch.contiguous_format)


def default_choice(device: torch.device, rows_per_expert: float, *, training: bool) -> Choice:
    """The measured choice for this GPU."""
    if device.type != "cuda":
        return Choice()
    return costs_of(torch.cuda.get_device_name(device)).choose(rows_per_expert, training=training)
