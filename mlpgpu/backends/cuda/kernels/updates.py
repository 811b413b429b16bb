"""From partial gradients to the next step's parameters: ``elementwise/update.cuh``."""

from __future__ import annotations

from ....optimizers import OPTIMIZERS, Optimizer
from .entry import ROW_THREADS, SUM_BYTES, Entry, arguments, ceil_div

WITH_ALPHA = "WithAlpha"  # what the names of rules end with that have the penalty alpha on weights

# By which products move parameters in place: the structs of math/optimizers.cuh, whose names have "Rule" added.
RULES = (*OPTIMIZERS, *(f"{optimizer}{WITH_ALPHA}" for optimizer in OPTIMIZERS))


def rule_of(optimizer: Optimizer) -> str:
    """The one of ``RULES`` by which the optimizer moves parameters."""
    return type(optimizer).__name__ + WITH_ALPHA * bool(optimizer.alpha)


def slot_count(rule: str) -> int:
    """How many numbers the rule keeps of each parameter."""
    return len(OPTIMIZERS[rule.removesuffix(WITH_ALPHA)].slots)


def reduce() -> Entry:
    signature = (
        "const float* partials[shards,uses,size], int64_t pitch, int shards, int uses, int64_t size, "
        "float* gradient[size]"
    )
    return Entry("reduce", "elementwise/update.cuh", "reduce", arguments(signature), ROW_THREADS)


CACHE_LINE_FLOATS = 32  # of four sectors


def slot_pitch(count: int) -> int:
    """Elements from one slot of so many parameters to the next on the card: whole cache lines, so that what is a
    vector, a sector or a cache line of the parameters is one of every slot."""
    return CACHE_LINE_FLOATS * ceil_div(count, CACHE_LINE_FLOATS)


def squares() -> Entry:
    signature = "const float* gradient[size], int64_t size, int64_t part, double* sums[grid.x]"
    return Entry(
        "squares", "elementwise/update.cuh", "squares", arguments(signature), ROW_THREADS, SUM_BYTES, block="SumBlock"
    )


def clip() -> Entry:
    signature = "const double* sums[count], int count, const double* totals[2], float* factor[]"
    return Entry(
        "clip",
        "elementwise/update.cuh",
        "clip",
        arguments(signature),
        ROW_THREADS,
        SUM_BYTES,
        block="SumBlock",
        constants=True,
    )


def update(optimizer: str) -> Entry:
    signature = (
        "const Step* step[0], const double* totals[2], const float* factor[], const float* partials[shards,size], "
        "int64_t pitch, int shards, inout float* parameters[size], "
        f"inout float* slots[{slot_count(optimizer)},size], int64_t size, int64_t slot_pitch, float alpha"
    )
    function = f"update<{optimizer}Rule>"
    return Entry(
        f"update_{optimizer}", "elementwise/update.cuh", function, arguments(signature), ROW_THREADS, constants=True
    )


def update_biases(optimizer: str) -> Entry:
    """The update of biases whose gradients products have left as partial sums."""
    signature = (
        "const Step* step[0], const double* totals[2], const int* described[count,6], int count, "
        "const float* column_partials[partial_count], inout float* biases[columns], "
        f"inout float* biases_slots[{slot_count(optimizer)},columns], int64_t size, int columns"
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
        prefetched=(("described", 0),),
    )


def sum_biases() -> Entry:
    """Sums of the partials that products have left of biases' gradients."""
    signature = (
        "const int* described[count,6], int count, const float* column_partials[partial_count], "
        "inout float* gradients[columns], int columns"
    )
    described = (("described", 0),)
    return Entry(
        "sum_biases", "elementwise/update.cuh", "sum_biases", arguments(signature), ROW_THREADS, prefetched=described
    )


def update_entries() -> list[Entry]:
    """The entries that end a step."""
    updates = (make(optimizer) for make in (update, update_biases) for optimizer in OPTIMIZERS)
    return [reduce(), squares(), clip(), sum_biases(), *updates]
