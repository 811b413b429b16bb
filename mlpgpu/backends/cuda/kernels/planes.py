"""Planes, what tensor cores take in the place of float32 numbers, and the kernels of ``gemm/split_operands.cuh`` that
make them."""

from __future__ import annotations

from .entry import ROW_THREADS, ROWS, WARP, WARPS_PER_BLOCK, Entry, arguments, ceil_div
from .operand_format import BFLOAT16, BFLOAT16_PAIR, FORMS, HALF, HALF_PAIR, Form

PLANE_ROWS, PLANE_COLUMNS = 128, 64  # what planes are padded to multiples of
TENSOR_MAP_BYTES = 128
SPLIT_BYTES = 4 * 2 * WARPS_PER_BLOCK  # of a block that splits a row: two words of each warp
COLUMN_WIDTH, COLUMN_BYTES = 64, 4 * 16 * 64  # ColumnBlock of gemm/split_operands.cuh
COLUMN_ROWS, MOST_COLUMN_PARTS = 64, 32  # rows of a part that a block takes at least; parts at most
USED = 4  # the flag of a line that has an element other than 0

# By precision: the form for networks of small layers, and that for those of large ones.
OF_PRECISION = {
    "float32": (HALF_PAIR, HALF_PAIR),
    "tf32": (BFLOAT16_PAIR, HALF),
    "bfloat16": (BFLOAT16, BFLOAT16),
}


def padded_rows(rows: int) -> int:
    """Rows of the planes of so many rows."""
    return PLANE_ROWS * ceil_div(rows, PLANE_ROWS)


def padded_columns(n: int) -> int:
    """Elements from row to row of planes that are ``n`` wide."""
    return PLANE_COLUMNS * ceil_div(n, PLANE_COLUMNS)


def _planes(name: str, function: str, signature: str, shared_bytes: int = 0) -> Entry:
    """For cards whose tensor cores take planes."""
    return Entry(
        name,
        "gemm/split_operands.cuh",
        function,
        arguments(signature),
        ROW_THREADS,
        shared_bytes,
        needs="sm_80",
        early=(),
    )


def row_blocks(rows: int, n: int) -> tuple[int, int, int]:
    """Blocks for so many rows ``n`` wide, padded: RowTeam of gemm/split_operands.cuh."""
    team = WARP
    while team < ROW_THREADS and 16 * team < n:
        team *= 2
    return padded_rows(rows) * team // ROW_THREADS, 1, 1


def column_blocks(rows: int, n: int) -> tuple[int, int, int]:
    """Blocks for the columns of ``n``, and parts of the rows."""
    parts = min(MOST_COLUMN_PARTS, ceil_div(padded_rows(rows), COLUMN_ROWS))
    return padded_columns(n) // COLUMN_WIDTH, parts, 1


def split_rows(form: Form) -> Entry:
    rest = (
        f"{ROWS}, const float* x[rows,n], const int* order[rows], const int* weight_lines[n], float* copy[rows,n], "
        f"uint16_t* planes[{form.planes},rows,n], int64_t plane, int* lines[rows], int* columns[n], int n"
    )
    return _planes(f"split_rows_{form.name}", f"split_rows<{form.struct}>", rest, SPLIT_BYTES)


def split_weights(form: Form) -> Entry:
    rest = (
        f"const float* w[k,n], uint16_t* planes[{form.planes},k,n], int* lines[k], int* columns[n], int k, int n, "
        f"const float* other_w[other_k,other_n], uint16_t* other_planes[{form.planes},other_k,other_n], "
        "int* other_lines[other_k], int* other_columns[other_n], int other_k, int other_n"
    )
    return _planes(f"split_weights_{form.name}", f"split_weights<{form.struct}>", rest, SPLIT_BYTES)


def split_columns(form: Form) -> Entry:
    return _over_columns("split_columns", form, "float", "rows,n")


def sum_columns(form: Form) -> Entry:
    """As :func:`split_columns`, of planes without scales that there are already."""
    return _over_columns("sum_columns", form, "uint16_t", f"{form.planes},rows,n")


def _over_columns(name: str, form: Form, ctype: str, axes: str) -> Entry:
    planes = f"{form.planes},rows,n"
    signature = (
        f"{ROWS}, const {ctype}* dz[{axes}], int* lines[rows], const int* x_lines[rows], uint16_t* planes[{planes}], "
        f"uint16_t* row_planes[{planes}], int64_t plane, int* columns[n], float* parts[0], int* part_flags[0], "
        "inout unsigned* arrived[grid.x], float* db[n], int n"
    )
    return _planes(f"{name}_{form.name}", f"split_columns<{form.struct}, {ctype}>", signature, COLUMN_BYTES)


def mask_words() -> Entry:
    return _planes("mask_words", "mask_words", "inout int* words[size], int mask, int64_t size")


def plane_entries() -> list[Entry]:
    """All that make planes of any form."""
    makers = (split_rows, split_weights, split_columns)
    entries = [make(form) for form in FORMS for make in makers]
    return [*entries, *(sum_columns(form) for form in FORMS if not form.scaled), mask_words()]
