"""For how many rows the launches of an inference are made, and into which pieces and parts arrays are cut."""

from __future__ import annotations

import math

from ....plan import Plan
from ..kernels import ceil_div
from . import thresholds


def most_rows() -> int:
    """The capacity of a plan whose rows nobody bounds."""
    return thresholds.INFERENCE_MOST_ROWS


def piece_rows(plan: Plan, item_bytes: int) -> int:
    """The most rows of a piece of a large array, whose inputs take so many bytes each on the card."""
    buffers = sum(4 * math.prod(buffer.shape[2:]) for buffer in plan.buffers.values() if buffer.axes[1] == "row")
    by_bytes = thresholds.INFERENCE_PIECE_BYTES // (item_bytes * plan.n_in)
    by_buffers = thresholds.INFERENCE_BUFFER_BYTES // buffers
    rows = min(max(by_bytes, thresholds.INFERENCE_WIDE_ROWS), by_buffers, thresholds.INFERENCE_MOST_ROWS)
    return min(plan.capacity, max(rows, thresholds.INFERENCE_LEAST_ROWS))


def evaluation_rows(plan: Plan) -> int:
    """The rows that an evaluation takes at a time where a step may take fewer, which follows from widths alone."""
    whole = plan if plan.tensor is None else plan.tensor.whole  # so that all ranks that have parts take as many
    buffers = sum(4 * math.prod(buffer.shape[2:]) for buffer in whole.buffers.values() if buffer.axes[1] == "row")
    return max(1, min(thresholds.EVALUATION_ROWS, thresholds.EVALUATION_BUFFER_BYTES // buffers))


def evaluation_tiers(most: int) -> tuple[int, ...]:
    """For how many rows launches of an evaluation are made that takes at most so many: each batch takes the first."""
    return *(rows for rows in thresholds.EVALUATION_TIERS if rows < most), most


def row_tiers(most: int) -> tuple[int, ...]:
    """For how many rows launches are made, from few to a whole piece: a call takes the first that has room."""
    return *(rows for rows in thresholds.INFERENCE_ROWS if rows < most), most


def rows_in_flow(rows: int, row_bytes: int, capacity: int) -> int:
    """The rows of each piece of an array that flows through: at most the capacity."""
    least = ceil_div(thresholds.INFERENCE_LEAST_PIECE_BYTES, row_bytes)
    return min(capacity, max(least, ceil_div(rows, thresholds.INFERENCE_PIECES)))


def half_rows(rows: int, row_bytes: int) -> int:
    """How many rows of an array of one piece go up while the others are copied; all of them if they are few."""
    return rows if rows * row_bytes <= thresholds.INFERENCE_WHOLE_BYTES else ceil_div(rows, 2)


def uploaded_as_they_lie(nbytes: int, source: str, capacity: int) -> bool:
    """Whether the driver copies an array of so many bytes from where it lies, if it is of the card's type."""
    is_checked = source == "uint8" or card_checks_inputs(source, capacity)
    return is_checked and thresholds.INFERENCE_STAGED_BYTES < nbytes <= thresholds.INFERENCE_DRIVER_BYTES


def by_threads(nbytes: int) -> bool:
    """Whether several threads copy an array of so many bytes to page-locked memory."""
    return nbytes > thresholds.INFERENCE_ALONE_BYTES


def copy_threads(cores: int, *, is_compiled: bool) -> int:
    """Threads that copy rows in C++ to page-locked memory; 0 where NumPy or the driver does."""
    is_so = is_compiled and cores >= thresholds.INFERENCE_LEAST_COPY_CORES
    return min(cores, thresholds.INFERENCE_COPY_THREADS) if is_so else 0


def by_helpers(nbytes: int) -> bool:
    """Whether such threads copy for launches whose rows have at most so many bytes."""
    return nbytes >= thresholds.INFERENCE_LEAST_COPY_BYTES


def threads_for(nbytes: int, threads: int) -> int:
    """How many of the threads copy an array of so many bytes."""
    return max(1, min(threads, nbytes // thresholds.INFERENCE_THREAD_BYTES))


def part_rows(rows: int, row_bytes: int) -> int:
    """How many rows of an array of one piece go up while others are copied by such threads; all if they are few."""
    parts = min(thresholds.INFERENCE_PARTS, rows * row_bytes // thresholds.INFERENCE_LEAST_PART_BYTES)
    return ceil_div(rows, max(1, parts))


def past_caches(nbytes: int) -> bool:
    """Whether such threads write an array of so many bytes past the caches."""
    return nbytes > thresholds.INFERENCE_PAST_CACHES_BYTES


def seconds_awake() -> float:
    """How long such threads wait for the next copy before they sleep."""
    return thresholds.INFERENCE_AWAKE_SECONDS


def card_checks_inputs(source: str, capacity: int) -> bool:
    """Whether the card, and not the host, looks for inputs that are not finite."""
    return source == "float32" and capacity > thresholds.INFERENCE_CHECKED_ROWS
