"""Random numbers that are addressed, never drawn in sequence.

Every number is a word of the counter-based generator Philox4x64-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) as ``numpy.random.Philox`` implements it.  Its address is

* a key of two 64-bit words: ``(seed, purpose)``;
* a counter of four: ``(block, step, layer, replica)``, where *step* is a training step or an epoch.

A block gives four words.  Word j of an address lies in block ``j // 4 + 1``, because NumPy raises the
counter once before its first block.  There is no generator state to save, and whoever needs word j of
some step computes it alone: another shard of a batch, another backend, a kernel.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np

from .errors import check_integer

WORDS_PER_BLOCK = 4
SEED_LIMIT = 2**64


class Purpose(IntEnum):
    """What random words are for: the second half of the key, so that no two uses share words."""

    INITIAL_VALUES = 1
    EPOCH_ORDER = 2
    DROPOUT = 3
    SPLIT = 4
    INITIAL_BIASES = 5


def check_seed(seed: int | None) -> int:
    """Return ``seed``, or one drawn from the operating system for None.

    Raises:
        DtypeError, ConfigurationError: it is not a whole number in [0, 2**64).
    """
    if seed is None:
        return secrets.randbits(64)
    return check_integer("seed", seed, least=0, most=SEED_LIMIT - 1)


def philox(
    *, seed: int, purpose: Purpose, step: int = 0, layer: int = 0, replica: int = 0, block: int = 0
) -> np.random.Philox:
    """The generator whose next word is word ``4 * block`` of the address given."""
    key = np.array([seed, purpose], np.uint64)
    return np.random.Philox(key=key, counter=np.array([block, step, layer, replica], np.uint64))


def words(count: int, *, seed: int, purpose: Purpose, step: int = 0, layer: int = 0, replica: int = 0) -> np.ndarray:
    """Words 0 to count-1 of an address, shape (count,), dtype uint64."""
    raw = philox(seed=seed, purpose=purpose, step=step, layer=layer, replica=replica).random_raw(count)
    return np.asarray(raw, np.uint64)


def uniforms(count: int, *, seed: int, purpose: Purpose, step: int = 0, layer: int = 0, replica: int = 0) -> np.ndarray:
    """Uniform numbers in [0, 1), shape (count,), dtype float64: the upper 53 bits of each word."""
    source = philox(seed=seed, purpose=purpose, step=step, layer=layer, replica=replica)
    return np.random.Generator(source).random(count)


class UniformStream:
    """Fills arrays with the uniform numbers of one (seed, purpose, layer, replica), step by step.

    It holds one generator and moves its counter, which costs a tenth of making a new one.
    """

    def __init__(self, *, seed: int, purpose: Purpose, layer: int, replica: int = 0) -> None:
        self._bits = philox(seed=seed, purpose=purpose, layer=layer, replica=replica)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state  # buffer_pos = 4: nothing is left over from an earlier block

    def fill(self, out: np.ndarray, *, step: int, block: int) -> None:
        """Write uniforms ``4 * block`` … of ``step`` to ``out``, one-dimensional float64."""
        counter = self._state["state"]["counter"]
        counter[0], counter[1] = block, step
        self._bits.state = self._state
        self._generator.random(out=out)


def order(rows: int, *, seed: int, purpose: Purpose, step: int = 0) -> np.ndarray:
    """A random permutation of ``rows``, shape (rows,), dtype int64.

    It is the stable argsort of one 64-bit key per row, which any sorter can repeat.
    """
    keys = words(rows, seed=seed, purpose=purpose, step=step)
    # Unless two keys of 64 bits are equal every sort is a stable one, and NumPy's default is faster.
    permutation = np.argsort(keys)
    ranked = keys[permutation]
    if (ranked[1:] == ranked[:-1]).any():
        permutation = np.argsort(keys, kind="stable")
    return permutation


def epoch_order(rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which ``epoch`` (from 0) visits the rows, shape (rows,), dtype int64."""
    return order(rows, seed=seed, purpose=Purpose.EPOCH_ORDER, step=epoch)
