"""Prefix sums and stable sorts on a card, as launches: plain data, like a plan's."""

from __future__ import annotations

from collections.abc import Iterator

from .. import kernels
from ..kernels import ITEM_BYTES, SORT_DIGITS, ceil_div, strided_grid
from ..kernels.launches import At, Launch, Value

DIGIT_BITS = 8
MOST_BLOCKS = 1024  # of a kernel whose threads stride over an array


def grid_over(elements: int, per_thread: int = 1) -> tuple[int, int, int]:
    """The grid of a kernel whose threads stride over ``elements``."""
    return strided_grid(elements, MOST_BLOCKS, per_thread)


def sort_entries(dtype: str) -> list[kernels.Entry]:
    """The kernels of a sort by keys of this type."""
    return [kernels.sort_counts(dtype), kernels.prefix_sum("int32"), kernels.sort_scatter(dtype)]


def _digit_counts(dtype: str, n: int) -> int:
    """How many counts a pass of the sort makes: one of each digit in each tile."""
    return SORT_DIGITS * ceil_div(n, kernels.sort_tile(dtype))


class Chain:
    """Launches that follow each other on one stream, and the scratch arrays that they share.

    Attributes:
        bytes: of the arrays ``tile sums`` and ``digit counts``, as large as the launches so far need them.  Tile sums
            must be 0 before the first launch; each launch leaves them so.
    """

    def __init__(self) -> None:
        self.bytes = {"tile sums": 0, "digit counts": 0}

    def prefix_sum(self, dtype: str, array: At, n: int, *, exclusive: bool) -> Launch:
        """Prefix sums of an array, in place."""
        sums = At("tile sums")
        self.bytes[sums.array] = max(self.bytes[sums.array], 8 * kernels.scan_words(dtype, n))
        values: dict[str, Value] = {"x": array, "y": array, "n": n, "exclusive": int(exclusive), "tile_sums": sums}
        return Launch(kernels.prefix_sum(dtype), kernels.scan_grid(dtype, n), values)

    def sort(
        self, dtype: str, n: int, keys: At, values: At | None, *, sorted_values: At, spare: tuple[At, At]
    ) -> Iterator[Launch]:
        """Sort keys in place, by an even number of passes, and leave their values in ``sorted_values``.

        Without ``values`` the values are the keys' indices.  ``spare`` is room for keys and for values.
        """
        tiles, counts = ceil_div(n, kernels.sort_tile(dtype)), At("digit counts")
        self.bytes[counts.array] = max(self.bytes[counts.array], 4 * _digit_counts(dtype, n))
        targets, source = (spare, (keys, sorted_values)), (keys, values)
        for number, shift in enumerate(range(0, 8 * ITEM_BYTES[kernels.KEYS[dtype]], DIGIT_BITS)):
            target = targets[number % 2]
            of_pass: dict[str, Value] = {"keys": source[0], "n": n, "shift": shift}
            moved: dict[str, Value] = {
                "values": source[1], "starts": counts, "keys_out": target[0], "values_out": target[1],
            }  # fmt: skip
            yield Launch(kernels.sort_counts(dtype), (tiles, 1, 1), of_pass | {"counts": counts})
            yield self.prefix_sum("int32", counts, _digit_counts(dtype, n), exclusive=True)
            yield Launch(kernels.sort_scatter(dtype), (tiles, 1, 1), of_pass | moved)
            source = target
