"""What a card does in a second at best: copies and arithmetic, measured."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from .. import kernels
from ..kernels.launches import BLOCKS_PER_MULTIPROCESSOR
from ..runtime import Arena, Device, LoadedKernels, Stream, aligned, pack, seconds_of

COPY_BYTES, OPERATIONS = 1 << 28, 2e10  # copied and computed to measure the rates

# Products of 16-bit numbers on tensor cores for each float32 one outside them, by the vendor's tables of compute
# capability 8.0 and 9.0; other cards do at most as many.
TENSOR_SPEED = 16.0


@dataclass(frozen=True)
class PeakRates:
    """What a card does in a second at best.

    Attributes:
        copied: bytes that are read and written of arrays larger than the cache; ``cached``, of arrays inside it.
        computed: multiplications and additions in float32, outside the tensor cores.
        cache_bytes: the size of the second-level cache.
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
            f"peak rates of this card: copying {self.copied / 1e9:,.0f} GB/s, and {self.cached / 1e9:,.0f} GB/s inside "
            f"its cache of {self.cache_bytes / 2**20:.0f} MiB; {self.computed / 1e12:.1f} TFLOP/s in float32 by "
            f"multiply-adds; tensor cores are taken to make {TENSOR_SPEED:.0f} times as many products of 16 bits"
        )


class MultiplyAdds:
    """The kernel of bench/peak_rates.cuh, ready to launch."""

    def __init__(self, device: Device) -> None:
        entry = kernels.multiply_add()
        self._function = LoadedKernels(device, [entry])[entry]
        self._grid = (BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors, 1, 1)
        self._threads = self._grid[0] * entry.threads
        self._arena = Arena(device, 4 * self._threads)
        self._y = self._arena.take(4 * self._threads)

    def put(self, stream: Stream, operations: float) -> int:
        """Launch it for about so many multiplications and additions, and return how many they are."""
        rounds = max(1, int(operations / (2 * kernels.CHAINS * self._threads)))
        self._function.launch(stream, self._grid, pack(self._function.entry, (0.5, 1.0, rounds, self._y)))
        return 2 * kernels.CHAINS * self._threads * rounds


def measure_peak_rates(device: Device, multiply_adds: MultiplyAdds | None = None) -> PeakRates:
    """The peak rates of a card that is otherwise idle; within ``with device:``."""
    multiply_adds, stream = multiply_adds or MultiplyAdds(device), Stream(device)
    nbytes = min(COPY_BYTES, device.free_bytes // 4)
    with closing(Arena(device, 2 * aligned(nbytes))) as arena:
        source, destination = arena.take(nbytes), arena.take(nbytes)
        stream.fill(source, nbytes)

        def copy_seconds(size: int) -> float:
            return seconds_of(stream, lambda: stream.copy(destination, source, size))

        copied = 2 * nbytes / copy_seconds(nbytes)
        # The difference of two sizes leaves the time of a launch out.
        small, large = device.l2_bytes // 16, device.l2_bytes // 4
        cached = 2 * (large - small) / max(copy_seconds(large) - copy_seconds(small), 1e-9)
    operations = multiply_adds.put(stream, OPERATIONS)
    computed = operations / seconds_of(stream, lambda: multiply_adds.put(stream, OPERATIONS))
    return PeakRates(copied, max(copied, cached), computed, device.l2_bytes)
