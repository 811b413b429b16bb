"""Losses with numbers through a trainer: trained, saved, resumed, and what predictions are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import storage
from mlpgpu.errors import ConfigurationError, DataError, DtypeError, FileFormatError

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(60, 3)).astype(np.float32)
NUMBERS = RANDOM.normal(size=(60, 2))
COUNTS = RANDOM.poisson(np.exp(0.5 * X[:, :1] + 1.0)).astype(float)
CLASSES = RANDOM.integers(3, size=60)
LABELS = (RANDOM.random((60, 2)) < 0.5).astype(float)

CASES: list[tuple[mg.Loss, np.ndarray]] = [
    (mg.Huber(delta=0.3), NUMBERS),
    (mg.Quantile(0.9), NUMBERS),
    (mg.Poisson(), COUNTS),
    (mg.SoftmaxCrossEntropy(label_smoothing=0.1), CLASSES),
    (mg.Focal(gamma=1.5), CLASSES),
    (mg.BinaryFocal(), LABELS),
]
EACH = pytest.mark.parametrize(("loss", "y"), CASES, ids=[str(loss) for loss, _ in CASES])


def trainer_of(loss: Any, y: np.ndarray, **options: Any) -> mg.Trainer:
    width = 3 if y.ndim == 1 else y.shape[1]
    network = mg.Network([mg.Dense(3, 8, "tanh"), mg.Dense(8, width)], seed=2)
    return mg.Trainer(network, loss, mg.Adam(0.01), batch_size=16, **options)


def flat(trainer: mg.Trainer) -> np.ndarray:
    return np.concatenate([array.ravel() for array in trainer.network.parameters.values()])


@EACH
def test_a_run_is_resumed_with_its_numbers(loss: mg.Loss, y: np.ndarray, tmp_path: Path) -> None:
    unbroken = trainer_of(loss, y)
    unbroken.fit((X, y), 6, progress=False)
    broken = trainer_of(loss, y)
    broken.fit((X, y), 3, progress=False)
    broken.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    assert resumed.loss == broken.loss == loss.described
    resumed.fit((X, y), 6, progress=False)
    np.testing.assert_array_equal(flat(resumed), flat(unbroken))
    assert resumed.history["loss"] == unbroken.history["loss"]
    assert resumed.history["loss"][-1] < resumed.history["loss"][0]
    kept = storage.read(tmp_path / "run.h5").description["run"]["loss"]
    assert kept == (loss.described if isinstance(loss.described, str) else {"kind": type(loss).__name__, **vars(loss)})


@EACH
def test_an_unknown_number_in_a_file_is_refused(loss: mg.Loss, y: np.ndarray, tmp_path: Path) -> None:
    trainer = trainer_of(loss, y)
    trainer.save(tmp_path / "run.h5")
    contents = storage.read(tmp_path / "run.h5")
    for wrong in ({"kind": "Hubert"}, {"kind": "Huber", "delta": -1.0}, {"kind": "Quantile"}, 3):
        contents.description["run"]["loss"] = wrong
        storage.write(tmp_path / "wrong.h5", contents)
        with pytest.raises(FileFormatError):
            mg.Trainer.resume(tmp_path / "wrong.h5")


def test_usual_numbers_are_the_name() -> None:
    by_name, by_loss = trainer_of("huber", NUMBERS), trainer_of(mg.Huber(1), NUMBERS)
    assert by_name.loss == by_loss.loss == "huber"
    for trainer in (by_name, by_loss):
        trainer.fit((X, NUMBERS), 3, progress=False)
    np.testing.assert_array_equal(flat(by_name), flat(by_loss))
    assert "loss=Huber(delta=2.0)" in repr(trainer_of(mg.Huber(2), NUMBERS))
    assert "loss huber(delta=2)" in str(trainer_of(mg.Huber(2), NUMBERS).plan)


def test_a_number_counts() -> None:
    ends = []
    for loss in (mg.Huber(0.1), mg.Huber(10.0)):
        trainer = trainer_of(loss, NUMBERS)
        trainer.fit((X, NUMBERS), 3, progress=False)
        ends.append(flat(trainer))
    assert (ends[0] != ends[1]).any()


def test_poisson_predicts_rates(tmp_path: Path) -> None:
    trainer = trainer_of("poisson", COUNTS)
    trainer.fit((X, COUNTS), 200, progress=False)
    rates, logits = trainer.network.predict(X), trainer.network.forward(X)
    np.testing.assert_allclose(rates, np.exp(logits), rtol=1e-6)
    # With a bias, the mean of rates is that of the targets where the loss is least.
    assert rates.mean() == pytest.approx(COUNTS.mean(), rel=0.05)
    trainer.network.save(tmp_path / "net.h5")
    np.testing.assert_array_equal(mg.load(tmp_path / "net.h5").predict(X), rates)
    evaluated = trainer.evaluate((X, COUNTS), ["mean_absolute_error"])
    assert evaluated["mean_absolute_error"] == pytest.approx(abs(rates - COUNTS).mean(), rel=1e-5)
    with pytest.raises(ConfigurationError, match="a network trained to classify"):
        trainer.network.labels(X)


def test_what_poisson_refuses() -> None:
    trainer = trainer_of("poisson", COUNTS)
    with pytest.raises(DataError, match="targets of poisson: expected values of at least 0, got -1 to"):
        trainer.fit((X, np.where(X[:, :1] > 0.0, -1.0, COUNTS)), 1, progress=False)
    with pytest.raises(ConfigurationError, match="class_weight: expected a loss for classification, got poisson"):
        trainer_of("poisson", COUNTS, class_weight="balanced")
    network = mg.Network([mg.Dense(3, 1), mg.Standardize(1)])
    with pytest.raises(ConfigurationError, match="Standardize as the last layer"):
        mg.Trainer(network, mg.Poisson(), mg.SGD(0.1))


def test_a_quantile_is_learnt() -> None:
    network = mg.Network([mg.Dense(1, 1)], seed=1)
    trainer = mg.Trainer(network, mg.Quantile(0.9), mg.Adam(mg.CosineDecay(0.05, epochs=60)), metrics=["pinball_0.9"])
    y = RANDOM.normal(size=2000)
    history = trainer.fit((np.zeros((2000, 1)), y), 60, validation=(np.zeros((2000, 1)), y), progress=False)
    assert network.parameters["0.bias"][0] == pytest.approx(np.quantile(y, 0.9), abs=0.05)
    assert history.last["validation_pinball_0.9"] == pytest.approx(history.last["validation_loss"], rel=1e-5)


@pytest.mark.parametrize("given", [mg.Huber, 3, None])
def test_a_loss_is_a_name_or_a_loss(given: Any) -> None:
    with pytest.raises(DtypeError, match="loss: expected a name"):
        trainer_of(given, NUMBERS)
