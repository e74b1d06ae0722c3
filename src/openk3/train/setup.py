"""From a recipe to a Trainer that is ready to fit: checks first, then data, weights, resume."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from openk3._io import atomic_file, derive_seed, require_disk
from openk3.checkpoint.training import CheckpointFolder, require_same
from openk3.config.check import differences
from openk3.config.dump import to_dict
from openk3.config.load import from_dict
from openk3.config.recipe import Recipe, flatten
from openk3.config.sizes import training_flops_per_token
from openk3.data.dataset import Dataset
from openk3.data.loader import Loader
from openk3.data.pictures import has_pictures
from openk3.errors import ConfigError, StorageError
from openk3.model.k3 import K3
from openk3.obs import log, sinks
from openk3.obs.run import RunFolder, is_run, read_config
from openk3.optim.groups import assign_all
from openk3.optim.optimizer import Optimizer
from openk3.parallel.layout import resolve
from openk3.parallel.watchdog import watched
from openk3.parallel.world import World, pick_dtype
from openk3.text.image import CONFIG_NAME as IMAGE_CONFIG
from openk3.text.tokenizer import Tokenizer
from openk3.text.tokenizer import load as load_tokenizer
from openk3.train.begin import go_on, start_from, wait_for_folder
from openk3.train.guard import Guard
from openk3.train.journal import Journal
from openk3.train.loop import Sampler, Trainer
from openk3.train.masters import Masters
from openk3.train.memory import peak_flops
from openk3.train.sources import Data, held_out, open_data, with_special_ids
from openk3.train.step import Loss, Stepper, next_token_loss

OWN = {"folder", "device", "threads", "trackers"}
"""Fields of [run] that a process may have for itself; by the others it meets its peers."""


def deciding(recipe: Recipe, data: Data) -> dict[str, Any]:
    """Everything that decides the computed numbers, flat and JSON-ready."""
    return recipe.deciding() | {"data.fingerprint": data.fingerprint}


def build_trainer(
    recipe: Recipe, data: Data, world: World, *, loss: Loss = next_token_loss
) -> Trainer:
    """A Trainer at step 0 that writes nothing yet. Raises ConfigError."""
    batch_rows = micro_rows(recipe, world.size)
    if is_sharded(recipe, world):
        from openk3.train.sharded import build_sharded  # FSDP takes seconds to import

        masters, optimizer = build_sharded(recipe, world)
    else:
        masters, optimizer = build_whole(recipe, world)
    stepper = Stepper(
        model=masters.model,
        masters=masters,
        optimizer=optimizer,
        guard=Guard(recipe.train.spike_nats, recipe.train.max_bad_steps),
        recipe=recipe.optim,
        world=world,
        loss=loss,
    )
    peak = peak_flops(world.device)
    return Trainer(
        recipe=recipe,
        stepper=stepper,
        loader=Loader(data.source, batch_rows, rank=world.rank, world_size=world.size),
        journal=Journal(
            recipe.train.steps,
            world.device,
            training_flops_per_token(recipe.model, recipe.data.sequence_tokens),
            peak * world.size if peak else None,
        ),
        deciding=deciding(recipe, data),
        eval_batches=lambda max_tokens: held_out(recipe, data, world, max_tokens),
    )


def micro_rows(recipe: Recipe, world_size: int) -> int:
    """Sequences of one forward pass of one process. Raises ConfigError when shares are uneven."""
    batch, micro = recipe.train.batch_sequences, recipe.train.micro_sequences
    if batch % world_size:
        raise ConfigError(
            f"train.batch_sequences ({batch}) must be a multiple of the {world_size} processes"
        )
    share = batch // world_size
    micro = micro or share
    if share % micro:
        raise ConfigError(
            f"train.micro_sequences ({micro}) must divide a process's share of {share} sequences"
        )
    return micro


def is_sharded(recipe: Recipe, world: World) -> bool:
    """Whether the processes share the state; one alone holds it whatever `parallel.zero` says.

    Raises ConfigError for a layout that this number of processes cannot have.
    """
    return recipe.parallel.zero > 0 and resolve(recipe.parallel, world.size).world > 1


def build_whole(recipe: Recipe, world: World) -> tuple[Masters, Optimizer]:
    """Model, weights and optimizer of which every process holds everything."""
    model = K3(recipe.model, seed=recipe.train.seed).to(world.device)
    masters = Masters(model, pick_dtype(recipe.train.compute_dtype, world.device))
    world.copy_from_main(masters.weights.values())
    masters.publish()
    assignments = assign_all(masters.weights.items(), recipe.model)
    return masters, Optimizer(masters.weights, assignments, recipe.optim)


def make_sampler(
    recipe: Recipe, model: K3, tokenizer: Tokenizer, *, in_step: bool = False
) -> Sampler:
    """Continue the recipe's prompts; the seed depends on the step only.

    in_step: always make `sample_tokens` forward passes, because other processes do.
    """
    settings, eos = recipe.run, tokenizer.eos_id

    def sample(step: int) -> Iterator[tuple[str, str]]:
        for i, prompt in enumerate(settings.sample_prompts):
            ids = torch.tensor([tokenizer.encode(prompt)], device=model.lm_head.weight.device)
            out = model.generate(
                ids,
                max_new_tokens=settings.sample_tokens,
                temperature=0.7,
                top_p=0.95,
                seed=derive_seed(recipe.train.seed, "sample", step, i),
                stop_ids=[] if in_step else [eos],
            )
            said = out[0, ids.shape[1] :].tolist()
            said = said[: said.index(eos)] if eos in said else said
            yield prompt, tokenizer.decode(said, skip_special=True)

    return sample


def disk_bytes(trainer: Trainer) -> int:
    """What a run writes at most: checkpoints kept, one being written, and its rows."""
    one = trainer.stepper.masters.num_bytes(trainer.stepper.optimizer)
    steps, run = trainer.recipe.train.steps, trainer.recipe.run
    kept = run.keep_checkpoints or steps // max(1, run.checkpoint_every) + 1
    return one * (kept + 1) + steps * 1000 + (16 << 20)


@contextmanager
def training(
    recipe: Recipe,
    folder: str | Path,
    world: World,
    *,
    resume: bool = False,
    loss: Loss = next_token_loss,
) -> Iterator[Trainer]:
    """A Trainer in the run folder `folder`, at its newest whole checkpoint when `resume` is given.

    Every process must call this; the first one decides, reads and writes for all. Raises
    StorageError when the folder holds anything and `resume` is not given, CheckpointError when the
    run in it was made with other settings; then nothing there has changed. Raises LostProcessError,
    here and where the Trainer is used, when another process is gone.
    """
    folder = Path(folder)
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=recipe.run.keep_checkpoints)
    with watched(world, recipe.run.hang_seconds), ExitStack() as at_end:
        world.pulse.at("opening the data")
        data = open_data(recipe)
        recipe = with_special_ids(recipe, data.datasets[0])
        require_alike(recipe, data, world)
        resume = world.on_main(lambda: check_folder(recipe, folder, resume))
        world.pulse.at("building the model")
        trainer = build_trainer(recipe, data, world, loss=loss)
        sharded = is_sharded(recipe, world)
        resumed = resume and go_on(trainer, checkpoints, sharded=sharded)
        if recipe.train.start_from and not resumed:
            start_from(trainer, data.datasets[0], sharded=sharded)
        world.pulse.at("opening the run folder")
        if sharded:
            _share_in(trainer, data, checkpoints)

        def open_folder() -> str:
            require_disk(folder, disk_bytes(trainer), "this run with its checkpoints")
            run = at_end.enter_context(_open_folder(trainer, folder, resume))
            _begin_writing(trainer, data, checkpoints, run)
            return run.id

        run_id = world.on_main(open_folder)
        if sharded:
            wait_for_folder(folder, run_id)
        yield trainer


def require_alike(recipe: Recipe, data: Data, world: World) -> None:
    """Raises ConfigError on a process that was started otherwise than the first one."""
    run = {name: value for name, value in asdict(recipe.run).items() if name not in OWN}
    shared = {"parallel": asdict(recipe.parallel), "train": asdict(recipe.train), "run": run}
    mine = flatten(shared) | deciding(recipe, data)
    if odd := differences(world.share(mine), mine):
        raise ConfigError(f"rank {world.rank} was started otherwise than rank 0: {odd}")


def check_folder(recipe: Recipe, folder: Path, resume: bool) -> bool:
    """Whether to go on with the run in a folder. Refuses a folder that this run must not write to,
    and trackers that are not installed, before any work is done."""
    sinks.require(recipe.run.trackers)
    resume = resume and is_run(folder)
    if resume:
        there = from_dict(Recipe, read_config(folder)["config"], str(folder / "config.json"))
        require_same(folder, there.deciding(), recipe.deciding())
    elif is_run(folder):
        raise StorageError(
            f"{folder} already holds a run: pass --resume auto to go on with it, or choose another "
            "folder with --run.folder"
        )
    return resume


def _share_in(trainer: Trainer, data: Data, checkpoints: CheckpointFolder) -> None:
    """Give every process of a sharded run its part in saving and sampling."""
    from openk3.checkpoint.sharded import ShardedFolder

    trainer.sharded = ShardedFolder(checkpoints)
    if path := data.datasets[0].tokenizer_path:
        tokenizer = load_tokenizer(path)
        trainer.sampler = make_sampler(trainer.recipe, trainer.model, tokenizer, in_step=True)


def _begin_writing(
    trainer: Trainer, data: Data, checkpoints: CheckpointFolder, run: RunFolder
) -> None:
    """Give the first process what only it writes."""
    run.add_sinks(sinks.make(trainer.recipe.run.trackers, run.path, run.id, run.config))
    log.setup(run.log_path)
    for sentence in checkpoints.passed_over:
        log.get("train").warning("passed over a checkpoint: %s", sentence)
    checkpoints.sweep()
    trainer.journal.run = run
    tokenizer = _keep_companions(data.datasets, run.path)
    if trainer.sharded is None:
        trainer.checkpoints = checkpoints
        if tokenizer:
            trainer.sampler = make_sampler(trainer.recipe, trainer.model, tokenizer)


def _open_folder(trainer: Trainer, folder: Path, resume: bool) -> RunFolder:
    facts = {"processes": trainer.world.size, "device": str(trainer.world.device)}
    if resume:
        return RunFolder.resume(folder, trainer.progress.step, **facts)
    return RunFolder.create(folder, to_dict(trainer.recipe), **facts)


def _keep_companions(datasets: list[Dataset], folder: Path) -> Tokenizer | None:
    """Copy the data's tokenizer, and how its pictures were prepared, beside the checkpoints, so
    that the run can speak and see by itself."""
    for dataset in filter(has_pictures, datasets[::-1]):
        _copy(dataset.path / IMAGE_CONFIG, folder)
    path = datasets[0].tokenizer_path
    return None if path is None else load_tokenizer(_copy(path, folder))


def _copy(path: Path, folder: Path) -> Path:
    kept = folder / path.name
    if not kept.exists():
        with atomic_file(kept) as handle:
            handle.write(path.read_bytes())
    return kept
