"""benchmarks/estimators.py: each method fits every kind of target, and its tables hold what was measured."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture
def estimators(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import estimators

    return estimators


def test_ten_sets_are_drawn_alike_each_time(estimators: ModuleType) -> None:
    makers = {**estimators.CLASSES, **estimators.NUMBERS}
    assert len(makers) == 10
    for maker in makers.values():
        (x, y), (again, _) = maker(), maker()
        assert np.array_equal(x, again) and len(x) == len(y)


@pytest.mark.parametrize("name", ["iris", "regression, 4 outputs"])
def test_folds_hold_each_row_out_once(estimators: ModuleType, name: str) -> None:
    is_classifier = name in estimators.CLASSES
    x, y = {**estimators.CLASSES, **estimators.NUMBERS}[name]()
    folds = list(estimators.folds(x, y, is_classifier))
    assert len(folds) == estimators.FOLDS
    assert sum(len(test[0]) for _, test in folds) == len(x)
    for (train_x, train_y), _ in folds:
        np.testing.assert_allclose(train_x.mean(axis=0), 0.0, atol=1e-9)
        assert is_classifier or np.allclose(train_y.std(axis=0), 1.0)


def test_both_sides_of_the_overhead_train_and_tables_show_it(
    estimators: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimators, "SHAPES", ((30, 4, 5, 2),))
    monkeypatch.setattr(estimators, "TURNS", 1)
    monkeypatch.setattr(estimators, "methods", lambda *_: {"constant": Constant})
    results = [*estimators.overheads("cpu"), *estimators.sets("cpu", ["iris", "diabetes"])]
    shown = estimators.tables(results)
    assert "| 30 × 4, 5 units, 2 epochs |" in shown
    assert "| iris (150, accuracy) | 0.333, " in shown and "| diabetes (442, R²) | -0.0" in shown


class Constant:
    """Predicts the first row's target."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Constant:
        self._value = y[0] if y.dtype.kind == "i" else y.mean(axis=0)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self._value)


@pytest.mark.peers
@pytest.mark.parametrize("name", ["TorchMLP", "SkorchMLP"])
@pytest.mark.parametrize("name_of_set", ["iris", "diabetes", "regression, 4 outputs"])
def test_peers_learn_each_kind_of_target(estimators: ModuleType, name: str, name_of_set: str) -> None:
    pytest.importorskip("torch")
    if name == "SkorchMLP":
        pytest.importorskip("skorch")
    import estimators_torch

    is_classifier = name_of_set in estimators.CLASSES
    x, y = {**estimators.CLASSES, **estimators.NUMBERS}[name_of_set]()
    train, _ = next(estimators.folds(x, y, is_classifier))
    made = getattr(estimators_torch, name)(is_classifier, most_epochs=60, batch_rows=32).fit(*train)
    found, known = made.predict(train[0]), train[1]
    if is_classifier:
        assert found.shape == known.shape and (found == known).mean() > 0.9
    else:
        assert found.shape == (len(known), known.reshape(len(known), -1).shape[1])
        assert np.square(found - known.reshape(found.shape)).mean() < 0.6
