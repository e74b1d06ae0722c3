"""Where a run begins: at its newest checkpoint, or with the weights of another model."""

import time
from pathlib import Path

from openk3.checkpoint.training import CheckpointFolder, read, read_state, require_same
from openk3.data.dataset import Dataset
from openk3.errors import ConfigError, StorageError
from openk3.obs.run import is_run, read_config
from openk3.text.tokenizer import load as load_tokenizer
from openk3.text.tokenizer_files import JSON_NAME, RANKS_NAME
from openk3.train.loop import Trainer

PATIENCE_S = 30.0
"""Time for a new file to be seen by other machines of one network file system."""


def go_on(trainer: Trainer, checkpoints: CheckpointFolder, *, sharded: bool) -> bool:
    """Bring every process to the newest whole checkpoint; False: there is none, it starts over."""
    world, stepper = trainer.world, trainer.stepper
    world.pulse.at("reading the checkpoint")

    def newest() -> Path | None:
        path = checkpoints.latest()
        if path is not None:
            require_same(path, read_state(path)["deciding"], trainer.deciding)
        return path

    path = world.on_main(newest)
    if path is None:
        return False
    if sharded:
        from openk3.checkpoint.sharded import fill

        fill(path, stepper.masters.boxes(stepper.optimizer))
    else:
        world.on_main(lambda: trainer.restore_tensors(read(path)))
        world.copy_from_main(
            [*stepper.masters.state().values(), *stepper.optimizer.state().values()]
        )
        stepper.masters.publish()
    trainer.restore_loop(world.on_main(lambda: read_state(path)["loop"]))
    return True


def start_from(trainer: Trainer, data: Dataset, *, sharded: bool) -> None:
    """Give every process its part of the weights that the recipe starts from.

    Raises ConfigError for another model, and for one whose tokenizer is not that of the data.
    """
    from openk3.checkpoint.sharded import Box
    from openk3.checkpoint.start import fill_weights

    world, recipe, masters = trainer.world, trainer.recipe, trainer.stepper.masters
    phase = f"reading {recipe.train.start_from}"
    world.pulse.at(phase)
    if sharded:
        boxes = masters.boxes(trainer.stepper.optimizer)["model"]
    else:
        boxes = {name: Box.whole(tensor) for name, tensor in masters.state().items()}
    home = fill_weights(recipe.train.start_from, recipe.model, boxes, lambda: world.pulse.at(phase))
    world.on_main(lambda: require_same_tokenizer(home, data))
    masters.publish()


def require_same_tokenizer(model: Path, data: Dataset) -> None:
    """Raises ConfigError where both have a tokenizer and an id is another text in each."""
    if data.tokenizer_path is None or not any(
        (model / name).is_file() for name in (JSON_NAME, RANKS_NAME)
    ):
        return
    there, here = load_tokenizer(model), load_tokenizer(data.tokenizer_path)
    token = there.first_difference(here)
    if token is not None:
        raise ConfigError(
            f"{model} has another tokenizer than {data.path}: token {token} is "
            f"{there.token_bytes(token)!r} there and {here.token_bytes(token)!r} here; build the "
            "data with the model's (k3 data build --tokenizer)"
        )


def wait_for_folder(folder: Path, run_id: str) -> None:
    """Return when this process sees the run folder that the first one has opened.

    Raises StorageError when it does not: a checkpoint would lack what this process writes.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (is_run(folder) and read_config(folder)["id"] == run_id):
        if time.monotonic() > deadline:
            raise StorageError(
                f"{folder} is not the folder here that rank 0 writes to: with parallel.zero all "
                "processes must see one file system"
            )
        time.sleep(0.2)
