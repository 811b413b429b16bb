"""How a layer's weights are cut into tiles, and how a block's threads share the products of a tile.

``persistent/shape.cuh`` and ``persistent/products.cuh`` derive the same numbers; the kernel asserts that the sizes that
follow from them agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..kernels import WARP, ceil_div

COMPUTE_THREADS, PRODUCER_THREADS = 512, 128  # of a block: those that compute, and those that fetch the next batch
COMPUTE_WARPS = COMPUTE_THREADS // WARP
BFLOAT16 = -1  # in place of a number of tf32 terms: operands of the first layer's products are bfloat16
MANY_ROWS = 96  # from so many rows on, Z has no partial sums
MOST_MMA_COLUMNS, MOST_FMA_COLUMNS = 16, 12  # of a tile: on tensor cores, and by multiply-adds, in registers


def round_up(a: int, b: int) -> int:
    """The next multiple of ``b``."""
    return ceil_div(a, b) * b


def most_columns(tf32_terms: int) -> int:
    """The most columns of a tile."""
    return MOST_MMA_COLUMNS if tf32_terms else MOST_FMA_COLUMNS


@dataclass(frozen=True)
class Tiling:
    """A layer's weights, ``weight_rows`` by ``n_out`` with the biases as the last row, in tiles by slices each way.

    Slices begin at multiples of four, a *quad*.
    """

    weight_rows: int
    n_out: int
    row_slices: int
    column_slices: int

    @property
    def tiles(self) -> int:
        return self.row_slices * self.column_slices

    @property
    def quads(self) -> int:
        """The most weight rows of a tile, in fours."""
        return ceil_div(ceil_div(self.weight_rows, 4), self.row_slices)

    @property
    def columns(self) -> int:
        """The most columns of a tile."""
        return 4 * ceil_div(ceil_div(self.n_out, 4), self.column_slices)

    @property
    def out_pitch(self) -> int:
        """Floats from one row of outputs to the next: an even number, as blocks send each other pairs of values."""
        return round_up(self.n_out, 2)

    @property
    def copy_pitch(self) -> int:
        """Floats from one weight row to the next in a replicated layer's copy: an odd multiple of two."""
        return self.out_pitch | 2

    @property
    def input_pitch(self) -> int:
        """Floats from one row of the tile's inputs to the next in shared memory."""
        return round_up(4 * self.quads, 8) + 4

    @property
    def floats(self) -> int:
        """Floats of a tile in shared memory."""
        return round_up(self.quads, 2) * (4 * (24 if self.columns > 8 else 8) + 4)

    @property
    def sum_pitch(self) -> int:
        """Floats from one row of a partial sum of Z to the next in shared memory."""
        return self.columns + 4


@dataclass(frozen=True)
class TileProducts(ABC):
    """The products of a tile with a batch of ``rows``: Z = X W, and dW = Xᵀ dZ."""

    tiling: Tiling
    rows: int

    input_bytes = 4  # of an element

    @property
    def input_pitch(self) -> int:
        """Floats from one row of the tile's inputs to the next in shared memory."""
        return self.tiling.input_pitch

    @property
    @abstractmethod
    def z_partials(self) -> int:
        """Partial sums of Z, each over some of the tile's weight rows."""

    @property
    @abstractmethod
    def dw_partials(self) -> int:
        """Partial sums of dW, each over some rows of the batch."""

    def operand_floats(self, batches: int) -> int:
        """Floats of what products read beside the weights: inputs of so many batches, dZ."""
        return round_up(self.rows, 8) * (batches * self.input_pitch + 4 * (self.tiling.columns // 4 | 1)) + 8

    def shared_floats(self, slots: int, is_first: bool) -> int:
        """What grows with the tile: weights, slots, inputs (of the first layer two batches), dZ."""
        return (1 + slots) * self.tiling.floats + self.operand_floats(2 if is_first else 1)

    def partial_floats(self, is_replicated: bool) -> int:
        """Floats of partial sums that threads leave each other: of Z, if tiles make it, then of dW."""
        z = 0 if is_replicated or self.z_partials == 1 else self.z_partials * self.rows * self.tiling.sum_pitch
        return max(z, 0 if self.dw_partials == 1 else self.dw_partials * self.tiling.floats)


@dataclass(frozen=True)
class FmaProducts(TileProducts):
    """Products by multiply-adds in float32."""

    @property
    def row_warps(self) -> int:
        """Warps for all rows: a lane has one row of Z, or two."""
        return ceil_div(self.rows, (2 if self.rows > WARP else 1) * WARP)

    @property
    def z_partials(self) -> int:
        return min(self.tiling.quads, max(1, COMPUTE_WARPS // self.row_warps))

    @property
    def dw_partials(self) -> int:
        return min(ceil_div(self.rows, 4), 14, COMPUTE_THREADS // (1 << (self.tiling.quads - 1).bit_length()))


@dataclass(frozen=True)
class Tf32Products(TileProducts):
    """Products on tensor cores of float32 operands, each taken as one or two terms of tf32."""

    @property
    def z_partials(self) -> int:
        return 1 if self.rows >= MANY_ROWS else mma_partials(*self.z_steps)

    @property
    def dw_partials(self) -> int:
        return mma_partials(*self.dw_steps)

    @property
    def z_steps(self) -> tuple[int, int]:
        """Blocks of sixteen rows of Z, and the steps of eight terms that make one."""
        return ceil_div(self.rows, 16), ceil_div(4 * self.tiling.quads, 8)

    @property
    def dw_steps(self) -> tuple[int, int]:
        """The same numbers as ``z_steps``, for dW."""
        return ceil_div(4 * self.tiling.quads, 16), ceil_div(self.rows, 8)


def mma_partials(sixteens: int, steps: int) -> int:
    """Partial sums of each block of sixteen rows, such that all warps have some."""
    return min(steps, max(1, COMPUTE_WARPS // sixteens))


@dataclass(frozen=True)
class Bfloat16Products(Tf32Products):
    """Products on tensor cores of operands that lie in shared memory as bfloat16."""

    input_bytes = 2
    z_partials = dw_partials = 1

    @property
    def input_pitch(self) -> int:
        return round_up(4 * self.tiling.quads, 16) + 8

    def operand_floats(self, batches: int) -> int:
        pitch = 8 if self.tiling.columns <= 8 else 24  # of weights and of dZ
        inputs = batches * round_up(self.rows, 16) * self.input_pitch
        return (inputs + pitch * (round_up(4 * self.tiling.quads, 32) + round_up(self.rows, 32))) // 2 + 8


def products_of(tiling: Tiling, rows: int, tf32_terms: int, *, is_first: bool) -> TileProducts:
    """How a tile's products are made: with so many tf32 terms for an operand, or by multiply-adds if there are none."""
    if tf32_terms == BFLOAT16 and is_first:
        return Bfloat16Products(tiling, rows)
    return Tf32Products(tiling, rows) if tf32_terms else FmaProducts(tiling, rows)
