"""Prefix sums, sorts and histograms on a card, beside CuPy's, which are CUB's, and beside a plain copy.

All contenders work on the same arrays in the same run, in turns, and their results are compared before they are timed.
A turn ends when the card has finished; figures are medians.  Rates count the bytes that cannot be avoided: an array
read once, its result written once.

    python benchmarks/primitives.py [--quick] [--json benchmarks/results/primitives.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mlpgpu.backends.base import bin_edges
from mlpgpu.backends.cuda import CudaBackend, kernels
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Value
from mlpgpu.backends.cuda.profile.workbench import Workbench
from mlpgpu.backends.cuda.run.primitives import Chain, grid_over, sort_entries
from mlpgpu.bench import surroundings, take_turns
from mlpgpu.errors import MlpgpuError

try:
    import cupy as cp
except ImportError:
    cp = None

ROUNDS, QUICK_ROUNDS = 5, 3
EPS32 = 2.0**-24
SCAN_ROUNDINGS = 40  # of a prefix sum: in a warp, a block, a group of tiles, and where these are joined
Contenders = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Result:
    """One contender at one primitive.  ``ratio`` is the median over rounds of its time over ours."""

    primitive: str
    elements: int
    contender: str
    seconds: float
    gigabytes_per_second: float
    ratio: float


class Arrays:
    """CuPy's arrays by name, and launches on them."""

    def __init__(self, bench: Workbench, **arrays: cp.ndarray) -> None:
        self._bench, self._arrays = bench, arrays

    def put(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._bench.put(launch.entry, launch.grid, {name: self._at(v) for name, v in launch.values.items()})

    def clear(self, name: str) -> None:
        self._bench.zero(self._arrays[name].data.ptr, self._arrays[name].nbytes)

    def _at(self, value: Value) -> float | None:
        if not isinstance(value, At):
            assert value is None or isinstance(value, (int, float))
            return value
        array = self._arrays[value.array]
        return int(array.data.ptr + value.offset * array.itemsize)


def scan(bench: Workbench, n: int) -> tuple[Contenders, int]:
    """Inclusive sums of n normal numbers."""
    x = cp.random.default_rng(1).standard_normal(n, dtype=cp.float32)
    words = cp.zeros(kernels.scan_words("float32", n), cp.uint64)
    arrays = Arrays(bench, **{"x": x, "y": cp.full_like(x, cp.nan), "tile sums": words})
    values: dict[str, Value] = {
        "x": At("x"), "y": At("y"), "n": n, "exclusive": 0, "tile_sums": At("tile sums"),
    }  # fmt: skip
    launch = Launch(kernels.prefix_sum("float32"), kernels.scan_grid("float32", n), values)
    y, copied = arrays._arrays["y"], cp.empty_like(x)

    def ours() -> None:
        arrays.put([launch])
        bench.device.synchronize()

    def theirs() -> None:
        cp.cumsum(x)
        bench.device.synchronize()

    def copy() -> None:
        bench.copy(copied.data.ptr, x.data.ptr, x.nbytes)
        bench.device.synchronize()

    bench.device.synchronize()  # CuPy's work is on another stream
    ours()
    wide = x.astype(cp.float64)
    error, bound = abs(cp.cumsum(wide) - y), SCAN_ROUNDINGS * EPS32 * cp.cumsum(abs(wide))
    assert bool((error <= bound).all()), f"prefix sums are wrong by up to {float(cp.nanmax(error / bound)):.3g} bounds"
    bits = y.copy()
    y.fill(cp.nan)
    bench.device.synchronize()
    ours()
    assert bool((bits.view(cp.uint32) == y.view(cp.uint32)).all()), "prefix sums vary from run to run"
    return {"mlpgpu": ours, "CuPy cumsum": theirs, "copy": copy}, 2 * x.nbytes


def sort(bench: Workbench, n: int) -> tuple[Contenders, int]:
    """Random 32-bit keys with their indices.  CuPy's argsort has indices of 64 bits, its sort none."""
    keys = cp.random.default_rng(2).integers(0, 2**32, n, dtype=cp.uint32)
    chain = Chain()
    launches = list(
        chain.sort(
            "uint32", n, At("keys"), None, sorted_values=At("places"), spare=(At("spare keys"), At("spare places"))
        )
    )
    sorted_arrays = {name: cp.empty_like(keys) for name in ("keys", "spare keys")}
    sorted_arrays |= {name: cp.empty(n, cp.int32) for name in ("places", "spare places")}
    scratch = {
        "tile sums": cp.zeros(chain.bytes["tile sums"] // 8, cp.uint64),
        "digit counts": cp.empty(chain.bytes["digit counts"] // 4, cp.int32),
    }
    arrays = Arrays(bench, **sorted_arrays, **scratch)

    def ours() -> None:
        bench.copy(sorted_arrays["keys"].data.ptr, keys.data.ptr, keys.nbytes)  # CuPy leaves its input alone too
        arrays.put(launches)
        bench.device.synchronize()

    def theirs() -> None:
        cp.argsort(keys)
        bench.device.synchronize()

    def keys_alone() -> None:
        cp.sort(keys)
        bench.device.synchronize()

    bench.device.synchronize()  # CuPy's work is on another stream
    ours()
    places = cp.argsort(keys)
    assert bool((sorted_arrays["places"] == places).all()), "the order is wrong"
    assert bool((sorted_arrays["keys"] == keys[places]).all()), "the sorted keys are wrong"
    return {"mlpgpu": ours, "CuPy argsort": theirs, "CuPy sort (no values)": keys_alone}, 12 * n


def histogram(bench: Workbench, n: int, bins: int) -> tuple[Contenders, int]:
    """Of normal numbers, from the least to the greatest."""
    x = cp.random.default_rng(3).standard_normal(n, dtype=cp.float32)
    grid = grid_over(n)
    parts, edges = cp.empty((grid[0], 2), cp.float32), cp.empty(bins + 1, cp.float64)
    counts = cp.empty(bins, cp.uint64)
    arrays = Arrays(bench, x=x, parts=parts, edges=edges, counts=counts)
    of_x: dict[str, Value] = {"x": At("x"), "n": n}
    find = Launch(kernels.extremes(), grid, {**of_x, "parts": At("parts")})
    count = Launch(kernels.histogram(), grid, {**of_x, "edges": At("edges"), "bins": bins, "counts": At("counts")})

    def ours() -> np.ndarray:
        arrays.put([find])
        bench.device.synchronize()
        ends = parts.get()
        edges.set(bin_edges(float(ends[:, 0].min()), float(ends[:, 1].max()), bins))
        arrays.clear("counts")
        arrays.put([count])
        bench.device.synchronize()
        return counts.get()

    def theirs() -> None:
        cp.histogram(x, bins)
        bench.device.synchronize()

    bench.device.synchronize()  # CuPy's work is on another stream
    got = ours()
    assert (got == cp.histogram(x.astype(cp.float64), edges)[0].get()).all(), "the counts are wrong"
    return {"mlpgpu": ours, "CuPy histogram": theirs}, 2 * x.nbytes


def measure(
    primitive: str, elements: int, contenders: Mapping[str, Callable[[], object]], nbytes: int, rounds: int
) -> list[Result]:
    seconds = take_turns(contenders, rounds)
    results = []
    for name, of_rounds in seconds.items():
        median = statistics.median(of_rounds)
        ratio = statistics.median(a / b for a, b in zip(of_rounds, seconds["mlpgpu"], strict=True))
        results.append(Result(primitive, elements, name, median, 1e-9 * nbytes / median, ratio))
        rate = results[-1].gigabytes_per_second
        print(
            f"{primitive:>16} {elements:>12,} {name:24}{1e3 * median:9.3f} ms {rate:8,.0f} GB/s {ratio:6.2f}",
            flush=True,
        )
    return results


def show_pass(bench: Workbench, n: int) -> None:
    """Print the time of each kernel of the sort in one pass."""
    chain, names = Chain(), ("keys", "places", "spare keys", "spare places")
    keys, places, *spare = map(At, names)
    launches = list(chain.sort("uint32", n, keys, places, sorted_values=places, spare=(spare[0], spare[1])))
    words = cp.random.default_rng(4).integers(0, 2**32, n, dtype=cp.uint32)
    arrays = Arrays(
        bench, **{name: words.copy() for name in names},
        **{"tile sums": cp.zeros(chain.bytes["tile sums"] // 8, cp.uint64)},
        **{"digit counts": cp.zeros(chain.bytes["digit counts"] // 4, cp.int32)},
    )  # fmt: skip
    bench.device.synchronize()  # CuPy's work is on another stream
    for number, launch in enumerate(launches[:3]):
        arrays.put([launch])
        if number != 1:  # the prefix sum works in place, so repeats would sum other numbers
            taken = bench.seconds(lambda launch=launch: arrays.put([launch]))  # type: ignore[misc]
            print(f"{launch.entry.name:>24} {n:,}: {1e3 * taken:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure prefix sums, sorts and histograms beside CuPy's.")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    options = parser.parse_args()
    if cp is None:
        sys.exit("CuPy, which the kernels are measured beside, is not installed: pip install cupy-cuda13x")
    try:
        backend, results = CudaBackend(), list[Result]()
    except MlpgpuError as error:
        sys.exit(str(error))
    rounds, shift = (QUICK_ROUNDS, 6) if options.quick else (ROUNDS, 0)
    with backend.device as device:
        entries = [kernels.prefix_sum("float32"), *sort_entries("uint32"), kernels.extremes(), kernels.histogram()]
        bench = Workbench(device, entries)
        sizes = (1 << 28 >> shift, 1 << 20)
        for n in sizes:
            results += measure("prefix sum", n, *scan(bench, n), rounds)
        for n in (1 << 26 >> shift, 1 << 20):
            results += measure("sort", n, *sort(bench, n), rounds)
        for n in sizes:
            for bins in (64, 1000):
                results += measure(f"histogram, {bins}", n, *histogram(bench, n, bins), rounds)
        show_pass(bench, 1 << 26 >> shift)
    if options.json:
        about = surroundings(backend, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))
        lines = [asdict(result) for result in results]
        options.json.write_text(json.dumps({"about": about, "results": lines}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
