"""A small trained tokenizer, the real rank file, and text that is hard to tokenize."""

import base64
from pathlib import Path

import pytest

from conftest import GOLDEN_SHARED
from openk3.text import tokenizer, train_tokenizer

REAL_RANKS = GOLDEN_SHARED / "data" / "kimi_tiktoken.model"

HARD_TEXTS = [
    "",
    " ",
    "\n",
    "Hello World's END'S don't I'LL we've 'tis x'ſ 'S",
    "CamelCaseHTTPServer snake_case __init__ 3.14159 1234567 0x1F ½ ²³ ٣٤٥ Ⅷ",
    "中文和English混排，全角。１２３ 〇々〆 漢字かな交じり ｶﾅ ー 한국어 ᄒᆞᆫ",
    "🙂🦙𠮷👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ñ\u0303 a\u200bb \ufeff \u00ad\u2028\u2029\x85\x0b\x0c\x1c\x1f",
    "def f(x):\n\treturn {'a': [x**2 for _ in range(10)]}  # why\r\n\r\n    \n   \t end   ",
    "=====" * 9 + " -----\n" + "    " * 33 + "\n\n\n\n" + "\t" * 7 + "x" + "\u3000" * 5,
    "Ǆǅǆ ʰʱ ΑΒΓ αβγ Привет мир שלום مرحبا नमस्ते ไทย",
    "\x00\x01\x7f\x80ÿ",
    "literal <|open|>message<|sep|> [BOS] <|end_of_msg|> <|reserved_token_163592|>",
    "a" * 3000 + " " * 3000 + "ab" * 1000 + "1" * 1000,
]


@pytest.fixture(scope="session")
def corpus():
    folder = Path(base64.__file__).parent
    names = ["argparse.py", "ast.py", "textwrap.py", "json/encoder.py", "heapq.py", "typing.py"]
    return [(folder / name).read_text("utf-8") for name in names] + HARD_TEXTS


@pytest.fixture(scope="session")
def small(corpus):
    return train_tokenizer.train(corpus, 1024)


@pytest.fixture(scope="session")
def real_ranks():
    if not REAL_RANKS.exists():
        pytest.skip(f"the published rank file is not at {REAL_RANKS}")
    return REAL_RANKS


@pytest.fixture(scope="session")
def real(real_ranks):
    return tokenizer.load(real_ranks)


@pytest.fixture(scope="session")
def small_rank_file(small, tmp_path_factory):
    """The ordinary tokens of `small` as a tiktoken rank file."""
    path = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    ordinary = [i for i in range(small.vocab_size) if not small.is_special(i)]
    lines = [base64.b64encode(small.token_bytes(i)) + b" %d\n" % i for i in ordinary]
    path.write_bytes(b"".join(lines))
    return path
