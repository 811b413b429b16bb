"""What each callback does in real fits, and what the trainer does around them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.errors import StorageError
from mlpgpu.random import half_words

DRAW = np.random.default_rng(4)
X = DRAW.standard_normal((40, 5))
DATA = mg.Dataset(X, DRAW.integers(0, 3, 40))
NOISE = mg.Dataset(DRAW.standard_normal((30, 5)), DRAW.integers(0, 3, 30))  # it soon gets worse


def new_trainer(rate: float = 0.2, **options: Any) -> mg.Trainer:
    network = mg.Network([mg.Dense(5, 16, "tanh"), mg.Dense(16, 3)], seed=9)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Momentum(rate), batch_size=16, **options)


def fit(trainer: mg.Trainer, *callbacks: Any, epochs: int = 8, **options: Any) -> mg.History:
    return trainer.fit(DATA, epochs, validation=NOISE, callbacks=callbacks, progress=False, **options)


def bits(network: mg.Network) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in network.parameters.items()}


class Recorder(mg.Callback):
    """Writes down what is called, and the parameters after each epoch."""

    def __init__(
        self, log: list[str] | None = None, name: str = "", last: bool = False, every: int | None = None
    ) -> None:
        self.log = [] if log is None else log
        self.name, self.every = name, every
        self.runs_last = last  # type: ignore[misc]
        self.parameters: list[dict[str, bytes]] = []

    @property
    def every_steps(self) -> int | None:
        return self.every

    def begin(self, trainer: Any) -> None:
        self.log.append(f"begin {self.name}")

    def step_end(self, trainer: Any) -> None:
        self.log.append(f"step {trainer.steps} {self.name}")

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        assert record == trainer.history.last
        assert record["epoch"] == trainer.epochs
        self.parameters.append(bits(trainer.network))
        self.log.append(f"epoch {trainer.epochs} {self.name}")

    def end(self, trainer: Any) -> None:
        self.log.append(f"end {self.name}")


# The order of things


def test_hooks_are_called_in_order_and_savers_last() -> None:
    log: list[str] = []
    fit(
        new_trainer(),
        Recorder(log, "saver", last=True, every=3),
        Recorder(log, "a", every=2),
        Recorder(log, "b"),
        epochs=2,
    )
    assert log == [
        *("begin a", "begin b", "begin saver"),
        *("step 2 a", "step 3 saver", "epoch 1 a", "epoch 1 b", "epoch 1 saver"),
        *("step 4 a", "step 6 a", "step 6 saver", "epoch 2 a", "epoch 2 b", "epoch 2 saver"),
        *("end a", "end b", "end saver"),
    ]


def test_looking_on_changes_no_bits() -> None:
    watched, alone = new_trainer(), new_trainer()
    fit(watched, Recorder(every=1))
    alone.fit(DATA, 8, progress=False)
    assert bits(watched.network) == bits(alone.network)
    assert watched.history["loss"] == alone.history["loss"]


def test_an_error_in_a_callback_leaves_a_usable_trainer(tmp_path: Path) -> None:
    class Failing(mg.Callback):
        every_steps = 4

        def step_end(self, trainer: Any) -> None:
            raise RuntimeError("no luck")

    unbroken, broken = new_trainer(), new_trainer()
    fit(unbroken)
    with pytest.raises(RuntimeError, match="no luck"):
        fit(broken, Failing())
    assert broken.steps == 4
    broken.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    fit(resumed)
    assert bits(resumed.network) == bits(unbroken.network)
    assert resumed.history["loss"] == unbroken.history["loss"]


# History


def test_the_history_of_a_fit() -> None:
    trainer = new_trainer(metrics=["accuracy", "confusion_matrix"])
    history = fit(trainer, epochs=3)
    assert history is trainer.history
    assert history.columns == ("epoch", "loss", "validation_loss", "validation_accuracy", "rate", "seconds")
    assert history["epoch"] == [1, 2, 3]
    assert history["rate"] == [0.2] * 3
    assert all(seconds > 0.0 for seconds in history["seconds"])
    results = trainer.evaluate(NOISE)
    assert history.last["validation_loss"] == results["loss"]
    assert history.last["validation_accuracy"] == results["accuracy"]
    assert results["confusion_matrix"].sum() == len(NOISE)


def test_an_epochs_loss_is_the_mean_over_its_rows() -> None:
    trainer = new_trainer(rate=0.0)
    weighted = DATA.with_weight(np.linspace(0.5, 2.0, 40))
    loss = trainer.evaluate(weighted)["loss"]
    # 40 rows make two batches of 16 and one of 8; sums in float32 differ by their order.
    assert trainer.fit(weighted, 1, progress=False)["loss"][0] == pytest.approx(loss, rel=1e-6)


def test_a_second_fit_goes_on_with_history_and_steps() -> None:
    trainer = new_trainer()
    fit(trainer, epochs=2)
    trainer.fit(DATA, 1, progress=False)
    assert trainer.history["epoch"] == [1, 2, 3]
    assert np.isnan(trainer.history["validation_loss"][2])
    assert (trainer.steps, trainer.epochs) == (9, 3)


def test_the_bar_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    new_trainer().fit(DATA, 2, validation=NOISE)
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_loss_metric_and_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fit(new_trainer(metrics=["accuracy"]), epochs=2)
    assert capsys.readouterr().err == ""  # progress=False
    new_trainer(metrics=["accuracy"]).fit(DATA, 2, validation=NOISE)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    for word in ("loss ", "validation_accuracy ", " rows/s"):
        assert word in shown


# EarlyStopping


def test_early_stopping_ends_with_the_best_epochs_parameters() -> None:
    trainer, stopping, recorder = new_trainer(), mg.EarlyStopping(patience=2), Recorder()
    history = fit(trainer, stopping, recorder, epochs=50)
    best = int(np.argmin(history["validation_loss"]))
    assert stopping.stopped and len(history) == best + 3 < 50
    assert (stopping.best, stopping.best_epoch) == (history["validation_loss"][best], best + 1)
    assert bits(trainer.network) == recorder.parameters[best] != recorder.parameters[-1]
    assert trainer.evaluate(NOISE)["loss"] == stopping.best


def test_early_stopping_restores_after_a_fit_that_was_not_stopped_too() -> None:
    trainer, recorder = new_trainer(), Recorder()
    history = fit(trainer, mg.EarlyStopping(patience=50), recorder, epochs=12)
    assert len(history) == 12
    assert bits(trainer.network) == recorder.parameters[int(np.argmin(history["validation_loss"]))]


def test_early_stopping_without_restoring_leaves_the_last() -> None:
    trainer, recorder = new_trainer(), Recorder()
    fit(trainer, mg.EarlyStopping(patience=2, restore_best=False), recorder, epochs=50)
    assert bits(trainer.network) == recorder.parameters[-1]


def test_early_stopping_on_an_accuracy() -> None:
    trainer, stopping = new_trainer(metrics=["accuracy"]), mg.EarlyStopping("validation_accuracy", patience=4)
    history = fit(trainer, stopping, epochs=60)
    assert stopping.best == max(history["validation_accuracy"]) == trainer.evaluate(NOISE)["accuracy"]
    assert len(history) == history["validation_accuracy"].index(stopping.best) + 5


def test_parameters_that_were_kept_outlive_setting_parameters() -> None:
    trainer, recorder = new_trainer(), Recorder()

    def touch(record: dict[str, float]) -> None:
        if record["epoch"] == 5:
            trainer.network.parameters = {"1.bias": np.zeros(3)}

    history = fit(trainer, mg.EarlyStopping(patience=50), recorder, touch, epochs=10)
    best = int(np.argmin(history["validation_loss"]))
    assert bits(trainer.network) == recorder.parameters[best]


# Checkpoint


def test_a_checkpoint_holds_the_run_as_it_ended(tmp_path: Path) -> None:
    trainer = new_trainer()
    fit(trainer, mg.Checkpoint(tmp_path / "run.h5", every=3), mg.EarlyStopping(patience=2), epochs=50)
    assert bits(mg.load(tmp_path / "run.h5")) == bits(trainer.network)
    assert mg.Trainer.resume(tmp_path / "run.h5").steps == trainer.steps
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]


@pytest.mark.parametrize(
    ("unit", "every", "expected"), [("epoch", 2, [0, 0, 6, 6, 12]), ("step", 5, [0, 5, 5, 10, 15])]
)
def test_checkpoints_come_when_they_are_due(unit: Any, every: int, expected: list[int], tmp_path: Path) -> None:
    path, saved = tmp_path / "run.h5", []

    def look(record: dict[str, float]) -> None:  # before the epoch's own checkpoint
        saved.append(mg.Trainer.resume(path).steps if path.exists() else 0)

    fit(new_trainer(), mg.Checkpoint(path, every, unit), look, epochs=5)
    assert saved == expected
    assert mg.Trainer.resume(path).steps == 15


def test_the_best_are_the_parameters_that_a_callback_set() -> None:
    trainer = new_trainer()
    zeros = {name: np.zeros_like(values) for name, values in trainer.network.parameters.items()}

    def reset(record: dict[str, float]) -> None:
        trainer.network.parameters = {**zeros, "1.bias": np.full(3, record["epoch"])}

    stopping = mg.EarlyStopping("loss", patience=1, min_delta=100.0)  # the first epoch is the best one
    fit(trainer, reset, stopping, epochs=5)
    assert (trainer.epochs, stopping.best_epoch) == (2, 1)
    assert trainer.network.parameters["1.bias"].tolist() == [1.0, 1.0, 1.0]


def test_a_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    trainer, recorder = new_trainer(), Recorder()
    history = fit(trainer, mg.Checkpoint(tmp_path / "run.h5", keep_best=True), recorder, epochs=12)
    best = int(np.argmin(history["validation_loss"]))
    assert bits(mg.load(tmp_path / "run.best.h5")) == recorder.parameters[best]
    assert bits(mg.load(tmp_path / "run.h5")) == bits(trainer.network) == recorder.parameters[-1]
    assert len(mg.Trainer.resume(tmp_path / "run.best.h5").history) == best + 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.best.h5", "run.h5"]


def test_the_best_is_still_the_best_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    history = fit(new_trainer(), mg.Checkpoint(path, keep_best=True), epochs=12)
    best = int(np.argmin(history["validation_loss"]))
    assert best < 8
    before = (tmp_path / "run.best.h5").read_bytes()
    fit(mg.Trainer.resume(path), mg.Checkpoint(path, keep_best=True), epochs=14)
    assert (tmp_path / "run.best.h5").read_bytes() == before


def test_a_disk_that_fills_up_costs_neither_the_file_nor_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trainer = tmp_path / "run.h5", new_trainer()

    def fill(record: dict[str, float]) -> None:
        if record["epoch"] == 3:
            monkeypatch.setattr("os.fsync", full)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"run\.h5: expected .*, got No space left on device"):
        fit(trainer, mg.Checkpoint(path), fill)
    monkeypatch.undo()
    assert mg.Trainer.resume(path).epochs == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]
    trainer.save(path)
    assert mg.Trainer.resume(path).epochs == 3


# CSVLogger and functions


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_log_reads_back_as_the_history(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    history = fit(new_trainer(metrics=["accuracy"]), mg.CSVLogger(path), epochs=3)
    assert [{name: float(cell) for name, cell in row.items()} for row in read_csv(path)] == history.records


def test_a_resumed_run_repeats_no_line_of_the_log(tmp_path: Path) -> None:
    log, run = tmp_path / "log.csv", tmp_path / "run.h5"

    class Stop(mg.Callback):
        every_steps = 11  # after three epochs of three steps and two steps more

        def step_end(self, trainer: Any) -> None:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fit(new_trainer(), mg.CSVLogger(log), mg.Checkpoint(run, 5, "step"), Stop())
    # The log knows of three epochs, the run only of the three up to its tenth step.
    assert [row["epoch"] for row in read_csv(log)] == ["1", "2", "3"]
    history = fit(mg.Trainer.resume(run), mg.CSVLogger(log), mg.Checkpoint(run, 5, "step"))
    rows = read_csv(log)
    assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(1, 9)]
    assert [float(row["loss"]) for row in rows] == history["loss"]


@pytest.mark.parametrize(
    ("function", "epochs"),
    [
        (lambda record: record["epoch"] == 3, 3),
        (lambda record: None, 8),
        (lambda record: record["epoch"] > 4 and "enough", 5),
    ],
)
def test_a_function_sees_each_record_and_may_end_the_fit(function: Callable[[dict], Any], epochs: int) -> None:
    seen: list[dict[str, float]] = []
    trainer = new_trainer()
    history = fit(trainer, lambda record: seen.append(record), function)
    assert seen == history.records
    assert len(seen) == trainer.epochs == epochs
    assert not history.interrupted


def test_every_callback_hears_of_an_epoch_that_another_ends() -> None:
    recorder = Recorder()
    fit(new_trainer(), lambda record: True, recorder)
    assert recorder.log == ["begin ", "epoch 1 ", "end "]


def test_rates_on_plateaus_go_down_in_the_history() -> None:
    trainer = mg.Trainer(
        mg.Network([mg.Dense(5, 3)], seed=1),
        "softmax_cross_entropy",
        mg.SGD(mg.ReduceOnPlateau(0.1, factor=0.5, patience=2, min_delta=1e9, least=0.02)),
        batch_size=16,
    )
    # Nothing is better by 10⁹, so after the first epoch every second one halves the rate.
    assert fit(trainer)["rate"] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.02]


# Histograms


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_histograms_are_numpy_s(precision: str) -> None:
    histograms, seen = mg.Histograms(bins=20, of=["parameters"]), []

    class Look(mg.Callback):
        def epoch_end(self, trainer: Any, record: Any) -> None:
            seen.append({name: np.array(values) for name, values in trainer.network.parameters.items()})

    fit(new_trainer(precision=precision), histograms, Look(), epochs=2)
    assert list(histograms.epochs) == [1, 2]
    for of_epoch, parameters in zip(histograms.epochs.values(), seen, strict=True):
        assert of_epoch.keys() == parameters.keys()
        for name, (counts, edges) in of_epoch.items():
            expected, expected_edges = np.histogram(parameters[name].astype(np.float64), 20)
            np.testing.assert_array_equal(edges, expected_edges)
            np.testing.assert_array_equal(counts, expected)


def test_histograms_of_a_step_need_one_before() -> None:
    trainer = new_trainer()
    assert set(trainer.histograms(5)) == set(trainer.network.parameters)
    for of, told in ((("activations",), "activations"), (("gradients", "activations"), "activations and gradients")):
        with pytest.raises(mg.errors.ConfigurationError, match=f"histograms of {told}: expected a fit"):
            trainer.histograms(5, of)


@pytest.mark.parametrize("streams", [1, 3])
def test_activations_and_gradients_are_those_of_the_first_batch(streams: int) -> None:
    """Of two layers, worked out anew; weights of rows and classes count, dropout is that of the step to come."""
    random = np.random.default_rng(3)
    x, y, weight = random.normal(size=(50, 4)), random.integers(3, size=50), random.uniform(0.5, 2.0, 50)
    data = mg.Dataset(x, y, weight)
    layers = [mg.Dense(4, 6, "tanh"), mg.Dropout(0.5), mg.Dense(6, 3)]
    options = {"batch_size": 16, "precision": "float64", "backend": "cpu", "streams": streams, "class_weight": {1: 3.0}}

    def run(*callbacks: mg.Callback) -> mg.Trainer:
        optimizer = mg.Adam(0.05, l2=0.1, clip_norm=1e-3)
        trainer = mg.Trainer(mg.Network(layers, seed=4), "softmax_cross_entropy", optimizer, **options)
        trainer.fit(data, 3, callbacks=callbacks, progress=False)
        return trainer

    histograms = mg.Histograms(bins=7)
    trainer = run(histograms)
    np.testing.assert_array_equal(trainer.network.flat_parameters(), run().network.flat_parameters())

    w0, b0, w2, b2 = trainer.network.parameters.values()
    x, y, weight = x[:16], y[:16], weight[:16] * np.where(y[:16] == 1, 3.0, 1.0)
    drawn = half_words(0, 16 * 6, seed=4, step=trainer.steps, layer=1).reshape(16, 6)
    hidden, mask = np.tanh(x @ w0 + b0), (drawn >= 2**15) * 2.0
    logits = (hidden * mask) @ w2 + b2
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    d2 = (softmax - np.eye(3)[y]) * weight[:, np.newaxis] / weight.sum()
    d0 = (d2 @ w2.T) * mask * (1.0 - hidden**2)
    expected = {
        "0.weight": w0, "0.bias": b0, "2.weight": w2, "2.bias": b2, "0.activation": hidden, "2.activation": logits,
        "0.weight.gradient": x.T @ d0, "0.bias.gradient": d0.sum(axis=0), "2.weight.gradient": (hidden * mask).T @ d2,
        "2.bias.gradient": d2.sum(axis=0),
    }  # fmt: skip
    found = histograms.epochs[3]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        counts, edges = np.histogram(values, 7)
        np.testing.assert_allclose(found[name][1], edges, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(found[name][0], counts)


def test_histograms_see_what_a_callback_set() -> None:
    class Flatten(mg.Callback):
        def epoch_end(self, trainer: Any, record: Any) -> None:
            trainer.network.parameters["0.weight"] = np.full_like(trainer.network.parameters["0.weight"], 3.0)

    histograms = mg.Histograms(bins=2)
    fit(new_trainer(), Flatten(), histograms, epochs=1)
    counts, edges = histograms.epochs[1]["0.weight"]  # all alike: a bin to either side, the upper one has its edge
    assert edges.tolist() == [2.5, 3.0, 3.5] and counts[0] == 0 and counts[1] > 0
