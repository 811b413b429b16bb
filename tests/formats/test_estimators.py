"""Fitted estimators of scikit-learn become networks that predict the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

import mlpgpu as mg
from mlpgpu import errors

RNG = np.random.default_rng(4)
X = RNG.standard_normal((60, 5)) * [1.0, 10.0, 0.1, 3.0, 1.0] + 2.0
Y = X @ RNG.standard_normal((5, 2)) + 7.0
CLASSES = np.arange(60) % 3
EPS = np.finfo(np.float64).eps


def fitted(estimator: Any, x: Any, y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x, y)


def options(**others: Any) -> dict[str, Any]:
    return {"hidden_layer_sizes": (8, 7), "max_iter": 3, "random_state": 1, **others}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
def test_every_activation(activation: str, dtype: str) -> None:
    x = X.astype(dtype)
    estimator = fitted(MLPRegressor(**options(activation=activation)), x, Y)
    net = mg.from_sklearn(estimator)
    assert net.dtype == dtype
    np.testing.assert_allclose(net.predict(x), estimator.predict(x), rtol=0.0, atol=200 * np.finfo(dtype).eps * 20)


@pytest.mark.parametrize(
    ("y", "output"),
    [(CLASSES, "softmax"), (CLASSES > 0, "sigmoid"), (np.eye(3, dtype=int)[CLASSES], "sigmoid")],
    ids=["classes", "two classes", "labels"],
)
def test_classifiers(y: np.ndarray, output: str) -> None:
    estimator = fitted(MLPClassifier(**options()), X, y)
    net, expected = mg.from_sklearn(estimator), estimator.predict_proba(X)
    assert net.output == output
    found = net.predict(X)
    if found.ndim == 1:
        expected = expected[:, 1]
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=200 * EPS)


def test_names_of_classes_and_columns() -> None:
    frame = pandas.DataFrame(X, columns=list("abcde"))
    names = np.array(["ant", "bee", "cat"])
    estimator = fitted(MLPClassifier(**options()), frame, names[CLASSES])
    net = mg.from_sklearn(estimator)
    assert (net.classes, net.columns) == (("ant", "bee", "cat"), tuple("abcde"))
    np.testing.assert_array_equal(net.labels(X), estimator.predict(frame))
    numbers = mg.from_sklearn(fitted(MLPClassifier(**options()), X, CLASSES))
    assert numbers.classes is None
    np.testing.assert_array_equal(numbers.labels(X), numbers.predict(X).argmax(axis=1))


def test_counts_have_an_exponential_output() -> None:
    try:
        estimator = MLPRegressor(**options(loss="poisson"))
    except TypeError:
        pytest.skip("scikit-learn has no Poisson loss before 1.7")
    fitted(estimator, X, RNG.poisson(3.0, 60))
    net = mg.from_sklearn(estimator)
    assert net.output == "exp"
    np.testing.assert_allclose(net.predict(X), estimator.predict(X), rtol=1e-12)


@pytest.mark.parametrize(
    "scaler", [StandardScaler(), StandardScaler(with_mean=False), StandardScaler(with_std=False)], ids=str
)
def test_scalers_before_and_behind(scaler: StandardScaler, tmp_path: Path) -> None:
    x = np.column_stack([X, np.full(60, 3.0)])  # a column that does not vary
    pipeline = make_pipeline("passthrough", scaler, MLPRegressor(**options()))
    estimator = fitted(TransformedTargetRegressor(pipeline, transformer=StandardScaler()), x, Y)
    net = mg.from_sklearn(estimator)
    assert [type(layer).__name__ for layer in net.layers] == ["Standardize", "Dense", "Dense", "Dense", "Standardize"]
    expected = estimator.predict(x)
    np.testing.assert_allclose(net.predict(x), expected, rtol=0.0, atol=1e-11)
    net.save(tmp_path / "net.h5")
    assert mg.load(tmp_path / "net.h5").predict(x).tobytes() == net.predict(x).tobytes()


def test_a_single_output_is_predicted_as_a_column_of_numbers() -> None:
    estimator = fitted(TransformedTargetRegressor(MLPRegressor(**options()), transformer=StandardScaler()), X, Y[:, 0])
    net = mg.from_sklearn(estimator)
    assert net.predict(X).shape == (60,)
    np.testing.assert_allclose(net.predict(X), estimator.predict(X), rtol=0.0, atol=1e-11)


def test_the_network_of_an_estimator_of_ours_is_a_copy() -> None:
    class Estimator:
        network_ = mg.Network([mg.Dense(5, 2)], seed=1)

    found = mg.from_sklearn(Estimator())
    assert found is not Estimator.network_
    np.testing.assert_array_equal(found.predict(X), Estimator.network_.predict(X))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another estimator": (lambda: LinearRegression().fit(X, Y), errors.DtypeError, "MLPClassifier or MLPRegressor"),
    "nothing": (lambda: None, errors.DtypeError, "MLPClassifier or MLPRegressor"),
    "unfitted": (MLPClassifier, errors.ConfigurationError, "a fitted estimator"),
    "an unfitted pipeline": (lambda: make_pipeline(StandardScaler(), MLPRegressor()), errors.ConfigurationError, "fit"),
    "another scaler": (
        lambda: fitted(make_pipeline(MinMaxScaler(), MLPRegressor(**options())), X, Y),
        errors.ConfigurationError,
        "a StandardScaler",
    ),
    "two scalers": (
        lambda: fitted(make_pipeline(StandardScaler(), StandardScaler(), MLPRegressor(**options())), X, Y),
        errors.ConfigurationError,
        "one StandardScaler",
    ),
    "a function of the targets": (
        lambda: fitted(TransformedTargetRegressor(MLPRegressor(**options()), func=abs, inverse_func=abs), X, Y),
        errors.ConfigurationError,
        "a StandardScaler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    made, error, match = REFUSED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a function and its inverse are none
        estimator = made()
    with pytest.raises(error, match=match):
        mg.from_sklearn(estimator)


def test_estimators_with_values_of_others_are_refused() -> None:
    estimator = fitted(MLPRegressor(**options()), X, Y)
    estimator.coefs_[1] = np.full((8, 7), np.nan)
    with pytest.raises(errors.ConfigurationError, match="finite"):
        mg.from_sklearn(estimator)
    estimator.coefs_[1] = np.ones((9, 7))
    with pytest.raises(errors.ConfigurationError, match="fit each other"):
        mg.from_sklearn(estimator)
