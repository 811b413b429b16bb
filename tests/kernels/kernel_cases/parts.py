"""What lies between parts of a network, and their initial values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from helpers import EPS32

from mlpgpu.backends.cuda import kernels
from mlpgpu.initializers import INITIALIZERS, initial_values
from mlpgpu.plan.tensor_split import ALIGNMENT, bounds
from mlpgpu.random import Purpose

from .case import Batch, Case, batches, blank, expect, normal, whole, wide
from .rows import dropout_arguments, is_kept


def join_columns(batch: Batch, n: int, count: int) -> Case:
    """Copies: the very bits.  The parts' arrays have more rows than a batch."""
    y, capacity, ends = batch.rows_of(normal(batch.capacity, n)), batch.capacity + 3, bounds(n, count)
    parts = np.full((capacity * n,), np.nan, np.float32)
    for first, end in pairwise(ends):
        parts[capacity * first :][: batch.capacity * (end - first)] = y[:, first:end].ravel()
    alignment = ALIGNMENT if n >= 4 * ALIGNMENT * count else 1
    args = {
        **batch.args, "parts": parts, "y": blank(*y.shape), "n": n, "count": count, "alignment": alignment,
        "capacity": capacity,
    }  # fmt: skip
    outputs = {"y": expect(np.nan_to_num(y), 0.0, batch.written(*y.shape))}
    return Case(f"{batch}-{n}-of{count}", kernels.join_columns(), (2,), args, outputs)


def take_columns(batch: Batch, n: int, first: int, width: int) -> Case:
    x = batch.rows_of(normal(batch.capacity, width))
    args = {**batch.args, "x": x, "y": blank(batch.capacity, n), "n": n, "first": first, "width": width}
    y = np.nan_to_num(x[:, first : first + n])
    outputs = {"y": expect(y, 0.0, batch.written(*y.shape))}
    return Case(f"{batch}-{n}-from{first}", kernels.take_columns(), (2,), args, outputs)


def column_sums(batch: Batch, n: int) -> Case:
    """Added up in float64 and rounded once."""
    dz = batch.rows_of(normal(batch.capacity, n))
    own = wide(dz[batch.part])
    bound = EPS32 * abs(own.sum(axis=0)) + len(own) * 2.0**-52 * abs(own).sum(axis=0)
    args = {**batch.args, "dz": dz, "db": blank(n), "n": n}
    outputs = {"db": expect(own.sum(axis=0), bound)}
    return Case(f"{batch}-{n}", kernels.column_sums(), kernels.column_sums_grid(n), args, outputs)


def dropout_of_part(batch: Batch, n: int, first: int, width: int, rate: float) -> Case:
    """Masks have the half words of the whole layer's: the same bits."""
    x, keep = batch.rows_of(normal(batch.capacity, n)), np.float32(1.0 / (1.0 - rate))
    mask = is_kept((batch.capacity, width), rate)[:, first : first + n]
    y = np.nan_to_num(wide(x * (mask * keep)))
    args = {
        **batch.args, "x": x, "y": blank(*x.shape), "n": n, "first": first, "width": width,
        **dropout_arguments(rate), "keep": keep,
    }  # fmt: skip
    outputs = {"y": expect(y, 0.0, batch.written(*x.shape))}
    return Case(f"{batch}-{n}-from{first}-of{width}", kernels.dropout_of_part(), (2,), args, outputs)


def initial_uniform_of_part(rows: slice, columns: slice, shape: tuple[int, int]) -> Case:
    """The very bits of the specification."""
    limit = INITIALIZERS["glorot_uniform"].limit(shape)
    value = initial_values("glorot_uniform", shape, shape, seed=5, layer=2)[rows, columns].astype(np.float32)
    args = {
        "seed": 5, "purpose": int(Purpose.INITIAL_VALUES), "layer": 2, "limit": limit,
        "first": rows.start * shape[1] + columns.start, "width": shape[1], "rows": value.shape[0],
        "n": value.shape[1], "x": blank(*value.shape),
    }  # fmt: skip
    name = f"{rows.start}-{rows.stop}x{columns.start}-{columns.stop}"
    return Case(name, kernels.initial_uniform_of_part(), (2,), args, {"x": expect(value, 0.0)})


def part_cases() -> Iterator[Case]:
    for batch in batches(7):
        yield join_columns(batch, 33, 4)
        yield take_columns(batch, 5, 3, 33)
        yield column_sums(batch, 33)
        yield dropout_of_part(batch, 11, 5, 33, 0.3)
    for n, count in ((1, 1), (2, 2), (7, 7), (130, 2), (257, 3)):
        yield join_columns(whole(9), n, count)
    yield take_columns(whole(31), 64, 64, 128)
    yield take_columns(whole(1), 1, 0, 1)
    for rows, n in ((1, 1), (127, 65), (31, 32)):
        yield column_sums(whole(rows), n)
    for n, first, width in ((1, 0, 1), (64, 64, 128), (3, 6, 9), (8, 4, 12)):
        yield dropout_of_part(whole(33), n, first, width, 0.5)
    yield initial_uniform_of_part(slice(0, 5), slice(0, 7), (5, 7))
    yield initial_uniform_of_part(slice(3, 9), slice(0, 30), (11, 30))
    yield initial_uniform_of_part(slice(0, 11), slice(13, 22), (11, 31))
    yield initial_uniform_of_part(slice(0, 400), slice(1, 2), (400, 3))
