"""How a layer's weights are cut for training by few rows inside one kernel, and what tiles are counted to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..kernels import WARP, ceil_div
from .network import DenseLayer
from .tiles import round_up

FEW_ROWS_THREADS = 512  # of a block: FewRowsBlock of persistent/few_rows_stages.cuh
FEW_ROWS = (1, 2, 4, 8)  # that kernels are made for

# Clocks of a turn of four weights for each thread, and of a message's way; words of messages that a multiprocessor
# receives in a clock.
TURN_CLOCKS, MESSAGE_CLOCKS, BARRIER_CLOCKS, WORDS_PER_CLOCK = 80.0, 500.0, 150.0, 3.0


def few_rows(rows: int) -> int:
    """Of :data:`FEW_ROWS`, the one that so many rows are given to."""
    return next(most for most in FEW_ROWS if rows <= most)


@dataclass(frozen=True)
class FewRowsTiling:
    """A layer's weights, biases included, cut into slices of their rows and of their columns."""

    dense: DenseLayer
    row_slices: int
    column_slices: int

    @property
    def tiles(self) -> int:
        return self.row_slices * self.column_slices

    @property
    def rows(self) -> int:
        """Of the largest tile."""
        return ceil_div(self.dense.weight_rows, self.row_slices)

    @property
    def columns(self) -> int:
        """Of the largest tile."""
        return ceil_div(self.dense.n_out, self.column_slices)

    @property
    def pitch(self) -> int:
        """Floats from one row of a tile to the next in shared memory: an odd number, so that no two banks collide."""
        return round_up(self.columns, 4) | 1

    @property
    def floats(self) -> int:
        """Of a tile in shared memory, whose rows are filled up to a multiple of 4."""
        return round_up(round_up(self.rows, 4) * self.pitch, 4)

    def operand_floats(self, rows: int, *, is_first: bool) -> tuple[int, int]:
        """Of the tile's inputs in a batch of so many rows, two batches of the first layer, and of its dz."""
        return (2 if is_first else 1) * round_up(self.rows, 4) * rows, round_up(self.columns, 4) * rows

    def all_floats(self, rows: int, *, is_first: bool) -> int:
        """Of the tile and its operands, without slots."""
        inputs, dz = self.operand_floats(rows, is_first=is_first)
        return self.floats + inputs + 2 * dz


def tile_clocks(tiling: FewRowsTiling, rows: int, slots: int, *, is_first: bool, is_last: bool, blocks: int) -> float:
    """About the clocks of a multiprocessor that a step of one of a layer's tiles takes, messages included."""
    dense, side = tiling.dense, blocks**0.5
    product, moved = 2 + 1.25 * rows, 14 + rows + 6 * slots  # instructions for each weight of a thread
    clocks = _tile_clocks(tiling.columns, tiling.rows, product) + _tile_clocks(tiling.columns, tiling.rows, moved, 1)
    # Those that receive sums have about a side of the grid's part of a layer's columns, or rows.
    received = rows * (dense.n_out if is_last else dense.n_out / side)
    clocks += (1 if is_last else 2) * _receiving_clocks(received, tiling.row_slices)
    if not is_first:
        clocks += _tile_clocks(tiling.rows, tiling.columns, product)
        clocks += _receiving_clocks(rows * dense.n_in / side, tiling.column_slices)
    return clocks


def _tile_clocks(outputs: int, inputs: int, instructions: float, inputs_each: int = 8) -> float:
    """Of work whose threads have an output each, and groups of them share the inputs, so many for each at least."""
    width = min(FEW_ROWS_THREADS, max(WARP, 1 << (outputs - 1).bit_length()))
    groups = min(FEW_ROWS_THREADS // width, 1 << (ceil_div(inputs, inputs_each) - 1).bit_length())
    rounds = ceil_div(outputs, FEW_ROWS_THREADS) * ceil_div(inputs, 4 * groups)
    return rounds * max(TURN_CLOCKS, groups * width / WARP * instructions)  # four weights, and warps on four schedulers


def _receiving_clocks(count: float, terms: int) -> float:
    """Of so many sums of ``terms`` messages each, of which a thread has four in flight."""
    width = min(FEW_ROWS_THREADS, 1 << (math.ceil(count) - 1).bit_length())
    parts = min(FEW_ROWS_THREADS // width, 1 << (ceil_div(terms, 4) - 1).bit_length())
    turns = math.ceil(count / (FEW_ROWS_THREADS // parts)) * ceil_div(terms, 4 * parts)
    return turns * MESSAGE_CLOCKS + (parts > 1) * BARRIER_CLOCKS + count * terms / WORDS_PER_CLOCK


def tilings_of(dense: DenseLayer, blocks: int) -> list[FewRowsTiling]:
    """All into at most so many tiles, none of which is empty."""
    return [
        FewRowsTiling(dense, row_slices, column_slices)
        for row_slices in range(1, min(dense.weight_rows, blocks) + 1)
        for column_slices in range(1, min(dense.n_out, blocks // row_slices) + 1)
    ]
