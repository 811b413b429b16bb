"""Inputs that have more digits than float32, which a first ``Standardize`` layer takes before they are rounded.

A column of timestamps differs in digits that float32 does not have.  Once its mean is subtracted the digits are few: so
rows of float64 or integers are standardized in float64, and rounded once, on their way into a plan in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Gather, Plan, Standardize


def has_more_digits(dtype: np.dtype, plan: Plan) -> bool:
    """Whether inputs of this type, float64 or integers but bytes, are to be standardized before a plan rounds them."""
    is_fine = dtype.itemsize > 4 if dtype.kind == "f" else dtype.kind in "iu" and dtype != np.uint8
    return is_fine and plan.dtype == np.float32 and input_standardize(plan) is not None


def input_standardize(plan: Plan) -> Standardize | None:
    """The operation that standardizes a plan's inputs, if one does."""
    gathered = {op.x for op in plan.evaluation if isinstance(op, Gather)}
    return next((op for op in plan.evaluation if isinstance(op, Standardize) and op.x in gathered), None)


@dataclass(frozen=True, eq=False)
class InputScaling:
    """The statistics of a first ``Standardize`` layer as they were fitted, (n_in,) float64 each.

    ``places`` are those of mean and scale in the flat array of statistics.
    """

    mean: np.ndarray
    scale: np.ndarray
    places: tuple[slice, slice]

    @classmethod
    def of(cls, plan: Plan, statistics: np.ndarray) -> InputScaling | None:
        """That of a plan with such a layer, by all its ``statistics`` (C,) float64."""
        op = input_standardize(plan)
        if op is None:
            return None
        segments = {segment.name: slice(segment.offset, segment.end) for segment in plan.statistics}
        places = segments[op.mean], segments[op.scale]
        return cls(statistics[places[0]], statistics[places[1]], places)

    def standardize(self, x: np.ndarray, wide: np.ndarray, y: np.ndarray) -> None:
        """Write ``(x - mean) / scale`` to ``y`` (B, n_in), rounded once; ``wide`` is scratch, (B, n_in) float64."""
        np.subtract(x, self.mean, out=wide)
        np.divide(wide, self.scale, out=wide)
        np.copyto(y, wide, casting="same_kind")

    def left_of(self, statistics: np.ndarray) -> np.ndarray:
        """What is left of ``statistics`` (C,) for rows that this standardized: a mean of 0, a scale of 1 if equal."""
        mean, scale = self.places
        left = statistics.copy()
        left[mean] = (statistics[mean] - self.mean) / self.scale
        left[scale] = statistics[scale] / self.scale
        return left
