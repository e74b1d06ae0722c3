"""Ids to text as it may be sent: whole characters only, and never any of a stop string."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from openk3.errors import InputError
from openk3.text.tokenizer import Tokenizer
from openk3.text.xtml import Delta

MAX_STOPS, MAX_STOP_CHARS = 16, 256


class StopStrings:
    """Cuts a text before the first stop string that is complete.

    Held back is exactly the longest end of the text that begins a stop string. Raises InputError
    for stop strings that are empty, too long or too many.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if len(stops) > MAX_STOPS:
            raise InputError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed")
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InputError(
                    f"stop strings must have 1 to {MAX_STOP_CHARS} characters, not {stop!r:.80}"
                )
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """What may be sent now."""
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        matches = [match for match in matches if match[0] >= -match[1]]
        if matches:  # the one complete first, whatever pieces the text came in
            end, length, self.found = min(matches)
            self._held = ""
            return text[: end + length]
        cut = len(text) - self._begun(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, if no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _begun(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Reader(ABC):
    """Turns the ids of one choice into deltas; however they are cut, the deltas add up the same."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = StopStrings(stops)
        self.num_reasoning = 0
        """Ids of the think channel so far."""

    @property
    def stop(self) -> str | None:
        """The stop string that was met; what is fed later is dropped."""
        return self._stops.found

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What `ids` complete."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """What was held back, once no more ids come."""


class TextReader(Reader):
    """Plain text, as `content` deltas; special tokens and ids beyond the vocabulary give none."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        super().__init__(stops)
        self._knows = tokenizer.knows
        self._decoder = tokenizer.stream_decoder(skip_special=True)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        known = filter(self._knows, ids)
        return _content(self._stops.feed("".join(map(self._decoder.feed, known))))

    def finish(self) -> list[Delta]:
        text = self._stops.feed(self._decoder.finish())
        return _content(text + self._stops.finish())


def _content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []
