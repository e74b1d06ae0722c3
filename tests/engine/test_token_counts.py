"""What requests are said to have cost, in Kimi's own ranks: counts that others measured."""

import shutil

import pytest

from conftest import GOLDEN_SHARED
from openk3.engine.chat import ChatReader, Template, chat_prompt
from openk3.engine.text_stream import TextReader
from openk3.text import tokenizer

RANKS = GOLDEN_SHARED / "data" / "kimi_tiktoken.model"
pytestmark = pytest.mark.skipif(not RANKS.exists(), reason=f"needs {RANKS}")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    shutil.copy(RANKS, folder / "tiktoken.model")
    return tokenizer.load(folder)


def counted(kimi, messages, **template):
    """What `usage.prompt_tokens` says."""
    prompt = chat_prompt(messages, kimi, Template(**template))
    assert prompt.num_pending == 3
    return prompt.num_tokens - prompt.num_pending


def test_what_the_vendors_verifier_counts(kimi):
    """Kimi-Vendor-Verifier's `assistant_hello`, effort high: 99; its preambles of 67 and 68."""
    assert counted(kimi, [{"role": "assistant", "content": "hello"}], thinking_effort="high") == 99
    hi = [{"role": "user", "content": "hi"}]
    plain = counted(kimi, hi, thinking_effort=None)
    added = {e: counted(kimi, hi, thinking_effort=e) - plain for e in ("low", "high", "max")}
    assert added == {"low": 68, "high": 68, "max": 67}
    assert counted(kimi, hi, thinking=False) == plain
    # an assistant's message has a think channel also when that is empty: 6 tokens
    talk = [*hi, {"role": "assistant", "content": "hello"}, *hi]
    kept = counted(kimi, talk, thinking_effort=None) - counted(kimi, talk, thinking=False)
    assert kept == 6


@pytest.mark.parametrize(
    ("text", "ids"),
    [("🙂", [5885, 46813]), ("🦙", [5885, 99, 247]), ("𠮷", [172, 254, 106, 115])],
)
def test_a24_a_character_of_several_of_kimis_tokens_is_never_cut(kimi, text, ids):
    """ferrox#124: the ids are those of the report."""
    assert kimi.encode(text) == ids
    for reader in (TextReader(kimi), ChatReader(kimi, thinking=False)):
        said = [[d.text for d in reader.feed([i]) if d.kind == "content"] for i in ids]
        assert said == [*([[]] * (len(ids) - 1)), [text]]
