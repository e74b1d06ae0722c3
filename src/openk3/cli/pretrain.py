"""`k3 pretrain` trains a model from a recipe, alone or under torchrun; stop it at any time."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openk3.cli import common
from openk3.config.recipe import Recipe
from openk3.errors import OpenK3Error

if TYPE_CHECKING:
    from openk3.train.loop import Trainer


def main(argv: list[str]) -> int:
    """Run `k3 pretrain`. Returns the exit code: 130 when a signal asked the run to stop."""
    recipe, options = _parse(argv)
    common.use_threads(options.threads or recipe.run.threads)
    folder = run_folder(recipe, options.recipes)
    trainer = train(recipe, folder, resume=options.resume == "auto")
    code = 0 if trainer.finished or trainer.paused else 130
    if not trainer.world.is_main:
        return code
    if trainer.finished:
        facts = results(trainer, folder)
        sys.stdout.write(common.json_text(facts) if options.json else render(facts))
        return 0
    command = " ".join(["k3 pretrain", *_without_resume(argv), "--resume auto"])
    sys.stderr.write(
        f"stopped after step {trainer.progress.step} of {recipe.train.steps}; a checkpoint is in "
        f"{folder / 'checkpoints'}\ngo on with: {command}\n"
    )
    return code


def _parse(argv: list[str]) -> tuple[Recipe, argparse.Namespace]:
    parser = common.parser(
        "pretrain",
        "Train a model on token shards (k3 data build) as a recipe says.\n\n"
        "  k3 pretrain recipes/nano.toml --data.train data/mine\n"
        "  torchrun --nproc-per-node 8 -m openk3 pretrain recipes/micro.toml",
    )
    parser.add_argument(
        "--resume",
        choices=("never", "auto"),
        default="never",
        help="auto: go on from the newest checkpoint of the run folder, if it holds a run",
    )
    common.add_threads(parser)
    common.add_json(parser)
    return common.parse_recipe(parser, Recipe, argv)


def _without_resume(argv: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        if not skip and not word.startswith("--resume"):
            kept.append(word)
        skip = word == "--resume"
    return kept


def run_folder(recipe: Recipe, files: Sequence[str]) -> Path:
    """Where the run goes: as the recipe says, else runs/ and the last recipe's name."""
    if recipe.run.folder:
        return Path(recipe.run.folder)
    return Path("runs") / (Path(files[-1]).stem if files else "pretrain")


def train(recipe: Recipe, folder: Path, *, resume: bool = False) -> "Trainer":
    """Train in `folder` until the last step or until asked to stop; write the report either way."""
    from openk3.obs import log
    from openk3.parallel.world import join
    from openk3.train.interrupt import stop_on_signals
    from openk3.train.setup import training

    with (
        join(recipe.run.device, recipe.run.hang_seconds) as world,
        stop_on_signals() as stop,
        ExitStack() as at_end,
    ):
        log.setup(rank=world.rank)
        with training(recipe, folder, world, resume=resume) as trainer:
            if world.is_main:
                at_end.callback(_report, folder)
            trainer.stop = stop
            trainer.fit()
    return trainer


def _report(folder: Path) -> None:
    from openk3.obs import log
    from openk3.report import write_report

    try:
        write_report(folder, plots=False)
    except OpenK3Error as error:  # must not hide why the run ended
        log.get("train").warning("there is no report: %s", error)


def results(trainer: "Trainer", folder: Path) -> dict[str, Any]:
    """What came out, as plain data."""
    done, score = trainer.progress, trainer.last_evaluation
    return {
        "folder": str(folder),
        "steps": done.step,
        "tokens": done.tokens,
        "seconds": round(done.seconds, 3),
        "skipped_steps": trainer.stepper.guard.num_bad,
        "bits_per_byte": None if score is None else score.bits_per_byte,
        "held_out_bytes": None if score is None else score.num_bytes,
        "captions": None if score is None else score.num_captions,
        "captions_right": None if score is None else score.exact,
    }


def render(facts: dict[str, Any]) -> str:
    """The same for people, and what to do with it."""
    folder = facts["folder"]
    lines = [
        f"trained {facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds']:,.0f} s: "
        f"{folder}"
    ]
    if facts["bits_per_byte"] is not None:
        score, size = facts["bits_per_byte"], facts["held_out_bytes"]
        lines.append(f"held-out {score:.4f} bits/byte over {size:,} bytes")
    if facts["captions_right"] is not None:
        lines.append(
            f"captions {facts['captions_right']:.1%} right of {facts['captions']:,} held out"
        )
        lines += [f"look:  {folder}/report.html", f"see:   k3 generate {folder} --image FILE"]
        return "\n".join(lines) + "\n"
    lines.append(f"look:  {folder}/report.html")
    lines.append(f'talk:  k3 generate {folder} "def "    k3 chat {folder}')
    return "\n".join(lines) + "\n"
