"""What the verbs that let a model speak share: opening it, and its words as they come."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.obs.progress import Progress
from openk3.text.special_tokens import END_OF_MSG, EOS

if TYPE_CHECKING:
    from openk3.checkpoint.experts import CacheStats
    from openk3.model.k3 import K3
    from openk3.text.image import ImageInputs, ImageProcessor
    from openk3.text.tokenizer import Tokenizer

Say = Callable[[str], object]


@dataclass(frozen=True)
class Speaker:
    """A model, its tokenizer, and how its pictures are prepared; None where it sees none."""

    model: "K3"
    tokenizer: "Tokenizer"
    processor: "ImageProcessor | None"

    def look(self, paths: Sequence[Path]) -> "ImageInputs":
        """Prepare pictures as this model wants them.

        Raises DataError naming a bad one, InputError for a model that sees none.
        """
        from openk3.model.media import require_vision

        require_vision(self.model.config)
        assert self.processor is not None, "a model with a vision tower has a processor"
        return self.processor(paths)

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
    """`engine.folder.open_folder`, with a progress bar for folders in the published format."""
    from openk3.engine.folder import open_folder

    open_model = partial(
        open_folder, path, device=device, dtype=dtype, expert_cache_gb=expert_cache_gb
    )
    if size := sum(file.stat().st_size for file in path.glob("*.safetensors")):
        with Progress(size, "loading", "B") as bar:
            opened = open_model(progress=bar.advance)
    else:
        opened = open_model()
    return Speaker(opened.model, opened.tokenizer, opened.processor)
