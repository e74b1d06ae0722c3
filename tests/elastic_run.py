"""What torchrun starts in test_elastic: a run whose second process dies in step 3, the first time.

torchrun ... tests/elastic_run.py DATA FOLDER
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import torch

from openk3.config.recipe import ParallelRecipe
from openk3.parallel.world import join
from openk3.train.interrupt import stop_on_signals
from openk3.train.setup import training
from tiny_run import tiny_recipe


def main(data, folder):
    torch.set_num_threads(1)
    changes = {"train__steps": 4, "train__micro_sequences": 1, "run__hang_seconds": 5}
    recipe = tiny_recipe(Path(data), **changes)
    recipe = dataclasses.replace(recipe, parallel=ParallelRecipe(zero=2, expert=2))
    with (
        stop_on_signals() as stop,
        join("cpu") as world,
        training(recipe, folder, world, resume=True) as trainer,
    ):
        trainer.stop = stop
        step = trainer.stepper.optimizer.step

        def update(lr):
            if world.rank == 1 and trainer.progress.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            step(lr)

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            trainer.stepper.optimizer.step = update
        trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
