"""Optimizers: each rule against its formula in plain Python, and what all of them have in common."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import EPS, EPS32

import mlpgpu as mg
from mlpgpu import names
from mlpgpu.errors import ConfigurationError, DtypeError, UnknownNameError
from mlpgpu.optimizers import OPTIMIZERS, SGD, Adam, AdamW, Momentum, Nesterov, Optimizer, RMSprop, as_optimizer
from mlpgpu.schedules import CosineDecay

EACH = pytest.mark.parametrize("kind", list(OPTIMIZERS.values()), ids=list(OPTIMIZERS))


class Descent:
    """Parameters (n,) that an optimizer moves, step by step, as a backend does."""

    def __init__(self, optimizer: Optimizer, start: np.ndarray) -> None:
        self.optimizer, self.w = optimizer, start.copy()
        self.slots = list(np.zeros((len(optimizer.slots), *start.shape), start.dtype))
        self.steps = 0

    def step(self, gradient: np.ndarray, rate: float) -> np.ndarray:
        (row,) = self.optimizer.table(self.steps, np.array([rate])).tolist()
        self.optimizer.update(self.w, gradient.copy(), self.slots, row, np.full_like(self.w, np.nan))
        self.steps += 1
        return self.w.copy()


# --- each rule for a single parameter, with its own numbers rather than the defaults ---


def sgd(w: float, gradients: list[float], rates: list[float]) -> Iterator[float]:
    for g, rate in zip(gradients, rates, strict=True):
        yield (w := w - rate * g)


def momentum(w: float, gradients: list[float], rates: list[float]) -> Iterator[float]:
    v = 0.0
    for g, rate in zip(gradients, rates, strict=True):
        v = rate * g + 0.8 * v
        yield (w := w - v)


def nesterov(w: float, gradients: list[float], rates: list[float]) -> Iterator[float]:
    v = 0.0
    for g, rate in zip(gradients, rates, strict=True):
        v = rate * g + 0.8 * v
        yield (w := w - (rate * g + 0.8 * v))


def rmsprop(w: float, gradients: list[float], rates: list[float]) -> Iterator[float]:
    s = 0.0
    for g, rate in zip(gradients, rates, strict=True):
        s = 0.7 * s + 0.3 * g * g
        yield (w := w - rate * g / (math.sqrt(s) + 1e-3))


def adam(w: float, gradients: list[float], rates: list[float], decay: float = 0.0) -> Iterator[float]:
    m = v = 0.0
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        w *= 1.0 - rate * decay
        m = 0.8 * m + 0.2 * g
        v = 0.95 * v + 0.05 * g * g
        yield (w := w - rate * (m / (1.0 - 0.8**t)) / (math.sqrt(v / (1.0 - 0.95**t)) + 1e-3))


def adamw(w: float, gradients: list[float], rates: list[float]) -> Iterator[float]:
    return adam(w, gradients, rates, decay=0.1)


RULES = [
    (SGD(1.0), sgd),
    (Momentum(1.0, momentum=0.8), momentum),
    (Nesterov(1.0, momentum=0.8), nesterov),
    (RMSprop(1.0, rho=0.7, epsilon=1e-3), rmsprop),
    (Adam(1.0, beta1=0.8, beta2=0.95, epsilon=1e-3), adam),
    (AdamW(1.0, beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=0.1), adamw),
]


@pytest.mark.parametrize(("optimizer", "rule"), RULES, ids=[type(optimizer).__name__ for optimizer, _ in RULES])
@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, EPS32), (np.float64, EPS)])
def test_rule(optimizer: Optimizer, rule: Callable[..., Iterator[float]], dtype: type, eps: float) -> None:
    random = np.random.default_rng(1)
    steps = 20
    start = random.normal(size=3).astype(dtype)
    gradients = random.normal(size=(steps, 3)).astype(dtype)
    rates = random.uniform(0.01, 0.1, steps)
    descent = Descent(optimizer, start)
    moved = np.array([descent.step(g, rate) for g, rate in zip(gradients, rates, strict=True)])
    expected = [list(rule(w, gradients[:, i].tolist(), rates.tolist())) for i, w in enumerate(start.tolist())]
    # A step rounds some 16 times, numbers of the size of a parameter at most; parameters move by less than 5.
    np.testing.assert_allclose(moved.T, expected, rtol=0, atol=16 * steps * eps * 5.0)


@EACH
def test_slots_begin_and_end_as_they_should(kind: type[Optimizer]) -> None:
    descent = Descent(kind(0.1), np.ones(4))
    descent.step(np.full(4, 0.5), 0.1)
    assert all((slot != 0.0).all() for slot in descent.slots)
    assert descent.optimizer.table(0, np.array([0.1, 0.2])).shape == (2, len(kind.columns))
    assert (descent.optimizer.table(0, np.array([0.1, 0.2]))[:, kind.columns.index("rate")] == [0.1, 0.2]).all()


@EACH
def test_table_does_not_depend_on_how_steps_are_grouped(kind: type[Optimizer]) -> None:
    optimizer, rates = kind(0.1), np.linspace(0.1, 0.2, 100)
    whole = optimizer.table(5, rates)
    pieces = [optimizer.table(5 + start, rates[start : start + size]) for start, size in ((0, 1), (1, 60), (61, 39))]
    assert (np.concatenate(pieces) == whole).all()


@EACH
def test_blocks_give_the_bits_of_one(kind: type[Optimizer]) -> None:
    random = np.random.default_rng(2)
    start, gradients = random.normal(size=100), random.normal(size=(5, 100))
    optimizer = kind(0.1, l1=0.01, l2=0.02)
    whole = Descent(optimizer, start)
    blocks = [slice(0, 1), slice(1, 64), slice(64, 100)]
    parts = [Descent(optimizer, start[block]) for block in blocks]
    for g in gradients:
        moved = whole.step(g, 0.1)
        assert (np.concatenate([d.step(g[b], 0.1) for d, b in zip(parts, blocks, strict=True)]) == moved).all()


@EACH
def test_penalties_add_to_the_gradient(kind: type[Optimizer]) -> None:
    random = np.random.default_rng(3)
    penalized = Descent(kind(0.1, l1=0.3, l2=0.2), np.array([-1.5, 0.0, 2.0]))
    plain = Descent(kind(0.1), penalized.w)
    for g in random.normal(size=(4, 3)):
        gradient = g + 0.2 * plain.w + 0.3 * np.sign(plain.w)
        assert (penalized.step(g, 0.1) == plain.step(gradient, 0.1)).all()


@EACH
def test_reaches_the_bottom_of_a_parabola(kind: type[Optimizer]) -> None:
    # ½ Σ c w², whose minimum at 0 no decay moves; a falling rate ends the steps of a fixed size.
    c = np.array([1.0, 3.0, 10.0])
    descent = Descent(kind(0.1), np.array([1.0, -2.0, 0.5]))
    for rate in 0.05 * (1.0 + np.cos(np.linspace(0.0, np.pi, 1000))):
        descent.step(c * descent.w, rate)
    assert np.abs(descent.w).max() < 1e-3


@EACH
def test_walks_down_rosenbrocks_valley(kind: type[Optimizer]) -> None:
    def value(x: float, y: float) -> float:
        return (1.0 - x) ** 2 + 100.0 * (y - x * x) ** 2

    descent = Descent(kind(0.001), np.array([-1.2, 1.0]))
    for _ in range(3000):
        x, y = descent.w.tolist()
        descent.step(np.array([2.0 * (x - 1.0) - 400.0 * x * (y - x * x), 200.0 * (y - x * x)]), 0.001)
    # The start has 24.2, and the valley's floor beside it 4.1: every rule finds it and goes on along it.
    assert value(*descent.w) < 4.0


def test_momentum_with_a_steady_rate_is_a_rate_times_summed_gradients() -> None:
    # PyTorch's form: buf ← g + α buf, w ← w - η buf.
    descent, w, buffer = Descent(Momentum(0.1, momentum=0.5), np.ones(1)), 1.0, 0.0
    for g in (1.0, -2.0, 0.5):
        buffer = g + 0.5 * buffer
        w -= 0.1 * buffer
        assert descent.step(np.array([g]), 0.1) == pytest.approx(w, rel=8 * EPS)


@EACH
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rate": -0.1}, ConfigurationError),
        ({"rate": float("nan")}, ConfigurationError),
        ({"rate": "fast"}, DtypeError),
        ({"rate": 0.1, "l1": -1.0}, ConfigurationError),
        ({"rate": 0.1, "l2": float("inf")}, ConfigurationError),
        ({"rate": 0.1, "clip_norm": 0.0}, ConfigurationError),
        ({"rate": 0.1, "clip_norm": True}, DtypeError),
    ],
)
def test_bad_arguments(kind: type[Optimizer], arguments: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Momentum, "momentum", 1.0),
        (Nesterov, "momentum", -0.1),
        (RMSprop, "rho", 1.0),
        (RMSprop, "epsilon", 0.0),
        (Adam, "beta1", 1.0),
        (Adam, "beta2", -0.5),
        (AdamW, "epsilon", 0.0),
        (AdamW, "weight_decay", -1.0),
    ],
)
def test_numbers_out_of_range(kind: type[Optimizer], name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} {name}"):
        kind(0.1, **{name: value})


@EACH
def test_takes_a_schedule(kind: type[Optimizer]) -> None:
    schedule = CosineDecay(0.1, steps=10)
    assert kind(schedule).rate is schedule


# --- names and default rates ---


@EACH
def test_a_name_makes_the_optimizer_with_its_default_rate(kind: type[Optimizer]) -> None:
    for name in (kind.__name__, kind.__name__.lower()):
        assert as_optimizer(name) == kind()
    assert isinstance(kind().rate, float) and 0.0 < kind().rate <= 0.1
    assert kind(0.5).rate == kind(rate=0.5).rate == 0.5
    optimizer = kind(0.5)
    assert as_optimizer(optimizer) is optimizer


def test_every_name_that_a_type_checker_takes_makes_an_optimizer() -> None:
    made = {name: type(as_optimizer(name)) for name in typing.get_args(names.OptimizerName)}
    assert set(made.values()) == set(OPTIMIZERS.values())
    assert (made["nag"], made["adam_w"], made["rms_prop"], made["sgd_momentum"]) == (Nesterov, AdamW, RMSprop, Momentum)
    argument = typing.get_type_hints(mg.Trainer.__init__)["optimizer"]
    assert set(typing.get_args(argument)) == {Optimizer, names.OptimizerName}


@pytest.mark.parametrize(("name", "hint"), [("adma", "adam"), ("nadam", "adam"), ("RMSProp", "rmsprop")])
def test_near_names_are_hinted_at(name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{hint}'"):
        as_optimizer(name)  # type: ignore[arg-type]


def test_a_trainer_takes_a_name_or_none_at_all(tmp_path: Path) -> None:
    def trainer(*optimizer: Any) -> mg.Trainer:
        network = mg.Network([mg.Dense(4, 5, "tanh"), mg.Dense(5, 1)], seed=3)
        return mg.Trainer(network, "mean_squared_error", *optimizer, backend="cpu")

    x = np.random.default_rng(4).standard_normal((40, 4)).astype(np.float32)
    runs = {"none": trainer(), "name": trainer("adam"), "object": trainer(Adam())}
    assert all(run.optimizer == Adam() for run in runs.values())
    for run, epochs in zip(runs.values(), (4, 2, 2), strict=True):
        run.fit((x, x[:, 0]), epochs, progress=False)
    runs["name"].save(tmp_path / "run.h5")
    resumed = mg.Trainer.resume(tmp_path / "run.h5")
    bits = {name: run.network.flat_parameters().tobytes() for name, run in runs.items()}
    assert resumed.optimizer == Adam() and bits["name"] == bits["object"] != bits["none"]
    resumed.fit((x, x[:, 0]), 4, progress=False)
    assert resumed.network.flat_parameters().tobytes() == bits["none"]
