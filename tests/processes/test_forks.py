"""Forked children that go on with their parent's objects: they work, or say clearly why not, and never hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beside import beside
from children import answer_of_child

import mlpgpu as mg
from mlpgpu.backends.cpu import inference
from mlpgpu.backends.cpu.blas import BLAS
from mlpgpu.errors import ConfigurationError
from mlpgpu.locks import GroupLock, Mutex

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(96, 12)).astype(np.float32)
LABELS = DRAW.integers(0, 3, 96)
DATA = X, LABELS


def trainer_of(layers: list[mg.layers.Layer], **options: Any) -> mg.Trainer:
    network = mg.Network(layers, seed=4)
    return mg.Trainer(
        network, "softmax_cross_entropy", mg.Momentum(0.05), batch_size=16, backend="cpu", threads=2, **options
    )


def dense(**options: Any) -> mg.Trainer:
    return trainer_of([mg.Standardize(12), mg.Dense(12, 16, "relu"), mg.Dropout(0.2), mg.Dense(16, 3)], **options)


TRAINERS: dict[str, Callable[[], mg.Trainer]] = {
    "threads of BLAS": dense,
    "threads of shards": lambda: dense(streams=2),
    "threads of rows": lambda: trainer_of([mg.LocallyConnected(12, 4, "tanh"), mg.Dense(9, 3)]),
}


def go_on(trainer: mg.Trainer) -> dict[str, Any]:
    """What each way of going on comes to."""
    loss = trainer.step(X[:16], LABELS[:16])
    found = {"step": loss, "fit": trainer.fit(DATA, 1, validation=0.25, progress=False)["loss"]}
    found |= {"evaluate": trainer.evaluate(DATA)["loss"], "predict": trainer.network.predict(X).tobytes()}
    return {**found, "steps": trainer.steps, "values": trainer.network.flat_parameters().tobytes()}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_child_goes_on_with_the_same_bits(name: str) -> None:
    trainer = TRAINERS[name]()
    trainer.fit(DATA, 1, progress=False)
    trainer.network.predict(X)
    of_child = answer_of_child(lambda: go_on(trainer))
    assert of_child == go_on(trainer)
    assert answer_of_child(lambda: trainer.evaluate(DATA)["loss"]) == trainer.evaluate(DATA)["loss"]


def test_a_child_of_a_child_goes_on(tmp_path: Path) -> None:
    trainer = dense(streams=2)
    trainer.fit(DATA, 1, progress=False)

    def of_child() -> Any:
        trainer.fit(DATA, 1, progress=False)
        grandchild = answer_of_child(lambda: trainer.fit(DATA, 1, progress=False)["loss"])
        return grandchild, trainer.fit(DATA, 1, progress=False)["loss"]

    grandchild, child = answer_of_child(of_child)
    assert grandchild == child


def test_a_callback_may_fork() -> None:
    """As one does that draws pictures or uploads files in a process of its own."""
    trainer, losses = dense(streams=2), []

    def evaluate_in_child(record: dict[str, float]) -> None:
        losses.append((answer_of_child(lambda: trainer.evaluate(DATA)["loss"]), trainer.evaluate(DATA)["loss"]))

    trainer.fit(DATA, 2, callbacks=[evaluate_in_child], progress=False)
    assert len(losses) == 2 and all(of_child == own for of_child, own in losses)


def test_a_child_of_a_process_that_trains_has_the_state_of_a_finished_step(tmp_path: Path) -> None:
    trainer, stop, begun = dense(streams=2), threading.Event(), threading.Event()
    seen: set[bytes] = set()

    class Watch(mg.Callback):
        every_steps = 1

        def step_end(self, trainer: Any) -> None:
            seen.add(trainer.network.flat_parameters().tobytes())
            begun.set()

        def epoch_end(self, trainer: Any, record: dict[str, float]) -> bool:
            return stop.is_set()

    thread = threading.Thread(target=lambda: trainer.fit(DATA, 10_000, callbacks=[Watch()], progress=False))
    limits = [library.get() for library in BLAS.libraries]
    thread.start()
    begun.wait(30.0)

    def look() -> Any:
        refused = []
        for call in (
            lambda: trainer.step(X[:16], LABELS[:16]),
            lambda: trainer.fit(DATA, 1),
            lambda: trainer.save(tmp_path / "run.h5"),
            lambda: trainer.evaluate(DATA),
            lambda: trainer.close(),
        ):
            with pytest.raises(ConfigurationError, match="a process that was forked during fit") as caught:
                call()
            refused.append(str(caught.value))
        values = trainer.network.flat_parameters().tobytes()
        predicted = trainer.network.predict(X)
        other = mg.Trainer(trainer.network, "softmax_cross_entropy", backend="cpu", batch_size=16, threads=2, streams=2)
        other.fit(DATA, 1, progress=False)
        return values, bool(np.isfinite(predicted).all()), [library.get() for library in BLAS.libraries], refused

    try:
        answers = [answer_of_child(look) for _ in range(12)]
    finally:
        stop.set()
        thread.join(60.0)
    for values, is_finite, of_child, refused in answers:
        assert values in seen and is_finite and of_child == limits and len(refused) == 5


def test_children_of_a_process_that_predicts_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "available_cores", lambda: 3)
    monkeypatch.setattr(inference, "PIECE_FLOPS", 1000)
    network = dense().network
    network.adapt(X)
    predictor, expected = network.predictor("cpu"), network.predict(X)
    with beside(lambda: predictor(X)), beside(lambda: network.predict(X[:40])):
        for _ in range(10):
            assert np.array_equal(answer_of_child(lambda: predictor(X)), expected)
            assert np.array_equal(answer_of_child(lambda: network.predict(X)), expected)


def test_locks_that_other_threads_held_are_free_in_a_child() -> None:
    mutex, group = Mutex(), GroupLock()
    network = dense().network
    network.adapt(X)
    predictor = network.predictor("cpu")
    locks = [mutex, predictor._lock, predictor._compiled._lock, network._kept._lock]  # type: ignore[union-attr]
    holds, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0], locks[1], locks[2], locks[3], group.held():
            holds.set()
            is_over.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(30.0)

    def use() -> bool:
        with mutex, group.held():
            pass
        with mutex, group.held(1):
            network.predict(X)
        return bool(np.isfinite(predictor(X)).all())

    try:
        assert answer_of_child(use)
    finally:
        is_over.set()
        thread.join(30.0)


def test_locks_that_the_forking_thread_holds_stay_held() -> None:
    mutex, group = Mutex(), GroupLock()

    def others_get_them() -> list[bool]:
        found: list[bool] = []

        def ask() -> None:
            found.append(mutex._lock.acquire(blocking=False))
            found.append(bool(group._holders))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10.0)
        return found

    with mutex, group.held():
        assert answer_of_child(others_get_them) == [False, True]
    with mutex, group.held():
        pass


def test_a_fork_in_the_middle_of_a_product_of_the_same_thread_does_not_wait() -> None:
    """As by a signal's handler."""
    with BLAS.held(1):
        assert answer_of_child(lambda: BLAS.is_held_here)
        assert BLAS.is_held_here
    assert not BLAS.is_held_here
