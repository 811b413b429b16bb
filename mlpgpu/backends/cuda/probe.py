"""A program whose launches can be timed one by one, and marked as they run in a step.

A launch is timed by replaying a graph that holds it many times, each after the launch that a step has before
it, whose own time is taken off: so it finds the caches as in a step, where it reads what another kernel has
just written.  Alone it would be faster, and what it takes alone is the least that is believed of a difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ...datasets import Dataset
from ...plan import Plan
from ..base import Sampling
from .costs import flops, moved_bytes, speed_of
from .driver import Device, Event, Function, Stream
from .feed import Feed
from .launches import GRAPH_STEPS, Launch, Value
from .program import CudaProgram, Put
from .resident import Design
from .timing import MOST_REPEATS, TRIALS, Rates, seconds_of

PIECES = 4  # of the data, in a timeline of their copies


@dataclass(frozen=True)
class Line:
    """A launch, and the same of the other shares: what one takes, at the least and as measured, in seconds.

    ``count`` is how many a step has, less than 1 of what is done for several steps together.
    """

    launch: Launch
    count: Fraction
    registers: int
    shared_bytes: int
    flops: int
    bytes: int
    floor: float
    seconds: float


@dataclass(frozen=True)
class Span:
    """When something ran, in seconds after the first of its timeline could begin, and on which stream."""

    stream: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class _Bound:
    """A launch that can be put on a stream."""

    launch: Launch
    function: Function
    put: Put
    steps: int  # that it is done for at once


class _Recorder:
    """Remembers when what streams are given begins and ends, while it is on."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_on = False
        self._found: list[tuple[str, str, Event, Event]] = []

    def reached(self, stream: Stream) -> Event:
        """An event at the end of the stream's work so far."""
        event = Event(self.device, timing=True)
        stream.record(event)
        return event

    def add(self, stream: str, name: str, start: Event, end: Event) -> None:
        """Remember what ran between two events, if it is on."""
        if self.is_on:
            self._found.append((stream, name, start, end))

    @contextmanager
    def spans(self, stream: Stream) -> Iterator[list[Span]]:
        """It is on inside the block; the list is filled when the block ends, in seconds since its begin."""
        found: list[Span] = []
        self.is_on, self._found, begin = True, [], self.reached(stream)
        yield found
        self.is_on = False
        self.device.synchronize()
        for place, name, start, end in self._found:
            found.append(Span(place, name, start.seconds_since(begin), end.seconds_since(begin)))


class _RecordedFeed(Feed):
    """Tells a recorder when pieces are copied, and when steps run on them."""

    recorder: _Recorder

    def reach(self, row: int) -> int:
        end = super().reach(row)
        self._began_steps = f"steps from piece {row // self.piece_rows}", self.recorder.reached(self._stream)
        return end

    def prepare(self) -> None:
        self.recorder.add("0", *self._began_steps, self.recorder.reached(self._stream))
        super().prepare()

    def _gather(self, buffer: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        super()._gather(buffer, rows)
        self._began_copy = self.recorder.reached(self._copies)

    def _send(self, piece: int) -> None:
        sent = self._sent
        super()._send(piece)
        if self._sent > sent:
            self.recorder.add("copies", f"piece {piece}", self._began_copy, self.recorder.reached(self._copies))


class ResidentProbe(CudaProgram):
    """A program whose steps inside one kernel can be timed."""

    def seconds(self) -> float:
        """Of a step, at rates of 0."""
        assert self._training is not None and isinstance(self.residency, Design)
        data, sampling = self._training
        steps = min(MOST_REPEATS, sampling.steps_per_epoch)
        self.run(0, np.zeros(sampling.steps_per_epoch))  # brings all rows up
        found = []
        with self._device:
            for _ in range(TRIALS):
                start, end = Event(self._device, timing=True), Event(self._device, timing=True)
                self._set_step(0, 0, sampling.batch_size, len(data.dataset))
                self._stream.record(start)
                self._put_resident(self.residency, data, sampling.seed, steps)
                self._stream.record(end)
                end.synchronize()
                found.append(end.seconds_since(start) / steps)
        return statistics.median(found)


class Probe(CudaProgram):
    """A program whose launches can be timed alone, and marked as they run in a step.

    Attributes:
        predicted: what a plan without training makes of the data.
    """

    predicted: np.ndarray

    def __init__(self, plan: Plan, device: Device, start: Callable[[Probe], None], data: Dataset) -> None:
        self._recorder = _Recorder(device)
        self._data, self._sampling = data, Sampling(len(data), plan.capacity, seed=0)
        super().__init__(plan, device, 1.0)
        start(self)
        if plan.training:
            self.attach(data, self._sampling)
            self._run_steps(self._sampling.steps_per_epoch)  # brings all rows up
        else:
            self.predicted = self.predict(data)

    def _choose(self) -> str:
        return "launches are measured one by one"

    def _run_steps(self, count: int) -> None:
        """The first steps, with rates of 0."""
        self.run(0, np.zeros(count))

    def _feed(self, dataset: Dataset, batch_rows: int) -> Feed:
        room = self._device.total_bytes
        feed = _RecordedFeed(self._device, self._stream, self._plan, dataset, batch_rows=batch_rows, room=room)
        feed.recorder = self._recorder
        return feed

    def address(self, array: str) -> int:
        """Where an array of the program lies on the card."""
        return self._addresses[array]

    @property
    def arrays(self) -> dict[str, int]:
        """Bytes by name; those of the data, with the order of its rows, together."""
        data = self._training[0] if self._training else self._evaluation
        assert data is not None
        return {**self._sizes, f"data ({len(self._data):,} rows)": data.nbytes}

    @property
    def notes(self) -> list[str]:
        """How parts of the plan run that may run one way or another."""
        data = self._training[0] if self._training else self._evaluation
        assert data is not None
        return self._kernels(data).lowered.notes

    def _bind(self, launch: Launch, data: Feed, seed: int, stage: int = 0, **others: Value) -> Put:
        put = super()._bind(launch, data, seed, stage, **others)
        if launch.entry not in self._kernels(data).functions:  # it makes the order of an epoch to come
            return put

        def put_recorded(stream: Stream) -> None:
            start = self._recorder.reached(stream)
            put(stream)
            place = str(self._streams.index(stream)) if stream in self._streams else "aside"
            self._recorder.add(place, launch.entry.name, start, self._recorder.reached(stream))

        return lambda stream: put_recorded(stream) if self._recorder.is_on else put(stream)

    def lines(self, rates: Rates) -> list[Line]:
        """Each launch of the first share, and of what the shares have in common, timed."""
        bounds = self._bounds()
        alone = [self._seconds_of(bound) for bound in bounds]
        after = [
            self._seconds_of(bounds[place - 1], bound) - alone[place - 1] for place, bound in enumerate(bounds)
        ]  # the first one after the last
        return [self._line(*each, rates) for each in zip(bounds, map(max, alone, after), strict=True)]

    def _bounds(self) -> list[_Bound]:
        """The launches of a step, or of an evaluation, each ready to be put on a stream by itself."""
        data = self._training[0] if self._training else self._evaluation
        assert data is not None
        lowered = self._kernels(data).lowered

        def bound(launch: Launch, steps: int = 1, **others: int) -> _Bound:
            launch = replace(launch, overlaps=False)  # it is timed by itself
            put = self._bind(launch, data, self._sampling.seed, **others)
            return _Bound(launch, self._kernels(data).functions[launch.entry], put, steps)

        if not self._plan.training:
            return [bound(launch) for launch in (*lowered.evaluation_begin, *lowered.evaluation)]
        # Where none are dealt out, those of the last run stand; it takes as long.
        dealt = [bound(launch, GRAPH_STEPS[0], graph_steps=0) for launch in lowered.deal]
        staged = [
            bound(replace(launch, grid=(launch.grid[0], lowered.stages, 1)), lowered.stages, step=self._step_at(0))
            for launch in lowered.staged
            if launch.values["share"] == 0
        ]
        of_step = [*lowered.begin, *lowered.shares[0], *lowered.finish]
        return [*dealt, *staged, *map(bound, of_step)]

    def _seconds_of(self, *bounds: _Bound) -> float:
        def put() -> None:
            for bound in bounds:
                bound.put(self._stream)

        return seconds_of(self._stream, put, reset=self._reset, most=self._most_repeats)

    def _line(self, bound: _Bound, seconds: float, rates: Rates) -> Line:
        plan, launch = self._plan, bound.launch
        is_shared = plan.training and "share" in launch.values
        rows = plan.share_rows(plan.capacity)[0].stop if is_shared else plan.capacity
        rows *= bound.steps
        operations = flops(launch, rows)
        nbytes = moved_bytes(launch, rows, len(plan.optimizer.slots) if plan.optimizer else 0)
        return Line(
            launch=launch,
            count=Fraction(plan.shares if is_shared else 1, bound.steps),
            registers=bound.function.registers,
            shared_bytes=bound.function.static_shared_bytes + launch.entry.shared_bytes,
            flops=operations,
            bytes=nbytes,
            floor=rates.floor(operations, nbytes, speed_of(launch)),
            seconds=seconds,
        )

    def seconds(self) -> float:
        """Of a whole step, or evaluation."""
        steps = min(GRAPH_STEPS[0], self._most_repeats) if self._plan.training else 1
        most = self._most_repeats // steps
        return seconds_of(self._stream, lambda: self._put_all(steps), reset=self._reset, most=most) / steps

    @property
    def _most_repeats(self) -> int:
        """How many steps, or evaluations of the one batch, can be done in a row."""
        return min(MOST_REPEATS, self._sampling.steps_per_epoch) if self._plan.training else MOST_REPEATS

    def timeline(self, delay: Callable[[Stream], object]) -> list[Span]:
        """One step by events; ``delay`` keeps the card busy until the host has put all of it on the streams."""
        self._reset()
        delay(self._stream)
        with self._recorder.spans(self._stream) as spans:
            self._put_all(1)
        return spans

    def first_epoch(self) -> list[Span]:
        """The steps on the first pieces of the data, as graphs, and the copies that bring the pieces up."""
        self.attach(self._data, self._sampling)
        assert self._training is not None
        steps = math.ceil(PIECES * self._training[0].piece_rows / self._plan.capacity)
        with self._device:
            for count in GRAPH_STEPS:
                self._replay(count)  # captured before the clock runs
            with self._recorder.spans(self._stream) as spans:
                self._run_steps(min(steps, self._sampling.steps_per_epoch))
        return spans

    def _put_all(self, steps: int) -> None:
        """So many steps, or one evaluation."""
        if self._plan.training:
            self._put_steps(steps)
        else:
            for bound in self._bounds():
                bound.put(self._stream)

    def _reset(self) -> None:
        self._set_step(0, 0, self._plan.capacity, len(self._data))
