"""Which rows a step has (``common/step.cuh``), and what is done to each by itself (``elementwise/rows.cuh``)."""

from __future__ import annotations

from ....activations import ACTIVATIONS
from .entry import ROW_THREADS, ROWS, WARP, Entry, arguments, camel

SOURCES = {"float32": "float", "uint8": "unsigned char"}  # C types of a data set's inputs


def deal_steps() -> Entry:
    return Entry("deal_steps", "common/step.cuh", "deal_steps", arguments("Step* next, Step* steps, int count"), WARP)


def _over_rows(name: str, function: str, rest: str) -> Entry:
    return Entry(name, "elementwise/rows.cuh", function, arguments(f"{ROWS}, {rest}"), ROW_THREADS)


def gather(source: str) -> Entry:
    """``source`` is one of :data:`SOURCES`."""
    ctype = SOURCES[source]
    rest = f"const int* order, const {ctype}* data, float scale, float* x, int n"
    return _over_rows(f"gather_{source}", f"gather<{ctype}>", rest)


def standardize() -> Entry:
    return _over_rows(
        "standardize", "standardize", "const float* x, const float* mean, const float* scale, float* y, int n"
    )


def dropout() -> Entry:
    rest = (
        "const float* x, float* y, int n, uint64_t seed, uint64_t purpose, uint64_t layer, uint64_t threshold, "
        "float keep"
    )
    return _over_rows("dropout", "dropout", rest)


def zero() -> Entry:
    return _over_rows("zero", "zero", "float* x, int n")


def activation_backward(activation: str) -> Entry:
    function = f"activation_backward<{camel(activation)}>"
    return _over_rows(f"activation_backward_{activation}", function, "const float* saved, float* dy, int n")


def row_entries() -> list[Entry]:
    """All that work row by row, but for the loss."""
    backward = [activation_backward(activation) for activation in ACTIVATIONS]
    return [*backward, *(gather(source) for source in SOURCES), standardize(), zero(), dropout(), deal_steps()]
