"""Which rows a step has (``common/step.cuh``), and what is done to each by itself (``elementwise/rows.cuh``)."""

from __future__ import annotations

from ....activations import ACTIVATIONS
from ...sources import camel
from .entry import ROW_THREADS, ROWS, WARP, Entry, arguments

SOURCES = {"float32": "float", "uint8": "unsigned char"}  # C types of a data set's inputs


def initialise_steps() -> Entry:
    signature = "Step* next[0], Step* steps[0], int count"
    return Entry(
        "initialise_steps", "common/step.cuh", "initialise_steps", arguments(signature), WARP, block="StepsBlock"
    )


def _over_rows(name: str, function: str, rest: str) -> Entry:
    return Entry(name, "elementwise/rows.cuh", function, arguments(f"{ROWS}, {rest}"), ROW_THREADS)


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


def dropout() -> Entry:
    rest = (
        "const float* x[rows,n], float* y[rows,n], int n, uint64_t seed, uint64_t purpose, uint64_t layer, "
        "uint64_t threshold, float keep"
    )
    return _over_rows("dropout", "dropout", rest)


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
        dropout(),
        initialise_steps(),
        find_nonfinite_rows(),
    ]
