"""A plan on a card: its kernels, and graphs of steps that replay without Python in the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from ...datasets import Dataset
from ...optimizers import Optimizer
from ...plan import Plan
from ..base import Histogram, Sampling, scaled
from ..evaluation import zero_sums
from . import kernels
from .driver import Arena, Device, Event, Function, Module, Replay, Stream, capture, pack, pinned, tensor_map
from .feed import Feed
from .kernels import TENSOR_MAP_BYTES, Entry, padded_columns
from .launches import GRAPH_STEPS, MOST_RUN_STEPS, At, Launch, Lowered, Map, Value
from .lowering import lower
from .metrics import CLEARED, metric_bytes, metric_launches, rank_bytes, rank_launches, sums_of
from .orders import Orders
from .resident import Design, design
from .state import CudaState

MOST_TAG = 2**32 - 1  # of the steps inside a resident kernel, whose mail begins with 0
DOUBLES = {"sums", "squares", "totals", "losses"}  # arrays of 8 bytes; the others are of four
TABLE_COLUMNS = 3  # of the table of rates in constant memory
CONSTANTS = "hyper", "schedule"  # the constant variables of update.cuh

# Step of step.cuh, and Hyper of update.cuh.
STEP = np.dtype([("number", "<i8"), ("run", "<i4"), ("batch", "<i4"), ("batch_rows", "<i4"), ("epoch_rows", "<i4")])
HYPER = (
    "l1", "l2", "clip_norm", "momentum", "rho", "rho_rest", "beta1", "beta1_rest", "beta2", "beta2_rest",
    "epsilon", "weight_decay",
)  # fmt: skip


Put = Callable[[Stream], None]  # of a launch whose arguments are packed


def hyper_parameters(optimizer: Optimizer) -> np.ndarray:
    """The struct Hyper of an optimizer, (12,) float32: 0 for what it does not have."""

    def value(name: str) -> float:
        if name.endswith("_rest"):
            return 1.0 - getattr(optimizer, name.removesuffix("_rest"), 1.0)
        return getattr(optimizer, name, 0.0) or 0.0

    return np.array([value(name) for name in HYPER], np.float32)


def _source(data: Feed) -> str:
    """What a data set's inputs are on the card."""
    return "float32" if data.dataset.scale is None else "uint8"


@dataclass
class _Kernels:
    """What a plan launches on data of one type, and the compiled kernels.

    ``constants`` are the addresses of each constant variable, one in each module that reads it.
    """

    lowered: Lowered
    modules: dict[str, Module]
    functions: dict[Entry, Function]
    constants: dict[str, list[int]]


@dataclass
class _Step:
    """The launches of a step, ready for streams: its begin, each share's with what it is of the plan's, and its end."""

    begin: list[Put]
    shares: list[list[tuple[Put, Launch]]]
    finish: list[Put]


class CudaProgram(CudaState):
    """A plan, its arrays, and its launches; ``shared`` are addresses of arrays that another one owns.

    Attributes:
        residency: the kernel inside which the plan trains, or why it trains launch by launch.
    """

    def __init__(
        self, plan: Plan, device: Device, memory_share: float, shared: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(plan, device, shared)
        self._memory_share = memory_share
        self.residency = self._choose()
        self._training: tuple[Feed, Sampling] | None = None
        self._orders: Orders  # of what is trained on
        self._evaluation: Feed | None = None
        self._run_begin: list[Put] = []
        self._ahead: list[Put] = []
        self._placed: dict[int, _Step] = {}  # steps by their place in a graph
        self._replays: dict[int, Replay] = {}  # by their number of steps
        self._tag = 1  # of the next step inside the resident kernel
        self._trains: dict[tuple[str, bool], Launch] = {}  # that kernel's, by what the data are
        self._compiled: dict[tuple[str, bool], _Kernels] = {}  # by what the data are
        self._sampler: _Sampler | None = None
        self._maps: dict[Map, int] = {}
        with device:
            self._streams = [self._stream, *(Stream(device) for _ in range(1, plan.shares))]
            self._fork = Event(device)
            self._joins = [Event(device) for _ in self._streams[1:]]
            self._aside, self._rejoin = Stream(device), Event(device)
            self._take(lower(plan, multiprocessors=device.multiprocessors, source="float32", arch=device.arch).bytes)
            if isinstance(self.residency, Design):
                self._take(self.residency.bytes)
            self._steps = pinned(device, (MOST_RUN_STEPS,), STEP)
            self._losses = pinned(device, (MOST_RUN_STEPS, 2), np.float64)
            self._table = pinned(device, (MOST_RUN_STEPS, TABLE_COLUMNS), np.float32)
            self._stream.synchronize()

    def _choose(self) -> Design | str:
        device = self._device
        return design(
            self._plan, multiprocessors=device.multiprocessors, shared_bytes=device.shared_bytes, arch=device.arch
        )

    # --- data ---

    def attach(self, dataset: Dataset, sampling: Sampling) -> None:
        assert self._plan.optimizer is not None
        with self._device:
            self._replays.clear()
            self._placed.clear()
            if self._training is not None:
                self._training[0].close()
            self._training = None  # the old set makes room for the new one
            self._were_set = True  # for all that this program knows: they may be another one's
            data = self._feed(dataset, sampling.batch_size)
            lowered = self._kernels(data).lowered
            if isinstance(self.residency, Design):
                lowered = Lowered()  # its kernel is bound for each run
            self._run_begin = [self._bind(launch, data, sampling.seed) for launch in lowered.run_begin]
            self._ahead = [self._bind(launch, data, sampling.seed) for launch in lowered.ahead]

            def bind(launches: Sequence[Launch], epoch: int) -> list[Put]:
                self._have([launch.entry for launch in launches])
                return [self._bind(launch, data, sampling.seed, epoch=epoch) for launch in launches]

            self._training = data, sampling
            self._orders = Orders(self._device, self._stream, data, sampling, bind)
            self._set_constant("hyper", hyper_parameters(self._plan.optimizer))
            self._stream.synchronize()

    def _feed(self, dataset: Dataset, batch_rows: int) -> Feed:
        room = int(self._memory_share * self._device.total_bytes)
        return Feed(self._device, self._stream, self._plan, dataset, batch_rows=batch_rows, room=room)

    # --- running ---

    def run(self, first_step: int, rates: np.ndarray) -> np.ndarray:
        assert self._training is not None and self._plan.optimizer is not None
        data, sampling = self._training
        table = self._plan.optimizer.table(first_step, rates).astype(np.float32)
        sums = np.empty((len(rates), 2))
        done = 0
        with self._device:
            self._end_prefetch()
            if self._were_set:
                for launch in self._run_begin:
                    launch(self._stream)
                self._were_set = False
            while done < len(rates):
                epoch, batch = sampling.locate(first_step + done)
                self._orders.begin(epoch)
                end = data.reach(batch * sampling.batch_size)
                of_piece = min(sampling.steps_per_epoch, -(-end // sampling.batch_size)) - batch
                count = min(len(rates) - done, of_piece, MOST_RUN_STEPS)
                self._set_step(first_step + done, batch, sampling.batch_size, len(data.dataset))
                self._table[:count, : table.shape[1]] = table[done : done + count]
                self._set_constant("schedule", self._table[:count])
                if isinstance(self.residency, Design):
                    self._put_resident(self.residency, data, sampling.seed, count)
                else:
                    for launch in self._ahead:  # the step before did it without the rows that have come since
                        launch(self._stream)
                    left = count
                    for steps in GRAPH_STEPS:
                        for _ in range(left // steps):
                            self._replay(steps).launch(self._stream)
                        left %= steps
                self._stream.download(self._losses[:count], self._addresses["losses"])
                data.prepare()
                if batch + count == sampling.steps_per_epoch:
                    self._orders.prepare(epoch + 1)
                self._stream.synchronize()
                sums[done : done + count] = self._losses[:count]
                done += count
        return sums

    def _set_step(self, number: int, batch: int, batch_rows: int, epoch_rows: int, *, run: int = 0) -> None:
        # Its place in the run is its place on the host too: an earlier one may still be on its way.
        self._steps[run] = (number, run, batch, batch_rows, epoch_rows)
        self._stream.upload(self._addresses["step"], self._steps[run : run + 1])

    def _replay(self, steps: int) -> Replay:
        if steps not in self._replays:
            with capture(self._stream, f"a graph of {steps} steps") as graph:
                self._put_steps(steps)
            self._replays[steps] = graph.instantiate()
        return self._replays[steps]

    def _put_resident(self, kernel: Design, data: Feed, seed: int, steps: int) -> None:
        """So many steps, all in one launch."""
        if self._tag + steps > MOST_TAG:
            self._stream.fill(self._addresses["mail"], self._sizes["mail"])
            self._tag = 1
        kind = _source(data), data.texture is not None
        if kind not in self._trains:
            self._trains[kind] = kernel.train(kind[0], textured=kind[1])
        self._bind(self._trains[kind], data, seed, steps=steps, tag=self._tag)(self._stream)
        add_errors = kernel.add_errors(steps)
        self._bind(add_errors, data, seed)(self._stream)
        self._tag += steps

    def _put_steps(self, count: int) -> None:
        """As many steps as a graph may hold; inputs of some are made ready together."""
        assert self._training is not None
        data, sampling = self._training
        lowered = self._kernels(data).lowered
        for launch in lowered.deal:
            self._bind(launch, data, sampling.seed, graph_steps=count)(self._stream)
        for place in range(count):
            if place % lowered.stages == 0:
                for launch in lowered.staged:
                    (blocks, _, _), steps = launch.grid, min(lowered.stages, count - place)
                    of_steps = replace(launch, grid=(blocks, steps, 1))
                    self._bind(of_steps, data, sampling.seed, step=self._step_at(place))(self._stream)
            self._put_step(place)

    def _step_at(self, place: int) -> int:
        """The address of the struct Step of a graph's step."""
        return self._addresses["steps"] + STEP.itemsize * place

    def _step(self, place: int) -> _Step:
        """The launches of the step at this place of a graph."""
        if place not in self._placed:
            assert self._training is not None
            data, sampling = self._training
            lowered = self._kernels(data).lowered
            stage = place % lowered.stages
            its_own = {name: self._addresses[name] + stage * size for name, size in lowered.staged_bytes.items()}

            def bind(launch: Launch) -> Put:
                if launch is first and place % lowered.stages == 0:  # it does not follow the step before
                    launch = replace(launch, overlaps=False)
                return self._bind(launch, data, sampling.seed, stage, step=self._step_at(place), **its_own)

            first = [*lowered.begin, *lowered.shares[0]][0]
            self._placed[place] = _Step(
                [bind(launch) for launch in lowered.begin],
                [[(bind(launch), launch) for launch in share] for share in lowered.shares],
                [bind(launch) for launch in lowered.finish],
            )
        return self._placed[place]

    def _put_step(self, place: int) -> None:
        """A step of a graph on the streams: they fork for the shares, and join for what is done once."""
        step = self._step(place)
        for launch in step.begin:
            launch(self._stream)
        self._stream.record(self._fork)
        for stream in self._streams[1:]:
            stream.wait(self._fork)
        behind: list[Put] = []
        has_asides = False
        for stream, share in zip(self._streams, step.shares, strict=True):
            for put, planned in share:
                if not planned.aside:
                    put(stream)
                    continue
                stream.record(self._rejoin)
                self._aside.wait(self._rejoin)
                has_asides = True
                if planned.behind:
                    behind.append(put)
                else:
                    put(self._aside)
        for put in behind:  # else they take multiprocessors that what they run beside wants whole
            put(self._aside)
        if has_asides:
            self._aside.record(self._rejoin)
            self._stream.wait(self._rejoin)
        for stream, join in zip(self._streams[1:], self._joins, strict=True):
            stream.record(join)
            self._stream.wait(join)
        for launch in step.finish:
            launch(self._stream)

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        """By a program beside this one, which keeps what the step's fused kernels do not store."""
        assert self._training is not None
        data, sampling = self._training
        if self._sampler is None:
            shared = {name: self._addresses[name] for name in ("parameters", "slots", "statistics")}
            plan = self._plan.to_gradient()
            self._sampler = _Sampler(plan, self._device, self._memory_share, shared)
        return self._sampler.histograms_of(data.dataset.first(rows), sampling.seed, step, bins)

    # --- evaluating ---

    def evaluate(self, dataset: Dataset, metrics: Sequence[str]) -> dict[str, np.ndarray]:
        sums, loss = zero_sums(self._plan, metrics), np.zeros(2)
        for batch, rows in enumerate(self._sweep(dataset, metrics)):
            count, is_last = batch % MOST_RUN_STEPS + 1, rows.stop == len(dataset)
            if is_last:
                for name, array in sums.items():
                    self._stream.download(array, self._addresses[sums_of(name)])
            if is_last or count == MOST_RUN_STEPS:
                self._stream.download(self._losses[:count], self._addresses["losses"])
                self._stream.synchronize()
                loss += self._losses[:count].sum(axis=0)
        return {**sums, "loss": loss}

    def predict(self, dataset: Dataset, *, logits: bool = False) -> np.ndarray:
        result = np.empty((len(dataset), self._plan.n_out), np.float32)
        for rows in self._sweep(dataset):
            source = self._addresses[self._plan.logits if logits else self._plan.output]
            self._stream.download(result[rows], source)
            self._stream.synchronize()
        return result

    def _sweep(self, dataset: Dataset, metrics: Sequence[str] = ()) -> Iterator[slice]:
        """Evaluate a data set batch by batch, in order; within the device, and after each its rows.

        The losses of ``MOST_RUN_STEPS`` batches are kept, and the sums of ``metrics`` over all.
        """
        capacity = self._plan.capacity
        with self._device:
            self._stream.synchronize()  # an evaluation that was broken off may have left work behind
            if self._evaluation is None or self._evaluation.dataset is not dataset:
                if self._evaluation is not None:
                    self._evaluation.close()
                self._evaluation = None  # the old set makes room for the new one
                self._evaluation = self._feed(dataset, capacity)
            feed = self._evaluation
            feed.begin(np.arange(len(dataset)))
            of_metrics, at_the_end = self._begin_metrics(feed, metrics)
            to_launch = [*self._kernels(feed).lowered.evaluation, *of_metrics]
            launches = [self._bind(launch, feed, 0) for launch in to_launch]
            for first in self._kernels(feed).lowered.evaluation_begin:
                self._bind(first, feed, 0)(self._stream)
            for batch, start in enumerate(range(0, len(dataset), capacity)):
                feed.reach(start)
                self._set_step(0, batch, capacity, len(dataset), run=batch % MOST_RUN_STEPS)
                for launch in launches:
                    launch(self._stream)
                end = min(start + capacity, len(dataset))
                if end == len(dataset):
                    for last in at_the_end:
                        self._bind(last, feed, 0)(self._stream)
                feed.prepare()
                yield slice(start, end)

    def _begin_metrics(self, data: Feed, metrics: Sequence[str]) -> tuple[list[Launch], list[Launch]]:
        """The launches of metrics, for each batch and behind the last one, compiled, on sums of zero."""
        if not metrics:
            return [], []
        sizes, of_set = metric_bytes(self._plan, metrics), rank_bytes(self._plan, metrics, len(data.dataset))
        self._take(sizes)
        data.reserve(of_set)
        for name, size in sizes.items():
            self._stream.fill(self._addresses[name], size)
        for name in of_set.keys() & CLEARED:
            self._stream.fill(data.addresses[name], of_set[name])
        assert self._plan.target_kind is not None
        textured = data.texture is not None
        self._have(kernels.metric_entries(self._plan.target_kind, textured=textured))
        if of_set:
            self._have(kernels.rank_entries())
        of_batch = metric_launches(self._plan, metrics, textured=textured)
        return of_batch, rank_launches(self._plan, metrics, len(data.dataset))

    # --- kernels ---

    def _make_maps(self, maps: Iterable[Map]) -> None:
        """Maps of planes, those of them that are not there yet."""
        missing = [each for each in maps if each not in self._maps]
        if not missing:
            return
        self._arenas.append(Arena(self._device, TENSOR_MAP_BYTES * len(missing)))
        start = self._arenas[-1].take(TENSOR_MAP_BYTES * len(missing))
        for each, place in zip(missing, count(start, TENSOR_MAP_BYTES), strict=False):
            shape, pitch = (each.planes, each.rows, each.columns), padded_columns(each.columns)
            planes = self._addresses[each.array] + each.place * each.nbytes
            self._stream.upload(place, tensor_map(planes, shape, pitch, each.box_rows))
            self._maps[each] = place

    def _kernels(self, data: Feed) -> _Kernels:
        """The kernels for data of this type, compiled at first need."""
        source, textured = form = _source(data), data.texture is not None
        if form not in self._compiled:
            multiprocessors = self._device.multiprocessors
            arch = self._device.arch
            lowered = lower(self._plan, multiprocessors=multiprocessors, source=source, textured=textured, arch=arch)
            self._take(lowered.bytes)  # where others than before are stored for data of this type
            for name, words in lowered.words.items():
                self._stream.upload(self._addresses[name], np.array(words, np.int32))
            self._make_maps(lowered.maps())
            entries = lowered.entries()
            if isinstance(self.residency, Design):
                resident = [self.residency.train(source, textured=textured), self.residency.add_errors(1)]
                evaluated = [*lowered.evaluation_begin, *lowered.evaluation]
                entries = Lowered(evaluation=[*evaluated, *resident]).entries()
            modules, functions = self._compile(entries)
            reading = [modules[header] for header in {entry.header: None for entry in entries if entry.constants}]
            constants = {name: [module.constant(name)[0] for module in reading] for name in CONSTANTS}
            self._compiled[form] = _Kernels(lowered, modules, functions, constants)
        return self._compiled[form]

    def _set_constant(self, name: str, values: np.ndarray) -> None:
        """In each module that reads it."""
        assert self._training is not None
        for address in self._kernels(self._training[0]).constants[name]:
            self._stream.upload(address, values)

    def _bind(self, launch: Launch, data: Feed, seed: int, stage: int = 0, **others: Value) -> Put:
        """A launch with its arguments packed; ``others`` are named values beside the data's.

        ``stage`` is the place of its step among those that are made ready together.
        """
        numbers: dict[str, Value] = {"scale": data.scale, "seed": seed, "weights": data.addresses.get("weights")}
        numbers |= others
        numbers["plain targets"] = data.addresses.get("targets")
        numbers["targets"] = numbers["plain targets"] if data.texture is None else int(data.texture)

        def resolve(value: Value) -> int | float | None:
            if isinstance(value, Map):
                return self._maps[replace(value, place=stage) if value.array in others else value]
            if not isinstance(value, At):
                return value
            if value.array in numbers:
                return numbers[value.array]  # type: ignore[return-value]
            address = data.addresses.get(value.array) or self._addresses[value.array]
            return address + value.offset * (8 if value.array in DOUBLES else 4)

        function = self._kernels(data).functions.get(launch.entry) or self._others[launch.entry]
        packed = pack(launch.entry, [resolve(launch.values[a.name]) for a in launch.entry.arguments])
        grid = launch.grid
        overlaps = launch.overlaps
        return lambda stream: function.launch(stream, grid, packed, overlaps=overlaps)


class _Sampler(CudaProgram):
    """A plan that ends with the gradient, launch by launch, on the parameters of another program."""

    def _choose(self) -> str:
        return "its arrays are there to be looked at"

    def histograms_of(self, data: Dataset, seed: int, step: int, bins: int) -> dict[str, Histogram]:
        """Of what layers put out for these rows, and of the gradient."""
        plan, rows = self._plan, len(data)
        self.attach(data, Sampling(rows, rows, seed=seed, shuffle=False, first_step=step))
        ((_, weight),) = self.run(step, np.zeros(1))
        factor = 1.0 / weight if weight > 0.0 else 1.0
        with self._device:
            found = {
                name: self._count(y, 0, rows * plan.buffers[y].shape[-1], bins) for name, y in plan.outputs().items()
            }
            for p in plan.parameters:
                found[f"{p.name}.gradient"] = scaled(self._count("gradient", p.offset, p.size, bins), factor)
        return found
