"""Which tile of C a block makes.  The bits do not depend on it: every tile sums over k in the same order."""

from __future__ import annotations

import math

from ..kernels import TILES, Form, ProductTile, Tile, WgmmaTile, matrix_tiles, wgmma_tiles
from . import thresholds


def fills(blocks: int, multiprocessors: int) -> bool:
    """Whether so many blocks are enough for a card."""
    return 10 * blocks >= thresholds.FILLING_TENTHS * multiprocessors


def simt_tile(m: int, n: int, multiprocessors: int, parts: int = 1) -> Tile:
    """The tile of multiply-adds for an m by n product, in so many parts.

    Of those whose blocks fill the card it is the largest, unless another one has an eighth less to compute beyond the
    borders; if none does, it is the smallest.
    """
    grids = {tile: math.prod(tile.grid(m, n, parts)) for tile in TILES}
    filling = [tile for tile in TILES if fills(grids[tile], multiprocessors)] or [TILES[-1]]
    least = min(grids[tile] * tile.m * tile.n for tile in filling)
    return next(
        tile
        for tile in filling
        if thresholds.TILE_WASTE * grids[tile] * tile.m * tile.n <= (thresholds.TILE_WASTE + 1) * least
    )


def gemm_tile(operand_format: Form, m: int, n: int, multiprocessors: int, arch: str) -> ProductTile:
    """The tile on tensor cores: on sm_90a that of the fewest clocks, before that the largest whose blocks fill the
    card."""
    if arch == WgmmaTile.needs:
        return min(wgmma_tiles(operand_format), key=lambda tile: tile.clocks(m, n, multiprocessors))
    largest, smallest = matrix_tiles(operand_format)[0], matrix_tiles(operand_format)[-1]
    return largest if fills(math.prod(largest.grid(m, n, multiprocessors)), multiprocessors) else smallest
