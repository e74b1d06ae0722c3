"""What the verbs that let a model speak share: opening it, and its words as they come."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.errors import CheckpointError, ConfigError, DataError, InputError
from openk3.obs.progress import Progress
from openk3.text.special_tokens import END_OF_MSG, EOS

if TYPE_CHECKING:
    from openk3.checkpoint.experts import CacheStats
    from openk3.model.k3 import K3
    from openk3.text.image import ImageInputs
    from openk3.text.tokenizer import Tokenizer

Say = Callable[[str], object]


@dataclass(frozen=True)
class Speaker:
    """A model, its tokenizer, and the folder they came from.

    Raises DataError for a tokenizer with ids that the model has no row for.
    """

    model: "K3"
    tokenizer: "Tokenizer"
    folder: Path

    def __post_init__(self) -> None:
        rows, num_ids = self.model.config.vocab_size, self.tokenizer.vocab_size
        if num_ids > rows:
            raise DataError(
                f"{self.folder}: its tokenizer has {num_ids} ids, config.json a vocab_size of "
                f"{rows}: the tokenizer is of another vocabulary"
            )

    def look(self, paths: Sequence[Path]) -> "ImageInputs":
        """Prepare pictures as this model wants them.

        Raises DataError naming a bad one, ConfigError for a preprocessor of another model.
        """
        from openk3.model.media import require_vision
        from openk3.text.image import CONFIG_NAME, ImageProcessor

        vision = require_vision(self.model.config)
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_kernel_size[0]}
        processor = ImageProcessor.load(self.folder, **sizes)
        for name, size in sizes.items():
            if getattr(processor, name) != size:
                raise ConfigError(
                    f"{self.folder / CONFIG_NAME}: {name} is {getattr(processor, name)}, the "
                    f"model's vision_config says {size}"
                )
        return processor(paths)

    def stream_stats(self) -> "CacheStats | None":
        """Counts of the expert cache, if experts are streamed."""
        from openk3.checkpoint.experts import stream_stats

        return stream_stats(self.model)

    def complete(
        self,
        ids: list[int],
        options: Namespace,
        say: Callable[[str], object],
        images: "ImageInputs | None" = None,
    ) -> list[int]:
        """Continue `ids`, in which one media id stands for each of `images`.

        `say` receives the text as soon as it is whole. Returns the new ids.
        """
        decoder = self.tokenizer.stream_decoder(skip_special=True)
        new: list[int] = []

        def take(token_id: int) -> None:
            new.append(token_id)
            say(decoder.feed(token_id))

        # a text begins after an end-of-text token, as in training
        self.stream(ids or [self.tokenizer.eos_id], options, take, images)
        say(decoder.finish())
        return new

    def stream(
        self,
        ids: list[int],
        options: Namespace,
        take: Callable[[int], None],
        images: "ImageInputs | None" = None,
    ) -> None:
        """`complete`, but `take` receives the ids one by one."""
        import torch

        special, config = self.tokenizer.special_tokens, self.model.config
        stops = {
            config.eos_token_id,
            *(special[name] for name in (EOS, END_OF_MSG) if name in special),
        }
        place = self.model.lm_head.weight.device
        seen = {}
        if images is not None:
            seen["pixel_values"] = torch.from_numpy(images.pixel_values).to(place)
            seen["grid_thws"] = torch.from_numpy(images.grid_thws).to(place)
        self.model.generate(
            torch.tensor([ids], device=place),
            **seen,
            max_new_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop_ids=sorted(stops),
            on_token=lambda step_ids: take(int(step_ids[0])),
        )


def add_options(parser: ArgumentParser, max_tokens: int | None) -> None:
    """The model and how it speaks. max_tokens None leaves that default to the verb."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder or a model folder")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest")
    parser.add_argument("--top-p", type=float, default=0.95, help="keep this much probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--expert-cache-gb", type=float, metavar="GB",
                        help="leave the experts of a model folder on disk, behind a cache of so "
                        "many 10^9 bytes, so that the model may be larger than memory")  # fmt: skip


def open_speaker(
    path: Path, device: str = "auto", dtype: str = "auto", expert_cache_gb: float | None = None
) -> Speaker:
    """The model in a run folder, in one of its checkpoints, or in a published-format folder.

    With expert_cache_gb the experts of a published-format folder are streamed from disk. Raises
    CheckpointError or DataError saying what is missing.
    """
    import torch

    from openk3.checkpoint.trained import is_training_output, load_trained
    from openk3.parallel.world import pick_device
    from openk3.text.tokenizer import load as load_tokenizer

    place = pick_device(device)
    name = dtype if dtype != "auto" else ("bfloat16" if place.type == "cuda" else "float32")
    kind = getattr(torch, name)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; train a model with k3 quickstart first")
    if is_training_output(path):
        if expert_cache_gb is not None:
            raise InputError(
                f"{path} is a training run, whose experts cannot be streamed; convert it first: "
                f"k3 convert {path} FOLDER"
            )
        trained = load_trained(path, device=place, dtype=kind)
        home = path if (path / "checkpoints").is_dir() else path.parent.parent
        return Speaker(trained.model, load_tokenizer(home), home)
    from openk3 import checkpoint

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    with Progress(size, "loading", "B") as bar:
        model = checkpoint.load(
            path,
            device=place,
            dtype=kind,
            experts="dequant" if expert_cache_gb is None else "stream",
            expert_cache_gb=expert_cache_gb,
            progress=bar.advance,
        )
    return Speaker(model, load_tokenizer(path), path)
