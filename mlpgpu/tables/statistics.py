"""What is learnt of a column of numbers, rows at a time: mean, deviation, quartiles."""

from __future__ import annotations

import math

import numpy as np

SAMPLE = 1 << 20  # values kept for quartiles, at most; up to so many rows they are exact


class NumberStatistics:
    """Counts, moments and a sample of numbers that come piece by piece.

    Moments of pieces are merged as Chan, Golub and LeVeque (1983) do.  The sample has each row whose number is a
    multiple of a stride, which doubles when the sample is full: it depends on the rows alone, not on the pieces.

    Attributes:
        count, missing: rows with a number, and without.
        mean: of the numbers; 0 without any.
        least, most: of them.
        is_whole: whether all are whole.
        has_time: of dates in seconds, whether one is not midnight.
    """

    def __init__(self) -> None:
        self.count = self.missing = 0
        self.mean = self._squares = 0.0
        self.least, self.most = math.inf, -math.inf
        self.is_whole, self.has_time = True, False
        self._sample: list[tuple[int, np.ndarray]] = []  # the first row of each piece, and values
        self._kept, self._stride = 0, 1

    def add(self, numbers: np.ndarray, first_row: int) -> None:
        """Add (rows,) float64, NaN where missing, of which the first is that of ``first_row``."""
        self._keep(numbers, first_row)
        is_missing = np.isnan(numbers)
        there = numbers[~is_missing] if is_missing.any() else numbers
        self.missing += len(numbers) - len(there)
        if not len(there):
            return
        count, mean = len(there), float(there.mean())
        squares = float(np.square(there - mean).sum())
        total, apart = self.count + count, mean - self.mean
        self._squares += squares + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total
        self.least, self.most = min(self.least, float(there.min())), max(self.most, float(there.max()))
        self.is_whole = self.is_whole and bool((there == np.floor(there)).all())
        self.has_time = self.has_time or bool((there % 86400.0 != 0.0).any())

    def _keep(self, numbers: np.ndarray, first_row: int) -> None:
        """Add each row to the sample whose number is a multiple of the stride, missing values too."""
        skipped = -first_row % self._stride
        kept = numbers[skipped :: self._stride]
        self._sample.append((first_row + skipped, kept if self._stride == 1 else kept.copy()))  # no view of other rows
        self._kept += len(kept)
        while self._kept > SAMPLE:
            thinner = []
            for row, values in self._sample:
                skipped = row // self._stride % 2  # by how many of the sample's rows
                thinner.append((row + skipped * self._stride, values[skipped::2].copy()))
            self._sample, self._stride = thinner, 2 * self._stride
            self._kept = sum(len(values) for _, values in self._sample)

    @property
    def deviation(self) -> float:
        """The standard deviation, by the number of rows; 1 where the numbers do not differ."""
        return math.sqrt(self._squares / self.count) if self.most > self.least else 1.0

    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper one, interpolated linearly."""
        values = np.concatenate([values for _, values in self._sample])
        if np.isnan(values).all():  # only rows that are left out have one
            return self.mean, self.mean, self.mean
        values = values[~np.isnan(values)]
        lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75))
        return float(lower), float(median), float(upper)

    def scaling(self, way: str) -> tuple[float, float]:
        """Center and scale: mean and deviation, or for ``"robust"`` median and distance of the quartiles."""
        if way == "none":
            return 0.0, 1.0
        if way == "robust":
            lower, median, upper = self.quartiles()
            return median, upper - lower if upper > lower else self.deviation
        return self.mean, self.deviation
