"""Metrics against scikit-learn: weighted or not, at once or batch by batch, and far from 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import EPS
from sklearn import metrics as reference

from mlpgpu.metrics import METRICS, SUMS, curve_count, curve_positives, find_metric, improves, sums_of

REFERENCES = {
    "accuracy": reference.accuracy_score,
    "mean_absolute_error": reference.mean_absolute_error,
    "mean_squared_error": reference.mean_squared_error,
    "r2": reference.r2_score,
    "confusion_matrix": reference.confusion_matrix,
    "roc_auc": reference.roc_auc_score,
    "average_precision": reference.average_precision_score,
    "balanced_accuracy": reference.balanced_accuracy_score,
    "matthews_corrcoef": reference.matthews_corrcoef,
}
# Of the second of two classes, which test_metric_values.py has.
EACH = pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if not metric.asks_two])
ADDED_UP = pytest.mark.parametrize("name", [name for name, sums in SUMS.items() if sums.of != "rankings"])
RANKED = pytest.mark.parametrize("name", [name for name, sums in SUMS.items() if sums.of == "rankings"])
WEIGHTS = pytest.mark.parametrize("weighted", [False, True])
ROWS, N_OUT = 60, 3
PROBABLE = ("log_loss", "binary_log_loss", "label_counts", "exact_matches")


def way(name: str) -> tuple[str, Any]:
    """The row of SUMS and the function of the metric's first problem, or of a row of SUMS by itself."""
    return (name, np.copy) if name in SUMS and name not in METRICS else next(iter(find_metric(name).ways.values()))


def example(name: str, weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Output, target and weight."""
    random, sums = np.random.default_rng(3), way(name)[0]
    weight = random.uniform(0.0, 2.0, ROWS) if weighted else None
    if SUMS[sums].of in ("classes", "ranks"):
        return random.integers(N_OUT, size=ROWS), random.integers(N_OUT, size=ROWS), weight
    if SUMS[sums].of == "rankings":  # many scores are equal
        positives = random.random((ROWS, N_OUT)) < 0.4
        return random.integers(12, size=positives.shape) / 8 + 0.25 * positives, positives, weight
    target = random.normal(size=(ROWS, N_OUT))
    output = target + 0.3 * random.normal(size=target.shape)
    if sums in PROBABLE:
        return np.clip(output, 0.01, 0.99), (target > 0.3).astype(float), weight
    return output, target, weight


def value(name: str, output: np.ndarray, target: np.ndarray, weight: np.ndarray | None, *bounds: int) -> Any:
    """The metric accumulated over batches that begin at 0 and ``bounds``."""
    row, finish = way(name)
    sums = np.zeros(SUMS[row].shape(N_OUT))
    for rows in np.split(np.arange(len(target)), bounds):
        SUMS[row].accumulate(output[rows], target[rows], None if weight is None else weight[rows], sums)
    return finish(sums)


@pytest.mark.parametrize("name", REFERENCES)
@WEIGHTS
def test_agrees_with_scikit_learn(name: str, weighted: bool) -> None:
    output, target, weight = example(name, weighted)
    expected = REFERENCES[name](target, output, sample_weight=weight)
    # Sums of 180 terms at most, added in another order.
    np.testing.assert_allclose(value(name, output, target, weight), expected, rtol=ROWS * N_OUT * EPS)


@ADDED_UP
@WEIGHTS
def test_batches_add_up(name: str, weighted: bool) -> None:
    output, target, weight = example(name, weighted)
    whole = value(name, output, target, weight)
    for bounds in ((1, 2, 50), (20, 40), (59,)):
        np.testing.assert_allclose(value(name, output, target, weight, *bounds), whole, rtol=2 * ROWS * N_OUT * EPS)


@EACH
def test_weights_count_as_rows(name: str) -> None:
    output, target, _ = example(name, False)
    times = np.arange(ROWS) % 3  # weight 0 leaves a row out
    repeated = np.repeat(np.arange(ROWS), times)
    expected = value(name, output[repeated], target[repeated], None)
    np.testing.assert_allclose(value(name, output, target, times.astype(float)), expected, rtol=2 * ROWS * N_OUT * EPS)
    np.testing.assert_allclose(value(name, output, target, np.ones(ROWS)), value(name, output, target, None))


@ADDED_UP
def test_a_batch_without_weight_changes_nothing(name: str) -> None:
    output, target, _ = example(name, False)
    weight = (np.arange(ROWS) >= 20).astype(float)
    expected = value(name, output[20:], target[20:], None)
    np.testing.assert_allclose(value(name, output, target, weight, 10, 20), expected, rtol=ROWS * N_OUT * EPS)


@EACH
def test_a_perfect_prediction_ranks_above_a_worse_one(name: str) -> None:
    output, target, _ = example(name, False)
    perfect, worse = (value(name, of, target, None) for of in (target.astype(output.dtype), output))
    if METRICS[name].per == "pair":
        assert np.trace(perfect) == ROWS > np.trace(worse)
        return
    for better, than in zip(np.atleast_1d(perfect), np.atleast_1d(worse), strict=True):
        assert improves(name, better, than, 0.0) and not improves(name, than, better, 0.0)
        assert improves(f"validation_{name}", better, than, 0.0)
        assert improves(f"validation_{name}.0", better, than, 0.0)


def test_sums_are_shared() -> None:
    assert sums_of(["f1_macro", "recall_micro", "accuracy", "confusion_matrix"], "multiclass") == (
        "confusion_matrix",
        "accuracy",
    )
    assert sums_of(["pinball_0.1", "pinball_0.9"], "regression") == ("error_sides",)


def test_improves_by_more_than_min_delta() -> None:
    assert improves("loss", 0.5, 1.0, 0.4) and not improves("loss", 0.5, 1.0, 0.5)
    assert improves("validation_accuracy", 0.75, 0.5, 0.2) and not improves("validation_accuracy", 0.75, 0.5, 0.25)
    assert not improves("validation_loss", float("nan"), 1.0, 0.0)


@pytest.mark.parametrize("bounds", [(), (7, 31), tuple(range(1, ROWS))])
def test_r2_far_from_zero(bounds: tuple[int, ...]) -> None:
    output, target, weight = example("r2", True)
    expected = reference.r2_score(target, output, sample_weight=weight)
    # Moving by 1e6 rounds each number by eps · 1e6, of a spread of order one; squared sums would lose 1e12 eps.
    moved = value("r2", output + 1e6, target + 1e6, weight, *bounds)
    assert moved == pytest.approx(expected, rel=8 * EPS * 1e6)


def test_r2_of_a_target_that_does_not_vary() -> None:
    target = np.ones((5, N_OUT))
    assert value("r2", target, target, None) == 1.0
    assert value("r2", target + 1.0, target, None) == 0.0


# --- ranks ---


@RANKED
@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_ranks_follow_the_order_of_scores_alone(name: str, scale: float) -> None:
    output, positives, weight = example(name, True)
    assert value(name, output * scale, positives, weight) == value(name, output, positives, weight)


@RANKED
def test_ranks_do_not_depend_on_the_order_of_rows(name: str) -> None:
    output, positives, _ = example(name, False)
    weight = np.random.default_rng(4).integers(0, 5, ROWS) / 4  # sums of these are exact
    rows = np.random.default_rng(5).permutation(ROWS)
    assert value(name, output[rows], positives[rows], weight[rows]) == value(name, output, positives, weight)


@RANKED
def test_all_scores_equal(name: str) -> None:
    _, positives, _ = example(name, False)
    expected = 0.5 if name == "roc_auc" else positives.mean()  # the proportion that any threshold finds
    assert value(name, np.zeros(positives.shape), positives, None) == pytest.approx(expected, rel=ROWS * EPS)


@RANKED
def test_a_score_that_is_no_number_gives_none(name: str) -> None:
    output, positives, weight = example(name, True)
    output[7, 1] = np.nan
    assert np.isnan(value(name, output, positives, weight))


def test_curves_of_classes() -> None:
    assert [curve_count(classes) for classes in (2, 3, 10)] == [1, 3, 10]
    classes = np.array([0, 1, 1])
    assert curve_positives(classes, 1).tolist() == [[False], [True], [True]]
    assert curve_positives(classes, 3).tolist() == [[True, False, False], [False, True, False], [False, True, False]]
