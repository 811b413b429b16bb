"""Dense layers on tensor cores: the kernels that make components, and those that multiply them.

Components are made here in NumPy, and must have the same bits.  A product of components is held to the float64
product of the float32 arrays: to what its form loses, and to what its sums do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import (
    OF_PRECISION,
    OF_STEPS,
    OPERAND_FORMATS,
    ClusterSplitTile,
    Entry,
    GemmTile,
    OperandFormat,
    Sm80Tile,
    Sm90Tile,
    ceil_div,
    cluster_tiles,
    filled_rows,
    medium_tiles,
    narrow_tiles,
    narrow_weight_tiles,
    padded_columns,
    padded_rows,
    shared_tiles,
    sm80_tiles,
    sm90_tiles,
    tiles_sharing_k,
    wide_tiles,
)
from mlpgpu.losses import FORMS

from .case import (
    BFLOAT_ERRORS,
    Batch,
    Case,
    Mapped,
    Output,
    batches,
    bfloat16_words,
    blank,
    deferred,
    expect,
    joined,
    normal,
    saved_of,
    together,
    whole,
    wide,
)
from .dense import finish
from .dropouts import differentiated, dropped, kept_arguments
from .losses import loss
from .updates import stepped

INEXACT, HAS_NAN, NONZERO = 1, 2, 4
TOP_EXPONENT, LEAST_EXACT = 14, 2.0**-13
NAN_BITS = 0x7FFF  # of bfloat16 and of half
UNWRITTEN_BITS = 0x5A5A

# What a form makes of a product of two numbers: each factor is off by half a unit of its last of 11 or 8 bits, or
# by 2^-23 with two components, which lose lo · lo beside that, 2^-22; with two of bfloat16 by 2^-17, and 2^-16; with
# three of bfloat16 by nothing, and what is lost are mid · lo, twice 2^-25, and less.
ERRORS = {
    "HalfPair": 2.0**-21, "Half": 2.0**-10, "Bfloat16": 2.0**-7, "Bfloat16Pair": 2.0**-15, "Bfloat16Triple": 2.0**-23,
}  # fmt: skip

# The precision that each operand format is of.
PRECISION_OF = {
    operand_format: precision
    for precision, formats in OF_PRECISION.items()
    for operand_format in (*formats, *filter(None, [OF_STEPS.get(precision)]))
}


def makes_weights(tile: GemmTile) -> bool:
    """Whether gradients of weights are made with a tile, as all but the widest and the narrowest make them."""
    if isinstance(tile, ClusterSplitTile):
        return not tile.shares_k
    others = *narrow_tiles(tile.operand_format), *wide_tiles(tile.operand_format), *shared_tiles(tile.operand_format)
    return tile not in others or tile in narrow_weight_tiles(tile.operand_format)


def makes_several(tile: GemmTile) -> bool:
    """Whether one launch moves several weights with a tile."""
    return isinstance(tile, ClusterSplitTile) and makes_weights(tile) and not tile.operand_format.scaled


def makes_activations(tile: GemmTile) -> bool:
    """Whether forward products and gradients of inputs are made with a tile."""
    return not isinstance(tile, ClusterSplitTile) or tile.shares_k


# Of the kernels with these tiles, those that stand for all where compiling each one takes too long: the heaviest
# epilogues, and those of most cases below.  A GPU runs all; the smallest of gemm/gemm_sm80.cuh's tiles has all of them
# anyway, of which nvcc compiles all with one operand format and those that stand for all with the others.
SAMPLED_TILES = [
    tile
    for operand_format in OPERAND_FORMATS
    for tile in (
        *sm90_tiles(operand_format), *medium_tiles(operand_format), *wide_tiles(operand_format),
        *shared_tiles(operand_format), *narrow_tiles(operand_format),
        *cluster_tiles(operand_format), *tiles_sharing_k(operand_format), *sm80_tiles(operand_format)[:1],
    )
]  # fmt: skip
RULED_TILES = [sm90_tiles(operand_format)[0] for operand_format in OPERAND_FORMATS]  # compiled with a rarer rule, too
TILES_SAMPLED_BY_NVCC = [*SAMPLED_TILES, *(tile for each in OPERAND_FORMATS[1:] for tile in sm80_tiles(each)[-1:])]
DROPPED_SAMPLE = ("relu", True), ("tanh", True), ("gelu", True)
SAMPLE = {
    entry
    for tile in TILES_SAMPLED_BY_NVCC
    for entry in (
        *([kernels.tensor_backward_weight(tile)] if makes_weights(tile) else []),
        *([kernels.tensor_backward_update("Adam", tile)] if makes_weights(tile) else []),
        *([kernels.tensor_backward_updates("Adam", tile, 2)] if makes_several(tile) else []),
        *(
            [kernels.tensor_backward_update("AdamWithAlpha", tile, receives=receives) for receives in (False, True)]
            if tile in RULED_TILES
            else []
        ),
        *(
            made(activation, tile, drops=drops)
            for made in (kernels.tensor_forward, kernels.tensor_backward_input)
            for activation, drops in (*product(("identity", "relu", "tanh", "gelu"), (False,)), *DROPPED_SAMPLE)
            if makes_activations(tile)
        ),
        *(
            kernels.tensor_forward_loss(name, tile)
            for name in ("huber", "binary_cross_entropy")
            if tile.operand_format.is_single and not isinstance(tile, ClusterSplitTile)
        ),
    )
}


# Losses whose kernels differ from others by a struct alone: what targets are read by and who takes a row is seen there.
LATER_LOSSES = tuple(
    f"{kernel}_{form}_"
    for kernel in ("loss", "head", "head_dropped", "tail")
    for form in FORMS
    if form not in (*kernels.SUMS_OF_TERMS, "softmax_cross_entropy")
)


# Rules that differ from those of an optimizer alone by one term, which is seen in the rule of most numbers.
LATER_RULES = tuple(
    f"_{rule}_" for rule in kernels.RULES if rule.endswith(kernels.WITH_ALPHA) and rule != "AdamWithAlpha"
)


def is_sampled(entry: Entry, tiles: Sequence[GemmTile] = SAMPLED_TILES) -> bool:
    if any(rule in f"{entry.name}_" for rule in LATER_RULES):
        return False
    if entry.name.startswith(LATER_LOSSES) and entry.name.endswith(("_plain", "_wide")):
        return False
    return entry in SAMPLE or not any(entry.name.endswith(f"_{tile.name}") for tile in tiles)


@dataclass(frozen=True)
class SplitOperand:
    """An array as components (P, rows, columns), with the row_scales of its rows and the flags of its columns.

    Of the rows so many are written.
    """

    bits: np.ndarray
    row_scales: np.ndarray
    column_scales: np.ndarray
    written: int

    @property
    def filled(self) -> np.ndarray:
        return self.bits[:, : self.written]

    @property
    def filled_scales(self) -> np.ndarray:
        return self.row_scales[: self.written]


def exponents(x: np.ndarray) -> np.ndarray:
    """floor(log2 |x|) of finite numbers that are neither 0 nor denormal; elsewhere a very low number."""
    biased = np.ascontiguousarray(x, np.float32).view(np.uint32) >> 23 & 0xFF
    return np.where((biased == 0) | (biased == 255), -(2**20), biased.astype(np.int64) - 127)


def scaling_exponent(top: np.ndarray) -> np.ndarray:
    return np.where(top < -(2**19), 0, top) - TOP_EXPONENT


def hold(operand_format: OperandFormat, x: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words (P, …) that hold x · 2^shift, and each element's flags."""
    if not operand_format.scaled:
        return bfloat16_words(x, operand_format.components), np.zeros(x.shape, int)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(x, shift.astype(np.int32)).astype(np.float32)
        hi = scaled.astype(np.float16)
        rest = np.where(abs(scaled) <= 65504.0, (scaled - hi.astype(np.float32)) * np.float32(2048.0), 0.0)
        lo = rest.astype(np.float16)
        small = (exponents(x) > -(2**20)) & (abs(scaled) < LEAST_EXACT)
    flags = NONZERO * (x != 0.0) + HAS_NAN * np.isnan(x) + INEXACT * (small | np.isinf(x))
    words = np.stack([hi.view(np.uint16), lo.view(np.uint16)])
    return words[: operand_format.components], flags


def padded(words: np.ndarray) -> np.ndarray:
    """(P, rows, columns) with 0 beyond the array, and NaN in rows that nobody fills."""
    _, rows, columns = words.shape
    full = np.pad(words, ((0, 0), (0, padded_rows(rows) - rows), (0, padded_columns(columns) - columns)))
    full[:, filled_rows(rows) :] = NAN_BITS
    return full


def _or(flags: np.ndarray, axis: int) -> np.ndarray:
    return np.bitwise_or.reduce(flags, axis=axis, initial=0)


def split(operand_format: OperandFormat, x: np.ndarray, weight_row_scales: np.ndarray | None = None) -> SplitOperand:
    """Components of an array whose rows are scaled each by itself; arrays of row_scales reach as far as the padding."""
    weights = np.zeros(x.shape[1], int) if weight_row_scales is None else weight_row_scales[: x.shape[1]] >> 3
    top = (exponents(x) + weights).max(axis=1, initial=-(2**20))
    own = scaling_exponent(top)
    words, flags = hold(operand_format, x, weights - own[:, np.newaxis])
    row_scales = np.full(padded_rows(len(x)), 8 * scaling_exponent(np.array(-(2**20))), np.int64)
    row_scales[: len(x)] = 8 * own + _or(flags, 1)
    columns = np.zeros(padded_columns(x.shape[1]), np.int32)
    columns[: x.shape[1]] = _or(flags, 0)
    return SplitOperand(padded(words), row_scales.astype(np.int32), columns, filled_rows(len(x)))


def split_deltas(
    operand_format: OperandFormat, dz: np.ndarray, row_scales: np.ndarray, x_row_scales: np.ndarray
) -> SplitOperand:
    """Components of dz for the gradient of weights: its rows take over the scales of x's."""
    own, of_x = row_scales[: len(dz)] >> 3, x_row_scales[: len(dz)] >> 3
    used = (row_scales[: len(dz)] & NONZERO) != 0
    top = int((own + of_x)[used].max(initial=-(2**20)))
    top = 0 if top < -(2**19) else top
    words, flags = hold(operand_format, dz, np.broadcast_to((of_x - top)[:, np.newaxis], dz.shape))
    columns = np.zeros(padded_columns(dz.shape[1]), np.int32)
    columns[: dz.shape[1]] = 8 * top + _or(flags, 0)
    return SplitOperand(padded(words), row_scales, columns, filled_rows(len(dz)))


def blank_components(operand_format: OperandFormat, rows: int, columns: int) -> np.ndarray:
    return np.full((operand_format.components, padded_rows(rows), padded_columns(columns)), UNWRITTEN_BITS, np.uint16)


def exact(array: np.ndarray, written: np.ndarray | bool = True) -> Output:
    return Output(array, np.zeros(array.shape), np.broadcast_to(written, array.shape))


def _in_blank(array: np.ndarray, whole_of: np.ndarray) -> Output:
    """``array`` at the start of ``whole_of`` along the rows, which are the axis before the last of components."""
    value, written = whole_of.copy(), np.zeros(whole_of.shape, bool)
    place = (slice(None), slice(array.shape[1])) if array.ndim == 3 else (slice(len(array)),)
    value[place], written[place] = array, True
    return exact(value, written)


def _alike(operand_format: OperandFormat, words: np.ndarray) -> np.ndarray:
    """Words with the same bits for each NaN, and halves for each zero: a host and a card make different ones.

    A card may multiply and subtract in one, so that of what is too small for float32 the sign is left.
    """
    if not operand_format.scaled:
        return np.where(words & 0x7FFF > 0x7F80, 0x7FFF, words).astype(np.uint16)
    sizes = words & 0x7FFF
    return np.where(sizes > 0x7C00, 0x7FFF, np.where(sizes == 0, 0, words)).astype(np.uint16)


def _exact_components(operand_format: OperandFormat, output: Output) -> Output:
    return replace(output, value=_alike(operand_format, output.value), decode=partial(_alike, operand_format))


# --- making components ---


def special(rows: int, n: int) -> np.ndarray:
    """Numbers of many sizes, among them some that no half holds."""
    x = normal(rows, n) * np.float32(2.0) ** np.random.default_rng(5).integers(-40, 40, (rows, n)).astype(np.float32)
    flat = x.reshape(-1)
    words = np.array([0.0, np.nan, np.inf, 1e-42, 3.4e38, -0.0, 1e-37], np.float32)
    for i, word in enumerate(words):
        flat[(5 * i + 3) % flat.size] = word
    if rows > 2:
        x[1] = 0.0
    if n > 4096:  # the largest of a row that comes in several pieces is in the last one
        x[-1, -1] = 2.0**60
    return x


def split_rows(
    operand_format: OperandFormat,
    batch: Batch,
    n: int,
    *,
    x: np.ndarray | None = None,
    plain: bool = False,
    fetched: bool = False,
    source: str = "float32",
) -> Case:
    """``plain`` is without weights, components and columns; ``fetched`` from a data set by the order, ``source`` its
    type."""
    numbers, x, scale = _numbers(batch.capacity, n, source) if x is None else (x, x, 1.0)
    given: dict[str, object] = {"x": batch.rows_of(x), "order": None, "copy": None}
    if fetched:
        given = {"x": _fetched(batch, numbers), "order": batch.order, "copy": blank(*x.shape)}
    weight_row_scales = (
        None if plain else (8 * np.random.default_rng(6).integers(-30, 10, padded_columns(n))).astype(np.int32)
    )
    components = split(operand_format, x[batch.part], weight_row_scales)
    words, row_scales = (
        blank_components(operand_format, batch.most_rows, n),
        np.full(padded_rows(batch.most_rows), -77, np.int32),
    )
    known = np.zeros(padded_columns(n), np.int32)
    outputs = {} if plain else {"components": _exact_components(operand_format, _in_blank(components.filled, words))}
    if fetched:
        outputs["copy"] = exact(x, batch.written(*x.shape))
    if operand_format.scaled:
        outputs["row_scales"] = _in_blank(components.filled_scales, row_scales)
        if not plain:
            outputs["column_scales"] = exact(components.column_scales)
    return Case(
        f"{batch}-{n}" + "-plain" * plain + "-fetched" * fetched,
        kernels.split_rows(operand_format, source),
        kernels.row_blocks(batch.most_rows, n),
        {
            **batch.args, **given, "scale": np.float32(scale), "weight_row_scales": weight_row_scales,
            "components": None if plain else words, "component_stride": words[0].size, "row_scales": row_scales,
            "column_scales": None if plain else known, "n": n,
        },
        outputs,
    )  # fmt: skip


def _numbers(rows: int, n: int, source: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Rows of a data set of this type, the numbers that they stand for, and the scale."""
    if source == "float32":
        x = special(rows, n)
        return x, x, 1.0
    scale, of_bytes = 1 / 255, np.random.default_rng(7).integers(0, 256, (rows, n)).astype(np.uint8)
    return of_bytes, np.float32(scale) * of_bytes.astype(np.float32), scale


def _fetched(batch: Batch, rows: np.ndarray, data: np.ndarray | None = None) -> np.ndarray:
    """A data set whose rows that the batch fetches are these."""
    if data is None:
        missing = np.nan if rows.dtype == np.float32 else 255
        data = np.full((2 * batch.epoch_rows, rows.shape[1]), missing, rows.dtype)
    data[batch.fetched] = rows[batch.part]
    return data


def split_rows_of_steps(operand_format: OperandFormat, n: int, source: str = "float32") -> Case:
    """Components of the last two steps of an epoch at once, the second of which has two rows."""
    steps = [Batch(150, 302, place) for place in (1, 2)]
    rows, x, scale = _numbers(150, n, source)
    data = None
    for batch in steps:
        data = _fetched(batch, rows, data)
    words = np.stack([blank_components(operand_format, 150, n) for _ in steps])
    components = [
        _in_blank(split(operand_format, x[batch.part]).filled, blank_components(operand_format, 150, n))
        for batch in steps
    ]
    expected = Output(
        *(np.stack([getattr(each, name) for each in components]) for name in ("value", "bound", "written"))
    )
    args = {
        **steps[0].args, "x": data,
        "step": np.concatenate([batch.args["step"] for batch in steps]),  # type: ignore[arg-type]  # arrays, all of them
        "order": steps[0].order, "scale": np.float32(scale), "weight_row_scales": None, "copy": None,
        "components": words, "component_stride": words[0, 0].size,
        "row_scales": None, "column_scales": None, "n": n,
    }  # fmt: skip
    blocks, _, _ = kernels.row_blocks(150, n)
    outputs = {"components": _exact_components(operand_format, expected)}
    return Case(f"{n}-of_steps", kernels.split_rows(operand_format, source), (blocks, len(steps), 1), args, outputs)


def split_weights(operand_format: OperandFormat, k: int, n: int, other: tuple[int, int] | None = None) -> Case:
    w = special(k, n)
    components = split(operand_format, w)
    words, row_scales = blank_components(operand_format, k, n), np.full(padded_rows(k), -77, np.int32)
    args = {
        "w": w, "components": words, "row_scales": row_scales,
        "column_scales": np.zeros(padded_columns(n), np.int32), "k": k, "n": n,
    }  # fmt: skip
    outputs = {"components": _exact_components(operand_format, _in_blank(components.filled, words))}
    if operand_format.scaled:
        outputs["row_scales"] = _in_blank(components.filled_scales, row_scales)
        outputs["column_scales"] = exact(components.column_scales)
    blocks, names = (
        kernels.row_blocks(k, n)[0],
        ("w", "components", "row_scales", "column_scales", "k", "n"),
    )
    if other:
        second = split_weights(operand_format, *other)
        blocks += second.grid[0]
        args |= {f"other_{name}": second.args[name] for name in names}
        outputs |= {f"other_{name}": output for name, output in second.outputs.items()}
    else:
        args |= {f"other_{name}": 0 if name in "kn" else None for name in names}
    name = f"{k}x{n}" + (f"-{other[0]}x{other[1]}" if other else "")
    return Case(name, kernels.split_weights(operand_format), (blocks, 1, 1), args, outputs)


def split_columns(
    operand_format: OperandFormat, batch: Batch, n: int, *, plain: bool = False, both: bool = False
) -> Case:
    """``plain`` is without a bias; ``both`` with the components of rows too, of which the exponents are known."""
    dz, x = normal(batch.capacity, n), normal(batch.capacity, 5)
    dz[::3] *= np.float32(1e-9)
    x[::4] *= np.float32(1e5)
    dz[batch.part][1:2] = 0.0
    x_row_scales, row_scales = (
        split(operand_format, x[batch.part]).row_scales,
        split(operand_format, dz[batch.part]).row_scales,
    )
    components = split_deltas(operand_format, dz[batch.part], row_scales, x_row_scales)
    words, columns = blank_components(operand_format, batch.most_rows, n), np.full(padded_columns(n), -77, np.int32)
    of_rows, row_components = wide(dz[batch.part]), None
    outputs = {"components": _exact_components(operand_format, _in_blank(components.filled, words))}
    if both:
        of_dz, row_components = split(operand_format, dz[batch.part]), words.copy()
        row_scales = np.full(padded_rows(batch.most_rows), -77, np.int32)
        row_scales[: len(of_rows)] = of_dz.row_scales[: len(of_rows)] & ~(INEXACT | HAS_NAN)
        outputs["row_components"] = _exact_components(operand_format, _in_blank(of_dz.filled, row_components))
        outputs["row_scales"] = _in_blank(of_dz.filled_scales, row_scales)
    if not plain:
        outputs["db"] = expect(of_rows.sum(axis=0), (len(of_rows) + 2) * EPS32 * abs(of_rows).sum(axis=0))
    if operand_format.scaled:
        outputs["column_scales"] = _in_blank(components.column_scales[:n], columns)
    return Case(
        f"{batch}-{n}" + "-plain" * plain + "-both" * both,
        kernels.split_columns(operand_format),
        kernels.column_blocks(batch.most_rows, n),
        {
            **batch.args, **_column_partials_of(batch, n), "dz": batch.rows_of(dz), "row_scales": row_scales,
            "x_row_scales": x_row_scales,
            "components": words, "row_components": row_components, "component_stride": words[0].size,
            "column_scales": columns,
            "db": None if plain else blank(n), "n": n,
        },
        outputs,
    )  # fmt: skip


def _column_partials_of(batch: Batch, n: int) -> dict[str, object]:
    """Where blocks leave the sums of their rows for the last of them."""
    columns, parts, _ = kernels.column_blocks(batch.most_rows, n)
    return {
        "partials": blank(parts, padded_columns(n)),
        "partial_flags": np.full((parts, padded_columns(n)), -77, np.int32),
        "arrived": np.zeros(columns, np.uint32),
    }  # fmt: skip


def sum_deltas(operand_format: OperandFormat, batch: Batch, widths: Sequence[int]) -> Case:
    """Of layers of these widths; where blocks leave the sums of their rows there is room for no more."""
    rows, outputs = batch.part.stop - batch.part.start, {}
    grid = kernels.summed_grid(batch.most_rows, widths)
    args: dict[str, object] = {**batch.args, "component_rows": padded_rows(batch.most_rows)}
    for end in kernels.SUMMED_ENDS:
        args |= {f"dz{end}": None, f"db{end}": None, f"n{end}": 0}
    for end, n in zip(kernels.SUMMED_ENDS, widths, strict=False):
        components = np.full(
            (operand_format.components, padded_rows(batch.most_rows), padded_columns(n)), 0x7FC0, np.uint16
        )  # NaN
        components[:, :rows, :n] = bfloat16_words(normal(rows, n), operand_format.components)
        components[:, :rows, n:] = 0
        values = joined(components[:, :rows, :n])
        outputs[f"db{end}"] = expect(values.sum(axis=0), (rows + 2) * EPS32 * abs(values).sum(axis=0))
        args |= {f"dz{end}": components, f"db{end}": blank(n), f"n{end}": n}
    args |= {"partials": blank(*grid[:2], kernels.DELTA_SUMS_WIDTH), "arrived": np.zeros(grid[0], np.uint32)}
    name = f"{batch}-{'-'.join(map(str, widths))}"
    return Case(name, kernels.sum_deltas(operand_format), grid, args, outputs)


def mask_words(size: int, mask: int) -> Case:
    words = np.arange(1, size + 1, dtype=np.int32)
    args = {"words": words, "mask": mask, "size": size}
    return Case(f"{size}-{mask}", kernels.mask_words(), (2,), args, {"words": exact(words & mask)})


# --- products of components ---


def product_of(operand_format: OperandFormat, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A · B in float64, and what components and sums may be off by: an addition loses a unit in the last place of what
    has been added up, as tensor cores cut off."""
    a, b = wide(a), wide(b)
    with np.errstate(invalid="ignore"):
        return a @ b, (ERRORS[operand_format.struct] + 2 * (a.shape[1] + 16) * EPS32) * (abs(a) @ abs(b))


def component_output(value: np.ndarray, bound: np.ndarray, rows: int, into: np.ndarray, *, vector: int = 4) -> Output:
    """An array as components of bfloat16, where the shard's rows are ``value`` and the padding is 0.

    That is written as far as the ``vector`` that has a row's last element.
    """
    shape, columns = into.shape, value.shape[1]
    words, off, written = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    words[0, :rows, :columns] = value
    with np.errstate(invalid="ignore"):
        off[0, :rows, :columns] = bound + BFLOAT_ERRORS[len(into)] * (abs(value) + bound)
    written[:, : filled_rows(rows), : vector * ceil_div(columns, vector)] = rows > 0
    return Output(words, off, written, decode=together)


def _sources(tile: GemmTile, a: np.ndarray, b: np.ndarray, *, a_inner: bool, b_inner: bool) -> tuple[object, object]:
    """What a product is given of its operands' components."""
    if isinstance(tile, Sm80Tile):
        return a, b
    a_box, b_box = tile.boxes(a_inner=a_inner, b_inner=b_inner)
    return Mapped(a, a_box), Mapped(b, b_box)


def _component_vector(tile: GemmTile, *, is_alone: bool) -> int:
    """Elements of the vectors by which a product stores components: more where it stores nothing else."""
    return 8 if is_alone and isinstance(tile, Sm90Tile) else 4


def _row_grid(tile: GemmTile, rows: int, n: int) -> tuple[int, ...]:
    """Components that a product writes have their padding written too."""
    return tile.grid(rows if tile.operand_format.scaled else filled_rows(rows), n, 1)


@deferred
def tensor_forward(
    tile: GemmTile,
    activation: str,
    batch: Batch,
    x: np.ndarray,
    w: np.ndarray,
    *,
    plain: bool = False,
    components_alone: bool = False,
    rate: float = 0.0,
) -> Iterator[Any]:
    """``plain`` is without a bias and without z; ``components_alone`` without y as floats; ``rate`` of a dropout that
    comes last."""
    operand_format, (rows, k), n = tile.operand_format, x.shape, w.shape[1]
    name = f"{batch}-{k}x{n}" + "-plain" * plain + "-components-alone" * components_alone + f"-rate{rate}" * (rate > 0)
    yield name, kernels.tensor_forward(activation, tile, drops=rate > 0), _row_grid(tile, batch.most_rows, n)
    b = None if plain else normal(n)
    w_components = split(operand_format, w)
    x_components = split(operand_format, x[batch.part], w_components.row_scales if operand_format.scaled else None)
    held = x_components.bits.shape[1]
    into = blank_components(operand_format, batch.most_rows, n)
    with np.errstate(invalid="ignore"):
        outputs = finish(activation, *product_of(operand_format, x, w), b, batch, with_z=not plain)
        outputs["y"] = dropped(outputs["y"], batch, rate)
    y_components = None if operand_format.scaled else into
    if y_components is not None:
        y = outputs["y"]
        vector = _component_vector(tile, is_alone=components_alone and plain)
        outputs["y_components"] = component_output(
            y.value[batch.part], y.bound[batch.part], len(x[batch.part]), into, vector=vector
        )
        if components_alone:
            del outputs["y"]
    x_source, w_source = _sources(
        tile, x_components.bits if held else into, w_components.bits, a_inner=True, b_inner=False
    )  # fmt: skip
    args = {
        **batch.args, "x_components": x_source, "x_stride": x_components.bits[0].size, "w_components": w_source,
        "x_row_scales": x_components.row_scales, "w_column_scales": w_components.column_scales, "x": batch.rows_of(x),
        "w": w,
        "b": b,
        "z": None if plain else blank(rows, n), "y": blank(rows, n) if "y" in outputs else None,
        "y_components": y_components,
        "y_stride": into[0].size, **kept_arguments(batch, n, rate), "prefetch": _prefetch(rows, k), "k": k, "n": n,
    }  # fmt: skip
    yield args, outputs, {}


@deferred
def tensor_forward_loss(
    tile: GemmTile, name: str, batch: Batch, k: int, n: int, *, plain: bool = False
) -> Iterator[Any]:
    """Arguments of a head whose logits are exact, also of bfloat16; ``plain`` is without a bias and weights of rows."""
    grid = _row_grid(tile, batch.most_rows, n)
    yield f"{batch}-{k}x{n}" + "-plain" * plain, kernels.tensor_forward_loss(name, tile), grid
    head = loss(name, "dense", batch, n, width=k, weighted=not plain, total=True, bias=not plain)
    x, w, part = head.args["x"], head.args["w"], batch.part
    assert isinstance(x, np.ndarray) and isinstance(w, np.ndarray)
    into, rows = blank_components(tile.operand_format, batch.most_rows, n), part.stop - part.start
    x_components, w_components = split(tile.operand_format, x[part]).bits, split(tile.operand_format, w).bits
    x_source, w_source = _sources(tile, x_components if rows else into, w_components, a_inner=True, b_inner=False)
    args = {name: head.args[name] for name in ("order", "b", "targets", "weights", "arrived", "totals", "losses")}
    args |= {
        **batch.args, "x_components": x_source, "x_stride": x_components[0].size, "w_components": w_source,
        "sums": blank(math.prod(grid), 2, dtype=np.float64), "delta_components": into, "k": k, "n": n,
    }  # fmt: skip
    delta = head.outputs["delta"]
    outputs = {name: head.outputs[name] for name in ("arrived", "totals", "losses")}
    for total in ("totals", "losses"):  # a thread adds a quarter of a row's terms up in float32
        outputs[total] = replace(outputs[total], bound=outputs[total].bound + n / 4 * EPS32 * abs(outputs[total].value))
    outputs["delta_components"] = component_output(delta.value[part], delta.bound[part], rows, into)
    yield args, outputs, head.constants


@deferred
def tensor_backward_input(
    tile: GemmTile,
    activation: str,
    batch: Batch,
    dz: np.ndarray,
    w: np.ndarray,
    *,
    plain: bool = False,
    rate: float = 0.0,
) -> Iterator[Any]:
    """``plain`` is without an activation below; and of bfloat16, what is saved and dx are components; ``rate`` of a
    dropout above the activation."""
    operand_format, (k, n), rows = tile.operand_format, w.shape, batch.part.stop - batch.part.start
    entry = kernels.tensor_backward_input(activation, tile, drops=rate > 0)
    name = f"{batch}-{k}x{n}" + "-plain" * plain + f"-rate{rate}" * (rate > 0)
    yield name, entry, _row_grid(tile, batch.most_rows, k)
    w_components, dz_components = split(operand_format, w), split(operand_format, dz[batch.part])
    dx, bound = product_of(operand_format, dz, w.T)
    into = blank_components(operand_format, batch.most_rows, k)
    saved = saved_components = values = None
    if not plain:
        values = saved_of(activation, 2 * normal(batch.capacity, k))
        if not operand_format.scaled:
            words = bfloat16_words(values, operand_format.components)
            values = joined(words).astype(np.float32)
            saved_components = padded(words[:, batch.part])
            if not rows:
                saved_components = into
        else:
            saved = batch.rows_of(values)
    made, through = differentiated(activation, batch, dx, bound, values, rate)
    outputs, dx, bound = {"dx": made}, made.value, made.bound
    dx_components = None if operand_format.scaled else into
    if dx_components is not None:
        vector = _component_vector(tile, is_alone=not plain)
        outputs["dx_components"] = component_output(dx[batch.part], bound[batch.part], rows, into, vector=vector)
        if not plain:
            del outputs["dx"]
    dz_bits = dz_components.bits if rows else blank_components(operand_format, batch.most_rows, n)
    dz_source, w_source = _sources(tile, dz_bits, w_components.bits, a_inner=True, b_inner=True)
    args = {
        **batch.args, "dz_components": dz_source, "dz_stride": dz_components.bits[0].size, "w_components": w_source,
        "dz_row_scales": dz_components.row_scales if rows else np.zeros(1, np.int32),
        "w_row_scales": w_components.row_scales, "dz": batch.rows_of(dz), "w": w, "saved": saved,
        "saved_components": saved_components,
        "dx": blank(batch.capacity, k) if "dx" in outputs else None, "dx_components": dx_components,
        "dx_stride": into[0].size, **through, "prefetch": _prefetch(rows, n), "k": k, "n": n,
    }  # fmt: skip
    yield args, outputs, {}


def _prefetch(m: int, k: int) -> int:
    """Each mask of common/dependent_launch.cuh in turn, from size to size: no bit depends on it."""
    return (m + k) % 8


def _column_partials(dz: np.ndarray, count: int, pitch: int, split: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Sums of dz's columns (count, pitch), each over its part of the rows of every slice of 64, and what float32 may be
    off by; of ``split`` blocks that share the slices, one after another."""
    value, reach = np.zeros((count, pitch)), np.zeros((count, pitch))
    slices, parts, row = ceil_div(len(dz), 64), count // split, np.arange(len(dz))
    for at in range(count):
        block, part = divmod(at, parts)
        of_block = np.isin(row // 64, np.arange(slices * block // split, slices * (block + 1) // split))
        rows = dz[of_block & np.isin(row % 64, np.arange(64 * part // parts, 64 * (part + 1) // parts))]
        value[at, : dz.shape[1]], reach[at, : dz.shape[1]] = rows.sum(axis=0), abs(rows).sum(axis=0)
    return value, len(dz) * EPS32 * reach


@deferred
def tensor_backward_weight(
    tile: GemmTile,
    batch: Batch,
    x: np.ndarray,
    dz: np.ndarray,
    *,
    rule: str | None = None,
    plain: bool = False,
    receives: bool = False,
    multiprocessors: int = 1,
    size: int = 0,
) -> Iterator[Any]:
    """With a rule, the kernel that also makes its step; ``plain`` is without a bias, whose gradient is given
    unless the product leaves partial sums of it; it ``receives`` another shard's dW, and moves no bias then; ``size``
    elements lie from slot to slot."""
    operand_format, k, n, rows = tile.operand_format, x.shape[1], dz.shape[1], batch.part.stop - batch.part.start
    name = f"{batch}-{k}x{n}" + f"-on-{multiprocessors}" * (multiprocessors > 1)
    grid = tile.grid(k, n, multiprocessors)
    if rule is None:
        yield name, kernels.tensor_backward_weight(tile), grid
    else:
        yield name + "-plain" * plain, kernels.tensor_backward_update(rule, tile, receives=receives), grid
    w_row_scales = split(operand_format, normal(k, 7) * np.float32(3.0)).row_scales
    x_components = split(operand_format, x[batch.part], w_row_scales if operand_format.scaled else None)
    dz_components = split_deltas(
        operand_format, dz[batch.part], split(operand_format, dz[batch.part]).row_scales, x_components.row_scales
    )
    bits = [
        components.bits if rows else blank_components(operand_format, batch.most_rows, components.bits.shape[2])
        for components in (x_components, dz_components)
    ]
    x_source, dz_source = _sources(tile, *bits, a_inner=False, b_inner=False)
    args = {
        **batch.args, "x_components": x_source, "x_stride": x_components.bits[0].size, "dz_components": dz_source,
        "dz_stride": dz_components.bits[0].size, "x_column_scales": x_components.column_scales,
        "w_row_scales": w_row_scales,
        "dz_column_scales": dz_components.column_scales, "x": batch.rows_of(x), "dz": batch.rows_of(dz),
        "prefetch": _prefetch(k, rows), "k": k, "n": n,
    }  # fmt: skip
    dw, sums = expect(*product_of(operand_format, x[batch.part].T, dz[batch.part])), {}
    parts = None if plain else tile.column_partials(k)
    if parts is not None:
        pitch = padded_columns(n)
        sums["db_partials"] = expect(
            *_column_partials(joined(dz_components.bits[:, :rows]), parts, pitch, getattr(tile, "split", 1))
        )
    args["db_partials"] = blank(parts, pitch) if parts is not None else None
    if rule is None:
        yield {**args, "dw": blank(k, n)}, {"dw": dw, **sums}, {}
        return
    if receives:
        received = normal(k, n)
        args["received"] = received
        dw = expect(dw.value + received, dw.bound + EPS32 * (abs(dw.value) + abs(received)))
    gradients, db = {"weight": dw}, None
    if parts is None and not (plain or receives):
        db = normal(n)
        gradients["bias"] = expect(wide(db), 0.0)
    moved, outputs, constants = stepped(rule, gradients, size)
    outputs |= sums
    args["db"] = db
    w_components = None if operand_format.scaled else blank_components(operand_format, k, n)
    if w_components is not None:
        after, written = outputs["weight"], np.zeros(w_components.shape, bool)
        written[:, :k, : 4 * ceil_div(n, 4) if isinstance(tile, Sm80Tile) else n] = True
        outputs["w_components"] = replace(component_output(after.value, after.bound, k, w_components), written=written)
    yield {**args, "w_components": w_components, **moved}, outputs, constants


@deferred
def tensor_backward_updates(
    tile: ClusterSplitTile, rule: str, batch: Batch, *operands: tuple[np.ndarray, np.ndarray, bool]
) -> Iterator[Any]:
    """Updates of a layer for each x and dz, with a bias or ``plain``, by one launch."""
    entry = kernels.tensor_backward_updates(rule, tile, len(operands))
    shapes = [(x.shape[1], dz.shape[1]) for x, dz, _ in operands]
    tiles = [
        tile.clusters(k, n) + (0 if plain else ceil_div(n, tile.n))
        for (k, n), (*_, plain) in zip(shapes, operands, strict=True)
    ]
    name = f"{batch}-" + "-".join(f"{k}x{n}" for k, n in shapes)
    yield name + "-plain" * all(plain for *_, plain in operands), entry, (tile.split * sum(tiles), 1, 1)
    size, outputs = max((k + 1) * n for k, n in shapes) + 3, {}
    args = {**batch.args, "capacity": batch.most_rows, "prefetch": _prefetch(*shapes[0])}
    for number, ((x, dz, plain), (k, n)) in enumerate(zip(operands, shapes, strict=True)):
        part, rows = batch.part, batch.part.stop - batch.part.start
        bits = [
            split(tile.operand_format, of[part]).bits
            if rows
            else blank_components(tile.operand_format, batch.most_rows, of.shape[1])
            for of in (x, dz)
        ]
        dw = expect(*product_of(tile.operand_format, x[part].T, dz[part]))
        taken = wide(joined(bits[1][:, :rows]))[:, :n]
        db = expect(taken.sum(axis=0), rows * EPS32 * abs(taken).sum(axis=0))
        moved, made, constants = stepped(rule, {"weight": dw} if plain else {"weight": dw, "bias": db}, size)
        components = blank_components(tile.operand_format, k, n)
        written = np.zeros(components.shape, bool)
        written[:, :k, :n] = True
        after = component_output(made["weight"].value, made["weight"].bound, k, components)
        made["w_components"] = replace(after, written=written)
        x_source, dz_source = _sources(tile, *bits, a_inner=False, b_inner=False)
        of_layer = {
            "x_components": x_source, "dz_components": dz_source, "dz": bits[1], "w_components": components, "k": k,
            "n": n, "first": sum(tiles[:number]),
        }  # fmt: skip
        args |= {name: moved.pop(name) for name in ("totals", "size")}
        args |= {f"{name}_{number}": value for name, value in {**of_layer, **moved}.items()}
        outputs |= {f"{name}_{number}": output for name, output in made.items()}
    yield args, outputs, constants


def move_weight(rule: str, operand_format: kernels.OperandFormat, k: int, n: int, *, split: bool = True) -> Case:
    """Along a gradient and the other shard's; where it is not ``split`` no operands of the weight are made."""
    gradient, received = normal(2, k, n)
    total = expect(wide(gradient) + received, EPS32 * (abs(wide(gradient)) + abs(received)))
    moved, outputs, constants = stepped(rule, {"weight": total}, ceil_div(k * n, 4) * 4)
    args = {name: value for name, value in moved.items() if not name.startswith("bias")}
    components = blank_components(operand_format, k, n) if split else None
    if components is not None:
        after = component_output(outputs["weight"].value, outputs["weight"].bound, k, components)
        written = np.zeros(components.shape, bool)
        written[:, :k, : 4 * ceil_div(n, 4)] = True
        outputs["w_components"] = replace(after, written=written)
    args |= {
        "step": whole(1).args["step"], "gradient": gradient, "received": received, "w_components": components, "k": k,
        "n": n,
    }  # fmt: skip
    entry = kernels.move_weight(rule, operand_format)
    return Case(f"{k}x{n}" + "-alone" * (not split), entry, (2,), args, outputs, constants=constants)


def move_weight_cases() -> Iterator[Case]:
    for operand_format in OPERAND_FORMATS:
        if operand_format.scaled:
            continue
        for rule in kernels.RULES:
            yield move_weight(rule, operand_format, 3, 5)
        for k, n in ((1, 1), (67, 69), (65, 72), (40, 128)):
            yield move_weight("Momentum", operand_format, k, n)
        yield move_weight("Adam", operand_format, 33, 68, split=False)


def hard(rows: int, n: int) -> np.ndarray:
    """Numbers whose row_scales components do not hold: all sizes, columns and rows of 0, and what is not finite."""
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


def products(
    operand_format: OperandFormat, a: np.ndarray, b: np.ndarray, tiles: Sequence[GemmTile] = ()
) -> Iterator[tuple[Case, str]]:
    """A · B as each of a layer's three products, on these tiles or all; and the array that it is left in."""
    usual = (
        *sm80_tiles(operand_format),
        *sm90_tiles(operand_format),
        *medium_tiles(operand_format),
        *wide_tiles(operand_format),
        *shared_tiles(operand_format),
        *narrow_tiles(operand_format),
    )
    for tile in tiles or (*usual, *cluster_tiles(operand_format), *tiles_sharing_k(operand_format)):
        if makes_activations(tile):
            yield tensor_forward(tile, "identity", whole(len(a)), a, b, plain=True), "y"
            transposed = np.ascontiguousarray(b.T)
            yield tensor_backward_input(tile, "identity", whole(len(a)), a, transposed, plain=True), "dx"
        if makes_weights(tile):
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


def check_rounded(operand_format: OperandFormat, product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Each factor rounded, and a sum whose additions cut off."""
    limit = ERRORS[operand_format.struct] + 2 * (a.shape[1] + 16) * EPS32
    assert errors(product, a, b)[1] <= limit


def check_product(operand_format: OperandFormat, product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """That it is what the precision says for which its form stands."""
    if PRECISION_OF[operand_format] == "float32":
        check_float32(product, a, b)
    else:
        check_rounded(operand_format, product, a, b)


def check_not_finite(product: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    expected = chain(a, b)
    np.testing.assert_array_equal(np.isnan(product), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(product), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(product), np.isneginf(expected))


def component_cases() -> Iterator[Case]:
    for operand_format in OPERAND_FORMATS:
        for rows, n in ((1, 1), (31, 33), (129, 64), (8, 300), (3, 700), (2, 4101), (2, 8222)):
            yield split_rows(operand_format, whole(rows), n)
            yield split_weights(operand_format, rows, n)
            yield split_columns(operand_format, whole(rows), n)
        if not operand_format.scaled:
            yield split_rows_of_steps(operand_format, 36)
            yield split_rows_of_steps(operand_format, 35, "uint8")
        yield split_weights(operand_format, 130, 300, other=(37, 33))
        yield split_weights(operand_format, 3, 5, other=(129, 600))
        for n in (1, 33, 700):
            yield split_rows(operand_format, whole(31), n, fetched=True, source="uint8")
        yield split_rows(operand_format, whole(9), 36, plain=True)
        yield split_rows(operand_format, whole(9), 36, x=np.zeros((9, 36), np.float32))
        yield split_columns(operand_format, whole(65), 35, plain=True)
        for batch in batches(65):
            yield split_rows(operand_format, batch, 35)
            yield split_rows(operand_format, batch, 36, fetched=True)
            yield split_rows(operand_format, batch, 36, fetched=True, source="uint8")
            yield split_columns(operand_format, batch, 35)
            if operand_format.scaled:
                yield split_columns(operand_format, batch, 37, both=True)
        one_by_one = ((batch, (35,)) for batch in batches(65))
        for batch, widths in ((whole(1), (1,)), (whole(301), (257, 10, 128, 129)), (whole(140), (9, 300)), *one_by_one):
            if not operand_format.scaled:
                yield sum_deltas(operand_format, batch, widths)
    for size, mask in ((1, 0), (1027, 0), (1027, NONZERO)):
        yield mask_words(size, mask)


def product_cases() -> Iterator[Case]:
    sizes = [(1, 1, 1), (31, 33, 32), (65, 127, 70), (130, 67, 129)]
    for operand_format, tiles in product(OPERAND_FORMATS, (sm80_tiles, sm90_tiles)):
        each = tiles(operand_format)
        if not each:
            continue
        largest, smallest = each[0], each[-1]
        large = [] if tiles is sm80_tiles else [(300, 70, 260), (129, 200, 61)]
        for tile, (rows, k, n) in [*product((smallest,), sizes), *product((largest,), [sizes[-1], *large])]:
            batch = whole(rows)
            yield tensor_forward(tile, "relu", batch, normal(rows, k), normal(k, n))
            yield tensor_backward_input(tile, "relu", batch, normal(rows, n), normal(k, n))
            yield tensor_backward_weight(tile, batch, normal(rows, k), 1 - normal(rows, n))
        for tile, rule, receives in product(each, kernels.RULES, (False, True)):
            x, dz = normal(3, 5), normal(3, 6)
            yield tensor_backward_weight(tile, whole(3), x, dz, rule=rule, receives=receives)
        for plain, n in ((False, 69), (True, 69), (False, 72)):
            x, dz = normal(65, 67), normal(65, n)
            yield tensor_backward_weight(smallest, whole(65), x, dz, rule="Adam", plain=plain)
        for tile, activation in product(each, ACTIVATIONS):
            yield tensor_forward(tile, activation, whole(3), 3 * normal(3, 5), normal(5, 6))
            yield tensor_backward_input(tile, activation, whole(3), normal(3, 6), normal(5, 6))
            yield tensor_forward(tile, activation, whole(3), 3 * normal(3, 5), normal(5, 37), rate=0.25)
            yield tensor_backward_input(tile, activation, whole(3), normal(3, 6), normal(37, 6), rate=0.25)
        for batch in batches(65):
            yield tensor_forward(smallest, "tanh", batch, normal(65, 33), normal(33, 35))
            yield tensor_backward_input(smallest, "tanh", batch, normal(65, 33), normal(35, 33))
            yield tensor_forward(smallest, "tanh", batch, normal(65, 33), normal(33, 35), rate=0.25)
            yield tensor_backward_input(smallest, "gelu", batch, normal(65, 33), normal(35, 33), rate=0.25)
            yield tensor_backward_weight(smallest, batch, normal(65, 35), normal(65, 36))
        yield tensor_forward(smallest, "identity", whole(33), normal(33, 35), normal(35, 36), plain=True)
        yield tensor_backward_input(smallest, "identity", whole(33), normal(33, 35), normal(36, 35), plain=True)
        if not operand_format.scaled:
            x, w = normal(33, 35), normal(35, 36)
            yield tensor_forward(smallest, "tanh", whole(33), x, w, components_alone=True)
            for tile in each:  # with nothing but components, in whole vectors
                for batch in (whole(130), *batches(65)):
                    x, w = normal(batch.capacity, 67), normal(67, 328)
                    yield tensor_forward(tile, "tanh", batch, x, w, components_alone=True)
                    yield tensor_backward_input(tile, "gelu", batch, x, np.ascontiguousarray(w.T))
                    yield tensor_forward(tile, "relu", batch, x, w, components_alone=True, plain=True, rate=0.5)
                    yield tensor_backward_input(tile, "tanh", batch, x, np.ascontiguousarray(w.T), rate=0.25)
            for tile in each:  # more slices than tiles that sum their columns, some of them beyond C
                x, dz = normal(300, 300), normal(300, 261)
                yield tensor_backward_weight(tile, whole(300), x, dz, rule="Momentum", multiprocessors=4)
        if operand_format.is_single:
            for tile, name in product(each, kernels.SUMS_OF_TERMS):
                yield tensor_forward_loss(tile, name, whole(33), 37, 72)
                yield tensor_forward_loss(tile, name, whole(33), 37, 72, plain=True)
            for tile, batch in product(each, (whole(300), *batches(130))):
                yield tensor_forward_loss(tile, "huber", batch, 67, 328)
        if operand_format.scaled:
            for tile in each:
                x, w = hard(33, 70), normal(70, 37)
                yield tensor_forward(tile, "identity", whole(33), x, w)
                yield tensor_backward_input(tile, "identity", whole(33), x, w.T.copy(), plain=True)
                yield tensor_backward_weight(tile, whole(33), x, normal(33, 37))


def narrow_cases() -> Iterator[Case]:
    """Tiles of few columns and of many: each format, each way its operands lie, borders, several tiles a block, each
    epilogue."""
    for operand_format in OPERAND_FORMATS:
        others = (
            *narrow_tiles(operand_format), *wide_tiles(operand_format), *shared_tiles(operand_format),
            *medium_tiles(operand_format),
        )  # fmt: skip
        for tile in others:
            yield from _narrow_cases(tile)


def _activation_cases(tile: GemmTile, borders: Sequence[tuple[int, int, int]], k: int) -> Iterator[Case]:
    """Of products that make activations: tiles that end at ``borders``, rows, k and n; each epilogue; parts of a batch,
    with ``k`` terms."""
    for rows, terms, n in borders:
        yield tensor_forward(tile, "relu", whole(rows), normal(rows, terms), normal(terms, n))
        yield tensor_backward_input(tile, "relu", whole(rows), normal(rows, terms), normal(n, terms))
    for activation in ACTIVATIONS:
        yield tensor_forward(tile, activation, whole(3), 3 * normal(3, 5), normal(5, 6))
        yield tensor_backward_input(tile, activation, whole(3), normal(3, 6), normal(5, 6))
        yield tensor_forward(tile, activation, whole(3), 3 * normal(3, 5), normal(5, 37), rate=0.25)
        yield tensor_backward_input(tile, activation, whole(3), normal(3, 6), normal(37, 6), rate=0.25)
    for batch in batches(65):
        yield tensor_forward(tile, "tanh", batch, normal(65, k), normal(k, 35))
        yield tensor_backward_input(tile, "tanh", batch, normal(65, k), normal(35, k))
        yield tensor_forward(tile, "relu", batch, normal(65, k), normal(k, 36), rate=0.25)
        yield tensor_backward_input(tile, "tanh", batch, normal(65, k), normal(35, k), rate=0.25)


def _narrow_cases(tile: Sm90Tile) -> Iterator[Case]:
    is_scaled = tile.operand_format.scaled
    borders = (1, 1, 1), (64, 200, 48), (65, 127, 70), (130, 67, 129), (65, 70, 2 * tile.n + 3)
    yield from _activation_cases(tile, borders, 33)
    # So many slices that the ring comes round, and long enough that lo · lo is left out.
    k = 64 * (2 * tile.stages + 1)
    yield tensor_forward(tile, "identity", whole(70), normal(70, k), normal(k, 24))
    if not is_scaled:
        for batch in (whole(70), *batches(65)):
            x, w = normal(batch.capacity, 67), normal(67, 136)
            yield tensor_forward(tile, "tanh", batch, x, w, components_alone=True)
            yield tensor_backward_input(tile, "gelu", batch, x, np.ascontiguousarray(w.T))
            yield tensor_forward(tile, "relu", batch, x, w, components_alone=True, plain=True, rate=0.5)
    if tile.operand_format.is_single:
        for name in kernels.SUMS_OF_TERMS:
            yield tensor_forward_loss(tile, name, whole(33), 37, 72)
    if not makes_weights(tile):
        return
    for rows, k, n in ((1, 1, 1), (65, 127, 70), (130, 67, 129)):
        yield tensor_backward_weight(tile, whole(rows), normal(rows, k), 1 - normal(rows, n))
    for rule, receives in product(kernels.RULES, (False, True)):
        yield tensor_backward_weight(tile, whole(3), normal(3, 5), normal(3, 6), rule=rule, receives=receives)
    for plain, n in ((False, 69), (True, 69), (False, 72)):
        yield tensor_backward_weight(tile, whole(65), normal(65, 67), normal(65, n), rule="Adam", plain=plain)
    # Each tile in a block of its own, so that what one leaves beyond its columns may come last.
    yield tensor_backward_weight(tile, whole(65), normal(65, 67), normal(65, 69), rule="Adam", multiprocessors=4)
    if not is_scaled:  # more slices than tiles that sum their columns
        x, dz = normal(300, 200), normal(300, 200)
        yield tensor_backward_weight(tile, whole(300), x, dz, rule="Momentum", multiprocessors=4)


def cluster_split_cases() -> Iterator[Case]:
    """Tiles whose clusters share the rows: parts without rows, borders, a ring that comes round, each rule."""
    for operand_format in OPERAND_FORMATS:
        for tile in cluster_tiles(operand_format):
            for rows, k, n in ((1, 1, 1), (65, 127, 70), (130, 67, 129), (64 * (tile.split * tile.stages + 3), 70, 68)):
                yield tensor_backward_weight(tile, whole(rows), normal(rows, k), 1 - normal(rows, n))
            for rule, receives in product(kernels.RULES, (False, True)):
                x, dz = normal(3, 5), normal(3, 6)
                yield tensor_backward_weight(tile, whole(3), x, dz, rule=rule, receives=receives)
            for plain, n in ((False, 69), (True, 69), (False, 72)):
                yield tensor_backward_weight(
                    tile, whole(300), normal(300, 67), normal(300, n), rule="Adam", plain=plain
                )
            for batch in batches(65):
                yield tensor_backward_weight(tile, batch, normal(65, 35), normal(65, 36), rule="Momentum")
            if operand_format.scaled:
                yield tensor_backward_weight(tile, whole(200), hard(200, 70), normal(200, 37))
            else:  # so many tiles that one warp sums the columns
                x, dz = normal(300, 600), normal(300, 72)
                yield tensor_backward_weight(tile, whole(300), x, dz, rule="Momentum")
                yield from _updates_cases(tile)


def _updates_cases(tile: ClusterSplitTile) -> Iterator[Case]:
    """Two weights in one launch: each rule, with a bias and without, borders, parts of a batch."""
    for rule in kernels.RULES:
        few = (normal(3, 5), normal(3, 6), False), (normal(3, 70), normal(3, 9), True)
        yield tensor_backward_updates(tile, rule, whole(3), *few)
    x, other = normal(300, 267), normal(300, 69)
    first, second = (x, normal(300, 70), False), (other, normal(300, 200), False)
    yield tensor_backward_updates(tile, "Adam", whole(300), first, second)
    yield tensor_backward_updates(tile, "Momentum", whole(300), second, first)
    for batch in batches(65):
        third = (normal(65, 35), normal(65, 36), True), (normal(65, 68), normal(65, 132), True)
        yield tensor_backward_updates(tile, "Momentum", batch, *third)


def sharing_k_cases() -> Iterator[Case]:
    """Tiles whose clusters share k: parts without terms, borders, rings that come round, each epilogue."""
    for operand_format in OPERAND_FORMATS:
        for tile in tiles_sharing_k(operand_format):
            long = 64 * (tile.split * tile.stages + 3)
            yield from _activation_cases(tile, ((1, 1, 1), (65, 127, 70), (130, 67, 129), (70, long, 68)), 133)
            if operand_format.scaled:
                x, w = hard(33, 270), normal(270, 37)
                yield tensor_forward(tile, "identity", whole(33), x, w)
                yield tensor_backward_input(tile, "identity", whole(33), x, w.T.copy(), plain=True)
                continue
            for batch in (whole(70), *batches(65)):
                for n in (136, 69):
                    x, w = normal(batch.capacity, 267), normal(267, n)
                    yield tensor_forward(tile, "sigmoid", batch, x, w, components_alone=True)
                    yield tensor_forward(tile, "sigmoid", batch, x, w, components_alone=True, plain=True)
                    yield tensor_backward_input(tile, "gelu", batch, x, np.ascontiguousarray(w.T))


def tensor_cases() -> list[Case]:
    return [
        *component_cases(), *product_cases(), *narrow_cases(), *cluster_split_cases(), *sharing_k_cases(),
        *move_weight_cases(),
    ]  # fmt: skip
