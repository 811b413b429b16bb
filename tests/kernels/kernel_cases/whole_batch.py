"""Dense layers of few rows, whose blocks keep the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div

from .case import (
    Batch,
    Case,
    Output,
    Shifted,
    activation_bound,
    batches,
    bfloat16_bits,
    bfloat16_values,
    blank,
    chained,
    derivative,
    expect,
    normal,
    saved_of,
    whole,
    wide,
)
from .dense import finish, input_of, weight_gradient
from .dropouts import dropout_arguments, dropped
from .updates import stepped

SMALLEST, *_, LARGEST = kernels.WHOLE_BATCHES

# What a product of numbers may be off by, by the bfloat16 components that stand for each. Three hold all 24 bits, but
# three of their products are left out.
PRODUCT_ERRORS = {1: 2.0**-7 + 2.0**-16, 2: 2.0**-16, 3: 2.0**-22}


def input_gradient(
    activation: str | None, batch: Batch, dz: np.ndarray, w: np.ndarray, error: float = 0.0
) -> tuple[np.ndarray | None, Output]:
    """What the layer below saved, if it has an activation, and dx, whose products may be off by ``error`` of it."""
    dx, bound = chained(dz, w.T)
    bound += error * (abs(wide(dz)) @ abs(wide(w.T)))
    saved = None if activation is None else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, len(w))))
    if activation is not None and saved is not None:
        slope = derivative(activation, saved)
        bound = abs(slope) * bound + abs(dx) * activation_bound(saved, slope)
        dx = dx * slope
    return saved, expect(dx, bound, batch.written(*dx.shape))


def fragments_of(x: np.ndarray, batch: Batch, components: int) -> np.ndarray:
    """The words of fragments of the shard's rows of x, (components, column tiles, row tiles, rows of matrices, 8).

    Rows behind those of the batch are NaN.
    """
    words = np.stack(_split(x[batch.part], components))
    is_there = _in_tiles(
        np.ones((words.shape[1], kernels.FRAGMENT * ceil_div(x.shape[1], kernels.FRAGMENT)), bool), batch
    )
    return np.where(is_there, _in_tiles(words, batch), np.uint16(0x7FC0))


def _split(x: np.ndarray, components: int) -> list[np.ndarray]:
    rest, words = x.astype(np.float32), []
    for _ in range(components):
        words.append(bfloat16_bits(rest))
        rest = (wide(rest) - bfloat16_values(words[-1])).astype(np.float32)
    return words


def _in_tiles(rows: np.ndarray, batch: Batch) -> np.ndarray:
    """Rows (…, count, n) as whole_batch/fragments.cuh lays them out, zeros around them."""
    step, tiles = kernels.FRAGMENT, ceil_div(batch.most_rows, kernels.FRAGMENT)
    *before, count, n = rows.shape
    padded = np.zeros((*before, tiles * step, ceil_div(n, step) * step), rows.dtype)
    padded[..., :count, :n] = rows
    # A row is tile, half, g; a column tile, t, word, element; a matrix half, word, of rows g and columns (t, element).
    split = padded.reshape(*before, tiles, 2, 8, -1, 4, 2, 2)
    matrices = np.moveaxis(split, [-4, -7, -6, -2, -5, -3, -1], [-7, -6, -5, -4, -3, -2, -1])
    return np.ascontiguousarray(matrices).reshape(*before, -1, tiles, 32, 8)


def _left(output: Output, batch: Batch, components: int, error: float = 2.0**-24) -> Output:
    """The fragments of an output (B, n) that a kernel leaves, of rows behind the batch nothing."""
    error += PRODUCT_ERRORS[components]
    of_rows = [array[batch.part] for array in (output.value, output.bound + error * abs(output.value))]
    value, bound = (np.stack([_in_tiles(array, batch)] * components) for array in of_rows)
    n = ceil_div(output.value.shape[-1], kernels.FRAGMENT) * kernels.FRAGMENT
    written = np.stack([_in_tiles(np.ones((len(of_rows[0]), n), bool), batch)] * components)

    def decode(words: np.ndarray) -> np.ndarray:
        return np.stack([bfloat16_values(words).sum(0)] * components)

    return Output(value, np.where(np.isfinite(value), bound, 0.0), written, decode)


def _unwritten(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 0xABCD, np.uint16)


def batch_fragments(batch: Batch, n: int, components: int, *, fetched: bool = False) -> Case:
    x, given = input_of(batch, n, fetched=fetched)
    made = _left(expect(wide(x), 0.0, batch.written(*x.shape)), batch, components)
    return Case(
        f"{batch}-{n}" + "-fetched" * fetched, kernels.batch_fragments(components),
        kernels.batch_fragments_grid(n, batch.most_rows),
        {
            **batch.args, **given, "fragments": _unwritten(made.value.shape),
            "row_tiles": made.value.shape[2], "n": n,
        },
        {"fragments": made},
    )  # fmt: skip


def dense_forward_whole_batch(
    activation: str,
    most: int,
    batch: Batch,
    k: int,
    n: int,
    *,
    columns: int = 16,
    split: int = 1,
    components: int = 0,
    plain: bool = False,
    fetched: bool = False,
    shift: bool = False,
    rate: float = 0.0,
) -> Case:
    """``plain`` is without a bias and without z, ``fetched`` with x from a data set; ``components`` on tensor cores."""
    (x, given), w, b = input_of(batch, k, fetched=fetched, shift=shift), normal(k, n), None if plain else normal(n)
    total, bound = chained(x, w)
    entry = kernels.dense_forward_whole_batch(most, columns, split)
    if components:
        entry = kernels.dense_forward_tensor_whole_batch(most, components, split)
        columns, bound = (
            kernels.TENSOR_WHOLE_BATCH_COLUMNS,
            bound + PRODUCT_ERRORS[components] * (abs(wide(x)) @ abs(w)),
        )
    shape, outputs = (batch.capacity, n), finish(activation, total, bound, b, batch, with_z=not plain)
    if rate:
        outputs["dropped"] = dropped(outputs["y"], batch, rate)
    if components:
        left = _left(outputs["dropped" if rate else "y"], batch, components)
        given = {
            "x_fragments": fragments_of(x, batch, components), "row_tiles": left.value.shape[2],
            "fragments": None if plain else _unwritten(left.value.shape),
        }  # fmt: skip
        outputs |= {} if plain else {"fragments": left}
    return Case(
        f"{batch}-{k}x{n}-{activation}-rate{rate}" + "-plain" * plain + "-fetched" * fetched + "-shifted" * shift,
        entry,
        kernels.whole_batch_forward_grid(n, columns, split),
        {
            **batch.args, **given, "w": Shifted(w) if shift else w, "b": b, "z": None if plain else blank(*shape),
            "y": blank(*shape), "dropped": blank(*shape) if rate else None, "k": k, "n": n,
            "activation": kernels.activation_number(activation), **dropout_arguments(rate),
        },
        outputs,
    )  # fmt: skip


def dense_backward_whole_batch(
    rule: str,
    most: int,
    batch: Batch,
    k: int,
    n: int,
    *,
    activation: str | None = "tanh",
    multiprocessors: int = 2,
    column_warps: int = 0,
    components: int = 0,
    has_dx: bool = True,
    plain: bool = False,
    fetched: bool = False,
    rate: float = 0.0,
) -> Case:
    """``plain`` is without a bias; dx follows the weight from before its step; ``components`` on tensor cores.

    So many ``column_warps`` of a block share rows of W, or as many as end first.
    """
    (x, given), dz = input_of(batch, k, fetched=fetched), batch.rows_of(1 - normal(batch.capacity, n))
    error = PRODUCT_ERRORS.get(components, 0.0)
    gradients = weight_gradient(x, dz, batch.part, error)
    of_parameters = {"weight": gradients["dw"]} | ({} if plain else {"bias": gradients["db"]})
    moved, outputs, constants = stepped(rule, of_parameters)
    saved, dx = None, None
    if has_dx:
        saved, outputs["dx"] = input_gradient(activation, batch, dz, moved["weight"], error)
        outputs["dx"] = dropped(outputs["dx"], batch, rate)
        dx = blank(batch.capacity, k)
    args = {
        **batch.args, **given, "dz": dz, **moved, "saved": saved, "dx": dx, "k": k, "n": n,
        "activation": kernels.activation_number(activation or "identity"), **dropout_arguments(rate),
    }  # fmt: skip
    if components:
        entry, warps = kernels.dense_backward_tensor_whole_batch(rule, most, components), ""
        grid = kernels.tensor_whole_batch_backward_grid(k, n, multiprocessors)
        of_x, of_dz = (fragments_of(array, batch, components) for array in (x, dz))
        args = {name: value for name, value in args.items() if name not in ("x", "order")}
        args |= {"x_fragments": of_x, "dz_fragments": of_dz, "row_tiles": of_x.shape[2]}
        args |= dict.fromkeys(("fragments", "partials", "arrived"))
        if has_dx and grid[1] > 1:
            args["partials"] = blank(kernels.tensor_whole_batch_partials(grid, most))
            args["arrived"] = np.zeros(grid[0], np.uint32)
            outputs["arrived"] = expect(np.zeros(grid[0]), 0.0)
        if has_dx:
            outputs["fragments"] = _left(outputs["dx"], batch, components)
            args["fragments"] = _unwritten(of_x.shape)
    else:
        entry = kernels.dense_backward_whole_batch(rule, most)
        grid, args["column_warps"] = kernels.whole_batch_backward_grid(k, n, most, multiprocessors, has_dx=has_dx)
        if column_warps:
            grid = kernels.ceil_div(k, 2 * kernels.WHOLE_BATCH_WARPS // column_warps), 1, 1
            args["column_warps"] = column_warps
        warps = f"-{args['column_warps']}"
    variant = f"{warps}-{grid[1]}-rate{rate}" + "-dx" * has_dx + "-plain" * plain + "-fetched" * fetched
    return Case(
        f"{batch}-{k}x{n}-{activation}{variant}", entry, grid, args, outputs, constants,
    )  # fmt: skip


def dense_update_outer_products(
    rule: str, most: int, batch: Batch, k: int, n: int, *, plain: bool = False, fetched: bool = False
) -> Case:
    """``plain`` is without a bias."""
    (x, given), dz = input_of(batch, k, fetched=fetched), batch.rows_of(1 - normal(batch.capacity, n))
    gradients = weight_gradient(x, dz, batch.part, 0.0)
    of_parameters = {"weight": gradients["dw"]} | ({} if plain else {"bias": gradients["db"]})
    moved, outputs, constants = stepped(rule, of_parameters)
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-fetched" * fetched,
        kernels.dense_update_outer_products(rule, most), kernels.outer_products_grid(k, n),
        {**batch.args, **given, "dz": dz, **moved, "k": k, "n": n}, outputs, constants,
    )  # fmt: skip


def outer_product_cases() -> Iterator[Case]:
    """Rows of W that begin anywhere, quads that end in the next row, blocks that end in W, shards without rows."""
    for most in kernels.OUTER_PRODUCTS:
        for k, n in ((1, kernels.OUTER_PRODUCTS_LEAST_COLUMNS), (3, 5), (2, 512), (9, 1030), (40, 389), (5, 7)):
            yield dense_update_outer_products("Adam", most, whole(most), k, n)
            yield dense_update_outer_products("Momentum", most, whole(most // 2 + 1), k, n, plain=True)
        for rule in kernels.RULES:
            yield dense_update_outer_products(rule, most, whole(most), 5, 300)
        for batch in batches(most):
            yield dense_update_outer_products("SGD", most, batch, 7, 301, fetched=True)


def whole_batch_cases() -> Iterator[Case]:
    yield from outer_product_cases()
    # Around the borders of slices, warps' rows of W and blocks; rows begin anywhere where a width is no multiple of 4.
    sizes = [(1, 1), (2, 3), (15, 17), (16, 16), (17, 15), (18, 130), (131, 33), (132, 36), (300, 260)]
    sizes += [(35, 513), (3, 1100), (6, 1103)]
    for most in kernels.WHOLE_BATCHES:
        for rows, (k, n) in product({1, most // 2 + 1, most}, sizes):
            yield dense_forward_whole_batch("relu", most, whole(rows), k, n, plain=k % 2 == 0)
            for columns in kernels.whole_batch_forward_columns(most)[1:]:
                yield dense_forward_whole_batch("elu", most, whole(rows), k, n, columns=columns, plain=k % 3 == 0)
        for k, n in sizes:
            yield dense_backward_whole_batch("Adam", most, whole(most - 1), k, n)
            yield dense_backward_whole_batch("Momentum", most, whole(most), k, n, has_dx=False, plain=True)
        for batch in batches(most):
            yield dense_forward_whole_batch("silu", most, batch, 36, 20)
            yield dense_forward_whole_batch("silu", most, batch, 70, 19, fetched=True)
            yield dense_forward_whole_batch("silu", most, batch, 71, 39, columns=32, fetched=True, rate=0.3)
            yield dense_forward_whole_batch("tanh", most, batch, 9, 21, rate=0.3)
            yield dense_backward_whole_batch("SGD", most, batch, 36, 141, fetched=True)
            yield dense_backward_whole_batch("SGD", most, batch, 21, 42, rate=0.3)
        for warps in (1, 2, 4)[: 3 if most <= 8 else 2]:
            yield dense_backward_whole_batch("RMSprop", most, whole(most), 70, 900, column_warps=warps)
        yield dense_forward_whole_batch("gelu", most, whole(most), 68, 36, shift=True)
        yield dense_forward_whole_batch("gelu", most, whole(most), 68, 36, columns=32, shift=True)
        for split, columns in product(kernels.WHOLE_BATCH_SPLITS[1:], kernels.whole_batch_forward_columns(most)):
            # Warps without a slice, some with more than the ring holds.
            for rows, (k, n) in product({1, most - 1}, [(1, 33), (262, 36), (1500, 37), (130 * split, 18)]):
                yield dense_forward_whole_batch(
                    "tanh", most, whole(rows), k, n, columns=columns, split=split, plain=k % 4 == 0
                )
            yield dense_forward_whole_batch(
                "silu", most, batches(most)[1], 270, 19, columns=columns, split=split, fetched=True, rate=0.3
            )
    for activation in ACTIVATIONS:
        yield dense_forward_whole_batch(activation, SMALLEST, whole(3), 20, 21)
        yield dense_backward_whole_batch("SGD", SMALLEST, whole(3), 21, 20, activation=activation)
    for rule, most in product(kernels.RULES, kernels.WHOLE_BATCHES):
        yield dense_backward_whole_batch(rule, most, whole(most), 9, 37, activation=None)
    yield dense_backward_whole_batch("AdamW", LARGEST, whole(LARGEST), 5, 2000, has_dx=False)  # blocks share columns


def tensor_whole_batch_cases() -> Iterator[Case]:
    # Around the borders of fragments, slices, chunks and blocks; rows begin anywhere where a width is no multiple of 4.
    sizes = [(1, 1), (15, 17), (17, 15), (64, 64), (33, 130), (131, 37), (66, 258), (200, 65)]
    for components, sizes_of_batches in kernels.TENSOR_WHOLE_BATCHES.items():
        for batch, n in product(batches(50), (1, 33, 70)):
            yield batch_fragments(batch, n, components)
            yield batch_fragments(batch, n, components, fetched=True)
        for most in sizes_of_batches:
            for rows, (k, n) in product({1, most // 2 + 1, most}, sizes):
                yield dense_forward_whole_batch(
                    "relu", most, whole(rows), k, n, components=components, plain=k % 2 == 0
                )
            for k, n in sizes:
                yield dense_backward_whole_batch("Adam", most, whole(most - 1), k, n, components=components)
                yield dense_backward_whole_batch(
                    "Momentum", most, whole(most), k, n, components=components, has_dx=False, plain=True
                )
            for batch in batches(most):
                yield dense_forward_whole_batch("silu", most, batch, 70, 19, components=components)
                yield dense_forward_whole_batch("tanh", most, batch, 71, 66, components=components, rate=0.3)
                yield dense_backward_whole_batch("SGD", most, batch, 36, 141, components=components)
                yield dense_backward_whole_batch("SGD", most, batch, 21, 42, components=components, rate=0.3)
            yield dense_forward_whole_batch("gelu", most, whole(most), 68, 36, components=components, shift=True)
            for split in kernels.WHOLE_BATCH_SPLITS[1:]:  # blocks without a slice, some with more than the ring holds
                yield dense_forward_whole_batch("tanh", most, whole(most), 37, 66, components=components, split=split)
                yield dense_forward_whole_batch(
                    "tanh", most, whole(most - 1), 64 * 5 * split + 3, 67, components=components, split=split
                )
            for rule in kernels.RULES:
                yield dense_backward_whole_batch(
                    rule, most, whole(most), 35, 137, components=components, activation=None
                )
    for activation in ACTIVATIONS:
        yield dense_forward_whole_batch(activation, 32, whole(30), 20, 21, components=3)
        yield dense_backward_whole_batch("SGD", 32, whole(30), 21, 20, components=3, activation=activation)
    yield dense_backward_whole_batch("AdamW", 32, whole(31), 5, 2000, components=3, has_dx=False)
    for batch, multiprocessors in product(batches(32), (1, 9)):  # blocks share columns
        options: dict[str, Any] = {"components": 2, "multiprocessors": multiprocessors, "rate": 0.3}
        yield dense_backward_whole_batch("Nesterov", 32, batch, 35, 900, **options)
