"""Random numbers that are addressed, never drawn in sequence.

Every number comes from a counter-based generator of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011.  There is no generator state to save, and whoever needs number j of some step computes
it alone: another shard of a batch, another backend, a kernel.

**Words** are those of Philox4x64-10 as ``numpy.random.Philox`` implements it.  The address of a word is

* a key of two 64-bit words: ``(seed, purpose)``;
* a counter of four: ``(block, step, layer, replica)``, where *step* is an epoch or 0.

A block gives four words.  Word j of an address lies in block ``j // 4 + 1``, because NumPy raises the
counter once before its first block.

**Half words** decide on dropouts, a number for each output of a layer in each step: they are many, and need
not be exact.  They come from Philox4x32-10, of words of 32 bits.  Its key is the seed, lower half first, and
its counter ``(block, step, layer, upper half of step)``.  A block gives eight half words of 16 bits, each
word's lower one first, and number j lies in block ``j // 8``.  A kernel makes such a block in two fifths of
the instructions that a block of Philox4x64 takes.
"""

from __future__ import annotations

import math
import secrets
from enum import IntEnum

import numpy as np

from .errors import check_integer

WORDS_PER_BLOCK = 4
HALF_WORDS_PER_BLOCK = 8
SEED_LIMIT = 2**64
BLOCKS_IN_CACHE = 1 << 13  # that are made at once


class Purpose(IntEnum):
    """What random words are for: the second half of the key, so that no two uses share words.

    A number that is no longer used is not given to another use, whose words would then be those of older runs.
    """

    INITIAL_VALUES = 1
    EPOCH_ORDER = 2
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


def half_words(first: int, count: int, *, seed: int, step: int, layer: int) -> np.ndarray:
    """Half words ``first`` to ``first + count - 1`` of a layer's step, shape (count,), dtype uint16."""
    begin, end = first // HALF_WORDS_PER_BLOCK, -(-(first + count) // HALF_WORDS_PER_BLOCK)
    drawn = np.empty((end - begin, HALF_WORDS_PER_BLOCK // 2), "<u4")  # so that lower halves come first everywhere
    for start in range(begin, end, BLOCKS_IN_CACHE):
        blocks = np.arange(start, min(start + BLOCKS_IN_CACHE, end), dtype=np.uint64)
        _philox4x32(blocks, seed, step, layer, drawn[start - begin :][: blocks.size])
    skipped = first - HALF_WORDS_PER_BLOCK * begin
    return drawn.view("<u2").reshape(-1)[skipped : skipped + count].astype(np.uint16, copy=False)


def least_kept(rate: float) -> int:
    """The least half word at which a dropout of this rate keeps: half words times 2⁻¹⁶ are compared with the rate."""
    return math.ceil(rate * 2**16)


def _philox4x32(blocks: np.ndarray, seed: int, step: int, layer: int, out: np.ndarray) -> None:
    """The words of some blocks (n,), of dtype uint64 since products of 32 bits have 64, in ``out`` (n, 4)."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    multipliers = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
    keys = [
        [(seed + number * 0x9E3779B9) & 0xFFFFFFFF, ((seed >> 32) + number * 0xBB67AE85) & 0xFFFFFFFF]
        for number in range(10)
    ]
    # A counter's words 0 and 2, which are multiplied, and 1 and 3.
    even, odd, products = (np.empty((2, blocks.size), np.uint64) for _ in range(3))
    even[0], even[1], odd[0], odd[1] = blocks & low, layer, step & 0xFFFFFFFF, step >> 32
    for key in np.array(keys, np.uint64)[:, :, np.newaxis]:
        crossed = np.multiply(even, multipliers, out=products)[::-1]
        np.right_shift(crossed, half, out=even)
        even ^= odd
        even ^= key
        np.bitwise_and(crossed, low, out=odd)
    out[:, 0::2], out[:, 1::2] = even.T, odd.T


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
