"""Callbacks on a trainer that only counts: when they save, stop, keep and restore, and what they remember."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mlpgpu.backends import Histogram
from mlpgpu.callbacks import (
    Callback,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    FunctionCallback,
    Histograms,
    as_callback,
)
from mlpgpu.errors import (
    ConfigurationError,
    DtypeError,
    EmptyDataError,
    FileFormatError,
    MlpgpuError,
    StorageError,
    UnknownNameError,
)
from mlpgpu.history import History


class FakeTrainer:
    """Counts, and writes down what is asked of it: (what, epoch) or (file, steps, state of the callback saved)."""

    def __init__(self, *monitored: str, callback: Callback | None = None) -> None:
        self.monitored = ("loss", *monitored)
        self.history = History()
        self.steps = self.epochs = 0
        self.callback = callback
        self.calls: list[tuple] = []

    def save(self, path: Path) -> None:
        self.calls.append((path.name, self.steps, self.callback and self.callback.state()))

    def keep(self) -> None:
        self.calls.append(("keep", self.epochs))

    def restore_kept(self) -> None:
        self.calls.append(("restore", self.epochs))

    def histograms(self, bins: int, of: Sequence[str]) -> dict[str, Histogram]:
        self.calls.append(("histograms", tuple(of)))
        edges = np.linspace(0.0, 1.0, bins + 1)
        return {
            name: (np.array([self.epochs, *[0] * (bins - 2), 1]), edges)
            for name in ("0.weight", "0.bias", "2.weight", "0.activation", "2.weight.gradient")
        }

    def fit(self, callback: Callback, column: str, values: list[float], steps: int = 3) -> int:
        """Runs epochs that end with ``values``, until the callback ends the fit; returns how many it ran."""
        ran = 0
        for value in [] if callback.begin(self) else values:
            for _ in range(steps):
                self.steps += 1
                if callback.every_steps is not None and self.steps % callback.every_steps == 0:
                    callback.step_end(self)
            self.epochs += 1
            self.history.append({"epoch": self.epochs, "loss": 1.0, column: value})
            ran += 1
            if callback.epoch_end(self, self.history.last):
                break
        callback.end(self)
        return ran

    def files(self) -> list[tuple[str, int]]:
        return [call[:2] for call in self.calls]


def reloaded(state: dict) -> dict:
    """A state as it comes back from a file."""
    return json.loads(json.dumps(state, allow_nan=False))


def test_base_callback_does_nothing() -> None:
    trainer = FakeTrainer()
    assert trainer.fit(Callback(), "loss", [1.0, 2.0]) == 2
    assert trainer.calls == []
    assert Callback().every_steps is None
    Callback().load_state(reloaded(Callback().state()))
    with pytest.raises(FileFormatError, match=r"state of CSVLogger: expected keys \(none\), got best"):
        CSVLogger("a.csv").load_state({"best": 1.0})


def test_early_stopping_stops_and_restores() -> None:
    trainer, stopping = FakeTrainer("validation_loss"), EarlyStopping(patience=2)
    assert trainer.fit(stopping, "validation_loss", [5.0, 4.0, 4.0, 4.5, 1.0]) == 4
    assert trainer.calls == [("keep", 1), ("keep", 2), ("restore", 4)]
    assert (stopping.best, stopping.best_epoch, stopping.wait, stopping.stopped) == (4.0, 2, 2, True)


@pytest.mark.parametrize(
    ("monitor", "values", "min_delta", "epochs_run"),
    [
        ("validation_accuracy", [0.5, 0.6, 0.7, 0.7, 0.8], 0.0, 4),
        ("validation_r2", [-3.0, -2.0, -2.5, 0.0], 0.0, 3),
        ("validation_mean_squared_error", [3.0, 2.0, 2.5, 0.0], 0.0, 3),
        ("loss", [1.0, 0.95, 0.5], 0.1, 2),
        ("loss", [math.nan, 0.5], 0.0, 1),
    ],
)
def test_early_stopping_knows_which_way_is_better(
    monitor: str, values: list[float], min_delta: float, epochs_run: int
) -> None:
    stopping = EarlyStopping(monitor, patience=1, min_delta=min_delta)
    assert FakeTrainer(monitor).fit(stopping, monitor, values) == epochs_run


def test_early_stopping_restores_after_a_full_fit_but_not_after_an_interruption() -> None:
    for interrupted, restored in ((False, [("restore", 2)]), (True, [])):
        trainer = FakeTrainer()
        trainer.history.interrupted = interrupted
        trainer.fit(EarlyStopping("loss"), "loss", [1.0, 2.0])
        assert trainer.calls == [("keep", 1), *restored]


def test_early_stopping_without_restoring_never_keeps() -> None:
    trainer = FakeTrainer()
    trainer.fit(EarlyStopping("loss", patience=1, restore_best=False), "loss", [1.0, 0.5, 2.0])
    assert trainer.calls == []


def test_early_stopping_restores_nothing_where_nothing_was_best() -> None:
    trainer = FakeTrainer()
    trainer.fit(EarlyStopping("loss", patience=1), "loss", [math.nan])
    assert trainer.calls == []


def test_a_fresh_fit_forgets() -> None:
    trainer, stopping = FakeTrainer(), EarlyStopping("loss", patience=1)
    assert trainer.fit(stopping, "loss", [1.0, 2.0, 0.0]) == 2
    assert trainer.fit(stopping, "loss", [3.0, 2.0, 2.5]) == 3
    assert (stopping.best, stopping.best_epoch) == (2.0, 4)


@pytest.mark.parametrize("broken_after", range(7))
def test_resumed_early_stopping_ends_where_an_unbroken_one_does(broken_after: int) -> None:
    values = [5.0, 4.0, 4.5, 3.0, 3.0, 3.5, 1.0]
    unbroken = EarlyStopping("loss", patience=2)
    assert FakeTrainer().fit(unbroken, "loss", values) == 6

    before, after = EarlyStopping("loss", patience=2), EarlyStopping("loss", patience=2)
    trainer = FakeTrainer()
    ran = trainer.fit(before, "loss", values[:broken_after])
    after.load_state(reloaded(before.state()))
    assert ran + trainer.fit(after, "loss", values[broken_after:]) == 6
    assert after.state() == unbroken.state()


def test_early_stopping_of_a_resumed_fit_that_had_stopped_still_restores() -> None:
    before, after = EarlyStopping("loss", patience=1), EarlyStopping("loss", patience=1)
    FakeTrainer().fit(before, "loss", [1.0, 2.0])
    after.load_state(reloaded(before.state()))
    trainer = FakeTrainer()
    assert trainer.fit(after, "loss", [0.0]) == 0
    assert trainer.calls == [("restore", 0)]
    # Only the resumed fit itself goes on counting.
    assert trainer.fit(after, "loss", [3.0, 2.0, 2.5]) == 3


def test_early_stopping_resumed_on_another_monitor_starts_anew() -> None:
    before, after = EarlyStopping("loss", patience=1), EarlyStopping("validation_accuracy", patience=1)
    FakeTrainer().fit(before, "loss", [1.0, 2.0])
    after.load_state(before.state())
    assert FakeTrainer("validation_accuracy").fit(after, "validation_accuracy", [0.5, 0.4]) == 2
    assert after.best == 0.5


def test_early_stopping_names_what_it_may_monitor() -> None:
    expected = r"EarlyStopping monitor: expected one of loss, got 'validation_loss' \(pass validation= to fit\)"
    stopping = EarlyStopping()
    with pytest.raises(ConfigurationError, match=expected):
        stopping.begin(FakeTrainer())
    with pytest.raises(ConfigurationError, match=r"got 'los' \(did you mean 'loss'\?\)$"):
        EarlyStopping("los").begin(FakeTrainer())


@pytest.mark.parametrize(
    "arguments", [{"patience": 0}, {"patience": 1.5}, {"min_delta": -0.1}, {"min_delta": math.nan}]
)
def test_early_stopping_refuses(arguments: dict) -> None:
    with pytest.raises(MlpgpuError, match=f"EarlyStopping {next(iter(arguments))}: expected a"):
        EarlyStopping(**arguments)


GOOD_STOPPING = {"monitor": "loss", "best": 0.5, "best_epoch": 2, "wait": 1, "stopped": False}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("monitor", None),
        ("best", "0.5"),
        ("best", 1),
        ("best", math.nan),
        ("best", None),
        ("best_epoch", 0),
        ("best_epoch", 2.0),
        ("best_epoch", None),
        ("wait", -1),
        ("wait", True),
        ("stopped", 1),
        ("more", 0),
    ],
)
def test_early_stopping_takes_no_damaged_state(key: str, value: object) -> None:
    stopping = EarlyStopping("loss")
    stopping.load_state(GOOD_STOPPING)
    with pytest.raises(FileFormatError, match="state of EarlyStopping"):
        stopping.load_state(GOOD_STOPPING | {key: value})
    assert stopping.state() == GOOD_STOPPING


@pytest.mark.parametrize("callback", [Callback(), EarlyStopping(), Checkpoint("run.h5")])
@pytest.mark.parametrize("state", [None, [], "best", 3, {"": {}}])
def test_foreign_states_are_refused(callback: Callback, state: object) -> None:
    with pytest.raises(FileFormatError, match=f"state of {type(callback).__name__}: expected keys"):
        callback.load_state(state)


def test_checkpoint_by_epoch_saves_the_end_too(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.fit(Checkpoint(tmp_path / "run.h5", every=2), "loss", [1.0] * 3)
    assert trainer.files() == [("run.h5", 6), ("run.h5", 9)]


def test_checkpoint_saves_what_the_others_leave(tmp_path: Path) -> None:
    # The last epoch is saved, then once more with the parameters that EarlyStopping put back.
    trainer = FakeTrainer()
    trainer.fit(Checkpoint(tmp_path / "run.h5"), "loss", [1.0])
    assert trainer.files() == [("run.h5", 3), ("run.h5", 3)]
    assert Checkpoint.runs_last
    assert not EarlyStopping.runs_last


def test_checkpoint_by_step(tmp_path: Path) -> None:
    trainer, checkpoint = FakeTrainer(), Checkpoint(tmp_path / "run.hdf5", every=2, unit="step")
    assert checkpoint.every_steps == 2
    trainer.fit(checkpoint, "loss", [1.0] * 3)
    assert trainer.files() == [("run.hdf5", steps) for steps in (2, 4, 6, 8, 9)]


def test_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "run.h5", every=10, keep_best=True)
    trainer = FakeTrainer("validation_loss", callback=checkpoint)
    trainer.fit(checkpoint, "validation_loss", [3.0, 2.0, 2.5, 1.0])
    # Each file holds the checkpoint's own state as of that moment.
    assert trainer.calls == [
        (name, steps, {"best": best, "monitor": "validation_loss"})
        for name, steps, best in [
            ("run.best.h5", 3, 3.0),
            ("run.best.h5", 6, 2.0),
            ("run.best.h5", 12, 1.0),
            ("run.h5", 12, 1.0),
        ]
    ]


@pytest.mark.parametrize(
    ("monitor", "monitored", "watched"),
    [
        (None, (), "loss"),
        (None, ("validation_loss",), "validation_loss"),
        ("validation_accuracy", ("validation_loss", "validation_accuracy"), "validation_accuracy"),
    ],
)
def test_checkpoint_chooses_its_monitor(
    tmp_path: Path, monitor: str | None, monitored: tuple[str, ...], watched: str
) -> None:
    checkpoint = Checkpoint(tmp_path / "run.h5", keep_best=True, monitor=monitor)
    checkpoint.begin(FakeTrainer(*monitored))
    assert checkpoint.state() == {"best": None, "monitor": watched}


def test_checkpoint_remembers_the_best_over_a_resume_only(tmp_path: Path) -> None:
    before, after = (Checkpoint(tmp_path / "run.h5", keep_best=True) for _ in range(2))
    FakeTrainer().fit(before, "loss", [2.0])
    after.load_state(reloaded(before.state()))
    resumed, fresh = FakeTrainer(), FakeTrainer()
    resumed.fit(after, "loss", [3.0])
    assert "run.best.h5" not in [name for name, _ in resumed.files()]
    fresh.fit(after, "loss", [3.0])
    assert "run.best.h5" in [name for name, _ in fresh.files()]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "run.npz"}, ConfigurationError, r"ends in \.h5 or \.hdf5, got 'run\.npz'"),
        ({"path": None}, DtypeError, "expected a string or a path"),
        ({"every": 0}, ConfigurationError, "Checkpoint every: expected a whole number of at least 1"),
        ({"unit": "steps"}, UnknownNameError, "did you mean 'step'"),
        ({"monitor": "loss"}, ConfigurationError, "None without keep_best=True"),
    ],
)
def test_checkpoint_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Checkpoint(**{"path": "run.h5"} | arguments)


def test_checkpoint_looks_for_its_place_before_training(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"expected a folder that is there, got no folder .*missing"):
        Checkpoint(tmp_path / "missing" / "run.h5").begin(FakeTrainer())
    (tmp_path / "run.best.h5").mkdir()
    Checkpoint(tmp_path / "run.h5").begin(FakeTrainer())
    with pytest.raises(StorageError, match="expected a file or nothing, got a folder"):
        Checkpoint(tmp_path / "run.h5", keep_best=True).begin(FakeTrainer())
    with pytest.raises(ConfigurationError, match=r"Checkpoint monitor: .*'validation_r2' \(pass validation= to fit\)"):
        Checkpoint(tmp_path / "other.h5", keep_best=True, monitor="validation_r2").begin(FakeTrainer())


@pytest.mark.parametrize(("key", "value"), [("best", math.inf), ("best", "1"), ("monitor", 1), ("more", 0)])
def test_checkpoint_takes_no_damaged_state(key: str, value: object) -> None:
    checkpoint = Checkpoint("run.h5", keep_best=True)
    with pytest.raises(FileFormatError, match="state of Checkpoint"):
        checkpoint.load_state({"best": 0.5, "monitor": "loss", key: value})
    assert checkpoint.best is None


def test_csv_logger_writes_the_whole_history_each_time(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("what a killed run left\n")
    trainer = FakeTrainer()
    trainer.history.append({"epoch": 1, "loss": 0.1})
    trainer.epochs = 1
    trainer.fit(CSVLogger(str(path)), "validation_loss", [1 / 3, math.nan])
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [row["validation_loss"] for row in rows] == ["", repr(1 / 3), "nan"]
    assert list(tmp_path.iterdir()) == [path]


def test_csv_logger_looks_for_its_folder_before_training(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="CSVLogger path"):
        CSVLogger(tmp_path / "missing" / "log.csv").begin(FakeTrainer())
    with pytest.raises(StorageError, match="got a folder"):
        CSVLogger(tmp_path).begin(FakeTrainer())
    with pytest.raises(DtypeError, match="CSVLogger path: expected a string or a path, got int 3"):
        CSVLogger(3)


@pytest.mark.parametrize(
    ("answer", "epochs_run"), [(True, 1), (None, 3), (np.False_, 3), (0, 3), (1, 1), (np.True_, 1), ("stop", 1)]
)
def test_a_function_ends_the_fit_with_what_is_true(answer: object, epochs_run: int) -> None:
    callback = as_callback(lambda record: answer)
    assert FakeTrainer().fit(callback, "loss", [3.0, 2.0, 1.0]) == epochs_run


def test_as_callback() -> None:
    stopping = EarlyStopping()
    assert as_callback(stopping) is stopping
    assert isinstance(as_callback(print), FunctionCallback)
    with pytest.raises(DtypeError, match="got class EarlyStopping"):
        as_callback(EarlyStopping)
    with pytest.raises(DtypeError, match="got str 'early'"):
        as_callback("early")


# --- histograms ---


def test_histograms_each_few_epochs(tmp_path: Path) -> None:
    callback = Histograms(tmp_path / "weights.png", bins=3, every=2)
    trainer = FakeTrainer()
    trainer.fit(callback, "validation_loss", [1.0] * 5)
    assert list(callback.epochs) == [2, 4]
    assert trainer.calls == [("histograms", ("parameters", "activations", "gradients"))] * 2
    counts, edges = callback.epochs[4]["0.weight"]
    assert counts.tolist() == [4, 0, 1] and len(edges) == 4
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
    trainer.fit(callback, "validation_loss", [1.0])  # a fit begins with none, and its first epoch is the sixth
    assert list(callback.epochs) == [6]


def test_histograms_that_cannot_be(tmp_path: Path) -> None:
    for options in ({"bins": 0}, {"bins": 5000}, {"every": 0}, {"path": "weights.txt"}):
        with pytest.raises(ConfigurationError, match="Histograms"):
            Histograms(**options)
    with pytest.raises(UnknownNameError, match=r"Histograms of.*'gradients'"):
        Histograms(of=["gradient"])
    for of in ("gradients", []):
        with pytest.raises(DtypeError, match="Histograms of"):
            Histograms(of=of)
    with pytest.raises(DtypeError, match="Histograms bins"):
        Histograms(bins=2.5)
    with pytest.raises(StorageError, match="Histograms path"):
        Histograms(tmp_path / "missing" / "weights.png").begin(FakeTrainer())
    with pytest.raises(EmptyDataError, match="Histograms"):
        Histograms().plot(tmp_path / "weights.png")
