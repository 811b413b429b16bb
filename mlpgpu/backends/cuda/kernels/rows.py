"""Which rows a step has (``common/step.cuh``), and what is done to each by itself (``elementwise/rows.cuh``)."""

from __future__ import annotations

from ....activations import ACTIVATIONS
from ...sources import camel
from .entry import DROPOUT, ROW_THREADS, ROWS, SOURCES, WARP, Entry, arguments


def initialise_steps() -> Entry:
    signature = "Step* next[0], Step* steps[0], int count"
    return Entry(
        "initialise_steps", "common/step.cuh", "initialise_steps", arguments(signature), WARP, block="StepsBlock"
    )


def _over_rows(name: str, function: str, rest: str, *, overlaps: bool = False, spill_bytes: int = 0) -> Entry:
    """``overlaps``: its launch may begin before the one before it is complete, for which its blocks wait."""
    signature, prefetched = arguments(f"{ROWS}, {rest}"), () if overlaps else None
    return Entry(
        name, "elementwise/rows.cuh", function, signature, ROW_THREADS, prefetched=prefetched, spill_bytes=spill_bytes
    )


def gather(source: str) -> Entry:
    """The rows of a batch, of inputs whose type is one of :data:`SOURCES`."""
    ctype = SOURCES[source]
    rest = f"const int* order[rows], const {ctype}* data[rows,n], float scale, float* x[rows,n], int n"
    return _over_rows(f"gather_{source}", f"gather<{ctype}>", rest)


def standardize() -> Entry:
    rest = "const float* x[rows,n], const float* mean[n], const float* scale[n], float* y[rows,n], int n"
    return _over_rows("standardize", "standardize", rest)


def find_nonfinite_rows() -> Entry:
    """Sets a word if one of the batch's inputs is not finite."""
    return _over_rows(
        "find_nonfinite_rows", "find_nonfinite_rows", "const float* data[rows,n], unsigned* found[], int n"
    )


def dropout(activation: str = "identity") -> Entry:
    """A dropout; of deltas, that and the derivative of the activation below it."""
    rest = (
        "const float* x[rows,n], const float* saved[rows,n], float* y[rows,n], "
        f"uint16_t* components[component_count,rows,n], int64_t component_stride, int component_count, int n, {DROPOUT}"
    )
    name = "dropout" if activation == "identity" else f"dropout_backward_{activation}"
    # On sm_75, whose plans have no operands, the shard's rows and the words of components lie on the stack.
    return _over_rows(name, f"dropout<{camel(activation)}>", rest, overlaps=True, spill_bytes=48)


def draw_dropouts() -> Entry:
    """A bit for each element that a dropout keeps, of the dropouts that products end with, for several steps."""
    rest = "const int* described[4,count], int count, uint32_t* kept[grid.y,words], int words, uint64_t seed"
    return _over_rows("draw_dropouts", "draw_dropouts", rest, overlaps=True)


def zero() -> Entry:
    return _over_rows("zero", "zero", "float* x[rows,n], int n")


def activation_backward(activation: str) -> Entry:
    function = f"activation_backward<{camel(activation)}>"
    rest = "const float* saved[rows,n], inout float* dy[rows,n], int n"
    return _over_rows(f"activation_backward_{activation}", function, rest)


def row_entries() -> list[Entry]:
    """The entries that work row by row, except those of losses."""
    backward = [activation_backward(activation) for activation in ACTIVATIONS]
    return [
        *backward,
        *(gather(source) for source in SOURCES),
        standardize(),
        zero(),
        *(dropout(activation) for activation in ACTIVATIONS),
        draw_dropouts(),
        initialise_steps(),
        find_nonfinite_rows(),
    ]
