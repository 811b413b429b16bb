"""Metrics and columns of one's own: in evaluations, in the history, watched by callbacks and schedules."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

import mlpgpu as mg
from mlpgpu import names
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.errors import ConfigurationError, DtypeError, MlpgpuError, UnknownNameError
from mlpgpu.initializers import INITIALIZERS
from mlpgpu.losses import LOSSES
from mlpgpu.metrics import METRICS
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan import PRECISIONS, REDUCTIONS
from mlpgpu.schedules import SCHEDULES
from mlpgpu.storage.descriptions import describe, rebuild

DRAW = np.random.default_rng(2)
X = DRAW.standard_normal((40, 4))
VALUES = X[:, 0] * 2.0 + 1.0
LABELS = np.arange(40) % 3
OPTIMIZER_NAMES = (*OPTIMIZERS, *map(str.lower, OPTIMIZERS))
WEIGHT = np.linspace(0.5, 2.0, 40)
ROUNDED = {"rtol": 1e-6, "atol": 1e-6}  # evaluations and predictions may add up in other orders


def trainer_of(metrics: Any = (), n_out: int = 1, loss: Any = "mse", rate: Any = 0.01) -> mg.Trainer:
    network = mg.Network([mg.Dense(4, 5, "tanh"), mg.Dense(5, n_out)], seed=1)
    return mg.Trainer(network, loss, mg.SGD(rate), batch_size=16, backend="cpu", metrics=metrics)


def fit(trainer: mg.Trainer, epochs: int = 4, data: Any = (X, VALUES), **options: Any) -> mg.History:
    return trainer.fit(data, epochs, progress=False, **options)


def worst(y: np.ndarray, prediction: np.ndarray) -> float:
    return np.abs(y - prediction).max()


def weighted(y: np.ndarray, prediction: np.ndarray, weight: np.ndarray) -> float:
    return float(np.average(np.abs(y - prediction), weights=weight))


# --- metrics ---


def test_a_function_is_a_metric() -> None:
    trainer = trainer_of(["mae", worst, weighted, {"bias": lambda y, p: (p - y).mean()}])
    assert trainer.metrics == ("mean_absolute_error", "worst", "weighted", "bias")
    history = fit(trainer, validation=(X, VALUES))
    error = np.abs(trainer.network.predict(X) - VALUES)
    for data in ((X, VALUES), mg.Dataset(X, VALUES)):
        found = trainer.evaluate(data)
        assert found["worst"] == history["validation_worst"][-1] == pytest.approx(error.max(), rel=1e-6)
        assert found["weighted"] == pytest.approx(found["mean_absolute_error"], rel=1e-6)
        assert isinstance(found["worst"], float)
    found = trainer.evaluate((X, VALUES, WEIGHT))
    assert found["weighted"] == pytest.approx(np.average(error, weights=WEIGHT))
    assert found["weighted"] == pytest.approx(found["mean_absolute_error"], rel=1e-6)


def test_a_metric_sees_targets_and_predictions_as_their_owner_does() -> None:
    seen: list[tuple] = []

    def look(y: np.ndarray, prediction: np.ndarray, threshold: float = 0.5) -> float:
        seen.append((y, prediction, threshold))
        return 0.0

    trainer = trainer_of([look], n_out=3, loss="cross_entropy")
    names_of = np.array(["a", "b", "c"])
    for y in (LABELS, names_of[LABELS], np.eye(3)[LABELS]):
        trainer.evaluate((X, y, WEIGHT))
    for y, (given, prediction, threshold) in zip((LABELS, LABELS, np.eye(3)[LABELS]), seen, strict=True):
        np.testing.assert_array_equal(given, y)
        np.testing.assert_allclose(prediction, trainer.network.predict(X), **ROUNDED)
        assert threshold == 0.5
    seen.clear()
    column = trainer_of([look])
    column.evaluate((X, VALUES[:, np.newaxis]))
    assert seen[0][0].shape == seen[0][1].shape == (40, 1)


def test_scikit_learns_functions_are_metrics() -> None:
    trainer = trainer_of([sklearn_metrics.r2_score, sklearn_metrics.max_error])
    fit(trainer, data=(X, VALUES, WEIGHT))
    predicted = trainer.network.predict(X)
    found = trainer.evaluate((X, VALUES, WEIGHT))
    assert found["r2_score"] == pytest.approx(sklearn_metrics.r2_score(VALUES, predicted, sample_weight=WEIGHT))
    assert found["max_error"] == pytest.approx(sklearn_metrics.max_error(VALUES, predicted))


def test_an_array_is_a_result_but_no_column() -> None:
    def errors(y: np.ndarray, prediction: np.ndarray) -> np.ndarray:
        return y - prediction

    trainer = trainer_of([errors])
    assert "validation_errors" not in fit(trainer, validation=(X, VALUES)).columns
    expected = VALUES - trainer.network.predict(X)
    np.testing.assert_allclose(trainer.evaluate((X, VALUES))["errors"], expected, **ROUNDED)
    assert set(trainer.evaluate((X, VALUES), [worst])) == {"loss", "worst"}
    assert set(trainer.evaluate((X, VALUES), {"w": worst})) == {"loss", "w"}


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ([lambda y, p: 0.0], DtypeError, r'a function with a name, got <function.*metrics=\[\{"name": function\}\]'),
        ([{"accuracy": worst}], ConfigurationError, "a name that no other metric has, got 'accuracy'"),
        ([{"loss": worst}], ConfigurationError, "got 'loss'"),
        ([{"a b": worst}], ConfigurationError, "name of a metric"),
        ([worst, {"worst": weighted}], ConfigurationError, "got 'worst'"),
        ([{"worst": 3}], DtypeError, "metric worst: expected a function of"),
        ([3], DtypeError, "metric: expected a name"),
        ("mae", DtypeError, "metrics: expected a list of names and functions, got 'mae'"),
        (worst, DtypeError, "metrics: expected a list of names and functions"),
    ],
)
def test_metrics_that_are_none_are_refused(metrics: Any, error: type[MlpgpuError], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer_of(metrics)


def test_a_metric_that_gives_no_number_is_refused() -> None:
    def text(y: np.ndarray, prediction: np.ndarray) -> Any:
        return "good"

    with pytest.raises(DtypeError, match="metric text: expected a number or an array of numbers, got 'good'"):
        trainer_of([text]).evaluate((X, VALUES))


def test_callbacks_watch_a_metric(tmp_path: Path) -> None:
    def closeness(y: np.ndarray, prediction: np.ndarray) -> float:
        return -worst(y, prediction)

    stopping = mg.EarlyStopping("validation_closeness", patience=50, mode="max")
    checkpoint = mg.Checkpoint(tmp_path / "r.h5", keep_best=True, monitor="validation_closeness", mode="max")
    trainer = trainer_of([closeness], rate=0.05)
    history = fit(trainer, 12, validation=(X, VALUES), callbacks=[stopping, checkpoint])
    best = max(history["validation_closeness"])
    assert best == stopping.best == checkpoint.best == trainer.evaluate((X, VALUES))["closeness"]
    assert history.best("validation_closeness", "max")["validation_closeness"] == best
    assert history.best("validation_closeness")["validation_closeness"] == min(history["validation_closeness"])


def test_a_run_resumes_with_its_own_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unbroken = fit(trainer_of(["mae", worst]), validation=(X, VALUES))
    trainer = trainer_of(["mae", worst])
    fit(trainer, 2, validation=(X, VALUES))
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5", metrics=[worst])
    assert resumed.metrics == ("mean_absolute_error", "worst")
    assert fit(resumed, validation=(X, VALUES))["validation_worst"] == unbroken["validation_worst"]
    assert "metrics" not in capsys.readouterr().err
    without = mg.Trainer.resume(tmp_path / "run.h5")
    assert without.metrics == ("mean_absolute_error",)
    assert "without its own metrics, worst (Trainer.resume(path, metrics=[worst])" in capsys.readouterr().err


# --- columns of callbacks ---


class Gap(mg.Callback):
    columns = ("gap",)

    def epoch_end(self, trainer: Any, record: Any) -> None:
        record["gap"] = float(20 - trainer.epochs) if trainer.epochs < 4 else 30.0


def test_a_callbacks_column_is_watched(tmp_path: Path) -> None:
    stopping = mg.EarlyStopping("gap", patience=2)
    checkpoint = mg.Checkpoint(tmp_path / "run.h5", keep_best=True, monitor="gap")
    log = mg.CSVLogger(tmp_path / "log.csv")
    trainer = trainer_of()
    history = fit(trainer, 9, callbacks=[log, stopping, checkpoint, Gap()])  # in whatever order
    assert history["gap"] == [19.0, 18.0, 17.0, 30.0, 30.0]
    assert (stopping.best, stopping.best_epoch, checkpoint.best) == (17.0, 3, 17.0)
    assert (tmp_path / "log.csv").read_text().splitlines()[0].endswith(",gap")
    assert mg.Trainer.resume(tmp_path / "run.h5").history["gap"] == history["gap"]
    assert mg.Trainer.resume(tmp_path / "run.best.h5").epochs == 3


def test_a_schedule_watches_a_callbacks_column(tmp_path: Path) -> None:
    def trainer() -> mg.Trainer:
        return trainer_of(rate=mg.ReduceOnPlateau(0.1, factor=0.5, patience=1, monitor="gap", mode="min"))

    history = fit(trainer(), 6, callbacks=[Gap()])
    assert history["rate"] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.025]
    fit(trainer(), 5, callbacks=[mg.Checkpoint(tmp_path / "run.h5"), Gap()])
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    assert fit(resumed, 6, callbacks=[Gap()])["rate"] == history["rate"]
    upward = trainer_of(rate=mg.ReduceOnPlateau(0.1, factor=0.5, patience=1, monitor="gap", mode="max"))
    assert fit(upward, 5, callbacks=[Gap()])["rate"] == [0.1, 0.1, 0.05, 0.025, 0.025]
    with pytest.raises(ConfigurationError, match="ReduceOnPlateau monitor: expected one of loss, got 'gap'"):
        fit(trainer())


def test_an_older_file_knows_no_mode() -> None:
    schedule = mg.ReduceOnPlateau(0.1)
    description = describe(schedule)
    assert description.pop("mode") == "auto"
    assert rebuild("schedule", description, SCHEDULES) == schedule


def test_a_function_adds_columns() -> None:
    def double(record: dict[str, float]) -> None:
        record["double"] = 2 * record["loss"]

    history = fit(trainer_of(), callbacks=[double])
    assert history["double"] == [2 * loss for loss in history["loss"]]
    double.columns = ("double",)
    stopping = mg.EarlyStopping("double")
    fit(trainer_of(), callbacks=[stopping, double])
    assert stopping.best is not None


def test_what_the_trainer_recorded_stays() -> None:
    def meddle(record: dict[str, float]) -> None:
        record["loss"] = -1.0
        del record["rate"]

    history = fit(trainer_of(), callbacks=[meddle, lambda record: record["loss"] < 0.0])
    assert len(history) == 4 and min(history["loss"]) > 0.0 and history["rate"] == [0.01] * 4


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        (type("Own", (mg.Callback,), {"columns": ("loss",)})(), ConfigurationError, "columns of callbacks.*got loss"),
        (type("Own", (mg.Callback,), {"columns": "gap"})(), DtypeError, "a tuple of names, got 'gap'"),
        (type("Own", (mg.Callback,), {"columns": ("a gap",)})(), ConfigurationError, "columns of Own.*got 'a gap'"),
        (type("Own", (mg.Callback,), {"columns": ("gap",)})(), DtypeError, "'gap' in the record after epoch_end"),
        (lambda record: record.update(note="good"), DtypeError, "'note': expected a number, got str 'good'"),
        (lambda record: record.update({"a/b": 1.0}), ConfigurationError, "got 'a/b'"),
    ],
)
def test_columns_that_are_none_are_refused(callback: Any, error: type[MlpgpuError], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(trainer_of(), callbacks=[callback])


def test_two_callbacks_with_one_column_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="names that differ, got gap, gap"):
        fit(trainer_of(), callbacks=[Gap(), Gap()])
    with pytest.raises(DtypeError, match=r"a list of callbacks, got Gap"):
        fit(trainer_of(), callbacks=Gap())


def test_hooks_of_other_names_are_refused() -> None:
    for name, meant in {"on_epoch_end": "epoch_end", "on_train_begin": "begin", "after_batch": "step_end"}.items():
        kind = type("Theirs", (mg.Callback,), {name: lambda *_: True})
        expected = f"methods of Theirs: expected one of begin, .*got {name} .did you mean '{meant}'"
        with pytest.raises(ConfigurationError, match=expected):
            fit(trainer_of(), callbacks=[kind()])
    # A class that has a hook of ours may have methods of any name.
    own = type("Own", (mg.Callback,), {"on_epoch_end": lambda *_: 1 / 0, "epoch_end": lambda *_: True})
    assert len(fit(trainer_of(), callbacks=[own()])) == 1


@pytest.mark.parametrize("hook", ["begin", "epoch_end"])
def test_what_has_no_truth_value_is_refused(hook: str) -> None:
    kind = type("Several", (mg.Callback,), {hook: lambda *_: np.zeros(2)})
    with pytest.raises(DtypeError, match=rf"what Several\.{hook} returns: expected what is true or false"):
        fit(trainer_of(), callbacks=[kind()])


# --- names ---


@pytest.mark.parametrize(
    ("type_", "table"),
    [
        (names.ActivationName, ACTIVATIONS),
        (names.InitializerName, INITIALIZERS),
        (names.LossName, LOSSES),
        (names.OptimizerName, OPTIMIZER_NAMES),
        (names.PrecisionName, PRECISIONS),
        (names.ReductionName, REDUCTIONS),
    ],
)
def test_types_hold_the_tables_and_synonyms(type_: Any, table: Any) -> None:
    synonyms = {name for name, meant in names.SYNONYMS.items() if set(meant) & set(table)}
    assert set(typing.get_args(type_)) == set(table) | synonyms


def test_synonyms_are_understood(tmp_path: Path) -> None:
    layers = [mg.Dense(4, 3, "swish"), mg.LocallyConnected(3, 1, "logistic"), mg.Dense(3, 1, activation="linear")]
    assert [layer.activation for layer in layers] == ["silu", "sigmoid", "identity"]
    assert layers[2] == mg.Dense(3, 1)
    for name, meant in {"mse": "mean_squared_error", "mae": "absolute_error", "bce": "binary_cross_entropy"}.items():
        trainer = mg.Trainer(mg.Network(layers), name, mg.SGD(0.1), precision="fp32")
        assert (trainer.loss, trainer.precision) == (meant, "float32")
    assert trainer_of(["mse", "mae"]).metrics == ("mean_squared_error", "mean_absolute_error")
    crossed = trainer_of(["acc"], n_out=3, loss="cross_entropy")
    assert (crossed.loss, crossed.metrics) == ("softmax_cross_entropy", ("accuracy",))
    for meant in names.SYNONYMS.values():
        assert all(name in {*ACTIVATIONS, *LOSSES, *METRICS, *OPTIMIZER_NAMES, *PRECISIONS} for name in meant)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: mg.Trainer(mg.Network([mg.Dense(1, 1)]), "mse", mg.SGD(0.1), backend="gpu"), "mean 'cuda'"),
        (lambda: fit(trainer_of(), callbacks=[mg.EarlyStopping("val_loss")]), "pass validation= to fit"),
        (
            lambda: fit(trainer_of(), validation=(X, VALUES), callbacks=[mg.EarlyStopping("val_loss")]),
            "did you mean 'validation_loss'",
        ),
        (lambda: fit(trainer_of(), validation=(X, VALUES))["val_loss"], "did you mean 'validation_loss'"),
        (lambda: mg.Dense(4, 3, "softmax"), "the loss applies softmax"),
        (lambda: mg.Dense(4, 3, "ReLU"), "did you mean 'relu'"),
        (lambda: mg.Dense(4, 3, init="kaiming_normal"), "did you mean 'he_normal'"),
        (lambda: trainer_of(loss="crossentropy"), "did you mean 'softmax_cross_entropy'|binary_cross_entropy"),
        (lambda: trainer_of(["auc"]), "did you mean 'roc_auc'"),
        (lambda: trainer_of(loss="CrossEntropyLoss"), "did you mean 'softmax_cross_entropy'"),
        (lambda: trainer_of(loss="cross-entropy"), "did you mean 'softmax_cross_entropy'"),
        (lambda: trainer_of(loss="sigmoid_cross_entropy"), "did you mean 'binary_cross_entropy'"),
        (lambda: trainer_of(loss="BCEWithLogitsLoss"), "did you mean 'binary_cross_entropy'"),
        (lambda: trainer_of(loss="MSELoss"), "did you mean 'mean_squared_error'"),
        (lambda: trainer_of(loss="l1_loss"), "did you mean 'absolute_error'"),
        (lambda: trainer_of(loss="smooth_l1_loss"), "did you mean 'huber'"),
        (lambda: trainer_of(loss="nll_loss"), "did you mean 'softmax_cross_entropy'"),
        (lambda: mg.Dense(4, 3, "Linear"), "did you mean 'identity'"),
        (lambda: mg.Dense(4, 3, "LeakyReLU"), "did you mean 'leaky_relu'"),
        (lambda: fit(trainer_of(), validation=0.5, callbacks=[mg.EarlyStopping("train_loss")]), "did you mean 'loss'"),
        (lambda: fit(trainer_of())["lr"], "did you mean 'rate'"),
    ],
)
def test_near_names_are_hinted_at(call: Callable[[], object], hint: str) -> None:
    with pytest.raises((UnknownNameError, ConfigurationError), match=hint):
        call()
