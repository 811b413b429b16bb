"""Ctrl-C: a fit ends after a finished step, and what it leaves can be saved and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctrl_c import forget, press_in_step

import mlpgpu as mg
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.training import interrupt

pytestmark = pytest.mark.xdist_group("interrupt")  # one process makes what its tests share

EPOCHS = 4
STEPS_PER_EPOCH = 5
DRAW = np.random.default_rng(1)
DATA = mg.Dataset(DRAW.standard_normal((38, 5)), DRAW.integers(0, 3, 38))


def new_trainer() -> mg.Trainer:
    network = mg.Network([mg.Dense(5, 7, "tanh"), mg.Dropout(0.2), mg.Dense(7, 3)], seed=2)
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=8, streams=2)


def fit(trainer: mg.Trainer, *callbacks: Any) -> mg.History:
    return trainer.fit(DATA, EPOCHS, callbacks=callbacks, progress=False)


def result(trainer: mg.Trainer) -> dict[str, Any]:
    """What must be the same with and without an interruption."""
    parameters = {name: values.tobytes() for name, values in trainer.network.parameters.items()}
    history = [{**record, "seconds": 0.0} for record in trainer.history]
    return {**parameters, "history": history, "steps": trainer.steps, "epochs": trainer.epochs}


@pytest.fixture(scope="module")
def unbroken() -> dict[str, Any]:
    trainer = new_trainer()
    fit(trainer)
    return result(trainer)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Every fit leaves the handler of Ctrl-C that it found."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is before


class Interrupt(mg.Callback):
    """Presses Ctrl-C after some step, as often as told."""

    every_steps = 1

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def step_end(self, trainer: Any) -> None:
        if trainer.steps == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [1, 4, 5, 6, 10, 19])
def test_an_interrupted_fit_goes_on_with_the_same_bits(
    step: int, unbroken: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = new_trainer()
    history = fit(trainer, Interrupt(step), mg.Checkpoint(tmp_path / "checkpoint.h5"))
    assert history.interrupted
    assert "the last fit interrupted" in repr(history)
    assert trainer.steps == step
    assert trainer.epochs == len(history) == (step - 1) // STEPS_PER_EPOCH
    assert f"interrupted after step {step}, in epoch {trainer.epochs + 1}" in capsys.readouterr().err

    trainer.save(tmp_path / "run.h5")
    for name in ("run.h5", "checkpoint.h5"):  # a checkpoint is made at the end of a fit, however it ends
        resumed = mg.Trainer.resume(tmp_path / name)
        assert not fit(resumed).interrupted
        assert result(resumed) == unbroken


def test_the_state_after_an_interruption_is_that_of_the_last_finished_step() -> None:
    interrupted, counted = new_trainer(), new_trainer()
    fit(interrupted, Interrupt(7))

    seen: dict[str, bytes] = {}

    class Watch(mg.Callback):
        every_steps = 7

        def step_end(self, trainer: Any) -> None:
            if trainer.steps == 7:
                seen.update({name: values.tobytes() for name, values in trainer.network.parameters.items()})

    fit(counted, Watch())
    assert {name: values.tobytes() for name, values in interrupted.network.parameters.items()} == seen
    assert interrupted.network.predict(DATA).shape == (38, 3)
    assert interrupted.evaluate(DATA)["loss"] > 0.0


def test_an_interrupted_fit_does_not_restore_the_best() -> None:
    watched, stopping, plain = new_trainer(), mg.EarlyStopping("loss", patience=9), new_trainer()
    fit(watched, stopping, Interrupt(12))
    forget()
    fit(plain, Interrupt(12))
    assert stopping.best_epoch is not None
    assert result(watched) == result(plain)


def test_a_second_interrupt_acts_at_once(unbroken: dict[str, Any], tmp_path: Path) -> None:
    trainer = new_trainer()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, Interrupt(7, times=2))
    assert trainer.steps == 7
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    fit(resumed)
    assert result(resumed) == unbroken


def test_a_second_interrupt_soon_after_ends_a_loop_of_fits(capsys: pytest.CaptureFixture[str]) -> None:
    trainers = [new_trainer() for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        for trainer in trainers:
            fit(trainer, Interrupt(7))
    assert [trainer.steps for trainer in trainers] == [7, 7, 0]
    assert "Ctrl-C again at once ends the program" in capsys.readouterr().err


def test_an_interrupt_seconds_after_another_ends_its_own_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert fit(new_trainer(), Interrupt(7)).interrupted
    now += interrupt.AGAIN_SECONDS
    assert fit(new_trainer(), Interrupt(7)).interrupted


def test_an_interrupt_after_the_last_epoch_loses_nothing(unbroken: dict[str, Any]) -> None:
    trainer = new_trainer()

    def press(record: dict[str, float]) -> None:
        if record["epoch"] == EPOCHS:
            signal.raise_signal(signal.SIGINT)

    fit(trainer, press)
    assert result(trainer) == unbroken


def test_an_interrupt_between_epochs_ends_the_fit_there() -> None:
    trainer = new_trainer()
    history = fit(trainer, lambda record: signal.raise_signal(signal.SIGINT))
    assert history.interrupted
    assert (trainer.steps, trainer.epochs) == (STEPS_PER_EPOCH, 1)


def press_in_run(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> None:
    """As press_in_step; the first epoch's 5 steps are run by 1, 2, then 2 of them, later ones as callbacks let them."""
    press_in_step(monkeypatch, step, times)
    monkeypatch.setattr("mlpgpu.training.fit.RUN_SECONDS", 1e9)


class Told(mg.Callback):
    """Remembers the steps that it was told of."""

    every_steps = 3

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step_end(self, trainer: Any) -> None:
        self.steps.append(trainer.steps)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: Any) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize(("step", "finished"), [(1, 1), (2, 3), (3, 3), (5, 5), (7, 9)])
def test_a_second_interrupt_in_a_step_waits_for_those_under_way(
    step: int, finished: int, unbroken: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, told = new_trainer(), Told()
    press_in_run(monkeypatch, step, times=2)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, Told())
    monkeypatch.undo()
    assert trainer.steps == finished
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    fit(resumed, told)
    assert result(resumed) == unbroken
    assert told.steps == [3, 6, 9, 12, 15, 18]  # each once, in whichever of the two fits


def test_a_third_interrupt_in_a_step_acts_at_once(
    unbroken: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer()
    press_in_run(monkeypatch, 7, times=3)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    monkeypatch.undo()
    assert trainer.steps == 6  # of the seventh only the gradient was under way
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    fit(resumed)
    assert result(resumed) == unbroken


def test_an_interrupt_soon_after_another_fit_s_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(new_trainer(), Interrupt(7)).interrupted
    trainer = new_trainer()
    press_in_run(monkeypatch, 2, times=1)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert trainer.steps == 3


def test_a_second_interrupt_in_a_validation_acts_at_once(unbroken: dict[str, Any], tmp_path: Path) -> None:
    reached = []

    def press(y: np.ndarray, prediction: np.ndarray) -> float:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        reached.append(1)
        return 0.0

    network = new_trainer().network
    trainer = mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), batch_size=8, streams=2, metrics=[press])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(DATA, EPOCHS, validation=DATA, progress=False)
    assert (trainer.steps, trainer.epochs, len(trainer.history), reached) == (5, 0, 0, [])
    trainer.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5", metrics=[press])
    fit(resumed)
    assert result(resumed) == unbroken


@pytest.mark.parametrize("hook", ["epoch_end", "end"])
def test_an_interrupt_at_the_end_is_told_of(
    hook: str, unbroken: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, called = new_trainer(), []

    def press(self: mg.Callback, trainer: Any, *rest: Any) -> None:
        if trainer.epochs == EPOCHS:
            signal.raise_signal(signal.SIGINT)
        called.append(trainer.epochs)

    kind = type("Press", (mg.Callback,), {hook: press})
    assert fit(trainer, kind()).interrupted
    assert called[-1] == EPOCHS
    assert result(trainer) == unbroken
    assert capsys.readouterr().err.count("interrupted after step 20, at the end of the last epoch") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_a_file_is_written(
    times: int, unbroken: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is finished, in a fit and without one; a further one acts at once, and the old file stands."""
    trainer, path = new_trainer(), tmp_path / "run.h5"
    fit(trainer, Interrupt(7))
    forget()
    trainer.save(path)
    before, sync = path.read_bytes(), os.fsync

    def press(descriptor: int) -> None:
        monkeypatch.setattr("os.fsync", sync)
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        sync(descriptor)

    monkeypatch.setattr("os.fsync", press)
    trainer.step(DATA.x[:8], DATA.y[:8])
    with pytest.raises(KeyboardInterrupt):
        trainer.save(path)
    assert (path.read_bytes() == before) == (times == 2)
    trainer.save(path)
    assert mg.Trainer.resume(path).steps == 8

    trainer = new_trainer()
    monkeypatch.setattr("os.fsync", press)
    checkpoint = mg.Checkpoint(path)
    if times == 1:
        assert fit(trainer, checkpoint).interrupted
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, checkpoint)
    assert (trainer.steps, trainer.epochs) == (5, 1)
    resumed = mg.Trainer.resume(path)
    assert resumed.steps == 5
    fit(resumed, mg.Checkpoint(path))
    assert result(resumed) == unbroken
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_in_a_single_step(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, other = new_trainer(), new_trainer()
    press_in_run(monkeypatch, 2, times)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(4):
            trainer.step(DATA.x[:8], DATA.y[:8])
    monkeypatch.undo()
    assert trainer.steps == (2 if times == 1 else 1)
    for _ in range(trainer.steps):
        other.step(DATA.x[:8], DATA.y[:8])
    assert result(trainer) == result(other)


def test_an_interrupt_before_the_first_step_leaves_the_trainer_as_it_was(
    unbroken: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, attach = new_trainer(), CpuProgram.attach
    trainer.save(tmp_path / "new.h5")

    def press(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(CpuProgram, "attach", press)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    monkeypatch.setattr(CpuProgram, "attach", attach)
    assert (trainer.steps, trainer.epochs) == (0, 0)
    fit(trainer)
    assert result(trainer) == unbroken


def test_the_flag_is_of_the_last_fit() -> None:
    trainer = new_trainer()
    assert fit(trainer, Interrupt(3)).interrupted
    assert not fit(trainer).interrupted


def test_a_handler_of_the_users_own_is_put_back_and_an_error_puts_it_back_too() -> None:
    received: list[int] = []

    def own(number: int, frame: object) -> None:
        received.append(number)

    def fail(record: dict[str, float]) -> None:
        raise RuntimeError("from a callback")

    before = signal.signal(signal.SIGINT, own)
    try:
        fit(new_trainer(), Interrupt(3))
        assert signal.getsignal(signal.SIGINT) is own
        with pytest.raises(RuntimeError, match="from a callback"):
            fit(new_trainer(), fail)
        assert signal.getsignal(signal.SIGINT) is own
        assert received == []
        forget()
        fit(new_trainer(), Interrupt(3, times=2))
        assert received == [signal.SIGINT]  # the second one is the user's
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them(unbroken: dict[str, Any]) -> None:
    # As a shell's background jobs do: Ctrl-C is meant for another program.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = new_trainer()
        assert not fit(trainer, Interrupt(3)).interrupted
        assert result(trainer) == unbroken
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fit_outside_the_main_thread_works(unbroken: dict[str, Any]) -> None:
    trainer = new_trainer()
    thread = threading.Thread(target=fit, args=(trainer,))
    thread.start()
    thread.join()
    assert result(trainer) == unbroken


class Dawdle(mg.Callback):
    every_steps = 1

    def step_end(self, trainer: Any) -> None:
        print("step", trainer.steps, flush=True)
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform == "win32", reason="the platform sends no SIGINT to one process")
def test_an_interrupt_from_the_terminal(unbroken: dict[str, Any], tmp_path: Path) -> None:
    folders = Path(mg.__file__).parents[1], Path(__file__).parents[1]  # the package, and what tests share
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-W", "error", __file__, str(tmp_path / "run.h5")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "interrupted after step" in errors
    assert output.endswith("interrupted True\n")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    assert 3 <= resumed.steps < EPOCHS * STEPS_PER_EPOCH
    fit(resumed)
    assert result(resumed) == unbroken


def child(path: str) -> None:
    trainer = new_trainer()
    history = fit(trainer, Dawdle())
    trainer.save(path)
    print("interrupted", history.interrupted)


if __name__ == "__main__":
    child(*sys.argv[1:])
