"""How long work takes on a card, and what the card does in a second: copies and arithmetic, measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from . import compiler, kernels
from .costs import TENSOR_SPEED
from .driver import Arena, Device, Event, Module, Stream, aligned, capture, pack
from .share import BLOCKS_PER_MULTIPROCESSOR

REPLAY_SECONDS = 2e-3  # about how long a replay is
MOST_REPEATS = 256
TRIALS = 5
COPY_BYTES, COMPUTED = 1 << 28, 2e10  # what rates are measured on, the second in operations


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
            f"multiply-adds; tensor cores are taken to do {TENSOR_SPEED:.0f} times as much of 16 bits"
        )


def seconds_of(
    stream: Stream, put: Callable[[], object], *, reset: Callable[[], None] = lambda: None, most: int = MOST_REPEATS
) -> float:
    """What ``put`` puts on a stream takes this long, when it is done up to ``most`` times in a row.

    ``reset`` is done before each replay, and not measured.
    """
    first = _replayed(stream, put, 1, reset)
    repeats = min(most, int(REPLAY_SECONDS / first))
    return _replayed(stream, put, repeats, reset) if repeats > 1 else first


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


class Arithmetic:
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
    return measure_rates(device, Arithmetic(device))


def measure_rates(device: Device, arithmetic: Arithmetic) -> Rates:
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
