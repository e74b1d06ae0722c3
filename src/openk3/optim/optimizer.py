"""The optimizer of a whole model: Per-Head Muon for matrices, AdamW for the rest, one step call.

All state is a flat dict of named tensors, so that a checkpoint needs no pickle.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from openk3.config.recipe import OptimRecipe
from openk3.errors import CheckpointError
from openk3.optim.adamw import AdamW
from openk3.optim.groups import Assignment
from openk3.optim.muon import Muon, MuonParameter


class Optimizer:
    """Moves float32 master weights; the learning rate is an argument of every step."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        assignments: Sequence[Assignment],
        recipe: OptimRecipe,
        make_muon: Callable[..., Muon] = Muon,
    ) -> None:
        """weights: name -> float32 leaf with `.grad`; assignments: from `groups.assign_all`;
        make_muon: takes what `Muon` takes, for weights of which not all rows are here."""
        self.recipe = recipe
        by_kind: dict[str, list[Assignment]] = {"muon": [], "matrix": [], "embed": [], "plain": []}
        for assignment in assignments:
            by_kind[assignment.kind].append(assignment)
        on_gpu = any(w.is_cuda for w in weights.values())
        self.muon = make_muon(
            [MuonParameter(a.name, weights[a.name], a.rows) for a in by_kind["muon"]],
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            steps=recipe.newton_schulz_steps,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
        self.adamw = {
            kind: AdamW(
                {a.name: weights[a.name] for a in by_kind[kind]},
                betas=recipe.adam_betas,
                eps=recipe.adam_eps,
                weight_decay=recipe.weight_decay if kind != "plain" else 0.0,
                lr_scale=recipe.embed_lr_scale if kind == "embed" else 1.0,
            )
            for kind in ("matrix", "embed", "plain")
        }

    def step(self, lr: float) -> None:
        """One update of every weight from its `.grad`."""
        self.muon.step(lr)
        for group in self.adamw.values():
            group.step(lr)

    def state(self) -> dict[str, Tensor]:
        """`muon.NAME`, `adam.m.NAME`, `adam.v.NAME`, `adam.t.GROUP` -> tensor; not copies."""
        tensors = {f"muon.{name}": buffer for name, buffer in self.muon.state().items()}
        for kind, group in self.adamw.items():
            tensors |= {f"adam.{name}": t for name, t in group.state().items()}
            tensors[f"adam.t.{kind}"] = group.count
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
