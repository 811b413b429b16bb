"""Means and standard deviations of a data set's columns, as ``Standardize`` layers keep them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..datasets import Dataset
from ..errors import DataError

LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
BLOCK_ROWS = 4096  # of inputs, which are converted to float64 block by block


def input_statistics(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column of the inputs, (n_in,) float64, in two passes over blocks of rows.

    Raises:
        DataError: float32 does not hold the mean or the deviation of a column.
    """
    factor = 1.0 if dataset.scale is None else dataset.scale

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(dataset), BLOCK_ROWS):
            rows = dataset.storage_rows(np.arange(start, min(start + BLOCK_ROWS, len(dataset))))
            yield dataset.storage_x[rows].astype(np.float64) * factor

    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.sum([block.sum(axis=0) for block in blocks()], axis=0) / len(dataset)
        variance = np.sum([np.square(block - mean).sum(axis=0) for block in blocks()], axis=0) / len(dataset)
    return mean, _scale("x", mean, variance)


def target_statistics(dataset: Dataset, n_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column of the targets, (n_out,) float64.

    Raises:
        ShapeError, DtypeError, DataError: the targets are not ``n_out`` columns of numbers.
    """
    targets = dataset.targets(n_out, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, variance = targets.mean(axis=0), targets.var(axis=0)
    return mean, _scale("y", mean, variance)


def _scale(what: str, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Standard deviations, with 1 for a column that varies by no more than the rounding of its mean.

    Raises:
        DataError: float32, in which networks have them, does not hold the mean or the deviation of a column.
    """
    with np.errstate(invalid="ignore"):
        deviation = np.sqrt(variance)
    is_constant = deviation <= 10.0 * np.finfo(np.float64).eps * np.abs(mean)
    scale = np.where(is_constant, 1.0, deviation)
    is_held = (np.abs(mean) <= MOST) & (scale >= LEAST) & (scale <= MOST)  # NaN is not
    if not is_held.all():
        column = int(np.argmin(is_held))
        expected = f"columns with a mean of at most {MOST:.3g} and a standard deviation from {LEAST:.3g} to {MOST:.3g}"
        raise DataError(what, expected=expected, got=f"{mean[column]:g} and {scale[column]:g} in column {column}")
    return scale
