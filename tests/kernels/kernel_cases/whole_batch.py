"""Dense layers of few rows, whose blocks keep the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels

from .case import Batch, Case, Shifted, batches, blank, chained, normal, whole
from .dense import finish, input_gradient, input_of, weight_gradient
from .rows import dropout_arguments, dropped
from .updates import stepped

SMALLEST, *_, LARGEST = kernels.WHOLE_BATCHES


def dense_forward_whole_batch(
    activation: str,
    most: int,
    batch: Batch,
    k: int,
    n: int,
    *,
    columns: int = 16,
    split: int = 1,
    plain: bool = False,
    fetched: bool = False,
    shift: bool = False,
    rate: float = 0.0,
) -> Case:
    """``plain`` is without a bias and without z, ``fetched`` with x from a data set."""
    (x, given), w, b = input_of(batch, k, fetched=fetched, shift=shift), normal(k, n), None if plain else normal(n)
    shape, outputs = (batch.capacity, n), finish(activation, *chained(x, w), b, batch, with_z=not plain)
    return Case(
        f"{batch}-{k}x{n}-{activation}-rate{rate}" + "-plain" * plain + "-fetched" * fetched + "-shifted" * shift,
        kernels.dense_forward_whole_batch(most, columns, split),
        kernels.whole_batch_forward_grid(n, columns, split),
        {
            **batch.args, **given, "w": Shifted(w) if shift else w, "b": b, "z": None if plain else blank(*shape),
            "y": blank(*shape), "dropped": blank(*shape) if rate else None, "k": k, "n": n,
            "activation": kernels.activation_number(activation), **dropout_arguments(rate),
        },
        outputs | ({"dropped": dropped(outputs["y"], batch, rate)} if rate else {}),
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
    has_dx: bool = True,
    plain: bool = False,
    fetched: bool = False,
    rate: float = 0.0,
) -> Case:
    """``plain`` is without a bias; dx follows the weight from before its step."""
    (x, given), dz = input_of(batch, k, fetched=fetched), batch.rows_of(1 - normal(batch.capacity, n))
    gradients = weight_gradient(x, dz, batch.part)
    of_parameters = {"weight": gradients["dw"]} | ({} if plain else {"bias": gradients["db"]})
    moved, outputs, constants = stepped(rule, of_parameters)
    saved, dx = None, None
    if has_dx:
        saved, outputs["dx"] = input_gradient(activation, batch, dz, moved["weight"])
        outputs["dx"] = dropped(outputs["dx"], batch, rate)
        dx = blank(batch.capacity, k)
    grid, warps = kernels.whole_batch_backward_grid(k, n, most, multiprocessors, has_dx=has_dx)
    return Case(
        f"{batch}-{k}x{n}-{activation}-{warps}-rate{rate}" + "-dx" * has_dx + "-plain" * plain + "-fetched" * fetched,
        kernels.dense_backward_whole_batch(rule, most),
        grid,
        {
            **batch.args, **given, "dz": dz, **moved, "saved": saved, "dx": dx, "k": k, "n": n,
            "activation": kernels.activation_number(activation or "identity"), "column_warps": warps,
            **dropout_arguments(rate),
        },
        outputs,
        constants,
    )  # fmt: skip


def whole_batch_cases() -> Iterator[Case]:
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
        for warps in (1, 2, 4, 8):  # of a block that share rows of W
            yield dense_backward_whole_batch("RMSprop", most, whole(most), 70, 900, multiprocessors=warps * warps)
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
