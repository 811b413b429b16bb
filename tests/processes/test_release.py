"""What is dropped or closed is freed at once, without the garbage collector."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import mlpgpu as mg
from mlpgpu.errors import ConfigurationError, DivergenceError

pytestmark = pytest.mark.usefixtures("without_collector")

DRAW = np.random.default_rng(6)
X = DRAW.normal(size=(64, 10)).astype(np.float32)
LABELS = DRAW.integers(0, 3, 64)
DATA = X, LABELS


def trainer_of(**options: Any) -> mg.Trainer:
    network = mg.Network([mg.Standardize(10), mg.Dense(10, 8, "relu"), mg.Dropout(0.1), mg.Dense(8, 3)], seed=2)
    return mg.Trainer(
        network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=16, backend="cpu", threads=2, metrics=["accuracy"],
        **options,
    )  # fmt: skip


def fit(trainer: mg.Trainer) -> None:
    trainer.fit(DATA, 2, validation=0.2, progress=False)


def fit_with_callbacks(trainer: mg.Trainer, folder: Path) -> None:
    callbacks = [
        mg.EarlyStopping(patience=1),
        mg.Checkpoint(folder / "run.h5", keep_best=True),
        mg.CSVLogger(folder / "log.csv"),
        mg.Histograms(),
        lambda record: None,
    ]
    trainer.fit(DATA, 2, validation=0.2, callbacks=callbacks, progress=False)


def fail(trainer: mg.Trainer) -> None:
    def broken(record: dict[str, float]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.fit(DATA, 2, callbacks=[broken], progress=False)


def evaluate_otherwise(trainer: mg.Trainer) -> None:
    trainer.network.adapt(X)
    trainer.evaluate(DATA)
    trainer.evaluate((X, np.eye(3, dtype=np.float32)[LABELS]))


USES: dict[str, Callable[[mg.Trainer, Path], object]] = {
    "nothing": lambda trainer, folder: None,
    "fit": lambda trainer, folder: fit(trainer),
    "fit with callbacks": fit_with_callbacks,
    "a callback that raises": lambda trainer, folder: fail(trainer),
    "evaluate": lambda trainer, folder: evaluate_otherwise(trainer),
    "save": lambda trainer, folder: (fit(trainer), trainer.save(folder / "a.h5")),
    "repr": lambda trainer, folder: (repr(trainer), trainer._repr_html_(), str(trainer.plan)),
    "rate": lambda trainer, folder: setattr(trainer, "rate", mg.CosineDecay(0.1, 10)),
    "keep": lambda trainer, folder: (fit(trainer), trainer.keep(), trainer.restore_kept()),
    "predict": lambda trainer, folder: (fit(trainer), trainer.network.predict(X), trainer.network.predictor("cpu")(X)),
}


def parts_of(trainer: mg.Trainer) -> dict[str, Any]:
    """Weak references to what a trainer consists of, by name."""
    engine, network = trainer._engine, trainer.network
    found: dict[str, Any] = {"trainer": trainer, "network": network, "engine": engine, "values": network.values}
    if engine.program is not None:
        program: Any = engine.program
        found |= {"program": program, "workspace": program._work, "parameters": program._work.parameters}
    found |= {f"compiled {place}": each for place, each in enumerate(network._kept._compiled.values())}
    return {name: weakref.ref(each) for name, each in found.items()}


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_a_dropped_trainer_is_freed_at_once(use: str, streams: int, tmp_path: Path) -> None:
    trainer = trainer_of(streams=streams)
    USES[use](trainer, tmp_path)
    parts = parts_of(trainer)
    del trainer
    assert [name for name, part in parts.items() if part() is not None] == []


@pytest.mark.parametrize("kind", ["resumed", "a copy"])
def test_a_resumed_or_copied_trainer_is_freed_at_once(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of()
    fit(trainer)
    trainer.save(tmp_path / "run.h5")
    other = mg.Trainer.resume(tmp_path / "run.h5") if kind == "resumed" else copy.deepcopy(trainer)
    other.fit(DATA, 4, validation=0.2, progress=False)
    parts = parts_of(other)
    del other
    assert [name for name, part in parts.items() if part() is not None] == []


def test_a_dropped_predictor_and_what_a_network_keeps_are_freed_at_once() -> None:
    network = mg.Network([mg.Dense(10, 3)], seed=1)
    predictor = network.predictor("cpu")
    predictor(X)
    network.predict(X)
    parts = [weakref.ref(each) for each in (predictor, predictor._compiled, predictor._compiled._inference)]  # type: ignore[union-attr]
    del predictor
    assert all(part() is None for part in parts)
    kept = weakref.ref(next(iter(network._kept._compiled.values())))
    del network
    assert kept() is None


def test_what_first_asked_for_a_backend_is_freed() -> None:
    """The error of a missing package knew the variables of all functions that led to the import."""
    code = """if True:
        import gc, weakref
        import numpy as np, mlpgpu as mg
        gc.disable()
        def use():
            network = mg.Network([mg.Dense(3, 2)], seed=1)
            network.predict(np.zeros((2, 3), np.float32))
            return weakref.ref(network)
        print(use()() is None)
    """
    environment = {name: value for name, value in os.environ.items() if name != "MLPGPU_BACKEND"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.stdout == "True\n", ended.stderr


def test_large_trainers_that_are_dropped_take_no_memory() -> None:
    process = psutil.Process()

    def train() -> None:
        network = mg.Network([mg.Dense(10, 1000), mg.Dense(1000, 1000), mg.Dense(1000, 3)], seed=1)
        trainer = mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=64, backend="cpu")
        trainer.step(X, LABELS)

    train()
    before, threads = process.memory_info().rss, threading.active_count()  # other tests may have left some
    for _ in range(10):  # of which each has 16 MB of parameters and slots, and partials
        train()
    assert process.memory_info().rss - before < 30 << 20
    assert threading.active_count() - threads < 10


def test_a_closed_trainer_leaves_its_network_and_says_so() -> None:
    with trainer_of(streams=2) as trainer:
        fit(trainer)
        parts, network = parts_of(trainer), trainer.network
        expected = network.flat_parameters().tobytes(), network.predict(X).tobytes()
    assert [name for name in ("program", "workspace", "parameters") if parts[name]() is not None] == []
    assert (network.flat_parameters().tobytes(), network.predict(X).tobytes()) == expected
    assert trainer.steps == 8 and len(trainer.history) == 2
    trainer.close()
    for call in (
        lambda: trainer.fit(DATA, 1),
        lambda: trainer.step(*DATA),
        lambda: trainer.evaluate(DATA),
        lambda: trainer.save("run.h5"),
        lambda: trainer.keep(),
        lambda: trainer.histograms(4),
        lambda: trainer.__enter__(),
    ):
        with pytest.raises(
            ConfigurationError, match=r"expected an open trainer, got a closed one \(Trainer\(trainer\."
        ):
            call()
    again = mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), backend="cpu")
    assert again.evaluate(DATA)["loss"] > 0.0


def test_a_trainer_cannot_be_closed_while_it_trains() -> None:
    trainer, caught = trainer_of(), []

    def close(record: dict[str, float]) -> None:
        with pytest.raises(ConfigurationError, match="a call during fit") as error:
            trainer.close()
        caught.append(str(error.value))

    trainer.fit(DATA, 1, callbacks=[close], progress=False)
    assert caught and trainer.evaluate(DATA)


def test_an_error_inside_a_block_is_the_one_that_is_raised() -> None:
    trainer = mg.Trainer(mg.Network([mg.Dense(10, 3)], seed=1), "mse", mg.SGD(1e30), backend="cpu")
    with pytest.raises(DivergenceError), trainer:
        trainer.fit((X, X[:, :3]), 5, progress=False)
    with pytest.raises(ConfigurationError, match="a closed one"):
        trainer.step(X[:2], X[:2, :3])


def test_a_closed_trainer_that_never_trained_keeps_nothing() -> None:
    trainer = trainer_of()
    trainer.close()
    assert trainer.network.is_new
