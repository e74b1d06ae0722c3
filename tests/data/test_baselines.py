"""n-gram baselines are normalised and have known values; xz is the command's."""

import lzma
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.data.baselines import ByteNgram, bits_per_byte, xz_bits_per_byte
from openk3.errors import DataError, InputError

TEXT = Path(__file__).read_bytes()

documents = st.lists(st.binary(max_size=30), min_size=1, max_size=5).filter(any)
few_symbols = st.lists(st.text("ab\0", max_size=40).map(str.encode), min_size=1).filter(any)


@given(train=documents | few_symbols, before=st.binary(max_size=9), context=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_probabilities_sum_to_one(train: list[bytes], before: bytes, context: int) -> None:
    p = ByteNgram(train, context).distribution(before)
    assert p.shape == (256,)
    assert p.min() > 0
    assert abs(p.sum() - 1) < 1e-12


@pytest.mark.parametrize("context", [0, 3, 5])
def test_real_text_is_normalised_everywhere(context: int) -> None:
    model = ByteNgram([TEXT], context)
    for at in range(0, len(TEXT), 97):
        assert abs(model.distribution(TEXT[:at]).sum() - 1) < 1e-12


def test_bits_are_those_of_the_distribution() -> None:
    model = ByteNgram([TEXT[:2000]], 3)
    document = b"def test"
    bits = model.bits(document)
    one_by_one = [-math.log2(model.distribution(document[:i])[b]) for i, b in enumerate(document)]
    assert np.allclose(bits, one_by_one, rtol=0, atol=1e-12)
    whole = model.bits_per_byte([document, b"return", b""])
    assert whole == pytest.approx((bits.sum() + model.bits(b"return").sum()) / 14)


def test_values_computed_by_hand() -> None:
    # "aab": too little text for estimated discounts, so D = 1/2.
    # context 0: n(a) = 2, n(b) = 1, mass = (1/2 + 1/2) / 3
    unigram = ByteNgram([b"aab"], 0)
    base = 1 / 3 / 256
    assert unigram.distribution(b"")[ord("a")] == pytest.approx(1.5 / 3 + base)
    assert unigram.distribution(b"")[ord("b")] == pytest.approx(0.5 / 3 + base)
    assert unigram.distribution(b"")[ord("c")] == pytest.approx(base)
    # context 1: n(0a) = n(aa) = n(ab) = 1; below, distinct predecessors: a has 2 (0, a), b has 1
    bigram = ByteNgram([b"aab"], 1)
    low_a, low_b = 1.5 / 3 + base, 0.5 / 3 + base
    after_a = bigram.distribution(b"a")
    assert after_a[ord("a")] == pytest.approx(0.5 / 2 + 0.5 * low_a)
    assert after_a[ord("b")] == pytest.approx(0.5 / 2 + 0.5 * low_b)
    assert bigram.distribution(b"")[ord("a")] == pytest.approx(0.5 / 1 + 0.5 * low_a)
    assert bigram.distribution(b"z")[ord("a")] == pytest.approx(low_a), "unseen context"


def test_discounts_from_counts_of_counts() -> None:
    from openk3.data.baselines import _discounts

    counts = np.repeat([1, 2, 3, 4], [100, 40, 20, 10])
    y = 100 / 180
    expected = [0, 1 - 2 * y * 40 / 100, 2 - 3 * y * 20 / 40, 3 - 4 * y * 10 / 20]
    assert np.allclose(_discounts(counts), expected)
    assert _discounts(np.array([5, 5])).tolist() == [0, 0.5, 0.5, 0.5]
    odd = np.repeat([1, 2, 3, 4], [1, 100, 1, 1])  # would ask for a negative D(1)
    assert (_discounts(odd)[1:] >= 0.05).all()


def test_known_sources() -> None:
    rng = np.random.default_rng(0)
    coin = bytes(rng.integers(ord("a"), ord("c"), 20_000, dtype=np.uint8))
    assert ByteNgram([coin], 3).bits_per_byte([coin]) == pytest.approx(1.0, abs=0.01)
    cycle = b"abcde" * 4000
    assert ByteNgram([cycle], 3).bits_per_byte([cycle]) < 0.01
    noise = rng.bytes(20_000)
    assert ByteNgram([noise], 0).bits_per_byte([rng.bytes(20_000)]) == pytest.approx(8, abs=0.02)


def test_longer_contexts_predict_text_better() -> None:
    half = len(TEXT) // 2
    figures = bits_per_byte([TEXT[:half]], [TEXT[half:]], contexts=(0, 1, 3))
    assert list(figures) == ["0-byte context", "1-byte context", "3-byte context", "xz -9e"]
    first, second, third, _ = figures.values()
    assert 8 > first > second > third > 1


def test_documents_do_not_run_into_each_other() -> None:
    one, two = ByteNgram([b"xy", b"zw"], 2), ByteNgram([b"zw", b"xy"], 2)
    for before in (b"", b"x", b"xy", b"y"):
        assert np.array_equal(one.distribution(before), two.distribution(before))
    assert one.distribution(b"xy")[ord("z")] == pytest.approx(one.distribution(b"xy")[ord("x")])


def test_xz_equals_the_library_preset() -> None:
    pieces = [TEXT, TEXT[:100], b"a", b"ab" * 3000]
    whole = sum(len(lzma.compress(p, preset=9 | lzma.PRESET_EXTREME)) for p in pieces)
    assert xz_bits_per_byte(pieces) == 8 * whole / sum(map(len, pieces))


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz command is not installed")
def test_xz_equals_the_command() -> None:
    packed = subprocess.run(["xz", "-9e"], input=TEXT, capture_output=True, check=True).stdout
    assert xz_bits_per_byte([TEXT]) == 8 * len(packed) / len(TEXT)


def test_nothing_to_measure() -> None:
    with pytest.raises(DataError):
        ByteNgram([b"", b""], 3)
    with pytest.raises(DataError):
        ByteNgram([], 0)
    with pytest.raises(DataError):
        ByteNgram([b"a"], 3).bits_per_byte([b""])
    with pytest.raises(DataError):
        xz_bits_per_byte([])
    with pytest.raises(InputError, match="0 to 7"):
        ByteNgram([b"a"], 8)
