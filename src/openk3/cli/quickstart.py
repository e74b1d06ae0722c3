"""`k3 quickstart`: from nothing to a small Kimi K3 that was trained here, in one command.

Text that is on the machine -> tokenizer and shards -> training -> report, samples and held-out bits
per byte beside those of n-grams and xz on the same text -> what to type next. Interrupted, the same
command goes on where it stopped.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openk3.cli import common
from openk3.config.load import load
from openk3.config.recipe import Recipe
from openk3.errors import ConfigError

if TYPE_CHECKING:
    from openk3.data.dataset import Dataset
    from openk3.train.loop import Trainer

RECIPE = Path("recipes/quickstart.toml")
CORPUS_MB = 10.0
HELD_OUT = 0.02
MIN_STEPS, MAX_STEPS = 20, 20_000
OURS = "Kimi K3"


def main(argv: list[str]) -> int:
    """Run `k3 quickstart`. Returns the exit code: 130 when asked to stop."""
    options = _parse(argv)
    common.use_threads(options.threads)
    started = time.monotonic()
    recipe = _recipe(options)
    say = _quiet if options.json else _say
    say("1/4  text from this machine -> tokenizer and token shards")
    dataset = _data(recipe, options.corpus_mb)
    say(_describe(dataset))
    recipe, resume = _plan(recipe, options, say)
    trainer = _train(recipe, resume)
    if not trainer.finished:
        sys.stderr.write(f"stopped after step {trainer.progress.step}; go on with: k3 quickstart\n")
        return 130
    from openk3.ops.native.build import build_later

    compiler = build_later()  # k3 generate and k3 chat, which come next, are then fast at once
    say("3/4  the same text for n-grams and xz")
    facts: dict[str, Any] = _results(trainer, dataset) | {
        "seconds": round(time.monotonic() - started, 1)
    }
    say("4/4  report")
    _keep_baselines(Path(recipe.run.folder), facts["bits_per_byte"])
    facts["files"] = [str(path) for path in _report(Path(recipe.run.folder))]
    if compiler:
        compiler.join()
    sys.stdout.write(common.json_text(facts) if options.json else _render(facts, recipe))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = common.parser(
        "quickstart", "Train a small Kimi K3 on text from this machine, then let it speak."
    )
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPE, metavar="RECIPE")
    minutes = "time for training; the number of steps follows from a measured speed (default: 5)"
    parser.add_argument("--minutes", type=float, default=5.0, help=minutes)
    steps = "train for so many steps instead"
    parser.add_argument("--steps", type=common.positive, metavar="N", help=steps)
    parser.add_argument("--folder", metavar="RUN", help="run folder (default: the recipe's)")
    parser.add_argument("--data", metavar="FOLDER", help="dataset folder (default: the recipe's)")
    corpus = f"size of the corpus (default: {CORPUS_MB:g})"
    parser.add_argument("--corpus-mb", type=float, default=CORPUS_MB, metavar="MB", help=corpus)
    common.add_threads(parser)
    common.add_json(parser)
    return parser.parse_args(argv)


def _recipe(options: argparse.Namespace) -> Recipe:
    path = options.recipe
    if not path.is_file() and not path.is_absolute():
        path = Path(__file__).parents[3] / path  # a clone that is used from elsewhere
    flags = [f"--run.folder={options.folder}"] if options.folder else []
    flags += [f"--data.train={options.data}"] if options.data else []
    recipe = load(Recipe, [path], flags)
    if len(recipe.data.train) != 1 or not recipe.run.folder:
        raise ConfigError(f"{path} must name one dataset (data.train) and a run.folder")
    return recipe


def _data(recipe: Recipe, corpus_mb: float) -> "Dataset":
    """The dataset, built unless it is there."""
    from openk3.data.build import build
    from openk3.data.corpus import LocalCorpus
    from openk3.data.dataset import Dataset

    path = Path(recipe.data.train[0])
    if path.exists():
        return Dataset(path)
    return build(
        LocalCorpus(int(corpus_mb * 1e6)),
        path,
        vocab_size=recipe.model.vocab_size,
        held_out=HELD_OUT,
        note="Python sources of this machine",
    )


def _describe(dataset: "Dataset") -> str:
    parts = [
        f"{s.num_documents:,} {name} documents, {s.num_bytes / 1e6:.2f} MB"
        for name, s in sorted(dataset.splits.items(), reverse=True)
    ]
    return f"     {dataset.path}: {'; '.join(parts)}; vocabulary {dataset.vocab_size:,}"


def _plan(recipe: Recipe, options: argparse.Namespace, say: Any) -> tuple[Recipe, bool]:
    """The recipe with its number of steps, and whether a run of it is there to go on with."""
    from openk3.config.load import from_dict
    from openk3.obs.run import is_run, read_config

    folder = Path(recipe.run.folder)
    if is_run(folder):
        say(f"2/4  going on with the run in {folder}")
        return from_dict(Recipe, read_config(folder)["config"], str(folder)), True
    steps = options.steps or _steps_for(recipe, options.minutes * 60)
    say(f"2/4  training {steps} steps of {_step_tokens(recipe):,} tokens in {folder}")
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=steps)), False


def _step_tokens(recipe: Recipe) -> int:
    return recipe.train.batch_sequences * recipe.data.sequence_tokens


def _steps_for(recipe: Recipe, seconds: float) -> int:
    """How many steps this machine does in `seconds`, by trying a few."""
    from openk3.parallel.world import World, pick_device
    from openk3.train.measure import seconds_per_step
    from openk3.train.setup import build_trainer
    from openk3.train.sources import open_data

    trial = build_trainer(recipe, open_data(recipe), World(device=pick_device(recipe.run.device)))
    return max(MIN_STEPS, min(MAX_STEPS, int(seconds / seconds_per_step(trial))))


def _train(recipe: Recipe, resume: bool) -> "Trainer":
    from openk3.cli.pretrain import train

    return train(recipe, Path(recipe.run.folder), resume=resume)


def _results(trainer: "Trainer", dataset: "Dataset") -> dict[str, Any]:
    """Held-out bits per byte of the model and of what it must beat, and what it writes."""
    from openk3.data.baselines import bits_per_byte, texts
    from openk3.data.rows import Windows
    from openk3.obs.metrics import read_rows
    from openk3.text.tokenizer import load as load_tokenizer

    recipe, folder = trainer.recipe, Path(trainer.recipe.run.folder)
    rows = read_rows(folder / "metrics.jsonl")
    score = [r for r in rows if r["kind"] == "eval"][-1]
    tokenizer = load_tokenizer(folder)
    windows = Windows(dataset.split("train"), recipe.data.sequence_tokens, recipe.data.seed)
    seen = texts(dataset.split("train"), tokenizer, windows.seen(trainer.loader.position))
    held_out = texts(dataset.split(recipe.data.eval_split), tokenizer)
    samples = [r for r in rows if r["kind"] == "sample" and r["step"] == trainer.progress.step]
    return {
        "steps": trainer.progress.step,
        "tokens": trainer.progress.tokens,
        "training_seconds": round(trainer.progress.seconds, 1),
        "tokens_per_s": trainer.progress.tokens / trainer.progress.seconds,
        "seen_bytes": sum(map(len, seen)),
        "held_out_bytes": score["num_bytes"],
        "bits_per_byte": {OURS: score["bits_per_byte"]} | bits_per_byte(seen, held_out),
        "samples": [{"prompt": s["prompt"], "text": s["text"]} for s in samples],
    }


def _keep_baselines(folder: Path, scores: dict[str, float]) -> None:
    """Write the other methods' scores beside the model's, once; the report draws them."""
    from openk3.obs.metrics import MetricsWriter, read_rows
    from openk3.obs.rows import BaselineRow

    path = folder / "metrics.jsonl"
    rows = read_rows(path)
    if any(row["kind"] == BaselineRow.kind for row in rows):
        return
    last = [row for row in rows if row["kind"] == "step"][-1]
    place = {name: last[name] for name in ("step", "tokens", "flops", "seconds")}
    writer = MetricsWriter(path)
    for name, score in scores.items():
        if name != OURS:
            writer.write(BaselineRow(**place, name=name, bits_per_byte=score))
    writer.close()


def _report(folder: Path) -> list[Path]:
    from openk3.report import write_report

    return write_report(folder)


def _render(facts: dict[str, Any], recipe: Recipe) -> str:
    folder = recipe.run.folder
    scores = sorted(facts["bits_per_byte"].items(), key=lambda item: item[1])
    lines = [
        "",
        f"{facts['steps']:,} steps, {facts['tokens']:,} tokens in "
        f"{facts['training_seconds']:,.0f} s ({facts['tokens_per_s']:,.0f} tokens/s); "
        f"everything took {facts['seconds']:,.0f} s",
        "",
        f"bits per byte on {facts['held_out_bytes']:,} held-out bytes, after "
        f"{facts['seen_bytes']:,} bytes of training text",
        common.table([(name, f"{value:.4f}") for name, value in scores]),
    ]
    for sample in facts["samples"]:
        lines += ["", "-" * 72, sample["prompt"] + sample["text"]]
    data = recipe.data.train[0]
    commands = [
        (str(facts["files"][0]), "how it learned, in pictures"),
        (f'k3 generate {folder} "def "', "let it write"),
        (f"k3 chat {folder}", "write together"),
        (f"k3 pretrain recipes/nano.toml --data.train {data}", "train it longer"),
        ("k3 inspect nano", "what it is made of"),
    ]
    lines += ["-" * 72, "", "what next:", common.table(commands, left=(0, 1))]
    return "\n".join(lines) + "\n"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _quiet(line: str) -> None:
    pass
