"""Ctrl-C while an estimator is fitted."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from mlpgpu.backends.cpu.threads import Threads
from mlpgpu.sklearn import MLPClassifier
from mlpgpu.training import interrupt

DRAW = np.random.default_rng(3)
X, Y = DRAW.standard_normal((60, 4)), DRAW.integers(0, 3, 60)


def press(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> None:
    """Press Ctrl-C in a step, counted from 1."""
    interrupt._last = -interrupt.AGAIN_SECONDS
    done, run_shards = 0, Threads.run_shards

    def pressed(self: Threads, shards: Any) -> None:
        nonlocal done
        done += 1
        for _ in range(times * (done == step)):
            signal.raise_signal(signal.SIGINT)
        run_shards(self, shards)

    monkeypatch.setattr(Threads, "run_shards", pressed)


def new_classifier() -> MLPClassifier:
    return MLPClassifier((8,), batch_size=10, max_iter=40, random_state=1, backend="cpu")


def test_a_first_one_ends_the_fit_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = new_classifier()
    press(monkeypatch, 20, times=1)
    with pytest.warns(UserWarning, match="Training interrupted by user"):
        classifier.fit(X, Y)
    assert 1 <= classifier.n_iter_ < 40
    assert classifier.predict(X).shape == (60,)


def test_a_second_one_is_raised_and_leaves_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = new_classifier()
    press(monkeypatch, 20, times=2)
    with pytest.raises(KeyboardInterrupt):
        classifier.fit(X, Y)
    monkeypatch.undo()
    assert classifier.predict(X).shape == (60,)
    classifier.partial_fit(X, Y)
