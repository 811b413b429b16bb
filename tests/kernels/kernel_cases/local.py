"""Locally connected layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from helpers import EPS, EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div

from .case import (
    Batch,
    Case,
    activation_bound,
    batches,
    blank,
    derivative,
    expect,
    generator,
    normal,
    saved_of,
    whole,
    wide,
)
from .dense import finish


def _windows(x: np.ndarray, window: int) -> np.ndarray:
    """x (B, m) as (B, n, window): what each output sees, in float64."""
    return np.lib.stride_tricks.sliding_window_view(wide(x), window, axis=1)


def local_forward(
    activation: str, batch: Batch, m: int, window: int, *, unused: int = 0, bias: str | None = "output"
) -> Case:
    """``unused`` columns of w lie beyond those that the layer takes."""
    n, pitch = m - window + 1, m - window + 1 + unused
    x, w = batch.rows_of(normal(batch.capacity, m)), normal(window, pitch)
    b = {"output": normal(pitch), "layer": normal(1), None: None}[bias]
    seen, used = _windows(x, window), wide(w[:, :n]).T
    total = (seen * used).sum(axis=2)
    bound = (window + 2) * EPS32 * (abs(seen) * abs(used)).sum(axis=2)
    plain = bias is None
    args = {**batch.args, "x": x, "w": w, "b": b, "z": None if plain else blank(*total.shape), "y": blank(*total.shape)}
    sizes = {"m": m, "n": n, "window": window, "pitch": pitch, "b_step": int(bias == "output")}
    added = b if b is None or bias == "layer" else b[:n]
    return Case(
        f"{batch}-{m}-window{window}-unused{unused}-{bias}",
        kernels.local_forward(activation),
        (ceil_div(n, kernels.ROW_THREADS), ceil_div(batch.most_rows, kernels.LOCAL_ROWS)),
        {**args, **sizes},
        finish(activation, total, bound, added, batch, with_z=not plain),
    )


def local_backward_input(
    activation: str, batch: Batch, m: int, window: int, *, unused: int = 0, plain: bool = False
) -> Case:
    n, pitch = m - window + 1, m - window + 1 + unused
    dz, w = batch.rows_of(normal(batch.capacity, n)), normal(window, pitch)
    dx, size = np.zeros((batch.capacity, m)), np.zeros((batch.capacity, m))
    for r in range(window):
        dx[:, r : r + n] += wide(dz) * wide(w[r, :n])
        size[:, r : r + n] += abs(wide(dz) * wide(w[r, :n]))
    bound = (window + 2) * EPS32 * size
    saved = None if plain else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, m)))
    if saved is not None:
        slope = derivative(activation, saved)
        bound = abs(slope) * bound + abs(dx) * activation_bound(saved, slope)
        dx = dx * slope
    sizes = {"m": m, "n": n, "window": window, "pitch": pitch}
    return Case(
        f"{batch}-{m}-window{window}-unused{unused}" + "-plain" * plain,
        kernels.local_backward_input(activation),
        (ceil_div(m, kernels.ROW_THREADS), 2),
        {**batch.args, "dz": dz, "w": w, "saved": saved, "dx": blank(*dx.shape), **sizes},
        {"dx": expect(dx, bound, batch.written(*dx.shape))},
    )


def local_backward(batch: Batch, m: int, window: int, *, unused: int = 0) -> Iterator[Case]:
    """The gradients of the weights and of either bias."""
    n, pitch = m - window + 1, m - window + 1 + unused
    x, dz = batch.rows_of(normal(batch.capacity, m)), batch.rows_of(generator().normal(size=(batch.capacity, n)))
    seen, deltas = _windows(x[batch.part], window), wide(dz[batch.part])
    rows = len(deltas)

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, unused)])

    name = f"{batch}-{m}-window{window}-unused{unused}"
    dw, db = padded(np.einsum("bir,bi->ri", seen, deltas)), padded(deltas.sum(axis=0))
    dw_bound = (rows + 2) * EPS32 * padded(np.einsum("bir,bi->ri", abs(seen), abs(deltas)))
    db_bound = rows * EPS32 * padded(abs(deltas).sum(axis=0))
    columns, sizes = ceil_div(pitch, kernels.ROW_THREADS), {"n": n, "pitch": pitch}
    yield Case(
        name, kernels.local_backward_weight(), (columns, window),
        {**batch.args, "x": x, "dz": dz, "dw": blank(window, pitch), "m": m, "window": window, **sizes},
        {"dw": expect(dw, dw_bound)},
    )  # fmt: skip
    yield Case(
        name, kernels.local_backward_bias(), (columns,), {**batch.args, "dz": dz, "db": blank(pitch), **sizes},
        {"db": expect(db, db_bound)},
    )  # fmt: skip
    # Summed in float64, rounded once.
    total = deltas.sum(keepdims=True).reshape(1)
    bound = EPS32 * abs(total) + deltas.size * EPS * abs(deltas).sum()
    yield Case(
        name, kernels.local_backward_shared_bias(), (1,), {**batch.args, "dz": dz, "db": blank(1), "n": n},
        {"db": expect(total, bound)},
    )  # fmt: skip


def local_cases() -> Iterator[Case]:
    for activation in ACTIVATIONS:
        yield local_forward(activation, whole(5), 40, 7)
        yield local_backward_input(activation, whole(5), 40, 7)
    for m, window, unused in ((1, 1, 0), (3, 3, 0), (300, 29, 0), (300, 1, 5), (31, 17, 3)):
        yield local_forward("tanh", whole(3), m, window, unused=unused, bias="layer")
        yield local_forward("gelu", whole(9), m, window, unused=unused, bias=None)
        yield local_backward_input("tanh", whole(3), m, window, unused=unused, plain=True)
        yield from local_backward(whole(9), m, window, unused=unused)
    for batch in batches(33):
        yield local_forward("tanh", batch, 40, 7, unused=2)
        yield local_backward_input("tanh", batch, 40, 7, unused=2)
        yield from local_backward(batch, 40, 7, unused=2)
