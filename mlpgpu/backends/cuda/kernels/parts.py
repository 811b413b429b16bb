"""Between parts of a network (``elementwise/parts.cuh``); their initial values (``elementwise/random.cuh``)."""

from __future__ import annotations

from ....optimizers import OPTIMIZERS
from .entry import DROPOUT, ROW_THREADS, ROWS, WARP, Entry, arguments, ceil_div
from .updates import slot_count


def join_columns() -> Entry:
    """The columns of all parts beside each other."""
    signature = (
        f"{ROWS}, const float* of_parts[rows,n], float* y[rows,n], int n, int count, int alignment, int capacity"
    )
    return Entry("join_columns", "elementwise/parts.cuh", "join_columns", arguments(signature), ROW_THREADS)


def take_columns() -> Entry:
    """Some columns of an array."""
    signature = f"{ROWS}, const float* x[rows,n], float* y[rows,n], int n, int first, int width"
    return Entry("take_columns", "elementwise/parts.cuh", "take_columns", arguments(signature), ROW_THREADS)


def column_sums() -> Entry:
    """The sums of a delta's columns, which are a bias's gradient."""
    signature = f"{ROWS}, const float* dz[rows,n], float* db[n], int n"
    shared, block = 8 * ROW_THREADS, "ColumnSums"
    return Entry(
        "column_sums", "elementwise/parts.cuh", "column_sums", arguments(signature), ROW_THREADS, shared, block=block
    )


def column_sums_grid(n: int) -> tuple[int, int, int]:
    """A block for each 32 columns."""
    return ceil_div(n, WARP), 1, 1


def bias_backward_update(optimizer: str) -> Entry:
    """The same, with the optimizer's step of the bias."""
    slots = slot_count(optimizer)
    signature = (
        f"{ROWS}, const float* dz[rows,n], const double* totals[2], inout float* bias[n], "
        f"inout float* bias_slots[{slots},n], int64_t size, int n"
    )
    return Entry(
        f"bias_backward_update_{optimizer}",
        "elementwise/parts.cuh",
        f"bias_backward_update<{optimizer}Rule>",
        arguments(signature),
        ROW_THREADS,
        8 * ROW_THREADS,
        block="ColumnSums",
        constants=True,
        prefetched=(),
    )


def dropout_of_part() -> Entry:
    """A dropout of some columns of a layer's."""
    signature = f"{ROWS}, const float* x[rows,n], float* y[rows,n], int n, int first, int width, {DROPOUT}"
    return Entry("dropout_of_part", "elementwise/parts.cuh", "dropout_of_part", arguments(signature), ROW_THREADS)


def initial_uniform_of_part() -> Entry:
    """Uniform initial values of some rows and columns of an array."""
    signature = (
        "uint64_t seed, uint64_t purpose, uint64_t layer, double limit, int64_t first, int64_t width, int64_t rows, "
        "int64_t n, float* x[rows,n]"
    )
    function = "initial_uniform_of_part"
    return Entry(function, "elementwise/random.cuh", function, arguments(signature), ROW_THREADS)


def part_entries() -> list[Entry]:
    """The entries of networks in parts."""
    updates = (bias_backward_update(optimizer) for optimizer in OPTIMIZERS)
    return [join_columns(), take_columns(), column_sums(), *updates, dropout_of_part(), initial_uniform_of_part()]
