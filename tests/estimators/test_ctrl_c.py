"""Ctrl-C while an estimator is fitted."""

from __future__ import annotations

import numpy as np
import pytest
from ctrl_c import forget, press_in_step

from mlpgpu.sklearn import MLPClassifier

DRAW = np.random.default_rng(3)
X, Y = DRAW.standard_normal((60, 4)), DRAW.integers(0, 3, 60)


@pytest.fixture(autouse=True)
def first_in_a_while() -> None:
    forget()


def new_classifier() -> MLPClassifier:
    return MLPClassifier((8,), batch_size=10, max_iter=40, random_state=1, backend="cpu")


def test_a_first_one_ends_the_fit_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = new_classifier()
    press_in_step(monkeypatch, 20, times=1)
    with pytest.warns(UserWarning, match="Training interrupted by user"):
        classifier.fit(X, Y)
    assert 1 <= classifier.n_iter_ < 40
    assert classifier.predict(X).shape == (60,)


def test_a_second_one_is_raised_and_leaves_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = new_classifier()
    press_in_step(monkeypatch, 20, times=2)
    with pytest.raises(KeyboardInterrupt):
        classifier.fit(X, Y)
    monkeypatch.undo()
    assert classifier.predict(X).shape == (60,)
    classifier.partial_fit(X, Y)
