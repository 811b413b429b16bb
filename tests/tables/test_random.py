"""Random numbers: every word lies where its address says, and permutations are what any stable sort gives."""

from __future__ import annotations

import numpy as np
import pytest

from mlpgpu import random
from mlpgpu.errors import ConfigurationError, DtypeError
from mlpgpu.random import (
    SEED_LIMIT,
    WORDS_PER_BLOCK,
    Purpose,
    UniformStream,
    check_seed,
    epoch_order,
    half_words,
    least_kept,
    order,
)

ADDRESS = {"seed": 2**63 + 5, "purpose": Purpose.INITIAL_VALUES, "step": 12, "layer": 3, "replica": 1}


def test_words_are_philox_at_the_counter_stated() -> None:
    words = random.words(11, **ADDRESS)
    assert words.dtype == np.uint64
    for j, word in enumerate(words.tolist()):
        # Word j lies in block j // 4 + 1, and NumPy raises the counter before it makes a block.
        counter = np.array([j // 4, 12, 3, 1], np.uint64)
        key = np.array([2**63 + 5, Purpose.INITIAL_VALUES], np.uint64)
        assert np.random.Philox(key=key, counter=counter).random_raw(4)[j % 4] == word


def test_words_are_pinned() -> None:
    # From an implementation of the paper's ten rounds in Python integers: these must never change.
    m0, m1, w0, w1, mask = 0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B, 2**64 - 1
    k0, k1 = 7, int(Purpose.EPOCH_ORDER)
    c0, c1, c2, c3 = 1, 2, 0, 0  # block 1 of epoch 2
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(m0 * c0, 2**64), divmod(m1 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    assert random.words(4, seed=7, purpose=Purpose.EPOCH_ORDER, step=2).tolist() == [c0, c1, c2, c3]


@pytest.mark.parametrize("part", ["seed", "purpose", "step", "layer", "replica"])
def test_each_part_of_an_address_counts(part: str) -> None:
    other = {**ADDRESS, part: Purpose.SPLIT if part == "purpose" else ADDRESS[part] + 1}
    assert (random.words(100, **ADDRESS) != random.words(100, **other)).all()


def test_uniforms_are_the_upper_53_bits() -> None:
    expected = (random.words(50, **ADDRESS) >> np.uint64(11)) * 2.0**-53
    assert (random.uniforms(50, **ADDRESS) == expected).all()


def test_stream_fills_from_any_block_in_any_order() -> None:
    stream = UniformStream(seed=9, purpose=Purpose.INITIAL_VALUES, layer=2, replica=1)
    for step, block, count in ((0, 0, 10), (5, 3, 7), (5, 0, 1), (0, 2, 4), (5, 3, 7), (1, 1, 0)):
        out = np.full(count, np.nan)
        stream.fill(out, step=step, block=block)
        start = WORDS_PER_BLOCK * block
        whole = random.uniforms(start + count, seed=9, purpose=Purpose.INITIAL_VALUES, step=step, layer=2, replica=1)
        assert (out == whole[start:]).all()


def half_words_by_definition(count: int, *, seed: int, step: int, layer: int) -> list[int]:
    """By the paper's ten rounds of Philox4x32, in Python integers."""
    low, made = 2**32 - 1, []
    for block in range(-(-count // 8)):
        k0, k1 = seed & low, seed >> 32
        c0, c1, c2, c3 = block & low, step & low, layer, step >> 32
        for _ in range(10):
            (high0, low0), (high1, low1) = divmod(0xD2511F53 * c0, 2**32), divmod(0xCD9E8D57 * c2, 2**32)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
        made += [half for word in (c0, c1, c2, c3) for half in (word & 0xFFFF, word >> 16)]
    return made[:count]


def test_half_words_are_pinned() -> None:
    address = {"seed": 2**63 + 5, "step": 3 * 2**32 + 12, "layer": 3}
    expected = half_words_by_definition(70, **address)
    made = half_words(0, 70, **address)
    assert made.dtype == np.uint16 and made.tolist() == expected
    for first, count in ((0, 0), (1, 7), (7, 2), (8, 8), (13, 50)):
        assert half_words(first, count, **address).tolist() == expected[first : first + count]


def test_the_generator_of_half_words_has_the_published_words() -> None:
    """Known answers of the paper's library Random123 1.14 (kat_vectors, philox4x32 10)."""
    out = np.empty((1, 4), np.uint32)
    random._philox4x32(np.zeros(1, np.uint64), 0, 0, 0, out)
    assert [f"{word:08x}" for word in out[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_many_half_words_do_not_hang_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"seed": 5, "step": 2**33 + 1, "layer": 1}
    whole = half_words(3, 1000, **address)
    monkeypatch.setattr(random, "BLOCKS_IN_CACHE", 7)
    assert (half_words(3, 1000, **address) == whole).all()


@pytest.mark.parametrize("part", ["seed", "step", "layer"])
def test_each_part_of_a_half_word_s_address_counts(part: str) -> None:
    address = {"seed": 2**40 + 1, "step": 3, "layer": 2}
    for change in (1,) if part == "layer" else (1, 2**32):
        equal = half_words(0, 4000, **address) == half_words(0, 4000, **{**address, part: address[part] + change})
        assert equal.mean() < 0.002


def test_half_words_are_uniform_and_neighbours_independent() -> None:
    made = half_words(0, 2**18, seed=11, step=4, layer=0)
    for numbers in (made >> 8, made & 0xFF, (made[1:] & 0xF) * 16 + (made[:-1] & 0xF)):
        expected = numbers.size / 256
        chi_squared = ((np.bincount(numbers, minlength=256) - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize(("rate", "least"), [(0.0, 0), (1e-9, 1), (0.25, 2**14), (0.1, 6554), (0.999999, 2**16)])
def test_the_least_half_word_that_is_kept(rate: float, least: int) -> None:
    assert least_kept(rate) == least


@pytest.mark.parametrize("rows", [1, 2, 31, 1000])
def test_order_is_the_stable_argsort_of_the_keys(rows: int) -> None:
    permutation = order(rows, seed=4, purpose=Purpose.SPLIT, step=6)
    keys = random.words(rows, seed=4, purpose=Purpose.SPLIT, step=6)
    assert permutation.dtype == np.int64
    assert permutation.tolist() == sorted(range(rows), key=keys.tolist().__getitem__)


def test_order_keeps_equal_keys_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # NumPy's default sort is no stable one: it reorders these, which the test makes sure of.
    keys = (np.arange(1000, dtype=np.uint64) * np.uint64(7919)) % np.uint64(5)
    stable = sorted(range(1000), key=keys.tolist().__getitem__)
    assert np.argsort(keys).tolist() != stable
    monkeypatch.setattr(random, "words", lambda rows, **address: keys)
    assert order(1000, seed=0, purpose=Purpose.SPLIT).tolist() == stable


def test_epochs_have_orders_of_their_own() -> None:
    orders = [epoch_order(50, seed=1, epoch=epoch) for epoch in range(5)]
    assert all(sorted(o.tolist()) == list(range(50)) for o in orders)
    assert len({tuple(o.tolist()) for o in orders}) == 5
    assert (epoch_order(50, seed=1, epoch=3) == orders[3]).all()
    assert (epoch_order(50, seed=2, epoch=3) != orders[3]).any()


def test_seed() -> None:
    assert check_seed(SEED_LIMIT - 1) == SEED_LIMIT - 1
    assert check_seed(None) != check_seed(None)  # equal once in 2⁶⁴ runs
    for bad in (-1, SEED_LIMIT):
        with pytest.raises(ConfigurationError, match="seed"):
            check_seed(bad)
    with pytest.raises(DtypeError, match="seed"):
        check_seed(1.5)
