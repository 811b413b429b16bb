"""Which steps on a card count as finished when an exception comes between, on stand-ins for the card's parts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends import Sampling, StepLog
from mlpgpu.backends.cpu.program import CpuProgram
from mlpgpu.backends.cuda.run.steps import TURNS
from mlpgpu.backends.cuda.run.training import Training
from mlpgpu.errors import BackendError, TornStateError

ROWS, BATCH = 40, 8  # epochs of five steps


def make_training(**parts: Any) -> tuple[Training, list[int]]:
    """Steps whose losses are their numbers; ``parts`` raise in place of those that do nothing."""
    first, turn, losses = [0], [0], np.empty((TURNS, 16, 2))

    def nothing(*arguments: Any) -> None:
        pass

    def put(count: int, before_last: None) -> None:
        losses[turn[0], :count] = np.arange(first[0], first[0] + count)[:, np.newaxis]

    def begin_at(step: int, batch: int) -> None:
        first[0] = step

    def take_turn() -> None:
        turn[0] = (turn[0] + 1) % TURNS

    training: Any = object.__new__(Training)
    downloaded = SimpleNamespace(synchronize=parts.get("synchronize", nothing))
    numbers = SimpleNamespace(
        take_turn=take_turn, staged_rates=lambda table: table,
        download_losses=lambda count: (losses[turn[0], :count], downloaded),
    )  # fmt: skip
    training._workspace = SimpleNamespace(device=contextlib.nullcontext(), numbers=numbers)
    training._state = SimpleNamespace(end_prefetch=nothing, were_set=False)
    training.sampling, training._optimizer = Sampling(ROWS, BATCH, seed=1), mg.SGD(0.1)
    training._orders = SimpleNamespace(begin=nothing, prepare=parts.get("orders", nothing))
    training.data = SimpleNamespace(reach=lambda row: ROWS, prepare=parts.get("data", nothing), reads_to_finish=nothing)
    training.binder, training._exchange = SimpleNamespace(set_constant=nothing), None
    training._stream = SimpleNamespace()
    training.begin_at, training.put = begin_at, parts.get("put", put)
    return training, first


class Once:
    """Raises at its call of this number, counted from 1."""

    def __init__(self, call: int, error: BaseException) -> None:
        self.left, self.error = call, error

    def __call__(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def run(training: Training, steps: int = 7) -> StepLog:
    log = StepLog(steps)
    with contextlib.suppress(KeyboardInterrupt, BackendError):
        training.run(0, np.full(steps, 0.1), log)
    return log


def test_a_run_to_its_end() -> None:
    log = run(make_training()[0])
    assert (log.finished, log.is_whole) == (7, True)
    assert log.sums[:, 0].tolist() == list(range(7))


@pytest.mark.parametrize(("part", "call", "finished"), [("data", 1, 5), ("data", 2, 7), ("orders", 1, 5)])
def test_steps_that_were_put_are_waited_for(part: str, call: int, finished: int) -> None:
    """The exception comes while the card computes the steps of an epoch, or those after it."""
    log = run(make_training(**{part: Once(call, KeyboardInterrupt())})[0])
    assert not log.is_whole
    for _ in range(2):
        log.finish()
        assert (log.finished, log.is_whole) == (finished, True)
        assert log.sums[:finished, 0].tolist() == list(range(finished))


def test_ctrl_c_as_the_wait_ends_loses_nothing() -> None:
    log = run(make_training(synchronize=Once(1, KeyboardInterrupt()))[0])
    assert (log.finished, log.is_whole) == (0, False)
    log.finish()
    assert (log.finished, log.is_whole) == (7, True)  # the card has the second epoch's steps already
    assert log.sums[:, 0].tolist() == list(range(7))


@pytest.mark.parametrize(("call", "finished"), [(1, 0), (2, 5), (3, 10)])
def test_of_steps_that_were_being_put_nobody_knows(call: int, finished: int) -> None:
    """Those put before them are finished all the same."""
    training, _ = make_training()
    put, raises = training.put, Once(call, KeyboardInterrupt())

    def put_or_raise(count: int, before_last: None) -> None:
        raises()
        put(count, before_last)

    vars(training)["put"] = put_or_raise
    log = run(training, 12)
    log.finish()
    assert (log.finished, log.is_whole) == (finished, False)
    assert log.sums[:finished, 0].tolist() == list(range(finished))


def test_a_card_that_is_lost_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.zeros((BATCH, 2)), np.zeros(BATCH, int)
    trainer = mg.Trainer(mg.Network([mg.Dense(2, 2)], seed=1), "softmax_cross_entropy", batch_size=BATCH)
    trainer.step(x, y)
    trainer.save(tmp_path / "run.h5")

    def lose(self: CpuProgram, first_step: int, rates: np.ndarray, log: StepLog) -> np.ndarray:
        def wait() -> np.ndarray:
            raise BackendError("GPU 0", expected="kernels that run to their end", got="a fault")

        log.begin()
        log.put(wait)
        log.finish()
        return log.sums

    monkeypatch.setattr(CpuProgram, "run", lose)
    with pytest.raises(BackendError, match="a fault"):
        trainer.step(x, y)
    for use in (lambda: trainer.step(x, y), lambda: trainer.save(tmp_path / "run.h5")):
        with pytest.raises(TornStateError, match=r"after 1 finished steps.*goes on from step 1"):
            use()
    assert mg.Trainer.resume(tmp_path / "run.h5").steps == trainer.steps == 1
