"""A trainer stands at one moment, whatever ended its fit: what it saves then ends with the bits of an unbroken run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import SaveEveryStep, assert_same, run_of

import mlpgpu as mg
from mlpgpu import storage
from mlpgpu.backends.cpu.loops import library
from mlpgpu.backends.cpu.phased_steps import PhasedSteps
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.backends.cpu.threads import Threads
from mlpgpu.errors import DivergenceError, TornStateError
from mlpgpu.training import fit as fit_module

pytestmark = pytest.mark.xdist_group("one moment")

DRAW = np.random.default_rng(8)
DATA = mg.Dataset(DRAW.standard_normal((38, 5)), DRAW.integers(0, 3, 38))
NOISE = mg.Dataset(DRAW.standard_normal((20, 5)), DRAW.integers(0, 3, 20))
EPOCHS, STEPS_PER_EPOCH = 5, 5
STEP_BY_STEP: Any = {"streams": 2}  # which no call takes several steps of


def new_trainer(**options: Any) -> mg.Trainer:
    network = mg.Network([mg.Dense(5, 7, "tanh"), mg.Dropout(0.2), mg.Dense(7, 3)], seed=2)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.05), batch_size=8, **options)


def fit(trainer: mg.Trainer, *callbacks: Any, epochs: int = EPOCHS, watched: bool = True) -> mg.Trainer:
    """Train; steps of several epochs run together where nothing is ``watched`` after each."""
    trainer.fit(DATA, epochs, validation=NOISE if watched else None, callbacks=callbacks, progress=False)
    return trainer


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps run at a time as may, whatever the clock says."""
    monkeypatch.setattr(fit_module, "RUN_SECONDS", 1e9)


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int, kind: type[BaseException], *, after: bool = False) -> None:
    """Raise from within the shards of the training step number ``call``, or from within its update."""
    done, run_shards = 0, Threads.run_shards

    def failing(self: Threads, shards: Any) -> None:
        nonlocal done
        run_shards(self, shards)
        done += 1
        if done == call:
            raise kind("in the middle of a step")

    if not after:
        monkeypatch.setattr(Threads, "run_shards", failing)
        return

    updates = CpuProgram.run

    def run(self: CpuProgram, *arguments: Any) -> np.ndarray:
        calls = self._updates.to_move
        update = calls[-1]

        def broken() -> None:
            nonlocal done
            done += 1
            update()
            if done == call:
                raise kind("in the middle of an update")

        calls[-1] = broken
        try:
            return updates(self, *arguments)
        finally:
            calls[-1] = update

    monkeypatch.setattr(CpuProgram, "run", run)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize(("call", "watched"), [(1, True), (3, True), (4, True), (12, False), (16, False), (25, False)])
def test_an_exception_inside_a_run_leaves_the_steps_that_were_finished(
    call: int, watched: bool, kind: type[BaseException], long_runs: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    unbroken = run_of(fit(new_trainer(**STEP_BY_STEP), watched=watched), tmp_path / "unbroken.h5")
    trainer = new_trainer(**STEP_BY_STEP)
    fail_at(monkeypatch, call, kind)
    with pytest.raises(kind, match="in the middle"):
        fit(trainer, watched=watched)
    monkeypatch.undo()
    assert trainer.steps == call - 1
    # The call under way when the exception comes may have finished an epoch, whose books are closed with those after.
    assert trainer.steps // STEPS_PER_EPOCH - trainer.epochs in (0, 1)
    assert len(trainer.history) == trainer.epochs
    trainer.save(tmp_path / "run.h5")
    resumed = fit(mg.Trainer.resume(tmp_path / "run.h5"), watched=watched)
    assert_same(run_of(resumed, tmp_path / "resumed.h5"), unbroken)


@pytest.mark.skipif(library(np.dtype(np.float32)) is None, reason="no compiled loops")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("call", "watched"), [(1, True), (2, True), (4, True), (6, True), (5, False), (7, False)])
def test_an_exception_around_a_call_of_several_steps_leaves_those_that_were_finished(
    call: int, watched: bool, after: bool, long_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = run_of(fit(new_trainer(), watched=watched), tmp_path / "unbroken.h5")
    trainer, calls, finished, take = new_trainer(), 0, 0, PhasedSteps.train

    def failing(self: PhasedSteps, *arguments: Any) -> None:
        nonlocal calls, finished
        run = self._call

        def call_steps(count: int) -> None:
            nonlocal calls, finished
            calls += 1
            if calls == call and not after:
                raise KeyboardInterrupt("before")
            run(count)
            finished += count
            if calls == call:
                raise KeyboardInterrupt("after")

        monkeypatch.setattr(self, "_call", call_steps)
        try:
            take(self, *arguments)
        finally:
            monkeypatch.delattr(self, "_call")

    monkeypatch.setattr(PhasedSteps, "train", failing)
    with pytest.raises(KeyboardInterrupt, match="after" if after else "before"):
        fit(trainer, watched=watched)
    monkeypatch.undo()
    assert calls == call and trainer.steps == finished
    trainer.save(tmp_path / "run.h5")
    resumed = fit(mg.Trainer.resume(tmp_path / "run.h5"), watched=watched)
    assert_same(run_of(resumed, tmp_path / "resumed.h5"), unbroken)


def test_an_exception_inside_an_update_makes_a_trainer_that_says_so(
    long_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = run_of(fit(new_trainer(**STEP_BY_STEP)), tmp_path / "unbroken.h5")
    trainer, path = new_trainer(**STEP_BY_STEP), tmp_path / "run.h5"
    fail_at(monkeypatch, 8, KeyboardInterrupt, after=True)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, mg.Checkpoint(path))
    monkeypatch.undo()
    assert trainer.steps == 7
    before = path.read_bytes()
    x, y = np.zeros((2, 5)), np.zeros(2, int)
    for use in (lambda: trainer.save(path), lambda: fit(trainer), lambda: trainer.step(x, y)):
        with pytest.raises(TornStateError, match=r"after 7 finished steps.*resume\('.*run\.h5'\) goes on from step 5"):
            use()
    with pytest.raises(TornStateError):
        copy.deepcopy(trainer)
    trainer.close()
    assert path.read_bytes() == before
    assert_same(run_of(fit(mg.Trainer.resume(path)), tmp_path / "resumed.h5"), unbroken)


def test_an_exception_inside_a_single_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(trainer: mg.Trainer, steps: range) -> mg.Trainer:
        for step in steps:
            trainer.step(DATA.x[step : step + 8], DATA.y[step : step + 8])
        return trainer

    unbroken = run_of(train(new_trainer(**STEP_BY_STEP), range(6)), tmp_path / "unbroken.h5")
    trainer = train(new_trainer(**STEP_BY_STEP), range(2))
    fail_at(monkeypatch, 1, MemoryError)
    with pytest.raises(MemoryError):
        train(trainer, range(2, 6))
    monkeypatch.undo()
    assert trainer.steps == 2
    assert_same(run_of(train(trainer, range(2, 6)), tmp_path / "run.h5"), unbroken)


def test_a_loss_that_is_not_finite_is_not_saved_as_a_sum(tmp_path: Path) -> None:
    network = mg.Network([mg.Dense(2, 1)], seed=2)
    trainer = mg.Trainer(network, "squared_error", mg.SGD(1e-30), batch_size=2)
    with pytest.raises(DivergenceError):
        trainer.fit((np.full((6, 2), 3e37), np.zeros((6, 1))), 2, progress=False)
    with pytest.raises(DivergenceError):
        trainer.save(tmp_path / "run.h5")


# Callbacks: each is told once of a step or an epoch


class Fail(mg.Callback):
    """Raises when it is told of an epoch, once."""

    def __init__(self, epoch: int, kind: type[BaseException] = RuntimeError) -> None:
        self.epoch, self.kind = epoch, kind

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        if trainer.epochs == self.epoch:
            raise self.kind("no luck")


class Told(mg.Callback):
    """Has a memory of all that it was told."""

    every_steps = 2

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[int] = []

    def step_end(self, trainer: Any) -> None:
        self.steps.append(trainer.steps)

    def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
        self.epochs.append(trainer.epochs)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "epochs": self.epochs}

    def load_state(self, state: Any) -> None:
        self.steps, self.epochs = state["steps"], state["epochs"]


class Save(SaveEveryStep):
    """Saves wherever it stands in the list."""

    runs_last = False


class Nothing(mg.Callback):
    """In place of a callback that is not to act any more: the others keep their numbers."""


def listeners(first: mg.Callback, second: mg.Callback, folder: Path) -> list[mg.Callback]:
    """Callbacks with memories around two others."""
    best = mg.Checkpoint(folder / "a.h5", keep_best=True)
    other = mg.Checkpoint(folder / "b.h5", keep_best=True, monitor="loss")
    stopping = mg.EarlyStopping(patience=2, restore_best=True)
    return [Told(), first, stopping, mg.CSVLogger(folder / "log.csv"), second, best, other]


def bests(folder: Path) -> list[Any]:
    """What the two checkpoints know as the best."""
    return [mg.load(folder / f"{name}.best.h5").flat_parameters().tobytes() for name in "ab"]


@pytest.mark.parametrize("epoch", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_a_callback_that_raises_leaves_one_moment(place: int, epoch: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    unbroken = run_of(fit(new_trainer(), *listeners(Nothing(), Nothing(), whole)), tmp_path / "unbroken.h5")
    failing = [Nothing(), Nothing()]
    failing[place] = Fail(epoch)  # type: ignore[call-overload]
    trainer = new_trainer()
    with pytest.raises(RuntimeError, match="no luck"):
        fit(trainer, *listeners(*failing, broken))
    trainer.save(broken / "run.h5")
    resumed = fit(mg.Trainer.resume(broken / "run.h5"), *listeners(Nothing(), Nothing(), broken))
    assert_same(run_of(resumed, tmp_path / "resumed.h5"), unbroken)
    assert bests(broken) == bests(whole)
    assert without_seconds(broken / "log.csv") == without_seconds(whole / "log.csv")


def without_seconds(path: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_saved_between_callbacks_goes_on_with_those_to_come(place: int, tmp_path: Path) -> None:
    whole, files = tmp_path / "whole", tmp_path / "files"
    whole.mkdir()
    files.mkdir()
    savers: list[mg.Callback] = [Nothing(), Nothing()]
    unbroken = run_of(fit(new_trainer(), *listeners(*savers, whole)), tmp_path / "unbroken.h5")
    savers[place] = Save(files)
    fit(new_trainer(), *listeners(*savers, tmp_path))
    saved = sorted(files.iterdir())
    assert len(saved) > STEPS_PER_EPOCH
    for file in saved[:: 1 + len(saved) // 8]:
        folder = tmp_path / file.stem
        folder.mkdir()
        resumed = fit(mg.Trainer.resume(file), *listeners(Nothing(), Nothing(), folder))
        assert_same(run_of(resumed, tmp_path / "resumed.h5"), unbroken)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_checkpoint_never_overwrites_a_better_best_of_another(first: str, tmp_path: Path) -> None:
    """Each of two checkpoints saves before the other has seen the epoch, and the run dies there."""

    def both(kill: mg.Callback) -> list[mg.Callback]:
        names = [first, "b" if first == "a" else "a"]
        one, two = (mg.Checkpoint(tmp_path / f"{name}.h5", keep_best=True) for name in names)
        return [one, kill, two]

    class Die(Fail):
        runs_last = True

    history = fit(new_trainer()).history
    epoch = int(np.argmin(history["validation_loss"])) + 1
    trainer = new_trainer()
    with pytest.raises(RuntimeError):
        fit(trainer, *both(Die(epoch)))
    path = tmp_path / f"{first}.h5"
    fit(mg.Trainer.resume(path), *both(Nothing()))
    left = [mg.Trainer.resume(tmp_path / f"{name}.best.h5").epochs for name in "ab"]
    assert left == [epoch, epoch]


def test_a_fit_that_a_function_ended_ends_there_after_a_resume_too(tmp_path: Path) -> None:
    """The saver dies after the epoch in which a function has ended the fit."""
    trainer, path = new_trainer(), tmp_path / "run.h5"

    class Die(Fail):
        runs_last = True

    def enough(record: dict[str, float]) -> bool:
        return record["epoch"] == 2

    with pytest.raises(RuntimeError):
        fit(trainer, enough, mg.Checkpoint(path), Die(2))
    assert fit(mg.Trainer.resume(path), enough, mg.Checkpoint(path), Nothing()).epochs == 2


def test_a_resume_without_the_callbacks_that_were_pending_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fit(trainer := new_trainer(), Fail(2), Told(), mg.EarlyStopping())
    trainer.save(tmp_path / "run.h5")
    good = storage.read(tmp_path / "run.h5")
    pending = good.description["run"]["pending"]
    assert pending == {"hook": "epoch_end", "left": ["Fail 1", "Told 1", "EarlyStopping 1"], "is_over": False}
    pending["left"] = [*pending["left"] * 3, *(f"Stranger {k}" for k in range(50_000))]
    storage.write(tmp_path / "run.h5", good)
    resumed, whole = fit(mg.Trainer.resume(tmp_path / "run.h5"), Nothing()), fit(new_trainer(), Nothing())
    np.testing.assert_array_equal(resumed.network.flat_parameters(), whole.network.flat_parameters())


def test_plateaus_are_seen_once(tmp_path: Path) -> None:
    def make() -> mg.Trainer:
        network = mg.Network([mg.Dense(5, 3)], seed=1)
        rate = mg.ReduceOnPlateau(0.1, factor=0.5, patience=2, min_delta=1e9)
        return mg.Trainer(network, "softmax_cross_entropy", mg.SGD(rate), batch_size=8)

    unbroken = fit(make(), Nothing(), epochs=7).history["rate"]
    for epoch in range(1, 7):
        trainer = make()
        with pytest.raises(RuntimeError):
            fit(trainer, Fail(epoch), epochs=7)
        trainer.save(tmp_path / "run.h5")
        assert fit(mg.Trainer.resume(tmp_path / "run.h5"), Nothing(), epochs=7).history["rate"] == unbroken


# NaN in the history


def nan_in(epochs: tuple[int, ...]) -> Callable[..., float]:
    told = iter(range(1, 100))

    def odd(y: np.ndarray, prediction: np.ndarray) -> float:
        return float("nan") if next(told) in epochs else 1.0

    return odd


@pytest.mark.parametrize("epochs", [(1,), (2, 3), (1, 2, 3, 4, 5, 6)])
def test_a_plateau_of_nan_is_waited_for(epochs: tuple[int, ...], tmp_path: Path) -> None:
    network = mg.Network([mg.Dense(5, 3)], seed=1)
    rate = mg.ReduceOnPlateau(0.1, factor=0.5, patience=2, monitor="validation_odd")
    trainer = mg.Trainer(network, "softmax_cross_entropy", mg.SGD(rate), metrics=[nan_in(epochs)], batch_size=8)
    rates = fit(trainer, epochs=6).history["rate"]
    # After its first number nothing passes it, and NaN never does: each second epoch without an improvement halves.
    expected = {(1,): [0.1, 0.1, 0.1, 0.1, 0.05, 0.05], (2, 3): [0.1, 0.1, 0.1, 0.05, 0.05, 0.025]}
    assert rates == expected.get(epochs, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    trainer.save(tmp_path / "run.h5")


def test_a_column_of_nan_stands_in_the_history_after_a_resume(tmp_path: Path) -> None:
    trainer = new_trainer(metrics=[nan_in((1, 2, 3))])
    trainer.fit(DATA, 2, progress=False)  # without validation: these epochs lack its columns
    fit(trainer, epochs=2)
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5", metrics=[nan_in(())])
    assert resumed.history.columns == trainer.history.columns
    assert "validation_odd" in resumed.history.columns
    for got, expected in zip(resumed.history, trainer.history, strict=True):
        np.testing.assert_equal(got, expected)  # for which NaN is NaN
