"""How long a launch is predicted to take, before anything is measured: by counted clocks and by the bytes it moves.

The clocks of products are those by which :mod:`..select` chooses (:mod:`..select.counted`).  ``docs/experiments/``
has predictions beside what was measured.
"""

from __future__ import annotations

from .. import kernels
from ..kernels import SimtTile, Sm90Tile, WarpSplitTile, filled_rows
from ..kernels.launches import Launch
from ..select.counted import (
    cluster_clocks,
    cluster_product_clocks,
    column_head_clocks,
    few_columns_clocks,
    gemm_clocks,
    input_clocks,
    partials_clocks,
    parts_clocks,
    parts_of_rows,
    parts_of_strips,
    row_head_clocks,
    row_step_clocks,
    short_clocks,
    simt_clocks,
    summing_clocks,
    update_blocks_clocks,
    update_clocks,
    weight_clocks,
    whole_batch_clocks,
)
from .costs import array_bytes, lengths_of, moved_bytes
from .peak_rates import PeakRates

FITTED_TO = "sm_90a"
CLOCKS = 1.95e9  # of an H100 or H200 in a second
LAUNCH_SECONDS = 3.3e-6  # from a product's launch to its last store, without its slices (docs/experiments/products.md)
# Measured: a pass that splits, the launch that moves biases, a head of few rows; any other launch with little to do.
PASS_SECONDS, BIASES_SECONDS, HEAD_SECONDS, OTHER_SECONDS = 6.0e-6, 3.3e-6, 5.0e-6, 2.0e-6
# Measured: a tail, whose blocks go from one short layer to the next; and by how much one is longer that exchanges sums.
TAIL_SECONDS, EXCHANGED_SECONDS = 14.0e-6, 3.0e-6
CACHE_BYTES = 64  # in a clock and multiprocessor, from the second-level cache
WHOLE_BATCH_TENTHS = 6  # of the memory's rate, which passes over W by blocks that keep the whole batch reach
H200 = PeakRates(copied=4.2e12, cached=8.0e12, computed=5.5e13, cache_bytes=50 << 20)


def predicted_seconds(launch: Launch, rows: int, multiprocessors: int, rates: PeakRates = H200) -> float:
    """Of one launch for so many rows, behind another one, on a card of the H200's kind with these rates of memory."""
    function = launch.entry.function.partition("<")[0]
    least = rates.floor(0, moved_bytes(launch, rows))
    if "clocks" in launch.lengths:
        return LAUNCH_SECONDS + launch.lengths["clocks"] / CLOCKS
    if function in ("row_step", "update_layers"):
        return LAUNCH_SECONDS + _clocks_of_blocks(launch, rows, multiprocessors) / CLOCKS
    if "_tensor_whole_batch" in function:
        k, n = launch.values["k"], launch.values["n"]
        assert isinstance(k, int) and isinstance(n, int)
        of_pass = whole_batch_clocks(launch.entry, launch.grid, k, n, rows, multiprocessors) / CLOCKS
        return LAUNCH_SECONDS + max(10 / WHOLE_BATCH_TENTHS * least, of_pass)
    if "_whole_batch" in function:
        return LAUNCH_SECONDS + 10 / WHOLE_BATCH_TENTHS * least
    if function == "tail":
        return TAIL_SECONDS + EXCHANGED_SECONDS * (launch.values["exchange"] is not None)
    if launch.entry.name.startswith("head"):
        return max(HEAD_SECONDS, least, OTHER_SECONDS + _head_clocks(launch, rows, multiprocessors) / CLOCKS)
    if function == "dense_forward_sum_partials":
        n = launch.values["n"]
        assert isinstance(n, int)
        return max(LAUNCH_SECONDS + partials_clocks(rows, n, multiprocessors) / CLOCKS, least)
    clocks = _product_clocks(launch, rows, multiprocessors)
    if clocks is None:
        is_pass = function.startswith(("split_", "sum_deltas"))
        usual = BIASES_SECONDS if function == "update_biases" else PASS_SECONDS if is_pass else OTHER_SECONDS
        return max(usual, least)
    return LAUNCH_SECONDS + max(least, (clocks + _storing_clocks(launch, rows, multiprocessors)) / CLOCKS)


def _storing_clocks(launch: Launch, rows: int, multiprocessors: int) -> float:
    """In which the blocks of a product store what it makes, and read what they update."""
    lengths, blocks = lengths_of(launch, rows), launch.grid[0] * launch.grid[1] * launch.grid[2]
    stored = sum(
        array_bytes(argument, lengths) * (2 if argument.is_updated else 1)
        for argument in launch.entry.arguments
        if argument.is_array and not argument.ctype.startswith("const ") and launch.values[argument.name] is not None
    )
    return stored / (CACHE_BYTES * min(blocks, multiprocessors))


def _clocks_of_blocks(launch: Launch, rows: int, multiprocessors: int) -> int:
    """Of a step by blocks of rows, or of the updates of several layers."""
    name = launch.entry.name
    if name.startswith("row_step"):
        return row_step_clocks(launch.lengths["products"], rows, multiprocessors)
    if name.endswith("_by_parts"):
        return parts_clocks(launch.lengths["slices"])
    tile = None if name.endswith("_small_n") else kernels.WARP_SPLIT_WEIGHT
    return update_blocks_clocks(tile, launch.grid[0], 1, rows, multiprocessors)


def _head_clocks(launch: Launch, rows: int, multiprocessors: int) -> int:
    """Of a head by columns or by rows; 0 of another."""
    k, n = launch.values["k"], launch.values["n"]
    assert isinstance(k, int) and isinstance(n, int)
    if kernels.ROW_HEAD.suffix in launch.entry.name:
        return row_head_clocks(k, n, rows, multiprocessors)
    forms = [form for form in kernels.COLUMN_HEADS if form.suffix in launch.entry.name]
    if not forms:
        return 0
    form = max(forms, key=lambda form: len(form.suffix))  # that of clusters has a longer one
    return column_head_clocks(form, launch.grid[1], k, n, rows, multiprocessors)


def _product_clocks(launch: Launch, rows: int, multiprocessors: int) -> int | None:
    """Of a product's slices; None where they are not counted."""
    entry, k, n = launch.entry, launch.values.get("k"), launch.values.get("n")
    if not entry.products or not isinstance(k, int) or not isinstance(n, int):
        return None
    function = entry.function.partition("<")[0]
    is_forward, is_input = "forward" in entry.function, "backward_input" in entry.function
    has_padding = entry.operand_format is not None and not entry.operand_format.scaled
    m = filled_rows(rows) if has_padding else rows
    part = launch.values.get("part")
    depth = part if isinstance(part, int) else k  # of a block's sums, where the forward product is split along k
    shape = (m, n, depth) if is_forward else (m, k, n) if is_input else (k, n, rows)
    weight = kernels.WARP_SPLIT_WEIGHT
    if entry.name.endswith("_few_columns"):
        return few_columns_clocks(rows)
    if entry.name.endswith("_small_n"):
        return update_clocks(None, [(k, n)], rows, multiprocessors)
    strips = next((tile for tile in kernels.STRIPS if entry.name.endswith(f"_{tile.name}")), None)
    if strips is not None:
        return parts_of_strips(strips, k, n, rows, multiprocessors)[1]
    if function == "dense_backward_update_by_parts" and entry.operand_format is None:
        return parts_of_rows([(k, n)], rows, multiprocessors)[1]
    if not (is_forward or is_input) and entry.name.endswith(f"_{weight.name}"):
        return update_clocks(weight, [(k, n)], rows, multiprocessors)
    short = next((tile for tile in kernels.SHORT_TILES if entry.name.endswith(f"_{tile.name}")), None)
    if short is not None:
        return short_clocks(short, m, n, multiprocessors)
    if entry.operand_format is None:
        plain: tuple[SimtTile | WarpSplitTile, ...] = (*kernels.WARP_SPLIT_TILES, *kernels.TILES)
        of_plain = next((tile for tile in plain if entry.name.endswith(f"_{tile.name}")), None)
        if of_plain is None:
            return None
        if is_input:
            return input_clocks(of_plain, rows, k, n, multiprocessors)
        return simt_clocks(of_plain, *shape, multiprocessors, launch.grid[2])
    for shared in kernels.cluster_tiles(entry.operand_format):
        if entry.name.endswith(f"_{shared.name}"):
            if is_forward or is_input:
                return cluster_product_clocks(shared, *shape, multiprocessors)
            has_sums = launch.values.get("db_partials") is not None
            return cluster_clocks(shared, k, n, rows, multiprocessors, sums_columns=has_sums)
    tiles: tuple[Sm90Tile, ...] = (
        *kernels.sm90_tiles(entry.operand_format), *kernels.wide_tiles(entry.operand_format),
        *kernels.medium_tiles(entry.operand_format), *kernels.shared_tiles(entry.operand_format),
        *kernels.narrow_tiles(entry.operand_format),
    )  # fmt: skip
    found = next((tile for tile in tiles if entry.name.endswith(f"_{tile.name}")), None)
    if found is None:
        return None
    if is_forward or is_input:
        return gemm_clocks(found, *shape, multiprocessors)
    clocks = weight_clocks(found, k, n, rows, multiprocessors)
    has_sums = launch.values.get("db_partials") is not None
    return max(clocks, summing_clocks(found, k, n, rows, multiprocessors)) if has_sums else clocks
