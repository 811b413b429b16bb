"""Schedules: rates by their formulas, the same however steps are grouped and however lengths are given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from helpers import EPS

from mlpgpu.errors import ConfigurationError, DtypeError
from mlpgpu.schedules import (
    SCHEDULES,
    Clock,
    Constant,
    CosineDecay,
    ExponentialDecay,
    OneCycle,
    Plateau,
    ReduceOnPlateau,
    Schedule,
    StepDecay,
    WarmUp,
    as_schedule,
)

EACH = pytest.mark.parametrize("kind", list(SCHEDULES.values()), ids=list(SCHEDULES))
HAS_LENGTH = {name: kind for name, kind in SCHEDULES.items() if "steps" in kind.__dataclass_fields__}
EACH_LENGTH = pytest.mark.parametrize("kind", list(HAS_LENGTH.values()), ids=list(HAS_LENGTH))

STEPS_PER_EPOCH = 7


def example(kind: type[Schedule], **length: Any) -> Schedule:
    """A schedule of this kind that begins near 0.1."""
    values = {"factor": 0.5}
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    return kind(**{name: values.get(name, 0.1) for name in required}, **(length if kind in HAS_LENGTH.values() else {}))


def clock(first: int, count: int) -> Clock:
    """The time of steps from ``first`` on, as a fit counts it."""
    step = np.arange(first, first + count)
    epochs, batch = np.divmod(step, STEPS_PER_EPOCH)
    return Clock(step, epochs + batch / STEPS_PER_EPOCH, 1.0 / STEPS_PER_EPOCH, factor=0.5)


def rates(schedule: Schedule, *steps: int) -> list[float]:
    return schedule.rates(Clock(np.array(steps))).tolist()


def test_constant() -> None:
    assert rates(Constant(0.3), 0, 1, 1000) == [0.3, 0.3, 0.3]


def test_step_decay() -> None:
    assert rates(StepDecay(0.8, 0.5, steps=10), 0, 9, 10, 19, 20) == [0.8, 0.8, 0.4, 0.4, 0.2]


def test_exponential_decay() -> None:
    decay = ExponentialDecay(0.8, 0.25, steps=10)
    np.testing.assert_allclose(rates(decay, 0, 5, 10, 20), [0.8, 0.4, 0.2, 0.05], rtol=8 * EPS)


def test_cosine_decay() -> None:
    decay = CosineDecay(0.5, steps=12, final=0.1)
    expected = [0.5, 0.1 + 0.4 * 0.75, 0.3, 0.1 + 0.4 * 0.25, 0.1, 0.1]  # cos 60° = ½
    np.testing.assert_allclose(rates(decay, 0, 4, 6, 8, 12, 99), expected, rtol=8 * EPS)


def test_warm_up_rises_in_line_and_runs_beside_its_schedule() -> None:
    np.testing.assert_allclose(rates(WarmUp(0.4, steps=4), 0, 1, 2, 3, 4, 50), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    under = StepDecay(0.8, 0.5, steps=2)
    np.testing.assert_allclose(rates(WarmUp(under, steps=4), 0, 1, 2, 3, 4), [0.2, 0.4, 0.3, 0.4, 0.2])


def test_one_cycle() -> None:
    cycle = OneCycle(1.0, steps=100, rise=0.4, start_divisor=10.0, final_divisor=100.0)
    # Halfway up and down lie the means of the ends; half a cosine has passed (1 - cos(π/4)) / 2 after a quarter.
    quarter = 0.5 * (1.0 - math.sqrt(0.5))
    expected = [
        *(0.1, 0.1 + 0.9 * quarter, (0.1 + 1.0) / 2.0, 1.0 - 0.9 * quarter, 1.0),
        *(1.0 - 0.99 * quarter, (1.0 + 0.01) / 2.0, 0.01 + 0.99 * quarter, 0.01, 0.01),
    ]
    # Amid terms of order one, 16 roundings.
    np.testing.assert_allclose(rates(cycle, 0, 10, 20, 30, 40, 55, 70, 85, 100, 500), expected, rtol=0, atol=16 * EPS)


def test_reduce_on_plateau_counts_epochs_without_improvement() -> None:
    schedule = ReduceOnPlateau(0.4, factor=0.5, patience=2, min_delta=0.1, least=0.15)
    memory, seen = Plateau(), []
    for value in (1.0, 0.95, 0.85, 0.8, 0.8, 0.8, 0.8):  # 0.95 and 0.8 improve by too little
        memory = schedule.observe(memory, value)
        seen.append((memory.best, memory.wait, memory.factor))
    assert seen == [(1.0, 0, 1.0), (1.0, 1, 1.0), (0.85, 0, 1.0), (0.85, 1, 1.0), (0.85, 0, 0.5), (0.85, 1, 0.5),
                    (0.85, 0, 0.25)]  # fmt: skip
    rates = [schedule.rates(Clock(np.arange(3), factor=factor)).tolist() for factor in (1.0, 0.5, 0.25)]
    assert rates == [[0.4] * 3, [0.2] * 3, [0.15] * 3]


def test_reduce_on_plateau_knows_which_way_is_better() -> None:
    schedule = ReduceOnPlateau(0.1, patience=1, monitor="validation_accuracy")
    memory = schedule.observe(schedule.observe(Plateau(), 0.5), 0.6)
    assert memory == Plateau(0.6, 0, 1.0)
    assert schedule.observe(memory, 0.5).factor == pytest.approx(0.1)


@EACH
def test_rates_do_not_depend_on_how_steps_are_grouped(kind: type[Schedule]) -> None:
    for length in ({"steps": 30}, {"epochs": 4.5}):
        schedule = example(kind, **length)
        whole = schedule.rates(clock(0, 100))
        assert whole.shape == (100,) and whole.dtype == np.float64
        pieces = [schedule.rates(clock(start, size)) for start, size in ((0, 1), (1, 2), (3, 64), (67, 33))]
        assert (np.concatenate(pieces) == whole).all()


@EACH_LENGTH
def test_epochs_are_steps_times_their_number(kind: type[Schedule]) -> None:
    in_steps, in_epochs = example(kind, steps=3 * STEPS_PER_EPOCH), example(kind, epochs=3)
    # Progress of up to 5 lengths rounds at its fourth digit from the end; cosines and powers follow it.
    np.testing.assert_allclose(in_steps.rates(clock(0, 100)), in_epochs.rates(clock(0, 100)), rtol=64 * EPS)


@EACH
def test_rates_are_never_negative_and_move_where_they_should(kind: type[Schedule]) -> None:
    values = example(kind, steps=20).rates(clock(0, 60))
    assert (values >= 0.0).all() and values.max() <= 0.1
    assert (len(set(values)) > 1) == (kind in HAS_LENGTH.values())


@EACH_LENGTH
@pytest.mark.parametrize(
    ("length", "error"),
    [
        ({}, ConfigurationError),
        ({"steps": 3, "epochs": 1}, ConfigurationError),
        ({"steps": 0}, ConfigurationError),
        ({"steps": 1.5}, DtypeError),
        ({"epochs": 0.0}, ConfigurationError),
        ({"epochs": float("inf")}, ConfigurationError),
    ],
)
def test_bad_length(kind: type[Schedule], length: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=kind.__name__):
        example(kind, **length)


@EACH_LENGTH
def test_epochs_need_a_fit(kind: type[Schedule]) -> None:
    with pytest.raises(ConfigurationError, match=r"steps="):
        example(kind, epochs=2).rates(Clock(np.arange(3)))


@EACH
def test_negative_rate(kind: type[Schedule]) -> None:
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(ConfigurationError):
        dataclasses.replace(example(kind, steps=3), **{name: -0.1})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (StepDecay, "factor", 0.0),
        (ExponentialDecay, "factor", -1.0),
        (CosineDecay, "final", -0.1),
        (OneCycle, "rise", 1.0),
        (OneCycle, "start_divisor", 0.0),
        (OneCycle, "final_divisor", 0.0),
        (ReduceOnPlateau, "factor", 1.0),
        (ReduceOnPlateau, "patience", 0),
        (ReduceOnPlateau, "min_delta", -1.0),
        (ReduceOnPlateau, "least", -1.0),
    ],
)
def test_numbers_out_of_range(kind: type[Schedule], name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} {name}"):
        dataclasses.replace(example(kind, steps=3), **{name: value})


def test_warm_up_of_a_schedule_with_memory() -> None:
    with pytest.raises(ConfigurationError, match="without memory"):
        WarmUp(ReduceOnPlateau(0.1), steps=3)


def test_as_schedule() -> None:
    schedule = Constant(0.1)
    assert as_schedule(schedule) is schedule
    assert as_schedule(0.1) == schedule
    with pytest.raises(DtypeError, match="learning rate"):
        as_schedule("0.1")
