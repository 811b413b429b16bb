"""Prefix sums and stable sorts on a card, as launches: plain data, like a plan's."""

from __future__ import annotations

from collections.abc import Iterator

from . import kernels
from .kernels import SORT_DIGITS, ceil_div
from .launches import At, Launch, Value

DIGIT_BITS = 8


def sort_entries(dtype: str) -> list[kernels.Entry]:
    """The kernels of a sort by keys of this type."""
    return [kernels.sort_counts(dtype), kernels.prefix_sum("int32"), kernels.sort_scatter(dtype)]


def _digit_counts(dtype: str, n: int) -> int:
    """How many counts a pass of the sort has, of each digit in each tile."""
    return SORT_DIGITS * ceil_div(n, kernels.sort_tile(dtype))


class Chain:
    """Launches that follow each other.

    Attributes:
        bytes: of the arrays ``tile sums``, which are 0 before the first launch and between any two, and ``digit
            counts``, for what was put so far.
    """

    def __init__(self) -> None:
        self.bytes = {"tile sums": 0, "digit counts": 0}

    def prefix_sum(self, dtype: str, array: At, n: int, *, exclusive: bool) -> Launch:
        """Sums in place."""
        sums = At("tile sums")
        self.bytes[sums.array] = max(self.bytes[sums.array], 8 * kernels.scan_words(dtype, n))
        values: dict[str, Value] = {"x": array, "y": array, "n": n, "exclusive": int(exclusive), "tile_sums": sums}
        return Launch(kernels.prefix_sum(dtype), kernels.scan_grid(dtype, n), values)

    def sort(
        self, dtype: str, n: int, keys: At, values: At | None, *, sorted_values: At, spare: tuple[At, At]
    ) -> Iterator[Launch]:
        """Sorts keys in place, by an even number of passes, and brings their values to ``sorted_values``.

        Without ``values`` those are the keys' places.  ``spare`` is room for keys and for values.
        """
        tiles, counts = ceil_div(n, kernels.sort_tile(dtype)), At("digit counts")
        self.bytes[counts.array] = max(self.bytes[counts.array], 4 * _digit_counts(dtype, n))
        targets, source = (spare, (keys, sorted_values)), (keys, values)
        for number, shift in enumerate(range(0, 8 * kernels.KEYS[dtype][1], DIGIT_BITS)):
            target = targets[number % 2]
            of_pass: dict[str, Value] = {"keys": source[0], "n": n, "shift": shift}
            moved: dict[str, Value] = {
                "values": source[1], "starts": counts, "keys_out": target[0], "values_out": target[1],
            }  # fmt: skip
            yield Launch(kernels.sort_counts(dtype), (tiles, 1, 1), of_pass | {"counts": counts})
            yield self.prefix_sum("int32", counts, _digit_counts(dtype, n), exclusive=True)
            yield Launch(kernels.sort_scatter(dtype), (tiles, 1, 1), of_pass | moved)
            source = target
