"""How many clocks a card takes for a product, counted: by these tiles are compared, and with small batches main loops.

What every launch takes alike, about 3.3 µs from its start to its last store, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ..kernels import (
    COLUMN_HEAD,
    INPUT_LAYER_INPUTS,
    INPUT_LAYER_SLAB,
    INPUT_LAYER_WARPS,
    ROW_HEAD,
    ROW_HEAD_DEPTH,
    ROW_STEP_ROWS,
    SMALL_N_BATCH,
    TENSOR_ROW_STEP_ITEM_EIGHTS,
    TENSOR_ROW_STEP_STEP,
    TENSOR_ROW_STEP_THREADS,
    WARP,
    WARP_SPLIT_WEIGHT,
    WHOLE_BATCH_COLUMNS,
    WHOLE_HEAD,
    ClusterSplitTile,
    Entry,
    HeadForm,
    InputLayer,
    OperandFormat,
    ShortTile,
    SimtTile,
    Sm90Tile,
    StripTile,
    TensorRowStep,
    WarpSplitTile,
    ceil_div,
    cluster_split_tiles,
    small_n_grid,
    tensor_row_step_columns,
    tensor_whole_batch,
    tensor_whole_batch_chunks,
    tensor_whole_batch_slices,
    whole_batch,
    whole_batch_backward_grid,
)
from . import thresholds


def slice_clocks(tile: Sm90Tile, m: int, n: int, multiprocessors: int) -> int:
    """About how long tensor cores take for every 64 along k of an m by n product."""
    products = tile.operand_format.products
    multiply = products * tile.m * tile.n * tile.K // thresholds.MULTIPLIED_PER_CLOCK
    # Each consumer reads 64 rows of A and its part of B; the copy engine writes each slice once.
    read = products * tile.consumers * 2 * tile.K * (64 + tile.n // tile.across)
    shared_memory = (read + tile.stage_bytes) // thresholds.SHARED_BYTES_PER_CLOCK
    waves = ceil_div(tile.clusters(m, n), max(1, multiprocessors // tile.cluster))
    clocks = waves * max(multiply, shared_memory)
    return clocks if tile.stages > 2 else clocks * thresholds.TWO_STAGES_TENTHS // 10


def gemm_clocks(tile: Sm90Tile, m: int, n: int, k: int, multiprocessors: int) -> int:
    """Of an m by n product over k on tensor cores."""
    return ceil_div(k, tile.K) * slice_clocks(tile, m, n, multiprocessors)


def product_clocks(tile: Sm90Tile, m: int, n: int, k: int, multiprocessors: int, *, has_floats: bool) -> int:
    """The same of a product that makes activations, with its epilogue, by which tiles differ where k is short.

    Args:
        has_floats: whether epilogues write or read a float32 array beside operands.
    """
    waves = ceil_div(tile.clusters(m, n), max(1, multiprocessors // tile.cluster))
    of_column = thresholds.EPILOGUE_COLUMN_CLOCKS_OF_FLOATS if has_floats else thresholds.EPILOGUE_COLUMN_CLOCKS
    epilogue = thresholds.EPILOGUE_CLOCKS + of_column * tile.n // tile.across
    return gemm_clocks(tile, m, n, k, multiprocessors) + waves * epilogue


def summing_clocks(tile: Sm90Tile, k: int, n: int, rows: int, multiprocessors: int) -> int:
    """Of the warps that sum a bias's gradient beside the product of a weight's (k, n); 0 where none do."""
    tiles = tile.column_partials(k)
    if tiles is None:
        return 0
    of_slice = thresholds.SUMMED_SLICE_CLOCKS + thresholds.SUMMED_ROW_CLOCKS * ceil_div(tile.K, tiles)
    waves = ceil_div(tile.clusters(k, n), max(1, multiprocessors // tile.cluster))
    return waves * ceil_div(rows, tile.K) * of_slice


def cluster_clocks(
    tile: ClusterSplitTile, k: int, n: int, rows: int, multiprocessors: int, *, sums_columns: bool = True
) -> int:
    """Of a weight's gradient (k, n) by clusters whose blocks share the rows, with the bias's if it ``sums_columns``.

    A block waits for each slice, however little there is to multiply: for its latency, for the warps that sum the
    bias's gradient, or for the second-level cache, from which all blocks' slices come.
    """
    blocks = math.prod(tile.grid(k, n, multiprocessors))
    of_slice, of_block = _cluster_slice_clocks(tile, k, sums_columns=sums_columns)
    at_once = min(blocks, tile.at_once(multiprocessors))
    slices = ceil_div(blocks, at_once) * ceil_div(ceil_div(rows, tile.K), tile.split)
    of_cluster = thresholds.CLUSTER_CLOCKS + of_block * tile.split
    return slices * max(of_slice, _cached_clocks(tile, at_once, multiprocessors)) + of_cluster


def grouped_clocks(tile: ClusterSplitTile, shapes: Sequence[tuple[int, int]], rows: int, multiprocessors: int) -> int:
    """Of the updates of several weights (k, n) and their biases by such clusters, in one launch.

    Each block has as many slices of rows as any other, and then moves its part of a tile.  A multiprocessor has one
    after another, as many of them at once as it has room for.
    """
    of_slice, _ = _cluster_slice_clocks(tile, shapes[0][0], sums_columns=False)
    slices, cached = ceil_div(ceil_div(rows, tile.K), tile.split), tile.stage_bytes / thresholds.CACHE_BYTES_PER_CLOCK
    moved = thresholds.MOVED_BYTES * tile.m * tile.n / tile.split / thresholds.CACHE_BYTES_PER_CLOCK
    of_block = thresholds.GROUPED_BLOCK_CLOCKS[tile.blocks] + thresholds.GROUPED_CLUSTER_CLOCKS * (tile.split > 1)
    of_each = tile.split * sum(tile.clusters(k, n) + ceil_div(n, tile.n) for k, n in shapes) / multiprocessors
    waiting = of_slice if tile.split > 1 else of_slice * thresholds.GROUPED_ALONE_TENTHS / 10
    waiting += min(1.0, of_each) * cached * thresholds.GROUPED_WAITING_TENTHS / 10
    return int(max(of_each * (slices * cached + moved + of_block), slices * waiting + moved))


def grouped_share_clocks(operand_format: OperandFormat, k: int, n: int, rows: int, multiprocessors: int) -> int:
    """Of such a launch, what one weight (k, n) of many adds by the smallest tiles."""
    tile = cluster_split_tiles(operand_format)[0]
    cached = ceil_div(rows, tile.K) * tile.stage_bytes + thresholds.MOVED_BYTES * tile.m * tile.n
    of_block = cached / thresholds.CACHE_BYTES_PER_CLOCK + thresholds.GROUPED_BLOCK_CLOCKS[tile.blocks]
    return int((tile.clusters(k, n) + ceil_div(n, tile.n)) * of_block / multiprocessors)


def read_late_clocks(operand_format: OperandFormat, shapes: Sequence[tuple[int, int]], rows: int) -> int:
    """How much longer gradients of weights (k, n) take behind the last delta: where the second-level cache does not
    hold all that they are made of until then, deltas come from memory."""
    of_column = 2 * operand_format.components * rows
    read, deltas = of_column * sum(k + n for k, n in shapes), of_column * sum(n for _, n in shapes)
    return streamed_clocks(deltas) if read > thresholds.GROUPED_CACHED_BYTES else 0


def moving_clocks(tile: Sm90Tile, k: int, n: int, rows: int, multiprocessors: int) -> int:
    """Of the update of a weight (k, n) by a tile for each block, which moves its part then, counted in the same way."""
    clusters, at_once = tile.clusters(k, n), max(1, multiprocessors // tile.cluster)
    share = min(1.0, clusters / at_once)
    loaded = 2 * tile.K * tile.operand_format.components * (tile.m + tile.n // tile.cluster)
    is_cached = thresholds.MOVED_BYTES * k * n <= thresholds.GROUPED_CACHED_BYTES
    rate = thresholds.CACHE_BYTES_PER_CLOCK if is_cached else thresholds.MEMORY_BYTES_PER_CLOCK
    of_slices = ceil_div(rows, tile.K) * loaded / thresholds.CACHE_BYTES_PER_CLOCK
    return int(ceil_div(clusters, at_once) * share * (of_slices + thresholds.MOVED_BYTES * tile.m * tile.n / rate))


def _cluster_slice_clocks(tile: ClusterSplitTile, k: int, *, sums_columns: bool = True) -> tuple[int, int]:
    """Of a slice of a block of such a cluster, at least, and of each block whose sums another one reads."""
    of_slices, of_block = (
        (thresholds.CLUSTER_SLICE_CLOCKS, thresholds.CLUSTER_BLOCK_CLOCKS)
        if tile.side == 64
        else (thresholds.LARGE_CLUSTER_SLICE_CLOCKS, thresholds.LARGE_CLUSTER_BLOCK_CLOCKS)
    )
    of_slice, tiles = of_slices[tile.operand_format.components], tile.column_partials(k)
    if tiles is not None and sums_columns:
        rows_summed = ceil_div(tile.K, tiles // tile.split)
        of_slice = max(of_slice, thresholds.CLUSTER_SUMMED_CLOCKS + thresholds.SUMMED_ROW_CLOCKS * rows_summed)
    return of_slice, of_block


def _cached_clocks(tile: ClusterSplitTile, blocks: int, multiprocessors: int) -> int:
    """Of a slice of each of so many blocks, which the second-level cache gives."""
    return ceil_div(blocks * tile.stage_bytes, thresholds.CACHE_BYTES_PER_CLOCK * multiprocessors)


def cluster_product_clocks(tile: ClusterSplitTile, m: int, n: int, k: int, multiprocessors: int) -> int:
    """Of an m by n product that makes activations, with its epilogue, by clusters whose blocks share k; there are no
    more blocks than multiprocessors."""
    components, blocks = tile.operand_format.components, math.prod(tile.grid(m, n, multiprocessors))
    tenths = thresholds.CLUSTER_PRODUCT_CACHE_TENTHS[components]
    cached = tenths * _cached_clocks(tile, blocks, multiprocessors) // 10
    of_slice = max(thresholds.CLUSTER_PRODUCT_SLICE_CLOCKS[components], cached)
    of_cluster = thresholds.CLUSTER_PRODUCT_CLOCKS + thresholds.CLUSTER_BLOCK_CLOCKS * tile.split
    return ceil_div(ceil_div(k, tile.K), tile.split) * of_slice + of_cluster


def cluster_gradient_clocks(
    tile: ClusterSplitTile, k: int, n: int, rows: int, multiprocessors: int
) -> tuple[int, bool]:
    """Of a weight's gradient (k, n) and the bias's by such clusters; whether their launch sums both."""
    together = cluster_clocks(tile, k, n, rows, multiprocessors)
    alone = cluster_clocks(tile, k, n, rows, multiprocessors, sums_columns=False) + thresholds.SPLIT_PASS_CLOCKS
    is_apart = thresholds.COLUMNS_MAY_BE_SUMMED_APART and is_faster(alone, together)
    return (alone, False) if is_apart else (together, True)


def weight_clocks(tile: Sm90Tile, k: int, n: int, rows: int, multiprocessors: int) -> int:
    """Of a weight's gradient (k, n) by a tile of C for each block, without the bias's."""
    waves = ceil_div(tile.clusters(k, n), max(1, multiprocessors // tile.cluster))
    waiting = waves * ceil_div(rows, tile.K) * thresholds.GRADIENT_SLICE_CLOCKS
    return gemm_clocks(tile, k, n, rows, multiprocessors) + waiting


def gradient_clocks(tile: Sm90Tile, k: int, n: int, rows: int, multiprocessors: int) -> tuple[int, bool]:
    """Of a weight's gradient (k, n) on tensor cores and the bias's; whether the product sums both.

    A product that sums the bias's gradient beside the weight's waits for that; else another launch does.
    """
    clocks = weight_clocks(tile, k, n, rows, multiprocessors)
    together, apart = summing_clocks(tile, k, n, rows, multiprocessors), clocks + thresholds.SPLIT_PASS_CLOCKS
    is_together = 10 * together <= thresholds.SUMMED_TENTHS * apart or not thresholds.COLUMNS_MAY_BE_SUMMED_APART
    return max(clocks, together) if is_together else apart, is_together


def head_clocks(k: int, n: int, rows: int, multiprocessors: int) -> int:
    """Of a last layer (k, n), its loss and its dx in one launch; of few weights two blocks share a multiprocessor."""
    resident = 2 if k * n <= thresholds.COLUMN_HEAD_MOST_WEIGHTS else 1
    waves = ceil_div(rows, WHOLE_HEAD.rows * resident * multiprocessors)
    return waves * (thresholds.HEAD_WAVE_CLOCKS + k * n // 2)


def column_head_clocks(form: HeadForm, parts: int, k: int, n: int, rows: int, multiprocessors: int) -> int:
    """The same by a head of columns, of whose blocks so many ``parts`` have the same rows.

    A block makes all logits of its rows, or the share of a cluster's block, and a part of dx: so often it passes over
    W.  Of few columns it may wait for x, which it reads twice, and dx.
    """
    parts *= form.split
    blocks, passes = parts * ceil_div(rows, form.rows), 1 / form.split + 1 / parts
    cache = thresholds.CACHE_BYTES_PER_CLOCK * multiprocessors
    if form is not COLUMN_HEAD:
        multiplied = passes * k * n * thresholds.FEW_ROWS_HEAD_HUNDREDTHS / 100
        of_cluster = thresholds.CLUSTER_HEAD_CLOCKS * (form.split > 1)
        return int(thresholds.FEW_ROWS_HEAD_CLOCKS + of_cluster + multiplied + passes * 4 * k * n * blocks / cache)
    waves = ceil_div(blocks, COLUMN_HEAD.blocks * multiprocessors)
    of_weights, of_rows = passes / 2 * k * n * ceil_div(blocks, multiprocessors), 3 * 4 * rows * k / cache
    return int(waves * thresholds.COLUMN_HEAD_WAVE_CLOCKS + max(of_weights, of_rows))


def row_head_clocks(k: int, n: int, rows: int, multiprocessors: int) -> int:
    """The same by a head of rows: a warp waits for each part of its rows in turn, and for the instructions of each."""
    blocks = ceil_div(rows, ROW_HEAD.rows)
    waves, at_once = ceil_div(blocks, ROW_HEAD.blocks * multiprocessors), ceil_div(blocks, multiprocessors)
    of_wave = thresholds.ROW_HEAD_WAVE_CLOCKS + thresholds.ROW_HEAD_LONG_ROW_CLOCKS * max(0, k - ROW_HEAD_DEPTH)
    of_number = thresholds.ROW_HEAD_NUMBER_TENTHS + n * thresholds.ROW_HEAD_WEIGHT_TENTHS
    return waves * of_wave + at_once * k * of_number // 10


def partials_clocks(rows: int, n: int, multiprocessors: int) -> int:
    """Of the launch that adds up partial sums of a product that is split along k."""
    return ceil_div(ceil_div(rows * n, WARP), 8 * multiprocessors) * thresholds.PARTIALS_WAVE_CLOCKS


def input_clocks(tile: SimtTile | WarpSplitTile, rows: int, k: int, n: int, multiprocessors: int) -> int:
    """Of dx (rows, k) by multiply-adds, or of the bytes that it and its slope have, if there are few columns."""
    bytes_moved = 8 * rows * k
    clocks = simt_clocks(tile, rows, k, n, multiprocessors)
    return max(clocks, bytes_moved // thresholds.PLAIN_INPUT_BYTES_PER_CLOCK)


def streamed_clocks(bytes_moved: int, *, alone: bool = True) -> int:
    """Of so many bytes that go through memory; or, not ``alone``, after other work of the same blocks."""
    return ceil_div(bytes_moved, thresholds.CLUSTER_BYTES_PER_CLOCK[0 if alone else 1])


def row_step_clocks(weights: int, rows: int, multiprocessors: int) -> int:
    """Of all of a step but the gradients, by blocks of rows."""
    return ceil_div(rows, ROW_STEP_ROWS * multiprocessors) * (thresholds.ROW_STEP_WAVE_CLOCKS + weights)


def tensor_row_step_clocks(
    form: TensorRowStep, costly: Sequence[int], rows: int, grid: int, *, behind: bool = False
) -> int:
    """Of a step by blocks of rows on tensor cores, without launches and the update, as fitted on whole steps.

    Args:
        costly: of each layer, how much is computed of each number that it makes: an activation that is more than a
            comparison, and a dropout.
        grid: blocks.
        behind: whether a layer apart makes what it takes for inputs, whose deltas it makes as well.
    """
    tile = form.tile

    def product(m: int, n: int, terms: int, of_each: int) -> tuple[int, int, int]:
        """What an m by n product of all warps takes of tensor cores, of its ends, and of what is costly in them."""
        rounds, wide = rounds_of_warps(m, n)
        return rounds * wide * form.products * ceil_div(terms, 16), rounds * wide, rounds * wide * of_each

    found = []
    for number, ((k, n), of_each) in enumerate(zip(pairwise(form.widths), costly, strict=True)):
        found += [product(tile, n, k, of_each), product(k + TENSOR_ROW_STEP_STEP, n, tile, 0)]
        found += [product(tile, k, n, 0)] if number or behind else []
    multiplied, ended, computed = (sum(each) for each in zip(*found, strict=True))
    clocks = (
        thresholds.TENSOR_ROW_STEP_TILE_CLOCKS
        + len(found) * thresholds.TENSOR_ROW_STEP_PRODUCT_CLOCKS
        + multiplied * thresholds.TENSOR_ROW_STEP_MULTIPLY_CLOCKS
        + ended * thresholds.TENSOR_ROW_STEP_END_CLOCKS
        + computed * thresholds.TENSOR_ROW_STEP_COSTLY_CLOCKS
        + tile * thresholds.TENSOR_ROW_STEP_ROW_CLOCKS
        + tile * tensor_row_step_columns(form.widths[0]) // thresholds.TENSOR_ROW_STEP_INPUTS_PER_CLOCK
    )
    tiles = ceil_div(ceil_div(rows, tile), grid)
    partials = 4 * form.partials[-1] * grid
    is_cached = partials <= thresholds.TENSOR_ROW_STEP_CACHED_BYTES
    bytes_per_clock = thresholds.TENSOR_ROW_STEP_PARTIALS_PER_CLOCK[0 if is_cached else 1]
    return tiles * clocks + (2 * tiles - 1) * partials // bytes_per_clock


def input_layer_clocks(layer: InputLayer, rows: int, item_bytes: int, multiprocessors: int) -> int:
    """Of a first layer apart: its sums, its gradient, and what is left and read between launches, with two launches.

    Args:
        item_bytes: of a number of the data set.
    """
    left = 4 * (layer.parts * rows * layer.columns + ceil_div(rows, layer.row_part) * layer.gradient_floats)
    return (
        input_layer_forward_clocks(layer, rows, item_bytes, multiprocessors)
        + input_layer_gradient_clocks(layer, rows, item_bytes, multiprocessors)
        + 2 * left // thresholds.TENSOR_ROW_STEP_PARTIALS_PER_CLOCK[0]
        + 2 * thresholds.LAUNCH_CLOCKS
    )


def input_layer_forward_clocks(layer: InputLayer, rows: int, item_bytes: int, multiprocessors: int) -> int:
    """Of its sums: as long as memory, the second-level cache or tensor cores take."""
    blocks = ceil_div(rows, layer.tile) * layer.parts
    slabs = ceil_div(layer.part, layer.slab)
    of_block = layer.together * max(
        slabs * INPUT_LAYER_SLAB // TENSOR_ROW_STEP_STEP * _input_layer_step(layer),
        layer.part
        * (layer.tile * item_bytes + 2 * layer.components * layer.pitch)
        // thresholds.INPUT_LAYER_CACHE_BYTES_PER_CLOCK,
    )
    streamed = rows * layer.k * item_bytes // thresholds.INPUT_LAYER_BYTES_PER_CLOCK
    return max(streamed, ceil_div(blocks, layer.together * multiprocessors) * of_block)


def input_layer_gradient_clocks(layer: InputLayer, rows: int, item_bytes: int, multiprocessors: int) -> int:
    """Of its gradient, likewise."""
    blocks = layer.gradient_blocks * ceil_div(rows, layer.row_part)
    inputs, together = 8 * INPUT_LAYER_WARPS * INPUT_LAYER_INPUTS, layer.gradient_together
    of_block = together * max(
        layer.row_part // TENSOR_ROW_STEP_STEP * _input_layer_step(layer),
        layer.row_part
        * (inputs * item_bytes + 2 * layer.components * layer.pitch)
        // thresholds.INPUT_LAYER_CACHE_BYTES_PER_CLOCK,
    )
    streamed = rows * layer.k * item_bytes // thresholds.INPUT_LAYER_BYTES_PER_CLOCK
    return max(streamed, ceil_div(blocks, together * multiprocessors) * of_block)


def _input_layer_step(layer: InputLayer) -> int:
    """Of 16 terms of all warps of a block, each of which has 16 rows or inputs."""
    products = layer.components * (layer.components + 1) // 2
    of_tile = layer.columns // TENSOR_ROW_STEP_STEP * products * thresholds.INPUT_LAYER_PRODUCT_CLOCKS
    of_tile += layer.components * thresholds.INPUT_LAYER_SPLIT_CLOCKS
    return of_tile + thresholds.INPUT_LAYER_STEP_CLOCKS


def rounds_of_warps(m: int, n: int) -> tuple[int, int]:
    """How often a warp begins anew in an m by n product of gemm/components.cuh, and its columns each time, by 8."""
    warps, high, eights = TENSOR_ROW_STEP_THREADS // WARP, ceil_div(m, 16), tensor_row_step_columns(n) // 8
    rounds = {wide: ceil_div(high * ceil_div(eights, wide), warps) for wide in (4, 2, 1)}
    wide = min(rounds, key=lambda wide: rounds[wide] * (wide + TENSOR_ROW_STEP_ITEM_EIGHTS))
    return rounds[wide], wide


def pass_clocks(operand_format: OperandFormat, numbers: int, *, splits: int = 1) -> int:
    """Of a pass that makes operands of so many float32 numbers, in ``splits`` ways."""
    bytes_moved = (4 + 2 * operand_format.components * splits) * numbers
    streamed = streamed_clocks(bytes_moved, alone=not operand_format.scaled)
    return max(thresholds.SPLIT_PASS_CLOCKS, thresholds.LAUNCH_CLOCKS + streamed)


def staged_pass_clocks(operand_format: OperandFormat, numbers: int) -> int:
    """A step's share of such a pass over inputs of several steps."""
    return max(thresholds.SPLIT_PASS_CLOCKS // 2, streamed_clocks((4 + 2 * operand_format.components) * numbers))


def operand_clocks(operand_format: OperandFormat, k: int, n: int, rows: int) -> int:
    """The passes of a step that make the operands of a layer (k, n), if these have scales: over x, W, and dz, which is
    split in two ways.  Others are left by whoever makes the numbers."""
    of_x, of_weight = pass_clocks(operand_format, rows * k), pass_clocks(operand_format, k * n)
    return of_x + of_weight + pass_clocks(operand_format, rows * n, splits=2)


def simt_clocks(tile: SimtTile | WarpSplitTile, m: int, n: int, k: int, multiprocessors: int, parts: int = 1) -> int:
    """Of an m by n product over k by multiply-adds; or over so many parts of a longer k.

    A block waits for each slice, however little there is to multiply; blocks side by side wait together.
    """
    depth = tile.K if isinstance(tile, WarpSplitTile) else tile.k
    blocks = math.prod(tile.grid(m, n, parts))
    waves = ceil_div(blocks, tile.blocks * multiprocessors)
    resident = min(tile.blocks, ceil_div(blocks, multiprocessors))
    multiply = tile.m * tile.n * depth // thresholds.FUSED_PER_CLOCK
    begun_anew = (waves - 1) * thresholds.WARP_SPLIT_WAVE_CLOCKS if isinstance(tile, WarpSplitTile) else 0
    return waves * ceil_div(k, depth) * (thresholds.SLICE_CLOCKS + resident * multiply) + begun_anew


def short_clocks(tile: ShortTile, m: int, n: int, multiprocessors: int) -> int:
    """Of an m by n product over few terms: for its elements' instructions, or for memory to take them."""
    of_block = tile.m * (tile.k * thresholds.SHORT_TERM_TENTHS // 10 + thresholds.SHORT_ROW_CLOCKS)
    turns = ceil_div(math.prod(tile.grid(m, n)), multiprocessors)
    return thresholds.SHORT_CLOCKS + max(turns * of_block, streamed_clocks(4 * m * n))


def update_clocks(
    tile: WarpSplitTile | None, shapes: Sequence[tuple[int, int]], rows: int, multiprocessors: int
) -> int:
    """Of one launch that moves small weights (k, n), by a tile or without."""
    grids = (small_n_grid(k, n) if tile is None else tile.grid(k, n) for k, n in shapes)
    return update_blocks_clocks(tile, sum(map(math.prod, grids)), 1, rows, multiprocessors)


def update_blocks_clocks(tile: WarpSplitTile | None, blocks: int, parts: int, rows: int, multiprocessors: int) -> int:
    """Of such a launch of so many blocks for each of ``parts`` of the rows."""
    waves = ceil_div(blocks, multiprocessors)
    if tile is None:
        return waves * ceil_div(rows, SMALL_N_BATCH) * thresholds.SMALL_N_CLOCKS
    slices = waves * ceil_div(ceil_div(rows, tile.K), parts)
    return parts_clocks(slices) if parts > 1 else slices * thresholds.WARP_SPLIT_WEIGHT_CLOCKS


def parts_clocks(slices: int) -> int:
    """Of blocks that have parts of the rows, where a multiprocessor goes through so many slices of them."""
    return slices * thresholds.WARP_SPLIT_WEIGHT_CLOCKS + thresholds.ADDED_PARTS_CLOCKS


def slices_in_turn(layers: Sequence[tuple[int, int]], multiprocessors: int) -> int:
    """How many slices of rows a multiprocessor goes through in one launch, wave after wave of blocks.

    Args:
        layers: of each, in the grid's order, its blocks and the slices that each of them has.
    """
    slices = [count for blocks, count in layers for _ in range(blocks)]
    return sum(max(slices[first : first + multiprocessors]) for first in range(0, len(slices), multiprocessors))


def few_columns_clocks(rows: int) -> int:
    """Of an update of few columns by few rows, a thread a row of W."""
    return ceil_div(rows, 16) * thresholds.FEW_COLUMNS_CLOCKS


def parts_of_rows(shapes: Sequence[tuple[int, int]], rows: int, multiprocessors: int) -> tuple[int, int]:
    """Of a launch that moves weights (k, n) by tiles whose blocks have parts of the rows: how many parts, and clocks.

    As many as the card has room for at once, of whole slices.
    """
    tile = WARP_SPLIT_WEIGHT
    slices, tiles = ceil_div(rows, tile.K), sum(math.prod(tile.grid(k, n)) for k, n in shapes)
    parts = ceil_div(slices, ceil_div(slices, max(1, min(slices, multiprocessors // tiles))))
    return parts, update_blocks_clocks(tile, tiles, parts, rows, multiprocessors)


def parts_of_strips(tile: StripTile, k: int, n: int, rows: int, multiprocessors: int) -> tuple[int, int]:
    """Of an update by strips of a weight (k, n): in how many parts of the rows it takes least, and clocks."""
    turns, passes = ceil_div(rows, tile.K), 1 if tile.n < tile.m else 2  # dz, which was just made, also goes to memory
    streamed = passes * 4 * rows * max(k, n) // thresholds.STRIP_BYTES_PER_CLOCK
    own = ceil_div(tile.m * tile.n, tile.threads)  # elements of a thread, whose parts are in flight together
    of_four = thresholds.STRIP_SUMS_CLOCKS + own * thresholds.STRIP_SUM_CLOCKS

    def clocks(parts: int) -> int:
        waiting = ceil_div(turns, parts) * thresholds.STRIP_ROWS_CLOCKS // 2
        return waiting + max(waiting, streamed) + ceil_div(parts, 4) * of_four

    # More blocks would not run beside other launches (runs_beside of updates.py).
    room = tile.blocks * multiprocessors * thresholds.BESIDE_TENTHS // 10
    most = max(1, min(room // math.prod(tile.grid(k, n)), turns))
    parts = min(range(1, most + 1), key=clocks)
    return ceil_div(turns, ceil_div(turns, parts)), clocks(parts) + thresholds.STRIP_CLOCKS


def whole_batch_clocks(
    entry: Entry, grid: tuple[int, int, int], k: int, n: int, rows: int, multiprocessors: int
) -> int:
    """Of a pass over W (k, n) on tensor cores by blocks that keep the whole batch, forward or back."""
    assert entry.operand_format is not None
    components, is_forward = entry.operand_format.components, "forward" in entry.function
    shape = tensor_whole_batch(rows, components), components
    if is_forward:
        pieces, sharing = tensor_whole_batch_slices(k), entry.cluster
        clocks = thresholds.TENSOR_WHOLE_BATCH_SLICE_CLOCKS[shape]
    else:
        pieces, sharing = tensor_whole_batch_chunks(n), grid[1]
        clocks = thresholds.TENSOR_WHOLE_BATCH_CHUNK_CLOCKS[shape]
    waves = ceil_div(grid[0] * grid[1], 2 * multiprocessors)
    return waves * (ceil_div(pieces, sharing) + 2) * clocks


def plain_whole_batch_clocks(k: int, n: int, rows: int, split: int, multiprocessors: int, *, makes_dx: bool) -> int:
    """Of both passes over W (k, n) on plain cores by blocks that keep the whole batch.

    So many of them, ``split``, share k in the forward pass.
    """
    has_vectors, has_more = n % 4 == 0, rows > 16
    of_row, longer = thresholds.WHOLE_BATCH_ROW_TENTHS[has_more]
    of_forward, of_backward = thresholds.WHOLE_BATCH_BLOCK_CLOCKS
    forward = of_forward + ceil_div(k, split) * (of_row + (0 if has_vectors else longer)) // 10
    grid, column_warps = whole_batch_backward_grid(k, n, whole_batch(rows), multiprocessors, has_dx=makes_dx)
    chunks = ceil_div(ceil_div(n, WHOLE_BATCH_COLUMNS), column_warps * grid[1])
    of_chunk = thresholds.WHOLE_BATCH_CHUNK_CLOCKS[has_more][0 if has_vectors else 1]
    waves = ceil_div(grid[0] * grid[1], 2 * multiprocessors)
    return forward + waves * (of_backward + chunks * of_chunk)


def is_faster(one: int, other: int) -> bool:
    """Whether a kernel for small batches is counted to take less than another one, by more than counts err."""
    return thresholds.COUNTED_TENTHS * one < 10 * other
