"""Which tile of C a block makes.  The bits do not depend on it: every tile sums over k in the same order."""

from __future__ import annotations

import math

from ..kernels import TILES, GemmTile, OperandFormat, SimtTile, Sm90Tile, ceil_div, sm80_tiles, sm90_tiles
from . import thresholds


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


def gemm_tile(operand_format: OperandFormat, m: int, n: int, multiprocessors: int, arch: str) -> tuple[GemmTile, str]:
    """The tile on tensor cores, and why: on sm_90a that of the fewest clocks, before that the largest whose blocks
    fill the card."""
    if arch == Sm90Tile.needs:
        clocks = {tile: _clocks(tile, m, n, multiprocessors) for tile in sm90_tiles(operand_format)}
        named = ", ".join(f"{tile.m}×{tile.n} {count:,}" for tile, count in clocks.items())
        return min(clocks, key=clocks.__getitem__), f"estimated clocks per 64 of k: {named}"
    largest, smallest = sm80_tiles(operand_format)[0], sm80_tiles(operand_format)[-1]
    blocks = math.prod(largest.grid(m, n, multiprocessors))
    has_work = fills(blocks, multiprocessors)
    enough = "enough" if has_work else "too few"
    why = f"tiles of {largest.m}×{largest.n} make {blocks:,} blocks, {enough} for {multiprocessors} SMs"
    return largest if has_work else smallest, why


def _clocks(tile: Sm90Tile, m: int, n: int, multiprocessors: int) -> int:
    """About how long the card takes for every 64 along k of an m by n product."""
    products = tile.operand_format.products
    multiply = products * tile.m * tile.n * tile.K // thresholds.MULTIPLIED_PER_CLOCK
    # Each consumer reads 64 rows of A and its part of B; the copy engine writes each slice once.
    read = products * tile.consumers * 2 * tile.K * (64 + tile.n // tile.across)
    shared_memory = (read + tile.stage_bytes) // thresholds.SHARED_BYTES_PER_CLOCK
    waves = ceil_div(tile.clusters(m, n), max(1, multiprocessors // tile.cluster))
    return waves * max(multiply, shared_memory)
