"""Metrics: one row of :data:`METRICS` each, as sums over rows and what is made of them.

A metric adds to an array of float64 sums batch by batch, on any backend, and turns the sums into
its value at the end; so it holds no data set's predictions.  Ranking metrics alone need all scores
of a set at once, and fill their sums when an evaluation ends.  Rows count by their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

TargetsOf = Literal["classes", "numbers", "rankings"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        shape: ``shape(n)``, the shape of its sums for n classes, n numbers in a row, or n curves.
        accumulate: ``accumulate(output, target, weight, sums)`` adds a batch.  Of ``"classes"``:
            output and target (B,) are class numbers; of ``"numbers"``: (B, n_out) floats; of
            ``"rankings"``: output (B, curves) are scores, target (B, curves) says which rows are a
            curve's positives, and the batch is the whole set.  ``weight`` is (B,) or None, which
            stands for ones.
        finish: ``finish(sums)`` gives a float or, for a matrix, an array.
        of: what it compares.
        higher_is_better: how values rank.
        is_scalar: whether the value is one number, which a history can hold.
    """

    shape: Callable[[int], tuple[int, ...]]
    accumulate: Callable[[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray], None]
    finish: Callable[[np.ndarray], float | np.ndarray]
    of: TargetsOf
    higher_is_better: bool
    is_scalar: bool = True


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1])


def _accuracy(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    right = output == target
    sums += (right.sum(), len(right)) if weight is None else (weight[right].sum(), weight.sum())


def _error_mean(error: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    per_row = error.mean(axis=1, dtype=np.float64)
    sums += (per_row.sum(), len(per_row)) if weight is None else (per_row @ weight, weight.sum())


def _absolute(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    _error_mean(np.abs(output - target), weight, sums)


def _squared(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    _error_mean(np.square(output - target), weight, sums)


def _r2(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    # Per output: Σw, Σw(o-t)², and the targets' running mean and spread, merged batch by batch as
    # Chan et al. do (1983): Σt² - (Σt)²/n would cancel for targets far from 0.
    total, residual, mean, spread = sums
    t = target.astype(np.float64)
    w = np.ones(len(t)) if weight is None else weight.astype(np.float64)
    batch = w.sum()
    if batch == 0.0:
        return
    batch_mean = w @ t / batch
    shift = batch_mean - mean
    residual += w @ np.square(output - t)
    spread += w @ np.square(t - batch_mean) + np.square(shift) * total * batch / (total + batch)
    mean += shift * batch / (total + batch)
    total += batch


def _r2_value(sums: np.ndarray) -> float:
    _, residual, _, spread = sums
    # A constant target is predicted perfectly or not at all, as scikit-learn counts it.
    flat = np.where(residual == 0.0, 1.0, 0.0)
    return float(np.where(spread > 0.0, 1.0 - residual / np.where(spread > 0.0, spread, 1.0), flat).mean())


def _confusion(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    classes = len(sums)
    sums += np.bincount(target * classes + output, weight, classes * classes).reshape(classes, classes)


def curve_count(classes: int) -> int:
    """How many curves set one class against the others: of two classes it is the second one's alone."""
    return 1 if classes == 2 else classes


def curve_positives(classes: np.ndarray, curves: int) -> np.ndarray:
    """Which rows are each curve's positives, (rows, curves), of class numbers (rows,)."""
    return classes[:, np.newaxis] == (np.arange(curves) if curves > 1 else [1])


def _of_rankings(area: Callable[[np.ndarray, np.ndarray], float], finish: Callable[[np.ndarray], float]) -> Metric:
    """A metric with three sums for each curve: its area, and the weights of its positives and its negatives.

    In ``area(positives, negatives)`` element g of each, (groups + 1,), is the summed weight of that side's rows in the
    g highest groups of equal scores; element 0 is 0.
    """

    def accumulate(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
        of_row = np.ones(len(output)) if weight is None else weight.astype(np.float64)
        for curve, (scores, positive) in enumerate(zip(output.T, target.T, strict=True)):
            order = np.argsort(-scores, kind="stable")
            ranked = scores[order]
            ends = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(order) - 1)
            positives, negatives = (
                np.append(0.0, np.cumsum(np.where(side, of_row, 0.0)[order])[ends]) for side in (positive, ~positive)
            )
            value = math.nan if np.isnan(scores).any() else area(positives, negatives)
            sums[:, curve] += (value, positives[-1], negatives[-1])

    return Metric(lambda n: (3, n), accumulate, finish, "rankings", True)


def _roc_area(positives: np.ndarray, negatives: np.ndarray) -> float:
    return float(np.diff(negatives) @ (positives[1:] + positives[:-1]) / 2.0)


def _precision_area(positives: np.ndarray, negatives: np.ndarray) -> float:
    gained, found = np.diff(positives), positives[1:] + negatives[1:]
    return float(gained @ np.divide(positives[1:], found, out=np.zeros(len(found)), where=found > 0.0))


METRICS: dict[str, Metric] = {
    "accuracy": Metric(lambda n: (2,), _accuracy, _mean, "classes", True),
    "mean_absolute_error": Metric(lambda n: (2,), _absolute, _mean, "numbers", False),
    "mean_squared_error": Metric(lambda n: (2,), _squared, _mean, "numbers", False),
    "r2": Metric(lambda n: (4, n), _r2, _r2_value, "numbers", True),
    # Row: the true class; column: the predicted one.
    "confusion_matrix": Metric(lambda n: (n, n), _confusion, np.copy, "classes", True, False),
    # Means over curves; NaN where a score is.
    "roc_auc": _of_rankings(_roc_area, lambda sums: float((sums[0] / (sums[1] * sums[2])).mean())),
    "average_precision": _of_rankings(_precision_area, lambda sums: float((sums[0] / sums[1]).mean())),
}

VALIDATION = "validation_"


Mode = Literal["auto", "min", "max"]
MODES: tuple[Mode, ...] = ("auto", "min", "max")


def improves(monitor: str, value: float, best: float, min_delta: float, mode: Mode = "auto") -> bool:
    """Whether ``value`` passes ``best`` by more than ``min_delta`` in the history's column ``monitor``.

    Higher is better in mode ``"max"``, lower in ``"min"``.  In ``"auto"`` higher is better for the metrics that say
    so; lower for the others: losses, and what metrics and callbacks of one's own give.
    """
    metric = METRICS.get(monitor.removeprefix(VALIDATION))
    if mode == "max" or (mode == "auto" and metric is not None and metric.higher_is_better):
        return value > best + min_delta
    return value < best - min_delta
