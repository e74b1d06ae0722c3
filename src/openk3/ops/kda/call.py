"""The arguments of one KDA call, checked once and handed to whichever backend was chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_range, check_tensor
from openk3.ops.packed import check_offsets


@dataclass(frozen=True)
class KdaCall:
    """Raw projections of B sequences (or of one packed row of N) and what is wanted of them."""

    q: Tensor
    """[B, T, H, K]"""
    k: Tensor
    """[B, T, H, K]"""
    v: Tensor
    """[B, T, H, V]"""
    g: Tensor
    """[B, T, H, K] decay logits"""
    beta: Tensor
    """[B, T, H] logits"""
    A_log: Tensor
    """[H]"""
    dt_bias: Tensor | None
    """[H * K]"""
    lower_bound: float
    scale: float
    initial_state: Tensor | None = None
    """[N, H, K, V]"""
    cu_seqlens: Tensor | None = None
    """[N + 1] of a packed row"""
    output_final_state: bool = False
    state_positions: Tensor | None = None
    """[P] flat tokens whose states are wanted"""

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """What gradients flow to."""
        return (
            *(self.q, self.k, self.v, self.g, self.beta),
            *(self.A_log, self.dt_bias, self.initial_state),
        )

    @property
    def num_seqs(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.num_seqs, self.q.shape[2], self.q.shape[3], self.v.shape[3]

    @property
    def needs_grad(self) -> bool:
        wanted = any(x is not None and x.requires_grad for x in self.leaves)
        return wanted and torch.is_grad_enabled()

    def check(self) -> None:
        """Raises InputError on a shape, dtype, device or number that does not fit q."""
        q, v, device = self.q, self.v, self.q.device
        if q.ndim != 4 or v.ndim != 4 or 0 in (*q.shape[2:], v.shape[3]):
            raise InputError(
                f"q {list(q.shape)}, v {list(v.shape)} must be [B, T, H, K], [B, T, H, V], none of "
                "H, K, V zero"
            )
        batch, tokens, heads, width = q.shape
        wanted = {
            **dict.fromkeys("qkg", q.shape),
            "v": (batch, tokens, heads, v.shape[3]),
            "beta": (batch, tokens, heads),
            "A_log": (heads,),
        }
        for name, shape in wanted.items():
            check_tensor(name, getattr(self, name), shape, device)
        if self.dt_bias is not None:
            check_tensor("dt_bias", self.dt_bias.reshape(-1), (heads * width,), device)
        check_lower_bound(self.lower_bound)
        check_offsets(batch, tokens, self.cu_seqlens)
        if self.initial_state is not None:
            check_tensor("initial_state", self.initial_state, self.state_shape, device)
        positions = self.state_positions
        if positions is not None:
            shape = (positions.numel(),)
            check_tensor("state_positions", positions, shape, positions.device, kind="integer")
            check_range("state_positions", positions, 0, batch * tokens)


def check_lower_bound(value: float) -> None:
    """Raises InputError unless 16 tokens of this log-decay stay in float32's range."""
    if not -5.0 <= value < 0:
        raise InputError(f"lower_bound must lie in [-5, 0), not be {value}")
