"""What a launch must do at least: the arithmetic of its products, and every operand moved once.

Both follow from what its entry declares, and from the lengths that the launch gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..kernels import Argument
from ..kernels.launches import Launch
from .peak_rates import TENSOR_SPEED


def flops(launch: Launch, rows: int) -> int:
    """Multiplications and additions of the matrix products in a launch for ``rows`` rows."""
    lengths = lengths_of(launch, rows)
    made = (
        product
        for product in launch.entry.products
        if not product.when or any(launch.values[name] is not None for name in product.when)
    )
    return 2 * sum(_count(product.axes, lengths) for product in made)


def moved_bytes(launch: Launch, rows: int) -> int:
    """The fewest bytes that a launch for ``rows`` rows moves: each array once, or twice if it is updated in place."""
    given = (each for each in launch.entry.arguments if each.is_array and launch.values[each.name] is not None)
    lengths = lengths_of(launch, rows)
    return sum(array_bytes(argument, lengths) * (2 if argument.is_updated else 1) for argument in given)


def array_bytes(argument: Argument, lengths: Mapping[str, int]) -> int:
    """The size of the array that an argument stands for, as :func:`lengths_of` gives lengths."""
    assert argument.axes is not None, f"the signature states no axes of {argument.name}"
    return argument.item_bytes * _count(argument.axes, lengths)


def speed_of(launch: Launch) -> float:
    """How many times faster than plain cores the card could make a launch's products."""
    operand_format = launch.entry.operand_format
    return TENSOR_SPEED / operand_format.products if operand_format else 1.0


def lengths_of(launch: Launch, rows: int) -> dict[str, int]:
    """What the names of axes stand for in a launch for ``rows`` rows."""
    grid = {f"grid.{axis}": length for axis, length in zip("xyz", launch.grid, strict=True)}
    given = {name: value for name, value in launch.values.items() if isinstance(value, int)}
    return {"rows": rows, **grid, **given, **launch.lengths}


def _count(axes: tuple[str | int, ...], lengths: Mapping[str, int]) -> int:
    return math.prod(lengths[axis] if isinstance(axis, str) else axis for axis in axes)
