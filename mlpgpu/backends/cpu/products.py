"""Which way round BLAS is asked for a product."""

from __future__ import annotations

# OpenBLAS packs an operand before it multiplies: of rows by a weight the weight, which takes most of the time where
# rows are few.  Asked for the transpose it packs the rows.  Its share of the time then, on two cores with AVX-512 and
# for 784×1024 weights: dx of 16 rows 0.4, of 32 rows 0.55, of 64 rows 0.8; y 0.8, 0.8 and 1.15.
FEW_ROWS_DX = 2**15, 64  # at least so many weights, and so many for each squared row
FEW_ROWS_Y = 2**18, 256


def is_by_transpose(rows: int, weights: int, few: tuple[int, int]) -> bool:
    """Whether the product of so many rows by so many weights is made as its transpose."""
    least, by_square = few
    return weights >= max(least, by_square * rows**2)


# OpenBLAS has kernels that pack nothing for products of up to 10⁶ multiplications.  The loop that packs nothing either
# takes of BLAS's time, for 1024×1024 weights: y of 2 rows 0.2, of 4 rows 0.35, of 8 rows 0.6, of 16 rows 1.0; the
# gradient of 1 row 0.1, of 4 rows 0.2, of 8 rows 0.35, of 16 rows 0.9.  For 784×128: y of 1 row 0.85, of 2 rows 0.9, of
# 4 rows 1.6; the gradient of 1 row 0.5, of 4 rows 0.9, of 8 rows 1.3.  Of 1024×1024 weights one row takes 1.25.
UNPACKED_BY_BLAS = 10**6
MOST_ROWS_OF_Y, MOST_ROWS_OF_GRADIENT = 2, 4
MOST_ROWS_OF_LARGE = 8
MOST_WEIGHTS_OF_ONE_ROW = 2**19
LEAST_COLUMNS_OF_GRADIENT = 16  # of a vector


def has_few_rows(rows: int, weights: int) -> bool:
    """Whether the loop for few rows makes y."""
    if rows == 1:
        return weights <= MOST_WEIGHTS_OF_ONE_ROW
    return rows <= (MOST_ROWS_OF_LARGE if rows * weights > UNPACKED_BY_BLAS else MOST_ROWS_OF_Y)


def has_few_rows_of_gradient(rows: int, weights: int, columns: int) -> bool:
    """Whether it makes the gradient of so many weights in so many columns."""
    most = MOST_ROWS_OF_LARGE if rows * weights > UNPACKED_BY_BLAS else MOST_ROWS_OF_GRADIENT
    return rows <= most and columns >= LEAST_COLUMNS_OF_GRADIENT
