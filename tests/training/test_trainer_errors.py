"""Bad input to Trainer, fit, step, evaluate and Dataset: named, and refused before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.errors import (
    ConfigurationError,
    DataError,
    DivergenceError,
    DtypeError,
    EmptyDataError,
    MlpgpuError,
    ShapeError,
    StorageError,
    UnknownNameError,
)

DRAW = np.random.default_rng(7)
X = DRAW.standard_normal((24, 4))
LABELS = np.arange(24) % 3
VALUES = X[:, :3] + 1.0
GOOD = mg.Dataset(X, LABELS)
NAMED = mg.Dataset(X, np.array(["a", "b", "c"])[LABELS])
Call = Callable[[mg.Trainer], object]


def new_network() -> mg.Network:
    return mg.Network([mg.Dense(4, 5, "tanh"), mg.Dense(5, 3)], seed=1)


def new_trainer(loss: str = "softmax_cross_entropy", optimizer: Any = None, **options: Any) -> mg.Trainer:
    return mg.Trainer(new_network(), loss, optimizer or mg.Adam(0.01), batch_size=8, **options)


def everything(trainer: mg.Trainer) -> dict[str, Any]:
    """What an error must leave as it was."""
    network = trainer.network
    return {
        **{name: values.tobytes() for name, values in network.parameters.items()},
        "statistics": network.flat_statistics().tobytes(),
        "network": (network.output, network.classes, network.scale, network.adapted),
        "trainer": (trainer.steps, trainer.epochs, str(trainer.plan), trainer.history.records),
        "interrupted": trainer.history.interrupted,
    }


def assert_refused(trainer: mg.Trainer, call: Call, error: type[MlpgpuError], words: tuple[str, ...]) -> None:
    before = everything(trainer)
    with pytest.raises(MlpgpuError) as caught:
        call(trainer)
    assert type(caught.value) is error
    for part in words:
        assert part in str(caught.value)
    assert everything(trainer) == before


def make(**options: Any) -> Call:
    """A new trainer on the same network, with these arguments in place of good ones."""
    good = {"loss": "softmax_cross_entropy", "optimizer": mg.SGD(0.1)}
    return lambda trainer: mg.Trainer(**{"network": trainer.network, **good, **options})


def fit(data: Any = GOOD, epochs: Any = 1, **options: Any) -> Call:
    return lambda trainer: trainer.fit(data, epochs, progress=False, **options)


def dataset(*arguments: Any, **options: Any) -> Call:
    return lambda trainer: mg.Dataset(*arguments, **options)


def step(*arguments: Any) -> Call:
    return lambda trainer: trainer.step(*arguments)


def evaluate(*arguments: Any) -> Call:
    return lambda trainer: trainer.evaluate(*arguments)


def with_nan(array: np.ndarray, value: float = np.nan) -> np.ndarray:
    copy = array.astype(np.float64)
    copy[5, 2] = value
    return copy


WHOLE = "a whole number of at least 1"
REFUSED: dict[str, tuple[Call, type[MlpgpuError], tuple[str, ...]]] = {
    # Trainer
    "no network": (make(network="net"), DtypeError, ("network: expected a mlpgpu.Network", "got str")),
    "unknown loss": (
        make(loss="softmax_crossentropy"),
        UnknownNameError,
        ("expected one of squared_error", "got 'softmax_crossentropy'", "did you mean 'softmax_cross_entropy'?"),
    ),
    "loss of another type": (make(loss=None), DtypeError, ("loss: expected a name", "got NoneType None")),
    "unknown optimizer": (
        make(optimizer="adma"),
        UnknownNameError,
        ("optimizer: expected one of sgd, momentum, nesterov, rmsprop, adam, adamw", "did you mean 'adam'?"),
    ),
    "optimizer of another library": (make(optimizer="lbfgs"), UnknownNameError, ("did you mean 'adam'?",)),
    "optimizer class": (
        make(optimizer=mg.Adam),
        DtypeError,
        ("expected an optimizer, such as mlpgpu.Adam(0.001), or a name", "Adam() makes one with the default rate"),
    ),
    "rate for an optimizer": (make(optimizer=0.1), DtypeError, ("expected an optimizer", "got float 0.1")),
    "batch_size 0": (make(batch_size=0), ConfigurationError, (f"batch_size: expected {WHOLE}", "got 0")),
    "batch_size -3": (make(batch_size=-3), ConfigurationError, ("got -3",)),
    "fractional batch_size": (make(batch_size=1.5), DtypeError, (WHOLE, "got float 1.5")),
    "true batch_size": (make(batch_size=True), DtypeError, (WHOLE, "got bool True")),
    "streams 0": (make(streams=0), ConfigurationError, (f"streams: expected {WHOLE}", "got 0")),
    "threads 0": (make(threads=0), ConfigurationError, (f"threads: expected {WHOLE}", "got 0")),
    "unknown backend": (make(backend="gpu"), UnknownNameError, ("expected one of auto, cpu", "got 'gpu'")),
    "unknown precision": (
        make(precision="float16"),
        UnknownNameError,
        ("one of float32, float32-ieee, float64", "got 'float16'"),
    ),
    "precision of another backend": (
        make(backend="cpu", precision="tf32"),
        ConfigurationError,
        ("precision on the cpu backend: expected one of float32, float32-ieee, float64", "got tf32"),
    ),
    "unknown reduction": (make(reduction="order"), UnknownNameError, ("got 'order'", "did you mean 'ordered'?")),
    "unknown metric": (make(metrics=["acuracy"]), UnknownNameError, ("got 'acuracy'", "did you mean 'accuracy'?")),
    "metrics as text": (make(metrics="accuracy"), DtypeError, ("expected a list of names", "got 'accuracy'")),
    "metric of numbers": (
        make(metrics=["r2"]),
        ConfigurationError,
        ("metric r2", "got 3 outputs of softmax_cross_entropy"),
    ),
    "score of many classes": (
        make(metrics=["f1"]),
        ConfigurationError,
        ("metric f1: expected two classes, got 3 outputs", "of several classes there are f1_macro"),
    ),
    "score of labels": (
        make(loss="binary_cross_entropy", metrics=["recall"]),
        ConfigurationError,
        ("metric recall: expected a loss for classes or two classes", "of labels there are recall_macro"),
    ),
    "top of all classes": (
        make(metrics=["top_3_accuracy"]),
        ConfigurationError,
        ("metric top_3_accuracy: expected fewer than the 3 classes, got 3",),
    ),
    "top of none": (make(metrics=["top_0_accuracy"]), ConfigurationError, ("k of metric top_0_accuracy",)),
    "pinball of no level": (make(metrics=["pinball_1.5"]), ConfigurationError, ("level of metric pinball_1.5",)),
    "pinball of classes": (make(metrics=["pinball_0.5"]), ConfigurationError, ("expected a loss for numbers, got",)),
    "top of k": (make(metrics=["top_k_accuracy"]), UnknownNameError, ("did you mean 'top_5_accuracy'?",)),
    "metric of classes": (
        make(loss="huber", metrics=["accuracy"]),
        ConfigurationError,
        ("metric accuracy: expected a loss for classes, two classes or labels", "got 3 outputs of huber"),
    ),
    "class_weight of a regression": (
        make(loss="huber", class_weight={0: 1.0}),
        ConfigurationError,
        ("class_weight: expected a loss for classification", "got huber"),
    ),
    "unknown class_weight": (make(class_weight="balance"), UnknownNameError, ("got 'balance'", "'balanced'")),
    "class_weight as a list": (make(class_weight=[1.0, 2.0]), DtypeError, ("expected a mapping", "got list")),
    "negative class_weight": (
        make(class_weight={1: -2.0}),
        ConfigurationError,
        ("class_weight[1]: expected a finite number >= 0", "got -2.0"),
    ),
    "standardized targets of a classification": (
        make(network=mg.Network([mg.Dense(4, 3), mg.Standardize(3)])),
        ConfigurationError,
        ("Standardize as the last layer: expected a regression loss", "got softmax_cross_entropy"),
    ),
    # Optimizers, schedules, layers
    "negative rate": (
        lambda trainer: mg.SGD(-0.1),
        ConfigurationError,
        ("rate: expected a finite number >= 0", "-0.1"),
    ),
    "infinite rate": (lambda trainer: mg.Adam(np.inf), ConfigurationError, ("expected a finite number", "got inf")),
    "rate as text": (lambda trainer: mg.Adam("0.1"), DtypeError, ("expected a finite number", "got str '0.1'")),
    "momentum of 1": (lambda trainer: mg.Momentum(0.1, 1.0), ConfigurationError, ("< 1", "got 1.0")),
    "unknown activation": (
        lambda trainer: mg.Dense(3, 2, "ReLU"),
        UnknownNameError,
        ("Dense activation", "got 'ReLU'", "did you mean 'relu'?"),
    ),
    "width 0": (lambda trainer: mg.Dense(0, 2), ConfigurationError, (f"Dense n_in: expected {WHOLE}", "got 0")),
    "dropout of all": (lambda trainer: mg.Dropout(1.0), ConfigurationError, ("Dropout rate", "< 1", "got 1.0")),
    # Dataset
    "no rows": (dataset(np.zeros((0, 4)), []), EmptyDataError, ("x: expected at least one row", "got shape (0, 4)")),
    "no columns": (dataset(np.zeros((3, 0))), ShapeError, ("expected at least one feature", "got shape (3, 0)")),
    "one axis": (dataset(np.zeros(4)), ShapeError, ("expected (rows, features)", "got shape (4,)")),
    "NaN in x": (dataset(with_nan(X)), DataError, ("x: expected finite numbers", "got nan at row 5, column 2")),
    "infinity in x": (dataset(with_nan(X, -np.inf)), DataError, ("got -inf at row 5, column 2",)),
    "NaN in y": (dataset(X, with_nan(VALUES)), DataError, ("y: expected finite numbers", "got nan at row 5")),
    "text in x": (dataset([["a", "b"]]), DtypeError, ("x: expected real numbers", "got dtype <U1")),
    "objects in x": (dataset([[None, 1.0]]), DtypeError, ("x: expected real numbers", "got dtype object")),
    "another length of y": (dataset(X, LABELS[:5]), ShapeError, ("as x has 24 rows", "got shape (5,)")),
    "another length of weight": (dataset(X, LABELS, np.ones(3)), ShapeError, ("as x has 24 rows", "got shape (3,)")),
    "negative weight": (dataset(X, LABELS, -np.ones(24)), DataError, ("of at least 0", "got -1.0 at row 0")),
    "weights all 0": (dataset(X, LABELS, np.zeros(24)), DataError, ("a weight above 0", "got 24 times 0")),
    "unnamed class": (dataset(X, LABELS, classes=["a", "b"]), DataError, ("from 0 to 1", "got 2 at row 2")),
    "no part": (
        lambda trainer: GOOD.split(0.001),
        ConfigurationError,
        ("fraction: expected at least one row in each part", "got 0.001 of 24"),
    ),
    # fit
    "epochs 0": (fit(epochs=0), ConfigurationError, (f"epochs: expected {WHOLE}", "got 0")),
    "epochs 1.5": (fit(epochs=1.5), DtypeError, (WHOLE, "got float 1.5")),
    "arrays for data": (fit(X), DtypeError, ("data: expected a mlpgpu.Dataset", "got ndarray")),
    "an array for validation": (fit(validation=X), DtypeError, ("expected a mlpgpu.Dataset", "(x, y)", "got ndarray")),
    "another width": (fit(mg.Dataset(X[:, :3], LABELS)), ShapeError, ("x: expected (rows, 4)", "got (24, 3)")),
    "another width to validate": (
        fit(validation=mg.Dataset(X[:, :3], LABELS)),
        ShapeError,
        ("x: expected (rows, 4)", "got (24, 3)"),
    ),
    "no targets": (fit(mg.Dataset(X)), DataError, ("data: expected targets", "got a data set without y")),
    "label out of range": (fit(mg.Dataset(X, LABELS + 1)), DataError, ("from 0 to 2", "got 3 at row 2")),
    "negative label": (fit(mg.Dataset(X, LABELS - 1)), DataError, ("from 0 to 2", "got -1 at row 0")),
    "fractional label": (fit(mg.Dataset(X, LABELS + 0.5)), DataError, ("expected whole numbers", "got 0.5 at row 0")),
    "label out of range to validate": (fit(validation=mg.Dataset(X, LABELS + 1)), DataError, ("got 3 at row 2",)),
    "another width of y": (
        fit(mg.Dataset(X, VALUES[:, :2] - VALUES[:, :2].min())),
        ShapeError,
        ("y: expected targets (24, 3)", "got shape (24, 2)"),
    ),
    "no distribution": (
        fit(mg.Dataset(X, np.ones((24, 3)))),
        DataError,
        ("rows that sum to 1", "got sums from 3 to 3"),
    ),
    "negative distribution": (
        fit(mg.Dataset(X, np.tile([2.0, -1.0, 0.0], (24, 1)))),
        DataError,
        ("targets of softmax_cross_entropy: expected values from 0 to 1", "got -1 to 2"),
    ),
    "other classes": (
        fit(mg.Dataset(X, np.array(["a", "b", "d"])[LABELS])),
        ConfigurationError,
        ("classes: expected ('a', 'b', 'c')", "got ('a', 'b', 'd')"),
    ),
    "all of a batch dropped": (
        fit(mg.Dataset(X[:5], LABELS[:5]), drop_last=True),
        ConfigurationError,
        ("at least one batch of 8 rows with drop_last=True", "got 5 rows"),
    ),
    "no callback": (fit(callbacks=["early"]), DtypeError, ("expected a Callback or a function", "got str 'early'")),
    "callback class": (fit(callbacks=[mg.EarlyStopping]), DtypeError, ("got class EarlyStopping",)),
    "monitor without validation": (
        fit(callbacks=[mg.EarlyStopping()]),
        ConfigurationError,
        ("EarlyStopping monitor: expected one of loss", "got 'validation_loss'", "pass validation= to fit"),
    ),
    "unknown monitor": (
        fit(validation=GOOD, callbacks=[mg.EarlyStopping("validation_los")]),
        ConfigurationError,
        ("expected one of loss, validation_loss, validation_accuracy", "got 'validation_los'"),
    ),
    "folder that is not there": (
        fit(callbacks=[mg.Checkpoint("missing/run.h5")]),
        StorageError,
        ("Checkpoint path missing/run.h5: expected a folder that is there", "got no folder missing"),
    ),
    # step
    "step of another width": (step(X[:2, :3], LABELS[:2]), ShapeError, ("expected (rows, 4)", "got (2, 3)")),
    "step of too many rows": (step(X[:9], LABELS[:9]), ConfigurationError, ("at most batch_size = 8 rows", "got 9")),
    "step with NaN": (step(with_nan(X)[:8], LABELS[:8]), DataError, ("got nan at row 5, column 2",)),
    "step with a bad label": (step(X[:2], [0, 3]), DataError, ("class labels", "from 0 to 2", "got 3 at row 1")),
    "step without rows": (step(X[:0], []), EmptyDataError, ("at least one row", "got shape (0, 4)")),
    # evaluate
    "evaluate arrays": (evaluate(X), DtypeError, ("expected a mlpgpu.Dataset", "got ndarray")),
    "evaluate without targets": (evaluate(mg.Dataset(X)), DataError, ("expected targets", "without y")),
    "evaluate an unknown metric": (evaluate(GOOD, ["auc"]), UnknownNameError, ("metric", "got 'auc'")),
    "evaluate a metric as text": (evaluate(GOOD, "accuracy"), DtypeError, ("a list of names", "got 'accuracy'")),
    "ranks without a class": (
        evaluate(mg.Dataset(X[:2], LABELS[:2]), ["roc_auc"]),
        DataError,
        ("data for roc_auc: expected rows of every class, with weights over 0", "got none of class 'c'"),
    ),
    "ranks of a class that weighs nothing": (
        evaluate(mg.Dataset(X, LABELS, (LABELS != 1).astype(float)), ["average_precision"]),
        DataError,
        ("data for average_precision: expected rows of every class", "got none of class 'b'"),
    ),
    "evaluate a metric of numbers": (
        evaluate(GOOD, ["r2"]),
        ConfigurationError,
        ("metric r2", "a loss for numbers, two classes or labels"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named_and_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, error, words = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    trainer = new_trainer(metrics=["accuracy"])
    trainer.fit(NAMED, 1, progress=False)
    assert_refused(trainer, call, error, words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("mean_squared_error", mg.Dataset(X, VALUES * 1e300), ("y as float32: expected finite numbers", "got inf")),
        ("mean_squared_error", NAMED, ("y: expected numeric targets", "got labels of the classes a, b, c")),
        ("binary_cross_entropy", mg.Dataset(X, VALUES * 5), ("targets of binary_cross_entropy", "from 0 to 1")),
    ],
)
@pytest.mark.parametrize("role", ["data", "validation"])
def test_data_that_do_not_suit_the_loss_change_nothing(
    name: str, data: mg.Dataset, words: tuple[str, ...], role: str
) -> None:
    given = {"data": mg.Dataset(X, VALUES > 1.0), role: data}
    network = mg.Network([mg.Standardize(4), mg.Dense(4, 3)], seed=1)
    trainer = mg.Trainer(network, name, mg.SGD(0.01), batch_size=8)
    before = everything(trainer)
    with pytest.raises(MlpgpuError) as caught:
        trainer.fit(given.pop("data"), 1, progress=False, **given)
    for part in words:
        assert part in str(caught.value)
    assert everything(trainer) == before


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ({"d": 1.0}, UnknownNameError, ("class in class_weight: expected one of a, b, c", "got 'd'")),
        ({0: 0.0, 1: 0.0, 2: 0.0}, DataError, ("weight: expected a weight above 0", "got 24 times 0")),
    ],
)
def test_class_weights_of_no_class_are_refused(weights: dict, error: type[MlpgpuError], words: tuple[str, ...]) -> None:
    trainer = new_trainer(class_weight=weights)
    assert_refused(trainer, fit(NAMED), error, words)


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ({3: 1.0}, ConfigurationError, "class in class_weight: expected a whole number from 0 to 2, got 3"),
        ({1.5: 1.0}, DtypeError, "class in class_weight: expected a whole number from 0 to 2, got float 1.5"),
        ({True: 1.0}, DtypeError, "class in class_weight: expected a whole number from 0 to 2, got bool True"),
        ({2**70: 1.0}, ConfigurationError, "class in class_weight: expected a whole number from 0 to 2, got 1180"),
        ({1: 1j}, DtypeError, r"class_weight\[1\]: expected a finite number >= 0, got complex 1j"),
    ],
)
def test_numbers_of_no_class_are_refused_when_a_trainer_is_made(
    weights: dict, error: type[MlpgpuError], words: str
) -> None:
    with pytest.raises(error, match=words):
        new_trainer(class_weight=weights)


def test_fewer_names_of_classes_than_outputs_are_refused() -> None:
    # Otherwise a prediction might have no name.
    named = mg.Dataset(X, np.array(["a", "b"])[LABELS % 2])
    assert_refused(new_trainer(), fit(named), ConfigurationError, ("classes: expected 3 names", "got"))


def test_a_schedule_in_epochs_is_refused_by_step() -> None:
    for schedule, words in (
        (mg.CosineDecay(0.1, epochs=3), ("CosineDecay in Trainer.step", "expected a length in steps=", "epochs=3")),
        (mg.ReduceOnPlateau(0.1, monitor="loss"), ("Trainer.step", "a schedule in steps", "got ReduceOnPlateau")),
    ):
        assert_refused(new_trainer(optimizer=mg.SGD(schedule)), step(X[:8], LABELS[:8]), ConfigurationError, words)


def test_a_plateau_needs_its_monitor() -> None:
    trainer = new_trainer(optimizer=mg.SGD(mg.ReduceOnPlateau(0.1)))
    words = ("ReduceOnPlateau monitor: expected one of", "got 'validation_loss'", "pass validation= to fit")
    assert_refused(trainer, fit(), ConfigurationError, words)


def test_a_trainer_that_cannot_be_made_leaves_the_network_alone() -> None:
    network = new_network()
    for options in ({"metrics": ["r2"]}, {"precision": "bfloat16"}, {"class_weight": "best"}):
        with pytest.raises(MlpgpuError):
            mg.Trainer(network, "softmax_cross_entropy", mg.SGD(0.1), **options)
    assert network.output == "identity"


def test_a_fit_refuses_a_validation_set_that_cannot_be_ranked() -> None:
    trainer = new_trainer(metrics=["roc_auc"])
    one_class = mg.Dataset(X, np.zeros(len(X), int))
    for validation in (one_class, mg.Dataset(X[:2], LABELS[:2])):
        with pytest.raises(DataError, match=r"data for roc_auc: .* got none of class"):
            trainer.fit(GOOD, 1, validation=validation, progress=False)
    assert trainer.steps == 0 and trainer._engine.program is None
    trainer.fit(one_class, 1, validation=GOOD, progress=False)  # what is trained on is not ranked
    assert 0.0 <= trainer.history.last["validation_roc_auc"] <= 1.0


def test_ranks_need_two_classes() -> None:
    network = mg.Network([mg.Dense(4, 1)])
    with pytest.raises(ConfigurationError, match="metric roc_auc: expected two classes or more"):
        mg.Trainer(network, "softmax_cross_entropy", mg.SGD(0.1), metrics=["roc_auc"])
    with pytest.raises(ConfigurationError, match="metric roc_auc: expected a loss for classes, two classes or labels"):
        new_trainer("mean_squared_error", metrics=["roc_auc"])


@pytest.mark.parametrize("rows", [1, 7])
def test_fewer_rows_than_a_batch_are_trained_on(rows: int) -> None:
    trainer = mg.Trainer(new_network(), "softmax_cross_entropy", mg.SGD(0.1), batch_size=1000)
    data = mg.Dataset(X[:rows], LABELS[:rows])
    loss = trainer.evaluate(data)["loss"]
    history = trainer.fit(data, 2, progress=False)
    assert trainer.steps == 2
    assert history["loss"][0] == pytest.approx(loss, rel=1e-6)
    assert history["loss"][1] < loss


# Divergence


def diverging(rate: float = 1e25) -> mg.Trainer:
    return mg.Trainer(new_network(), "mean_squared_error", mg.SGD(rate), batch_size=8)


def test_a_diverging_fit_stops_and_says_at_which_step() -> None:
    trainer = diverging()
    with pytest.raises(DivergenceError) as caught:
        trainer.fit(mg.Dataset(X, VALUES), 50, progress=False)
    step = caught.value.step
    assert str(caught.value).startswith(f"loss at step {step}: expected a finite value, got NaN or infinity (")
    assert isinstance(caught.value, ArithmeticError)

    # The same steps one by one meet it at the same place.
    single = diverging()
    with pytest.raises(DivergenceError) as caught_singly:
        single.fit(mg.Dataset(X, VALUES), 50, progress=False, callbacks=[SingleSteps()])
    assert caught_singly.value.step == step == single.steps - 1


class SingleSteps(mg.Callback):
    """Makes a fit run its steps one at a time."""

    every_steps = 1


def test_a_parameter_that_diverges_in_the_last_step_is_noticed() -> None:
    trainer = diverging(rate=1e38)
    with pytest.raises(DivergenceError, match=r"a parameter at step 0: expected a finite value") as caught:
        trainer.fit(mg.Dataset(X[:8] * 1e3, VALUES[:8] * 1e3), 1, progress=False)
    assert caught.value.step == 0


def test_the_last_good_checkpoint_stands_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    data = mg.Dataset(X, VALUES)
    # The rate grows by a factor of ten each epoch: some are good, then it diverges.
    layers = [mg.Dense(4, 5, "tanh", init="glorot_uniform"), mg.Dense(5, 3, init="glorot_uniform")]
    rate = mg.ExponentialDecay(1e-3, 10.0, epochs=1)
    trainer = mg.Trainer(mg.Network(layers, seed=1), "mean_squared_error", mg.SGD(rate), batch_size=8)
    with pytest.raises(DivergenceError):
        trainer.fit(data, 50, progress=False, callbacks=[mg.Checkpoint(path)])
    good = path.read_bytes()
    with pytest.raises(DivergenceError, match="expected a finite value"):
        trainer.save(path)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
    resumed = mg.Trainer.resume(path)
    assert 1 <= resumed.epochs <= len(trainer.history)
    assert np.isfinite(mg.load(path).predict(X)).all()
    assert resumed.history["loss"] == trainer.history["loss"][: resumed.epochs]
    with pytest.raises(DivergenceError):
        resumed.fit(data, 50, progress=False)


def test_a_diverging_step_says_so() -> None:
    trainer = diverging()
    with pytest.raises(DivergenceError, match="loss at step") as caught:
        for _ in range(50):
            trainer.step(X[:8], VALUES[:8])
    assert 0 < caught.value.step == trainer.steps - 1
