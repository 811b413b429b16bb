"""What scikit-learn's tools do with the estimators."""

from __future__ import annotations

import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris, make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags

import mlpgpu as mg
from mlpgpu.sklearn import MLPClassifier, MLPRegressor
from mlpgpu.training import interrupt

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, Y = load_iris(return_X_y=True)
QUICK = {"hidden_layer_sizes": (8,), "learning_rate_init": 0.03, "max_iter": 25, "random_state": 0}


def test_in_a_pipeline_cross_validated() -> None:
    scores = cross_val_score(make_pipeline(StandardScaler(), MLPClassifier(**QUICK)), X, Y, cv=3)
    assert scores.min() > 0.8


@pytest.mark.thorough  # processes start
def test_a_search_in_two_processes_finds_what_one_does() -> None:
    grid = {"alpha": [1e-4, 30.0], "dropout": [0.0, 0.2]}
    two, one = (GridSearchCV(MLPClassifier(**QUICK), grid, cv=2, n_jobs=jobs).fit(X, Y) for jobs in (2, 1))
    assert (two.cv_results_["mean_test_score"] == one.cv_results_["mean_test_score"]).all()
    assert two.best_params_ == one.best_params_
    assert (two.predict(X) == one.predict(X)).all()


def test_calibrated_and_permuted() -> None:
    calibrated = CalibratedClassifierCV(MLPClassifier(**QUICK), cv=2).fit(X, Y)
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(axis=1), 1.0, rtol=1e-5)
    fit = MLPClassifier(**QUICK).fit(X, Y)
    found = permutation_importance(fit, X, Y, n_repeats=2, random_state=0)
    assert found.importances_mean[2:].max() > found.importances_mean[:2].max()  # of petals more than of sepals


def test_a_clone_is_unfitted_and_a_pickle_is_not() -> None:
    fit = MLPClassifier(**QUICK, optimizer=mg.Adam(0.03), dropout=(0.1,)).fit(X, Y)
    twin = clone(fit)
    assert not hasattr(twin, "network_") and twin.get_params() == fit.get_params()
    again = pickle.loads(pickle.dumps(fit))
    assert (again.predict_proba(X) == fit.predict_proba(X)).all()
    assert (twin.fit(X, Y).predict_proba(X) == fit.predict_proba(X)).all()


def test_names_of_columns_are_remembered_and_checked() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    fit = MLPClassifier(**QUICK, early_stopping=True).fit(frame, pandas.Series(Y).map({0: "x", 1: "y", 2: "z"}))
    assert fit.feature_names_in_.tolist() == list("abcd") and fit.classes_.tolist() == ["x", "y", "z"]
    with pytest.raises(ValueError, match="feature names"):
        fit.predict(frame[list("dcba")])
    with pytest.warns(UserWarning, match="valid feature names"):
        fit.predict(X)
    piped = make_pipeline(StandardScaler(), MLPRegressor(**QUICK)).set_output(transform="pandas").fit(frame, Y)
    assert piped[-1].feature_names_in_.tolist() == list("abcd")


def test_inputs_of_any_kind() -> None:
    fit = MLPClassifier(**QUICK).fit(X, Y)
    sparse = scipy.sparse.csr_array(X)
    assert (MLPClassifier(**QUICK).fit(sparse, Y).predict_proba(sparse) == fit.predict_proba(X)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = (X * 10).astype(np.uint8)
        bytes_fit = MLPClassifier(**{**QUICK, "max_iter": 1, "n_iter_no_change": 1}, tol=1e9, verbose=0)
        with pytest.warns(ConvergenceWarning):
            bytes_fit.fit(pixels, Y)
    assert (bytes_fit.predict_proba(pixels) == bytes_fit.predict_proba(pixels.astype(float))).all()


def test_several_targets_are_scored_with_weights() -> None:
    x, y = make_regression(80, 5, n_targets=2, random_state=0)
    weight = np.linspace(0.1, 2.0, 80)
    fit = MLPRegressor(**{**QUICK, "max_iter": 200}, standardize=True).fit(x, y, sample_weight=weight)
    assert fit.predict(x).shape == (80, 2) and fit.predict(x).dtype == np.float64
    assert fit.predict(x.astype(np.float32)).dtype == np.float32
    assert fit.score(x, y, weight) > 0.9 and fit.score(x, y, weight) != fit.score(x, y)


def test_metadata_is_routed() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        classifier = MLPClassifier(**QUICK).set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        weight = np.where(Y == 2, 0.0, 1.0)
        weight[0] = 2.0
        search = GridSearchCV(classifier, {"alpha": [1e-4]}, cv=2).fit(X, Y, sample_weight=weight)
    assert not (search.predict(X) == 2).any()


def test_tags_and_pictures() -> None:
    tags = get_tags(MLPClassifier())
    assert tags.classifier_tags.multi_label and tags.input_tags.sparse and tags.target_tags.required
    assert get_tags(MLPRegressor()).target_tags.multi_output
    assert "MLPClassifier" in MLPClassifier(alpha=0.5)._repr_html_()
    assert repr(MLPRegressor(alpha=0.5, dropout=0.1)) == "MLPRegressor(alpha=0.5, dropout=0.1)"


class Told:
    """A callback of scikit-learn that notes what it is told, and stops a fit after ``epochs`` of them."""

    def __init__(self, epochs: int = 1000) -> None:
        self.epochs, self.tasks, self.scores = epochs, [], []  # type: ignore[var-annotated]

    def setup(self, estimator: Any, context: Any) -> None:
        self.tasks.append("setup")

    def teardown(self, estimator: Any, context: Any) -> None:
        self.tasks.append("teardown")

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None:
        self.tasks.append(f"begin {context.task_name}")

    def on_fit_task_end(self, estimator: Any, context: Any, *, X: Any, y: Any, fitted_estimator: Any) -> bool:
        self.tasks.append(f"end {context.task_name}")
        self.scores.append(fitted_estimator.score(X, y))
        return self.tasks.count("end epoch") == self.epochs


@pytest.mark.parametrize("epochs", [3, 1000])
def test_callbacks_of_scikit_learn(epochs: int) -> None:
    pytest.importorskip("sklearn.callback")
    told = Told(epochs)
    fit = MLPClassifier(**{**QUICK, "max_iter": 5}).set_callbacks(told).fit(X, Y)
    assert fit.n_iter_ == min(epochs, 5)
    middle = ["begin epoch", "end epoch"] * fit.n_iter_
    assert told.tasks == ["setup", "begin fit", *middle, "end fit", "teardown"]
    assert told.scores[-1] == fit.score(X, Y) and len(set(told.scores)) > 1
    assert fit.set_callbacks().fit(X, Y).n_iter_ == 5


@pytest.fixture
def no_earlier_interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Ctrl-C of another test counts as a first one of this."""
    monkeypatch.setattr(interrupt, "_last", time.monotonic() - 100.0)
    yield


@pytest.mark.parametrize("early_stopping", [False, True])
def test_ctrl_c_leaves_a_model_and_a_warning(early_stopping: bool, no_earlier_interrupt: None) -> None:
    calls = []

    def accuracy(y: np.ndarray, prediction: np.ndarray) -> float:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return float((prediction.argmax(axis=1) == y).mean())

    def pressed(estimator: Any) -> Any:
        with pytest.warns(UserWarning, match="Training interrupted by user"):
            return estimator.fit(X, Y)

    options = {**QUICK, "max_iter": 500, "n_iter_no_change": 500}
    if early_stopping:
        fit = pressed(MLPClassifier(**options, early_stopping=True, metric=accuracy))
        assert len(fit.validation_scores_) == 3 and fit.best_validation_score_ == max(fit.validation_scores_)
    else:
        pytest.importorskip("sklearn.callback")

        class Presses(Told):
            def on_fit_task_end(self, estimator: Any, context: Any) -> None:  # type: ignore[override]
                if context.task_name == "epoch":
                    accuracy(Y, np.zeros((len(Y), 3)))

        fit = pressed(MLPClassifier(**options).set_callbacks(Presses()))
    assert 3 <= fit.n_iter_ < 500 and len(fit.loss_curve_) == fit.n_iter_
    assert np.isfinite(fit.predict_proba(X)).all()
    assert fit.partial_fit(X, Y).n_iter_ == 1
