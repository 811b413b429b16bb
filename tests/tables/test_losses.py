"""Losses: values against their formulas, deltas against differences, large logits, and what predictions are made by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import EPS, EPS32, LOSS_KINDS, LOSS_OF, STEP, dataset
from scipy.special import expit, huber, log_expit, log_softmax, softmax

from mlpgpu.errors import ConfigurationError, DtypeError, UnknownNameError
from mlpgpu.losses import (
    FORMS,
    LOSSES,
    OUTPUTS,
    Focal,
    Huber,
    OutputName,
    Quantile,
    SoftmaxCrossEntropy,
    TargetKind,
    apply_output,
    as_loss,
    class_count,
    classes_of,
)

EACH = pytest.mark.parametrize(("name", "kind"), LOSS_KINDS)

DELTA, LEVEL, SMOOTHING, GAMMA = 0.75, 0.8, 0.2, 2.0  # of the losses in LOSS_OF

# A row's value, (B,), from logits and dense targets (B, n), as textbooks write it.
FORMULAS = {
    "squared_error": lambda z, t: ((z - t) ** 2).sum(axis=1) / 2.0,
    "mean_squared_error": lambda z, t: ((z - t) ** 2).mean(axis=1),
    "absolute_error": lambda z, t: np.abs(z - t).mean(axis=1),
    "huber": lambda z, t: np.where(
        np.abs(z - t) <= DELTA, (z - t) ** 2 / 2.0, DELTA * (np.abs(z - t) - DELTA / 2.0)
    ).mean(axis=1),
    "binary_cross_entropy": lambda z, t: -(t * log_expit(z) + (1.0 - t) * log_expit(-z)).mean(axis=1),
    "softmax_cross_entropy": lambda z, t: -(t * log_softmax(z, axis=1)).sum(axis=1),
    "smoothed_softmax_cross_entropy": lambda z, t: (
        -(((1.0 - SMOOTHING) * t + SMOOTHING / z.shape[1]) * log_softmax(z, axis=1)).sum(axis=1)
    ),
    "quantile": lambda z, t: np.maximum(LEVEL * (t - z), (LEVEL - 1.0) * (t - z)).mean(axis=1),
    "poisson": lambda z, t: (np.exp(z) - t * z).mean(axis=1),
    "binary_focal": lambda z, t: (
        -(t * expit(-z) ** GAMMA * log_expit(z) + (1.0 - t) * expit(z) ** GAMMA * log_expit(-z)).mean(axis=1)
    ),
    "focal": lambda z, t: -(t * (1.0 - softmax(z, axis=1)) ** GAMMA * log_softmax(z, axis=1)).sum(axis=1),
}


def evaluate(name: str, z: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value (B,) and delta (B, n)."""
    value, delta, scratch = np.full(len(z), np.nan, z.dtype), np.full_like(z, np.nan), np.full_like(z, np.nan)
    with np.errstate(over="ignore"):
        LOSS_OF[name].evaluate(z, target, value, delta, scratch)
    return value, delta


def example(name: str, kind: TargetKind, n_out: int, rows: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Logits (rows, n_out) and targets."""
    target = dataset(name, kind, rows=rows, n_in=1, n_out=n_out).y
    return np.random.default_rng(9).normal(scale=2.0, size=(rows, n_out)), target


def reach(name: str, z: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """How large the terms of a row's value are, (B,), and by a factor those of its derivatives."""
    terms = np.exp(z) + np.abs(dense * z) if LOSS_OF[name].output == "exp" else np.abs(z - dense) + 1.0
    return (1.0 + terms.max(axis=1)) ** 2


@EACH
@pytest.mark.parametrize("n_out", [1, 2, 5])
def test_value(name: str, kind: TargetKind, n_out: int) -> None:
    z, target = example(name, kind, n_out)
    dense = np.eye(n_out)[target] if kind == "index" else target
    # Either side rounds fewer than 8 times for each of n terms.
    bound = 8 * EPS * n_out * reach(name, z, dense)
    assert (np.abs(evaluate(name, z, target)[0] - FORMULAS[name](z, dense)) <= bound).all()


@EACH
@pytest.mark.parametrize("n_out", [1, 4])
def test_delta_is_the_derivative_of_the_value(name: str, kind: TargetKind, n_out: int) -> None:
    z, target = example(name, kind, n_out)
    if kind == "dense":
        target = target * 1.5  # a distribution that sums to something else has a derivative too
    delta = evaluate(name, z, target)[1]
    value = evaluate(name, z, target)[0]
    # Third derivatives stay under 6 (those of log Σ exp and of squares are under 1), or that of exp; 8 n roundings.
    curved = 1.0 + np.exp(z).max(axis=1) if LOSS_OF[name].output == "exp" else 1.0
    bound = curved * STEP**2 + 8 * n_out * EPS * (1.0 + np.abs(value) + curved) / STEP
    for unit in range(n_out):
        step = np.zeros(n_out)
        step[unit] = STEP
        difference = (evaluate(name, z + step, target)[0] - evaluate(name, z - step, target)[0]) / (2.0 * STEP)
        assert (np.abs(delta[:, unit] - difference) <= bound).all()


@EACH
def test_float32_follows_float64(name: str, kind: TargetKind) -> None:
    z, target = example(name, kind, 3)
    z32, target32 = z.astype(np.float32), target if kind == "index" else target.astype(np.float32)
    wide = evaluate(name, z32.astype(np.float64), target32.astype(target.dtype))
    narrow = evaluate(name, z32, target32)
    bound = 8 * EPS32 * 3 * (reach(name, z, np.zeros(1)) if kind == "index" else reach(name, z, target))
    assert narrow[0].dtype == narrow[1].dtype == np.float32
    assert (np.abs(narrow[0] - wide[0]) <= bound).all()
    assert (np.abs(narrow[1] - wide[1]) <= bound[:, np.newaxis]).all()


@EACH
def test_rows_stand_alone(name: str, kind: TargetKind) -> None:
    z, target = example(name, kind, 3)
    value, delta = evaluate(name, z, target)
    for row in range(len(z)):
        alone = evaluate(name, z[row : row + 1], target[row : row + 1])
        assert alone[0] == value[row]
        assert (alone[1] == delta[row]).all()
    nothing = evaluate(name, z[:0], target[:0])  # a shard is empty where a batch has fewer rows than shards
    assert nothing[0].shape == (0,)


@EACH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_logits_stay_finite(name: str, kind: TargetKind, dtype: type) -> None:
    _, target = example(name, kind, 2, rows=4)
    large = 80.0 if LOSS_OF[name].output == "exp" else 1e4  # of which float32 has the exponential
    z = large * np.array([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]], dtype)
    value, delta = evaluate(name, z, target if kind == "index" else target.astype(dtype))
    assert np.isfinite(value).all() and ((value >= 0.0).all() or name == "poisson")
    assert np.isfinite(delta).all()


def test_a_sure_and_wrong_classifier_pays_its_logit() -> None:
    z = np.array([[1e4, 0.0], [1e4, 0.0]])
    value, delta = evaluate("softmax_cross_entropy", z, np.array([0, 1]))
    assert (value == [0.0, 1e4]).all()
    assert (delta == [[0.0, 0.0], [1.0, -1.0]]).all()
    value, delta = evaluate("binary_cross_entropy", z[:, :1], np.array([[1.0], [0.0]]))
    assert (value == [0.0, 1e4]).all()
    assert (delta == [[0.0], [1.0]]).all()


def test_a_class_is_its_one_hot_distribution() -> None:
    z, target = example("softmax_cross_entropy", "index", 5)
    by_index, by_row = (evaluate("softmax_cross_entropy", z, t) for t in (target, np.eye(5)[target]))
    np.testing.assert_allclose(by_index[0], by_row[0], rtol=0, atol=8 * EPS * (1.0 + np.abs(z).max()))
    np.testing.assert_allclose(by_index[1], by_row[1], rtol=0, atol=8 * EPS)


def test_one_logit_is_two_classes() -> None:
    z, _ = example("binary_cross_entropy", "dense", 1)
    labels = np.arange(len(z)) % 2
    pair = np.concatenate([np.zeros_like(z), z], axis=1)
    one = evaluate("binary_cross_entropy", z, labels[:, np.newaxis].astype(float))
    two = evaluate("softmax_cross_entropy", pair, labels)
    np.testing.assert_allclose(one[0], two[0], rtol=0, atol=8 * EPS * (1.0 + np.abs(z).max()))
    np.testing.assert_allclose(one[1][:, 0], two[1][:, 1], rtol=0, atol=8 * EPS)


# Focal losses and smoothed targets move the minimum on purpose, and quantiles have a kink there.
@pytest.mark.parametrize("name", [name for name in LOSSES if "focal" not in name])
def test_output_is_where_a_loss_is_least(name: str) -> None:
    # All but the robust losses are proper: with the output as target, the delta vanishes.
    z, _ = example(name, "dense", 3)
    output = z.copy()
    apply_output(LOSSES[name].output, output)
    scale = 1.0 + (np.abs(output) if name == "poisson" else 0.0)
    assert (np.abs(evaluate(name, z, output)[1]) <= 8 * EPS * scale).all()


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: OutputName) -> None:
    z = np.concatenate([np.random.default_rng(4).normal(size=(6, 4)), [[700.0, 700.0, 0.0, -700.0]]])
    y = z.copy()
    apply_output(name, y)
    expected = {"identity": z, "sigmoid": expit(z), "softmax": softmax(z, axis=1), "exp": np.exp(z)}[name]
    np.testing.assert_allclose(y, expected, rtol=16 * EPS, atol=0)


def test_classes_of() -> None:
    assert classes_of("softmax", np.array([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0]])).tolist() == [1, 0]
    assert classes_of("softmax", np.array([[1.0]])).tolist() == [0]
    assert [class_count("sigmoid", 1), class_count("sigmoid", 3), class_count("softmax", 1)] == [2, 3, 1]
    assert classes_of("sigmoid", np.array([[0.4], [0.5], [0.6]])).tolist() == [0, 0, 1]


# --- numbers ---


def test_numbers_of_a_loss() -> None:
    assert str(Huber()) == "huber" == Huber().described and str(Huber(2)) == "huber(delta=2)"
    assert Huber(2).described == Huber(2.0) != Huber(3)
    assert as_loss("pinball") == Quantile(0.5) and as_loss(Focal(1)) == Focal(1.0)
    assert {SoftmaxCrossEntropy(s).form for s in (0.0, 0.1)} == set(FORMS) - set(LOSSES) | {"softmax_cross_entropy"}
    assert set(LOSS_OF) == set(FORMS)
    assert {name: loss.form for name, loss in LOSS_OF.items()} == {name: name for name in FORMS}


@pytest.mark.parametrize("delta", [0.3, 1.0, 5.0])
def test_huber_at(delta: float) -> None:
    e = np.linspace(-9.0, 9.0, 31)[:, np.newaxis]
    value, slope = np.empty(31), np.empty((31, 1))
    Huber(delta).evaluate(e, np.zeros((31, 1)), value, slope, np.empty((31, 1)))
    np.testing.assert_allclose(value, huber(delta, e[:, 0]), rtol=8 * EPS)
    np.testing.assert_allclose(slope[:, 0], np.clip(e[:, 0], -delta, delta), rtol=8 * EPS)


def test_a_quantile_is_least_at_it() -> None:
    t = np.random.default_rng(2).normal(size=(1001, 1))
    for level in (0.1, 0.5, 0.9):
        at = np.quantile(t, level)
        values = []
        for z in (at - 0.01, at, at + 0.01):
            value, scratch = np.empty(1001), np.empty((2, 1001, 1))
            Quantile(level).evaluate(np.full((1001, 1), z), t, value, scratch[0], scratch[1])
            values.append(value.mean())
        assert values[1] < min(values[0], values[2])


@pytest.mark.parametrize("kind", ["index", "dense"])
def test_what_focal_losses_and_smoothing_are_without_their_numbers(kind: TargetKind) -> None:
    z, target = example("softmax_cross_entropy", kind, 4)
    expected = evaluate("softmax_cross_entropy", z, target)
    value, delta = np.empty(len(z)), np.empty_like(z)
    Focal(0.0).evaluate(z, target, value, delta, np.empty_like(z))
    np.testing.assert_allclose(value, expected[0], rtol=0, atol=32 * EPS * (1.0 + np.abs(z).max()))
    np.testing.assert_allclose(delta, expected[1], rtol=0, atol=32 * EPS)
    SoftmaxCrossEntropy(0.0).evaluate(z, target, value, delta, np.empty_like(z))
    assert (value == expected[0]).all() and (delta == expected[1]).all()


def test_a_focal_loss_of_what_is_sure() -> None:
    """p rounds to 1, and (1 - p)^gamma has no slope at 0 of a gamma below 1."""
    z = np.array([[60.0, 0.0], [800.0, 0.0], [0.0, 800.0]])
    for gamma in (0.5, 1.0, 2.0):
        value, delta = np.empty(3), np.empty((3, 2))
        Focal(gamma).evaluate(z, np.zeros(3, int), value, delta, np.empty((3, 2)))
        assert np.isfinite(value).all() and np.isfinite(delta).all()
        assert abs(delta[:2]).max() < 1e-12 and value[2] == 800.0 and (delta[2] == [-1.0, 1.0]).all()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Huber(0.0), ConfigurationError),
        (lambda: Huber("1"), DtypeError),
        (lambda: Quantile(1.0), ConfigurationError),
        (lambda: SoftmaxCrossEntropy(1.0), ConfigurationError),
        (lambda: Focal(-1.0), ConfigurationError),
        (lambda: Focal(float("nan")), ConfigurationError),
        (lambda: as_loss("hubert"), UnknownNameError),
        (lambda: as_loss(Huber), DtypeError),
    ],
)
def test_numbers_that_are_none_are_refused(make: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [2, 7, 8, 15, 16, 100])
def test_a_row_of_a_large_batch_has_the_bits_that_it_has_in_a_small_one(n: int, dtype: type) -> None:
    """Many short rows are computed column by column."""
    random = np.random.default_rng(n)
    rows, few = 600, 100
    z = (random.normal(size=(rows, n)) * random.choice([1e-30, 1.0, 10.0, 1e4], size=(rows, n))).astype(dtype)
    z[3], z[5, 0] = -0.0, np.inf
    t = random.integers(n, size=rows)

    def evaluate(part: slice) -> tuple[np.ndarray, np.ndarray]:
        value, delta = np.full_like(z[part, 0], np.nan), np.full_like(z[part], np.nan)
        with np.errstate(invalid="ignore"):
            SoftmaxCrossEntropy().evaluate(z[part], t[part], value, delta, np.full_like(delta, np.nan))
        return value, delta

    pieces = [evaluate(slice(start, start + few)) for start in range(0, rows, few)]
    for whole, found in zip(evaluate(slice(0, rows)), zip(*pieces, strict=True), strict=True):
        np.testing.assert_array_equal(
            whole.view(f"u{whole.itemsize}"), np.concatenate(found).view(f"u{whole.itemsize}")
        )
