"""Networks that train inside one kernel: against the float64 oracle as one kernel per operation is, and bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import EPS32
from test_plans import Case, check_both, train

import mlpgpu as mg
from mlpgpu import Dense, Dropout, Standardize
from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda.kernels import SUMS_OF_TERMS
from mlpgpu.backends.cuda.persistent.kernel import FewRowsKernel, PersistentKernel
from mlpgpu.backends.cuda.run import program
from mlpgpu.backends.cuda.run.data import pieces
from mlpgpu.backends.cuda.run.program import CudaProgram
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.layers import Layer
from mlpgpu.losses import LOSSES
from mlpgpu.optimizers import OPTIMIZERS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_once")]

PLANS = 30
LOSS_KINDS = [
    (name, kind)
    for name, loss in LOSSES.items()
    for kind in loss.targets
    if name in (*SUMS_OF_TERMS, "softmax_cross_entropy")
]


def cycled(options: Any, seed: int, offset: int = 0) -> Any:
    return list(options)[(seed + offset) % len(options)]


def random_case(seed: int, *, widest: int = 300, most_rows: int = 200) -> Case:
    """One to five layers, of so many units at most, rows a batch at most, and a shorter last batch."""
    random = np.random.default_rng(seed)
    widths = [int(n) for n in random.integers(1, widest + 1, size=2 + seed % 5)]
    layers: list[Layer] = []
    for place, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
        layers.append(Dense(n_in, n_out, cycled(ACTIVATIONS, seed, place), bias=bool(random.integers(4))))
        if random.integers(4) == 0 and place < len(widths) - 2:
            layers.append(Dropout(0.25))
    layers[-1] = Dense(*widths[-2:])
    if seed % 4 == 0:
        layers.insert(0, Standardize(widths[0]))
    if seed % 5 == 0:
        layers.insert(seed % 4 == 0, Dropout(0.2))
    loss, kind = cycled(LOSS_KINDS, seed)
    if LOSSES[loss].output == "identity" and seed % 2:
        layers.append(Standardize(widths[-1]))
    batch_size = int(random.integers(1, most_rows + 1))
    return Case(
        tuple(layers),
        loss,
        kind,
        cycled(OPTIMIZERS.values(), seed)(0.01, l1=0.001 * (seed % 2), l2=0.01 * (seed % 3), alpha=seed // 2 % 3 * 0.5),
        rows=2 * batch_size + max(1, batch_size // 3),
        batch_size=batch_size,
        source=cycled(("float32", "uint8", "float64"), seed),
        weighted=bool(random.integers(2)),
        class_weight="balanced" if kind == "index" and seed % 2 else None,
    )


def is_persistent(case: Case) -> bool:
    """On a card such as an H200; what does not fit there is not what this file tests."""
    plan = mg.Network(case.layers, seed=5).lower(
        capacity=case.batch_size, loss=case.loss, target_kind=case.kind, optimizer=case.optimizer
    )
    return isinstance(choose_kernel(plan, multiprocessors=132, shared_bytes=227 << 10, arch="sm_90a"), PersistentKernel)


SEEDS = list(itertools.islice((seed for seed in itertools.count() if is_persistent(random_case(seed))), PLANS))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside one kernel and launch by launch: both stay within the bound of the float64 oracle."""
    chosen: list[object] = []
    choose = program.choose_kernel
    monkeypatch.setattr(program, "choose_kernel", lambda *a, **k: chosen.append(choose(*a, **k)) or chosen[-1])
    check_both(random_case(seed))
    assert any(isinstance(kernel, PersistentKernel) for kernel in chosen)


@pytest.mark.parametrize(("seed", "most_copied"), [(3, thresholds.MOST_REPLICATED), (4, 0), (7, 0)])
def test_small_plans(seed: int, most_copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that sanitize.sh watches: with copies of inner layers, and with all layers in tiles."""
    monkeypatch.setattr(thresholds, "MOST_REPLICATED", most_copied)
    case = random_case(seed, widest=20, most_rows=12)
    assert is_persistent(case)
    check_both(case)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Plans of few rows train by tiles of all weights, also small ones; returns what is chosen."""
    chosen: list[object] = []
    choose = program.choose_kernel
    monkeypatch.setattr(thresholds, "FEW_ROWS_LEAST_WORDS", 0)
    monkeypatch.setattr(program, "choose_kernel", lambda *a, **k: chosen.append(choose(*a, **k)) or chosen[-1])
    return chosen


@pytest.mark.parametrize("seed", range(24))
def test_plans_of_few_rows(seed: int, few_rows: list[object]) -> None:
    check_both(random_case(seed, widest=700, most_rows=8))
    assert any(isinstance(kernel, FewRowsKernel) for kernel in few_rows)


@pytest.mark.parametrize("seed", [3, 4, 12])
def test_small_plans_of_few_rows(seed: int, few_rows: list[object]) -> None:
    """Those that sanitize.sh watches."""
    check_both(random_case(seed, widest=20, most_rows=8))
    assert any(isinstance(kernel, FewRowsKernel) for kernel in few_rows)


@pytest.mark.parametrize("seed", [5, 6])
def test_bits_of_few_rows_repeat(seed: int, few_rows: list[object]) -> None:
    case = random_case(seed, widest=700, most_rows=8)
    first, *others = (train(case, backend="cuda") for _ in range(3))
    for other in others:
        assert all((other[name] == first[name]).all() for name in first)
    assert isinstance(few_rows[0], FewRowsKernel)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 5][::5])
def test_frozen_layers_stay_as_they_are(seed: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second dense layer is frozen, of networks of two and more; once with and once without the first."""
    case = random_case(seed)
    dense = [place for place, layer in enumerate(case.layers) if isinstance(layer, Dense)]
    layers = [replace(layer, trainable=place not in dense[first::2]) if isinstance(layer, Dense) else layer
              for place, layer in enumerate(case.layers)]  # fmt: skip
    frozen = replace(case, layers=tuple(layers))
    assert is_persistent(frozen)
    check_both(frozen)


@pytest.mark.parametrize("seed", SEEDS[::6])
def test_the_same_plans_launch_by_launch(seed: int, launches: None) -> None:
    check_both(random_case(seed))


@pytest.mark.parametrize("seed", SEEDS[::6])
def test_bits_repeat(seed: int) -> None:
    first, *others = (train(random_case(seed), backend="cuda") for _ in range(3))
    for other in others:
        assert all((other[name] == first[name]).all() for name in first)


# --- runs ---

DRAW = np.random.default_rng(5)
X = DRAW.normal(size=(700, 20)).astype(np.float32)
DATA = mg.Dataset(X, (X @ DRAW.normal(size=(20, 5))).argmax(axis=1), DRAW.uniform(0.5, 2.0, len(X)))


def new_trainer(**options: Any) -> mg.Trainer:
    layers = [mg.Dense(20, 33, "tanh"), mg.Dropout(0.2), mg.Dense(33, 5)]
    options = {"optimizer": mg.Adam(0.003), "batch_size": 16, **options}
    return mg.Trainer(mg.Network(layers, seed=3), "softmax_cross_entropy", backend="cuda", **options)


def fit(trainer: mg.Trainer, *callbacks: Any, epochs: int = 4, **options: Any) -> mg.Trainer:
    trainer.fit(DATA, epochs, callbacks=callbacks, progress=False, **options)
    assert isinstance(trainer._engine.program, CudaProgram) and isinstance(
        trainer._engine.program.persistent, PersistentKernel
    )
    return trainer


def flat(trainer: mg.Trainer) -> np.ndarray:
    return trainer.network.flat_parameters()


@pytest.fixture(scope="module")
def unbroken(compiled_once: None) -> mg.Trainer:
    return fit(new_trainer())


class Look(mg.Callback):
    every_steps = 1

    def step_end(self, trainer: Any) -> None:
        pass


def assert_same_run(trainer: mg.Trainer, expected: mg.Trainer) -> None:
    np.testing.assert_array_equal(flat(trainer), flat(expected))
    assert list(trainer.history["loss"]) == list(expected.history["loss"])


def test_a_launch_for_each_step_changes_no_bit(unbroken: mg.Trainer) -> None:
    assert_same_run(fit(new_trainer(), Look()), unbroken)


def test_a_run_that_is_resumed_changes_no_bit(unbroken: mg.Trainer, tmp_path: Path) -> None:
    class Save(mg.Callback):
        every_steps = 59  # in the middle of the second epoch

        def step_end(self, trainer: Any) -> None:
            if trainer.steps == self.every_steps:
                trainer.save(tmp_path / "run.h5")

    assert_same_run(fit(new_trainer(), Save()), unbroken)
    assert_same_run(fit(mg.Trainer.resume(tmp_path / "run.h5")), unbroken)


@pytest.mark.parametrize("memory_share", [0.5, 0.0])
def test_pieces_of_the_data_change_no_bit(
    memory_share: float, unbroken: mg.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_000)
    assert_same_run(fit(new_trainer(memory_share=memory_share)), unbroken)


def test_targets_without_a_texture_change_no_bit(
    device: Device, unbroken: mg.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "most_texels", 1)
    assert_same_run(fit(new_trainer()), unbroken)


def test_sequence_numbers_that_run_out_change_no_bit(unbroken: mg.Trainer) -> None:
    trainer = new_trainer()
    fit(trainer, epochs=1)
    assert isinstance(trainer._engine.program, CudaProgram) and trainer._engine.program.persistent_steps is not None
    trainer._engine.program.persistent_steps.sequence = 2**32 - 60  # the next epoch has 44 steps
    assert_same_run(fit(trainer, epochs=3), unbroken)


def test_evaluations_and_snapshots_change_no_bit(unbroken: mg.Trainer) -> None:
    class Keep(mg.Callback):
        def epoch_end(self, trainer: Any, record: dict[str, float]) -> None:
            trainer.evaluate(DATA)
            trainer.keep()

    trainer = fit(new_trainer(), Keep(), validation=DATA)
    np.testing.assert_array_equal(flat(trainer), flat(unbroken))
    trainer.fit(DATA, 1, progress=False)
    assert (flat(trainer) != flat(unbroken)).any()
    trainer.restore_kept()
    np.testing.assert_array_equal(flat(trainer), flat(unbroken))


def test_both_ways_have_the_same_curve(unbroken: mg.Trainer, launches: None) -> None:
    other = new_trainer()
    other.fit(DATA, 4, progress=False)
    # As in test_runs.py: a step rounds each of the terms of its products, and hands on what was before it; twice.
    step_error = EPS32 * (16 + 2 * (20 + 33 + 5))
    np.testing.assert_allclose(other.history["loss"], unbroken.history["loss"], rtol=2 * step_error * other.steps)
