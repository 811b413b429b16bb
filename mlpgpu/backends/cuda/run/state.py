"""The state of a program among its arrays: how it comes to the card, is inspected there, and is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....initializers import INITIALIZERS, draw_part, initial_values
from ....plan import Parameter, PartOf, Plan
from ....random import WORDS_PER_BLOCK
from ...base import MOST_BINS, Histogram, State, bin_edges
from .. import kernels
from ..kernels import ceil_div
from ..runtime import Event, LoadedKernels, Stream, pack, pinned
from ..select.data import by_kernel
from .primitives import MOST_BLOCKS, grid_over
from .workspace import Workspace


class DeviceState:
    """Parameters, slots and statistics on a card.

    Attributes:
        were_set: whether parameters may have been set since steps ran last.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._plan, self._device = workspace, workspace.plan, workspace.device
        self._stream, self._addresses = workspace.stream, workspace.arrays.addresses
        self.were_set = True
        self._host: dict[str, np.ndarray] = {}  # where the state is prefetched to, in the order of State
        self._reader: Stream
        self._prefetched: Event | None = None  # when the state that was prefetched last is on the host

    @property
    def _own(self) -> slice:
        """The parameters whose slots are here: a rank's slice."""
        return self._plan.slices[self._workspace.rank].parameters

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays, in the order of State."""
        plan = self._plan
        return {
            "parameters": (1, plan.parameter_count),
            "slots": (len(plan.optimizer.slots) if plan.optimizer else 0, 1, self._own.stop - self._own.start),
            "statistics": (1, plan.statistic_count),
        }

    def _parts(self, name: str, array: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Parts of an array of the state, and where each lies on the card: slots have a pitch there."""
        address = self._addresses[name]
        if name != "slots":
            yield array, address
            return
        pitch = kernels.slot_pitch(array.shape[-1])
        for number, slot in enumerate(array):
            yield slot, address + array.itemsize * pitch * number

    def _upload(self, name: str, array: np.ndarray) -> None:
        for part, address in self._parts(name, array.astype(np.float32, copy=False)):
            if part.size:
                self._stream.upload(address, np.ascontiguousarray(part))

    def _download(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = np.empty(shape, np.float32)
        self._fill(array, name, self._stream)
        return array

    def _fill(self, array: np.ndarray, name: str, stream: Stream) -> None:
        for part, address in self._parts(name, array):
            if part.size:
                stream.download(part, address)

    # --- to the card and back ---

    def load(self, state: State, *, snapshot: bool) -> None:
        """See :meth:`Program.load`."""
        with self._device:
            self.end_prefetch()
            if snapshot:
                self.take_snapshot_array()
            self._upload("snapshot" if snapshot else "parameters", state.parameters)
            if not snapshot:
                self.were_set = True
                self._upload("slots", state.slots[:, :, self._own])
                self._upload("statistics", state.statistics)
                self._workspace.set_statistics(state.statistics[0])
            self._stream.synchronize()

    def read(self, *, snapshot: bool) -> State:
        """See :meth:`Program.read`."""
        with self._device:
            if snapshot:
                self.take_snapshot_array()
            if self._prefetched is not None and not snapshot:
                self._prefetched.synchronize()
                return self._whole(*(array.copy() for array in self._host.values()))
            arrays = [
                self._download("snapshot" if snapshot and name == "parameters" else name, shape)
                for name, shape in self._shapes.items()
            ]
            self._stream.synchronize()
        return self._whole(*arrays)

    def _whole(self, parameters: np.ndarray, slots: np.ndarray, statistics: np.ndarray) -> State:
        """A state with room for all slots, of which this rank has its own; the others are 0."""
        if slots.shape[2] < self._plan.parameter_count:
            own, slots = slots, np.zeros((*slots.shape[:2], self._plan.parameter_count), np.float32)
            slots[:, :, self._own] = own
        return State(parameters, slots, statistics)

    def prefetch(self) -> None:
        """See :meth:`Program.prefetch`: a stream of its own copies; what changes the state waits for the copy."""
        with self._device:
            if not self._host:
                self._host = {
                    name: pinned(self._device, shape, np.float32) if all(shape) else np.empty(shape, np.float32)
                    for name, shape in self._shapes.items()
                }
                self._reader = Stream(self._device, "prefetch")
            changed, self._prefetched = Event(self._device), Event(self._device)
            self._stream.record(changed)
            self._reader.wait(changed)
            for name, array in self._host.items():
                self._fill(array, name, self._reader)
            self._reader.record(self._prefetched)

    def end_prefetch(self) -> None:
        """The state is about to change, so a prefetched copy is of no more use; one under way is waited for."""
        if self._prefetched is not None:
            self._stream.wait(self._prefetched)
            self._prefetched = None

    def load_statistics(self, statistics: np.ndarray) -> None:
        """Load statistics (C,) alone."""
        with self._device:
            self._upload("statistics", statistics)
            self._workspace.set_statistics(statistics)
            self._stream.synchronize()

    def read_statistics(self) -> np.ndarray:
        """The statistics, (C,)."""
        with self._device:
            found = self._download("statistics", (self._plan.statistic_count,))
            self._stream.synchronize()
        return found

    # --- initial values ---

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        """See :meth:`Program.draw`: a kernel draws large uniform parameters in place; others come from the host."""
        with self._device:
            self.end_prefetch()
            draw_parameters(self._plan, seed, self._addresses["parameters"], self._stream, self._workspace.auxiliary)
            self._stream.fill(self._addresses["slots"], max(1, self._workspace.arrays.sizes["slots"]))
            self._upload("statistics", statistics)
            self._workspace.set_statistics(statistics[0])
            self.were_set = True
            self._stream.synchronize()

    # --- the snapshot ---

    def take_snapshot_array(self) -> None:
        """Allocate it at first need: most programs keep no parameters."""
        self._workspace.take({"snapshot": 4 * self._plan.parameter_count})

    def snapshot(self) -> None:
        """See :meth:`Program.snapshot`."""
        with self._device:
            self.take_snapshot_array()
            self._copy_parameters("parameters", "snapshot")

    def restore(self) -> None:
        """See :meth:`Program.restore`."""
        with self._device:
            self.end_prefetch()
            self.were_set = True
            self._copy_parameters("snapshot", "parameters")

    def _copy_parameters(self, source: str, destination: str) -> None:
        self._stream.copy(self._addresses[destination], self._addresses[source], 4 * self._plan.parameter_count)
        self._stream.synchronize()

    # --- looking at it ---

    def is_finite(self) -> bool:
        """See :meth:`Program.is_finite`: a kernel looks at many values, the host at few."""
        count = self._plan.parameter_count
        if not by_kernel(count):
            return bool(np.isfinite(self.read(snapshot=False).parameters).all())
        with self._device:
            self._workspace.take({"found": 4})
            self._stream.fill(self._addresses["found"], 4)
            values = self._addresses["parameters"], count, self._addresses["found"]
            self._workspace.launch_over(kernels.find_nonfinite(), count, values)
            found = self._download("found", (1,))
            self._stream.synchronize()
        return not found.any()

    def square_sum(self, parts: Sequence[slice]) -> float:
        """See :meth:`Program.square_sum`: the host gets the sums of blocks alone."""
        sums = np.zeros((len(parts), MOST_BLOCKS))
        array = f"square sums of {len(parts)}"
        with self._device:
            self._workspace.take({array: sums.nbytes})
            self._stream.fill(self._addresses[array], sums.nbytes)
            for place, part in enumerate(parts):
                x, size = self._addresses["parameters"] + 4 * part.start, part.stop - part.start
                in_block = kernels.ceil_div(size, grid_over(size)[0])
                values = x, size, in_block, self._addresses[array] + place * sums[0].nbytes
                self._workspace.launch_over(kernels.squares(), size, values)
            self._stream.download(sums, self._addresses[array])
            self._stream.synchronize()
        return float(sums.sum())

    def histograms(self, bins: int) -> dict[str, Histogram]:
        """See :meth:`Program.histograms`."""
        with self._device:
            return {p.name: self.count("parameters", p.offset, p.size, bins) for p in self._plan.parameters}

    def count(self, array: str, offset: int, size: int, bins: int) -> Histogram:
        """The histogram of ``size`` elements of a float32 array.

        They are counted in place: the host gets the least and the greatest of each block, and the counts.
        """
        self._workspace.auxiliary.load([kernels.extremes(), kernels.histogram()])
        self._workspace.take({"extremes": 8 * MOST_BLOCKS, "edges": 8 * (MOST_BINS + 1), "bins": 8 * MOST_BINS})
        address = {name: self._addresses[name] for name in ("extremes", "edges", "bins")}
        x = self._addresses[array] + 4 * offset
        self._workspace.launch_over(kernels.extremes(), size, (x, size, address["extremes"]))
        ends = np.empty((grid_over(size)[0], 2), np.float32)
        self._stream.download(ends, address["extremes"])
        self._stream.synchronize()
        edges = bin_edges(float(ends[:, 0].min()), float(ends[:, 1].max()), bins)
        self._stream.upload(address["edges"], edges)
        self._stream.fill(address["bins"], 8 * bins)
        self._workspace.launch_over(kernels.histogram(), size, (x, size, address["edges"], bins, address["bins"]))
        counts = np.empty(bins, np.int64)
        self._stream.download(counts, address["bins"])
        self._stream.synchronize()
        return counts, edges


def draw_parameters(plan: Plan, seed: int, address: int, stream: Stream, loaded: LoadedKernels) -> None:
    """Draw initial values at an address: a kernel draws large uniform parameters; others come from the host."""
    for p in plan.parameters:
        place, scheme = address + 4 * p.offset, INITIALIZERS[p.initializer]
        if scheme.distribution == "constant":
            stream.fill(place, 4 * p.size)
        elif p.of is not None:
            _draw_part(p, p.of, seed, place, stream, loaded)
        elif scheme.distribution == "uniform" and by_kernel(p.size):
            entry = kernels.initial_uniform()
            loaded.load([entry])
            values = seed, int(p.purpose), p.layer, scheme.limit(p.fans), p.size, place
            loaded[entry].launch(stream, grid_over(p.size // WORDS_PER_BLOCK), pack(entry, values))
        else:
            drawn = initial_values(p.initializer, p.shape, p.fans, seed=seed, layer=p.layer, purpose=p.purpose)
            stream.upload(place, drawn.astype(np.float32))
            stream.synchronize()  # before the array goes


def _draw_part(p: Parameter, of: PartOf, seed: int, address: int, stream: Stream, loaded: LoadedKernels) -> None:
    """Draw a part of an array: by a kernel where values can be addressed, else on the host."""
    scheme = INITIALIZERS[p.initializer]
    if scheme.distribution != "uniform" or not by_kernel(p.size):
        drawn = np.empty(p.shape, np.float32)
        whole = of.whole.shape
        draw_part(drawn, p.initializer, whole, of.index, p.fans, seed=seed, layer=p.layer, purpose=p.purpose)
        stream.upload(address, drawn)
        stream.synchronize()  # before the array goes
        return
    entry, rows, width = kernels.initial_uniform_of_part(), p.shape[0], of.whole.size // of.whole.shape[0]
    n, first = p.size // rows, of.first * (width if of.axis == 0 else 1)
    if len(p.shape) == 1:  # one row
        rows, n, width, first = 1, p.size, of.whole.size, of.first
    loaded.load([entry])
    values = seed, int(p.purpose), p.layer, scheme.limit(p.fans), first, width, rows, n, address
    loaded[entry].launch(stream, grid_over(rows * ceil_div(n, WORDS_PER_BLOCK)), pack(entry, values))
