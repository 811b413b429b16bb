"""What lies between parts of a network, and their initial values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from helpers import EPS32

from mlpgpu.backends.cuda import kernels
from mlpgpu.initializers import INITIALIZERS, initial_values
from mlpgpu.optimizers import OPTIMIZERS
from mlpgpu.plan.tensor_split import ALIGNMENT, bounds
from mlpgpu.random import Purpose

from .case import STEP_NUMBER, Batch, Case, batches, blank, constants_of, expect, normal, whole, wide
from .dropouts import dropout_arguments, is_kept
from .updates import after_step


def join_columns(batch: Batch, n: int, count: int) -> Case:
    """Copies: the very bits.  The parts' arrays have more rows than a batch."""
    y, capacity, ends = batch.rows_of(normal(batch.capacity, n)), batch.capacity + 3, bounds(n, count)
    parts = np.full((capacity * n,), np.nan, np.float32)
    for first, end in pairwise(ends):
        parts[capacity * first :][: batch.capacity * (end - first)] = y[:, first:end].ravel()
    alignment = ALIGNMENT if n >= 4 * ALIGNMENT * count else 1
    args = {
        **batch.args, "of_parts": parts, "y": blank(*y.shape), "n": n, "count": count, "alignment": alignment,
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


def bias_backward_update(name: str, batch: Batch, n: int) -> Case:
    """A bias beside parts of a weight; the slots of other parameters lie between its own."""
    run, weight = 2, 8.0
    optimizer = OPTIMIZERS[name](0.1, l1=0.02, l2=0.3, alpha=0.5)
    table = optimizer.table(STEP_NUMBER, np.array([0.1, 0.03, 0.05]))
    dz, bias, size = batch.rows_of(normal(batch.capacity, n)), normal(n), n + 5
    slots = abs(normal(len(optimizer.slots), size)) / 10 + np.float32(0.01)
    own = wide(dz[batch.part])
    reach = 3 * EPS32 * abs(own).sum(axis=0)
    new, bound, new_slots, slot_bound = after_step(
        optimizer, table[run].tolist(), bias, own.sum(axis=0) / weight, reach / weight, slots[:, :n]
    )
    args = {
        **batch.args, "dz": dz, "totals": np.array([3.0, weight]), "bias": bias,
        "bias_slots": slots if slots.size else None, "size": size, "n": n,
    }  # fmt: skip
    outputs = {"bias": expect(new, bound)}
    if slots.size:
        values, bounds_of = wide(slots), np.zeros(slots.shape)
        values[:, :n], bounds_of[:, :n] = new_slots, slot_bound
        written = np.broadcast_to(np.arange(size) < n, slots.shape)
        outputs["bias_slots"] = expect(values, bounds_of, written)
    entry, grid = kernels.bias_backward_update(name), kernels.column_sums_grid(n)
    return Case(f"{batch}-{n}", entry, grid, args, outputs, constants_of(optimizer, table))


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
    for name in OPTIMIZERS:
        yield bias_backward_update(name, whole(31), 33)
    yield bias_backward_update("Adam", batches(31)[1], 5)
    yield take_columns(whole(1), 1, 0, 1)
    for rows, n in ((1, 1), (127, 65), (31, 32)):
        yield column_sums(whole(rows), n)
    for n, first, width in ((1, 0, 1), (64, 64, 128), (3, 6, 9), (8, 4, 12)):
        yield dropout_of_part(whole(33), n, first, width, 0.5)
    yield initial_uniform_of_part(slice(0, 5), slice(0, 7), (5, 7))
    yield initial_uniform_of_part(slice(3, 9), slice(0, 30), (11, 30))
    yield initial_uniform_of_part(slice(0, 11), slice(13, 22), (11, 31))
    yield initial_uniform_of_part(slice(0, 400), slice(1, 2), (400, 3))
