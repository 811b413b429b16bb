"""A trainer that is used in any order, beside a model of it: one step of the program after the other."""

from __future__ import annotations

import copy
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import mlpgpu as mg
from mlpgpu import storage
from mlpgpu.backends import Sampling, State, get_backend
from mlpgpu.errors import ConfigurationError, DataMismatchError
from mlpgpu.schedules import Clock, Schedule, as_schedule
from mlpgpu.training import interrupt

N_IN, N_OUT, BATCH, SEED = 4, 3, 8, 6
DRAW = np.random.default_rng(11)
SETS = {
    name: mg.Dataset(DRAW.standard_normal((rows, N_IN)).astype(np.float32), DRAW.integers(0, N_OUT, rows))
    for name, rows in (("small", 5), ("whole", 24), ("odd", 29))
}
RATES = [0.0, 0.01, 0.05, mg.StepDecay(0.05, 0.5, steps=6), mg.WarmUp(0.02, steps=9)]
LAYERS = [mg.Dense(N_IN, 6, "tanh"), mg.Dropout(0.25), mg.Dense(6, N_OUT)]


def new_trainer() -> mg.Trainer:
    return mg.Trainer(mg.Network(LAYERS, seed=SEED), "softmax_cross_entropy", mg.Adam(0.05), batch_size=BATCH)


class Stop(Exception):
    """What a callback raises."""


class End(mg.Callback):
    """After some step of its fit presses Ctrl-C, as often as told, or raises."""

    every_steps = 1

    def __init__(self, after: int, times: int) -> None:
        self.left, self.times = after, times

    def step_end(self, trainer: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.times == 0:
            raise Stop
        for _ in range(self.times * (self.left == 0)):
            signal.raise_signal(signal.SIGINT)


@dataclass
class Begun:
    """A fit that a file or a trainer may go on with."""

    data: str
    shuffle: bool
    first_step: int
    first_epoch: int
    loss: float = 0.0
    weight: float = 0.0


@dataclass
class Model:
    """What a trainer has to come to, by a program that gets its whole state anew for each step."""

    rate: float | Schedule = 0.05
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    fit: Begun | None = None
    is_resumed: bool = False
    kept: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.program = get_backend("cpu").compile(new_trainer().plan)
        self.program.draw(SEED, np.empty((1, 0)))
        self.state = self.program.read()

    @property
    def parameters(self) -> np.ndarray:
        return self.state.parameters[0]

    @parameters.setter
    def parameters(self, values: np.ndarray) -> None:
        self.state = State(values[np.newaxis].copy(), self.state.slots, self.state.statistics)

    @property
    def network(self) -> mg.Network:
        network = mg.Network(LAYERS, seed=SEED)
        network.parameters = {
            segment.name: self.parameters[segment.offset : segment.end].reshape(segment.shape)
            for segment in new_trainer().plan.parameters
        }
        return network

    def step(self, data: mg.Dataset, sampling: Sampling) -> tuple[float, float]:
        self.program.load(self.state)
        self.program.attach(data, sampling)
        rates = as_schedule(self.rate).rates(Clock(step=np.array([self.steps])))
        ((loss, weight),) = self.program.run(self.steps, rates)
        self.state, self.steps = self.program.read(), self.steps + 1
        return float(loss), float(weight)

    def train(self, name: str, epochs: int, *, shuffle: bool, most: int | None) -> bool:
        """Returns whether it came to its end before so many steps were made."""
        data = SETS[name]
        if not (self.is_resumed and self.fit is not None):
            self.fit = Begun(name, shuffle, self.steps, len(self.losses))
        self.is_resumed = False
        begun = self.fit
        sampling = Sampling(len(data), BATCH, SEED, shuffle, first_step=begun.first_step, first_epoch=begun.first_epoch)
        while len(self.losses) < begun.first_epoch + epochs:
            end = begun.first_step + (len(self.losses) + 1 - begun.first_epoch) * sampling.steps_per_epoch
            while self.steps < end:
                loss, weight = self.step(data, sampling)
                begun.loss += loss
                begun.weight += weight
                most = None if most is None else most - 1
                if most == 0:
                    return False
            self.losses.append(begun.loss / begun.weight)
            begun.loss = begun.weight = 0.0
        return True


class TrainerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="mlpgpu-")
        self.path = Path(self.folder.name) / "run.h5"
        self.trainer, self.model = new_trainer(), Model()

    # --- training ---

    @rule(
        name=st.sampled_from(sorted(SETS)),
        epochs=st.integers(1, 3),
        shuffle=st.booleans(),
        after=st.none() | st.integers(1, 9),
        times=st.integers(0, 2),
    )
    def fit(self, name: str, epochs: int, shuffle: bool, after: int | None, times: int) -> None:
        """To its end, or until a callback raises or Ctrl-C is pressed once or twice."""
        begun = self.model.fit
        is_other = begun is not None and (begun.data, begun.shuffle) != (name, shuffle)
        interrupt._last = -interrupt.AGAIN_SECONDS
        callbacks = [] if after is None else [End(after, times)]

        def fit() -> mg.History:
            options = {"callbacks": callbacks, "shuffle": shuffle, "progress": False}
            return self.trainer.fit(SETS[name], epochs, **options)

        if self.model.is_resumed and is_other:
            with pytest.raises(DataMismatchError):
                fit()
            return
        if self.model.train(name, epochs, shuffle=shuffle, most=after):
            assert not fit().interrupted
        elif times == 1:
            assert fit().interrupted
        else:
            with pytest.raises(KeyboardInterrupt if times else Stop):
                fit()

    @rule(name=st.sampled_from(sorted(SETS)), first=st.integers(0, 4), rows=st.integers(1, BATCH))
    def step(self, name: str, first: int, rows: int) -> None:
        data = SETS[name]
        x, y = data.x[first : first + rows], data.y[first : first + rows]
        model = self.model
        part = mg.Dataset(x, y)
        sampling = Sampling(len(part), len(part), SEED, shuffle=False, first_step=model.steps)
        loss, weight = model.step(part, sampling)
        model.fit, model.is_resumed = None, False
        assert self.trainer.step(x, y) == loss / weight

    # --- files and copies ---

    @rule(how=st.sampled_from(["saved", "saved twice", "copied"]))
    def go_on_with_another(self, how: str) -> None:
        if how == "copied":
            self.trainer = copy.deepcopy(self.trainer)
            return  # with its fit as the trainer has it
        self.trainer.save(self.path)
        self.trainer = mg.Trainer.resume(self.path)
        if how == "saved twice":
            before = self.path.read_bytes()
            self.trainer.save(self.path)
            assert self.path.read_bytes() == before
        self.model.is_resumed = True

    @rule()
    def save(self) -> None:
        self.trainer.save(self.path)

    # --- parameters and settings ---

    @rule(place=st.sampled_from(["0.weight", "0.bias", "2.bias"]), seed=st.integers(0, 9))
    def set_parameters(self, place: str, seed: int) -> None:
        (segment,) = (each for each in new_trainer().plan.parameters if each.name == place)
        values = np.random.default_rng(seed).standard_normal(segment.shape).astype(np.float32)
        self.trainer.network.parameters[place] = values
        changed = self.model.parameters.copy()
        changed[segment.offset : segment.end] = values.ravel()
        self.model.parameters = changed

    @rule(rate=st.sampled_from(RATES))
    def set_rate(self, rate: float | Schedule) -> None:
        self.trainer.rate = self.model.rate = rate

    @rule()
    def refuse(self) -> None:
        """What is refused changes nothing."""
        with pytest.raises(mg.errors.MlpgpuError):
            self.trainer.fit((np.zeros((3, N_IN + 1)), np.zeros(3, int)), 1)
        with pytest.raises(mg.errors.MlpgpuError):
            self.trainer.step(np.zeros((BATCH + 1, N_IN)), np.zeros(BATCH + 1, int))
        with pytest.raises(ConfigurationError):
            self.trainer.rate = -1.0

    @rule()
    def keep(self) -> None:
        self.trainer.keep()
        self.model.kept = self.model.parameters.copy()

    @precondition(lambda self: self.model.kept is not None)
    @rule()
    def restore_kept(self) -> None:
        self.trainer.evaluate(SETS["small"])  # so that there is a program to restore them in
        self.trainer.restore_kept()
        assert self.model.kept is not None
        self.model.parameters = self.model.kept

    # --- looking ---

    @rule()
    def read(self) -> None:
        np.testing.assert_array_equal(self.trainer.network.flat_parameters(), self.model.parameters)

    @rule(name=st.sampled_from(sorted(SETS)))
    def predict(self, name: str) -> None:
        expected = new_trainer_of(self.model.network).network.predict(SETS[name])
        np.testing.assert_array_equal(self.trainer.network.predict(SETS[name]), expected)

    @rule(name=st.sampled_from(sorted(SETS)), is_dense=st.booleans())
    def evaluate(self, name: str, is_dense: bool) -> None:
        """On targets of either kind, whichever the trainer trains on."""
        data = SETS[name]
        given = mg.Dataset(data.x, np.eye(N_OUT)[data.y]) if is_dense else data
        assert self.trainer.evaluate(given) == new_trainer_of(self.model.network).evaluate(given)

    @invariant()
    def check_counts(self) -> None:
        trainer, model = self.trainer, self.model
        assert (trainer.steps, trainer.epochs) == (model.steps, len(model.losses))
        assert [record["loss"] for record in trainer.history] == model.losses

    def teardown(self) -> None:
        with self.folder:
            self.check_counts()
            self.read()
            self.trainer.save(self.path)
            arrays = storage.read(self.path).arrays
            if self.model.steps:
                for k, slot in enumerate(("mean", "mean_square")):
                    np.testing.assert_array_equal(arrays[f"/mlpgpu/run/slots/{slot}"], self.model.state.slots[k, 0])


def new_trainer_of(network: mg.Network) -> mg.Trainer:
    return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.05), batch_size=BATCH)


@pytest.mark.parametrize("examples", [5, pytest.param(30, marks=pytest.mark.thorough)])
def test_a_trainer_does_what_its_model_does(examples: int) -> None:
    run_state_machine_as_test(TrainerMachine, settings=settings(max_examples=examples, stateful_step_count=20))
