"""A plan's launches one by one: what each asks of the card, and how long it takes there.

What a launch must do at least (multiplications and additions, and every operand moved once) follows from
the plan alone.  The floor is how long that takes at the rates of this card, which are measured: copying
gives bytes a second, from memory and from the cache, and ``rates.cuh`` multiply-adds a second.

A launch is timed by replaying a graph that holds it many times, each after the launch that a step has before
it, whose own time is taken off: so it finds the caches as in a step, where it reads what another kernel has
just written.  Alone it would be faster, and what it takes alone is the least that is believed of a difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np

from ...datasets import Dataset
from ...plan import Plan
from ..base import Sampling, State
from . import compiler, kernels
from .driver import Arena, Device, Event, Function, Module, Stream, aligned, capture, pack
from .feed import Feed
from .launches import Launch, Value
from .program import GRAPH_STEPS, CudaProgram
from .resident import Design
from .share import BLOCKS_PER_MULTIPROCESSOR

REPLAY_SECONDS = 2e-3  # about how long a replay is
MOST_REPEATS = 256
TRIALS = 5
COPY_BYTES, COMPUTED = 1 << 28, 2e10  # what rates are measured on, the second in operations
DATA_BYTES, MOST_BATCHES = 1 << 28, 1024  # of the random data that are trained on
DELAY_SECONDS = 0.03  # of the card, for the host to get ahead of it
PIECES = 4  # of the data, in a timeline of their copies
GANTT_COLUMNS = 60

# The axes of each array that a kernel takes, by the file that defines it and the argument's name; below,
# where one kernel differs.  `rows` are those of the launch's share, other names are its arguments.
Axes = tuple[str | int, ...]
OF_LOSS: dict[str, Axes] = {
    "order": ("rows",), "targets": ("rows", "n"), "weights": ("rows",), "mean": ("n",), "scale": ("n",),
    "delta": ("rows", "n"), "sums": ("count", 2), "totals": (2,), "losses": (2,), "arrived": (),
    "errors": ("count", "capacity", 2),
}  # fmt: skip
OF_DENSE: dict[str, Axes] = {
    "x": ("rows", "k"), "w": ("k", "n"), "b": ("n",), "z": ("rows", "n"), "y": ("rows", "n"), "dz": ("rows", "n"),
    "saved": ("rows", "k"), "dx": ("rows", "k"), "dw": ("k", "n"), "db": ("n",), "parts": ("count", "rows", "n"),
    "order": ("rows",), "totals": (2,), "weight": ("k", "n"), "bias": ("n",),
    "weight_slots": ("slot_count", "k", "n"), "bias_slots": ("slot_count", "n"),
}  # fmt: skip
AXES: dict[str, dict[str, Axes]] = {
    **dict.fromkeys(("dense.cuh", "dense_update.cuh", "split_dense.cuh"), OF_DENSE),
    "locally_connected.cuh": {
        "x": ("rows", "m"), "w": ("window", "n"), "b": ("n",), "z": ("rows", "n"), "y": ("rows", "n"),
        "dz": ("rows", "n"), "saved": ("rows", "m"), "dx": ("rows", "m"), "dw": ("window", "pitch"), "db": ("n",),
    },
    "rows.cuh": {
        "x": ("rows", "n"), "y": ("rows", "n"), "data": ("rows", "n"), "order": ("rows",), "mean": ("n",),
        "scale": ("n",), "saved": ("rows", "n"), "dy": ("rows", "n"),
    },
    "loss.cuh": {
        **OF_LOSS, "logits": ("rows", "n"), "y": ("rows", "n"),
    },
    "head.cuh": {**OF_DENSE, **OF_LOSS},
    "update.cuh": {
        "partials": ("shares", "uses", "size"), "gradient": ("size",), "sums": ("count",), "totals": (2,),
        "factor": (), "parameters": ("size",), "slots": ("slot_count", "size"),
    },
}  # fmt: skip
INDEX_AXES: dict[str, Axes] = {"targets": ("rows",)}  # of a loss that takes class numbers
IN_PLACE = {"dy", "parameters", "slots", "weight", "bias", "weight_slots", "bias_slots", "arrived"}  # read, and written

TENSOR_HEADERS = ("tensor.cuh", "wgmma.cuh")
# Of the float32 arrays beside planes, products read what planes do not hold: nothing, as a rule.
_TENSOR_AXES: dict[str, Axes] = {
    "x_planes": ("planes", "rows", "k"), "dz_planes": ("planes", "rows", "n"), "w_planes": ("planes", "k", "n"),
    "saved_planes": ("rows", "k"), "y_planes": ("rows", "n"), "dx_planes": ("rows", "k"), "x_lines": ("rows",),
    "dz_lines": ("rows",), "w_lines": ("k",), "w_columns": ("n",), "x_columns": ("k",), "dz_columns": ("n",),
    "x": (0,), "w": (0,), "dz": (0,), "b": ("n",), "z": ("rows", "n"), "y": ("rows", "n"), "saved": ("rows", "k"),
    "dx": ("rows", "k"), "dw": ("k", "n"), "db": ("n",), "totals": (2,), "weight": ("k", "n"), "bias": ("n",),
    "weight_slots": ("slot_count", "k", "n"), "bias_slots": ("slot_count", "n"),
}  # fmt: skip
AXES |= {
    **dict.fromkeys(TENSOR_HEADERS, _TENSOR_AXES),
    "planes.cuh": {
        "x": ("rows", "n"), "order": ("rows",), "weight_lines": ("n",), "planes": ("planes", "rows", "n"),
        "lines": ("rows",), "columns": ("n",), "dz": ("rows", "n"), "x_lines": ("rows",), "db": ("n",),
        "words": ("size",),
    },
}  # fmt: skip
SPLIT_WEIGHTS_AXES: dict[str, Axes] = {
    "w": ("k", "n"), "planes": ("planes", "k", "n"), "lines": ("k",), "columns": ("n",),
}  # fmt: skip

# Products of 16-bit numbers for each float32 one of plain cores, by the vendor's tables of compute capability 8.0
# and 9.0; other cards do at most as many.
TENSOR_SPEED = 16.0

PRODUCTS = {
    "dense_forward": 1,
    "dense_forward_part": 1,
    "dense_backward_input": 1,
    "dense_backward_weight": 1,
    "dense_forward_part_few": 1,
    "dense_forward_part_split": 1,
    "dense_backward_update": 1,
    "dense_backward_update_narrow": 1,
    "dense_backward_update_few": 1,
    "dense_backward_update_split": 1,
    "head": 2,
    "dense_backward_atomic": 2,
    "tensor_forward": 1,
    "tensor_backward_input": 1,
    "tensor_backward_weight": 1,
    "tensor_backward_update": 1,
    "local_forward": 1,
    "local_backward_input": 1,
    "local_backward_weight": 1,
}
ITEM_BYTES = {"unsigned char": 1, "uint16_t": 2, "TensorMap": 2, "double": 8}  # by C type; others have 4


def flops(launch: Launch, rows: int) -> int:
    """Multiplications and additions of the matrix products in a launch for ``rows`` rows."""
    products = PRODUCTS.get(launch.entry.function.partition("<")[0], 0)
    if not products:
        return 0
    if "dx" in launch.values and launch.values["dx"] is None:
        products = 1
    axes = ("rows", "window", "n") if launch.entry.header == "locally_connected.cuh" else ("rows", "k", "n")
    return 2 * products * math.prod(_lengths(launch, rows)[axis] for axis in axes)


def moved_bytes(launch: Launch, rows: int, slot_count: int = 0) -> int:
    """The fewest bytes that a launch for ``rows`` rows moves: each array once, or twice if changed in place.

    The counter of steps and what lies in constant memory are left out.
    """
    lengths = {**_lengths(launch, rows), "slot_count": slot_count}
    axes = AXES[launch.entry.header]
    if launch.entry.function.startswith("split_weights"):
        axes = SPLIT_WEIGHTS_AXES
    if "Index" in launch.entry.function:
        axes = {**axes, **INDEX_AXES}
    total = 0
    for argument in launch.entry.arguments:
        is_array = argument.is_pointer or argument.ctype == "Texture"
        if not is_array or argument.name == "step" or launch.values[argument.name] is None:
            continue
        item = ITEM_BYTES.get(argument.ctype.removeprefix("const ").removesuffix("*"), 4)
        elements = math.prod(lengths[axis] if isinstance(axis, str) else axis for axis in axes[argument.name])
        total += item * elements * (2 if argument.name in IN_PLACE else 1)
    return total


def speed_of(launch: Launch) -> float:
    """How many times faster than plain cores the card could make a launch's products."""
    if launch.entry.header not in TENSOR_HEADERS:
        return 1.0
    return TENSOR_SPEED / (3 if "HalfPair" in launch.entry.function else 1)  # products of planes for each


def _lengths(launch: Launch, rows: int) -> dict[str, int]:
    given = {name: value for name, value in launch.values.items() if isinstance(value, int)}
    # A kernel that is not told how many parts or sums there are makes one for each layer or block of its grid.
    made = launch.grid[2] if "part" in given else launch.grid[0]
    planes = 2 if "HalfPair" in launch.entry.function else 1
    return {"rows": rows, "uses": 1, "count": made, "planes": planes, **given}


@dataclass(frozen=True)
class Rates:
    """What a card does in a second.

    Attributes:
        copied: bytes, read and written, of arrays beyond the cache; ``cached`` of arrays in it.
        computed: multiplications and additions in float32, outside the tensor cores.
        cache_bytes: of the second-level cache.
    """

    copied: float
    cached: float
    computed: float
    cache_bytes: int

    def floor(self, operations: int, nbytes: int, speed: float = 1.0) -> float:
        """The fewest seconds for so many operations beside so many bytes, which may lie in the cache if they fit.

        ``speed`` is how many times faster than ``computed`` the operations can be done.
        """
        return max(
            operations / (speed * self.computed), nbytes / (self.cached if nbytes <= self.cache_bytes else self.copied)
        )

    def __str__(self) -> str:
        return (
            f"rates of this card: copying {self.copied / 1e9:,.0f} GB/s, and {self.cached / 1e9:,.0f} GB/s inside its "
            f"cache of {self.cache_bytes / 2**20:.0f} MiB; {self.computed / 1e12:.1f} TFLOP/s in float32 by "
            "multiply-adds (no kernel uses tensor cores yet, so their rate is not measured)"
        )


@dataclass(frozen=True)
class Line:
    """A launch, and the same of the other shares: what one takes, at the least and as measured, in seconds."""

    launch: Launch
    count: int
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
class Profile:
    """A step of a plan, or without an optimizer an evaluation of one batch, measured.

    Attributes:
        title: what was measured, and on which card.
        lines: in order, those of the first share standing for all.
        seconds: that the whole takes when it is replayed.
        arrays: bytes of each array on the card, by name.
        timelines: what ran when, by heading, if wanted.
        way: how the plan trains: inside one kernel, or by these launches and why.
    """

    title: str
    rates: Rates
    lines: Sequence[Line]
    seconds: float
    arrays: Mapping[str, int]
    timelines: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    way: str = ""

    @property
    def kernel_seconds(self) -> float:
        """Of all launches, one after another."""
        return sum(line.count * line.seconds for line in self.lines)

    def __str__(self) -> str:
        head = "\n".join(filter(None, (self.title, str(self.rates), self.way)))
        parts = [head, self._kernels(), self._arrays()]
        return "\n\n".join(parts + [f"{heading}\n{gantt(spans)}" for heading, spans in self.timelines.items()])

    def _kernels(self) -> str:
        heads = ("operation", "kernel", "launches", "grid", "threads", "registers", "shared", "MFLOP", "kB")
        rows = [(*heads, "floor µs", "time µs", "floor/time")]
        for line in self.lines:
            entry = line.launch.entry
            rows.append(
                (
                    line.launch.operation,
                    entry.name,
                    str(line.count),
                    "×".join(map(str, line.launch.grid)),
                    str(entry.threads),
                    str(line.registers),
                    f"{line.shared_bytes:,}",
                    f"{line.flops / 1e6:,.3f}" if line.flops else "",
                    f"{line.bytes / 1e3:,.1f}",
                    f"{line.floor * 1e6:,.2f}",
                    f"{line.seconds * 1e6:,.2f}",
                    f"{line.floor / line.seconds:.1%}",
                )
            )
        ratio = self.kernel_seconds / self.seconds
        total = f"sum of the launches {self.kernel_seconds * 1e6:,.2f} µs, all together {self.seconds * 1e6:,.2f} µs"
        beside = ", where shares run side by side" if any(line.count > 1 for line in self.lines) else ""
        return "\n".join([_table(rows, left=2), f"{total} (ratio {ratio:.2f}{beside})"])

    def _arrays(self) -> str:
        rows = [("array on the card", "bytes")]
        rows += [(name, f"{size:,}") for name, size in sorted(self.arrays.items(), key=lambda item: -item[1]) if size]
        return _table([*rows, ("total", f"{sum(self.arrays.values()):,}")], left=1)


def gantt(spans: Sequence[Span]) -> str:
    """A line for each span, stream by stream, with a bar from its start to its end."""
    whole = max(span.end for span in spans)
    rows = [("stream", "", "start µs", "end µs", "")]
    for span in sorted(spans, key=lambda span: (span.stream, span.start)):
        first = min(int(span.start / whole * GANTT_COLUMNS), GANTT_COLUMNS - 1)
        last = max(first + 1, round(span.end / whole * GANTT_COLUMNS))
        bar = " " * first + "=" * (last - first)
        rows.append(
            (
                span.stream,
                span.name,
                f"{span.start * 1e6:,.1f}",
                f"{span.end * 1e6:,.1f}",
                bar.ljust(GANTT_COLUMNS),
            )
        )
    return _table(rows, left=2)


def _table(rows: Sequence[tuple[str, ...]], *, left: int) -> str:
    """Columns two spaces apart, the first ``left`` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def profile(plan: Plan, device: Device, state: State, *, scale: float | None = None, timeline: bool = False) -> Profile:
    """Run a plan on random data, and measure it launch by launch.

    Args:
        state: to begin from; rates are 0, so that parameters stay as they are.
        scale: of inputs that are bytes, or None where they are float32.
        timeline: whether to say what ran when, in a step and while the data come up.

    Raises:
        BackendError: the card has too little memory, or kernels cannot be compiled.
    """
    data = random_data(plan, scale)
    probe = _Probe(plan, device, state, data)
    with device:
        arithmetic = _Arithmetic(device)
        rates = measure_rates(device, arithmetic)
        seconds = probe.seconds()
        lines = probe.lines(rates)
        timelines = {}
        if timeline:
            delay = DELAY_SECONDS * rates.computed
            timelines["one step"] = probe.timeline(lambda stream: arithmetic.put(stream, delay))
    if timeline and plan.training:
        timelines["the first steps of a first epoch, whose rows come up piece by piece"] = probe.first_epoch()
    what = "a step" if plan.training else "the evaluation"
    title = f"{what} of {plan.capacity} rows on {device.name}, measured on random data"
    way = _way(plan, device, state, data) if plan.training else ""
    return Profile(title, rates, lines, seconds, probe.arrays, timelines, way)


def _way(plan: Plan, device: Device, state: State, data: Dataset) -> str:
    """How a plan trains, in words, with the time of a step where that is not by the launches of the table."""
    program = _Resident(plan, device, 1.0)
    if isinstance(program.residency, str):
        return f"trains launch by launch, since {program.residency}"
    program.load(state)
    program.attach(data, Sampling(len(data), plan.capacity, seed=0))
    seconds, kernel = program.seconds(), program.residency
    entry = kernel.train("float32" if data.scale is None else "uint8", textured=True).entry
    return (
        f"trains inside one kernel, {entry.name}: {kernel.blocks} blocks of {entry.threads} threads, each with "
        f"{entry.shared_bytes:,} bytes of shared memory; a step takes {seconds * 1e6:,.2f} µs.  Launch by launch it "
        "would be:"
    )


def replay_seconds(plan: Plan, device: Device, state: State) -> float:
    """What a step of a plan takes as a whole, or an evaluation of one batch, on random data."""
    probe = _Probe(plan, device, state, random_data(plan, None))
    with device:
        return probe.seconds()


def random_data(plan: Plan, scale: float | None) -> Dataset:
    """Rows such as a plan trains on, of as many batches as go beyond a cache; for an evaluation, one batch."""
    random = np.random.default_rng(0)
    row_bytes = plan.n_in * (4 if scale is None else 1) + 4 * plan.n_out
    batches = min(MOST_BATCHES, max(1, DATA_BYTES // (plan.capacity * row_bytes))) if plan.training else 1
    rows = plan.capacity * batches
    x = random.random((rows, plan.n_in), np.float32)
    y = None
    if plan.target_kind is not None:
        is_index = plan.target_kind == "index"
        y = random.integers(plan.n_out, size=rows) if is_index else random.random((rows, plan.n_out), np.float32)
    return Dataset(x if scale is None else (255 * x).astype(np.uint8), y, scale=scale)


# --- measuring ---


@dataclass(frozen=True)
class _Bound:
    """A launch that can be put on a stream."""

    launch: Launch
    function: Function
    put: Callable[[Stream], None]


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


class _Resident(CudaProgram):
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


class _Probe(CudaProgram):
    """A program whose launches can be timed alone, and marked as they run in a step."""

    def __init__(self, plan: Plan, device: Device, state: State, data: Dataset) -> None:
        self._bound: dict[int, _Bound] = {}  # by the identity of the launch
        self._recorder = _Recorder(device)
        self._data, self._sampling = data, Sampling(len(data), plan.capacity, seed=0)
        super().__init__(plan, device, 1.0)
        self.load(state)
        if plan.training:
            self.attach(data, self._sampling)
            self._run_steps(self._sampling.steps_per_epoch)  # brings all rows up
        else:
            self.predict(data)

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

    @property
    def arrays(self) -> dict[str, int]:
        """Bytes by name; those of the data, with the order of its rows, together."""
        data = self._training[0] if self._training else self._evaluation
        assert data is not None
        return {**self._sizes, f"data ({len(self._data):,} rows)": data.nbytes}

    def _bind(self, launch: Launch, data: Feed, seed: int, **others: Value) -> Callable[[Stream], None]:
        put = super()._bind(launch, data, seed, **others)
        self._bound[id(launch)] = _Bound(launch, self._kernels(data).functions[launch.entry], put)

        def put_recorded(stream: Stream) -> None:
            start = self._recorder.reached(stream)
            put(stream)
            place = str(self._streams.index(stream))
            self._recorder.add(place, launch.entry.name, start, self._recorder.reached(stream))

        return lambda stream: put_recorded(stream) if self._recorder.is_on else put(stream)

    def lines(self, rates: Rates) -> list[Line]:
        """Each launch of the first share, and of what the shares have in common, timed."""
        data = self._training[0] if self._training else self._evaluation
        assert data is not None
        apart = {id(launch) for launch in self._kernels(data).lowered.run_begin}  # once for many steps
        bounds = [
            bound
            for place, bound in self._bound.items()
            if bound.launch.values.get("share", 0) == 0 and place not in apart
        ]
        alone = [self._seconds_of(bound) for bound in bounds]
        after = [
            self._seconds_of(bounds[place - 1], bound) - alone[place - 1] for place, bound in enumerate(bounds)
        ]  # the first one after the last
        return [self._line(*each, rates) for each in zip(bounds, map(max, alone, after), strict=True)]

    def _seconds_of(self, *bounds: _Bound) -> float:
        def put() -> None:
            for bound in bounds:
                bound.put(self._stream)

        return seconds_of(self._stream, put, reset=self._reset, most=self._most_repeats)

    def _line(self, bound: _Bound, seconds: float, rates: Rates) -> Line:
        plan, launch = self._plan, bound.launch
        is_shared = plan.training and "share" in launch.values
        rows = plan.share_rows(plan.capacity)[0].stop if is_shared else plan.capacity
        operations = flops(launch, rows)
        nbytes = moved_bytes(launch, rows, len(plan.optimizer.slots) if plan.optimizer else 0)
        return Line(
            launch=launch,
            count=plan.shares if is_shared else 1,
            registers=bound.function.registers,
            shared_bytes=bound.function.static_shared_bytes + launch.entry.shared_bytes,
            flops=operations,
            bytes=nbytes,
            floor=rates.floor(operations, nbytes, speed_of(launch)),
            seconds=seconds,
        )

    def seconds(self) -> float:
        """Of a whole step, or evaluation."""
        return seconds_of(self._stream, self._put_all, reset=self._reset, most=self._most_repeats)

    @property
    def _most_repeats(self) -> int:
        """How many steps, or evaluations of the one batch, can be done in a row."""
        return min(MOST_REPEATS, self._sampling.steps_per_epoch) if self._plan.training else MOST_REPEATS

    def timeline(self, delay: Callable[[Stream], object]) -> list[Span]:
        """One step by events; ``delay`` keeps the card busy until the host has put all of it on the streams."""
        self._reset()
        delay(self._stream)
        with self._recorder.spans(self._stream) as spans:
            self._put_all()
        return spans

    def first_epoch(self) -> list[Span]:
        """The steps on the first pieces of the data, as graphs, and the copies that bring the pieces up."""
        self.attach(self._data, self._sampling)
        assert self._training is not None
        steps = math.ceil(PIECES * self._training[0].piece_rows / self._plan.capacity)
        with self._device:
            for count in (GRAPH_STEPS, 1):
                self._replay(count)  # captured before the clock runs
            with self._recorder.spans(self._stream) as spans:
                self._run_steps(min(steps, self._sampling.steps_per_epoch))
        return spans

    def _put_all(self) -> None:
        if self._plan.training:
            self._put_step()
        else:
            for bound in self._bound.values():
                bound.put(self._stream)

    def _reset(self) -> None:
        self._set_step(0, 0, self._plan.capacity, len(self._data))


def seconds_of(
    stream: Stream, put: Callable[[], object], *, reset: Callable[[], None] = lambda: None, most: int = MOST_REPEATS
) -> float:
    """What ``put`` puts on a stream takes this long, when it is done up to ``most`` times in a row.

    ``reset`` is done before each replay, and not measured.
    """
    first = _replayed(stream, put, 1, reset)
    return _replayed(stream, put, max(1, min(most, int(REPLAY_SECONDS / first))), reset)


def _replayed(stream: Stream, put: Callable[[], object], repeats: int, reset: Callable[[], None]) -> float:
    with capture(stream, "a graph of measured launches") as graph:
        for _ in range(repeats):
            put()
    replay = graph.instantiate()
    start, end = Event(stream.device, timing=True), Event(stream.device, timing=True)
    found = []
    for _ in range(TRIALS):
        # During the first replay the host puts the second one on the stream, so that it begins without delay.
        reset()
        replay.launch(stream)
        reset()
        stream.record(start)
        replay.launch(stream)
        stream.record(end)
        end.synchronize()
        found.append(end.seconds_since(start) / repeats)
    return statistics.median(found)


class _Arithmetic:
    """The kernel of rates.cuh, ready to launch."""

    def __init__(self, device: Device) -> None:
        self._entry = kernels.multiply_add()
        (cubin,) = compiler.compile_units(kernels.units([self._entry]), device.arch).values()
        self._module = Module(device, cubin.image)
        self._function = self._module.function(self._entry)
        self._grid = (BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors, 1, 1)
        self._threads = self._grid[0] * self._entry.threads
        self._arena = Arena(device, 4 * self._threads)
        self._y = self._arena.take(4 * self._threads)

    def put(self, stream: Stream, operations: float) -> int:
        """Launch it for about so many multiplications and additions, and return how many they are."""
        rounds = max(1, int(operations / (2 * kernels.CHAINS * self._threads)))
        self._function.launch(stream, self._grid, pack(self._entry, (0.5, 1.0, rounds, self._y)))
        return 2 * kernels.CHAINS * self._threads * rounds


def card_rates(device: Device) -> Rates:
    """Of a card that is otherwise idle; within ``with device``."""
    return measure_rates(device, _Arithmetic(device))


def measure_rates(device: Device, arithmetic: _Arithmetic) -> Rates:
    """Measure a card that is otherwise idle."""
    stream = Stream(device)
    nbytes = min(COPY_BYTES, device.free_bytes // 4)
    with closing(Arena(device, 2 * aligned(nbytes))) as arena:
        source, destination = arena.take(nbytes), arena.take(nbytes)
        stream.fill(source, nbytes)

        def copy_seconds(size: int) -> float:
            return seconds_of(stream, lambda: stream.copy(destination, source, size))

        copied = 2 * nbytes / copy_seconds(nbytes)
        # Two sizes, so that the time of a launch falls out.
        small, large = device.l2_bytes // 16, device.l2_bytes // 4
        cached = 2 * (large - small) / max(copy_seconds(large) - copy_seconds(small), 1e-9)
    operations = arithmetic.put(stream, COMPUTED)
    computed = operations / seconds_of(stream, lambda: arithmetic.put(stream, COMPUTED))
    return Rates(copied, max(copied, cached), computed, device.l2_bytes)
