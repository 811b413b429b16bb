"""Whole trainings on a card: their curves beside the CPU backend's, and all that may happen to a run.

Run as a script, this file is a process that trains on the card by itself, and may kill itself.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import EPS, EPS32
from runs import SaveEveryStep, assert_same, run_of

import mlpgpu as mg
from mlpgpu.backends.cuda.run.data import feed, pieces
from mlpgpu.backends.cuda.run.training import Training
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.errors import BackendError, DivergenceError, TornStateError
from mlpgpu.metrics import METRICS, SUMS, curve_count, curve_positives
from mlpgpu.random import epoch_order
from mlpgpu.training import interrupt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_once")]

EPOCHS = 5
ROWS, N_IN, HIDDEN, CLASSES, BATCH = 1000, 20, 33, 5, 16
STEPS_PER_EPOCH = -(-ROWS // BATCH)
DRAW = np.random.default_rng(5)
X = DRAW.normal(size=(ROWS, N_IN)).astype(np.float32)
DATA = mg.Dataset(X, (X @ DRAW.normal(size=(N_IN, CLASSES))).argmax(axis=1), DRAW.uniform(0.5, 2.0, ROWS))
NOISE = mg.Dataset(DRAW.normal(size=(200, N_IN)), DRAW.integers(CLASSES, size=200))  # soon predicted worse and worse

# A step rounds each of the terms of its products, and hands on what the steps before it left.
STEP_ERROR = EPS32 * (BATCH + 2 * (N_IN + HIDDEN + CLASSES))


def new_trainer(backend: str = "cuda", **options: Any) -> mg.Trainer:
    layers = [mg.Dense(N_IN, HIDDEN, "tanh"), mg.Dropout(0.2), mg.Dense(HIDDEN, CLASSES)]
    options = {"optimizer": mg.Adam(0.003), "batch_size": BATCH, "streams": 2, **options}
    return mg.Trainer(mg.Network(layers, seed=3), "softmax_cross_entropy", backend=backend, **options)


def fit(trainer: mg.Trainer, *callbacks: Any, epochs: int = EPOCHS, **options: Any) -> mg.Trainer:
    trainer.fit(DATA, epochs, callbacks=callbacks, progress=False, **options)
    return trainer


def flat(trainer: mg.Trainer) -> np.ndarray:
    return trainer.network.flat_parameters()


def losses(trainer: mg.Trainer) -> np.ndarray:
    return np.array(trainer.history["loss"])


def assert_curves_meet(got: np.ndarray, expected: np.ndarray) -> None:
    assert len(got) == len(expected)
    np.testing.assert_allclose(got, expected, rtol=STEP_ERROR * STEPS_PER_EPOCH * len(expected))


@pytest.fixture(scope="module")
def unbroken(compiled_once: None) -> mg.Trainer:
    """A run that nothing happened to; not to be trained further."""
    return fit(new_trainer())


@pytest.fixture(scope="module")
def on_cpu() -> mg.Trainer:
    """The same run on the CPU."""
    return fit(new_trainer("cpu"))


# --- curves ---


@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("streams", [1, 2, 5])
def test_a_training_has_the_curve_of_the_cpu(streams: int, reduction: str, on_cpu: mg.Trainer) -> None:
    trainer = fit(new_trainer(streams=streams, reduction=reduction))
    assert_curves_meet(losses(trainer), losses(on_cpu))
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]


def test_digits_are_learnt_from_their_bytes() -> None:
    train, test = mg.datasets.load("digits")
    accuracies = []
    for backend in ("cuda", "cpu"):
        network = mg.Network([mg.Dense(train.n_in, 64, "relu"), mg.Dense(64, 10)], seed=1)
        trainer = mg.Trainer(
            network, "softmax_cross_entropy", mg.Momentum(0.1), backend=backend, metrics=["accuracy"], batch_size=32
        )
        trainer.fit(train, 15, progress=False)
        accuracies.append(trainer.evaluate(test)["accuracy"])
    assert accuracies[0] > 0.95
    # Rounding may tip rows that lie between two classes, and moves the rest of the run.
    assert abs(accuracies[0] - accuracies[1]) <= 2.0 * np.sqrt(0.05 * 0.95 / len(test))


@pytest.mark.parametrize("rows", [3, 1000, 1025, 10_000])
@pytest.mark.parametrize("widths", [(20, 33, 5), (300, 1200, 300, 5)])
def test_evaluations_have_the_bits_of_any_launches(
    rows: int, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those for the fewest rows with room, and by those for all."""
    random = np.random.default_rng(rows)
    data = mg.Dataset(random.normal(size=(rows, widths[0])), random.integers(5, size=rows), random.uniform(size=rows))
    layers = [mg.Dense(k, n, "relu") for k, n in pairwise(widths)]
    metrics = ["accuracy", "log_loss"]
    found = []
    for tiers in ((1024, 2048, 4096), ()):
        monkeypatch.setattr(thresholds, "EVALUATION_TIERS", tiers)
        trainer = mg.Trainer(mg.Network(layers, seed=2), "softmax_cross_entropy", backend="cuda")
        both = trainer.evaluate(data, metrics)
        assert trainer.evaluate(data)["loss"] == both["loss"] == trainer.evaluate(data, metrics)["loss"]
        found.append(both)
    assert found[0] == found[1]
    trainer = mg.Trainer(mg.Network(layers, seed=2), "softmax_cross_entropy", backend="cpu")
    assert found[0]["loss"] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-4)


@pytest.mark.parametrize("n_out", [1, 2, 10])
def test_ranks_are_those_of_the_predictions(n_out: int) -> None:
    """Of two sets, the second one larger, by one program; weights in quarters, whose sums are exact."""
    loss = "binary_cross_entropy" if n_out == 1 else "softmax_cross_entropy"
    trainer = mg.Trainer(mg.Network([mg.Dense(20, n_out)], seed=1), loss, mg.SGD(0.1), backend="cuda", batch_size=300)
    for rows in (500, 20_000):
        random = np.random.default_rng(rows)
        labels = random.integers(max(2, n_out), size=rows)
        x = random.normal(size=(rows, 20)).round(1) + labels[:, np.newaxis] / 10
        y = labels if n_out > 1 else labels[:, np.newaxis].astype(float)
        data = mg.Dataset(x, y, random.integers(0, 9, rows) / 4)
        names = [name for name, sums in SUMS.items() if sums.of == "rankings"]
        found, curves = trainer.evaluate(data, names), curve_count(max(2, n_out))
        scores = trainer.network.predict(data, backend="cuda")[:, -curves:]
        for name in names:
            sums = np.zeros((3, curves))
            SUMS[name].accumulate(scores, curve_positives(labels, curves), data.weight, sums)
            # Sums of `rows` terms at most, each with a rounding of its own.
            expected = METRICS[name].ways["multiclass"][1](sums)
            assert found[name] == pytest.approx(expected, rel=4 * rows * EPS)
            assert found[name] == trainer.evaluate(data, [name])[name]  # the same bits


def test_squares_are_added_up_on_the_card() -> None:
    trainer = fit(new_trainer())
    parts = [slice(0, 700), slice(701, 705)]
    program = trainer._engine.program
    assert program is not None
    found, flat = program.square_sum(parts), trainer.network.flat_parameters().astype(np.float64)
    assert found == pytest.approx(sum(float(np.square(flat[part]).sum()) for part in parts), rel=1e-12)


def test_histograms_are_numpy_s() -> None:
    histograms = mg.Histograms(bins=100, of=["parameters"])
    trainer = fit(new_trainer(), histograms)
    for name, (counts, edges) in histograms.epochs[EPOCHS].items():
        expected, expected_edges = np.histogram(trainer.network.parameters[name].astype(np.float64), 100)
        np.testing.assert_array_equal(edges, expected_edges)
        np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("options", [{}, {"streams": 1}, {"precision": "bfloat16"}], ids=str)
def test_activations_and_gradients_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    histograms, kinds = mg.Histograms(bins=20), ("activations", "gradients")
    trainer = fit(new_trainer(**options), histograms)
    np.testing.assert_array_equal(flat(trainer), flat(fit(new_trainer(**options))))
    cpu = fit(new_trainer("cpu"), epochs=1)
    cpu.network.parameters = trainer.network.parameters
    cpu._engine.progress = replace(cpu._engine.progress, steps=trainer.steps)  # which decides what is dropped out
    expected = cpu.histograms(20, kinds)
    assert expected.keys() == histograms.epochs[EPOCHS].keys() - trainer.network.parameters.keys()
    for name, (counts, edges) in expected.items():
        got_counts, got_edges = histograms.epochs[EPOCHS][name]
        np.testing.assert_allclose(got_edges, edges, rtol=0.0, atol=STEP_ERROR * abs(edges).max())
        assert got_counts.sum() == counts.sum()
        # A value beside an edge may have been rounded to its other side.
        assert abs(np.cumsum(got_counts) - np.cumsum(counts)).max() <= 1 + counts.sum() // 100


def test_orders_made_on_the_card_are_the_host_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch's list, and the bits of a training, also of one that is broken off inside an epoch."""
    seen: list[np.ndarray] = []
    begin_listed = feed.Feed.begin_listed

    def look(self: feed.Feed, places: str, ready: Any) -> None:
        begin_listed(self, places, ready)
        listed = np.empty(len(self.dataset), np.int32)
        self._stream.download(listed, self.arrays.addresses["order"])
        self._stream.synchronize()
        place_of = self.place_of
        assert place_of is not None
        seen.append(np.argsort(place_of)[listed])

    monkeypatch.setattr(feed.Feed, "begin_listed", look)
    of_host = fit(new_trainer())
    monkeypatch.setattr(thresholds, "SORT_COMPILED_SECONDS", 0.0)  # the host makes the first list alone
    after_waiting = fit(new_trainer())
    monkeypatch.setattr(thresholds, "SORT_LEAST_ROWS", 1)
    of_card = fit(new_trainer())
    assert len(seen) == 3 * (EPOCHS - 1)
    for epoch, order in zip(3 * [*range(1, EPOCHS)], seen, strict=True):
        np.testing.assert_array_equal(order, epoch_order(ROWS, seed=3, epoch=epoch))
    np.testing.assert_array_equal(flat(of_card), flat(of_host))
    np.testing.assert_array_equal(flat(after_waiting), flat(of_host))
    fit(new_trainer(), SaveEveryStep(tmp_path), epochs=1)
    resumed = mg.Trainer.resume(tmp_path / "step10.h5")
    np.testing.assert_array_equal(flat(fit(resumed)), flat(of_host))


@pytest.mark.parametrize("initializer", ["glorot_uniform", "he_uniform", "he_normal", "zeros"])
def test_initial_values_are_the_cpu_s_own(initializer: str) -> None:
    """Of one weight that a kernel draws, if it is uniform, and of one from the host, at an odd place."""
    widths = (33, 7, 5, 1 << 18, 3)
    layers = [mg.Dense(n_in, n_out, init=initializer) for n_in, n_out in pairwise(widths)]
    networks = [mg.Network(layers, seed=9) for _ in range(2)]
    data = mg.Dataset(DRAW.normal(size=(4, 33)), DRAW.integers(3, size=4))
    trainer = mg.Trainer(networks[0], "softmax_cross_entropy", mg.Adam(0.1), backend="cuda")
    trainer.evaluate(data)
    for name, values in networks[1].parameters.items():
        np.testing.assert_array_equal(networks[0].parameters[name].view(np.uint32), values.view(np.uint32))


def test_a_large_parameter_that_is_not_finite_is_found() -> None:
    network = mg.Network([mg.Dense(3, 1 << 19), mg.Dense(1 << 19, 1)], seed=1)
    trainer = mg.Trainer(network, "squared_error", mg.SGD(0.0), backend="cuda", batch_size=4)
    data = mg.Dataset(DRAW.normal(size=(4, 3)), DRAW.normal(size=4))
    trainer.fit(data, 1, progress=False)
    program = trainer._engine.program
    assert program is not None and program.is_finite()
    state = program.read()
    state.parameters[0, -7] = np.nan
    program.load(state)
    assert not program.is_finite()


@pytest.mark.alone
def test_a_network_that_no_card_holds_is_refused(device: Device) -> None:
    """Its values would be 580 GB, and are made nowhere."""
    layers = [mg.LocallyConnected(5_000_000 - 28 * k, 29) for k in range(1000)]
    trainer = mg.Trainer(mg.Network(layers, seed=1), "squared_error", mg.SGD(0.1), backend="cuda", batch_size=1)
    width = trainer.network.n_out
    with device:
        free = device.free_bytes
    with pytest.raises(BackendError, match=r"parameters \(.*of the .* parameters fit"):
        trainer.step(np.zeros((1, 5_000_000), np.float32), np.zeros((1, width), np.float32))
    with device:
        assert device.free_bytes > free - (1 << 28)


@pytest.mark.skipif("MLPGPU_DATA" not in os.environ, reason="MLPGPU_DATA names no folder with MNIST")
def test_mnist_is_learnt() -> None:
    train, test = mg.datasets.load("mnist")
    network = mg.Network([mg.Dense(784, 128, "relu"), mg.Dense(128, 10)], seed=1)
    trainer = mg.Trainer(
        network, "softmax_cross_entropy", mg.Momentum(0.1), backend="cuda", metrics=["accuracy"], batch_size=128
    )
    trainer.fit(train, 5, progress=False)
    assert trainer.evaluate(test)["accuracy"] > 0.97


# --- the same bits ---


def test_how_many_steps_run_at_a_time_changes_no_bit(unbroken: mg.Trainer) -> None:
    class Look(mg.Callback):
        every_steps = 1

        def step_end(self, trainer: Any) -> None:
            pass

    watched = fit(new_trainer(), Look())
    np.testing.assert_array_equal(flat(watched), flat(unbroken))
    assert (losses(watched) == losses(unbroken)).all()


@pytest.mark.parametrize("memory_share", [0.5, 0.0])
def test_pieces_of_the_data_change_no_bit(
    memory_share: float, unbroken: mg.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a shard of 0 nothing stays on the card, and each epoch's pieces go up anew.
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_000)
    trainer = fit(new_trainer(memory_share=memory_share))
    np.testing.assert_array_equal(flat(trainer), flat(unbroken))
    assert trainer.evaluate(DATA) == unbroken.evaluate(DATA)


def test_evaluations_in_between_change_no_bit(unbroken: mg.Trainer) -> None:
    def look(trainer: mg.Trainer) -> Any:
        def callback(record: dict[str, float]) -> None:
            trainer.evaluate(DATA)
            trainer.network.predict(NOISE, backend="cuda")

        return callback

    trainer = new_trainer()
    fit(trainer, look(trainer), validation=NOISE)
    np.testing.assert_array_equal(flat(trainer), flat(unbroken))


def test_another_process_has_the_same_bits(unbroken: mg.Trainer, tmp_path: Path) -> None:
    process = start(tmp_path / "run.h5", 0)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.split() == ["crc", str(zlib.crc32(flat(unbroken).tobytes()))]


# --- files, resuming, dying ---


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_the_other_backend(first: str, then: str, on_cpu: mg.Trainer, tmp_path: Path) -> None:
    fit(new_trainer(first), epochs=2).save(tmp_path / "run.h5")
    with pytest.warns(UserWarning, match="may not repeat its bits"):
        resumed = mg.Trainer.resume(tmp_path / "run.h5", backend=then)
    assert_curves_meet(losses(fit(resumed)), losses(on_cpu))


def test_a_run_resumed_after_any_step_ends_with_the_same_bits(tmp_path: Path) -> None:
    small = mg.Dataset(DATA.x[:75], DATA.y[:75])  # five steps an epoch, the last one smaller

    def end(trainer: mg.Trainer, *callbacks: Any) -> mg.Trainer:
        trainer.fit(small, 3, validation=NOISE, callbacks=[mg.EarlyStopping(patience=2), *callbacks], progress=False)
        return trainer

    expected = run_of(end(new_trainer()), tmp_path / "unbroken.h5")
    folder = tmp_path / "steps"
    folder.mkdir()
    end(new_trainer(), SaveEveryStep(folder))
    for file in (folder / "step1.h5", folder / "step7.h5", folder / "step10.h5", folder / "epoch2.h5"):
        assert_same(run_of(end(mg.Trainer.resume(file)), tmp_path / "resumed.h5"), expected)


class KillAfter(mg.Callback):
    """Dies at a step, after a checkpoint of the same step."""

    runs_last = True
    every_steps = 1

    def __init__(self, step: int) -> None:
        self.step = step

    def step_end(self, trainer: Any) -> None:
        if trainer.steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def start(*arguments: object) -> subprocess.Popen[str]:
    paths = [str(Path(mg.__file__).parents[1]), str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "error", __file__, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def child(path: str, step: str) -> None:
    """Train, from the run file if there is one, and die at ``step``, or with 0 live and tell the bits."""
    trainer = mg.Trainer.resume(path) if Path(path).exists() else new_trainer()
    fit(trainer, mg.Checkpoint(path, 50, "step"), *([KillAfter(int(step))] if int(step) else []))
    print("crc", zlib.crc32(flat(trainer).tobytes()))


def test_a_run_killed_twice_ends_with_the_same_bits(unbroken: mg.Trainer, tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    for step, saved in ((60, 50), (200, 200)):
        process = start(path, step)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, errors
        resumed = mg.Trainer.resume(path)
        assert resumed.steps == saved
    np.testing.assert_array_equal(flat(fit(resumed)), flat(unbroken))
    assert (losses(resumed) == losses(unbroken)).all()


def test_an_interrupt_during_replay_ends_after_a_finished_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = new_trainer()
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    class Begin(mg.Callback):
        def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
            if record["epoch"] == 1:  # compiled and captured by now
                threading.Timer(0.2, press).start()

    fit(trainer, Begin(), epochs=10**6)
    assert time.perf_counter() - pressed[0] < 2.0
    assert trainer.history.interrupted
    assert f"interrupted after step {trainer.steps}" in capsys.readouterr().err
    trainer.save(tmp_path / "run.h5")
    resumed, whole = mg.Trainer.resume(tmp_path / "run.h5"), new_trainer()
    epochs = trainer.epochs + 1
    np.testing.assert_array_equal(flat(fit(resumed, epochs=epochs)), flat(fit(whole, epochs=epochs)))


def test_callbacks_keep_the_best(tmp_path: Path) -> None:
    stopping, checkpoint = mg.EarlyStopping(patience=3), mg.Checkpoint(tmp_path / "run.h5", keep_best=True)
    trainer = fit(new_trainer(optimizer=mg.Adam(0.02)), stopping, checkpoint, epochs=60, validation=NOISE)
    assert stopping.stopped and len(trainer.history) < 60
    best = min(trainer.history["validation_loss"])
    assert trainer.evaluate(NOISE)["loss"] == best
    kept = mg.load(checkpoint.best_path)
    np.testing.assert_array_equal(kept.predict(X, backend="cuda"), trainer.network.predict(X, backend="cuda"))


@pytest.mark.parametrize("moment", ["while they are put", "as the wait ends"])
def test_a_second_interrupt_waits_for_the_steps_under_way(
    moment: str, unbroken: mg.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "_last", -interrupt.AGAIN_SECONDS)
    name = "put" if moment == "while they are put" else "_wait"
    calls, original = 0, getattr(Training, name)

    def press(self: Training, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(self, *arguments)
        for _ in range(2 * (calls == 4)):
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Training, name, press)
    trainer = new_trainer()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    monkeypatch.undo()
    assert trainer.steps > 3
    trainer.save(tmp_path / "run.h5")
    resumed = fit(mg.Trainer.resume(tmp_path / "run.h5"))
    np.testing.assert_array_equal(flat(resumed), flat(unbroken))
    assert (losses(resumed) == losses(unbroken)).all()


def test_an_exception_while_steps_are_put_leaves_the_last_checkpoint(
    unbroken: mg.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = 0, Training.put

    def fail(self: Training, count: int, *others: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, count, *others)
        if calls == 9:
            raise SystemExit

    monkeypatch.setattr(Training, "put", fail)
    trainer, path = new_trainer(), tmp_path / "run.h5"
    with pytest.raises(SystemExit):
        fit(trainer, mg.Checkpoint(path, 5, "step"))
    monkeypatch.undo()
    before = path.read_bytes()
    with pytest.raises(TornStateError, match="goes on from step"):
        trainer.save(path)
    with pytest.raises(TornStateError):
        fit(trainer)
    trainer.close()
    assert path.read_bytes() == before
    resumed = fit(mg.Trainer.resume(path))
    np.testing.assert_array_equal(flat(resumed), flat(unbroken))


# --- trainers among themselves ---


def test_two_trainers_at_once_do_not_touch_each_other(unbroken: mg.Trainer) -> None:
    # Their optimizers have different hyper-parameters, which stand in constant memory.
    def other() -> mg.Trainer:
        return new_trainer(optimizer=mg.Momentum(0.05, momentum=0.5, l2=0.01), streams=3)

    alone, first, second = fit(other()), new_trainer(), other()
    for epoch in range(1, EPOCHS + 1):
        for trainer in (first, second):
            trainer.fit(DATA, 1, progress=False)
            assert trainer.epochs == epoch
    np.testing.assert_array_equal(flat(first), flat(unbroken))
    np.testing.assert_array_equal(flat(second), flat(alone))


def test_two_trainers_hand_a_network_to_each_other() -> None:
    ends = []
    for backend in ("cuda", "cpu"):
        network = mg.Network([mg.Dense(N_IN, HIDDEN, "tanh"), mg.Dense(HIDDEN, CLASSES)], seed=1)
        one, two = (
            mg.Trainer(network, "softmax_cross_entropy", optimizer, backend=backend, batch_size=BATCH)
            for optimizer in (mg.Momentum(0.1), mg.SGD(0.05))
        )
        for k, trainer in enumerate((one, two, one, one, two)):
            trainer.step(X[k : k + BATCH], DATA.y[k : k + BATCH])
            assert (flat(one) == flat(two)).all()
        ends.append(flat(one))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=5 * STEP_ERROR * abs(ends[1]).max())


def test_other_threads_may_train(unbroken: mg.Trainer) -> None:
    trainers = [new_trainer(), new_trainer()]
    fit(trainers[0], epochs=1)  # made and begun in this thread, ended in another
    threads = [
        threading.Thread(target=fit, args=(trainer,), kwargs={"epochs": EPOCHS - trainer.epochs})
        for trainer in trainers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for trainer in trainers:
        np.testing.assert_array_equal(flat(trainer), flat(unbroken))


def test_parameters_that_are_set_are_what_is_trained() -> None:
    chosen = {name: values * 0.5 for name, values in new_trainer().network.parameters.items()}
    fresh, used = new_trainer(optimizer=mg.SGD(0.1)), new_trainer(optimizer=mg.SGD(0.1))
    used.network.parameters = {name: values + 1.0 for name, values in chosen.items()}
    used.step(X[:BATCH], DATA.y[:BATCH])
    fresh.step(X[:BATCH], DATA.y[:BATCH])
    for trainer in (fresh, used):
        trainer.network.parameters = chosen
        assert all((trainer.network.parameters[name] == values).all() for name, values in chosen.items())
        trainer.step(X[:BATCH], DATA.y[:BATCH])
    np.testing.assert_array_equal(flat(fresh), flat(used))
    assert (flat(fresh) != np.concatenate([values.ravel() for values in chosen.values()])).any()


# --- what goes wrong ---


def test_a_run_that_diverges_says_where() -> None:
    steps = []
    for backend in ("cuda", "cpu"):
        network = mg.Network([mg.Dense(N_IN, HIDDEN), mg.Dense(HIDDEN, 2)], seed=1)
        trainer = mg.Trainer(network, "squared_error", mg.SGD(1e6), backend=backend, batch_size=BATCH)
        with pytest.raises(DivergenceError, match="expected a finite value") as caught:
            trainer.fit(mg.Dataset(X, X[:, :2]), 1, progress=False)
        steps.append(caught.value.step)
    assert steps[0] == steps[1]


def test_a_card_that_is_not_there() -> None:
    with pytest.raises(BackendError, match="GPU number: expected a number from 0 to"):
        new_trainer("cuda:99")


def test_out_of_memory_leaves_the_process_usable(device: Device, unbroken: mg.Trainer) -> None:
    greedy = new_trainer(batch_size=2**31 - 1)
    with pytest.raises(
        BackendError, match=r"memory of GPU 0: expected at most the [\d,]+ bytes that are free, .*batch of at"
    ):
        greedy.step(X[:2], DATA.y[:2])
    assert greedy.steps == 0
    np.testing.assert_array_equal(flat(greedy), flat(new_trainer("cpu")))
    np.testing.assert_array_equal(flat(fit(new_trainer())), flat(unbroken))


@pytest.mark.alone
def test_device_memory_does_not_grow(device: Device) -> None:
    def free_bytes() -> int:
        gc.collect()
        with device:
            return device.free_bytes

    trainer = new_trainer()

    def work(epochs: int, steps: int) -> None:
        trainer.fit(DATA, epochs, validation=NOISE, progress=False)
        for k in range(steps):
            trainer.step(X[k : k + BATCH], DATA.y[k : k + BATCH])
            if k % 20 == 0:
                trainer.network.predict(NOISE, backend="cuda")

    work(2, 30)
    before = free_bytes()
    work(-(-1000 // STEPS_PER_EPOCH), 100)
    # The driver takes memory from the card 2 MiB at a time.
    assert free_bytes() >= before - (2 << 20)
    assert trainer.steps >= 1000


if __name__ == "__main__":
    child(*sys.argv[1:])


@pytest.mark.parametrize("optimizer", [mg.SGD(0.01), mg.Adam(0.01)], ids=["no slots", "slots"])
def test_a_prefetched_state_is_what_is_read_until_something_changes_it(optimizer: Any) -> None:
    network = mg.Network([mg.Dense(20, 64, activation="relu"), mg.Dense(64, 3)], seed=1)
    trainer = mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=16, backend="cuda")
    random = np.random.default_rng(1)
    data = mg.Dataset(random.normal(size=(64, 20)).astype(np.float32), random.integers(0, 3, 64))
    trainer.fit(data, 1, progress=False)
    program = trainer._engine.program
    assert program is not None
    plain = program.read()
    program.prefetch()
    early = program.read()
    for name in ("parameters", "slots", "statistics"):
        np.testing.assert_array_equal(getattr(early, name), getattr(plain, name))
    program.prefetch()
    trainer.fit(data, 1, progress=False)  # waits for the copy, and makes it stale
    late = program.read()
    assert (late.parameters != plain.parameters).any()
    program.load(plain)
    program.prefetch()
    np.testing.assert_array_equal(program.read().parameters, plain.parameters)


@pytest.mark.parametrize("is_persistent", [True, False])
def test_digits_beyond_float32_reach_standardize(is_persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of a training on inputs that were standardized in float64 beforehand, and rounded once."""
    monkeypatch.setattr(thresholds, "PERSISTENT_IS_USED", is_persistent)
    x = 1e9 + DRAW.normal(size=(ROWS, N_IN))
    layers = [mg.Standardize(N_IN), mg.Dense(N_IN, HIDDEN, "tanh"), mg.Dense(HIDDEN, CLASSES)]
    ours, given = (mg.Network(layers, seed=3) for _ in range(2))
    ours.adapt(x)
    given.adapted = True  # by a mean of 0 and a scale of 1
    mean, scale = np.split(ours.flat_statistics(), 2)
    found: list[Any] = []
    for net, inputs in ((ours, x), (given, ((x - mean) / scale).astype(np.float32))):
        trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Adam(0.003), batch_size=BATCH, backend="cuda")
        trainer.fit((inputs, DATA.y), 2, progress=False)
        found.append((trainer.evaluate((inputs, DATA.y)), trainer.histograms(8, of=("activations", "gradients"))))
    (loss, counted), (expected, as_counted) = found
    assert loss == expected
    for name, (counts, edges) in counted.items():
        np.testing.assert_array_equal(counts, as_counted[name][0])
        np.testing.assert_array_equal(edges, as_counted[name][1])
    np.testing.assert_array_equal(ours.flat_parameters(), given.flat_parameters())
