"""Losses and outputs (``elementwise/loss.cuh``), and a loss in one kernel with the last dense layer
(``fused/head.cuh``, ``fused/column_head.cuh``, ``fused/row_head.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product

from ....activations import ACTIVATIONS
from ....losses import FORMS, OUTPUTS
from ...sources import camel
from .entry import (
    DENSE_PRODUCT,
    DROPPED,
    DROPS,
    ROW_THREADS,
    ROWS,
    SUM_BYTES,
    WARP,
    Entry,
    Product,
    arguments,
    ceil_div,
)

# Losses that a product may end with: each output has a term by itself (SumOfTerms and MeanOfTerms of math/losses.cuh).
# Of the others that are such sums there is no such product, to compile fewer kernels.
SUMS_OF_TERMS = ("squared_error", "mean_squared_error", "absolute_error", "huber", "binary_cross_entropy")


def reads_numbers(form: str) -> bool:
    """Whether the kernels of a form of a loss read its numbers; of a softmax cross entropy the smoothed form does."""
    return form != "softmax_cross_entropy" and bool(fields(FORMS[form]))


HEAD_MOST_N = 32  # of all heads


@dataclass(frozen=True)
class HeadForm:
    """A kernel of the last dense layer with a loss.

    Attributes:
        header: the file under ``cuda/`` that defines it, as ``function`` for blocks of the struct ``block``.
        rows: of a block.
        suffix: the end of its entries' names.
        title: what it is called.
        blocks: that must fit on a multiprocessor at once.
        split: blocks of a cluster that have the same rows, each a share of k.
    """

    header: str
    function: str
    block: str
    rows: int
    threads: int
    shared_bytes: int
    suffix: str = ""
    title: str = "head"
    blocks: int = 1
    split: int = 1

    def __str__(self) -> str:
        return self.title


# Head of fused/head.cuh, which keeps MOST_K by MOST_N of W, and ColumnHead of fused/column_head.cuh.
WHOLE_HEAD_MOST_K, WHOLE_HEAD_MOST_N = 1024, 12
WHOLE_HEAD = HeadForm("fused/head.cuh", "head", "Head", 8, 288, 4 * (12 * 1028 + 8 * (8 + 2) * HEAD_MOST_N + 4 * 8))


def _column_head(rows: int, warps: int, split: int = 1) -> HeadForm:
    threads, suffix = WARP * (warps + 1), f"_columns_{rows}" + f"_by_{split}" * (split > 1)
    shared_bytes = 4 * (12336 + rows * (threads + 3 * HEAD_MOST_N + 4))
    title = "head by columns" + f" of clusters of {split}" * (split > 1)
    return HeadForm(
        "fused/column_head.cuh", "column_head", f"ColumnHead<{rows}, {split}>", rows, threads, shared_bytes, suffix,
        title, blocks=2 if rows == 8 else 1, split=split,
    )  # fmt: skip


COLUMN_HEAD, FEW_ROWS_HEAD, CLUSTER_HEAD = _column_head(8, 8), _column_head(2, 15), _column_head(2, 15, 8)
COLUMN_HEADS = (COLUMN_HEAD, FEW_ROWS_HEAD, CLUSTER_HEAD)

# RowHead of fused/row_head.cuh: its most columns of W, the floats that it has for them, and what of a row a warp has at
# once.
ROW_HEAD_MOST_N, _ROW_HEAD_ROOM, ROW_HEAD_DEPTH = 8, 9248, 256
ROW_HEAD = HeadForm(
    "fused/row_head.cuh", "row_head", "RowHead", 32, 8 * WARP, 4 * (_ROW_HEAD_ROOM + 4 * 8 * ROW_HEAD_MOST_N + 2 * 32),
    "_rows", "head by rows", blocks=2,
)  # fmt: skip
HEADS = (WHOLE_HEAD, *COLUMN_HEADS, ROW_HEAD)


def fits_row_head(k: int, n: int) -> bool:
    """Whether W (k, n) fits into the shared memory of a head by rows."""
    return n <= ROW_HEAD_MOST_N and n * (4 * WARP * ceil_div(k, 4 * WARP) + 4) <= _ROW_HEAD_ROOM


@dataclass(frozen=True)
class TargetReader:
    """How kernels read targets: ``index``, a class number for each row, or ``dense``, a number for each output."""

    kind: str
    textured: bool

    @property
    def source(self) -> str:
        """The C type of the targets."""
        return "Texture" if self.textured else "const float*"

    @property
    def struct(self) -> str:
        """The struct of math/targets.cuh that reads one."""
        return f"{TARGET_STRUCTS[self.kind]}<{self.source}>"

    @property
    def suffix(self) -> str:
        """The end of an entry's name."""
        return "" if self.textured else "_plain"

    def argument(self, n: str = "n") -> str:
        """The targets in a signature, of rows with so many outputs."""
        return f"{self.source} targets[{'rows' if self.kind == 'index' else f'rows,{n}'}]"


TARGET_STRUCTS = {"index": "Index", "dense": "DenseTarget"}

# What blocks leave of a batch's loss: their sums, of which the last block to arrive makes the totals.
LOSS_SUMS = "double* sums[grid.x,grid.y,2], inout unsigned* arrived[], double* totals[2], double* losses[2]"

# What a loss takes beside logits and targets, and what it leaves.
_WEIGHED = "const float* weights[rows], const float* mean[n], const float* scale[n], float* delta[rows,n], " + LOSS_SUMS


@dataclass(frozen=True)
class Team:
    """The threads that take a row of a loss or an output."""

    struct: str
    block_threads: int
    block_rows: int
    suffix: str

    def __str__(self) -> str:
        return "a warp per row" if self.block_rows > 1 else "a block per row"

    @property
    def block(self) -> str:
        """The struct of math/teams.cuh that a block is."""
        return f"TeamBlock<{self.struct}>"


WARP_TEAM = Team("WarpTeam", ROW_THREADS, ROW_THREADS // WARP, "")
WIDE_TEAM = Team("BlockTeam", 1024, 1, "_wide")


def loss(name: str, kind: str, *, textured: bool = True, team: Team = WARP_TEAM) -> Entry:
    """A loss and its derivative, of targets of a ``kind`` that are read through a texture object or not."""
    reader = TargetReader(kind, textured)
    signature = (
        f"{ROWS}, const int* order[rows], const float* logits[rows,n], {reader.argument()}, {_WEIGHED}, "
        "uint16_t* components[component_count,rows,n], int64_t component_stride, int component_count, int n"
    )
    function = f"loss<{camel(name)}, {reader.struct}, {team.struct}>"
    full = f"loss_{name}_{kind}{reader.suffix}{team.suffix}"
    return Entry(
        full, "elementwise/loss.cuh", function, arguments(signature), team.block_threads, SUM_BYTES,
        block=team.block, blocks=3 if team is WARP_TEAM else 1, loss_numbers=reads_numbers(name),
        prefetched=(("order", 0),), spill_bytes=96,  # of the widest rows that a warp keeps
    )  # fmt: skip


def total_error() -> Entry:
    signature = "const Step* step[0], const double* sums[count,2], int count, double* totals[2], double* losses[2]"
    return Entry(
        "total_error",
        "elementwise/loss.cuh",
        "total_error",
        arguments(signature),
        ROW_THREADS,
        SUM_BYTES,
        block="SumBlock",
    )


def step_errors() -> Entry:
    """The errors of steps, which follow a persistent kernel (:mod:`..persistent.kernel`)."""
    signature = "const Step* step[0], const float* errors[grid.x,capacity,2], int capacity, double* losses[grid.x,2]"
    return Entry(
        "step_errors",
        "elementwise/loss.cuh",
        "step_errors",
        arguments(signature),
        ROW_THREADS,
        SUM_BYTES,
        block="SumBlock",
    )


def output(function: str, *, team: Team = WARP_TEAM) -> Entry:
    signature = (
        f"{ROWS}, const float* logits[rows,n], const float* mean[n], const float* scale[n], float* y[rows,n], int n"
    )
    name, instance = f"output_{function}{team.suffix}", f"output<{camel(function)}Output, {team.struct}>"
    return Entry(
        name, "elementwise/loss.cuh", instance, arguments(signature), team.block_threads, SUM_BYTES, block=team.block
    )


def head(name: str, kind: str, *, textured: bool = True, form: HeadForm = WHOLE_HEAD, drops: bool = False) -> Entry:
    """The last dense layer, a loss, and dx, if it ``drops`` some through a dropout; arguments as of :func:`loss`."""
    reader = TargetReader(kind, textured)
    signature = (
        f"{ROWS}, const int* order[rows], const float* x[rows,k], const float* w[k,n], const float* b[n], "
        f"{reader.argument()}, {_WEIGHED.replace('grid.x,grid.y,2', 'grid.x,2')}, const float* saved[rows,k], "
        f"int activation, {DROPS}, float restore, float* dx[rows,k], "
        "uint16_t* dx_components[dx_component_count,rows,k], int64_t dx_stride, int dx_component_count, "
        "int* dx_row_scales[rows], int k, int n"
    )
    block = "" if form is WHOLE_HEAD else f", {form.block}"
    return Entry(
        f"head{DROPPED * drops}_{name}_{kind}{form.suffix}{reader.suffix}",
        form.header,
        f"{form.function}<{camel(name)}, {reader.struct}{block}, {str(drops).lower()}>",
        arguments(signature),
        form.threads,
        form.shared_bytes,
        block=form.block,
        blocks=form.blocks,
        cluster=form.split,
        needs="sm_90a" if form.split > 1 else "sm_75",
        spill_bytes=128 if drops else 56,  # around the epilogue; of others on sm_120 alone
        loss_numbers=reads_numbers(name),
        prefetched=tuple((name, 0) for name in ("order", "w", "b", "targets", "weights", "mean", "scale")),
        products=(DENSE_PRODUCT, replace(DENSE_PRODUCT, when=("dx", "dx_components"))),
    )


# Tail of fused/tail.cuh.
TAIL_THREADS, TAIL_MOST_WEIGHTS, TAIL_MOST_UNITS, TAIL_MOST_LAYERS = 1024, 10240, 1024, 32
# Of a first layer in parts whose sums a tail exchanges: columns; parts, which other launches add in the same order.
TAIL_MOST_PART_COLUMNS, TAIL_MOST_PARTS = 128, 8
TAIL_SHARED_BYTES = 4 * (TAIL_THREADS + TAIL_MOST_WEIGHTS + 3 * TAIL_MOST_UNITS + 5 * TAIL_MOST_LAYERS)


def tail(name: str, kind: str, *, textured: bool = True) -> Entry:
    """The layers behind a long first one, a loss, and the deltas; arguments as of :func:`loss`.

    Its launches tell the lengths ``units``, the outputs of all layers, ``outputs``, those of the last one, and of the
    layers behind the first the ``products`` of a row and the ``parameters`` that are read; of a first layer in parts
    the ``words`` of the table by which it exchanges their sums.
    """
    reader = TargetReader(kind, textured)
    signature = (
        f"{ROWS}, const int* order[rows], const float* partials[count,rows,n], const float* parameters[parameters], "
        f"const TailLayer* described[layer_count], int layer_count, {reader.argument('outputs')}, "
        "const float* weights[rows], const float* mean[outputs], const float* scale[outputs], float* y[rows,units], "
        f"float* dz[rows,units], {LOSS_SUMS}, int count, int capacity, int n, const int64_t* exchange[words], "
        "const uint32_t* aborted[1], inout unsigned char* memory[bytes]"
    )
    function = f"tail<{camel(name)}, {reader.struct}>"
    return Entry(
        f"tail_{name}_{kind}{reader.suffix}", "fused/tail.cuh", function, arguments(signature), TAIL_THREADS,
        TAIL_SHARED_BYTES, block="Tail",
        spill_bytes=40 if name == "focal" else 0,  # around powf, in the one warp that computes the loss
        loss_numbers=reads_numbers(name),
        products=2 * (Product(("rows", "products")),),
    )  # fmt: skip


def part_sums_words(parts: int) -> int:
    """The words of the table by which a tail exchanges sums, ``PartSums`` of fused/part_sums.cuh."""
    return 3 + parts


def activation_number(name: str) -> int:
    """The index of an activation in its table, by which kernels know it that serve all activations."""
    return list(ACTIVATIONS).index(name)


def loss_entries() -> list[Entry]:
    """The entries of all losses and outputs."""
    entries = []
    for name, row in FORMS.items():
        for kind, textured in product(row.targets, (True, False)):
            entries += [make(name, kind, textured=textured) for make in (loss, tail)]
            for form, drops in product(HEADS, (False, True)):
                entries.append(head(name, kind, textured=textured, form=form, drops=drops))
            entries.append(loss(name, kind, textured=textured, team=WIDE_TEAM))
    outputs = (output(function, team=team) for function in OUTPUTS for team in (WARP_TEAM, WIDE_TEAM))
    return [*entries, total_error(), step_errors(), *outputs]
