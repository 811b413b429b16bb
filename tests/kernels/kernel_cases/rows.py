"""What is done to each row by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import OperandFormat, filled_rows
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.random import least_kept

from .case import (
    LAYER,
    SEED,
    SPECIAL,
    STEP_NUMBER,
    Batch,
    Case,
    Output,
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
from .dropouts import dropout_arguments, is_kept, kept_bits
from .tensor import blank_components, component_output


def initialised_steps(count: int) -> dict[str, object]:
    """What `initialise_steps` is given for so many steps, with room for another one."""
    return {
        "next": np.array([(2**33, 2, 3, 4, 5)], STEP), "steps": np.full(count + 1, -7, np.int64).astype(STEP),
        "count": count,
    }  # fmt: skip


def check_initialised(after: Mapping[str, np.ndarray], count: int) -> None:
    """That they follow one another, the next one behind them, and nothing else was written."""
    expected = [(2**33 + i, 2 + i, 3 + i, 4, 5) for i in range(count + 1)]
    assert after["steps"][:count].tolist() == expected[:count] and after["next"].tolist() == expected[count:]
    assert after["steps"][count:].tolist() == [(-7,) * len(STEP)]


def zero(batch: Batch, n: int) -> Case:
    shape = (batch.capacity, n)
    outputs = {"x": expect(np.zeros(shape), 0.0, batch.written(*shape))}
    return Case(f"{batch}-{n}", kernels.zero(), (2,), {**batch.args, "x": blank(*shape), "n": n}, outputs)


def gather(source: str, batch: Batch, n: int) -> Case:
    """One rounding, as in the specification: the same bits."""
    shape, rows = (batch.capacity, n), 2 * batch.epoch_rows
    scale = np.float32(1 / 255 if source == "uint8" else 1.0)
    data = generator().integers(256, size=(rows, n)).astype(np.uint8) if source == "uint8" else normal(rows, n)
    x = np.zeros(shape)
    x[batch.part] = np.multiply(data[batch.fetched], scale, dtype=np.float32)
    args = {**batch.args, "order": batch.order, "data": data, "scale": scale, "x": blank(*shape), "n": n}
    return Case(f"{batch}-{n}", kernels.gather(source), (2,), args, {"x": expect(x, 0.0, batch.written(*shape))})


def standardize(batch: Batch, n: int) -> Case:
    x, mean, scale = batch.rows_of(normal(batch.capacity, n)), normal(n) / 2, abs(normal(n)) + np.float32(0.1)
    y = (wide(x) - mean) / scale
    args = {**batch.args, "x": x, "mean": mean, "scale": scale, "y": blank(*x.shape), "n": n}
    outputs = {"y": expect(y, 2 * EPS32 * abs(y), batch.written(*x.shape))}
    return Case(f"{batch}-{n}", kernels.standardize(), (2,), args, outputs)


def find_nonfinite_rows(batch: Batch, n: int, value: float) -> Case:
    """``value`` stands in the shard's last row, and NaN in rows of other shards."""
    data, rows = batch.rows_of(normal(batch.capacity, n)), batch.part.stop - batch.part.start
    if rows:
        data[batch.part.stop - 1, n - 1] = value
    is_found = np.array([rows > 0 and not np.isfinite(value)])
    found = np.full(1, 7, np.uint32)
    outputs = {"found": expect(np.ones(1), 0.0, is_found)}
    args = {**batch.args, "data": data, "found": found, "n": n}
    return Case(f"{batch}-{n}-{value}", kernels.find_nonfinite_rows(), (2,), args, outputs)


def dropout(
    batch: Batch, n: int, rate: float, *, activation: str = "", operand_format: OperandFormat | None = None
) -> Case:
    """Masks have the half words of the NumPy backend: the same bits.

    Of an ``activation`` the derivative multiplies as well.  Where components are left, no floats are.
    """
    x = batch.rows_of(normal(batch.capacity, n))
    if operand_format is None:
        x[batch.part.start, 0] = np.inf if batch.part.start < batch.part.stop else np.nan
    keep = np.float32(1.0 / (1.0 - rate))
    with np.errstate(invalid="ignore"):
        y, bound, saved = wide(x * (is_kept(x.shape, rate) * keep)), np.zeros(x.shape), None
        if activation:
            saved = batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, n)))
            slope = derivative(activation, saved)
            bound = np.nan_to_num(abs(y) * (activation_bound(saved, slope) + EPS32 * abs(slope)), posinf=0.0)
            y = y * slope
    args: dict[str, object] = {"y": blank(*x.shape), "components": None, "component_stride": 0, "component_count": 0}
    outputs = {"y": expect(y, bound, batch.written(*x.shape))}
    if operand_format is not None:
        into = blank_components(operand_format, batch.most_rows, n)
        args = {"y": None, "components": into, "component_stride": into[0].size, "component_count": len(into)}
        rows = batch.part.stop - batch.part.start
        outputs = {"components": component_output(y[batch.part], bound[batch.part], rows, into, vector=1)}
        outputs["components"].written[:, rows : filled_rows(rows)] = rows > 0
    name = f"{batch}-{n}-rate{rate}" + f"-{activation}" * bool(activation)
    return Case(
        name + (f"-{operand_format.name}" if operand_format else ""),
        kernels.dropout(activation or "identity"),
        (2,),
        {**batch.args, "x": x, "saved": saved, "n": n, **args, **dropout_arguments(rate), "keep": keep},
        outputs,
    )


def draw_dropouts(batch: Batch, widths: tuple[int, ...], rate: float, *, steps: int = 1) -> Case:
    """Of several layers, whose words lie one after another; all of them have one number."""
    words = [[kept_bits(batch, n, rate, STEP_NUMBER + i) for n in widths] for i in range(steps)]
    *begins, count = np.cumsum([0, *(len(each) for each in words[0])])
    masks, written = np.zeros(count, np.uint32), np.zeros(count, bool)
    rows = batch.part.stop - batch.part.start
    for begin, n in zip(begins, widths, strict=True):
        of_row = kernels.ceil_div(n, kernels.KEPT_BITS)
        inside = np.zeros((rows, of_row), np.uint32)  # bits behind a row's last element are whatever was drawn
        inside.view(np.uint8)[:, : kernels.ceil_div(n, 8)] = np.packbits(np.ones(n, bool), bitorder="little")
        masks[begin : begin + inside.size], written[begin : begin + inside.size] = inside.ravel(), True
    made = np.stack([np.concatenate(each) for each in words])
    output = Output(
        wide(made & masks),
        np.zeros(made.shape),
        np.broadcast_to(written, made.shape),
        lambda found: wide(found & masks),
    )
    first = batch.args["step"]
    assert isinstance(first, np.ndarray)
    step = np.tile(first, steps)
    step["number"] += np.arange(steps)
    described = [[LAYER, n, least_kept(rate), begin] for n, begin in zip(widths, begins, strict=True)]
    args = {
        **batch.args, "step": step, "described": np.array(described, np.int32), "count": len(widths),
        "kept": np.full(made.shape, 0xDEADBEEF, np.uint32), "words": int(count), "seed": SEED,
    }  # fmt: skip
    name = f"{batch}-" + "-".join(map(str, widths)) + f"-rate{rate}-steps{steps}"
    grid = kernels.ceil_div(int(count), kernels.ROW_THREADS), steps
    return Case(name, kernels.draw_dropouts(), grid, args, {"kept": output})


def activation_backward(activation: str, batch: Batch, z: np.ndarray) -> Case:
    saved = batch.rows_of(saved_of(activation, z))
    dy = batch.rows_of(1 + abs(normal(*z.shape)))
    slope = derivative(activation, saved)
    with np.errstate(invalid="ignore"):
        bound = abs(wide(dy)) * (activation_bound(saved, slope) + EPS32 * abs(slope))
        dz = dy * slope
    outputs = {"dy": expect(dz, bound, batch.written(*z.shape))}
    args = {**batch.args, "saved": saved, "dy": dy, "n": z.shape[1]}
    special = "" if np.isfinite(z).all() else "-special"
    entry = kernels.activation_backward(activation)
    return Case(f"{batch}-{z.shape[1]}{special}", entry, (2,), args, outputs)


def row_cases() -> Iterator[Case]:
    for batch, n in [*((batch, 33) for batch in batches(31)), (whole(1), 1), (whole(127), 32)]:
        yield zero(batch, n)
        yield gather("float32", batch, n)
        yield gather("uint8", batch, n)
        yield standardize(batch, n)
        yield dropout(batch, n, 0.25)
        for value in (1.0, math.nan, -math.inf):
            yield find_nonfinite_rows(batch, n, value)
        yield activation_backward("sigmoid", batch, 2 * normal(batch.capacity, n))
    for batch in (*batches(31), *batches(7), whole(1)):
        yield draw_dropouts(batch, (33, 1, 64), 0.25)
    yield draw_dropouts(whole(200), (301, 5), 0.5, steps=3)
    for batch in batches(7):  # whose shards may end inside a vector, and begin there
        yield dropout(batch, 1, 0.25)
        yield dropout(batch, 2, 0.25, operand_format=kernels.BFLOAT16)
    yield dropout(whole(33), 31, 0.0)
    yield dropout(whole(33), 31, 0.9)
    for activation in ACTIVATIONS:
        yield dropout(whole(33), 31, 0.25, activation=activation)
    for operand_format in (kernels.BFLOAT16, kernels.BFLOAT16_PAIR):
        for n in (1, 31, 34, 36):
            yield dropout(whole(33), n, 0.25, operand_format=operand_format)
        for batch in batches(31):
            yield dropout(batch, 33, 0.25, activation="tanh", operand_format=operand_format)
    for activation in ACTIVATIONS:
        yield activation_backward(activation, whole(31), 3 * normal(31, 33))
        yield activation_backward(activation, whole(1), SPECIAL)
