"""Each kernel on a card against the NumPy specification: the cases of ``kernel_cases``, and what only a card shows.

``sanitize.sh`` runs this file under compute-sanitizer.  Each array has device memory of its own, so that
an access past its end is one that memcheck sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from kernel_cases import all_cases, dense
from kernel_cases.case import Case, Mapped, Shifted, normal, whole
from kernel_cases.dense import split_product
from kernel_cases.rows import check_initialised, initialised_steps
from kernel_cases.tensor import (
    DISTRIBUTIONS,
    check_float32,
    check_not_finite,
    check_product,
    not_finite,
    operands,
    products,
    tensor_forward,
)

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    OPERAND_FORMATS,
    TENSOR_MAP_BYTES,
    TILES,
    Entry,
    GemmTile,
    OperandFormat,
    narrow_tiles,
    sm80_tiles,
    sm90_tiles,
    wide_tiles,
)
from mlpgpu.backends.cuda.runtime import Arena, Device, Stream, Texture, aligned, module_of, pack, tensor_map
from mlpgpu.backends.cuda.runtime.compiler import Cubin

pytestmark = pytest.mark.gpu

CASES = all_cases()
SMALLEST = TILES[-1]
EACH_FORM = pytest.mark.parametrize("operand_format", OPERAND_FORMATS, ids=lambda operand_format: operand_format.name)


class Bench:
    """All kernels on a card, loaded once."""

    def __init__(self, device: Device, pieces: Mapping[str, list[Entry]], cubins: Mapping[str, Cubin]) -> None:
        self.device = device
        with device:
            self.stream = Stream(device)
            loaded = {name: module_of(pieces[name])(device, cubin.image) for name, cubin in cubins.items()}
            self.modules = {entry: loaded[name] for name, entries in pieces.items() for entry in entries}
            self.functions = {entry: module.function(entry) for entry, module in self.modules.items()}

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
                self.stream.upload(self.modules[entry].constant(name)[0], constant)
            for argument in entry.arguments:
                value = args[argument.name]
                if isinstance(value, Mapped):
                    arena, value = self._map(value)
                    held.append(arena)
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

    def _map(self, components: Mapped) -> tuple[Arena, int]:
        """Components and their map on the card, and where the map lies."""
        array = np.ascontiguousarray(components.array)
        arena = Arena(self.device, aligned(array.nbytes) + TENSOR_MAP_BYTES)
        place, address = arena.take(array.nbytes), arena.take(TENSOR_MAP_BYTES)
        self.stream.upload(place, array)
        self.stream.upload(address, tensor_map(place, array.shape, array.shape[2], components.box))
        return arena, address

    def run_case(self, case: Case) -> dict[str, np.ndarray]:
        return self.run(case.entry, case.grid, case.args, case.constants)


@pytest.fixture(scope="module")
def bench(device: Device, pieces: Mapping[str, list[Entry]], cubins: Mapping[str, Cubin]) -> Bench:
    return Bench(device, pieces, cubins)


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


def test_initialise_steps(bench: Bench) -> None:
    check_initialised(bench.run(kernels.initialise_steps(), (1,), initialised_steps(40), {}), 40)


# --- products: their order of summation, and what float32 means ---


def test_all_tiles_give_the_same_bits(bench: Bench) -> None:
    x, w = np.random.default_rng(1).normal(size=(2, 257, 257)).astype(np.float32)
    for name, cases in (
        ("y", [dense.dense_forward("tanh", tile, whole(257), x, w) for tile in TILES]),
        ("dx", [dense.dense_backward_input("tanh", tile, whole(257), 257, 129) for tile in TILES]),
        ("dw", [dense.dense_backward_weight(tile, whole(257), 257, 129) for tile in TILES]),
        ("db", [dense.dense_backward_weight(tile, whole(257), 257, 129) for tile in TILES]),
    ):
        first, *others = (bench.run_case(case)[name] for case in cases)
        for other in others:
            np.testing.assert_array_equal(bits(other), bits(first))


def every_sm90_tile(operand_format: OperandFormat) -> tuple[GemmTile, ...]:
    return (*sm90_tiles(operand_format), *wide_tiles(operand_format), *narrow_tiles(operand_format))


@pytest.mark.parametrize("tiles", [sm80_tiles, every_sm90_tile])
@EACH_FORM
def test_all_tiles_of_tensor_cores_give_the_same_bits(
    operand_format: OperandFormat, tiles: Callable[[OperandFormat], tuple[GemmTile, ...]], bench: Bench
) -> None:
    """And a row has the same ones in any batch."""
    x, w = normal(300, 1030), normal(1030, 260)
    products = []
    for tile in tiles(operand_format):
        few, many = (tensor_forward(tile, "identity", whole(rows), x[:rows], w, plain=True) for rows in (70, 300))
        if many.entry not in bench.functions:
            pytest.skip(f"needs {many.entry.needs}")
        products.append(bench.run_case(many)["y"])
        np.testing.assert_array_equal(bits(products[-1][:70]), bits(bench.run_case(few)["y"]))
    for other in products[1:]:
        np.testing.assert_array_equal(bits(other), bits(products[0]))


@pytest.mark.parametrize("rows", [1, 31, 128, 255])
def test_a_row_has_the_same_bits_in_any_batch(rows: int, bench: Bench) -> None:
    x, w = np.random.default_rng(2).normal(size=(2, 257, 257)).astype(np.float32)
    fewer, all_rows = (
        bench.run_case(dense.dense_forward("tanh", SMALLEST, whole(count), x[:count], w))["y"] for count in (rows, 257)
    )
    np.testing.assert_array_equal(bits(fewer), bits(all_rows[:rows]))


@pytest.mark.parametrize("tile", [SMALLEST, *kernels.WARP_SPLIT_TILES], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_product_errs_no_more_than_a_chain_of_float32(
    distribution: str, tile: kernels.SimtTile | kernels.WarpSplitTile, bench: Bench
) -> None:
    a, b = operands(distribution, 65, 1023, 70)
    case = dense.dense_forward("identity", tile, whole(len(a)), a, b, plain=True)
    check_float32(bench.run_case(case)["y"], a, b)


@pytest.mark.parametrize("shape", [(65, 1023, 70), (130, 8190, 33), (257, 5, 129), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@EACH_FORM
def test_products_on_tensor_cores_err_as_their_precision_says(
    operand_format: OperandFormat, distribution: str, shape: tuple[int, int, int], bench: Bench
) -> None:
    """All three products, of every tile."""
    a, b = operands(distribution, *shape)
    cases = products(operand_format, a, b)
    runnable = [(case, output) for case, output in cases if case.entry in bench.functions]
    if not runnable:
        pytest.skip("needs tensor cores")
    for case, output in runnable:
        print(case.entry.name)
        check_product(operand_format, bench.run_case(case)[output], a, b)


@pytest.mark.parametrize("tile", [kernels.SPLIT_SM80, kernels.SPLIT_SM90], ids=str)
@pytest.mark.parametrize("shape", [(65, 1023, 70), (130, 8190, 33), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_product_of_split_operands_errs_no_more_than_a_chain(
    distribution: str, shape: tuple[int, int, int], tile: kernels.SplitSm80Tile | kernels.SplitSm90Tile, bench: Bench
) -> None:
    a, b = operands(distribution, *shape)
    case = split_product(tile, a, b)
    if case.entry not in bench.functions:
        pytest.skip("needs tensor cores")
    check_float32(bench.run_case(case)["partials"][0], a, b)


@EACH_FORM
def test_products_of_what_is_not_finite(operand_format: OperandFormat, bench: Bench) -> None:
    a, b = not_finite(65, 70, 66)
    for case, output in products(operand_format, a, b):
        if case.entry in bench.functions:
            check_not_finite(bench.run_case(case)[output], a, b)
