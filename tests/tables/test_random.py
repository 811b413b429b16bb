"""Random numbers: every word lies where its address says, and permutations are what any stable sort gives."""

from __future__ import annotations

import numpy as np
import pytest

from mlpgpu import random
from mlpgpu.errors import ConfigurationError, DtypeError
from mlpgpu.random import SEED_LIMIT, WORDS_PER_BLOCK, Purpose, UniformStream, check_seed, epoch_order, order

ADDRESS = {"seed": 2**63 + 5, "purpose": Purpose.DROPOUT, "step": 12, "layer": 3, "replica": 1}


def test_words_are_philox_at_the_counter_stated() -> None:
    words = random.words(11, **ADDRESS)
    assert words.dtype == np.uint64
    for j, word in enumerate(words.tolist()):
        # Word j lies in block j // 4 + 1, and NumPy raises the counter before it makes a block.
        counter = np.array([j // 4, 12, 3, 1], np.uint64)
        key = np.array([2**63 + 5, Purpose.DROPOUT], np.uint64)
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
    stream = UniformStream(seed=9, purpose=Purpose.DROPOUT, layer=2, replica=1)
    for step, block, count in ((0, 0, 10), (5, 3, 7), (5, 0, 1), (0, 2, 4), (5, 3, 7), (1, 1, 0)):
        out = np.full(count, np.nan)
        stream.fill(out, step=step, block=block)
        start = WORDS_PER_BLOCK * block
        whole = random.uniforms(start + count, seed=9, purpose=Purpose.DROPOUT, step=step, layer=2, replica=1)
        assert (out == whole[start:]).all()


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
