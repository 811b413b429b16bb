"""Split operands, whose components tensor cores multiply in the place of float32 numbers, and the kernels of
``gemm/split_operands.cuh`` that split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .entry import ROW_THREADS, ROWS, SOURCES, WARP, WARPS_PER_BLOCK, Entry, arguments, ceil_div
from .operand_format import BFLOAT16, BFLOAT16_PAIR, BFLOAT16_TRIPLE, HALF, HALF_PAIR, OPERAND_FORMATS, OperandFormat

ROW_PADDING, COLUMN_PADDING = 128, 64  # what components are padded to multiples of
FILLED_ROWS = 64  # to whose multiple rows are written, with 0 behind the last
TENSOR_MAP_BYTES = 128
SPLIT_BLOCKS = 4  # on a multiprocessor at once, since each waits for its loads most of the time
SPLIT_BYTES = 4 * 2 * WARPS_PER_BLOCK  # of a block that splits a row: two words of each warp
COLUMN_WIDTH, COLUMN_BYTES = 64, 4 * 16 * 64  # ColumnBlock of gemm/split_operands.cuh
COLUMN_ROWS, MOST_COLUMN_PARTIALS = 64, 32  # rows that a block sums at least; partial sums of a column at most
# Of elementwise/delta_sums.cuh: layers of a launch, how their arguments end, a block's columns and shared memory, and
# blocks of a multiprocessor; then rows of a run with the most runs, of which the pair that makes more runs is taken.
MOST_SUMMED, SUMMED_ENDS = 4, ("", "_1", "_2", "_3")
DELTA_SUMS_WIDTH, DELTA_SUMS_BYTES, DELTA_SUMS_BLOCKS = 256, 4 * 8 * 256, 3
DELTA_RUNS = (128, 16), (256, 32)
NONZERO = 4  # the flag of a row or column that has an element other than 0

# By precision: the format for networks of small layers, and that for those of large ones.
OF_PRECISION = {
    "float32": (HALF_PAIR, HALF_PAIR),
    "tf32": (BFLOAT16_PAIR, HALF),
    "bfloat16": (BFLOAT16, BFLOAT16),
}
# And another one of training steps, where it is counted to take less; an evaluation always has one of those above.
OF_STEPS = {"float32": BFLOAT16_TRIPLE, "tf32": BFLOAT16_PAIR}


def padded_rows(rows: int) -> int:
    """Rows of the components of a matrix with so many rows."""
    return ROW_PADDING * ceil_div(rows, ROW_PADDING)


def filled_rows(rows: int) -> int:
    """Rows that are written of the components of a matrix with so many."""
    return FILLED_ROWS * ceil_div(rows, FILLED_ROWS)


def padded_columns(n: int) -> int:
    """Elements from one row to the next in the components of a matrix with ``n`` columns."""
    return COLUMN_PADDING * ceil_div(n, COLUMN_PADDING)


def _split(
    name: str, function: str, signature: str, shared_bytes: int = 0, block: str = "PlainBlock", *, spill_bytes: int = 24
) -> Entry:
    """An entry for cards whose tensor cores take split operands."""
    return Entry(
        name,
        "gemm/split_operands.cuh",
        function,
        arguments(signature),
        ROW_THREADS,
        shared_bytes,
        needs="sm_80",
        prefetched=(),
        block=block,
        blocks=SPLIT_BLOCKS,
        spill_bytes=spill_bytes,
    )


def row_blocks(rows: int, n: int) -> tuple[int, int, int]:
    """Blocks that split so many rows of ``n`` columns, filled ones included: RowTeam of gemm/split_operands.cuh."""
    team = WARP
    while team < ROW_THREADS and 16 * team < n:
        team *= 2
    return filled_rows(rows) * team // ROW_THREADS, 1, 1


def column_blocks(rows: int, n: int) -> tuple[int, int, int]:
    """Blocks along the columns, and along the rows, each of which leaves partial sums."""
    partials = min(MOST_COLUMN_PARTIALS, ceil_div(filled_rows(rows), COLUMN_ROWS))
    return padded_columns(n) // COLUMN_WIDTH, partials, 1


def split_rows(operand_format: OperandFormat, source: str = "float32") -> Entry:
    """Of rows of a data set of this type, or of floats that a kernel has made."""
    ctype, of_bytes = SOURCES[source], "" if source == "float32" else f"_{source}"
    rest = (
        f"{ROWS}, const {ctype}* x[rows,n], const int* order[rows], float scale, const int* weight_row_scales[n], "
        f"float* copy[rows,n], uint16_t* components[{operand_format.components},rows,n], int64_t component_stride, "
        "int* row_scales[rows], int* column_scales[n], int n"
    )
    name, function = f"split_rows{of_bytes}_{operand_format.name}", f"split_rows<{operand_format.struct}, {ctype}>"
    # With scales: 52 on sm_90a of bytes, 52 of floats and 108 of bytes on sm_80.
    return _split(name, function, rest, SPLIT_BYTES, "RowTeam", spill_bytes=108)


def split_weights(operand_format: OperandFormat) -> Entry:
    rest = (
        f"const float* w[k,n], uint16_t* components[{operand_format.components},k,n], int* row_scales[k], "
        "int* column_scales[n], int k, int n, const float* other_w[other_k,other_n], "
        f"uint16_t* other_components[{operand_format.components},other_k,other_n], int* other_row_scales[other_k], "
        "int* other_column_scales[other_n], int other_k, int other_n"
    )
    return _split(
        f"split_weights_{operand_format.name}", f"split_weights<{operand_format.struct}>", rest, SPLIT_BYTES, "RowTeam"
    )


def split_columns(operand_format: OperandFormat) -> Entry:
    components = f"{operand_format.components},rows,n"
    signature = (
        f"{ROWS}, const float* dz[rows,n], int* row_scales[rows], const int* x_row_scales[rows], "
        f"uint16_t* components[{components}], uint16_t* row_components[{components}], int64_t component_stride, "
        "int* column_scales[n], float* partials[0], int* partial_flags[0], inout unsigned* arrived[grid.x], "
        "float* db[n], int n"
    )
    return _split(
        f"split_columns_{operand_format.name}",
        f"split_columns<{operand_format.struct}>",
        signature,
        COLUMN_BYTES,
        "ColumnBlock",
        spill_bytes=48,  # with scales, of pairs: on sm_80; 40 on sm_90a
    )


def sum_deltas(operand_format: OperandFormat) -> Entry:
    """Gradients of the biases of up to :data:`MOST_SUMMED` layers, from operands without scales."""
    layers = ", ".join(
        f"const uint16_t* dz{end}[{operand_format.components},rows,n{end}], float* db{end}[n{end}], int n{end}"
        for end in SUMMED_ENDS
    )
    signature = f"{ROWS}, {layers}, int component_rows, float* partials[0], inout unsigned* arrived[grid.x]"
    entry = _split(
        f"sum_deltas_{operand_format.name}", f"sum_deltas<{operand_format.struct}>", signature, DELTA_SUMS_BYTES,
        "DeltaSums",
    )  # fmt: skip
    return replace(entry, header="elementwise/delta_sums.cuh", blocks=DELTA_SUMS_BLOCKS)


def summed_grid(rows: int, widths: Sequence[int]) -> tuple[int, int, int]:
    """Blocks that sum the columns of deltas with so many each, and parts of the rows, which leave partial sums."""
    runs = max(min(most, ceil_div(rows, run)) for run, most in DELTA_RUNS)
    return sum(ceil_div(n, DELTA_SUMS_WIDTH) for n in widths), runs, 1


def mask_words() -> Entry:
    return _split("mask_words", "mask_words", "inout int* words[size], int mask, int64_t size")


def split_entries() -> list[Entry]:
    """The entries that split operands into any format."""
    makers: tuple[Callable[[OperandFormat], Entry], ...] = (split_rows, split_weights, split_columns)
    entries = [make(operand_format) for operand_format in OPERAND_FORMATS for make in makers]
    return [
        *entries,
        *(split_rows(operand_format, "uint8") for operand_format in OPERAND_FORMATS),
        *(sum_deltas(operand_format) for operand_format in OPERAND_FORMATS if not operand_format.scaled),
        mask_words(),
    ]
