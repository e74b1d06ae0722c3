"""Offline generation: prompts in, answers out, batched by the engine.

llm = LLM("runs/quickstart")
[answer] = llm.generate("def ", SamplingParams(max_tokens=32))
[answer] = llm.chat([{"role": "user", "content": "Hi"}])
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openk3.engine.answers import Answer, Making, OnDelta, make_all
from openk3.engine.chat import ChatReader, Prompt, Template, chat_prompt, text_prompt
from openk3.engine.choice import Choice
from openk3.engine.own_words import OwnWords
from openk3.engine.service import SteppedEngine
from openk3.engine.text_stream import Reader, TextReader
from openk3.engine.types import EngineConfig, Request, SamplingParams
from openk3.errors import InputError
from openk3.text.image import ImageProcessor
from openk3.text.special_tokens import END_OF_MSG, EOS
from openk3.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openk3.engine.folder import Form
    from openk3.model.k3 import K3


class LLM:
    """A model and its engine. Threads take turns.

    An interrupt (Ctrl-C) ends the answers that are being made, after the step under way; what was
    computed for them can be reused. A second one breaks off that step, and the cache is lost.
    """

    model: "K3 | None" = None
    """What the engine computes with; None over an engine that was given."""

    def __init__(
        self,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        experts: "Form" = "auto",
        expert_cache_gb: float | None = None,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Open a model folder; see `openk3.engine.folder.open_folder`, also for what it raises."""
        from openk3.engine.engine import Engine
        from openk3.engine.folder import open_folder

        opened = open_folder(
            path,
            device=device,
            dtype=dtype,
            experts=experts,
            expert_cache_gb=expert_cache_gb,
            progress=progress,
        )
        self.model = opened.model
        self._set(Engine(opened.model, config), opened.tokenizer, opened.processor)

    @classmethod
    def over(
        cls, engine: SteppedEngine, tokenizer: Tokenizer, processor: ImageProcessor | None = None
    ) -> "LLM":
        """An LLM over an engine that exists."""
        new = cls.__new__(cls)
        new._set(engine, tokenizer, processor)
        return new

    def _set(
        self, engine: SteppedEngine, tokenizer: Tokenizer, processor: ImageProcessor | None
    ) -> None:
        self.engine, self.tokenizer, self.processor = engine, tokenizer, processor
        self._numbers = count()
        self._last: list[tuple[Prompt, Answer]] = []
        self._turn, self._inside = threading.RLock(), False

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
        stop: str | Sequence[str] = (),
        n: int = 1,
        on_delta: OnDelta | None = None,
    ) -> list[Answer]:
        """Continue texts. An end-of-text or end-of-message token ends an answer.

        Args:
            prompts: one text, or texts, or lists of ids.
            images: pictures to look at before one text, in order (`ImageProcessor` takes them).
            stop: a string, or strings, that end an answer; they are not part of it.
            n: answers to each prompt.
            on_delta: gets the number of an answer and its text as it comes.

        Returns:
            n answers for each prompt, in order.

        Raises:
            InputError: a prompt that does not fit.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        _require_prompts(texts)
        _require_one(texts, images)
        found = []
        for text in texts:
            ids = self.tokenizer.encode(text) if isinstance(text, str) else text
            prompt = text_prompt(ids, self.tokenizer, processor=self.processor, images=images)
            found.append(prompt)
        stops = _stops(stop)
        return self._run(found, params, n, lambda _: TextReader(self.tokenizer, stops), on_delta)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
        *,
        template: Template | None = None,
        images: Sequence[Any] = (),
        stop: str | Sequence[str] = (),
        n: int = 1,
        on_delta: OnDelta | None = None,
    ) -> list[Answer]:
        """Answer conversations. A next turn of those of the last call keeps their tokens.

        Args:
            messages: one conversation, or several; OpenAI-style messages as `xtml.render` takes.
            template: tools, thinking and the like.
            images: the pictures of one conversation, in order (`ImageProcessor` takes them).

        The rest is as for `generate`.
        """
        talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
        _require_one(talks, images)
        said = [(*prompt.ids, *answer.ids) for prompt, answer in self._last]
        own_words = OwnWords(said, self.tokenizer)
        found = []
        for talk in talks:
            prompt = chat_prompt(
                talk,  # type: ignore[arg-type]
                self.tokenizer,
                template or Template(),
                processor=self.processor,
                images=images,
            )
            found.append(prompt.with_ids(own_words.restore(prompt.ids)))

        stops = _stops(stop)

        def reader(prompt: Prompt) -> Reader:
            return ChatReader(self.tokenizer, thinking=prompt.thinking, stops=stops)

        return self._run(found, params, n, reader, on_delta)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None,
        n: int,
        reader: Callable[[Prompt], Reader],
        on_delta: OnDelta | None,
    ) -> list[Answer]:
        if not isinstance(n, int) or n < 1:
            raise InputError(f"n must be an integer of at least 1, not {n!r}")
        params = self._with_ends(params or SamplingParams())
        each = [prompt for prompt in prompts for _ in range(n)]
        makings = []
        for i, prompt in enumerate(each):
            name = f"llm-{next(self._numbers)}"
            own = params if params.seed is None else replace(params, seed=params.seed + i % n)
            request = Request(name, prompt.ids, own, media=prompt.media)
            choice = Choice(i, name, reader(prompt))
            makings.append(Making(request, choice, prompt.num_tokens, on_delta))
        answers = [making.answer for making in makings]
        with self._turn:
            if self._inside:
                raise InputError("on_delta must not ask for answers while others are being made")
            self._inside, self._last = True, list(zip(each, answers, strict=True))
            try:
                make_all(self.engine, makings)
            finally:
                self._inside = False
        return answers

    def _with_ends(self, params: SamplingParams) -> SamplingParams:
        """Ending at what ends texts and messages, as far as the vocabulary has it."""
        known = self.tokenizer.special_tokens
        ends = [known[name] for name in (EOS, END_OF_MSG) if name in known]
        return params if params.ignore_eos else replace(params, stop_ids=(*params.stop_ids, *ends))


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _require_prompts(prompts: Sequence[Any]) -> None:
    """Each must be a text or a list of ids."""
    for prompt in prompts:
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not listed or not (
            isinstance(prompt, str) or all(isinstance(i, Integral) for i in prompt)
        ):
            raise InputError(f"a prompt must be a text or a list of ids, not {prompt!r}")


def _require_one(prompts: Sequence[Any], images: Sequence[Any]) -> None:
    if images and len(prompts) != 1:
        raise InputError("images belong to one prompt; give the others one by one")
