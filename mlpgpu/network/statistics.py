"""Means and standard deviations of a data set's columns, as ``Standardize`` layers keep them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..datasets import Dataset

BLOCK_ROWS = 4096  # of inputs, which are converted to float64 block by block


def input_statistics(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column of the inputs, (n_in,) float64, in two passes over blocks of rows."""
    factor = 1.0 if dataset.scale is None else dataset.scale

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(dataset), BLOCK_ROWS):
            rows = dataset.storage_rows(np.arange(start, min(start + BLOCK_ROWS, len(dataset))))
            yield dataset.storage_x[rows].astype(np.float64) * factor

    mean = np.sum([block.sum(axis=0) for block in blocks()], axis=0) / len(dataset)
    variance = np.sum([np.square(block - mean).sum(axis=0) for block in blocks()], axis=0) / len(dataset)
    return mean, _scale(mean, variance)


def target_statistics(dataset: Dataset, n_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column of the targets, (n_out,) float64.

    Raises:
        ShapeError, DtypeError, DataError: the targets are not ``n_out`` columns of numbers.
    """
    targets = dataset.targets(n_out, np.float64)
    mean = targets.mean(axis=0)
    return mean, _scale(mean, targets.var(axis=0))


def _scale(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Standard deviations, with 1 for a column that varies by no more than the rounding of its mean."""
    deviation = np.sqrt(variance)
    is_constant = deviation <= 10.0 * np.finfo(np.float64).eps * np.abs(mean)
    return np.where(is_constant, 1.0, deviation)
