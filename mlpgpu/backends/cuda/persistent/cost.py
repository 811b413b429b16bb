"""About how many clocks of a multiprocessor a step of a layer takes, by how its weights are cut."""

from __future__ import annotations

from ..kernels import WARP, ceil_div
from .network import DenseLayer
from .tiles import COMPUTE_WARPS, FmaProducts, Tf32Products, TileProducts, mma_partials, round_up

MULTIPLY_ADDS_PER_CLOCK, WORDS_PER_CLOCK = 64, 2  # words from and to other blocks


def layer_clocks(
    dense: DenseLayer, products: TileProducts, blocks: int, *, is_first: bool, is_replicated: bool
) -> float:
    """About the clocks that a step of the layer takes on a block with one of its tiles, on a grid of ``blocks``."""
    tiling, rows = products.tiling, products.rows
    rows_per_block, weight_rows = ceil_div(rows, blocks), 4 * tiling.quads
    z_clocks, dw_clocks = _fma_clocks(products) if isinstance(products, FmaProducts) else _mma_clocks(products)
    clocks = dw_clocks
    # dZ, and inputs, four of which come in the time of a word where they are data.
    words = rows * tiling.columns + rows * weight_rows / (4 if is_first else 1)
    if not is_replicated:
        clocks += z_clocks
        words += rows * tiling.columns + rows_per_block * tiling.row_slices * dense.n_out
        if not is_first:
            clocks += rows * weight_rows * tiling.columns / MULTIPLY_ADDS_PER_CLOCK
            words += rows * weight_rows + rows_per_block * tiling.column_slices * dense.n_in
    return clocks + words / WORDS_PER_CLOCK


def _fma_clocks(products: FmaProducts) -> tuple[float, float]:
    """Clocks of Z's and of dW's products, bound by reads of shared memory: a word for each lane a clock."""
    tiling, rows = products.tiling, products.rows
    rows_and_columns = (2 if rows > WARP else 1) + tiling.columns
    z = 4 * round_up(tiling.quads, products.z_partials) * products.row_warps * rows_and_columns
    return z, rows * ceil_div(tiling.quads, WARP) * (4 + tiling.columns)


def _mma_clocks(products: TileProducts) -> tuple[float, float]:
    """Clocks of Z's and of dW's products, bound by issue: about one instruction of a warp in four clocks."""
    assert isinstance(products, Tf32Products)
    instructions = 20 + 12 * ceil_div(products.tiling.columns, 8)
    clocks = []
    for sixteens, steps in (products.z_steps, products.dw_steps):
        partials = mma_partials(sixteens, steps)
        clocks.append(4 * ceil_div(sixteens, COMPUTE_WARPS // partials) * ceil_div(steps, partials) * instructions)
    return clocks[0], clocks[1]
