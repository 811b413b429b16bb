"""What a precision means, on the host: products of planes beside chains of IEEE float32 operations.

A GPU repeats this at larger sizes, with sums as its tensor cores make them (tests/gpu/test_parity.py).
"""

from __future__ import annotations

import pytest
from kernel_cases.case import Case
from kernel_cases.dense import split_product
from kernel_cases.tensor import (
    DISTRIBUTIONS,
    check_float32,
    check_not_finite,
    check_product,
    not_finite,
    operands,
    products,
)
from shim_runner import run

from mlpgpu.backends.cuda.kernels import FORMS, SPLIT, WARPGROUP_SPLIT, Form, SplitTile, WarpgroupTile, matrix_tiles


def smallest(form: Form, cases: list[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """On a host every tile sums in the same order; test_kernels.py runs the others."""
    name = matrix_tiles(form)[-1].name
    return [(case, output) for case, output in cases if case.entry.name.endswith(name)]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_products_err_as_their_precision_says(form: Form, distribution: str) -> None:
    a, b = operands(distribution, 17, 129, 19)
    for case, output in smallest(form, list(products(form, a, b))):
        check_product(form, run(case.entry, case.grid, case.entry.threads, dict(case.args))[output], a, b)


SPLIT_TILES = pytest.mark.parametrize("tile", [SPLIT, WARPGROUP_SPLIT], ids=str)


@SPLIT_TILES
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_product_of_split_operands_errs_no_more_than_a_chain(
    tile: SplitTile | WarpgroupTile, distribution: str
) -> None:
    a, b = operands(distribution, 17, 129, 19)
    case = split_product(tile, a, b)
    check_float32(run(case.entry, case.grid, case.entry.threads, dict(case.args))["parts"][0], a, b)


@SPLIT_TILES
def test_a_product_of_split_operands_that_are_not_finite(tile: SplitTile | WarpgroupTile) -> None:
    a, b = not_finite(17, 40, 19)
    case = split_product(tile, a, b)
    check_not_finite(run(case.entry, case.grid, case.entry.threads, dict(case.args))["parts"][0], a, b)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_products_of_what_is_not_finite(form: Form) -> None:
    a, b = not_finite(17, 40, 19)
    for case, output in smallest(form, list(products(form, a, b))):
        check_not_finite(run(case.entry, case.grid, case.entry.threads, dict(case.args))[output], a, b)
