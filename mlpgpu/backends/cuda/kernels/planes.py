"""Planes, what tensor cores take in the place of float32 numbers, and the kernels of ``planes.cuh`` that make them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .entry import ROW_THREADS, ROWS, WARPS_PER_BLOCK, Entry, architecture, arguments, ceil_div

PLANE_ROWS, PLANE_COLUMNS = 128, 64  # what planes are padded to multiples of
TENSOR_MAP_BYTES = 128
SPLIT_BYTES = 4 * 2 * WARPS_PER_BLOCK  # of a block that splits a row: two words of each warp
COLUMN_THREADS = 1024  # of the blocks that go through all rows of 32 columns


@dataclass(frozen=True)
class Form:
    """How tensor cores are given float32 numbers: a struct of planes.cuh, and how many planes it takes."""

    struct: str
    planes: int
    scaled: bool

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.struct).lower()


FORMS: dict[str, Form] = {
    "float32": Form("HalfPair", 2, scaled=True),
    "tf32": Form("Half", 1, scaled=True),
    "bfloat16": Form("Bfloat16", 1, scaled=False),
}  # by precision


def form_of(precision: str, arch: str) -> Form | None:
    """How products are made in this precision; None where plain cores make them all."""
    return FORMS.get(precision) if architecture(arch) >= 80 else None


def padded_rows(rows: int) -> int:
    """Rows of the planes of so many rows."""
    return PLANE_ROWS * ceil_div(rows, PLANE_ROWS)


def padded_columns(n: int) -> int:
    """Elements from row to row of planes that are ``n`` wide."""
    return PLANE_COLUMNS * ceil_div(n, PLANE_COLUMNS)


def _planes(name: str, form: Form, rest: str, threads: int = ROW_THREADS, shared_bytes: int = 0) -> Entry:
    function = f"{name}<{form.struct}>"
    return Entry(f"{name}_{form.name}", "planes.cuh", function, arguments(rest), threads, shared_bytes)


def split_rows(form: Form) -> Entry:
    rest = (
        f"{ROWS}, const float* x, const int* order, const int* weight_lines, uint16_t* planes, int64_t plane, "
        "int* lines, int* columns, int n"
    )
    return _planes("split_rows", form, rest, shared_bytes=SPLIT_BYTES)


def split_weights(form: Form) -> Entry:
    rest = "const float* w, uint16_t* planes, int* lines, int* columns, int k, int n"
    return _planes("split_weights", form, rest, shared_bytes=SPLIT_BYTES)


def split_columns(form: Form) -> Entry:
    rest = (
        f"{ROWS}, const float* dz, const int* lines, const int* x_lines, uint16_t* planes, int64_t plane, "
        "int* columns, float* db, int n"
    )
    return _planes("split_columns", form, rest, COLUMN_THREADS, 4 * COLUMN_THREADS)


def sum_columns() -> Entry:
    signature = f"{ROWS}, const uint16_t* dz, float* db, int n"
    return Entry("sum_columns", "planes.cuh", "sum_columns", arguments(signature), COLUMN_THREADS, 4 * COLUMN_THREADS)


def clear_words() -> Entry:
    return Entry("clear_words", "planes.cuh", "clear_words", arguments("int* words, int64_t size"), ROW_THREADS)


def plane_entries() -> list[Entry]:
    """All that make planes of any form."""
    makers = (split_rows, split_weights, split_columns)
    return [*(make(form) for form in FORMS.values() for make in makers), sum_columns(), clear_words()]
