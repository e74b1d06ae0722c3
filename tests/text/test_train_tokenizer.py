"""Training: deterministic, complete, K3's special tokens on top, saved whole."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import DataError, InputError
from openk3.text import special_tokens as special
from openk3.text.tokenizer import load
from openk3.text.train_tokenizer import train


def test_special_tokens_sit_at_the_top_in_k3_order(small):
    assert small.vocab_size == 1024
    assert [small.special_id(name) for name in special.K3_NAMES] == list(range(1008, 1024))
    assert (small.bos_id, small.end_of_msg_id, small.pad_id) == (1008, 1010, 1023)
    assert small.special_name(1008) == "[BOS]"
    assert small.special_name(5) is None


def test_every_byte_is_a_token_and_ids_have_no_hole(small):
    tokens = [small.token_bytes(i) for i in range(small.vocab_size)]
    assert {bytes([b]) for b in range(256)} <= set(tokens)
    assert len(set(tokens)) == 1024


def test_training_compresses(small, corpus):
    text = corpus[0]
    assert len(small.encode(text)) < 0.5 * len(text.encode())


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=200))
def test_any_text_survives(small, text):
    assert small.decode(small.encode(text)) == text


def test_special_names_in_text_stay_text(small):
    text = "x<|open|>message<|sep|>[PAD]"
    ids = small.encode(text)
    assert not any(small.is_special(i) for i in ids)
    assert small.decode(ids) == text
    structured = small.encode(text, allow_special=True)
    assert [i for i in structured if small.is_special(i)] == [
        small.special_id(name) for name in ("<|open|>", "<|sep|>", "[PAD]")
    ]
    assert small.decode(structured) == text


def test_same_texts_same_file_also_in_another_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; import argparse;"
        "from openk3.text.train_tokenizer import train;"
        "train(Path(argparse.__file__).read_text().splitlines(True), 700, path=sys.argv[1])"
    )
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_saved_tokenizer_loads_equal(small, corpus, tmp_path):
    small.save(tmp_path / "model")
    for path in (tmp_path / "model", tmp_path / "model" / "tokenizer.json"):
        again = load(path)
        assert again.special_tokens == small.special_tokens
        assert again.vocab_size == small.vocab_size
        assert again.encode_batch(corpus) == small.encode_batch(corpus)
        ids = again.encode("<|open|>a[PAD]", allow_special=True)
        assert again.decode(ids, skip_special=True) == "<|open|>a"
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["openk3_schema"]


def test_saved_file_is_a_plain_tokenizers_file(small, tmp_path):
    from tokenizers import Tokenizer

    peer = Tokenizer.from_file(str(small.save(tmp_path)))
    assert peer.get_vocab_size() == small.vocab_size
    text = "<|open|>message def f(x): return 中文 🙂"
    assert peer.encode(text).ids == small.encode(text, allow_special=True)
    assert peer.token_to_id("[PAD]") == small.pad_id


def test_few_texts_leave_reserved_ids():
    tokenizer = train(["aaaa bbbb"], 300)
    assert tokenizer.vocab_size == 300
    reserved = [name for name in tokenizer.special_tokens if "reserved" in name]
    assert reserved
    assert tokenizer.decode(tokenizer.encode("aaaa é")) == "aaaa é"
    assert tokenizer.special_id(special.PAD) == 299


@pytest.mark.parametrize(
    ("texts", "size", "kwargs", "error", "words"),
    [
        (["abc"], 271, {}, InputError, "vocab_size 271 is too small"),
        (["abc"], 400, {"special_tokens": ["x", "x"]}, InputError, "distinct"),
        ([], 400, {}, DataError, "no character"),
        (["", ""], 400, {}, DataError, "no character"),
    ],
)
def test_bad_input(texts, size, kwargs, error, words, tmp_path):
    with pytest.raises(error, match=words):
        train(texts, size, path=tmp_path / "out", **kwargs)
    assert not (tmp_path / "out").exists()
