"""The launches of a program timed one by one, and when each runs in a step.

A launch is timed by replaying a graph that holds it many times, each after the launch that precedes it in a step.  The
time of that one alone is subtracted.  So the launch finds the caches as in a step, where it reads what another kernel
has just written.  By itself it would be faster; its time by itself is a lower limit for the difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ....datasets import Dataset
from ....plan import Plan
from ...base import Sampling
from ..kernels.launches import GRAPH_STEPS, Launch
from ..run.binding import Binder, Put
from ..run.program import CudaProgram
from ..run.trace import Span, Trace
from ..run.training import Training
from ..runtime import MOST_REPEATS, TRIALS, Device, Function, Stopwatch, Stream, seconds_of
from .costs import flops, moved_bytes, speed_of
from .peak_rates import PeakRates
from .predicted import FITTED_TO, predicted_seconds

PIECES = 4  # of the data, in a timeline of their copies


@dataclass(frozen=True)
class TimedLaunch:
    """A launch with the least that it must do and the time that it takes; it stands for those of the other shards too.

    Attributes:
        count: how many a step has, less than 1 for a launch that several steps share.
        shared_bytes: shared memory of a block.
        flops: multiplications and additions of its matrix products.
        bytes: the fewest that it moves.
        floor: the fewest seconds in which the card can do both.
        predicted: the seconds that it is predicted to take (:mod:`.predicted`), or None on cards of other kinds.
        seconds: the measured time.
    """

    launch: Launch
    count: Fraction
    registers: int
    shared_bytes: int
    flops: int
    bytes: int
    floor: float
    predicted: float | None
    seconds: float


@dataclass(frozen=True)
class _Bound:
    """A launch that can be put on a stream; ``steps`` is how many steps share it."""

    launch: Launch
    function: Function
    put: Put
    steps: int


class Probe:
    """A program whose launches are timed one by one.

    Arguments:
        start: gives the program its state.
        data: what it is trained on, or without training evaluated on.

    Attributes:
        program: the program, which trains launch by launch.
        predicted: the predictions for the data of a plan without training.
    """

    predicted: np.ndarray

    def __init__(self, plan: Plan, device: Device, start: Callable[[CudaProgram], None], data: Dataset) -> None:
        self._plan, self._device, self._data = plan, device, data
        self._sampling, self._trace = Sampling(len(data), plan.capacity, seed=0), Trace(device)
        because = "launches are measured one by one"
        self.program = CudaProgram(plan, device, 1.0, launches_because=because, trace=self._trace)
        self.stream = self.program.workspace.stream
        start(self.program)
        if plan.training:
            self.program.attach(data, self._sampling)
            self._run_steps(self._sampling.steps_per_epoch)  # brings all rows to the card
        else:
            self.predicted = self.program.predict(data)

    def _run_steps(self, count: int) -> None:
        """The first steps, with rates of 0."""
        self.program.run(0, np.zeros(count))

    @property
    def _training(self) -> Training:
        assert self.program.training is not None
        return self.program.training

    @property
    def binder(self) -> Binder:
        """The object that binds launches to the data."""
        if self._plan.training:
            return self._training.binder
        return Binder(self.program.workspace, self.program.evaluation.hold(self._data), seed=0)

    @property
    def arrays(self) -> dict[str, int]:
        """Bytes by name; the arrays of the data and the order of its rows count as one."""
        return {**self.program.workspace.arrays.sizes, f"data ({len(self._data):,} rows)": self.binder.data.nbytes}

    @property
    def notes(self) -> Sequence[str]:
        """Which way those parts of the plan run that may run in several, and why."""
        return self.binder.lowered.notes

    # --- launches one by one ---

    def launches(self, rates: PeakRates) -> list[TimedLaunch]:
        """Each launch of the first shard, and of what the shards have in common, timed."""
        bounds = self._bounds()
        alone = [self._seconds_of(bound) for bound in bounds]
        after = [
            self._seconds_of(bounds[index - 1], bound) - alone[index - 1] for index, bound in enumerate(bounds)
        ]  # the first launch follows the last one
        return [self._timed(*each, rates) for each in zip(bounds, map(max, alone, after), strict=True)]

    def _bounds(self) -> list[_Bound]:
        """The launches of a step, or of an evaluation, each ready to be put on a stream by itself."""
        binder = self.binder
        lowered = binder.lowered

        def bound(launch: Launch, steps: int = 1, **others: int) -> _Bound:
            launch = replace(launch, pdl=False)  # it is timed by itself
            return _Bound(launch, binder.function(launch.entry), binder.bind(launch, **others), steps)

        if not self._plan.training:
            return [bound(launch) for launch in (*lowered.evaluation_begin, *lowered.evaluation)]
        # With graph_steps=0 the kernel leaves the steps of the run before as they are, and takes as long.
        initialised = [bound(launch, GRAPH_STEPS[0], graph_steps=0) for launch in lowered.initialise]
        staged = [
            bound(
                replace(launch, grid=(launch.grid[0], lowered.stages, 1)),
                lowered.stages,
                step=self._training.graphs.step_address(0),
            )
            for launch in lowered.staged
            if launch.values["shard"] == 0
        ]
        of_step = [*lowered.begin, *lowered.shards[0], *lowered.finish]
        return [*initialised, *staged, *map(bound, of_step)]

    def _seconds_of(self, *bounds: _Bound) -> float:
        def put() -> None:
            for bound in bounds:
                bound.put(self.stream)

        return seconds_of(self.stream, put, reset=self.reset, most=self._most_repeats)

    def _timed(self, bound: _Bound, seconds: float, rates: PeakRates) -> TimedLaunch:
        plan, launch = self._plan, bound.launch
        is_of_shards = plan.training and "shard" in launch.values
        rows = plan.shard_rows(plan.capacity)[0].stop if is_of_shards else plan.capacity
        rows *= bound.steps
        operations = flops(launch, rows)
        sms = self._device.multiprocessors
        nbytes = moved_bytes(launch, rows)
        return TimedLaunch(
            launch=launch,
            count=Fraction(plan.shards if is_of_shards else 1, bound.steps),
            registers=bound.function.registers,
            shared_bytes=bound.function.static_shared_bytes + launch.entry.shared_bytes,
            flops=operations,
            bytes=nbytes,
            floor=rates.floor(operations, nbytes, speed_of(launch)),
            predicted=predicted_seconds(launch, rows, sms, rates) if self._device.arch == FITTED_TO else None,
            seconds=seconds,
        )

    # --- whole steps ---

    def seconds(self) -> float:
        """The time of a whole step, or evaluation."""
        steps = min(GRAPH_STEPS[0], self._most_repeats) if self._plan.training else 1
        most = self._most_repeats // steps
        return seconds_of(self.stream, lambda: self._put_all(steps), reset=self.reset, most=most) / steps

    @property
    def _most_repeats(self) -> int:
        """How many steps, or evaluations of the one batch, can be done in a row."""
        return min(MOST_REPEATS, self._sampling.steps_per_epoch) if self._plan.training else MOST_REPEATS

    def timeline(self, delay: Callable[[Stream], object]) -> list[Span]:
        """When each launch of one step ran; ``delay`` keeps the card busy until the host has put it on streams."""
        self.reset()
        delay(self.stream)
        with self._trace.recording(self.stream) as spans:
            self._put_all(1)
        return spans

    def first_epoch(self) -> list[Span]:
        """When the steps on the first pieces of the data ran, as graphs, and the copies of the pieces to the card."""
        self.program.attach(self._data, self._sampling)
        steps = math.ceil(PIECES * self._training.data.piece_rows / self._plan.capacity)
        with self._device:
            for count in GRAPH_STEPS:
                self._training.graphs.replay(count)  # graphs are captured before the clock runs
            with self._trace.recording(self.stream) as spans:
                self._run_steps(min(steps, self._sampling.steps_per_epoch))
        return spans

    def _put_all(self, steps: int) -> None:
        """Put so many steps, or one evaluation, on the streams."""
        if self._plan.training:
            self._training.graphs.put(steps)
        else:
            for bound in self._bounds():
                bound.put(self.stream)

    def reset(self) -> None:
        """Let launches begin with the first batch."""
        self.program.workspace.numbers.set_step(0, 0, self._plan.capacity, len(self._data))


def persistent_seconds(program: CudaProgram) -> float:
    """The time of a step inside one kernel, of a program with a training set attached, at rates of 0."""
    training, stream = program.training, program.workspace.stream
    assert training is not None
    steps = min(MOST_REPEATS, training.sampling.steps_per_epoch)
    program.run(0, np.zeros(training.sampling.steps_per_epoch))  # brings all rows to the card
    found = []
    with stream.device:
        stopwatch = Stopwatch(stream)
        for _ in range(TRIALS):
            training.begin_at(0, 0)
            found.append(stopwatch.seconds(lambda: training.put(steps)) / steps)
    return statistics.median(found)
