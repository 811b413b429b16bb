"""Runs that are saved, killed and resumed: they end with the bits of an unbroken one.

Run as a script, this file is the process that gets killed: it trains a case, from the run file if
there is one, and kills itself at the moment named.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import first_and_thorough
from runs import SaveEveryStep, assert_same, run_of

import mlpgpu as mg
from mlpgpu import history, storage
from mlpgpu.backends.cpu import CpuBackend
from mlpgpu.errors import ConfigurationError, DataMismatchError, FileFormatError, MlpgpuError, StorageError

EPOCHS = 5
DRAW = np.random.default_rng(5)
X = DRAW.standard_normal((43, 6))
LABELS = DRAW.integers(0, 3, 43)
WEIGHTS = DRAW.uniform(0.5, 2.0, 43)
VALUES = X[:, :2] ** 2 + 3.0
NOISE = mg.Dataset(DRAW.standard_normal((20, 6)), DRAW.integers(0, 3, 20))  # nothing to learn: it soon gets worse


@dataclass(frozen=True)
class Case:
    """A run: its trainer, its data, and what its fit takes beside them."""

    trainer: Callable[[], mg.Trainer]
    data: mg.Dataset
    options: Callable[[], dict[str, Any]] = dict

    def fit(self, trainer: mg.Trainer, *callbacks: Any, epochs: int = EPOCHS) -> mg.Trainer:
        options = self.options()
        options["callbacks"] = [*options.get("callbacks", ()), *callbacks]
        trainer.fit(self.data, epochs, progress=False, **options)
        return trainer


def classifier(optimizer: Any, **options: Any) -> mg.Trainer:
    initial = "glorot_uniform"  # by which "stopping early" does
    layers = [mg.Dense(6, 8, "tanh", init=initial), mg.Dropout(0.3), mg.Dense(8, 3, init=initial)]
    return mg.Trainer(mg.Network(layers, seed=3), "softmax_cross_entropy", optimizer, batch_size=8, **options)


def regressor(optimizer: Any, **options: Any) -> mg.Trainer:
    layers = [mg.Standardize(6), mg.Dense(6, 8, "gelu"), mg.Dense(8, 2), mg.Standardize(2)]
    return mg.Trainer(mg.Network(layers, seed=4), "squared_error", optimizer, batch_size=8, **options)


CASES = {
    "stopping early": Case(
        lambda: classifier(mg.Adam(mg.CosineDecay(0.1, epochs=9)), streams=2, metrics=["accuracy"]),
        mg.Dataset(X, LABELS, WEIGHTS),
        lambda: {"validation": NOISE, "callbacks": [mg.EarlyStopping(patience=1, min_delta=0.02)]},
    ),
    "plateaus": Case(
        lambda: regressor(
            mg.Momentum(mg.ReduceOnPlateau(0.02, patience=1, monitor="loss", min_delta=0.2)), precision="float64"
        ),
        mg.Dataset(X, VALUES),
        lambda: {"drop_last": True},
    ),
    "penalties": Case(
        lambda: classifier(
            mg.AdamW(mg.WarmUp(mg.OneCycle(0.02, steps=30), epochs=1.5), l1=1e-4, l2=1e-3, clip_norm=0.5),
            class_weight="balanced",
        ),
        mg.Dataset((X * 40 + 128).clip(0, 255).astype(np.uint8), np.array(["a", "b", "c"])[LABELS]).split(0.2)[0],
    ),
    "in order": Case(
        lambda: classifier(mg.Nesterov(mg.StepDecay(0.05, 0.5, steps=7)), streams=3),
        mg.Dataset(X, np.eye(3)[LABELS]),
        lambda: {"shuffle": False},
    ),
    "one batch": Case(
        lambda: regressor(mg.RMSprop(0.01)),
        mg.Dataset(X[:5], VALUES[:5]),
        lambda: {"validation": mg.Dataset(X, VALUES)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_after_any_step_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    unbroken = run_of(case.fit(case.trainer()), tmp_path / "unbroken.h5")
    folder = tmp_path / "steps"
    folder.mkdir()
    watched = case.fit(case.trainer(), SaveEveryStep(folder))
    assert_same(run_of(watched, tmp_path / "watched.h5"), unbroken)
    files = sorted(folder.iterdir())
    assert len(files) == watched.steps + watched.epochs
    for file in files:
        assert_same(run_of(case.fit(mg.Trainer.resume(file)), tmp_path / "resumed.h5"), unbroken)


def test_the_cases_do_what_their_names_say(tmp_path: Path) -> None:
    stopped = CASES["stopping early"]
    assert len(stopped.fit(stopped.trainer()).history) < EPOCHS
    plateaus = CASES["plateaus"]
    rates = plateaus.fit(plateaus.trainer()).history["rate"]
    assert rates[0] > rates[-1] > 0.0


def test_a_run_resumed_twice_ends_with_the_same_bits(tmp_path: Path) -> None:
    case = CASES["stopping early"]
    unbroken = run_of(case.fit(case.trainer()), tmp_path / "unbroken.h5")
    case.fit(case.trainer(), SaveEveryStep(tmp_path))
    first = mg.Trainer.resume(tmp_path / "step8.h5")
    first.save(tmp_path / "again.h5")
    assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "step8.h5").read_bytes()
    case.fit(mg.Trainer.resume(tmp_path / "again.h5"), SaveEveryStep(tmp_path))
    assert_same(run_of(case.fit(mg.Trainer.resume(tmp_path / "step15.h5")), tmp_path / "end.h5"), unbroken)


# Real processes, killed


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_around_replacement(moment: str, number: int) -> None:
    """Die while the file is saved for the ``number``-th time: half written, whole but not in place, in place."""
    calls = 0
    fsync, replace = os.fsync, os.replace

    def dying_fsync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if moment == "half" and calls + 1 == number and sys._getframe(1).f_code.co_name == "replacing":
            os.ftruncate(descriptor, size // 2)
            kill()
        fsync(descriptor)

    def dying_replace(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if moment == "before" and calls == number:
            kill()
        replace(source, target)
        if moment == "after" and calls == number:
            kill()

    os.fsync, os.replace = dying_fsync, dying_replace


class KillAfterSteps(mg.Callback):
    """Dies some steps later; it comes after a checkpoint, so that one of the same step is in place."""

    runs_last = True
    every_steps = 1

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step_end(self, trainer: Any) -> None:
        self.left -= 1
        if self.left == 0:
            kill()


class Dawdle(mg.Callback):
    """Gives the parent time to kill, and tells it when training is under way."""

    every_steps = 1

    def step_end(self, trainer: Any) -> None:
        print("step", trainer.steps, flush=True)
        time.sleep(0.005)


def child(name: str, path: str, unit: str, every: str, moment: str, number: str) -> None:
    case = CASES[name]
    trainer = mg.Trainer.resume(path) if Path(path).exists() else case.trainer()
    checkpoint = mg.Checkpoint(path, int(every), unit, keep_best=True)  # type: ignore[arg-type]
    extra: list[mg.Callback] = []
    if moment == "step":
        extra.append(KillAfterSteps(int(number)))
    elif moment == "outside":
        extra.append(Dawdle())
    else:
        kill_around_replacement(moment, int(number))
    case.fit(trainer, checkpoint, *extra)


def start(*arguments: object) -> subprocess.Popen[str]:
    paths = [Path(mg.__file__).parents[1], Path(__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-W", "error", __file__, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="the platform has no SIGKILL")
@pytest.mark.parametrize(
    ("name", "unit", "every"),
    first_and_thorough([("stopping early", "step", 4), ("stopping early", "epoch", 1), ("plateaus", "step", 5)]),
)
def test_a_run_killed_again_and_again_ends_with_the_same_bits(name: str, unit: str, every: int, tmp_path: Path) -> None:
    case = CASES[name]
    whole = mg.Checkpoint(tmp_path / "unbroken.h5", every, unit, keep_best=True)  # type: ignore[arg-type]
    unbroken = case.fit(case.trainer(), whole)
    path = tmp_path / "run.h5"
    left = []
    for moment, number in [("step", 3), ("half", 2), ("after", 2), ("step", 9), ("before", 1), ("half", 1)]:
        process = start(name, path, unit, every, moment, number)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, (moment, number)
        left.append(path.exists() and len(mg.Trainer.resume(path).history))
    assert not left[0] and left[-1]  # killed before the first save; later on something stood
    case.fit(mg.Trainer.resume(path), mg.Checkpoint(path, every, unit, keep_best=True))  # type: ignore[arg-type]
    for file in ("{}.h5", "{}.best.h5"):
        expected, got = (
            run_of(mg.Trainer.resume(tmp_path / file.format(stem)), tmp_path / "read.h5")
            for stem in ("unbroken", "run")
        )
        assert_same(got, expected)
    assert unbroken.steps == mg.Trainer.resume(path).steps
    # Only a kill between the name of a whole file and its move leaves that file behind.
    assert len([file for file in tmp_path.iterdir() if file.suffix == ".partial"]) <= 1


@pytest.mark.skipif(sys.platform == "win32", reason="the platform has no SIGKILL")
def test_a_run_killed_from_outside_at_any_time_ends_with_the_same_bits(tmp_path: Path) -> None:
    name, chance = "plateaus", random.Random(6)
    case = CASES[name]
    unbroken = run_of(
        case.fit(case.trainer(), mg.Checkpoint(tmp_path / "unbroken.h5", keep_best=True)), tmp_path / "a.h5"
    )
    path = tmp_path / "run.h5"
    for _ in range(4):
        process = start(name, path, "step", 1, "outside", 0)
        assert process.stdout is not None
        process.stdout.readline()  # the first step is done
        while not path.exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.04))
        process.kill()
        process.communicate()
    resumed = mg.Trainer.resume(path)
    assert resumed.steps > 0
    finished = case.fit(resumed, mg.Checkpoint(path, keep_best=True))
    assert_same(run_of(finished, tmp_path / "b.h5"), unbroken)


# Going on, and refusing to


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of case "in order", saved after two of its epochs."""
    case = CASES["in order"]
    case.fit(case.trainer(), mg.Checkpoint(tmp_path / "run.h5"), epochs=2)
    return tmp_path / "run.h5"


@pytest.mark.parametrize("name", ["penalties", "in order", "one batch"])
def test_a_finished_run_goes_on_as_one_long_run(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    long = run_of(case.fit(case.trainer(), epochs=7), tmp_path / "long.h5")
    case.fit(case.trainer(), epochs=3).save(tmp_path / "short.h5")
    resumed = case.fit(mg.Trainer.resume(tmp_path / "short.h5"), epochs=7)
    assert len(resumed.history) == 7
    assert_same(run_of(resumed, tmp_path / "resumed.h5"), long)


def test_only_the_first_fit_of_a_resumed_trainer_continues(saved: Path) -> None:
    case = CASES["in order"]
    resumed = case.fit(mg.Trainer.resume(saved), epochs=2)
    assert len(resumed.history) == 2
    assert case.fit(resumed, epochs=2).history["epoch"] == [1, 2, 3, 4]


def test_a_resumed_trainer_shows_what_was_saved(saved: Path) -> None:
    case = CASES["in order"]
    before = case.fit(case.trainer(), epochs=2)
    trainer = mg.Trainer.resume(saved)
    assert (trainer.steps, trainer.epochs) == (before.steps, before.epochs) == (12, 2)
    assert trainer.optimizer == before.optimizer
    assert str(trainer.plan) == str(before.plan)
    without_seconds = [[{**record, "seconds": 0} for record in run.history.records] for run in (trainer, before)]
    assert without_seconds[0] == without_seconds[1]
    assert trainer.evaluate(NOISE) == before.evaluate(NOISE)


def test_evaluating_a_resumed_trainer_changes_nothing(saved: Path, tmp_path: Path) -> None:
    case = CASES["in order"]
    unbroken = run_of(case.fit(case.trainer()), tmp_path / "unbroken.h5")
    resumed = mg.Trainer.resume(saved)
    resumed.evaluate(NOISE)  # its targets are of another kind than those of the fit
    assert_same(run_of(case.fit(resumed), tmp_path / "resumed.h5"), unbroken)


def test_single_steps_go_on_after_a_resume(tmp_path: Path) -> None:
    def train(trainer: mg.Trainer, steps: range) -> list[float]:
        return [trainer.step(X[k : k + 8], LABELS[k : k + 8], WEIGHTS[k : k + 8]) for k in steps]

    unbroken = classifier(mg.Adam(0.01))
    losses = train(unbroken, range(10))
    broken = classifier(mg.Adam(0.01))
    begun = train(broken, range(4))
    broken.save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    assert begun + train(resumed, range(4, 10)) == losses
    assert resumed.steps == unbroken.steps == 10
    for name, values in unbroken.network.parameters.items():
        np.testing.assert_array_equal(resumed.network.parameters[name], values)


def changed(array: np.ndarray, *place: int) -> np.ndarray:
    copy = array.copy()
    copy[place] += 1
    return copy


ONE_HOT = np.eye(3)[LABELS]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: mg.Dataset(changed(X, 42, 5), ONE_HOT), "crc"),
        (lambda: mg.Dataset(X, ONE_HOT[:, ::-1]), "crc"),
        (lambda: mg.Dataset(X, ONE_HOT, WEIGHTS), "'has_weight': True"),
        (lambda: mg.Dataset(X[:-1], ONE_HOT[:-1]), "'rows': 42"),
        (lambda: mg.Dataset(X.astype(np.float32), ONE_HOT), "'x_dtype': 'float32'"),
        (lambda: mg.Dataset(X, LABELS), "'y_shape': [43]"),
    ],
)
def test_another_data_set_is_refused_and_the_right_one_still_goes_on(
    other: Callable[[], mg.Dataset], named: str, saved: Path, tmp_path: Path
) -> None:
    case = CASES["in order"]
    unbroken = run_of(case.fit(case.trainer(), epochs=3), tmp_path / "unbroken.h5")
    trainer = mg.Trainer.resume(saved)
    with pytest.raises(DataMismatchError, match="data of the resumed fit: expected") as caught:
        trainer.fit(other(), 3, shuffle=False, progress=False)
    for identity in (case.data.identity(), other().identity()):
        assert f"'crc': {identity['crc']}" in str(caught.value)
    assert named in str(caught.value)
    assert_same(run_of(case.fit(trainer, epochs=3), tmp_path / "resumed.h5"), unbroken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "shuffle of the resumed fit: expected False, got True"),
        ({"shuffle": False, "drop_last": True}, "drop_last of the resumed fit: expected False, got True"),
    ],
)
def test_other_arguments_of_a_resumed_fit_are_refused(options: dict[str, bool], message: str, saved: Path) -> None:
    trainer = mg.Trainer.resume(saved)
    with pytest.raises(DataMismatchError, match=message):
        trainer.fit(CASES["in order"].data, 3, progress=False, **options)
    assert trainer.steps == 12


def test_early_stopping_that_stopped_stays_stopped(tmp_path: Path) -> None:
    case = CASES["stopping early"]
    ended = case.fit(case.trainer(), mg.Checkpoint(tmp_path / "run.h5"))
    resumed = case.fit(mg.Trainer.resume(tmp_path / "run.h5"), epochs=50)
    assert len(resumed.history) == len(ended.history) < EPOCHS
    for name, values in ended.network.parameters.items():
        np.testing.assert_array_equal(resumed.network.parameters[name], values)


def test_a_run_file_is_a_network_too(saved: Path) -> None:
    network, trainer = mg.load(saved), mg.Trainer.resume(saved)
    assert network.output == "softmax"
    np.testing.assert_array_equal(network.predict(X), trainer.network.predict(X))


def test_a_network_alone_is_no_run(tmp_path: Path) -> None:
    CASES["in order"].trainer().network.save(tmp_path / "net.h5")
    with pytest.raises(FileFormatError, match=r"file of Trainer\.save, got a network alone \(mlpgpu\.load reads"):
        mg.Trainer.resume(tmp_path / "net.h5")


def test_no_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing\.h5: expected a readable file, got No such file"):
        mg.Trainer.resume(tmp_path / "missing.h5")


def test_a_resume_that_may_not_repeat_its_bits_warns(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["one batch"].fit(CASES["one batch"].trainer()).save(tmp_path / "whole.h5")
    with pytest.warns(UserWarning, match=r"may not repeat its bits.*'threads': \(1, 2\)") as caught:
        assert mg.Trainer.resume(tmp_path / "whole.h5", threads=2).threads == 2
    assert caught[0].filename == __file__
    mg.Trainer.resume(tmp_path / "whole.h5")  # warnings are errors
    assert mg.Trainer.resume(saved, threads=2).threads == 2  # shards have the same bits on any number of threads

    fingerprint = CpuBackend.fingerprint
    monkeypatch.setattr(CpuBackend, "fingerprint", lambda *a, **k: {**fingerprint(*a, **k), "numpy": "9.0"})
    with pytest.warns(UserWarning, match=rf"'numpy': \('{np.__version__}', '9\.0'\)"):
        mg.Trainer.resume(saved)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_a_run_in_a_precision_of_cards_goes_on_in_float32(precision: str, saved: Path, tmp_path: Path) -> None:
    contents = storage.read(saved)
    contents.description["run"]["precision"] = precision
    storage.write(tmp_path / "run.h5", contents)
    resumed = mg.Trainer.resume(tmp_path / "run.h5", backend="cpu")
    assert (resumed.precision, resumed.plan.precision) == ("float32", "float32")


def test_ieee_float32_is_the_cpus_float32() -> None:
    trained = [classifier(mg.SGD(0.1), precision=name) for name in ("float32", "float32-ieee")]
    for trainer in trained:
        trainer.fit(mg.Dataset(X, LABELS), 2, progress=False)
    first, second = (trainer.network.flat_parameters() for trainer in trained)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, second)


def test_a_resume_on_an_unknown_backend_is_refused(saved: Path) -> None:
    with pytest.raises(MlpgpuError, match=r"^backend: expected one of auto, cpu, cuda, got 'opengl'"):
        mg.Trainer.resume(saved, backend="opengl")


def places(tree: Any, *path: Any) -> list[tuple[Any, ...]]:
    """Where the leaves of JSON data are."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in pairs for place in places(value, *path, key)] if pairs else [path]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


@pytest.mark.filterwarnings("ignore:the resumed run may not repeat its bits")
def test_a_description_without_meaning_is_refused_or_harmless(tmp_path: Path) -> None:
    case, path = CASES["plateaus"], tmp_path / "run.h5"
    case.fit(case.trainer(), mg.Checkpoint(path), epochs=1)
    good = storage.read(path)
    wrong = []
    refused = 0
    for place in [*places(good.description), ("run",), ("network",), ("run", "fit"), ("network", "layers")]:
        for value in (None, -1, "x"):
            storage.write(path, storage.Contents(replaced(good.description, place, value), good.arrays, good.groups))
            try:
                mg.load(path)
                case.fit(mg.Trainer.resume(path), epochs=2)
            except MlpgpuError:
                refused += 1
            except Exception as error:
                wrong.append(f"{place} = {value!r}: {error!r}")
    assert not wrong, "\n".join(wrong)
    assert refused > 100


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("/mlpgpu/run/slots/velocity", np.zeros(3, np.float32)),
        ("/mlpgpu/run/slots/velocity", np.zeros(83)),
        ("/mlpgpu/run/history/loss", np.zeros(1)),
        ("/mlpgpu/run/history/epoch", np.full(2, np.inf)),
        ("/mlpgpu/run/history/epoch", np.full(2, np.nan)),
        ("/mlpgpu/run/history/rate", np.array(1.0)),
        ("/layers/dense/vars/0", np.zeros((8, 6), np.float32)),
        ("/layers/dense/vars/0", np.full((6, 8), np.nan, np.float32)),
        ("/layers/dense/vars/0", np.zeros((6, 8))),
    ],
)
def test_arrays_that_belie_the_description_are_refused(array: str, value: np.ndarray, saved: Path) -> None:
    good = storage.read(saved)
    assert array in good.arrays
    storage.write(saved, storage.Contents(good.description, {**good.arrays, array: value}, good.groups))
    with pytest.raises(FileFormatError, match="expected"):
        mg.Trainer.resume(saved)


def test_a_missing_array_is_refused(saved: Path) -> None:
    good = storage.read(saved)
    for name in good.arrays:
        others = {key: value for key, value in good.arrays.items() if key != name}
        storage.write(saved, storage.Contents(good.description, others, good.groups))
        with pytest.raises(FileFormatError):
            mg.Trainer.resume(saved)


def test_a_moved_run_file_goes_on(saved: Path, tmp_path: Path) -> None:
    case = CASES["in order"]
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.move(saved, tmp_path / "elsewhere" / "other.hdf5"))
    assert len(case.fit(mg.Trainer.resume(moved), mg.Checkpoint(moved), epochs=3).history) == 3


def test_a_checkpoint_needs_a_folder_before_anything_is_trained(saved: Path) -> None:
    trainer = mg.Trainer.resume(saved)
    with pytest.raises(StorageError, match="a folder that is there"):
        CASES["in order"].fit(trainer, mg.Checkpoint(saved.parent / "missing" / "run.h5"))
    with pytest.raises(ConfigurationError, match="pass validation= to fit"):
        CASES["in order"].fit(trainer, mg.EarlyStopping())
    assert trainer.steps == 12


def test_a_save_does_not_check_the_epochs_before_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the checkpoints of a long run would cost its epochs squared."""
    network = mg.Network([mg.Dense(2, 2)], seed=1)
    trainer = mg.Trainer(network, "mean_squared_error", "adam")
    trainer.fit((np.ones((2, 2)), np.ones((2, 2))), 30, progress=False)
    checked: list[object] = []
    check = history._check_record
    monkeypatch.setattr(history, "_check_record", lambda record: checked.append(record) or check(record))
    trainer.save(tmp_path / "run.h5")
    assert not checked
    assert len(mg.Trainer.resume(tmp_path / "run.h5").history) == len(checked) == 30  # what a file says is checked


if __name__ == "__main__":
    child(*sys.argv[1:])
