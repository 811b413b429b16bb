"""A plan's arrays on a card, and the state among them: how it comes there, is looked at, and is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...errors import BackendError
from ...initializers import INITIALIZERS, initial_values
from ...plan import Parameter, Plan
from ...random import WORDS_PER_BLOCK, Purpose
from ..base import MOST_BINS, Histogram, Program, State, bin_edges
from . import compiler, kernels
from .driver import Arena, Device, Event, ExtendedModule, Function, Module, Stream, aligned, pack, pinned
from .kernels import ROW_THREADS, Entry, ceil_div
from .local_stack import OF_ROWS

COUNT_BLOCKS = 1024  # at most, of a kernel that goes through a parameter's values
LEAST_BY_KERNEL = 1 << 20  # of a parameter's values: below, the host has gone through them before a kernel is compiled


class CudaState(Program):
    """The half of a program that holds memory; ``shared`` are addresses of arrays that another one owns."""

    def __init__(self, plan: Plan, device: Device, shared: Mapping[str, int] | None = None) -> None:
        self._plan, self._device = plan, device
        self._others: dict[Entry, Function] = {}  # kernels of no plan, once they were asked for
        self._were_set = True  # whether the parameters may have been, since the last run
        self._host: dict[str, np.ndarray] = {}  # where the state is prefetched to, in the order of State
        self._reader: Stream
        self._prefetched: Event | None = None  # when the state that was last asked for is there
        self._arenas: list[Arena] = []
        self._addresses: dict[str, int] = dict(shared or {})
        self._sizes: dict[str, int] = {}
        with device:
            self._stream = Stream(device)

    # --- memory ---

    def _take(self, sizes: Mapping[str, int]) -> None:
        """Arrays of zeros of so many bytes, those of them that are not there yet."""
        missing = {name: max(1, size) for name, size in sizes.items() if name not in self._addresses}
        if not missing:
            return
        self._check_room(missing)
        arena = Arena(self._device, sum(map(aligned, missing.values())))
        self._arenas.append(arena)
        self._sizes |= {name: sizes[name] for name in missing}
        for name, size in missing.items():
            self._addresses[name] = arena.take(size)
            self._stream.fill(self._addresses[name], size)

    def _check_room(self, sizes: Mapping[str, int]) -> None:
        """Raises BackendError if the card has no room for arrays of so many bytes; says what it has room for."""
        total, free, plan = sum(map(aligned, sizes.values())), self._device.free_bytes, self._plan
        if total <= free:
            return
        of_rows = sum(sizes.get(name, 0) for name, buffer in plan.buffers.items() if buffer.axes[1] == "row")
        of_rows += sum(size for name, size in sizes.items() if name.endswith(OF_ROWS))
        others = total - of_rows
        if others < free:
            rows = (free - others) * plan.capacity // of_rows
            hint = f"a batch of at most about {rows:,} rows fits"
        else:
            hint = f"about {free * plan.parameter_count // others:,} of the {plan.parameter_count:,} parameters fit"
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        got = f"{total:,} for " + ", ".join(f"{name} ({size:,})" for name, size in largest) + ", …"
        what = f"memory of GPU {self._device.index}"
        raise BackendError(what, expected=f"at most the {free:,} bytes that are free", got=got, hint=hint)

    def _upload(self, name: str, array: np.ndarray) -> None:
        if array.size:
            self._stream.upload(self._addresses[name], np.ascontiguousarray(array, np.float32))

    def _download(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = np.empty(shape, np.float32)
        if array.size:
            self._stream.download(array, self._addresses[name])
        return array

    # --- state ---

    def load(self, state: State, *, snapshot: bool = False) -> None:
        with self._device:
            self._end_prefetch()
            if snapshot:
                self._take(self._snapshot_bytes)
            self._upload("snapshot" if snapshot else "parameters", state.parameters)
            if not snapshot:
                self._were_set = True
                self._upload("slots", state.slots)
                self._upload("statistics", state.statistics)
            self._stream.synchronize()

    @property
    def _snapshot_bytes(self) -> dict[str, int]:
        """Of the array that only those pay for who keep parameters."""
        return {"snapshot": 4 * self._plan.parameter_count}

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        """A kernel draws large uniform parameters where they lie; others come from the host."""
        with self._device:
            self._end_prefetch()
            for parameter in self._plan.parameters:
                self._draw(parameter, seed)
            self._stream.fill(self._addresses["slots"], max(1, self._sizes["slots"]))
            self._upload("statistics", statistics)
            self._were_set = True
            self._stream.synchronize()

    def _draw(self, p: Parameter, seed: int) -> None:
        place, scheme = self._addresses["parameters"] + 4 * p.offset, INITIALIZERS[p.initializer]
        if scheme.distribution == "constant":
            self._stream.fill(place, 4 * p.size)
        elif scheme.distribution == "uniform" and p.size >= LEAST_BY_KERNEL:
            values = seed, int(Purpose.INITIAL_VALUES), p.layer, scheme.limit(p.fans), p.size, place
            self._launch_over(kernels.initial_uniform(), p.size // WORDS_PER_BLOCK, values)
        else:
            drawn = initial_values(p.initializer, p.shape, p.fans, seed=seed, layer=p.layer)
            self._stream.upload(place, drawn.astype(np.float32))
            self._stream.synchronize()  # before the array goes

    def is_finite(self) -> bool:
        """By a kernel where there is much to look at."""
        count = self._plan.parameter_count
        if count < LEAST_BY_KERNEL:
            return bool(np.isfinite(self.read().parameters).all())
        with self._device:
            self._take({"found": 4})
            self._stream.fill(self._addresses["found"], 4)
            values = self._addresses["parameters"], count, self._addresses["found"]
            self._launch_over(kernels.find_nonfinite(), count, values)
            found = self._download("found", (1,))
            self._stream.synchronize()
        return not found.any()

    def read(self, *, snapshot: bool = False) -> State:
        plan = self._plan
        slots = len(plan.optimizer.slots) if plan.optimizer else 0
        with self._device:
            if snapshot:
                self._take(self._snapshot_bytes)
            if self._prefetched is not None and not snapshot:
                self._prefetched.synchronize()
                return State(*(array.copy() for array in self._host.values()))
            state = State(
                self._download("snapshot" if snapshot else "parameters", (1, plan.parameter_count)),
                self._download("slots", (slots, 1, plan.parameter_count)),
                self._download("statistics", (1, plan.statistic_count)),
            )
            self._stream.synchronize()
        return state

    def prefetch(self) -> None:
        """The copy runs on a stream of its own, beside an evaluation; what changes the state waits for it."""
        plan = self._plan
        with self._device:
            if not self._host:
                slots = len(plan.optimizer.slots) if plan.optimizer else 0
                shapes = {
                    "parameters": (1, plan.parameter_count),
                    "slots": (slots, 1, plan.parameter_count),
                    "statistics": (1, plan.statistic_count),
                }
                self._host = {
                    name: pinned(self._device, shape, np.float32) if all(shape) else np.empty(shape, np.float32)
                    for name, shape in shapes.items()
                }
                self._reader = Stream(self._device)
            changed, self._prefetched = Event(self._device), Event(self._device)
            self._stream.record(changed)
            self._reader.wait(changed)
            for name, array in self._host.items():
                if array.size:
                    self._reader.download(array, self._addresses[name])
            self._reader.record(self._prefetched)

    def _end_prefetch(self) -> None:
        """The state is about to change: that waits for a copy under way, which is of no use any more."""
        if self._prefetched is not None:
            self._stream.wait(self._prefetched)
            self._prefetched = None

    def snapshot(self) -> None:
        with self._device:
            self._take(self._snapshot_bytes)
        self._copy_parameters("parameters", "snapshot")

    def restore(self) -> None:
        self._copy_parameters("snapshot", "parameters")

    def _copy_parameters(self, source: str, destination: str) -> None:
        with self._device:
            if destination == "parameters":
                self._end_prefetch()
                self._were_set = True
            self._stream.copy(self._addresses[destination], self._addresses[source], self._sizes["parameters"])
            self._stream.synchronize()

    def histograms(self, bins: int) -> dict[str, Histogram]:
        """Values are counted where they lie; the host sees the least, the greatest, and the counts."""
        with self._device:
            return {p.name: self._count("parameters", p.offset, p.size, bins) for p in self._plan.parameters}

    def _count(self, array: str, offset: int, size: int, bins: int) -> Histogram:
        """Of ``size`` elements of a float32 array."""
        self._have([kernels.extremes(), kernels.histogram()])
        self._take({"extremes": 8 * COUNT_BLOCKS, "edges": 8 * (MOST_BINS + 1), "bins": 8 * MOST_BINS})
        place = {name: self._addresses[name] for name in ("extremes", "edges", "bins")}
        x = self._addresses[array] + 4 * offset
        self._launch_over(kernels.extremes(), size, (x, size, place["extremes"]))
        ends = np.empty((min(ceil_div(size, ROW_THREADS), COUNT_BLOCKS), 2), np.float32)
        self._stream.download(ends, place["extremes"])
        self._stream.synchronize()
        edges = bin_edges(float(ends[:, 0].min()), float(ends[:, 1].max()), bins)
        self._stream.upload(place["edges"], edges)
        self._stream.fill(place["bins"], 8 * bins)
        self._launch_over(kernels.histogram(), size, (x, size, place["edges"], bins, place["bins"]))
        counts = np.empty(bins, np.int64)
        self._stream.download(counts, place["bins"])
        self._stream.synchronize()
        return counts, edges

    # --- kernels of no plan ---

    def _launch_over(self, entry: Entry, elements: int, values: Sequence[float]) -> None:
        """Launch a kernel of no plan on a grid for so many elements."""
        self._have([entry])
        grid = min(ceil_div(elements, ROW_THREADS), COUNT_BLOCKS), 1, 1
        self._others[entry].launch(self._stream, grid, pack(entry, values))

    def _have(self, entries: Sequence[Entry]) -> None:
        """Compile kernels of no plan, unless that was done."""
        missing = [entry for entry in entries if entry not in self._others]
        if missing:
            self._others |= self._compile(missing)[1]

    def _compile(self, entries: Iterable[Entry]) -> tuple[dict[str, Module], dict[Entry, Function]]:
        units = kernels.units(entries)
        cubins = compiler.compile_units(units, self._device.arch)
        modules = {
            header: (ExtendedModule if any(e.is_extended for e in units[header]) else Module)(self._device, cubin.image)
            for header, cubin in cubins.items()
        }
        return modules, {entry: modules[entry.header].function(entry) for unit in units.values() for entry in unit}
