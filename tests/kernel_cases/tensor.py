"""Dense layers on tensor cores: the kernels that make planes, and those that multiply them.

Planes are made here in NumPy, and must have the same bits.  A product of planes is held to the float64
product of the float32 arrays: to what its form loses, and to what its sums do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    FORMS,
    OF_PRECISION,
    Entry,
    Form,
    MatrixTile,
    ProductTile,
    ceil_div,
    matrix_tiles,
    padded_columns,
    padded_rows,
    wgmma_tiles,
)
from mlpgpu.optimizers import OPTIMIZERS

from .case import (
    HELD,
    Batch,
    Case,
    Mapped,
    Output,
    activation_bound,
    batches,
    bfloat16_words,
    blank,
    derivative,
    expect,
    joined,
    normal,
    saved_of,
    together,
    whole,
    wide,
)
from .dense import finish
from .losses import loss
from .updates import stepped

UNHELD, NAN_IN, USED = 1, 2, 4
TOP_EXPONENT, LEAST_HELD = 14, 2.0**-13
UNWRITTEN_BITS = 0x5A5A

# What a form makes of a product of two numbers: each factor is off by half a unit of its last of 11 or 8 bits, or
# by 2^-23 with two planes, which lose lo · lo beside that, 2^-22; with two of bfloat16 by 2^-17, and 2^-16.
ERRORS = {"HalfPair": 2.0**-21, "Half": 2.0**-10, "Bfloat16": 2.0**-7, "Bfloat16Pair": 2.0**-15}


# Of the kernels with these tiles, those that stand for all where compiling each one takes too long: the heaviest
# epilogues, and those of most cases below.  A GPU runs all; the smallest of gemm/gemm_sm80.cuh's tiles has all of them
# anyway.
SAMPLED_TILES = [tile for form in FORMS for tile in (*wgmma_tiles(form), matrix_tiles(form)[0])]
SAMPLE = {
    entry
    for tile in SAMPLED_TILES
    for entry in (
        kernels.tensor_backward_weight(tile),
        kernels.tensor_backward_update("Adam", tile),
        *(kernels.tensor_forward(activation, tile) for activation in ("identity", "relu", "tanh", "gelu")),
        *(kernels.tensor_backward_input(activation, tile) for activation in ("identity", "relu", "tanh", "gelu")),
        *(kernels.tensor_forward_loss(name, tile) for name in ("huber", "binary_cross_entropy") if tile.form.is_single),
    )
}


def is_sampled(entry: Entry) -> bool:
    return entry in SAMPLE or not any(entry.name.endswith(f"_{tile.name}") for tile in SAMPLED_TILES)


@dataclass(frozen=True)
class Planes:
    """An array as planes (P, rows, columns), with the lines of its rows and the flags of its columns."""

    bits: np.ndarray
    lines: np.ndarray
    columns: np.ndarray


def exponents(x: np.ndarray) -> np.ndarray:
    """floor(log2 |x|) of finite numbers that are neither 0 nor denormal; elsewhere a very low number."""
    biased = np.ascontiguousarray(x, np.float32).view(np.uint32) >> 23 & 0xFF
    return np.where((biased == 0) | (biased == 255), -(2**20), biased.astype(np.int64) - 127)


def line_exponent(top: np.ndarray) -> np.ndarray:
    return np.where(top < -(2**19), 0, top) - TOP_EXPONENT


def hold(form: Form, x: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words (P, …) that hold x · 2^shift, and each element's flags."""
    if not form.scaled:
        return bfloat16_words(x, form.planes), np.zeros(x.shape, int)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(x, shift.astype(np.int32)).astype(np.float32)
        hi = scaled.astype(np.float16)
        rest = np.where(abs(scaled) <= 65504.0, (scaled - hi.astype(np.float32)) * np.float32(2048.0), 0.0)
        lo = rest.astype(np.float16)
        small = (exponents(x) > -(2**20)) & (abs(scaled) < LEAST_HELD)
    flags = USED * (x != 0.0) + NAN_IN * np.isnan(x) + UNHELD * (small | np.isinf(x))
    words = np.stack([hi.view(np.uint16), lo.view(np.uint16)])
    return words[: form.planes], flags


def padded(words: np.ndarray) -> np.ndarray:
    """(P, rows, columns) with 0 beyond the array."""
    _, rows, columns = words.shape
    return np.pad(words, ((0, 0), (0, padded_rows(rows) - rows), (0, padded_columns(columns) - columns)))


def _or(flags: np.ndarray, axis: int) -> np.ndarray:
    return np.bitwise_or.reduce(flags, axis=axis, initial=0)


def split(form: Form, x: np.ndarray, weight_lines: np.ndarray | None = None) -> Planes:
    """Planes of an array whose rows are scaled each by itself; arrays of lines reach as far as the padding."""
    weights = np.zeros(x.shape[1], int) if weight_lines is None else weight_lines[: x.shape[1]] >> 3
    top = (exponents(x) + weights).max(axis=1, initial=-(2**20))
    own = line_exponent(top)
    words, flags = hold(form, x, weights - own[:, np.newaxis])
    lines = np.full(padded_rows(len(x)), 8 * line_exponent(np.array(-(2**20))), np.int64)
    lines[: len(x)] = 8 * own + _or(flags, 1)
    columns = np.zeros(padded_columns(x.shape[1]), np.int32)
    columns[: x.shape[1]] = _or(flags, 0)
    return Planes(padded(words), lines.astype(np.int32), columns)


def split_deltas(form: Form, dz: np.ndarray, lines: np.ndarray, x_lines: np.ndarray) -> Planes:
    """Planes of dz for the gradient of weights: its rows take over the scales of x's."""
    own, of_x = lines[: len(dz)] >> 3, x_lines[: len(dz)] >> 3
    used = (lines[: len(dz)] & USED) != 0
    top = int((own + of_x)[used].max(initial=-(2**20)))
    top = 0 if top < -(2**19) else top
    words, flags = hold(form, dz, np.broadcast_to((of_x - top)[:, np.newaxis], dz.shape))
    columns = np.zeros(padded_columns(dz.shape[1]), np.int32)
    columns[: dz.shape[1]] = 8 * top + _or(flags, 0)
    return Planes(padded(words), lines, columns)


def blank_planes(form: Form, rows: int, columns: int) -> np.ndarray:
    return np.full((form.planes, padded_rows(rows), padded_columns(columns)), UNWRITTEN_BITS, np.uint16)


def exact(array: np.ndarray, written: np.ndarray | bool = True) -> Output:
    return Output(array, np.zeros(array.shape), np.broadcast_to(written, array.shape))


def _in_blank(array: np.ndarray, whole_of: np.ndarray) -> Output:
    """``array`` at the start of ``whole_of`` along the rows, which are the axis before the last of planes."""
    value, written = whole_of.copy(), np.zeros(whole_of.shape, bool)
    place = (slice(None), slice(array.shape[1])) if array.ndim == 3 else (slice(len(array)),)
    value[place], written[place] = array, True
    return exact(value, written)


def _alike(form: Form, words: np.ndarray) -> np.ndarray:
    """Words with the same bits for each NaN, and halves for each zero: a host and a card make different ones.

    A card may multiply and subtract in one, so that of what is too small for float32 the sign is left.
    """
    if not form.scaled:
        return np.where(words & 0x7FFF > 0x7F80, 0x7FFF, words).astype(np.uint16)
    sizes = words & 0x7FFF
    return np.where(sizes > 0x7C00, 0x7FFF, np.where(sizes == 0, 0, words)).astype(np.uint16)


def _exact_planes(form: Form, output: Output) -> Output:
    return replace(output, value=_alike(form, output.value), decode=partial(_alike, form))


# --- making planes ---


def special(rows: int, n: int) -> np.ndarray:
    """Numbers of many sizes, among them some that no half holds."""
    x = normal(rows, n) * np.float32(2.0) ** np.random.default_rng(5).integers(-40, 40, (rows, n)).astype(np.float32)
    flat = x.reshape(-1)
    words = np.array([0.0, np.nan, np.inf, 1e-42, 3.4e38, -0.0, 1e-37], np.float32)
    for i, word in enumerate(words):
        flat[(5 * i + 3) % flat.size] = word
    if rows > 2:
        x[1] = 0.0
    return x


def split_rows(
    form: Form, batch: Batch, n: int, *, x: np.ndarray | None = None, plain: bool = False, fetched: bool = False
) -> Case:
    """``plain`` is without weights, planes and columns; ``fetched`` from a data set by the order."""
    x = special(batch.capacity, n) if x is None else x
    given: dict[str, object] = {"x": batch.rows_of(x), "order": None, "copy": None}
    if fetched:
        data = np.full((2 * batch.epoch_rows, n), np.nan, np.float32)
        data[batch.fetched] = x[batch.part]
        given = {"x": data, "order": batch.order, "copy": blank(*x.shape)}
    weight_lines = (
        None if plain else (8 * np.random.default_rng(6).integers(-30, 10, padded_columns(n))).astype(np.int32)
    )
    planes = split(form, x[batch.part], weight_lines)
    words, lines = blank_planes(form, batch.most_rows, n), np.full(padded_rows(batch.most_rows), -77, np.int32)
    known = np.zeros(padded_columns(n), np.int32)
    outputs = {} if plain else {"planes": _exact_planes(form, _in_blank(planes.bits, words))}
    if fetched:
        outputs["copy"] = exact(x, batch.written(*x.shape))
    if form.scaled:
        outputs["lines"] = _in_blank(planes.lines, lines)
        if not plain:
            outputs["columns"] = exact(planes.columns)
    return Case(
        f"{batch}-{n}" + "-plain" * plain + "-fetched" * fetched,
        kernels.split_rows(form),
        kernels.row_blocks(batch.most_rows, n),
        {
            **batch.args, **given, "weight_lines": weight_lines, "planes": None if plain else words,
            "plane": words[0].size, "lines": lines, "columns": None if plain else known, "n": n,
        },
        outputs,
    )  # fmt: skip


def split_rows_of_steps(form: Form, n: int) -> Case:
    """Planes of the last two steps of an epoch at once, the second of which has two rows."""
    steps = [Batch(150, 302, place) for place in (1, 2)]
    data = np.full((2 * 302, n), np.nan, np.float32)
    for batch in steps:
        data[batch.fetched] = special(150, n)[batch.part]
    words = np.stack([blank_planes(form, 150, n) for _ in steps])
    planes = [_in_blank(split(form, data[batch.fetched]).bits, blank_planes(form, 150, n)) for batch in steps]
    expected = Output(*(np.stack([getattr(each, name) for each in planes]) for name in ("value", "bound", "written")))
    args = {
        **steps[0].args, "x": data,
        "step": np.concatenate([batch.args["step"] for batch in steps]),  # type: ignore[arg-type]  # arrays, all of them
        "order": steps[0].order, "weight_lines": None, "copy": None, "planes": words, "plane": words[0, 0].size,
        "lines": None, "columns": None, "n": n,
    }  # fmt: skip
    blocks, _, _ = kernels.row_blocks(150, n)
    outputs = {"planes": _exact_planes(form, expected)}
    return Case(f"{n}-of_steps", kernels.split_rows(form), (blocks, len(steps), 1), args, outputs)


def split_weights(form: Form, k: int, n: int, other: tuple[int, int] | None = None) -> Case:
    w = special(k, n)
    planes = split(form, w)
    args = {
        "w": w, "planes": blank_planes(form, k, n), "lines": np.full(padded_rows(k), -77, np.int32),
        "columns": np.zeros(padded_columns(n), np.int32), "k": k, "n": n,
    }  # fmt: skip
    outputs = {"planes": _exact_planes(form, exact(planes.bits))}
    if form.scaled:
        outputs |= {"lines": exact(planes.lines), "columns": exact(planes.columns)}
    blocks, names = kernels.row_blocks(k, n)[0], ("w", "planes", "lines", "columns", "k", "n")
    if other:
        second = split_weights(form, *other)
        blocks += second.grid[0]
        args |= {f"other_{name}": second.args[name] for name in names}
        outputs |= {f"other_{name}": output for name, output in second.outputs.items()}
    else:
        args |= {f"other_{name}": 0 if name in "kn" else None for name in names}
    name = f"{k}x{n}" + (f"-{other[0]}x{other[1]}" if other else "")
    return Case(name, kernels.split_weights(form), (blocks, 1, 1), args, outputs)


def split_columns(form: Form, batch: Batch, n: int, *, plain: bool = False, both: bool = False) -> Case:
    """``plain`` is without a bias; ``both`` with the planes of rows too, of which the exponents are known."""
    dz, x = normal(batch.capacity, n), normal(batch.capacity, 5)
    dz[::3] *= np.float32(1e-9)
    x[::4] *= np.float32(1e5)
    dz[batch.part][1:2] = 0.0
    x_lines, lines = split(form, x[batch.part]).lines, split(form, dz[batch.part]).lines
    planes = split_deltas(form, dz[batch.part], lines, x_lines)
    words, columns = blank_planes(form, batch.most_rows, n), np.full(padded_columns(n), -77, np.int32)
    of_rows, row_planes = wide(dz[batch.part]), None
    outputs = {"planes": _exact_planes(form, _in_blank(planes.bits, words))}
    if both:
        of_dz, row_planes = split(form, dz[batch.part]), words.copy()
        lines = np.full(padded_rows(batch.most_rows), -77, np.int32)
        lines[: len(of_rows)] = of_dz.lines[: len(of_rows)] & ~(UNHELD | NAN_IN)
        outputs["row_planes"] = _exact_planes(form, _in_blank(of_dz.bits, row_planes))
        outputs["lines"] = _in_blank(of_dz.lines, lines)
    if not plain:
        outputs["db"] = expect(of_rows.sum(axis=0), (len(of_rows) + 2) * EPS32 * abs(of_rows).sum(axis=0))
    if form.scaled:
        outputs["columns"] = _in_blank(planes.columns[:n], columns)
    return Case(
        f"{batch}-{n}" + "-plain" * plain + "-both" * both,
        kernels.split_columns(form),
        kernels.column_blocks(batch.most_rows, n),
        {
            **batch.args, **_column_parts(batch, n), "dz": batch.rows_of(dz), "lines": lines, "x_lines": x_lines,
            "planes": words, "row_planes": row_planes, "plane": words[0].size, "columns": columns,
            "db": None if plain else blank(n), "n": n,
        },
        outputs,
    )  # fmt: skip


def _column_parts(batch: Batch, n: int) -> dict[str, object]:
    """Where blocks leave the sums of their rows for the last of them."""
    columns, parts, _ = kernels.column_blocks(batch.most_rows, n)
    return {
        "parts": blank(parts, padded_columns(n)), "part_flags": np.full((parts, padded_columns(n)), -77, np.int32),
        "arrived": np.zeros(columns, np.uint32),
    }  # fmt: skip


def sum_columns(form: Form, batch: Batch, n: int) -> Case:
    planes = np.full((form.planes, padded_rows(batch.most_rows), padded_columns(n)), 0x7FC0, np.uint16)  # NaN
    rows = batch.part.stop - batch.part.start
    planes[:, :rows, :n] = bfloat16_words(normal(rows, n), form.planes)
    planes[:, :rows, n:] = 0
    values = joined(planes[:, :rows, :n])
    outputs = {"db": expect(values.sum(axis=0), (rows + 2) * EPS32 * abs(values).sum(axis=0))}
    args = {**batch.args, **_column_parts(batch, n), "dz": planes, "db": blank(n), "plane": planes[0].size, "n": n}
    args |= dict.fromkeys(("lines", "x_lines", "planes", "row_planes", "columns"))
    return Case(f"{batch}-{n}", kernels.sum_columns(form), kernels.column_blocks(batch.most_rows, n), args, outputs)


def mask_words(size: int, mask: int) -> Case:
    words = np.arange(1, size + 1, dtype=np.int32)
    args = {"words": words, "mask": mask, "size": size}
    return Case(f"{size}-{mask}", kernels.mask_words(), (2,), args, {"words": exact(words & mask)})


# --- products of planes ---


def product_of(form: Form, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A · B in float64, and what planes and sums may be off by: each addition loses a unit in the last place of what
    has been added up, as tensor cores cut off."""
    a, b = wide(a), wide(b)
    with np.errstate(invalid="ignore"):
        return a @ b, (ERRORS[form.struct] + 2 * (a.shape[1] + 16) * EPS32) * (abs(a) @ abs(b))


def plane_output(value: np.ndarray, bound: np.ndarray, rows: int, into: np.ndarray) -> Output:
    """An array as planes of bfloat16, where the shard's rows are ``value`` and the padding is 0."""
    shape, columns = into.shape, value.shape[1]
    words, off, written = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    words[0, :rows, :columns] = value
    with np.errstate(invalid="ignore"):
        off[0, :rows, :columns] = bound + HELD[len(into)] * (abs(value) + bound)
    # Quads reach past the last column to a multiple of 4.
    written[:, : padded_rows(rows), : 4 * ceil_div(columns, 4)] = rows > 0
    return Output(words, off, written, decode=together)


def _sources(tile: ProductTile, a: np.ndarray, b: np.ndarray, *, a_inner: bool, b_inner: bool) -> tuple[object, object]:
    """What a product is given of its operands' planes."""
    if isinstance(tile, MatrixTile):
        return a, b
    a_rows, b_rows = tile.box_rows(a_inner=a_inner, b_inner=b_inner)
    return Mapped(a, a_rows), Mapped(b, b_rows)


def _row_grid(tile: ProductTile, rows: int, n: int) -> tuple[int, ...]:
    """Planes that a product writes have their padding written too."""
    return tile.grid(rows if tile.form.scaled else padded_rows(rows), n, 1)


def tensor_forward(
    tile: ProductTile,
    activation: str,
    batch: Batch,
    x: np.ndarray,
    w: np.ndarray,
    *,
    plain: bool = False,
    planes_alone: bool = False,
) -> Case:
    """``plain`` is without a bias and without z; ``planes_alone`` without y as floats."""
    form, (rows, k), n = tile.form, x.shape, w.shape[1]
    b = None if plain else normal(n)
    w_planes = split(form, w)
    x_planes = split(form, x[batch.part], w_planes.lines if form.scaled else None)
    held = x_planes.bits.shape[1]
    into = blank_planes(form, batch.most_rows, n)
    with np.errstate(invalid="ignore"):
        outputs = finish(activation, *product_of(form, x, w), b, batch, with_z=not plain)
    y_planes = None if form.scaled else into
    if y_planes is not None:
        y = outputs["y"]
        outputs["y_planes"] = plane_output(y.value[batch.part], y.bound[batch.part], len(x[batch.part]), into)
        if planes_alone:
            del outputs["y"]
    x_source, w_source = _sources(
        tile, x_planes.bits if held else into, w_planes.bits, a_inner=True, b_inner=False
    )  # fmt: skip
    args = {
        **batch.args, "x_planes": x_source, "x_plane": x_planes.bits[0].size, "w_planes": w_source,
        "x_lines": x_planes.lines, "w_columns": w_planes.columns, "x": batch.rows_of(x), "w": w, "b": b,
        "z": None if plain else blank(rows, n), "y": blank(rows, n) if "y" in outputs else None, "y_planes": y_planes,
        "y_plane": into[0].size, "early": _early(rows, k), "k": k, "n": n,
    }  # fmt: skip
    entry = kernels.tensor_forward(activation, tile)
    name = f"{batch}-{k}x{n}" + "-plain" * plain + "-planes-alone" * planes_alone
    return Case(name, entry, _row_grid(tile, batch.most_rows, n), args, outputs)


def tensor_forward_loss(tile: ProductTile, name: str, batch: Batch, k: int, n: int, *, plain: bool = False) -> Case:
    """Arguments of a head whose logits are exact, also of bfloat16; ``plain`` is without a bias and weights of rows."""
    head = loss(name, "dense", batch, n, width=k, weighted=not plain, total=True, bias=not plain)
    x, w, part = head.args["x"], head.args["w"], batch.part
    assert isinstance(x, np.ndarray) and isinstance(w, np.ndarray)
    into, rows = blank_planes(tile.form, batch.most_rows, n), part.stop - part.start
    x_planes, w_planes = split(tile.form, x[part]).bits, split(tile.form, w).bits
    x_source, w_source = _sources(tile, x_planes if rows else into, w_planes, a_inner=True, b_inner=False)
    grid = _row_grid(tile, batch.most_rows, n)
    args = {name: head.args[name] for name in ("order", "b", "targets", "weights", "arrived", "totals", "losses")}
    args |= {
        **batch.args, "x_planes": x_source, "x_plane": x_planes[0].size, "w_planes": w_source,
        "sums": blank(math.prod(grid), 2, dtype=np.float64), "delta_planes": into, "k": k, "n": n,
    }  # fmt: skip
    delta = head.outputs["delta"]
    outputs = {name: head.outputs[name] for name in ("arrived", "totals", "losses")}
    for total in ("totals", "losses"):  # a thread adds a quarter of a row's terms up in float32
        outputs[total] = replace(outputs[total], bound=outputs[total].bound + n / 4 * EPS32 * abs(outputs[total].value))
    outputs["delta_planes"] = plane_output(delta.value[part], delta.bound[part], rows, into)
    entry = kernels.tensor_forward_loss(name, tile)
    return Case(f"{batch}-{k}x{n}" + "-plain" * plain, entry, grid, args, outputs)


def tensor_backward_input(
    tile: ProductTile, activation: str, batch: Batch, dz: np.ndarray, w: np.ndarray, *, plain: bool = False
) -> Case:
    """``plain`` is without an activation below; and of bfloat16, what is saved and dx are planes."""
    form, (k, n), rows = tile.form, w.shape, batch.part.stop - batch.part.start
    w_planes, dz_planes = split(form, w), split(form, dz[batch.part])
    dx, bound = product_of(form, dz, w.T)
    into = blank_planes(form, batch.most_rows, k)
    saved = saved_planes = None
    if not plain:
        values = saved_of(activation, 2 * normal(batch.capacity, k))
        if not form.scaled:
            words = bfloat16_words(values, form.planes)
            values = joined(words).astype(np.float32)
            saved_planes = padded(words[:, batch.part])
            if not rows:
                saved_planes = into
        else:
            saved = batch.rows_of(values)
        slope = derivative(activation, values)
        bound = abs(slope) * bound + abs(dx) * activation_bound(values, slope)
        dx = dx * slope
    outputs = {"dx": expect(dx, bound, batch.written(*dx.shape))}
    dx_planes = None if form.scaled else into
    if dx_planes is not None:
        outputs["dx_planes"] = plane_output(dx[batch.part], bound[batch.part], rows, into)
        if not plain:
            del outputs["dx"]
    dz_bits = dz_planes.bits if rows else blank_planes(form, batch.most_rows, n)
    dz_source, w_source = _sources(tile, dz_bits, w_planes.bits, a_inner=True, b_inner=True)
    args = {
        **batch.args, "dz_planes": dz_source, "dz_plane": dz_planes.bits[0].size, "w_planes": w_source,
        "dz_lines": dz_planes.lines if rows else np.zeros(1, np.int32),
        "w_lines": w_planes.lines, "dz": batch.rows_of(dz), "w": w, "saved": saved, "saved_planes": saved_planes,
        "dx": blank(batch.capacity, k) if "dx" in outputs else None, "dx_planes": dx_planes,
        "dx_plane": into[0].size, "early": _early(rows, n), "k": k, "n": n,
    }  # fmt: skip
    entry = kernels.tensor_backward_input(activation, tile)
    return Case(f"{batch}-{k}x{n}" + "-plain" * plain, entry, _row_grid(tile, batch.most_rows, k), args, outputs)


def _early(m: int, k: int) -> int:
    """Each mask of common/dependent_launch.cuh in turn, from size to size: no bit depends on it."""
    return (m + k) % 8


def _line_sums(dz: np.ndarray, parts: int, pitch: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of columns over parts of the lines of each slice of 64, and what float32 may be off by."""
    value, reach = np.zeros((parts, pitch)), np.zeros((parts, pitch))
    for part in range(parts):
        lines = np.isin(np.arange(len(dz)) % 64, np.arange(64 * part // parts, 64 * (part + 1) // parts))
        value[part, : dz.shape[1]], reach[part, : dz.shape[1]] = dz[lines].sum(axis=0), abs(dz[lines]).sum(axis=0)
    return value, len(dz) * EPS32 * reach


def tensor_backward_weight(
    tile: ProductTile,
    batch: Batch,
    x: np.ndarray,
    dz: np.ndarray,
    *,
    optimizer: str | None = None,
    plain: bool = False,
    multiprocessors: int = 1,
) -> Case:
    """With an optimizer, the kernel that also makes its step; ``plain`` is without a bias, whose gradient is given
    unless the product leaves parts of it."""
    form, k, n, rows = tile.form, x.shape[1], dz.shape[1], batch.part.stop - batch.part.start
    w_lines = split(form, normal(k, 7) * np.float32(3.0)).lines
    x_planes = split(form, x[batch.part], w_lines if form.scaled else None)
    dz_planes = split_deltas(form, dz[batch.part], split(form, dz[batch.part]).lines, x_planes.lines)
    bits = [
        planes.bits if rows else blank_planes(form, batch.most_rows, planes.bits.shape[2])
        for planes in (x_planes, dz_planes)
    ]
    x_source, dz_source = _sources(tile, *bits, a_inner=False, b_inner=False)
    args = {
        **batch.args, "x_planes": x_source, "x_plane": x_planes.bits[0].size, "dz_planes": dz_source,
        "dz_plane": dz_planes.bits[0].size, "x_columns": x_planes.columns, "w_lines": w_lines,
        "dz_columns": dz_planes.columns, "x": batch.rows_of(x), "dz": batch.rows_of(dz),
        "early": _early(k, rows), "k": k, "n": n,
    }  # fmt: skip
    dw, grid = expect(*product_of(form, x[batch.part].T, dz[batch.part])), tile.grid(k, n, multiprocessors)
    name = f"{batch}-{k}x{n}" + f"-on-{multiprocessors}" * (multiprocessors > 1)
    if optimizer is None:
        return Case(name, kernels.tensor_backward_weight(tile), grid, {**args, "dw": blank(k, n)}, {"dw": dw})
    gradients, db, sums = {"weight": dw}, None, {}
    parts = None if plain else tile.column_parts(k)
    if parts is not None:
        pitch = padded_columns(n)
        sums["db_parts"] = expect(*_line_sums(joined(dz_planes.bits), parts, pitch))
    elif not plain:
        db = normal(n)
        gradients["bias"] = expect(wide(db), 0.0)
    moved, outputs, constants = stepped(optimizer, gradients)
    outputs |= sums
    args |= {"db": db, "db_parts": blank(parts, pitch) if parts is not None else None}
    w_planes = None if form.scaled else blank_planes(form, k, n)
    if w_planes is not None:
        after, written = outputs["weight"], np.zeros(w_planes.shape, bool)
        written[:, :k, : 4 * ceil_div(n, 4)] = True
        outputs["w_planes"] = replace(plane_output(after.value, after.bound, k, w_planes), written=written)
    entry = kernels.tensor_backward_update(optimizer, tile)
    args |= {"w_planes": w_planes, **moved}
    return Case(name + "-plain" * plain, entry, grid, args, outputs, constants)


def hard(rows: int, n: int) -> np.ndarray:
    """Numbers whose lines planes do not hold: all sizes, columns and rows of 0, and what is not finite."""
    x = special(rows, n)
    x[:, n // 2] = 0.0
    return np.where(abs(x) > 1e30, np.float32(2.0), x)


# --- what a precision means ---


def operands(distribution: str, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A (m, k) and B (k, n), float32, of a kind on which short cuts show."""
    random = np.random.default_rng(3)
    a, b = random.normal(size=(m, k)), random.normal(size=(k, n))
    if distribution == "uniform":
        a, b = random.random((m, k)), random.random((k, n))
    elif distribution == "relu of lognormal":
        a = np.maximum(a, 0.0) * random.lognormal(sigma=3.0, size=(m, k))
    elif distribution == "softmax deltas":
        a = random.dirichlet(np.ones(k), size=m)
        a[np.arange(m), random.integers(k, size=m)] -= 1.0
    elif distribution == "rows over 12 decades":
        a *= 10.0 ** random.uniform(-6.0, 6.0, size=(m, 1))
    elif distribution == "one outlier":
        a[m // 9, k // 93] = 1e12
    elif distribution == "sums over 30 decades":  # which no scale of rows or columns can bring together
        spread = 10.0 ** random.uniform(-15.0, 15.0, size=k)
        a, b = a * spread, b / spread[:, np.newaxis]
    return a.astype(np.float32), b.astype(np.float32)


DISTRIBUTIONS = (
    "normal", "uniform", "relu of lognormal", "softmax deltas", "rows over 12 decades", "one outlier",
    "sums over 30 decades",
)  # fmt: skip


def not_finite(m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands with NaN, infinities, zeros that meet them, and numbers whose products overflow."""
    a, b = operands("normal", m, k, n)
    a[1, 2], a[3, 4], a[5, 6], a[7] = np.nan, np.inf, -np.inf, 0.0
    b[4, 3], b[8, 5], b[9, 6] = 0.0, np.inf, np.nan
    b[:, 2] = 0.0
    a[10], b[:, 8] = 1e25, 1e25
    return a, b


def products(form: Form, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[Case, str]]:
    """A · B as each of a layer's three products, on every tile; and the array that it is left in."""
    tiles: tuple[ProductTile, ...] = (*matrix_tiles(form), *wgmma_tiles(form))
    for tile in tiles:
        yield tensor_forward(tile, "identity", whole(len(a)), a, b, plain=True), "y"
        transposed = np.ascontiguousarray(b.T)
        yield tensor_backward_input(tile, "identity", whole(len(a)), a, transposed, plain=True), "dx"
        yield tensor_backward_weight(tile, whole(len(b)), np.ascontiguousarray(a.T), b), "dw"


def errors(product: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """By the Frobenius norm, and the largest beside |A| |B|; in float64."""
    a, b = wide(a), wide(b)
    exact, reach = a @ b, abs(a) @ abs(b)
    off = abs(product - exact)
    largest = np.divide(off, reach, out=np.where(off > 0.0, np.inf, 0.0), where=reach > 0.0).max()
    return float(np.linalg.norm(off) / np.linalg.norm(exact)), float(largest)


def chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A · B by IEEE fused multiply-adds, over ascending k."""
    c = np.zeros((len(a), b.shape[1]), np.float32)
    a, b = wide(a), wide(b)
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(a.shape[1]):  # products of float32 are exact in float64: each term is rounded once
            c = (c + a[:, k, np.newaxis] * b[k]).astype(np.float32)
    return c


def check_float32(product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    found, of_chain = errors(product, a, b), errors(chain(a, b), a, b)
    assert all(own <= max(other, 2.0**-21) for own, other in zip(found, of_chain, strict=True)), (found, of_chain)


def check_rounded(form: Form, product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Each factor rounded, and a sum whose additions cut off."""
    limit = ERRORS[form.struct] + 2 * (a.shape[1] + 16) * EPS32
    assert errors(product, a, b)[1] <= limit


def check_product(form: Form, product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """That it is what the precision says for which its form stands."""
    if form in OF_PRECISION["float32"]:
        check_float32(product, a, b)
    else:
        check_rounded(form, product, a, b)


def check_not_finite(product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    expected = chain(a, b)
    np.testing.assert_array_equal(np.isnan(product), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(product), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(product), np.isneginf(expected))


def plane_cases() -> Iterator[Case]:
    for form in FORMS:
        for rows, n in ((1, 1), (31, 33), (129, 64), (8, 300), (3, 700), (2, 4101)):
            yield split_rows(form, whole(rows), n)
            yield split_weights(form, rows, n)
            yield split_columns(form, whole(rows), n)
        if not form.scaled:
            yield split_rows_of_steps(form, 36)
        yield split_weights(form, 130, 300, other=(37, 33))
        yield split_weights(form, 3, 5, other=(129, 600))
        yield split_rows(form, whole(9), 36, plain=True)
        yield split_rows(form, whole(9), 36, x=np.zeros((9, 36), np.float32))
        yield split_columns(form, whole(65), 35, plain=True)
        for batch in batches(65):
            yield split_rows(form, batch, 35)
            yield split_rows(form, batch, 36, fetched=True)
            yield split_columns(form, batch, 35)
            if form.scaled:
                yield split_columns(form, batch, 37, both=True)
        for batch, n in ((whole(1), 1), (whole(131), 257), *((batch, 35) for batch in batches(65))):
            if not form.scaled:
                yield sum_columns(form, batch, n)
    for size, mask in ((1, 0), (1027, 0), (1027, USED)):
        yield mask_words(size, mask)


def product_cases() -> Iterator[Case]:
    sizes = [(1, 1, 1), (31, 33, 32), (65, 127, 70), (130, 67, 129)]
    for form, tiles in product(FORMS, (matrix_tiles, wgmma_tiles)):
        largest, smallest = tiles(form)[0], tiles(form)[-1]
        each = tiles(form)
        large = [] if tiles is matrix_tiles else [(300, 70, 260), (129, 200, 61)]
        for tile, (rows, k, n) in [*product((smallest,), sizes), *product((largest,), [sizes[-1], *large])]:
            batch = whole(rows)
            yield tensor_forward(tile, "relu", batch, normal(rows, k), normal(k, n))
            yield tensor_backward_input(tile, "relu", batch, normal(rows, n), normal(k, n))
            yield tensor_backward_weight(tile, batch, normal(rows, k), 1 - normal(rows, n))
        for tile, optimizer in product(each, OPTIMIZERS):
            yield tensor_backward_weight(tile, whole(3), normal(3, 5), normal(3, 6), optimizer=optimizer)
        for plain, n in ((False, 69), (True, 69), (False, 72)):
            x, dz = normal(65, 67), normal(65, n)
            yield tensor_backward_weight(smallest, whole(65), x, dz, optimizer="Adam", plain=plain)
        for tile, activation in product(each, ACTIVATIONS):
            yield tensor_forward(tile, activation, whole(3), 3 * normal(3, 5), normal(5, 6))
            yield tensor_backward_input(tile, activation, whole(3), normal(3, 6), normal(5, 6))
        for batch in batches(65):
            yield tensor_forward(smallest, "tanh", batch, normal(65, 33), normal(33, 35))
            yield tensor_backward_input(smallest, "tanh", batch, normal(65, 33), normal(35, 33))
            yield tensor_backward_weight(smallest, batch, normal(65, 35), normal(65, 36))
        yield tensor_forward(smallest, "identity", whole(33), normal(33, 35), normal(35, 36), plain=True)
        yield tensor_backward_input(smallest, "identity", whole(33), normal(33, 35), normal(36, 35), plain=True)
        if not form.scaled:
            x, w = normal(33, 35), normal(35, 36)
            yield tensor_forward(smallest, "tanh", whole(33), x, w, planes_alone=True)
            for tile in each:  # with nothing but planes, in whole vectors
                for batch in (whole(130), *batches(65)):
                    x, w = normal(batch.capacity, 67), normal(67, 328)
                    yield tensor_forward(tile, "tanh", batch, x, w, planes_alone=True)
                    yield tensor_backward_input(tile, "gelu", batch, x, np.ascontiguousarray(w.T))
            for tile in each:  # more slices than tiles that sum their columns, some of them beyond C
                x, dz = normal(300, 300), normal(300, 261)
                yield tensor_backward_weight(tile, whole(300), x, dz, optimizer="Momentum", multiprocessors=4)
        if form.is_single:
            for tile, name in product(each, kernels.SUMS_OF_TERMS):
                yield tensor_forward_loss(tile, name, whole(33), 37, 72)
                yield tensor_forward_loss(tile, name, whole(33), 37, 72, plain=True)
            for tile, batch in product(each, (whole(300), *batches(130))):
                yield tensor_forward_loss(tile, "huber", batch, 67, 328)
        if form.scaled:
            for tile in each:
                x, w = hard(33, 70), normal(70, 37)
                yield tensor_forward(tile, "identity", whole(33), x, w)
                yield tensor_backward_input(tile, "identity", whole(33), x, w.T.copy(), plain=True)
                yield tensor_backward_weight(tile, whole(33), x, normal(33, 37))


def tensor_cases() -> list[Case]:
    return [*plane_cases(), *product_cases()]
