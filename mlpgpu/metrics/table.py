"""Metrics: one row of :data:`METRICS` each, or a name with a number in it; what is made of sums over a data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import check_integer, check_number, lookup

# What a row's target may be: one of several classes, one of two, any number of labels, numbers.
Problem = Literal["multiclass", "binary", "multilabel", "regression"]
Finish = Callable[[np.ndarray], "float | np.ndarray"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        ways: for each problem that it suits, the row of :data:`~mlpgpu.metrics.SUMS` and what makes its value of the
            sums: a float or an array.
        higher_is_better: how values rank.
        per: what its value has an element for: a ``"class"`` (or a label), an ``"output"``, a ``"pair"`` of
            classes; ``"set"`` if it is a number.
        asks_two: whether it is that of the second of two classes.
    """

    ways: Mapping[Problem, tuple[str, Finish]]
    higher_is_better: bool
    per: Literal["set", "class", "output", "pair"] = "set"
    asks_two: bool = False


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1])


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is."""
    return np.divide(a, b, out=np.zeros(np.shape(a)), where=b > 0.0)


# --- of classes and labels ---

# Of each class or label the weights of rows that have it and are given it, are given it, and have it.
Counts = tuple[np.ndarray, np.ndarray, np.ndarray]


def _counts_of_classes(matrix: np.ndarray) -> Counts:
    return matrix.diagonal(), matrix.sum(axis=0), matrix.sum(axis=1)


def _counts_of_labels(sums: np.ndarray) -> Counts:
    return sums[0], sums[1], sums[2]


def _precision(hits: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    return _ratio(hits, predicted)


def _recall(hits: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    return _ratio(hits, actual)


def _f1(hits: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    return _ratio(2.0 * hits, predicted + actual)


Score = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Average = Callable[[Score, Counts, bool], "float | np.ndarray"]  # of labels, or of classes


def _second(score: Score, counts: Counts, of_labels: bool) -> float:
    return float(score(*counts)[1])


def _micro(score: Score, counts: Counts, of_labels: bool) -> float:
    return float(score(*(count.sum(keepdims=True) for count in counts))[0])


def _macro(score: Score, counts: Counts, of_labels: bool) -> float:
    # Labels all count, classes only if some row has them or is given them.
    _, predicted, actual = counts
    there = predicted + actual > 0.0
    return float(score(*counts).mean() if of_labels else score(*counts)[there].mean())


def _weighted(score: Score, counts: Counts, of_labels: bool) -> float:
    actual = counts[2]
    return float(_ratio(score(*counts) @ actual, actual.sum()))


def _per_class(score: Score, counts: Counts, of_labels: bool) -> np.ndarray:
    return score(*counts)


AVERAGES: dict[str, Average] = {"micro": _micro, "macro": _macro, "weighted": _weighted, "per_class": _per_class}


def _scores(name: str, score: Score) -> dict[str, Metric]:
    """A score of the second of two classes, ``name``, and its averages over classes or labels."""

    def ways(average: Average) -> dict[Problem, tuple[str, Finish]]:
        classes = ("confusion_matrix", lambda sums: average(score, _counts_of_classes(sums), False))
        labels = ("label_counts", lambda sums: average(score, _counts_of_labels(sums), True))
        return {"multiclass": classes, "binary": classes, "multilabel": labels}

    of_two: dict[Problem, tuple[str, Finish]] = {
        problem: way for problem, way in ways(_second).items() if problem != "multilabel"
    }
    metrics = {name: Metric(of_two, True, asks_two=True)}
    for suffix, average in AVERAGES.items():
        metrics[f"{name}_{suffix}"] = Metric(ways(average), True, "class" if suffix == "per_class" else "set")
    return metrics


def _balanced_accuracy(matrix: np.ndarray) -> float:
    hits, _, actual = _counts_of_classes(matrix)
    there = actual > 0.0
    return float((hits[there] / actual[there]).mean())


def _matthews(matrix: np.ndarray) -> float:
    hits, predicted, actual = _counts_of_classes(matrix)
    # Of shares, so that a set whose weights are tiny or huge neither under- nor overflows.
    total = matrix.sum()
    hit, p, t = hits.sum() / total, predicted / total, actual / total
    spread = (1.0 - p @ p) * (1.0 - t @ t)
    constant = (predicted > 0.0).sum() == 1 or (actual > 0.0).sum() == 1
    return 0.0 if constant or spread <= 0.0 else float((hit - p @ t) / np.sqrt(spread))


def _binary_accuracy(sums: np.ndarray) -> float:
    hits, predicted, actual, total = sums
    return float(((total - predicted - actual + 2.0 * hits) / total).mean())


def _top_k(k: int) -> Finish:
    return lambda sums: float(sums[0, :k].sum() / sums.sum())


# --- of numbers ---


def _r2_of_outputs(sums: np.ndarray) -> np.ndarray:
    _, residual, _, spread = sums
    # A constant target is predicted perfectly or not at all, as scikit-learn counts it.
    flat = np.where(residual == 0.0, 1.0, 0.0)
    return np.where(spread > 0.0, 1.0 - residual / np.where(spread > 0.0, spread, 1.0), flat)


def _pinball(level: float) -> Finish:
    return lambda sums: float((level * sums[0] + (1.0 - level) * sums[1]) / sums[2])


def _of_classes(sums: str, finish: Finish) -> dict[Problem, tuple[str, Finish]]:
    return {"multiclass": (sums, finish), "binary": (sums, finish)}


def _of_labels(sums: str, finish: Finish) -> dict[Problem, tuple[str, Finish]]:
    return {"binary": (sums, finish), "multilabel": (sums, finish)}


def _of_numbers(sums: str, finish: Finish) -> dict[Problem, tuple[str, Finish]]:
    return {"regression": (sums, finish), **_of_labels(sums, finish)}


def _of_rankings(sums: str, finish: Finish) -> dict[Problem, tuple[str, Finish]]:
    return {**_of_classes(sums, finish), "multilabel": (sums, finish)}


METRICS: dict[str, Metric] = {
    "accuracy": Metric({**_of_classes("accuracy", _mean), "multilabel": ("exact_matches", _mean)}, True),
    "mean_absolute_error": Metric(_of_numbers("mean_absolute_error", _mean), False),
    "mean_squared_error": Metric(_of_numbers("mean_squared_error", _mean), False),
    "r2": Metric(_of_numbers("r2", lambda sums: float(_r2_of_outputs(sums).mean())), True),
    "r2_per_output": Metric(_of_numbers("r2", _r2_of_outputs), True, "output"),
    "confusion_matrix": Metric(_of_classes("confusion_matrix", np.copy), True, "pair"),
    # Means over curves; NaN where a score is.
    "roc_auc": Metric(_of_rankings("roc_auc", lambda sums: float((sums[0] / (sums[1] * sums[2])).mean())), True),
    "average_precision": Metric(
        _of_rankings("average_precision", lambda sums: float((sums[0] / sums[1]).mean())), True
    ),
    **_scores("precision", _precision),
    **_scores("recall", _recall),
    **_scores("f1", _f1),
    "balanced_accuracy": Metric(_of_classes("confusion_matrix", _balanced_accuracy), True),
    "matthews_corrcoef": Metric(_of_classes("confusion_matrix", _matthews), True),
    "binary_accuracy": Metric(_of_labels("label_counts", _binary_accuracy), True),
    "hamming_loss": Metric(_of_labels("label_counts", lambda sums: 1.0 - _binary_accuracy(sums)), False),
    "log_loss": Metric({"multiclass": ("log_loss", _mean), **_of_labels("binary_log_loss", _mean)}, False),
}

# Names with a number in them.
_TOP_K = re.compile(r"top_(\d+)_accuracy")
_PINBALL = re.compile(r"pinball_(\d*\.?\d+)")


def top_k_of(name: str) -> int | None:
    """The k of ``top_<k>_accuracy``, None of other names."""
    found = _TOP_K.fullmatch(name)
    return int(found[1]) if found else None


def is_metric(name: str) -> bool:
    """Whether it names a metric of :data:`METRICS` or one with a number."""
    return name in METRICS or bool(_TOP_K.fullmatch(name) or _PINBALL.fullmatch(name))


def metric_name(given: object) -> str:
    """The name of the metric that is meant.

    Raises:
        UnknownNameError, DtypeError: it names none.
        ConfigurationError: its number is out of range.
    """
    if isinstance(given, str):
        if found := _TOP_K.fullmatch(given):
            return f"top_{check_integer(f'k of metric {given}', int(found[1]), least=1)}_accuracy"
        if found := _PINBALL.fullmatch(given):
            return f"pinball_{check_number(f'level of metric {given}', float(found[1]), above=0.0, below=1.0):.12g}"
    return lookup("metric", given, (*METRICS, "top_5_accuracy", "pinball_0.5"))


def find_metric(name: str) -> Metric:
    """The metric of a name that :func:`metric_name` gave."""
    if found := _TOP_K.fullmatch(name):
        return Metric(_of_classes("true_class_ranks", _top_k(int(found[1]))), True)
    if found := _PINBALL.fullmatch(name):
        return Metric({"regression": ("error_sides", _pinball(float(found[1])))}, False)
    return METRICS[name]


def sums_of(names: Sequence[str], problem: Problem) -> tuple[str, ...]:
    """The rows of SUMS that metrics are made of, each once."""
    return tuple(dict.fromkeys(find_metric(name).ways[problem][0] for name in names))


def values_of(names: Sequence[str], problem: Problem, sums: Mapping[str, np.ndarray]) -> dict[str, float | np.ndarray]:
    """The values of metrics by name, of the sums over a data set."""
    values = {}
    for name in names:
        of, finish = find_metric(name).ways[problem]
        values[name] = finish(sums[of])
    return values


VALIDATION = "validation_"


def element_columns(name: str, labels: Sequence[str]) -> tuple[str, ...]:
    """The history's columns for the elements of a metric, such as ``f1_per_class.setosa``.

    In a label ``_`` stands for what a column's name cannot hold; where two would be the same, they are numbers.
    """
    plain = [re.sub(r"[^A-Za-z0-9_-]", "_", label) for label in labels]
    differ = all(plain) and len(set(plain)) == len(plain)
    return tuple(f"{name}.{label if differ else number}" for number, label in enumerate(plain))


Mode = Literal["auto", "min", "max"]
MODES: tuple[Mode, ...] = ("auto", "min", "max")


def improves(monitor: str, value: float, best: float, min_delta: float, mode: Mode = "auto") -> bool:
    """Whether ``value`` passes ``best`` by more than ``min_delta`` in the history's column ``monitor``.

    Higher is better in mode ``"max"``, lower in ``"min"``.  In ``"auto"`` higher is better for the metrics that say
    so; lower for the others: losses, and what metrics and callbacks of one's own give.
    """
    name = monitor.removeprefix(VALIDATION)
    if not is_metric(name):
        name = name.partition(".")[0]
    if mode == "max" or (mode == "auto" and is_metric(name) and find_metric(name).higher_is_better):
        return value > best + min_delta
    return value < best - min_delta
