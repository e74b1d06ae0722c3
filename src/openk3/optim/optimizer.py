"""The optimizer of a whole model: Per-Head Muon for matrices, AdamW for the rest, one step call.

All state is a flat dict of named tensors, so that a checkpoint needs no pickle.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openk3.config.recipe import OptimRecipe
from openk3.errors import CheckpointError
from openk3.optim.groups import Assignment
from openk3.optim.muon import Muon, MuonParameter


class Optimizer:
    """Moves float32 master weights; the learning rate is an argument of every step."""

    def __init__(
        self, weights: Mapping[str, Tensor], assignments: Sequence[Assignment], recipe: OptimRecipe
    ) -> None:
        """weights: name -> float32 leaf with `.grad`; assignments: from `groups.assign_all`."""
        self.recipe = recipe
        by_kind: dict[str, list[Assignment]] = {"muon": [], "matrix": [], "embed": [], "plain": []}
        for assignment in assignments:
            by_kind[assignment.kind].append(assignment)
        on_gpu = any(w.is_cuda for w in weights.values())
        self.muon = Muon(
            [MuonParameter(a.name, weights[a.name], a.rows) for a in by_kind["muon"]],
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            steps=recipe.newton_schulz_steps,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
        self._adam_weights = {
            a.name: weights[a.name] for k in ("matrix", "embed", "plain") for a in by_kind[k]
        }
        self.adamw = torch.optim.AdamW(
            [
                {
                    "params": [weights[a.name] for a in by_kind[kind]],
                    "weight_decay": recipe.weight_decay * (kind != "plain"),
                    "lr_scale": recipe.embed_lr_scale if kind == "embed" else 1.0,
                }
                for kind in ("matrix", "embed", "plain")
                if by_kind[kind]
            ],
            lr=recipe.lr,
            betas=recipe.adam_betas,
            eps=recipe.adam_eps,
            fused=True,
        )

    def step(self, lr: float) -> None:
        """One update of every weight from its `.grad`."""
        self.muon.step(lr)
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.adamw.step()

    def state(self) -> dict[str, Tensor]:
        """`muon.NAME`, `adam.m.NAME`, `adam.v.NAME`, `adam.t.NAME` -> tensor; not copies."""
        tensors = {f"muon.{name}": buffer for name, buffer in self.muon.state().items()}
        for name, weight in self._adam_weights.items():
            for key, part in _ADAM_PARTS.items():
                tensors[f"adam.{part}.{name}"] = self._adam_state(weight)[key]
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a saved `state()` in. Raises CheckpointError naming what is missing or misshapen."""
        state = self.state()
        if state.keys() != tensors.keys():
            odd = sorted(state.keys() ^ tensors.keys())
            raise CheckpointError(
                f"the optimizer state does not fit this model: {len(odd)} tensors differ, "
                f"first {odd[0]!r}"
            )
        for name, target in state.items():
            if target.shape != tensors[name].shape:
                raise CheckpointError(
                    f"optimizer state {name!r} has shape {tuple(tensors[name].shape)}; "
                    f"this model needs {tuple(target.shape)}"
                )
            target.copy_(tensors[name])

    def _adam_state(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.adamw.state[weight]
        if not state:  # AdamW makes it at its first step; a checkpoint may come before
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


_ADAM_PARTS = {"exp_avg": "m", "exp_avg_sq": "v", "step": "t"}
