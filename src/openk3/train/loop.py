"""The pre-training loop, for one process or for the processes of torchrun.

    every step      take the next rows, one optimizer step, one metrics row, one console line
    now and then    evaluate on held-out documents, sample text, look inside, save a checkpoint
    at the end      all of these once more

All state is in the checkpoint, and every random choice is a pure function of (seed, step, rank), so
a run that was killed and resumed computes, bit for bit, what it would have computed unharmed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from openk3._io import derive_seed
from openk3.checkpoint.training import Checkpoint, CheckpointFolder
from openk3.config.recipe import Recipe
from openk3.data.loader import Batch, Loader
from openk3.errors import DivergedError
from openk3.optim.schedule import cosine
from openk3.train.evaluate import Evaluation, evaluate
from openk3.train.interrupt import StopWish
from openk3.train.journal import Journal
from openk3.train.observe import Observer
from openk3.train.step import Stepper

if TYPE_CHECKING:
    from openk3.checkpoint.sharded import ShardedFolder

Sampler = Callable[[int], Iterable[tuple[str, str]]]
"""step -> (prompt, continuation) pairs."""


@dataclass
class Progress:
    """Counters of a run over all attempts."""

    step: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Trainer:
    """A run in motion. `checkpoints` and the journal's run are the first process's; of a sharded
    run every process has `sharded` instead, and `sampler`, because it takes all to sample."""

    recipe: Recipe
    stepper: Stepper
    loader: Loader
    journal: Journal
    deciding: dict[str, Any]
    """What a checkpoint must have been made with."""
    eval_batches: Callable[[int], Iterator[Batch]]
    """Held-out batches of about so many tokens, 0 for all."""
    sampler: Sampler | None = None
    checkpoints: CheckpointFolder | None = None
    sharded: "ShardedFolder | None" = None
    stop: StopWish = field(default_factory=StopWish)
    progress: Progress = field(default_factory=Progress)
    last_evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        self.world = self.stepper.world
        self.model = self.stepper.model
        self.observer = Observer(self.model, self.world)
        self._saved_step = self.progress.step

    def fit(self) -> bool:
        """Train to the last step, or until asked to stop; True when the last step is done.

        Raises DivergedError after too many bad steps in a row, StorageError when the disk is full.
        """
        self.prepare()
        while not self.finished:
            if self._asked_to_stop():
                self.save()
                self._settle()
                self._event("interrupt", f"stopped after step {self.progress.step}")
                return False
            self.take_step()
            self._now_and_then()
        self.save()
        self._settle()
        self._event("done", f"step {self.progress.step}")
        return True

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.progress.step >= self.recipe.train.steps

    def prepare(self) -> None:
        """Put the model into training mode."""
        self.model.train()
        self.model.track_max_logits()

    def take_step(self) -> None:
        """One optimizer step on the next rows, and its row and line."""
        progress = self.progress
        self.world.pulse.at("data", progress.step + 1)
        started = time.perf_counter()
        seed = derive_seed(self.recipe.train.seed, "step", progress.step, self.world.rank)
        torch.manual_seed(seed)
        batches = [next(self.loader).to(self.world.device) for _ in range(self.num_micro)]
        step = progress.step + 1
        lr = self.learning_rate(step)
        watched = step == 1 or _due(self.recipe.run.observe_every, step)
        result = self.stepper(
            batches,
            lr,
            probe=self.observer.probe if watched else None,
            before_update=self.observer.add_load,
        )
        seconds = time.perf_counter() - started
        progress.step = step
        progress.tokens += result.num_positions
        progress.flops += result.num_positions * self.journal.flops_per_token
        progress.seconds += seconds
        self.journal.step(result, lr, seconds, self.axes())
        self._give_up_if_diverged()

    @property
    def num_micro(self) -> int:
        """Micro-batches of one process per step."""
        share = self.recipe.train.batch_sequences // self.world.size
        return share // self.loader.batch_rows

    def learning_rate(self, step: int) -> float:
        """Of the 1-based `step`."""
        optim = self.recipe.optim
        return cosine(
            step,
            self.recipe.train.steps,
            peak=optim.lr,
            warmup_fraction=optim.warmup_fraction,
            final_fraction=optim.final_lr_fraction,
        )

    def _give_up_if_diverged(self) -> None:
        try:
            self.stepper.guard.check()
        except DivergedError as error:
            self._event("diverged", str(error))
            raise

    @property
    def paused(self) -> bool:
        """Whether the recipe says to stop here."""
        return 0 < self.recipe.run.stop_after <= self.progress.step

    def _asked_to_stop(self) -> bool:
        if self.paused:
            return True
        wish = torch.tensor([int(bool(self.stop))], device=self.world.device)
        return bool(self.world.max(wish).item())

    def _now_and_then(self) -> None:
        run, step, last = self.recipe.run, self.progress.step, self.finished
        if run.observe_every and (_due(run.observe_every, step) or last or step == 1):
            for row in self.observer.rows(**self.axes()):
                self.journal.write(row)
        if self.recipe.data.eval_split and (_due(run.eval_every, step) or last):
            self.evaluate(run.final_eval_tokens if last else run.eval_tokens)
        if self.sampler is not None and (_due(run.sample_every, step) or last):
            self.world.pulse.at("sample")
            for prompt, text in self.sampler(step):
                self.journal.sample(prompt, text, self.axes())
        self.stepper.masters.release()
        if self.sharded is not None:
            self._written(self.sharded.finished())
        if _due(run.checkpoint_every, step) and not last:
            self.save()

    def evaluate(self, max_tokens: int) -> Evaluation:
        """Score held-out documents, all if `max_tokens` is 0, and write a row."""
        started = time.perf_counter()
        found = evaluate(self.model, self.eval_batches(max_tokens), self.world)
        self.progress.seconds += time.perf_counter() - started
        self.journal.evaluation(self.recipe.data.eval_split, found, self.axes())
        self.last_evaluation = found
        return found

    def save(self) -> None:
        """Write a checkpoint of this step, or begin to, once. Every process must call this."""
        step = self.progress.step
        if step == self._saved_step:
            return
        self._saved_step = step
        self.world.pulse.at("checkpoint")
        if self.sharded is not None:
            boxes = self.stepper.masters.boxes(self.stepper.optimizer)
            self._written(self.sharded.save(step, boxes, self.deciding, self.loop_state()))
            return
        if self.checkpoints is not None:
            self._written(self.checkpoints.save(self.checkpoint()))
        self.world.barrier()

    def _settle(self) -> None:
        """Wait until what was begun is whole."""
        if self.sharded is not None:
            self._written(self.sharded.wait())
            self.world.barrier()

    def _written(self, path: Path | None) -> None:
        if path is not None:
            self._event("checkpoint", str(path))

    def checkpoint(self) -> Checkpoint:
        """Everything the next step depends on."""
        stepper = self.stepper
        return Checkpoint(
            step=self.progress.step,
            tensors={"model": stepper.masters.state(), "optimizer": stepper.optimizer.state()},
            deciding=self.deciding,
            loop=self.loop_state(),
        )

    def loop_state(self) -> dict[str, Any]:
        """The small state: model config, data position, guard, counters."""
        return {
            "model": self.model.config.to_hf(),
            "position": self.loader.position,
            "guard": self.stepper.guard.state(),
            "progress": self.axes(),
        }

    def restore_tensors(self, saved: Checkpoint) -> None:
        """Weights and optimizer state of a checkpoint. Raises CheckpointError on a misfit."""
        self.stepper.masters.load_state(saved.tensors["model"])
        self.stepper.optimizer.load_state(saved.tensors["optimizer"])

    def restore_loop(self, loop: Mapping[str, Any]) -> None:
        """The small state of a checkpoint: data position, guard, counters."""
        self.stepper.guard.load_state(loop["guard"])
        self.loader.position = loop["position"]
        self.progress = Progress(**loop["progress"])
        self._saved_step = self.progress.step

    def axes(self) -> dict[str, Any]:
        """The x-axes that every metrics row carries."""
        return vars(self.progress).copy()

    def _event(self, what: str, detail: str) -> None:
        self.journal.event(what, detail, self.axes())


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
