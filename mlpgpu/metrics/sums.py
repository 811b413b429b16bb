"""What metrics are made of: one row of :data:`SUMS` each, sums over rows that any backend adds up batch by batch.

So an evaluation holds no data set's predictions.  Ranking metrics alone need all scores of a set at once, and fill
their sums when an evaluation ends.  Sums are float64; rows count by their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Compared = Literal["classes", "ranks", "numbers", "probabilities", "rankings"]


@dataclass(frozen=True)
class Sums:
    """The sums of some metrics.

    Attributes:
        shape: ``shape(n)``, their shape for n classes, n numbers in a row, or n curves.
        accumulate: ``accumulate(output, target, weight, sums)`` adds a batch, see ``of``; ``weight`` is (B,) or
            None, which stands for ones.
        of: what is compared.  ``"classes"``: output and target (B,) are class numbers.  ``"ranks"``: output (B,) is
            the place of the true class, target (B,), in the order of :func:`true_class_ranks`.  ``"numbers"``:
            (B, n_out) floats.  ``"probabilities"``: output (B, n_out) and target, class numbers (B,) or
            probabilities (B, n_out).  ``"rankings"``: output (B, curves) are scores, target (B, curves) says
            which rows are a curve's positives, and the batch is the whole set.
    """

    shape: Callable[[int], tuple[int, ...]]
    accumulate: Callable[[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray], None]
    of: Compared


def _accuracy(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    right = output == target
    sums += (right.sum(), len(right)) if weight is None else (weight[right].sum(), weight.sum())


def _add_rows(of_rows: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    sums += (of_rows.sum(), len(of_rows)) if weight is None else (of_rows @ weight, weight.sum())


def _error_mean(error: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    _add_rows(error.mean(axis=1, dtype=np.float64), weight, sums)


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


def _confusion(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    classes = len(sums)
    sums += np.bincount(target * classes + output, weight, classes * classes).reshape(classes, classes)


def true_class_ranks(output: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """How many classes come before the true one, ``classes`` (B,), by predictions ``output (B, n)``: (B,) intp.

    Higher predictions come first; of equal ones the class of the higher number, as scikit-learn's
    ``top_k_accuracy_score`` has it, and NaN before all.  One sigmoid's classes are told apart at ½.
    """
    if output.shape[1] == 1:
        return ((output[:, 0] > 0.5) != classes).astype(np.intp)
    numbers = np.arange(output.shape[1])
    order = np.argsort(output, axis=1, kind="stable")[:, ::-1]
    return np.where(order == classes[:, np.newaxis], numbers, 0).sum(axis=1)


def _ranks(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    sums[0] += np.bincount(output, weight, sums.shape[1])


def _clipped(probability: np.ndarray) -> np.ndarray:
    """In float64, and as far from 0 and 1 as its own type tells numbers near 1 apart, so that logarithms are finite."""
    margin = np.finfo(probability.dtype).eps
    return np.clip(probability, margin, 1 - margin).astype(np.float64)


def _log_loss(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    if target.ndim == 1:
        surprise = -np.log(_clipped(output[np.arange(len(target)), target]))
    else:
        surprise = -(target * np.log(_clipped(output))).sum(axis=1)
    _add_rows(surprise, weight, sums)


def _binary_log_loss(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    p, t = _clipped(output), target.astype(np.float64)
    _error_mean(-(t * np.log(p) + (1.0 - t) * np.log(1.0 - p)), weight, sums)


def _label_counts(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    predicted, actual = output > 0.5, target > 0.5
    w = np.ones(len(output)) if weight is None else weight.astype(np.float64)
    sums += (w @ (predicted & actual), w @ predicted, w @ actual, np.full(output.shape[1], w.sum()))


def _exact_matches(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    _add_rows(((output > 0.5) == (target > 0.5)).all(axis=1).astype(np.float64), weight, sums)


def _error_sides(output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, sums: np.ndarray) -> None:
    error = target - output
    for side, of_side in enumerate((error, -error)):
        total = np.zeros(2)
        _error_mean(np.maximum(of_side, 0.0), weight, total)
        sums[side] += total[0]
    sums[2] += total[1]


def curve_count(classes: int) -> int:
    """How many curves set one class against the others: of two classes it is the second one's alone."""
    return 1 if classes == 2 else classes


def curve_positives(classes: np.ndarray, curves: int) -> np.ndarray:
    """Which rows are each curve's positives, (rows, curves), of class numbers (rows,)."""
    return classes[:, np.newaxis] == (np.arange(curves) if curves > 1 else [1])


def _of_rankings(area: Callable[[np.ndarray, np.ndarray], float]) -> Sums:
    """Three sums for each curve: its area, and the weights of its positives and its negatives.

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

    return Sums(lambda n: (3, n), accumulate, "rankings")


def _roc_area(positives: np.ndarray, negatives: np.ndarray) -> float:
    return float(np.diff(negatives) @ (positives[1:] + positives[:-1]) / 2.0)


def _precision_area(positives: np.ndarray, negatives: np.ndarray) -> float:
    gained, found = np.diff(positives), positives[1:] + negatives[1:]
    return float(gained @ np.divide(positives[1:], found, out=np.zeros(len(found)), where=found > 0.0))


SUMS: dict[str, Sums] = {
    "accuracy": Sums(lambda n: (2,), _accuracy, "classes"),  # right, all
    "mean_absolute_error": Sums(lambda n: (2,), _absolute, "numbers"),
    "mean_squared_error": Sums(lambda n: (2,), _squared, "numbers"),
    "r2": Sums(lambda n: (4, n), _r2, "numbers"),
    # Row: the true class; column: the predicted one.
    "confusion_matrix": Sums(lambda n: (n, n), _confusion, "classes"),
    "true_class_ranks": Sums(lambda n: (1, n), _ranks, "ranks"),  # rows whose true class has each rank
    "log_loss": Sums(lambda n: (2,), _log_loss, "probabilities"),
    "binary_log_loss": Sums(lambda n: (2,), _binary_log_loss, "numbers"),
    # Rows that have a label and are given it, that are given it, that have it, all rows.
    "label_counts": Sums(lambda n: (4, n), _label_counts, "numbers"),
    "exact_matches": Sums(lambda n: (2,), _exact_matches, "numbers"),  # rows with all labels right, all rows
    "error_sides": Sums(lambda n: (3,), _error_sides, "numbers"),  # what is lacking, what is too much, all rows
    "roc_auc": _of_rankings(_roc_area),
    "average_precision": _of_rankings(_precision_area),
}
