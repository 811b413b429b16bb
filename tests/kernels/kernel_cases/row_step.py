"""All of a step but the gradients, by blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from helpers import LOSS_KINDS

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div
from mlpgpu.losses import TargetKind

from .case import SEED, Batch, Case, blank, expect, generator, whole, wide
from .losses import loss


def row_step(
    name: str,
    kind: TargetKind,
    batch: Batch,
    widths: tuple[int, int, int],
    *,
    textured: bool = True,
    stored: bool = False,
    lowest: int = 1,
) -> Case:
    """Two layers, the second with a head's numbers: everything up to the logits is exact in float32.

    Of the first layer the inputs follow from its outputs, since the upper part of its weight is a permutation.
    ``stored`` is with inputs as an output; ``lowest`` is the first layer whose deltas are wanted.
    """
    n_in, width, n = widths
    head = loss(name, kind, batch, n, width=width, activation="identity", total=True, textured=textured)
    args, (h, w, b) = dict(head.args), (head.args[key] for key in ("x", "w", "b"))
    assert isinstance(h, np.ndarray) and isinstance(w, np.ndarray) and isinstance(b, np.ndarray)
    random, rows, part = generator(), batch.capacity, batch.part
    permutation = 2.0 * np.eye(width)[random.permutation(width)]
    lower = random.integers(-4, 5, (n_in - width, width)) / 4.0
    first_bias = random.integers(-8, 9, width) / 4.0
    rest = random.integers(-4, 5, (rows, n_in - width)) / 2.0
    inputs = np.hstack([(h - first_bias - rest @ lower) @ permutation.T / 4.0, rest])
    first_weight = np.vstack([permutation, lower])
    data = np.full((2 * batch.epoch_rows, n_in), np.nan, np.float32)
    data[batch.fetched] = inputs[part]
    np.testing.assert_array_equal(wide(data[batch.fetched]) @ first_weight + first_bias, h[part])

    def flat(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([array.ravel() for array in arrays])

    identity, none = kernels.activation_number("identity"), [-1, 0, 0]
    of_bias, of_second = first_weight.size, first_weight.size + width
    levels = [
        [n_in, -1, -1, identity, 0, *none],
        [width, 0, of_bias, identity, 0, *none],
        [n, of_second, of_second + w.size, identity, 0, *none],
    ]
    dx, delta = head.outputs["dx"], head.outputs["delta"]
    is_row = batch.written(rows, 1)
    of_rows = flat(is_row & np.full((rows, width), lowest == 1), np.broadcast_to(is_row, (rows, n)))
    outputs = {
        **{key: head.outputs[key] for key in ("totals", "losses", "arrived", "sums")},
        "y": expect(np.where(is_row, wide(h), 0.0), 0.0, np.broadcast_to(is_row, h.shape)),
        "dz": expect(flat(dx.value, delta.value), flat(dx.bound, delta.bound), of_rows),
    }
    if stored:
        of_inputs = np.broadcast_to(is_row, (rows, n_in))
        outputs["x"] = expect(np.where(of_inputs, np.nan_to_num(inputs), 0.0), 0.0, of_inputs)
    taken = ("step", "shard", "shards", "order", "targets", "weights", "arrived", "totals", "losses", "sums")
    args = {key: args[key] for key in taken} | {
        "data": data, "bytes": None, "scale": 1.0, "mean": None, "deviation": None,
        "parameters": flat(first_weight, first_bias, w, b).astype(np.float32),
        "described": np.array(levels, np.int32), "layer_count": 2, "lowest": lowest, "widest": max(widths),
        "target_mean": head.args["mean"], "target_scale": head.args["scale"], "seed": SEED,
        "x": blank(rows, n_in) if stored else None, "y": blank(rows, width), "dz": blank(rows * (width + n)),
        "capacity": rows,
    }  # fmt: skip
    entry = kernels.row_step(name, kind, textured=textured)
    blocks = ceil_div(rows, kernels.ROW_STEP_ROWS)
    variant = "-stored" * stored + f"-lowest-{lowest}" * (lowest > 1)
    return Case(f"{batch}-{'-'.join(map(str, widths))}{variant}", entry, (blocks,), args, outputs, head.constants)


def row_step_cases() -> Iterator[Case]:
    for name, kind in LOSS_KINDS:
        yield row_step(name, kind, whole(17), (41, 33, 7))
        yield row_step(name, kind, whole(2), (9, 9, 5), textured=False)
    for batch, widths in ((whole(1), (1, 1, 1)), (Batch(9, 20, 2), (70, 66, 10)), (whole(8), (20, 20, 68))):
        yield row_step("huber", "dense", batch, widths, stored=True)
        yield row_step("softmax_cross_entropy", "index", batch, widths, lowest=2)
    # A thread takes eight rows of a column, and columns in turns; vectors and odd pitches.
    yield row_step("huber", "dense", whole(11), (8, 8, 260))
    yield row_step("huber", "dense", whole(11), (34, 32, 129), stored=True)
