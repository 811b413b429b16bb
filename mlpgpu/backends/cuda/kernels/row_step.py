"""Forward, loss and deltas of a small network by blocks of rows (``fused/row_step.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from ....losses import FORMS
from ...sources import camel
from .entry import ROWS, Entry, Product, arguments, ceil_div
from .losses import LOSS_SUMS, TargetReader, reads_numbers

# RowStepShape of fused/row_step.cuh.
ROW_STEP_ROWS, ROW_STEP_THREADS, ROW_STEP_MOST_LEVELS = 8, 256, 32
ROW_STEP_LEVEL_WORDS = 8

# Of the entries in the table: what a block may ask for on any card since sm_75.
ROW_STEP_TABLE_BYTES = 64 << 10


def row_step_pitch(n: int) -> int:
    """Floats between rows of n columns in shared memory: an odd number of vectors of four."""
    return 4 * (ceil_div(n, 4) | 1)


def row_step_shared_bytes(widths: Sequence[int]) -> int:
    """What a block needs of shared memory, for widths from the inputs to the outputs."""
    rows = ROW_STEP_ROWS * (2 * row_step_pitch(max(widths)) + sum(map(row_step_pitch, widths[1:])))
    weights = sum((k + 1) * row_step_pitch(n) for k, n in pairwise(widths))
    return 4 * (ROW_STEP_MOST_LEVELS * ROW_STEP_LEVEL_WORDS + rows + weights)


def row_step(name: str, kind: str, *, textured: bool = True, shared_bytes: int = ROW_STEP_TABLE_BYTES) -> Entry:
    """All of a step but the gradients; arguments as of :func:`.losses.loss`.

    Its launches tell the lengths ``inputs`` and ``outputs`` of a row, ``hidden``, those of all layers but the last,
    ``deltas``, of all layers that have one, the ``products`` and ``passed`` of a row, forward and back, and that of
    the ``parameters``.
    """
    reader = TargetReader(kind, textured)
    signature = (
        f"{ROWS}, const int* order[rows], const float* data[rows,inputs], const unsigned char* bytes[rows,inputs], "
        "float scale, const float* mean[inputs], const float* deviation[inputs], const float* parameters[parameters], "
        "const RowStepLevel* described[layer_count], int layer_count, int lowest, int widest, "
        f"{reader.argument('outputs')}, const float* weights[rows], const float* target_mean[outputs], "
        "const float* target_scale[outputs], uint64_t seed, float* x[rows,inputs], "
        f"float* y[rows,hidden], float* dz[rows,deltas], {LOSS_SUMS}, int capacity"
    )
    return Entry(
        f"row_step_{name}_{kind}{reader.suffix}", "fused/row_step.cuh",
        f"row_step<{camel(name)}, {reader.struct}>", arguments(signature), ROW_STEP_THREADS, shared_bytes,
        block=f"RowStep<{shared_bytes}>", loss_numbers=reads_numbers(name),
        prefetched=tuple((name, 0) for name in ("order", "data", "bytes", "mean", "deviation", "described")),
        products=(Product(("rows", "products")), Product(("rows", "passed"))),
    )  # fmt: skip


def row_step_entries() -> list[Entry]:
    """The entries of all losses, for networks of which a block of any card holds the weights."""
    return [
        row_step(name, kind, textured=textured)
        for name, row in FORMS.items()
        for kind, textured in product(row.targets, (True, False))
    ]
