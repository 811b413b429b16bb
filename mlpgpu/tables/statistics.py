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
        self._sample: list[np.ndarray] = []
        self._kept, self._stride = 0, 1

    def add(self, numbers: np.ndarray, first_row: int) -> None:
        """Add (rows,) float64, NaN where missing, of which the first is that of ``first_row``."""
        is_there = ~np.isnan(numbers)
        there = numbers[is_there]
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
        rows = np.flatnonzero(is_there) + first_row
        self._keep(there, rows)

    def _keep(self, there: np.ndarray, rows: np.ndarray) -> None:
        pair = np.stack([rows.astype(np.float64), there])[:, rows % self._stride == 0]
        self._sample.append(pair)
        self._kept += pair.shape[1]
        while self._kept > SAMPLE:
            self._stride *= 2
            self._sample = [kept[:, kept[0] % self._stride == 0] for kept in self._sample]
            self._kept = sum(kept.shape[1] for kept in self._sample)

    @property
    def deviation(self) -> float:
        """The standard deviation, by the number of rows; 1 where the numbers do not differ."""
        return math.sqrt(self._squares / self.count) if self.most > self.least else 1.0

    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper one, interpolated linearly."""
        values = np.concatenate([pair[1] for pair in self._sample])
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
