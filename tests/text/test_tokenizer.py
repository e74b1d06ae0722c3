"""Loading, exact equality with tiktoken, special tokens, streams, and files that are no good."""

import base64
import json
import random
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import DataError, InputError
from openk3.text import special_tokens as special
from openk3.text.pretokenize import K3_PATTERN
from openk3.text.ranks import read_ranks
from openk3.text.tokenizer import load


def peer_of(rank_file, table):
    tiktoken = pytest.importorskip("tiktoken", reason="compares with the tiktoken package")
    ranks = {token: rank for rank, token in enumerate(read_ranks(rank_file))}
    return tiktoken.Encoding("k", pat_str=K3_PATTERN, mergeable_ranks=ranks, special_tokens=table)


@pytest.fixture(scope="module")
def small_from_ranks(small, small_rank_file):
    return load(small_rank_file, special_tokens=small.special_tokens)


@pytest.fixture(scope="module")
def small_peer(small, small_rank_file):
    return peer_of(small_rank_file, small.special_tokens)


@pytest.fixture(scope="module")
def real_peer(real, real_ranks):
    return peer_of(real_ranks, real.special_tokens)


def random_texts(seed, count, tokens):
    """Runs, mixtures, tokens glued together, and any code point."""
    rng = random.Random(seed)
    alphabets = ["abcdeXYZ '", " \n\t\r\u3000\xa0\u2028\x85", "=-_*#/.,:;()<>|", "0123456789½²٣"]
    alphabets += [
        "天地玄黄宇宙洪荒〇々〆",
        "áñÄßſKŉǅʰ\u0301\u200d\ufe0f",
        "🙂🦙𠮷👩👧",
        "कขあア한ﾊ",
    ]
    known = [token.decode("utf-8", "ignore") for token in tokens]

    def piece():
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice(rng.choice(alphabets)) * rng.choice([1, 1, 2, 3, 9, 40])
        if kind == 1:
            return rng.choice(known)
        if kind == 2:
            return "".join(rng.choices(rng.choice(alphabets), k=rng.randrange(1, 12)))
        return chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))

    return ["".join(piece() for _ in range(rng.randrange(1, 20))) for _ in range(count)]


def test_rank_file_gives_the_ids_of_its_tokenizer(small, small_from_ranks, corpus):
    assert small_from_ranks.encode_batch(corpus) == small.encode_batch(corpus)
    assert small_from_ranks.vocab_size == small.vocab_size


def test_equals_tiktoken_on_a_small_vocabulary(small_from_ranks, small_peer, corpus):
    tokens = [small_peer.decode_single_token_bytes(i) for i in range(1000)]
    for text in corpus + random_texts(0, 1500, tokens):
        assert small_from_ranks.encode(text) == small_peer.encode_ordinary(text), repr(text)


def test_equals_tiktoken_on_the_published_ranks(real, real_peer, corpus):
    tokens = [real_peer.decode_single_token_bytes(i) for i in range(0, 163_584, 37)]
    for text in corpus + random_texts(1, 3000, tokens):
        assert real.encode(text) == real_peer.encode_ordinary(text), repr(text)
        assert real.decode(real.encode(text)) == text
    for text in ["a<|open|>b[PAD]<|reserved_token_163592|>c", "[BOS][EOS] <osagent_mode>"]:
        assert real.encode(text, allow_special=True) == real_peer.encode(
            text, allowed_special="all"
        )


def test_equals_tiktoken_on_every_character_class(real, real_peer):
    """The two regex engines agree on each code point, in the contexts the regex looks at.

    Left out are long blocks of one kind (ideographs, Hangul syllables, private use).
    """
    points = [
        *range(0x3500),
        *range(0x9F00, 0xAC10),
        *range(0xD790, 0xD800),
        *range(0xF8F0, 0x11000),
    ]
    for start in range(0, len(points), 4096):
        chars = map(chr, points[start : start + 4096])
        text = "|".join(f"{c} a{c}b  {c}{c}x'{c}\n{c}1" for c in chars)
        assert real.encode(text) == real_peer.encode_ordinary(text), hex(points[start])


def test_published_special_ids(real):
    assert real.vocab_size == 163_840
    wanted = {"[BOS]": 163584, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|sep|>": 163589}
    wanted |= {"<|media_pad|>": 163605, "<osagent_mode>": 163649, "[PAD]": 163839}
    wanted |= {"<|reserved_token_163592|>": 163592}
    assert {name: real.special_id(name) for name in wanted} == wanted
    assert len(real.special_tokens) == 256
    ids = [real.special_id(name) for name in ("[BOS]", "<|open|>", "<|close|>", "<|sep|>")]
    assert real.decode(ids, skip_special=True) == "<|open|><|close|><|sep|>"


def test_published_rank_file_loads_in_two_seconds(real_ranks):
    """Processor time, which other processes on the machine disturb least; the best of three."""

    def seconds():
        start = time.process_time()
        load(real_ranks)
        return time.process_time() - start

    assert any(seconds() < 2.0 for _ in range(3))


def test_surrogates(small_from_ranks, small_peer):
    for text in ["a\ud83d\ude42b", "\ud800", "x\udc00\ud800y"]:
        assert small_from_ranks.encode(text) == small_peer.encode_ordinary(text)
    assert small_from_ranks.decode(small_from_ranks.encode("a\ud83d\ude42\ud800")) == "a🙂\ufffd"


def test_segments_are_encoded_one_by_one(small):
    segments = [("<|open|>", True), ("ret", False), ("urn", False), ("", False), ("<|sep|>", False)]
    ids = small.encode_segments(segments)
    pieces = [[small.special_id("<|open|>")], *(small.encode(text) for text, _ in segments[1:])]
    assert ids == [i for piece in pieces for i in piece]
    assert small.special_id("<|sep|>") not in ids
    assert small.encode_segments([]) == []


def test_unknown_special_name_suggests(small):
    with pytest.raises(InputError, match=r"'<\|opn\|>' \(did you mean '<\|open\|>'"):
        small.special_id("<|opn|>")


@pytest.mark.parametrize("bad_id", [-1, 1024, 10**9])
def test_ids_out_of_range(small, bad_id):
    with pytest.raises(InputError, match=f"token id {bad_id} is not in the vocabulary of 1024"):
        small.decode([1, bad_id])
    with pytest.raises(InputError, match=f"token id {bad_id}"):
        small.stream_decoder().feed(bad_id)


def test_text_must_be_text(small):
    for call in (small.encode, lambda x: small.encode_batch([x])):
        with pytest.raises(InputError, match="must be a str, not bytes"):
            call(b"abc")


# Streams


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 1023), max_size=30), skip=st.booleans())
def test_stream_joins_to_the_whole(small, ids, skip):
    decoder = small.stream_decoder(skip_special=skip)
    pieces = [decoder.feed(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == small.decode(ids, skip_special=skip)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=50))
def test_stream_of_text_never_shows_half_a_character(small, text):
    decoder = small.stream_decoder()
    pieces = [decoder.feed(i) for i in small.encode(text)]
    assert decoder.finish() == ""
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_characters_split_across_published_tokens(real):
    for text, ids in {
        "🙂": [5885, 46813],
        "🦙": [5885, 99, 247],
        "𠮷": [172, 254, 106, 115],
    }.items():
        assert real.encode(text) == ids
        decoder = real.stream_decoder()
        assert [decoder.feed(i) for i in ids] == [""] * (len(ids) - 1) + [text]
        decoder.feed(ids[0])
        assert decoder.finish() == "\ufffd" == real.decode(ids[:1])
        assert "".join(map(decoder.feed, ids)) == text


# Files that are no good


def line(token, rank):
    return base64.b64encode(token) + b" %d\n" % rank


BYTES = [line(bytes([b]), b) for b in range(256)]
BAD_RANKS = {
    "not base64": ([*BYTES, b"@@@ 256\n"], "line 257: the token is not base64"),
    "no rank": ([*BYTES, b"YWI=\n"], "line 257: expected a base64 token and a rank"),
    "gap": ([*BYTES, line(b"ab", 257)], "line 257: expected rank 256"),
    "negative": ([line(b"ab", 0), b"YQ== -1\n"], "line 2: expected rank 1"),
    "cut off": ([*BYTES, line(b"ab", 256), b"YW"], "line 258: expected a base64 token and a rank"),
    "twice": ([*BYTES, line(b"ab", 256), line(b"ab", 257)], "token b'ab' has two ranks"),
    "bytes missing": (BYTES[:100], "156 of the 256 single bytes have no rank"),
    "empty file": ([], "256 of the 256 single bytes have no rank"),
    "empty token": ([*BYTES, b"= 256\n"], "line 257"),
    "not text": ([b"\x00\x01\x02\xff" * 50], "line 1: expected a base64 token and a rank"),
}


@pytest.mark.parametrize("name", BAD_RANKS)
def test_corrupt_rank_file(name, tmp_path):
    lines, words = BAD_RANKS[name]
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=words) as caught:
        load(path, special_tokens={"[BOS]": 5000})
    assert str(path) in str(caught.value)


def test_rank_file_of_another_vocabulary(small_rank_file):
    with pytest.raises(DataError, match=r"tiktoken.model: \d+ ranks, K3's vocabulary has 163584"):
        load(small_rank_file)
    with pytest.raises(DataError, match=r"special token '\[BOS\]' has id 7, .* another vocabulary"):
        load(small_rank_file, special_tokens={"[BOS]": 7})
    with pytest.raises(InputError, match="'a' and 'b' share the id 5000"):
        load(small_rank_file, special_tokens={"a": 5000, "b": 5000})


def test_special_tokens_from_the_config_beside_the_ranks(small_rank_file, tmp_path):
    shutil.copy(small_rank_file, tmp_path)
    num_ranks = len(read_ranks(small_rank_file))
    entries = {
        str(num_ranks): {"content": "[BOS]", "special": True},
        str(num_ranks + 3): {"content": "<|open|>", "special": False},
    }
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": entries}))
    tokenizer = load(tmp_path)
    assert tokenizer.bos_id == num_ranks
    assert tokenizer.vocab_size == num_ranks + 256
    assert tokenizer.special_name(num_ranks + 1) == special.reserved_name(num_ranks + 1)
    assert tokenizer.decode([num_ranks, num_ranks + 3], skip_special=True) == "<|open|>"
    for bad in ({"x": {"content": "a"}}, {"5": {}}, [1]):
        config.write_text(json.dumps({"added_tokens_decoder": bad}))
        with pytest.raises(DataError, match="added_tokens_decoder must map ids"):
            load(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="no such tokenizer file"):
        load(tmp_path / "nothing.model")
    with pytest.raises(DataError, match=r"holds neither tokenizer\.json nor tiktoken\.model"):
        load(tmp_path)


def change(**changes):
    return lambda data: data | changes


def change_model(**changes):
    return lambda data: data | {"model": data["model"] | changes}


BAD_JSON = {
    "list": (lambda data: [1], "not a JSON object but a list"),
    "no model": (lambda data: {}, "no model.vocab object"),
    "word piece": (change_model(type="WordPiece"), "model type WordPiece, byte-level BPE expected"),
    "no bytes": (change_model(vocab={"a": 0}), "255 single bytes are not in its vocabulary"),
    "bad id": (lambda d: change_model(vocab=d["model"]["vocab"] | {"b": "x"})(d), "integer ids"),
    "negative id": (lambda d: change_model(vocab=d["model"]["vocab"] | {"b": -4})(d), "id -4"),
    "not bytes": (lambda d: change_model(vocab=d["model"]["vocab"] | {"▁a": 3})(d), "'▁a'"),
    "merges": (change_model(merges=[["q", "zzzzz"]]), "zzzzz"),
    "added": (change(added_tokens=[{"content": "x"}]), "has id None"),
    "huge id": (change(added_tokens=[{"content": "x", "id": 10**12}]), "has id 1000000000000"),
    "huge vocab": (
        lambda d: change_model(vocab=d["model"]["vocab"] | {"bb": 10**12})(d),
        "not one of a vocabulary",
    ),
    "added content": (change(added_tokens=[{"id": 2000}]), "has no content"),
    "pre-tokeniser": (change(pre_tokenizer={"type": "Nonsense"}), "tokenizer.json"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_corrupt_tokenizer_json(name, small, tmp_path):
    spoil, words = BAD_JSON[name]
    path = small.save(tmp_path)
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=words) as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


def test_truncated_tokenizer_json_and_newer_schema(small, tmp_path):
    path = small.save(tmp_path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"tokenizer\.json is not JSON"):
        load(path)
    path.write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text('{"openk3_schema": 99}')
    with pytest.raises(DataError, match="openk3_schema is 99, this version reads 1"):
        load(path)


def test_tokenizer_from_ranks_survives_saving_as_json(small_from_ranks, tmp_path, corpus):
    small_from_ranks.save(tmp_path)
    again = load(tmp_path)
    assert again.special_tokens == small_from_ranks.special_tokens
    assert again.encode_batch(corpus) == small_from_ranks.encode_batch(corpus)
