"""Fits: the same updates as scikit-learn's MLP, and what goes beyond it."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.neural_network as theirs
from deviations import VERSION
from helpers import EPS32
from sklearn.base import clone
from sklearn.datasets import make_classification, make_multilabel_classification, make_regression
from sklearn.exceptions import ConvergenceWarning

import mlpgpu as mg
import mlpgpu.sklearn as ours
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.errors import ConfigurationError, DataError, DivergenceError, DtypeError, UnknownNameError
from mlpgpu.training.fit import FitLoop

ROWS = 60
PEER_OF_1_7 = pytest.mark.skipif(
    VERSION < (1, 7),
    reason="before 1.7 scikit-learn's own MLP has neither sample_weight nor loss='poisson' to compare with",
)


def fitted(estimator: Any, *data: Any, **options: Any) -> Any:
    """An estimator after a fit that may end before it has converged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(*data, **options)


def classes(n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    return make_classification(ROWS, 8, n_informative=6, n_classes=n_classes, random_state=0)


def numbers(n_targets: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_regression(ROWS, 8, n_targets=n_targets, random_state=0)
    return x, y / np.abs(y).max()


def counts(n_targets: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = numbers(n_targets)
    return x, np.random.default_rng(0).poisson(np.exp(y))


PROBLEMS: dict[str, tuple[str, dict[str, Any], tuple[np.ndarray, np.ndarray]]] = {
    "two classes": ("MLPClassifier", {}, classes(2)),
    "three classes": ("MLPClassifier", {"activation": "tanh"}, classes(3)),
    "labels": (
        "MLPClassifier",
        {"activation": "logistic"},
        make_multilabel_classification(ROWS, 8, n_classes=4, random_state=0),
    ),
    "a number": ("MLPRegressor", {"activation": "tanh"}, numbers(1)),
    "three numbers": ("MLPRegressor", {"activation": "identity"}, numbers(3)),
    "counts": ("MLPRegressor", {"loss": "poisson"}, counts(1)),
    "three counts": ("MLPRegressor", {"loss": "poisson", "activation": "tanh"}, counts(3)),
}
SOLVERS: dict[str, dict[str, Any]] = {
    # scikit-learn adds epsilon before the correction of the mean square, we after it; of such a small one none is seen.
    "adam": {"solver": "adam", "epsilon": 1e-14},
    "nesterov": {"solver": "sgd", "learning_rate_init": 0.01},
    "momentum": {"solver": "sgd", "learning_rate_init": 0.01, "nesterovs_momentum": False},
    "sgd": {"solver": "sgd", "learning_rate_init": 0.01, "momentum": 0.0},
}


def assert_same(fit: Any, other: Any, steps: int) -> None:
    """Parameters and losses of two fits of so many steps agree but for float32's roundings of each step."""
    # A step's sums run over some 60 rows or 60 units, whose roundings make about a square root of that each.
    close = {"rtol": 32 * steps * EPS32, "atol": 32 * steps * EPS32}
    for mine, known in zip([*fit.coefs_, *fit.intercepts_], [*other.coefs_, *other.intercepts_], strict=True):
        np.testing.assert_allclose(mine, known, **close)
    np.testing.assert_allclose(fit.loss_curve_, other.loss_curve_, **close)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(name, marks=PEER_OF_1_7 if "loss" in arguments else ())
        for name, (_, arguments, _) in PROBLEMS.items()
    ],
)
def test_an_update_is_scikit_learns(problem: str, solver: str) -> None:
    name, arguments, (x, y) = PROBLEMS[problem]
    arguments = {**arguments, **SOLVERS[solver], "hidden_layer_sizes": (12, 7), "alpha": 0.7, "random_state": 3}
    mine, known = (getattr(package, name)(max_iter=1, **arguments) for package in (ours, theirs))
    assert_same(fitted(mine, x, y), fitted(known, x, y), 1)
    assert mine.t_ == known.t_ == ROWS and mine.n_iter_ == 1
    assert (mine.n_layers_, mine.n_outputs_) == (known.n_layers_, known.n_outputs_)
    assert mine.out_activation_ == known.out_activation_


@PEER_OF_1_7
@pytest.mark.parametrize("problem", ["three classes", "labels", "three numbers"])
def test_so_are_some_epochs_of_batches_with_weights(problem: str) -> None:
    # The last batch has 60 - 3 · 17 = 9 rows; alpha is divided by its weight.  Unshuffled, both take the same batches.
    name, arguments, (x, y) = PROBLEMS[problem]
    weight = np.random.default_rng(1).uniform(0.5, 2.0, ROWS)
    arguments = {**arguments, "batch_size": 17, "shuffle": False, "alpha": 3.0, "random_state": 0, "max_iter": 5}
    mine, known = (
        getattr(package, name)(solver="sgd", learning_rate_init=0.01, **arguments) for package in (ours, theirs)
    )
    fitted(mine, x, y, sample_weight=weight), fitted(known, x, y, sample_weight=weight)
    known.loss_curve_ = mine.loss_curve_  # in which ours weights batches by their weights, not by their rows
    assert_same(mine, known, 20)


@pytest.mark.parametrize("learning_rate", ["constant", "adaptive", "invscaling"])
@pytest.mark.parametrize("tol", [1e-4, 0.02])
def test_tol_ends_a_fit_at_the_same_epoch(learning_rate: str, tol: float) -> None:
    x, y = classes(2)
    arguments = {"learning_rate": learning_rate, "tol": tol, "n_iter_no_change": 3, "alpha": 0.01, "random_state": 1}
    mine, known = (
        fitted(package.MLPClassifier(8, solver="sgd", learning_rate_init=0.3, max_iter=60, **arguments), x, y)
        for package in (ours, theirs)
    )
    assert mine.n_iter_ == known.n_iter_ and mine.converged_ == (known.n_iter_ < 60)
    assert mine.learning_rate_ == pytest.approx(known._optimizer.learning_rate)
    assert mine.best_loss_ == pytest.approx(known.best_loss_, rel=1e-4)


def test_early_stopping_holds_the_same_rows_out() -> None:
    x, y = classes(2)
    arguments = {"early_stopping": True, "validation_fraction": 0.3, "random_state": 5, "max_iter": 12, "alpha": 0.1}
    mine, known = (fitted(package.MLPClassifier(8, **arguments), x, y) for package in (ours, theirs))
    np.testing.assert_allclose(mine.validation_scores_, known.validation_scores_)
    assert mine.best_validation_score_ == pytest.approx(known.best_validation_score_)
    np.testing.assert_allclose(mine.coefs_[0], known.coefs_[0], rtol=1e-4, atol=1e-5)
    assert len(mine.validation_loss_curve_) == mine.n_iter_ and mine.best_loss_ is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"solver": "lbfgs"}, ConfigurationError, "optimizer that takes batches"),
        ({"optimizer": "lbfgs"}, ConfigurationError, "optimizer that takes batches"),
        ({"solver": "adagrad"}, UnknownNameError, "solver"),
        ({"solver": 3}, DtypeError, "solver"),
        ({"solver": "sgd", "optimizer": "adam"}, ConfigurationError, "one of them"),
        ({"hidden_layer_sizes": (8, 0)}, ConfigurationError, "hidden_layer_sizes must be > 0"),
        ({"hidden_layer_sizes": "8"}, DtypeError, "hidden_layer_sizes"),
        ({"alpha": -1.0}, ConfigurationError, "alpha"),
        ({"batch_size": 0}, ConfigurationError, "batch_size"),
        ({"tol": "0.1"}, DtypeError, "tol"),
        ({"dropout": (0.1, 0.1)}, ConfigurationError, "dropout"),
        ({"early_stopping": 1}, DtypeError, "early_stopping"),
        ({"n_iter_no_change": 0}, ConfigurationError, "n_iter_no_change"),
        ({"metric": 3}, DtypeError, "metric"),
        ({"metric": "accuracies", "early_stopping": True}, UnknownNameError, "metric"),
        ({"loss": "squared_error"}, UnknownNameError, "loss"),
        ({"loss": mg.BinaryFocal()}, ConfigurationError, "3 classes"),
        ({"class_weight": {7: 1.0}}, ConfigurationError, "class_weight"),
        ({"backend": "cpus"}, UnknownNameError, "backend"),
        ({"learning_rate": "slow"}, UnknownNameError, "learning_rate"),
    ],
)
def test_bad_arguments_are_refused_in_fit_and_change_nothing(arguments: dict, error: type, words: str) -> None:
    x, y = classes(3)
    estimator = fitted(ours.MLPClassifier(4, max_iter=1, random_state=0), x, y)
    network, before = estimator.network_, estimator.predict_proba(x)
    with pytest.raises(error, match=words):
        estimator.set_params(**arguments).fit(x, y)
    assert estimator.network_ is network
    assert (network.predict(x) == before).all()


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_data_that_a_trainer_refuses_change_nothing(how: str) -> None:
    x, y = numbers(1)
    estimator = fitted(ours.MLPRegressor(hidden_layer_sizes=4, max_iter=2, random_state=0), x, y)
    before, network = estimator.predict(x), estimator.network_
    with pytest.raises(DataError, match=r"standardize=True.*Solver produced non-finite parameter weights"):
        getattr(estimator, how)(x * 1e300, y)
    assert estimator.network_ is network and estimator.n_iter_ == 2 and len(estimator.loss_curve_) == 2
    assert (estimator.predict(x) == before).all()
    with pytest.raises(DataError, match="at least 0"):
        estimator.set_params(loss="poisson").fit(x, y)
    assert estimator.network_ is network
    unfitted = ours.MLPRegressor()
    with pytest.raises(DataError):
        unfitted.fit(x * 1e300, y)
    assert not hasattr(unfitted, "network_")


def test_lbfgs_has_no_partial_fit() -> None:
    assert not hasattr(ours.MLPClassifier(solver="lbfgs"), "partial_fit")
    assert hasattr(ours.MLPRegressor(solver="sgd"), "partial_fit")


# --- partial_fit ---


def test_partial_fit_goes_on_through_a_pickle() -> None:
    x, y = classes(3)
    unbroken = ours.MLPClassifier(6, batch_size=16, random_state=0, early_stopping=True, validation_fraction=0.2)
    broken = clone(unbroken)
    for call in range(6):
        unbroken.partial_fit(x, y, classes=[0, 1, 2])
        broken = pickle.loads(pickle.dumps(broken)).partial_fit(x, y, classes=[0, 1, 2] if call == 0 else None)
    assert unbroken.loss_curve_ == broken.loss_curve_ and len(broken.loss_curve_) == 6
    assert (unbroken.predict_proba(x) == broken.predict_proba(x)).all()
    assert unbroken.validation_scores_ == broken.validation_scores_


def test_partial_fit_goes_on_after_a_fit() -> None:
    x, y = numbers(2)
    whole = fitted(ours.MLPRegressor(hidden_layer_sizes=6, max_iter=4, random_state=0), x, y)
    parts = fitted(ours.MLPRegressor(hidden_layer_sizes=6, max_iter=3, random_state=0), x, y).partial_fit(x, y)
    assert whole.loss_curve_ == parts.loss_curve_
    assert (whole.predict(x) == parts.predict(x)).all()


def test_partial_fit_of_labels_stops_early() -> None:
    x, y = make_multilabel_classification(ROWS, 8, n_classes=4, random_state=0)
    estimator = ours.MLPClassifier(
        6, early_stopping=True, n_iter_no_change=2, tol=0.5, metric="loss", random_state=0, solver="sgd"
    )
    calls = 0
    while not getattr(estimator, "converged_", False):
        estimator.partial_fit(x, y)
        calls += 1
        assert calls < 100
    assert len(estimator.validation_scores_) == calls
    assert estimator.best_validation_score_ == min(estimator.validation_scores_)
    best = estimator.predict_proba(x)
    estimator.partial_fit(x, y)  # still not better by tol: the best call's network is back
    assert estimator.converged_ and (estimator.predict_proba(x) == best).all() == (
        estimator.best_validation_score_ == min(estimator.validation_scores_[:calls])
    )


def test_partial_fit_refuses_what_does_not_go_on() -> None:
    x, y = classes(3)
    with pytest.raises(ConfigurationError, match="classes must be passed on the first call"):
        ours.MLPClassifier().partial_fit(x, y)
    estimator = ours.MLPClassifier(4).partial_fit(x, y, classes=[0, 1, 2])
    with pytest.raises(ConfigurationError, match="first call"):
        estimator.partial_fit(x, y, classes=[0, 1])
    with pytest.raises(DataError, match="classes of the first call"):
        estimator.partial_fit(x, y + 1)
    with pytest.raises(ConfigurationError, match="network that goes on"):
        estimator.set_params(hidden_layer_sizes=5).partial_fit(x, y)


# --- what scikit-learn's has not ---


def test_options_reach_the_network() -> None:
    x, y = classes(3)
    estimator = fitted(
        ours.MLPClassifier(
            (6, 5), dropout=(0.1, 0.0), standardize=True, optimizer=mg.AdamW(0.01), loss=mg.Focal(), max_iter=2
        ),
        x * 100.0,
        y,
    )
    kinds = [type(layer).__name__ for layer in estimator.network_.layers]
    assert kinds == ["Standardize", "Dense", "Dropout", "Dense", "Dense"]
    assert [w.shape for w in estimator.coefs_] == [(8, 6), (6, 5), (5, 3)]
    assert estimator.network_.output == "softmax"


def test_class_weight_is_by_class_and_as_weights_of_rows() -> None:
    x, y = classes(3)
    names = np.array(["a", "b", "c"])[y]
    by_class = {"a": 1.0, "b": 3.0, "c": 0.5}
    weight = np.array([by_class[name] for name in names])
    one = fitted(ours.MLPClassifier(6, class_weight=by_class, max_iter=3, random_state=0), x, names)
    other = fitted(ours.MLPClassifier(6, max_iter=3, random_state=0), x, names, sample_weight=weight)
    np.testing.assert_allclose(one.predict_proba(x), other.predict_proba(x), rtol=1e-5)
    assert one.predict(x).dtype == names.dtype


@pytest.mark.parametrize(
    ("metric", "is_better"),
    [("f1_macro", np.greater), ("loss", np.less), (lambda y, p: float((p.argmax(axis=1) == y).mean()), np.greater)],
)
def test_early_stopping_by_a_metric(metric: Any, is_better: Any) -> None:
    x, y = classes(3)
    estimator = ours.MLPClassifier(
        6, early_stopping=True, metric=metric, max_iter=20, random_state=0, validation_fraction=0.3
    )
    scores = fitted(estimator, x, y).validation_scores_
    assert not any(is_better(score, estimator.best_validation_score_) for score in scores)
    assert estimator.best_validation_score_ in scores


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_divergence_says_so() -> None:
    x, y = numbers(1)
    estimator = ours.MLPRegressor(hidden_layer_sizes=8, activation="identity", solver="sgd", learning_rate_init=100.0)
    with pytest.raises(DivergenceError, match="Solver produced non-finite parameter weights") as caught:
        estimator.fit(x, y)
    assert isinstance(caught.value, ValueError)
    with pytest.warns(ConvergenceWarning, match="diverged in epoch"):
        estimator.set_params(early_stopping=True).fit(x, y)
    assert np.isnan(estimator.validation_scores_[-1]) and np.isfinite(estimator.predict(x)).all()


def test_values_may_be_given_and_are_read_only_copies() -> None:
    x, y = classes(2)
    estimator = ours.MLPClassifier(3, solver="sgd", learning_rate_init=1e-12, momentum=0.0)
    weights, biases = [np.ones((8, 3)), np.ones((3, 1))], [np.zeros(3), np.zeros(1)]
    estimator.coefs_, estimator.intercepts_ = weights, biases
    estimator.partial_fit(x, y, classes=[0, 1])
    np.testing.assert_allclose(estimator.coefs_[0], weights[0], rtol=1e-5)
    estimator.intercepts_ = [np.full(3, 2.0), np.full(1, 3.0)]
    assert estimator.network_.parameters["1.bias"][0] == 3.0
    with pytest.raises(ValueError, match="read-only"):
        estimator.coefs_[0][0] = 0.0
    with pytest.raises(AttributeError):
        ours.MLPClassifier().coefs_  # noqa: B018 (reading it is what is refused)


def test_the_penalty_is_asked_of_the_program_and_no_weights_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what a program adds up, an epoch reads no parameters: on a card they would all be copied."""
    x, y = classes(3)
    options: dict[str, Any] = {"max_iter": 4, "random_state": 0, "alpha": 0.5, "batch_size": 16}
    expected = fitted(ours.MLPClassifier(8, **options), x, y)
    read, asked = CpuProgram.read, []

    def counting(self: CpuProgram, **kept: Any) -> Any:
        assert asked is not None and not epochs, "an epoch reads the parameters"
        return read(self, **kept)

    def square_sum(self: CpuProgram, parts: Any) -> float:
        asked.append(len(parts))
        return 100.0

    epochs: list[int] = []
    train_epoch = FitLoop._train_epoch

    def watched(self: FitLoop, *arguments: Any) -> None:
        epochs.append(1)
        train_epoch(self, *arguments)
        if len(epochs) == 4:
            epochs.clear()

    monkeypatch.setattr(CpuProgram, "read", counting)
    monkeypatch.setattr(CpuProgram, "square_sum", square_sum)
    monkeypatch.setattr(FitLoop, "_train_epoch", watched)
    found = fitted(ours.MLPClassifier(8, **options), x, y)
    assert asked == [2] * 4  # after each epoch; before the first one the network has them
    monkeypatch.setattr(CpuProgram, "square_sum", lambda self, parts: 0.0)
    without = fitted(ours.MLPClassifier(8, **options), x, y)
    penalty = 0.5 * 0.5 * 100.0 * 4 / ROWS  # of four batches; in the first epoch the mean with that of its beginning
    differences = np.subtract(found.loss_curve_, without.loss_curve_)
    np.testing.assert_allclose(differences, penalty * np.array([0.5, 1.0, 1.0, 1.0]), rtol=1e-12)
    np.testing.assert_array_equal(found.coefs_[0], expected.coefs_[0])
