"""What docs/threads.md says: who reads gets the state of one finished step, and bits stay as they are alone."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beside import beside
from helpers import first_and_thorough

import mlpgpu as mg
from mlpgpu.errors import ConfigurationError

DRAW = np.random.default_rng(12)
X = DRAW.normal(size=(120, 9)).astype(np.float32)
LABELS = DRAW.integers(0, 3, 120)
DATA = X, LABELS
SECONDS = 60.0


def trainer_of(seed: int = 1, width: int = 12, **options: Any) -> mg.Trainer:
    network = mg.Network([mg.Dense(9, width, "relu"), mg.Dropout(0.2), mg.Dense(width, 3)], seed=seed)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=8, backend="cpu", **options)


def bits(network: mg.Network) -> bytes:
    return network.flat_parameters().tobytes()


class Steps(mg.Callback):
    """The parameters and predictions after each step, which a twin that nobody disturbs has."""

    every_steps = 1

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def step_end(self, trainer: Any) -> None:
        self.values.append(bits(trainer.network))


@pytest.mark.parametrize("streams", [1, 2])
def test_whoever_reads_a_network_in_training_gets_one_finished_step(streams: int, tmp_path: Path) -> None:
    twin, steps = trainer_of(streams=streams, threads=2), Steps()
    steps.values.append(bits(twin.network))
    expected = twin.fit(DATA, 6, callbacks=[steps], progress=False)
    finished = set(steps.values)
    predictions = set()
    for values in steps.values:
        network = mg.Network(twin.network.layers, seed=1)
        network.values.replace(np.frombuffer(values, np.float32).copy())
        network.output = twin.network.output
        predictions.add(network.predict(X[:7]).tobytes())

    trainer = trainer_of(streams=streams, threads=2)
    network, seen = trainer.network, {"predicted": 0}
    network.predict(X[:7])
    predictor = network.predictor("cpu")

    def read() -> None:
        assert bits(network) in finished

    def read_by_name() -> None:
        assert np.isfinite(network.parameters["0.weight"]).all()

    def predict() -> None:
        assert network.predict(X[:7]).tobytes() in predictions
        assert predictor(X[:7]).tobytes() in predictions
        seen["predicted"] += 1

    def save() -> None:
        network.save(tmp_path / "network.h5")
        assert bits(mg.load(tmp_path / "network.h5")) in finished

    def copied() -> None:
        assert bits(copy.deepcopy(network)) in finished
        assert bits(pickle.loads(pickle.dumps(network))) in finished

    def look() -> None:
        repr(trainer), trainer.steps, trainer.epochs, len(trainer.history), str(trainer.plan)

    with beside(read, read_by_name, predict, save, copied, look):
        history = trainer.fit(DATA, 6, progress=False)
    assert bits(network) == steps.values[-1]
    assert history["loss"] == expected["loss"]
    assert seen["predicted"]


def test_a_second_fit_is_refused_while_one_is_under_way() -> None:
    trainer, begun, go_on = trainer_of(), threading.Event(), threading.Event()

    def wait(record: dict[str, float]) -> None:
        begun.set()
        go_on.wait(SECONDS)

    thread = threading.Thread(target=lambda: trainer.fit(DATA, 1, callbacks=[wait], progress=False))
    thread.start()
    begun.wait(SECONDS)
    try:
        for call in (lambda: trainer.fit(DATA, 1), lambda: trainer.step(X[:8], LABELS[:8]), trainer.close):
            with pytest.raises(ConfigurationError, match="expected no training under way, got a call during fit"):
                call()
        for call in (
            lambda: trainer.save("run.h5"),
            lambda: trainer.evaluate(DATA),
            lambda: trainer.histograms(4),
            trainer.keep,
            trainer.restore_kept,
            lambda: copy.deepcopy(trainer),
            lambda: pickle.dumps(trainer),
            lambda: setattr(trainer, "rate", 0.5),
        ):
            with pytest.raises(ConfigurationError, match=r"call between steps, got one from another thread during fit"):
                call()
    finally:
        go_on.set()
        thread.join(SECONDS)
    assert trainer.epochs == 1 and not thread.is_alive()
    trainer.rate = 0.001
    trainer.fit(DATA, 1, progress=False)
    assert trainer.evaluate(DATA)["loss"] > 0.0


@pytest.mark.parametrize("fits", first_and_thorough([24, 200]))
def test_fits_side_by_side_have_the_bits_that_each_has_alone(fits: int) -> None:
    """Of trainers with different numbers of threads, so that limits of BLAS differ, with predictions beside them."""

    def made(number: int) -> mg.Trainer:
        return trainer_of(number, 40 + 8 * (number % 3), threads=1 + number % 2, streams=1 + number % 3 // 2)

    def trained(number: int) -> tuple[bytes, list[float]]:
        trainer = made(number)
        history = trainer.fit(DATA, 2, validation=0.2, progress=False)
        return bits(trainer.network), history["validation_loss"]

    alone = [trained(number) for number in range(fits)]
    together: dict[int, tuple[bytes, list[float]]] = {}
    numbers = iter(range(fits))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for number in numbers:
                together[number] = trained(number)
        except BaseException as error:
            errors.append(error)

    other = made(7).network
    before = other.predict(X)

    def predict() -> None:
        assert np.array_equal(other.predict(X), before)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with beside(predict):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300.0)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert [number for number in range(fits) if together[number] != alone[number]] == []


def test_one_data_set_serves_many_threads() -> None:
    data = mg.Dataset(X, LABELS)
    alone = trainer_of().fit(data, 2, progress=False)["loss"]
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: found.append(trainer_of().fit(data, 2, progress=False)["loss"]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [alone] * 3
