"""What a precision means, on the host: products of components beside chains of IEEE float32 operations.

A GPU repeats this at larger sizes, with sums as its tensor cores make them (tests/gpu/test_parity.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kernel_cases.case import Case, whole
from kernel_cases.dense import dense_forward, split_product
from kernel_cases.tensor import (
    DISTRIBUTIONS,
    check_float32,
    check_not_finite,
    check_product,
    not_finite,
    operands,
    products,
)
from shim_runner import run_case

from mlpgpu.backends.cuda.kernels import (
    OPERAND_FORMATS,
    SPLIT_SM80,
    SPLIT_SM90,
    WARP_SPLIT_TILES,
    OperandFormat,
    SplitSm80Tile,
    SplitSm90Tile,
    WarpSplitTile,
    sm80_tiles,
    sm90_tiles,
)


def smallest(operand_format: OperandFormat, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[Case, str]]:
    """On a host every tile sums in the same order; test_kernels.py runs the others."""
    return products(operand_format, a, b, (sm80_tiles(operand_format) or sm90_tiles(operand_format))[-1:])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("operand_format", OPERAND_FORMATS, ids=lambda operand_format: operand_format.name)
def test_products_err_as_their_precision_says(operand_format: OperandFormat, distribution: str) -> None:
    a, b = operands(distribution, 17, 129, 19)
    for case, output in smallest(operand_format, a, b):
        check_product(operand_format, run_case(case)[output], a, b)


@pytest.mark.parametrize("tile", WARP_SPLIT_TILES, ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_warps_that_share_k_err_no_more_than_a_chain(tile: WarpSplitTile, distribution: str) -> None:
    a, b = operands(distribution, 17, 300, 19)
    case = dense_forward("identity", tile, whole(len(a)), a, b, plain=True)
    check_float32(run_case(case)["y"], a, b)


SPLIT_TILES = pytest.mark.parametrize("tile", [SPLIT_SM80, SPLIT_SM90], ids=str)


@SPLIT_TILES
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_product_of_split_operands_errs_no_more_than_a_chain(
    tile: SplitSm80Tile | SplitSm90Tile, distribution: str
) -> None:
    a, b = operands(distribution, 17, 129, 19)
    case = split_product(tile, a, b)
    check_float32(run_case(case)["partials"][0], a, b)


@SPLIT_TILES
def test_a_product_of_split_operands_that_are_not_finite(tile: SplitSm80Tile | SplitSm90Tile) -> None:
    a, b = not_finite(17, 40, 19)
    case = split_product(tile, a, b)
    check_not_finite(run_case(case)["partials"][0], a, b)


@pytest.mark.parametrize("operand_format", OPERAND_FORMATS, ids=lambda operand_format: operand_format.name)
def test_products_of_what_is_not_finite(operand_format: OperandFormat) -> None:
    a, b = not_finite(17, 40, 19)
    for case, output in smallest(operand_format, a, b):
        check_not_finite(run_case(case)[output], a, b)
