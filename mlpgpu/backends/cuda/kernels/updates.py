"""From partial gradients to the next step's parameters: ``elementwise/update.cuh``."""

from __future__ import annotations

from ....optimizers import OPTIMIZERS
from .entry import ROW_THREADS, SUM_BYTES, Entry, arguments


def reduce() -> Entry:
    signature = "const float* partials, int64_t pitch, int shards, int uses, int64_t size, float* gradient"
    return Entry("reduce", "elementwise/update.cuh", "reduce", arguments(signature), ROW_THREADS)


def squares() -> Entry:
    signature = "const float* gradient, int64_t size, double* sums"
    return Entry("squares", "elementwise/update.cuh", "squares", arguments(signature), ROW_THREADS, SUM_BYTES)


def clip() -> Entry:
    signature = "const double* sums, int count, const double* totals, float* factor"
    return Entry("clip", "elementwise/update.cuh", "clip", arguments(signature), ROW_THREADS, SUM_BYTES, constants=True)


def update(optimizer: str) -> Entry:
    signature = (
        "const Step* step, const double* totals, const float* factor, const float* partials, int64_t pitch, "
        "int shards, float* parameters, float* slots, int64_t size"
    )
    function = f"update<{optimizer}Rule>"
    return Entry(
        f"update_{optimizer}", "elementwise/update.cuh", function, arguments(signature), ROW_THREADS, constants=True
    )


def update_biases(optimizer: str) -> Entry:
    """Of biases whose gradients products have left as parts."""
    signature = (
        "const Step* step, const double* totals, const int* described, int count, const float* column_parts, "
        "float* biases, float* biases_slots, int64_t size, int columns"
    )
    function = f"update_biases<{optimizer}Rule>"
    name = f"update_biases_{optimizer}"
    return Entry(
        name,
        "elementwise/update.cuh",
        function,
        arguments(signature),
        ROW_THREADS,
        constants=True,
        early=(("described", 0),),
    )


def update_entries() -> list[Entry]:
    """All that end a step."""
    updates = (make(optimizer) for make in (update, update_biases) for optimizer in OPTIMIZERS)
    return [reduce(), squares(), clip(), *updates]
