"""A card that is the host: what the runtime offers programs, by the kernels' sources compiled for the host.

Work is done when a stream is given it, and a graph is a list of it.  Memory is host memory; a pointer beyond an array
is found by the sanitizers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shim_runner import DTYPES, From, run

from mlpgpu.backends.constants import HYPER, LOSS_NUMBERS
from mlpgpu.backends.cuda.kernels import Argument, Entry
from mlpgpu.backends.cuda.kernels.launches import MOST_RUN_STEPS
from mlpgpu.backends.cuda.run.steps import TABLE_COLUMNS

_SHIM = threading.Lock()  # programs of it answer one at a time
# Of the constant variables of math/optimizers.cuh and math/losses.cuh.
CONSTANT_BYTES = {
    "hyper": 4 * len(HYPER), "schedule": 4 * TABLE_COLUMNS * MOST_RUN_STEPS, "loss_numbers": 4 * len(LOSS_NUMBERS),
}  # fmt: skip


class HostCard:
    """A device, with the arrays that are on it."""

    def __init__(self, index: int = 0, multiprocessors: int = 2, arch: str = "sm_80") -> None:
        self.index, self.name, self.arch, self.multiprocessors = index, "host", arch, multiprocessors
        self.compute_capability, self.shared_bytes, self.most_texels = (8, 0), 99 << 10, 1 << 27
        self.total_bytes = self.free_bytes = 1 << 30
        self.bus_id, self.is_forked, self.last_launch = str(index), False, ""
        self.arrays: dict[int, np.ndarray] = {}
        self.peers: list[HostCard] = []  # whose memory kernels can read
        self.recorded: list[Callable[[], None]] | None = None  # while a graph is captured

    def __enter__(self) -> HostCard:
        return self

    def __exit__(self, *error: object) -> None: ...

    def allocate(self, nbytes: int) -> int:
        array = np.full(max(1, nbytes), 0xFF, np.uint8)
        self.arrays[array.ctypes.data] = array
        return array.ctypes.data

    def find(self, address: int) -> tuple[np.ndarray, int]:
        """The array that an address is in, and how far behind its beginning."""
        for card in (self, *self.peers):
            for start, array in list(card.arrays.items()):
                if start <= address < start + array.nbytes:
                    return array, address - start
        raise AssertionError(f"no array at {address:#x}")

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        array, begin = self.find(address)
        assert begin + nbytes <= array.nbytes
        return array[begin : begin + nbytes]

    def do(self, work: Callable[[], None]) -> None:
        """Now, or when the graph is launched that is captured."""
        if self.recorded is None:
            work()
        else:
            self.recorded.append(work)


class Stream:
    def __init__(self, device: HostCard, name: str = "") -> None:
        self.device, self.name, self.number = device, name, 1

    def upload(self, address: int, array: np.ndarray) -> None:
        assert self.device.recorded is None and array.flags.c_contiguous
        self.device.bytes_at(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def download(self, array: np.ndarray, address: int) -> None:
        assert self.device.recorded is None
        array.reshape(-1).view(np.uint8)[:] = self.device.bytes_at(address, array.nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.device.bytes_at(destination, nbytes)[:] = self.device.bytes_at(source, nbytes)

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        self.device.bytes_at(address, nbytes)[:] = byte

    def record(self, event: object) -> None: ...

    def wait(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, device: HostCard, **options: object) -> None: ...

    def synchronize(self) -> None: ...

    is_reached = True


class Arena:
    def __init__(self, device: HostCard, nbytes: int) -> None:
        self._device = device

    @classmethod
    def of(cls, device: HostCard, sizes: Mapping[str, int]) -> tuple[Arena, dict[str, int]]:
        return cls(device, 0), {name: device.allocate(size) for name, size in sizes.items()}

    def close(self) -> None: ...


class Texture:
    def __init__(self, device: HostCard, address: int, texels: int) -> None:
        self._address = address

    def __int__(self) -> int:
        return self._address


@contextlib.contextmanager
def capture(stream: Stream, name: str = "") -> Iterator[Any]:
    device = stream.device
    device.recorded = recorded = []
    replay = SimpleNamespace(launch=lambda stream: [work() for work in recorded], close=lambda: None)
    try:
        yield SimpleNamespace(instantiate=lambda: replay, close=lambda: None)
    finally:
        device.recorded = None


def pack(entry: Entry, values: Sequence[float | None]) -> tuple[float | None, ...]:
    assert len(values) == len(entry.arguments)
    return tuple(values)


class Function:
    def __init__(self, device: HostCard, entry: Entry, constants: Mapping[str, int]) -> None:
        self._device, self._entry, self._constants = device, entry, constants

    def launch(self, stream: Stream, grid: tuple[int, ...], packed: Sequence[Any], *, pdl: bool = False) -> None:
        self._device.do(lambda: self._run(grid, packed))

    def _run(self, grid: tuple[int, ...], packed: Sequence[Any]) -> None:
        entry, views = self._entry, dict[tuple[int, str], np.ndarray]()
        args: dict[str, object] = {}
        for argument, value in zip(entry.arguments, packed, strict=True):
            args[argument.name] = self._value(argument, value, views) if argument.is_array else value
        constants = {
            name: self._device.find(self._constants[name])[0].view(np.float32) for name in entry.constant_names
        }
        with _SHIM:
            got = run(entry, grid, entry.threads, args, constants=constants)
        for name, array in got.items():
            held = args[name]
            assert isinstance(held, From)
            held.array[:] = array.reshape(-1)

    def _value(self, argument: Argument, address: int | None, views: dict[tuple[int, str], np.ndarray]) -> object:
        if not address:
            return None
        array, begin = self._device.find(int(address))
        ctype = "float" if argument.ctype == "Texture" else argument.ctype.removeprefix("const ").rstrip(" *")
        dtype = np.dtype(DTYPES.get(ctype, np.uint8))
        whole = array[: array.nbytes // dtype.itemsize * dtype.itemsize]
        view = views.setdefault((array.ctypes.data, dtype.str), whole.view(dtype))  # one array is one buffer
        return view if argument.ctype == "Texture" else From(view, begin)


class LoadedKernels:
    def __init__(self, device: HostCard, entries: Iterable[Entry] = ()) -> None:
        self._device, self._entries = device, dict.fromkeys(entries)
        self._constants: dict[str, int] = {}
        self.load(self._entries)

    def load(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._entries[entry] = None
            for name in entry.constant_names:
                if name not in self._constants:
                    self._constants[name] = self._device.allocate(CONSTANT_BYTES[name])

    def are_compiled(self, entries: Iterable[Entry]) -> bool:
        return False

    def constants(self, name: str) -> list[int]:
        return [self._constants[name]] if name in self._constants else []

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def __getitem__(self, entry: Entry) -> Function:
        assert entry in self._entries
        return Function(self._device, entry, self._constants)


def pinned(device: HostCard, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.zeros(shape, dtype)


RUNTIME = {
    "Stream": Stream, "Event": Event, "Arena": Arena, "Texture": Texture, "capture": capture, "pack": pack,
    "LoadedKernels": LoadedKernels, "pinned": pinned,
}  # fmt: skip


def take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs run on host cards."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlpgpu.backends.cuda.run."):
            for what, stand_in in RUNTIME.items():
                if what in vars(module):
                    monkeypatch.setattr(module, what, stand_in)
