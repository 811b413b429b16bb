"""Trainers, networks, data sets and what goes with them, copied and pickled, also into other processes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import first_and_thorough

import mlpgpu as mg
from mlpgpu.errors import ConfigurationError, DivergenceError, DtypeError
from mlpgpu.losses import LOSSES
from mlpgpu.optimizers import OPTIMIZERS

DRAW = np.random.default_rng(8)
X = DRAW.normal(size=(60, 5)).astype(np.float32)
LABELS = DRAW.integers(0, 3, 60)
TEST = DRAW.normal(size=(20, 5)).astype(np.float32), DRAW.integers(0, 3, 20)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS: dict[str, Callable[[Any], Any]] = {"pickle": pickled, "copy": copy.copy, "deepcopy": copy.deepcopy}


def own_metric(y: np.ndarray, prediction: np.ndarray) -> float:
    return float(prediction[:, 0].mean())


SCHEDULES: tuple[Callable[[], Any], ...] = (
    lambda: 0.01,
    lambda: mg.ExponentialDecay(0.02, 0.8, epochs=1),
    lambda: mg.CosineDecay(0.02, steps=40),
    lambda: mg.ReduceOnPlateau(0.02, patience=1, monitor="loss"),
    lambda: mg.WarmUp(mg.StepDecay(0.02, 0.5, epochs=2), steps=5),
)


def random_trainer(draw: random.Random) -> mg.Trainer:
    kind = OPTIMIZERS[draw.choice(sorted(OPTIMIZERS))]
    optimizer = kind(draw.choice(SCHEDULES)(), l2=draw.choice([0.0, 0.01]), clip_norm=draw.choice([None, 0.5]))
    layers = [mg.Standardize(5), mg.Dense(5, 7, draw.choice(["relu", "tanh"])), mg.Dropout(0.3), mg.Dense(7, 3)]
    return mg.Trainer(
        mg.Network(layers[draw.randrange(2) :], seed=draw.randrange(1000)),
        mg.SoftmaxCrossEntropy(label_smoothing=0.1) if draw.random() < 0.3 else "softmax_cross_entropy",
        optimizer,
        batch_size=draw.choice([7, 16]),
        backend="cpu",
        precision=draw.choice(["float32", "float64"]),
        streams=draw.choice([1, 3]),
        metrics=[*draw.choice([(), ("accuracy",)]), own_metric],
        class_weight=draw.choice([None, "balanced", {0: 2.0, 2: 0.5}]),
    )


def outcome(trainer: mg.Trainer) -> tuple[Any, ...]:
    """All that shows of a trainer, to the bit."""
    records = [{name: number for name, number in record.items() if name != "seconds"} for record in trainer.history]
    slots, kept = trainer._engine.slots_and_kept()
    arrays = [None if array is None else array.tobytes() for array in (slots, kept)]
    values = trainer.network.flat_parameters().tobytes(), trainer.network.flat_statistics().tobytes()
    predicted = trainer.network.predict(TEST[0]).tobytes()
    return records, arrays, values, predicted, trainer.steps, trainer.epochs, trainer.history.interrupted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(8))
def test_a_copy_goes_on_with_the_same_bits(seed: int, way: str) -> None:
    draw = random.Random(seed)
    trainer = random_trainer(draw)
    options: dict[str, Any] = {"validation": TEST, "progress": False}
    for _ in range(draw.randrange(3)):
        trainer.fit((X, LABELS), 2, callbacks=[mg.EarlyStopping(patience=1)], **options)
    is_untouched = trainer.network.is_new
    twin = WAYS[way](trainer)
    assert twin.network is not trainer.network and twin.network.is_new == is_untouched
    for name in ("loss", "optimizer", "batch_size", "precision", "streams", "metrics", "class_weight", "rate"):
        assert getattr(twin, name) == getattr(trainer, name)
    for each in (trainer, twin):
        each.fit((X, LABELS), 3, callbacks=[mg.EarlyStopping(patience=1)], **options)
    assert outcome(twin) == outcome(trainer)
    again = WAYS[way](twin)
    twin.fit((X, LABELS), 1, progress=False)
    assert outcome(again) == outcome(trainer) != outcome(twin)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_a_copy_made_during_a_fit_goes_on_with_it(seed: int, way: str) -> None:
    draw = random.Random(100 + seed)
    trainer, copies = random_trainer(draw), []
    at, unit = draw.randrange(1, 3), draw.choice(["epoch", "step"])

    class Copy(mg.Callback):
        runs_last = True
        every_steps = 3 if unit == "step" else None

        def step_end(self, trainer: Any) -> None:
            if len(copies) < at:
                copies.append(WAYS[way](trainer))

        epoch_end = lambda self, trainer, record: self.step_end(trainer) if unit == "epoch" else None  # noqa: E731

    def callbacks(*others: Any) -> list[Any]:
        return [*others, mg.EarlyStopping(patience=2, monitor="loss")]

    trainer.fit((X, LABELS), 6, validation=TEST, callbacks=callbacks(Copy()), progress=False)
    for each in copies:
        each.fit((X, LABELS), 6, validation=TEST, callbacks=callbacks(), progress=False)
        assert outcome(each) == outcome(trainer)
    assert len(copies) == at


def test_a_network_beside_its_trainer_stays_the_same_one() -> None:
    trainer = random_trainer(random.Random(1))
    trainer.fit((X, LABELS), 1, progress=False)
    for way in (pickled, copy.deepcopy):
        network, twin = way((trainer.network, trainer))
        assert twin.network is network is not trainer.network


def test_a_copy_is_saved_as_the_trainer_is(tmp_path: Path) -> None:
    trainer = random_trainer(random.Random(5))
    trainer.fit((X, LABELS), 2, validation=TEST, callbacks=[mg.EarlyStopping(patience=1)], progress=False)
    trainer.save(tmp_path / "a.h5")
    twin = pickled(trainer)
    twin.save(tmp_path / "b.h5")
    pickled(twin).save(tmp_path / "c.h5")
    images = {(tmp_path / f"{name}.h5").read_bytes() for name in "abc"}
    assert len(images) == 1


def test_lambdas_are_copied_and_refused_by_pickle() -> None:
    network = mg.Network([mg.Dense(5, 3)], seed=1)
    mean: Any = lambda y, prediction: float(prediction.mean())  # noqa: E731
    trainer = mg.Trainer(network, "softmax_cross_entropy", metrics=[{"mean": mean}], backend="cpu")
    trainer.fit((X, LABELS), 1, callbacks=[lambda record: None], progress=False)
    assert copy.deepcopy(trainer).evaluate(TEST) == trainer.evaluate(TEST)
    with pytest.raises(DtypeError, match=r"metric mean of a pickled trainer: .*can be pickled.*not as a lambda"):
        pickle.dumps(trainer)
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(cloudpickle.dumps(trainer)).evaluate(TEST) == trainer.evaluate(TEST)


def test_lambdas_among_callbacks_are_no_matter() -> None:
    trainer = mg.Trainer(mg.Network([mg.Dense(5, 3)], seed=1), "softmax_cross_entropy", backend="cpu")
    trainer.fit((X, LABELS), 1, callbacks=[lambda record: None], progress=False)
    assert outcome(pickled(trainer)) == outcome(trainer)


def test_what_cannot_be_copied_says_so() -> None:
    trainer = mg.Trainer(mg.Network([mg.Dense(5, 3)], seed=1), "softmax_cross_entropy", backend="cpu")
    for way in WAYS.values():
        with pytest.raises(DtypeError, match=r"predictor: expected something that can be copied"):
            way(trainer.network.predictor("cpu"))
    diverged = mg.Trainer(mg.Network([mg.Dense(5, 3)], seed=1), "mse", mg.SGD(1e30), backend="cpu")
    with pytest.raises(DivergenceError):
        diverged.fit((X, X[:, :3]), 5, progress=False)
    for way in WAYS.values():
        with pytest.raises(DivergenceError):
            way(diverged)
    trainer.close()
    for way in WAYS.values():
        with pytest.raises(ConfigurationError, match="expected an open trainer, got a closed one"):
            way(trainer)


@pytest.mark.parametrize("way", WAYS)
def test_everything_else_is_copied(way: str) -> None:
    trainer = random_trainer(random.Random(2))
    history = trainer.fit((X, LABELS), 2, validation=TEST, progress=False)
    twin = WAYS[way](history)
    assert list(twin) == list(history) and twin.columns == history.columns
    of_network = WAYS[way](trainer.network)
    assert np.array_equal(of_network.predict(X), trainer.network.predict(X))
    values = WAYS[way](trainer.network.parameters)
    assert all(np.array_equal(values[name], trainer.network.parameters[name]) for name in values)
    pixels = mg.Dataset(np.arange(300, dtype=np.uint8).reshape(60, 5), LABELS, scale=1.0)
    for data in (mg.Dataset(X, LABELS, classes=["a", "b", "c"]), mg.Dataset(X).first(3), pixels):
        same = WAYS[way](data)
        assert np.array_equal(same.x, data.x) and same.classes == data.classes and same.identity() == data.identity()
        assert (same.y is None and data.y is None) or np.array_equal(same.y, data.y)
    for described in [*(kind() for kind in (*OPTIMIZERS.values(), *LOSSES.values())), *(make() for make in SCHEDULES)]:
        assert WAYS[way](described) == described or not dataclasses.is_dataclass(described)
    for callback in (mg.EarlyStopping(patience=2), mg.Checkpoint("run.h5"), mg.CSVLogger("log.csv")):
        assert vars(WAYS[way](callback)) == vars(callback)


SCRIPT = """
import multiprocessing, sys
import numpy as np
import mlpgpu as mg

def go_on(trainer, x, y):
    trainer.fit((x, y), 2, progress=False)
    return trainer

def train(x, y, seed):
    network = mg.Network([mg.Dense(4, 6, "relu"), mg.Dropout(0.2), mg.Dense(6, 2)], seed=seed)
    trainer = mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=8, backend="cpu")
    trainer.fit((x, y), 1, progress=False)
    return trainer

if __name__ == "__main__":
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 4)), draw.integers(0, 2, 40)
    trainers = [train(x, y, seed) for seed in range(2)]
    if sys.argv[1] == "joblib":
        from joblib import Parallel, delayed
        came_back = Parallel(n_jobs=2)(delayed(go_on)(trainer, x, y) for trainer in trainers)
    else:
        with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
            came_back = pool.starmap(go_on, [(trainer, x, y) for trainer in trainers])
    for trainer, other in zip(trainers, came_back):
        go_on(trainer, x, y)
        assert np.array_equal(trainer.network.flat_parameters(), other.network.flat_parameters())
        assert trainer.history["loss"] == other.history["loss"]
    print("the same bits")
"""


@pytest.mark.parametrize("method", first_and_thorough(["spawn", "forkserver", "fork", "joblib"]))
def test_trainers_go_to_other_processes_and_come_back(method: str, tmp_path: Path) -> None:
    if method == "joblib":
        pytest.importorskip("joblib")
    elif method != "spawn" and sys.platform == "win32":
        pytest.skip("the system has no fork")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout == "the same bits\n", ended.stderr
