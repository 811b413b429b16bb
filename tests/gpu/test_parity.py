"""Each kernel on a card against the NumPy specification: the cases of ``kernel_cases.py``, and what only a card shows.

``sanitize.sh`` runs this file under compute-sanitizer.  Each array has device memory of its own, so that
an access past its end is one that memcheck sees.
"""

from __future__ import annotations

from collections.abc import Mapping

import kernel_cases
import numpy as np
import pytest
from kernel_cases import Case, Shifted, all_cases, whole

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.compiler import Cubin
from mlpgpu.backends.cuda.driver import Arena, Device, Module, Stream, Texture, pack
from mlpgpu.backends.cuda.kernels import TILES, Entry, all_entries
from mlpgpu.backends.cuda.program import STEP

pytestmark = pytest.mark.gpu

CASES = all_cases()
SMALLEST = TILES[-1]


class Bench:
    """All kernels on a card, loaded once."""

    def __init__(self, device: Device, cubins: Mapping[str, Cubin]) -> None:
        self.device = device
        with device:
            self.stream = Stream(device)
            self.modules = {header: Module(device, cubin.image) for header, cubin in cubins.items()}
            runnable = [entry for entry in all_entries() if entry.runs_on(device.arch)]
            self.functions = {entry: self.modules[entry.header].function(entry) for entry in runnable}

    def run(
        self, entry: Entry, grid: tuple[int, ...], args: Mapping[str, object], constants: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Launch ``entry`` once; returns its arrays, by the arguments' names, as they are afterwards."""
        arrays: dict[str, np.ndarray] = {}
        places: dict[str, int] = {}
        held: list[Arena | Texture] = []
        values: list[float | None] = []
        with self.device:
            for name, constant in constants.items():
                self.stream.upload(self.modules[entry.header].constant(name)[0], constant)
            for argument in entry.arguments:
                value = args[argument.name]
                if isinstance(value, (np.ndarray, Shifted)):
                    shift = value.array.itemsize if isinstance(value, Shifted) else 0
                    array = np.ascontiguousarray(value.array if isinstance(value, Shifted) else value)
                    arena = Arena(self.device, array.nbytes + shift)
                    place = arena.take(array.nbytes + shift) + shift
                    self.stream.upload(place, array)
                    held.append(arena)
                    if not argument.is_pointer:
                        held.append(Texture(self.device, place, array.size))
                        place = int(held[-1])
                    else:
                        arrays[argument.name], places[argument.name] = np.empty_like(array), place
                    value = place
                assert value is None or isinstance(value, (int, float, np.number))
                values.append(value)  # type: ignore[arg-type]
            self.functions[entry].launch(self.stream, grid, pack(entry, values))
            for name, array in arrays.items():
                self.stream.download(array, places[name])
            self.stream.synchronize()
        return arrays

    def run_case(self, case: Case) -> dict[str, np.ndarray]:
        return self.run(case.entry, case.grid, case.args, case.constants)


@pytest.fixture(scope="module")
def bench(device: Device, cubins: Mapping[str, Cubin]) -> Bench:
    return Bench(device, cubins)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.entry.name}-{case.name}")
def test_kernel_against_numpy(case: Case, bench: Bench) -> None:
    if case.entry not in bench.functions:
        pytest.skip(f"needs {case.entry.needs}")
    first = bench.run_case(case)
    case.check(first)
    if not case.atomic:
        second = bench.run_case(case)
        assert all((bits(second[name]) == bits(first[name])).all() for name in case.outputs)


def test_advance(bench: Bench) -> None:
    step = np.array([(2**33, 2, 3, 4, 5)], STEP)
    after = bench.run(kernels.advance(), (1,), {"step": step}, {})["step"]
    assert after[0].tolist() == (2**33 + 1, 3, 4, 4, 5)


# --- products: their order of summation, and what float32 means ---


def test_all_tiles_give_the_same_bits(bench: Bench) -> None:
    x, w = np.random.default_rng(1).normal(size=(2, 257, 257)).astype(np.float32)
    for name, cases in (
        ("y", [kernel_cases.dense_forward("tanh", tile, whole(257), x, w) for tile in TILES]),
        ("dx", [kernel_cases.dense_backward_input("tanh", tile, whole(257), 257, 129) for tile in TILES]),
        ("dw", [kernel_cases.dense_backward_weight(tile, whole(257), 257, 129) for tile in TILES]),
        ("db", [kernel_cases.dense_backward_weight(tile, whole(257), 257, 129) for tile in TILES]),
    ):
        first, *others = (bench.run_case(case)[name] for case in cases)
        for other in others:
            np.testing.assert_array_equal(bits(other), bits(first))


@pytest.mark.parametrize("rows", [1, 31, 128, 255])
def test_a_row_has_the_same_bits_in_any_batch(rows: int, bench: Bench) -> None:
    x, w = np.random.default_rng(2).normal(size=(2, 257, 257)).astype(np.float32)
    fewer, all_rows = (
        bench.run_case(kernel_cases.dense_forward("tanh", SMALLEST, whole(count), x[:count], w))["y"]
        for count in (rows, 257)
    )
    np.testing.assert_array_equal(bits(fewer), bits(all_rows[:rows]))


def operands(distribution: str) -> tuple[np.ndarray, np.ndarray]:
    """A (M, K) and B (K, N), float32, of a kind on which short cuts show."""
    random = np.random.default_rng(3)
    m, k, n = 65, 1023, 70
    a, b = random.normal(size=(m, k)), random.normal(size=(k, n))
    if distribution == "uniform":
        a, b = random.random((m, k)), random.random((k, n))
    elif distribution == "relu of lognormal":
        a = np.maximum(a, 0.0) * random.lognormal(sigma=3.0, size=(m, k))
    elif distribution == "softmax deltas":
        a = random.dirichlet(np.ones(k), size=m)
        a[np.arange(m), random.integers(k, size=m)] -= 1.0
    elif distribution == "rows over 12 decades":
        a *= 10.0 ** random.uniform(-6.0, 6.0, size=(m, 1))
    elif distribution == "one outlier":
        a[7, 11] = 1e12
    return a.astype(np.float32), b.astype(np.float32)


DISTRIBUTIONS = ("normal", "uniform", "relu of lognormal", "softmax deltas", "rows over 12 decades", "one outlier")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_product_errs_no_more_than_a_chain_of_float32(distribution: str, bench: Bench) -> None:
    a, b = operands(distribution)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact, reach = wide_a @ wide_b, abs(wide_a) @ abs(wide_b)
    chain = np.zeros(exact.shape, np.float32)
    for k in range(a.shape[1]):  # products of float32 are exact in float64: each term is rounded once, as by fma
        chain = (chain + wide_a[:, k, np.newaxis] * wide_b[k]).astype(np.float32)
    case = kernel_cases.dense_forward("identity", SMALLEST, whole(len(a)), a, b, plain=True)
    product = bench.run_case(case)["y"]
    for error_of in (
        lambda c: np.linalg.norm(c - exact) / np.linalg.norm(exact),
        lambda c: (abs(c - exact) / reach).max(),
    ):
        assert error_of(product) <= max(error_of(chain), 2.0**-21)
