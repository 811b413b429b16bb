"""Which way round BLAS is asked for a product."""

from __future__ import annotations

from collections.abc import Sequence

# OpenBLAS packs an operand before it multiplies: of rows by a weight the weight, which takes most of the time where
# rows are few.  Asked for the transpose it packs the rows.  Its share of the time then, on two cores with AVX-512 and
# for 784×1024 weights: dx of 16 rows 0.4, of 32 rows 0.55, of 64 rows 0.8; y 0.8, 0.8 and 1.15.
FEW_ROWS_DX = 2**15, 64  # at least so many weights, and so many for each squared row
FEW_ROWS_Y = 2**18, 256


def is_by_transpose(rows: int, weights: int, few: tuple[int, int]) -> bool:
    """Whether the product of so many rows by so many weights is made as its transpose."""
    least, by_square = few
    return weights >= max(least, by_square * rows**2)


# OpenBLAS has kernels that pack nothing for products of up to 10⁶ multiplications, and otherwise packs an operand.  The
# loop that packs nothing takes of one thread of BLAS's time, on a core of AMD EPYC with AVX-512 (some of the figures of
# benchmarks/cpu_products.py; the shortest products are those that BLAS packs nothing for):
#
# | weights   | y of rows: 8 |   16 |   64 |  256 |  512 | gradient: 8 |   16 |   64 |  128 |  512 |
# |-----------|--------------|------|------|------|------|-------------|------|------|------|------|
# | 784×128   |         0.89 | 0.66 | 0.84 | 0.91 | 0.91 |        1.32 | 0.91 | 0.93 | 0.89 | 0.94 |
# | 784×1024  |         0.43 | 0.53 | 0.76 | 0.90 | 0.93 |        0.46 | 0.49 | 0.75 | 0.90 | 0.98 |
# | 2048×2048 |         0.49 | 0.59 | 0.81 | 0.96 | 1.02 |        0.39 | 0.94 | 1.01 | 1.02 | 1.28 |
#
# y of one row takes as long as BLAS does by 1024×1024 and 2048×2048 weights, and 0.94 by 392×128.
#
# Of what OpenBLAS packs nothing for the loop makes, on Zen 5, y of 3 rows in 0.35 to 0.9 of its time, of 4 in 0.8 to
# 1.3, of 5 to 7 in 0.5 to 1.0 and of 8 in 0.75 to 1.2, the least by at least 64 columns.  With vectors of 32 bytes, for
# which OpenBLAS has no such kernels, the loop makes y of 3 to 8 rows in 0.15 to 1.1 of its time.  Gradients of up to 4
# rows take it 1.1 to 1.9 times as long again and again, but a step of 784-512-10 by one row 58 µs for 80: there they
# lie in no near cache.
UNPACKED_BY_BLAS = 10**6
MOST_ROWS_OF_Y, MANY_COLUMNS, MOST_ROWS_OF_MANY_COLUMNS = 3, 64, 8
MOST_ROWS_OF_GRADIENT = 4
# Of larger products by one thread: at most so many weights, and so many rows of them.  With vectors of 32 bytes
# OpenBLAS is faster at more than 8 rows: y of 64 rows by 784×1024 weights takes 1.4 of its time, the gradient as much.
LARGE_Y = (2**19, 512), (2**30, 256)
LARGE_GRADIENT = (2**18, 128), (2**20, 64)
MOST_ROWS_OF_OTHERS = 8  # of those of few columns too, by shorter vectors, and where BLAS has several threads
MOST_WEIGHTS_OF_ONE_ROW = 2**19
LEAST_COLUMNS, LEAST_COLUMNS_OF_GRADIENT = 16, 48  # of a vector, and of a tile
# The loop makes y of fewer columns than a vector of 64 bytes holds in this share of OpenBLAS's time: with 9 to 15
# columns 0.9 for 64 rows by k = 128, 0.8 for 64 by 784, 0.4 to 0.6 for 1000 by 128, 590 by 444 and 512 by 2048; with 6
# to 8 columns 0.5 to 0.9 where BLAS packs, and 1.0 to 1.8 where it does not.
NARROW_COLUMNS, NARROW_COLUMNS_WHERE_PACKED = 9, 6
# Where OpenBLAS has vectors of 32 bytes and the loop of 64, the loop makes y in 0.2 to 0.9 of its time, of any number
# of rows and 9 columns or more, and gradients of 16 or more in 0.3 to 1.0 (two cores of an AMD EPYC, Zen 5).  So it
# makes dx, too, of so many rows or more.  With equal vectors it makes dx of so many rows, at most, where OpenBLAS
# packs: by 512×512 weights and 3, 8, 12, 32 and 64 rows 43, 42, 44, 83 and 146 µs, and OpenBLAS 60, 51, 72, 90 and 163.
LEAST_ROWS_OF_DX, MOST_ROWS_OF_DX = 3, 64
# A call of predictions sets BLAS's threads before and after, which takes 3.5 µs.  So of so many multiplications in all,
# and an eighth of them with vectors of 32 bytes, the loop makes every product: 20-64-64-2 by 8 rows takes 10.7 -> 7.3
# µs, by 32 14.0 -> 11.1, by 100 23.2 -> 21.9, by 300 (2.2 million) 52.5 and 54.2.  Fewer columns take as long as so
# many.
SPARED_PRODUCTS, SPARED_COLUMNS = 2**20, 32


def packs_nothing(rows: int, weights: int, columns: int, *, is_fast: bool, is_faster: bool = False) -> bool:
    """Whether the loop that packs nothing makes y, with so many columns.

    ``is_fast`` says whether the loop has vectors of 64 bytes, and BLAS one thread for the product, as the loop has;
    ``is_faster`` whether BLAS has shorter ones then.
    """
    if rows == 1:
        return weights <= MOST_WEIGHTS_OF_ONE_ROW
    if is_faster and columns >= NARROW_COLUMNS:
        return True
    if is_fast and NARROW_COLUMNS_WHERE_PACKED <= columns < LEAST_COLUMNS:
        return rows <= MOST_ROWS_OF_Y or columns >= NARROW_COLUMNS or rows * weights > UNPACKED_BY_BLAS
    if rows * weights <= UNPACKED_BY_BLAS:
        has_many = columns >= (MANY_COLUMNS if is_fast else LEAST_COLUMNS)
        return rows <= (MOST_ROWS_OF_MANY_COLUMNS if has_many else MOST_ROWS_OF_Y)
    return rows <= (_most_rows(weights, LARGE_Y) if is_fast and columns >= LEAST_COLUMNS else MOST_ROWS_OF_OTHERS)


def spares_blas(rows: int, weights: Sequence[tuple[int, ...]], *, is_fast: bool) -> bool:
    """Whether the loop makes all products of so many rows by weights of these shapes (k, n), so that BLAS is not asked.

    ``is_fast`` says whether the loop has vectors of 64 bytes.
    """
    most = SPARED_PRODUCTS if is_fast else SPARED_PRODUCTS // 8
    return rows * sum(k * max(n, SPARED_COLUMNS) for k, n in weights) <= most


def packs_nothing_for_gradient(
    rows: int, weights: int, columns: int, *, is_fast: bool, is_faster: bool = False
) -> bool:
    """Whether it makes the gradient of so many weights in so many columns."""
    if columns < LEAST_COLUMNS:
        return False
    if is_faster:
        return True
    if rows * weights <= UNPACKED_BY_BLAS:
        return rows <= MOST_ROWS_OF_GRADIENT
    is_wide = is_fast and columns >= LEAST_COLUMNS_OF_GRADIENT
    return rows <= (_most_rows(weights, LARGE_GRADIENT) if is_wide else MOST_ROWS_OF_OTHERS)


def packs_nothing_for_inputs(rows: int, weights: int, *, is_fast: bool, is_faster: bool = False) -> bool:
    """Whether it makes dx of so many rows."""
    if rows < LEAST_ROWS_OF_DX:
        return False
    return is_faster or (is_fast and rows <= MOST_ROWS_OF_DX and rows * weights > UNPACKED_BY_BLAS)


def _most_rows(weights: int, limits: tuple[tuple[int, int], ...]) -> int:
    return next((rows for limit, rows in limits if weights <= limit), MOST_ROWS_OF_OTHERS)
