"""Which shards of a batch and which part of a flat array each rank has, and in which order shards are added up.

Shards (S) are leaves of a binary tree: a node is the sum of its two halves, the first of which has a power of two of
leaves.  The tree depends on S alone, so whoever adds whichever nodes first comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Node = range  # the shards whose sum it is

# A flat array is dealt in blocks, whose size follows from its length alone: about so many blocks, of so many elements.
MOST_BLOCKS, LEAST_BLOCK, MOST_BLOCK = 1024, 1 << 10, 1 << 17


def shards_of(rank: int, ranks: int, shards: int) -> range:
    """The shards of a batch that a rank computes: neighbours, as many as the others' or one more; perhaps none."""
    return range(shards * rank // ranks, shards * (rank + 1) // ranks)


def nodes_of(shards: range, count: int) -> tuple[Node, ...]:
    """The fewest nodes of the tree of ``count`` shards that these shards, neighbours, make up, in order."""
    found, first = [], shards.start
    while first < shards.stop:
        size = 1
        while first % (2 * size) == 0 and min(first + 2 * size, count) <= shards.stop and first + size < count:
            size *= 2
        found.append(range(first, min(first + size, count)))
        first = found[-1].stop
    return tuple(found)


def additions(whole: Node, parts: Sequence[Node]) -> list[tuple[int, int]]:
    """How nodes that make up ``whole`` are added: pairs (i, j) in order, j's sum is added to i's; the first has all."""
    places, pairs = {part: place for place, part in enumerate(parts)}, []

    def place_of(node: Node) -> int:
        if node in places:
            return places[node]
        half = node.start + (1 << (len(node) - 1).bit_length() - 1)
        first, second = place_of(range(node.start, half)), place_of(range(half, node.stop))
        pairs.append((first, second))
        return first

    place_of(whole)
    return pairs


def block_size(count: int) -> int:
    """Elements of a block of a flat array of ``count``."""
    return min(max(-(-count // MOST_BLOCKS), LEAST_BLOCK), MOST_BLOCK)


def parts_of(count: int, ranks: int, ends: Sequence[int] = ()) -> list[slice]:
    """Each rank's part of a flat array of ``count``: whole blocks, as many as the others' or one more; perhaps none.

    Where one of ``ends``, in order, is near, within a quarter of a part, a part ends there and not with a block.
    """
    block = block_size(count)
    blocks = -(-count // block)
    borders = [min(blocks * rank // ranks * block, count) for rank in range(ranks + 1)]
    for rank in range(1, ranks):
        nearest = min(ends, key=lambda end: abs(end - borders[rank]), default=borders[rank])
        if 4 * ranks * abs(nearest - borders[rank]) <= count:
            borders[rank] = nearest
    return [slice(first, end) for first, end in pairwise(borders)]
