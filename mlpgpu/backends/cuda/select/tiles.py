"""Which tile of C a block makes.  The bits do not depend on it, since every tile sums over k in the same order; but for
tiles whose warps or blocks share k, which only steps of training have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..kernels import (
    TILES,
    WARP_SPLIT_TILES,
    ClusterSplitTile,
    GemmTile,
    OperandFormat,
    SimtTile,
    Sm90Tile,
    WarpSplitTile,
    ceil_div,
    cluster_split_tiles,
    large_cluster_tiles,
    medium_tiles,
    narrow_tiles,
    narrow_weight_tiles,
    shared_tiles,
    sm80_tiles,
    sm90_tiles,
    tiles_sharing_k,
    wide_cluster_tiles,
    wide_tiles,
)
from . import thresholds
from .counted import (
    cluster_clocks,
    cluster_gradient_clocks,
    cluster_product_clocks,
    gemm_clocks,
    gradient_clocks,
    is_faster,
    product_clocks,
    simt_clocks,
    slice_clocks,
)


def fills(blocks: int, multiprocessors: int) -> bool:
    """Whether so many blocks are enough for a card."""
    return 10 * blocks >= thresholds.FILLING_TENTHS * multiprocessors


def simt_tile(m: int, n: int, multiprocessors: int, parts: int = 1) -> tuple[SimtTile, str]:
    """The tile of multiply-adds for an m by n product, in so many parts, and why.

    Of those whose blocks fill the card it is the largest, unless another one has an eighth less to compute beyond the
    borders; if none does, it is the smallest.
    """
    grids = {tile: math.prod(tile.grid(m, n, parts)) for tile in TILES}
    filling = [tile for tile in TILES if fills(grids[tile], multiprocessors)]
    least = min(grids[tile] * tile.m * tile.n for tile in filling or TILES[-1:])
    waste = thresholds.TILE_WASTE
    of_little_waste = (tile for tile in filling if waste * grids[tile] * tile.m * tile.n <= (waste + 1) * least)
    tile = next(of_little_waste, TILES[-1])
    named = f"{tile.m}×{tile.n} is the"
    if not filling:
        return tile, f"{named} smallest tile, and no tile of {m:,}×{n:,} makes enough blocks for {multiprocessors} SMs"
    return tile, f"{named} largest tile with enough blocks of {m:,}×{n:,} for {multiprocessors} SMs and little padding"


def product_tile(m: int, n: int, k: int, multiprocessors: int) -> tuple[SimtTile, str]:
    """The tile of multiply-adds for an m by n product over k, and why: that of :func:`simt_tile`, unless another one is
    counted to take less, as of few columns, of which no large tile has little padding."""
    usual, why = simt_tile(m, n, multiprocessors)
    if not thresholds.TILES_ARE_COUNTED:
        return usual, why
    clocks = {tile: simt_clocks(tile, m, n, k, multiprocessors) for tile in TILES}
    best = min(clocks, key=clocks.__getitem__)
    if not is_faster(clocks[best], clocks[usual]):
        return usual, why
    return best, f"counted clocks: {clocks[best]:,} by {best.m}×{best.n}, {clocks[usual]:,} by {usual.m}×{usual.n}"


def small_batch_tile(m: int, n: int, k: int, multiprocessors: int) -> tuple[SimtTile | WarpSplitTile, str]:
    """The tile of multiply-adds for a product over k with a row of C for each row of a batch, and why: that of
    :func:`product_tile`, unless one whose warps share k is counted to take less."""
    usual, why = product_tile(m, n, k, multiprocessors)
    is_few = m <= thresholds.WARP_SPLIT_MOST_ROWS
    if not thresholds.NARROW_TILES_ARE_USED or not (is_few or thresholds.TILES_ARE_COUNTED):
        return usual, why
    clocks = {tile: simt_clocks(tile, m, n, k, multiprocessors) for tile in WARP_SPLIT_TILES}
    best, known = min(clocks, key=clocks.__getitem__), simt_clocks(usual, m, n, k, multiprocessors)
    named = ", ".join(f"{tile.m}×{tile.n} {count:,}" for tile, count in clocks.items())
    why = f"counted clocks: {named} where warps share k, {usual.m}×{usual.n} {known:,}"
    is_best = is_faster(clocks[best], known) and (is_few or thresholds.MANY_ROWS_TENTHS * clocks[best] < 10 * known)
    return (best if is_best else usual), why


def gemm_tile(
    operand_format: OperandFormat, m: int, n: int, k: int, multiprocessors: int, arch: str, *,
    of_weight: bool = False, has_floats: bool = False,
) -> tuple[GemmTile, str]:  # fmt: skip
    """The tile on tensor cores, and why: on sm_90a that of the fewest clocks, before that the largest whose blocks
    fill the card.

    Args:
        of_weight: whether C is a weight's gradient, for which the narrowest tiles have no kernels.
        has_floats: of activations, as :func:`product_clocks` says.
    """
    if arch == Sm90Tile.needs:
        tiles = sm90_tiles(operand_format)
        if thresholds.MEDIUM_TILES_ARE_USED and (not of_weight or k >= thresholds.MEDIUM_TILES_LEAST_ROWS):
            tiles += medium_tiles(operand_format)
        if not of_weight and thresholds.WIDE_TILES_ARE_USED:
            tiles += wide_tiles(operand_format)
        if not of_weight and thresholds.SHARED_TILES_ARE_USED:
            tiles += shared_tiles(operand_format)
        if thresholds.NARROW_TILES_ARE_USED:
            tiles += narrow_weight_tiles(operand_format) if of_weight else narrow_tiles(operand_format)
        if of_weight:
            clocks = {tile: slice_clocks(tile, m, n, multiprocessors) for tile in tiles}
        else:
            clocks = {tile: product_clocks(tile, m, n, k, multiprocessors, has_floats=has_floats) for tile in tiles}
        named = ", ".join(
            f"{tile.m}×{tile.n}" + f" by {tile.across} warpgroups" * (tile.across > 3) + f" {count:,}"
            for tile, count in clocks.items()
        )
        return min(clocks, key=clocks.__getitem__), f"estimated clocks{' per 64 of k' * of_weight}: {named}"
    largest, smallest = sm80_tiles(operand_format)[0], sm80_tiles(operand_format)[-1]
    blocks = math.prod(largest.grid(m, n, multiprocessors))
    has_work = fills(blocks, multiprocessors)
    enough = "enough" if has_work else "too few"
    why = f"tiles of {largest.m}×{largest.n} make {blocks:,} blocks, {enough} for {multiprocessors} SMs"
    return largest if has_work else smallest, why


def step_tile(
    operand_format: OperandFormat, m: int, n: int, k: int, multiprocessors: int, arch: str, *, has_floats: bool
) -> tuple[GemmTile, int, str]:
    """The tile on tensor cores of a product that makes activations of a step, the clocks of its slices, and why: that
    of :func:`gemm_tile`, unless one whose clusters share k is counted to take less.  Nothing is counted but on sm_90a.

    Args:
        has_floats: as :func:`product_clocks` says.
    """
    usual, why = gemm_tile(operand_format, m, n, k, multiprocessors, arch, has_floats=has_floats)
    if not isinstance(usual, Sm90Tile):
        return usual, 0, why
    known = product_clocks(usual, m, n, k, multiprocessors, has_floats=has_floats)
    shared = tiles_sharing_k(operand_format)
    room = {tile: min(multiprocessors, tile.at_once(multiprocessors)) for tile in shared}
    fitting = [tile for tile in shared if math.prod(tile.grid(m, n, multiprocessors)) <= room[tile]]
    clocks = {tile: cluster_product_clocks(tile, m, n, k, multiprocessors) for tile in fitting}
    best = min(clocks, key=clocks.__getitem__, default=None)
    if best is None or not thresholds.CLUSTERS_SHARE_K or clocks[best] >= known:
        return usual, gemm_clocks(usual, m, n, k, multiprocessors), why
    named = ", ".join(f"{count:,} by clusters of {tile.split}" for tile, count in clocks.items())
    why = f"clusters of blocks share k; counted clocks: {named}, {known:,} by {usual.m}×{usual.n}"
    return best, clocks[best] - thresholds.CLUSTER_PRODUCT_CLOCKS, why


@dataclass(frozen=True)
class WeightTile:
    """The tile on tensor cores of a weight's gradient.

    Attributes:
        sums_columns: whether the product may sum the bias's gradient beside it.
        clocks: what it is counted at, with the bias's gradient.
    """

    tile: GemmTile
    sums_columns: bool
    clocks: int
    why: str


def weight_tile(
    operand_format: OperandFormat, k: int, n: int, rows: int, multiprocessors: int, arch: str, *, in_place: bool
) -> WeightTile:
    """The tile for the gradient of a weight (k, n) over so many rows: that of :func:`gemm_tile`, unless one whose
    clusters share the rows, or whose blocks are several on a multiprocessor, is counted to take less.

    Args:
        in_place: whether the product moves the weight.
    """
    usual, why = gemm_tile(operand_format, k, n, rows, multiprocessors, arch, of_weight=True)
    if not isinstance(usual, Sm90Tile):
        return WeightTile(usual, True, 0, why)
    known, sums_columns = gradient_clocks(usual, k, n, rows, multiprocessors)
    if n % 4:
        waves = ceil_div(usual.clusters(k, n), max(1, multiprocessors // usual.cluster))
        known += waves * thresholds.SCALAR_TILE_CLOCKS * min(n, usual.n) // usual.n
    if thresholds.CLUSTERS_SHARE_ROWS:
        alone, *shared = cluster_split_tiles(operand_format)
        counts = {
            tile: cluster_gradient_clocks(tile, k, n, rows, multiprocessors)
            for tile in (*shared, *large_cluster_tiles(operand_format))
            if _is_one_wave(tile, k, n, multiprocessors)
        }
        clocks = {tile: count for tile, (count, _) in counts.items()}
        named = ", ".join(
            f"{count:,} by clusters of {tile.split}" + f" with {tile.m}×{tile.n}" * (tile.side > alone.side)
            for tile, count in clocks.items()
        )
        best = min(clocks, key=clocks.__getitem__, default=None)
        if best is not None and is_faster(clocks[best], known):
            counted = f"counted clocks: {named}, {known:,} by {usual.m}×{usual.n}"
            return WeightTile(best, counts[best][1], clocks[best], f"clusters of blocks share the rows; {counted}")
        is_bound = in_place and _is_bound_by_memory(alone, k, n, rows, multiprocessors, known)
        if is_bound and _leaves_memory_idle(usual, alone, k, n, multiprocessors):
            tile = _streaming_tile(operand_format, alone, k, n, multiprocessors)
            return WeightTile(tile, True, known, f"several blocks a multiprocessor, which move {k * n:,} weights")
    if not sums_columns and usual.column_partials(1):
        why += "; another launch sums the bias's gradient, for which the product would wait longer"
    return WeightTile(usual, sums_columns, known, why)


def _streaming_tile(
    operand_format: OperandFormat, alone: ClusterSplitTile, k: int, n: int, multiprocessors: int
) -> ClusterSplitTile:
    """The tile by which several blocks a multiprocessor move a weight: a wide one, unless all of its blocks are there
    at once, or more of them is padding."""
    for wide in wide_cluster_tiles(operand_format):
        has_little_padding = 8 * wide.n * ceil_div(n, wide.n) <= 9 * alone.n * ceil_div(n, alone.n)
        if thresholds.WIDE_CLUSTERS_ARE_USED and has_little_padding and not _is_one_wave(wide, k, n, multiprocessors):
            return wide
    return alone


def _is_bound_by_memory(tile: ClusterSplitTile, k: int, n: int, rows: int, multiprocessors: int, known: int) -> bool:
    """Whether moving a weight takes so long that blocks should multiply while others move theirs."""
    if k * n < thresholds.CLUSTER_LEAST_WEIGHTS:
        return False
    bytes_moved = thresholds.CLUSTER_WEIGHT_BYTES * k * n
    beside, after = (ceil_div(bytes_moved, rate) for rate in thresholds.CLUSTER_BYTES_PER_CLOCK)
    return is_faster(max(cluster_clocks(tile, k, n, rows, multiprocessors), beside), known + after)


def _leaves_memory_idle(usual: Sm90Tile, alone: ClusterSplitTile, k: int, n: int, multiprocessors: int) -> bool:
    """Whether a block for each multiprocessor, which moves one tile of a weight after another, is slower at it than
    several, whose tiles ``alone`` may be there all at once."""
    if n % 4 or k * n >= thresholds.CLUSTER_MANY_WEIGHTS or _is_one_wave(alone, k, n, multiprocessors):
        return True
    at_once = max(1, multiprocessors // usual.cluster)
    room = at_once * ceil_div(usual.clusters(k, n), at_once) * usual.cluster * usual.m * usual.n  # of whole waves
    return 100 * k * n < thresholds.CLUSTER_FILLED_HUNDREDTHS * room


def _is_one_wave(tile: ClusterSplitTile, k: int, n: int, multiprocessors: int) -> bool:
    """Whether all blocks that move a weight (k, n) are on the card at once."""
    return math.prod(tile.grid(k, n, multiprocessors)) <= tile.at_once(multiprocessors)
