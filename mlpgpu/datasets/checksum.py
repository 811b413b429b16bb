"""The CRC-32 of bytes that follow each other, from those of their pieces.

A CRC is linear over GF(2): what a number of zero bytes makes of a checksum is a matrix of 32 columns, one for each of
its bits (M. Adler, crc32_combine of zlib).
"""

from __future__ import annotations

import numpy as np

POLYNOMIAL = 0xEDB88320  # of IEEE 802.3, its bits reversed


def joined_checksum(checksums: np.ndarray, nbytes: int) -> int:
    """The CRC-32 of pieces of ``nbytes`` bytes each, in order, from theirs, (n,) uint32."""
    tail, after = 0, _identity()  # the CRC of the last pieces, and what their bytes make of that of those before
    operator = _power(_one_bit(), 8 * nbytes)  # of the bytes of one element
    while len(checksums):
        if len(checksums) % 2:
            tail ^= int(_times(after, checksums[-1:])[0])
            after = _times(after, operator)
            checksums = checksums[:-1]
        if len(checksums):
            checksums = _times(operator, checksums[::2]) ^ checksums[1::2]
            operator = _times(operator, operator)
    return tail


def _identity() -> np.ndarray:
    return np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))


def _one_bit() -> np.ndarray:
    """What one zero bit makes of each bit."""
    return np.concatenate([np.array([POLYNOMIAL], np.uint32), _identity()[:-1]])


def _times(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """A matrix, by columns (32,), times vectors (n,), or times another matrix's columns."""
    found = np.zeros(len(vectors), np.uint32)
    for bit, column in enumerate(matrix):
        found ^= np.where(vectors >> np.uint32(bit) & np.uint32(1), column, np.uint32(0))
    return found


def _power(matrix: np.ndarray, exponent: int) -> np.ndarray:
    found = _identity()
    while exponent:
        if exponent & 1:
            found = _times(matrix, found)
        matrix, exponent = _times(matrix, matrix), exponent >> 1
    return found
