"""How text is cut before BPE: K3's pre-tokeniser regex and its limits on very long input.

The regex is published with the vocabulary. Class intersection (`&&`) needs an engine that has it
(Oniguruma in `tokenizers`, fancy-regex in `tiktoken`, `regex` in V1 mode; not the standard `re`).
"""

import re
from collections.abc import Iterator

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

K3_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        _LEAD + _UPPER + "*" + _LOWER + "+" + _ENDING,
        _LEAD + _UPPER + "+" + _LOWER + "*" + _ENDING,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_WINDOW = MAX_RUN_CHARS // 2
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{MAX_RUN_CHARS + 1},}}|(?<!\s)\s{{{MAX_RUN_CHARS + 1},}}")


def split_long(text: str) -> Iterator[str]:
    """Cut `text` every 400,000 characters, and runs of (non-)whitespace every 25,000.

    BPE merges never cross a cut, so the cuts are part of the exact encoding; they also bound the
    time a hostile text can take. Joining the pieces gives `text` back.
    """
    for start in range(0, len(text), MAX_PIECE_CHARS):
        yield from _split_runs(text[start : start + MAX_PIECE_CHARS])


def _split_runs(text: str) -> Iterator[str]:
    start = 0
    if _may_have_long_run(text):
        for run in _LONG_RUN.finditer(text):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield text[start:cut]
                start = cut
    yield text[start:]


def _may_have_long_run(text: str) -> bool:
    # A run longer than the limit fills at least one aligned window of half the limit, and looking
    # at whole windows is many times faster than looking for runs.
    if len(text) <= MAX_RUN_CHARS:
        return False
    for start in range(0, len(text) - _WINDOW + 1, _WINDOW):
        window = text[start : start + _WINDOW]
        if window.isspace() or window.split(None, 1)[0] == window:
            return True
    return False


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD.

    Python strings may hold surrogates (JSON escapes make them); UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
