"""The arguments of one KDA call, checked once and handed to whichever backend was chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.errors import InputError
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
        """Raises InputError on a shape or device that does not fit q."""
        if self.q.ndim != 4:
            raise InputError(f"q must be [B, T, H, K], not {list(self.q.shape)}")
        batch, tokens, heads, width = self.q.shape
        for name, shape in (
            ("k", (batch, tokens, heads, width)),
            ("v", (batch, tokens, heads, self.v.shape[-1])),
            ("g", (batch, tokens, heads, width)),
            ("beta", (batch, tokens, heads)),
            ("A_log", (heads,)),
        ):
            x = getattr(self, name)
            if tuple(x.shape) != shape:
                raise InputError(f"{name} must be {list(shape)} to fit q, not {list(x.shape)}")
            if not x.is_floating_point():
                raise InputError(f"{name} must be of floating point, not {x.dtype}")
            if x.device != self.q.device:
                raise InputError(f"{name} is on {x.device} but q on {self.q.device}")
        if self.dt_bias is not None and self.dt_bias.numel() != heads * width:
            raise InputError(
                f"dt_bias must hold {heads * width} values, not {self.dt_bias.numel()}"
            )
        check_offsets(batch, tokens, self.cu_seqlens)
        if self.initial_state is not None and tuple(self.initial_state.shape) != self.state_shape:
            raise InputError(
                f"initial_state must be {list(self.state_shape)} for {self.num_seqs} sequences, "
                f"not {list(self.initial_state.shape)}"
            )
        wanted = self.state_positions
        if wanted is not None and (wanted.ndim != 1 or wanted.is_floating_point()):
            raise InputError("state_positions must be a 1-D integer tensor of token indices")
