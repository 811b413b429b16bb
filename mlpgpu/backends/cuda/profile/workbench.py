"""Kernels tried out one at a time, without a plan, on arrays that the caller fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from .. import kernels
from ..kernels import Entry, strided_grid
from ..kernels.launches import BLOCKS_PER_MULTIPROCESSOR
from ..runtime import Arena, Device, LoadedKernels, Stopwatch, Stream, pack, seconds_of

LONG_SECONDS = 0.1  # longer work is measured once


class Workbench:
    """A card with kernels loaded and arrays beside them; used inside ``with device:``.

    Arguments:
        entries: the kernels; those that this card cannot run are left out.
        sources: the folder of headers that are not the package's own.

    Raises:
        BackendError: a kernel cannot be compiled or loaded.
    """

    def __init__(self, device: Device, entries: Iterable[Entry], sources: Path | None = None) -> None:
        self._stream = Stream(device)
        self._arenas: list[Arena] = []
        self.device = device
        self._find = kernels.find_nonfinite()
        runnable = (entry for entry in (*entries, self._find) if entry.runs_on(device.arch))
        self._functions = LoadedKernels(device, runnable, sources=sources)

    def empty(self, nbytes: int) -> int:
        """Allocate and poison so many bytes, and return their address."""
        self._arenas.append(arena := Arena(self.device, nbytes))
        address = arena.take(nbytes)
        self.poison(address, nbytes)
        return address

    def poison(self, address: int, nbytes: int) -> None:
        """Set all bytes to 0xFF, which is NaN in float32."""
        self._stream.fill(address, nbytes, 0xFF)

    def array(self, values: np.ndarray) -> int:
        """Copy an array to the card and return the address of the copy."""
        address = self.empty(values.nbytes)
        self.upload(address, values)
        return address

    def zero(self, address: int, nbytes: int) -> None:
        """Set all bytes to 0."""
        self._stream.fill(address, nbytes)

    def upload(self, address: int, values: np.ndarray) -> None:
        """Copy an array to the card."""
        self._stream.upload(address, np.ascontiguousarray(values))
        self._stream.synchronize()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy so many bytes within the card."""
        self._stream.copy(destination, source, nbytes)

    def read(self, address: int, shape: tuple[int, ...]) -> np.ndarray:
        """The float32 array at an address, once all work is done."""
        values = np.empty(shape, np.float32)
        self._stream.download(values, address)
        self._stream.synchronize()
        return values

    def is_finite(self, address: int, count: int) -> bool:
        """Whether ``count`` float32 numbers are all finite, which a kernel finds out."""
        found = self.empty(4)
        self.zero(found, 4)
        grid = strided_grid(count, BLOCKS_PER_MULTIPROCESSOR * self.device.multiprocessors)
        self.put(self._find, grid, {"x": address, "n": count, "found": found})
        return not self.read(found, (1,)).view(np.uint32).any()

    def clear(self) -> None:
        """Free all arrays."""
        self._stream.synchronize()
        while self._arenas:
            self._arenas.pop().close()

    def put(self, entry: Entry, grid: tuple[int, ...], values: Mapping[str, float | None]) -> None:
        """Launch a kernel; ``values`` are its arguments by name, addresses for pointers."""
        arguments = pack(entry, [values[argument.name] for argument in entry.arguments])
        self._functions[entry].launch(self._stream, grid, arguments)

    def seconds(self, put: Callable[[], object]) -> float:
        """How long what ``put`` launches takes: the median of some replays, or one run where that is long."""
        once = Stopwatch(self._stream).seconds(put)
        return once if once > LONG_SECONDS else seconds_of(self._stream, put)
