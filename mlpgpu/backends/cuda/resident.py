"""Whether a plan trains inside one kernel that keeps the network on the chip, and how it is cut up for that.

``resident.cuh`` is that kernel: each block holds a tile of every layer's weights, and does what lies between
products for some rows of the batch.  :func:`design` decides from the plan, the card's multiprocessors and its
shared memory alone, and gives plain data: the cut of each layer, the bytes of everything, the kernel's entry.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ... import plan as ops
from ...plan import Plan
from ...random import Purpose
from . import kernels
from .kernels import Entry, arguments, camel, ceil_div
from .launches import MOST_RUN_STEPS, At, Launch, Value

IS_USED = True  # False: every plan trains launch by launch
THREADS = 512  # of a block
WARP, WARPS = kernels.WARP, THREADS // kernels.WARP
MOST_ROWS = 1024  # of a batch: what a step's rows leave of the loss is kept for every step of a launch
MOST_COLUMNS = 12  # of a tile: a thread keeps two rows of them in registers
MOST_COPIED = 8192  # weights of a layer of which each block holds a copy
MOST_COPIED_IN_ALL = 16384
MEMORY_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)  # of a block's memory, for one layer

# What the choice of tiles weighs, in clocks of a multiprocessor: multiply-adds, and words from other blocks.
MULTIPLY_ADDS_PER_CLOCK, WORDS_PER_CLOCK = 128, 8


def round_up(a: int, b: int) -> int:
    """The next multiple of ``b``."""
    return ceil_div(a, b) * b


def row_warps(rows: int) -> int:
    """How many warps a product's rows take: a lane has one row, or two of more than 32."""
    return ceil_div(rows, (2 if rows > WARP else 1) * WARP)


def staged_rows(rows: int) -> int:
    """Rows that these warps go through."""
    return row_warps(rows) * (2 if rows > WARP else 1) * WARP


@dataclass(frozen=True)
class Dropout:
    """What the kernel knows of a dropout: its layer's place, for the address of random words, and its rate."""

    layer: int
    rate: float

    def __str__(self) -> str:
        (keep,) = struct.unpack("<I", struct.pack("<f", 1.0 / (1.0 - self.rate)))
        return f"Dropped<{self.layer}, {math.ceil(self.rate * 2**53)}ull, {keep}u>"


@dataclass(frozen=True)
class Cut:
    """A layer's weights with the biases as a last line, ``lines`` by ``n_out``, cut into tiles by slices each way."""

    lines: int
    n_out: int
    line_slices: int
    column_slices: int

    @property
    def tiles(self) -> int:
        return self.line_slices * self.column_slices

    @property
    def quads(self) -> int:
        """The most lines of a tile, in fours."""
        return ceil_div(ceil_div(self.lines, 4), self.line_slices)

    @property
    def columns(self) -> int:
        """The most columns of a tile."""
        return ceil_div(self.n_out, self.column_slices)

    @property
    def pitch(self) -> int:
        """Of a line of a tile in shared memory."""
        return round_up(self.columns, 4)

    @property
    def floats(self) -> int:
        """Of a tile in shared memory."""
        return self.quads * (4 * self.pitch + 4)

    def shared_floats(self, rows: int, slots: int, is_first: bool) -> int:
        """What grows with the tile: weights, slots, inputs (of the first layer two batches), dZ."""
        inputs = (2 if is_first else 1) * rows * self.input_pitch
        return (1 + slots) * self.floats + inputs + rows * self.pitch

    @property
    def input_pitch(self) -> int:
        """Of a row of the tile's inputs in shared memory."""
        return 4 * (self.quads | 1)

    def line_parts(self, rows: int) -> int:
        """Into how many parts warps cut the tile's lines for Z."""
        return min(self.quads, max(1, WARPS // row_warps(rows)))

    def groups(self, rows: int) -> int:
        """In how many groups of rows the tile's dW is summed."""
        lanes = 1 << (self.quads - 1).bit_length()
        return min(ceil_div(rows, 4), THREADS // 2 // lanes)


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer of a resident network, with the dropout after it: ``ResidentDense`` of resident.cuh."""

    n_in: int
    has_bias: bool
    activation: str
    saves_z: bool
    dropout: Dropout | None
    is_replicated: bool
    cut: Cut
    first_block: int

    def __str__(self) -> str:
        flags = [str(flag).lower() for flag in (self.has_bias, self.saves_z, self.is_replicated)]
        cut = self.cut
        return (
            f"ResidentDense<{self.n_in}, {cut.n_out}, {flags[0]}, {camel(self.activation)}, {flags[1]}, "
            f"{self.dropout or 'NotDropped'}, {flags[2]}, {cut.line_slices}, {cut.column_slices}, {self.first_block}>"
        )


@dataclass(frozen=True)
class Design:
    """A plan's resident kernel.

    Attributes:
        rows: the most of a batch.
        blocks: of the grid, all of which run at once.
        scaled: the names of the mean and the scale of standardized inputs, and of targets, or None.
    """

    rows: int
    blocks: int
    layers: tuple[DenseLayer, ...]
    input_dropout: Dropout | None
    loss: str
    target_kind: str
    optimizer: str
    slots: int
    scaled_inputs: tuple[At, At] | None
    scaled_targets: tuple[At, At] | None

    @property
    def own_rows(self) -> int:
        """The most rows of a block."""
        return ceil_div(self.rows, self.blocks)

    @cached_property
    def shared_bytes(self) -> int:
        """Of a block: laid out as ``Place`` and ``BatchPlace`` of resident_memory.cuh are."""
        floats = 0
        for place, layer in enumerate(self.layers):
            cut = layer.cut
            floats += cut.shared_floats(self.rows, self.slots, place == 0)
            floats += round_up(cut.lines * (cut.n_out | 1), 4) if layer.is_replicated else 0
            floats += 3 * round_up(self.own_rows * cut.n_out, 4)
        targets = 1 if self.target_kind == "index" else self.layers[-1].cut.n_out
        floats += 2 * round_up(2 * self.rows, 4) + round_up(2 * self.own_rows * targets, 4)
        cuts = [layer.cut for layer in self.layers]
        z = max(cut.line_parts(self.rows) * self.rows * (cut.pitch + 4) for cut in cuts)
        return 4 * (floats + max(z, sum(cut.groups(self.rows) * cut.floats for cut in cuts)))

    @cached_property
    def mail_words(self) -> int:
        """Between blocks: laid out as ``Mail`` of resident_memory.cuh is."""
        words = 0
        for place, layer in enumerate(self.layers):
            cut = layer.cut
            if layer.is_replicated:
                words += cut.lines * cut.n_out
            else:
                words += self.rows * cut.line_slices * cut.n_out
                words += self.rows * cut.column_slices * layer.n_in if place else 0
            words += self.rows * cut.n_out * (1 if place == len(self.layers) - 1 else 2)
        return 2 * words

    @property
    def bytes(self) -> dict[str, int]:
        """Of each array that the kernel takes beside the launches' own."""
        return {"mail": 8 * self.mail_words, "row errors": 8 * self.rows * MOST_RUN_STEPS}

    def train(self, source: str, *, textured: bool) -> Launch:
        """The launch that trains; ``steps`` and ``tag`` change from one to the next."""
        entry = self._entry(source, textured)
        mean, scale = self.scaled_inputs or (None, None)
        target_mean, target_scale = self.scaled_targets or (None, None)
        values: dict[str, Value] = {
            "step": At("step"), "steps": At("steps"), "tag": At("tag"), "order": At("order"), "inputs": At("data"),
            "scale": At("scale"), "mean": mean, "deviation": scale, "targets": At("targets"),
            "weights": At("weights"), "target_mean": target_mean, "target_scale": target_scale, "seed": At("seed"),
            "purpose": int(Purpose.DROPOUT), "parameters": At("parameters"),
            "slots": At("slots") if self.slots else None, "mail": At("mail"), "errors": At("row errors"),
        }  # fmt: skip
        return Launch(entry, (self.blocks, 1, 1), values)

    def add_errors(self, steps: int) -> Launch:
        """The launch that follows so many steps."""
        values: dict[str, Value] = {
            "step": At("step"), "errors": At("row errors"), "capacity": self.rows, "losses": At("losses"),
        }  # fmt: skip
        return Launch(kernels.step_errors(), (steps, 1, 1), values)

    def _entry(self, source: str, textured: bool) -> Entry:
        ctype, texels = kernels.SOURCES[source], "Texture" if textured else "const float*"
        target = {"index": "Index", "dense": "DenseTarget"}[self.target_kind]
        layers = ", ".join(map(str, self.layers))
        head = f"{self.rows}, {self.blocks}, {str(self.scaled_inputs is not None).lower()}"
        network = f"ResidentNetwork<{head}, {self.input_dropout or 'NotDropped'}, {layers}>"
        is_changed = self.scaled_inputs is not None or self.input_dropout is not None
        inputs = "OwnInputs" if is_changed or source != "float32" or self.layers[0].n_in % 4 else "AsyncInputs"
        function = (
            f"resident<{network}, {camel(self.loss)}, {target}, {texels}, {self.optimizer}Rule, {ctype}, {inputs}, "
            f"{self.shared_bytes}, {self.mail_words}>"
        )
        signature = (
            f"const Step* step, int steps, uint32_t tag, const int* order, const {ctype}* inputs, float scale, "
            f"const float* mean, const float* deviation, {texels} targets, const float* weights, "
            "const float* target_mean, const float* target_scale, uint64_t seed, uint64_t purpose, "
            "float* parameters, float* slots, uint64_t* mail, float* errors"
        )
        widths = "_".join(str(width) for width in (self.layers[0].n_in, *(layer.cut.n_out for layer in self.layers)))
        name = f"resident_{widths}_{zlib.crc32(function.encode()):08x}"
        shared = self.shared_bytes
        # A few words around the loops: of 512 threads each has 128 registers.
        return Entry(
            name, "resident.cuh", function, arguments(signature), THREADS, shared, cooperative=True, spill_bytes=256,
            constants=True,
        )  # fmt: skip


def design(plan: Plan, *, multiprocessors: int, shared_bytes: int) -> Design | str:
    """The resident kernel of a plan, or why it has none.

    Args:
        shared_bytes: the most that a block may have.
    """
    if not IS_USED:
        return "resident kernels are switched off"
    if plan.optimizer is None or plan.loss is None or plan.target_kind is None:
        return "there is no training step"
    if plan.reduction != "ordered":
        return "sums are atomic"
    if plan.shares > 1:
        return "the batch is split over streams"
    if plan.optimizer.clip_norm is not None:
        return "the gradient's norm is clipped"
    if plan.capacity > MOST_ROWS:
        return f"a batch of {plan.capacity} rows is larger than {MOST_ROWS}"
    found = _layers_of(plan)
    if isinstance(found, str):
        return found
    widest = max(dense.n_out for dense in found.dense)
    if ceil_div(widest, MOST_COLUMNS) > multiprocessors:
        return f"a layer of {widest} units is too wide for {multiprocessors} multiprocessors"
    # Tiles are chosen for speed, then, where they do not fit together, each among those of less and less memory.
    why = f"a tile of its weights, with {plan.capacity} rows of inputs, takes more than {shared_bytes:,} bytes"
    for part in MEMORY_PARTS:
        made = _choose(plan, found, multiprocessors, shared_bytes // part)
        if made is None:
            break
        if made.shared_bytes <= shared_bytes:
            return made
        why = f"a block would need {made.shared_bytes:,} bytes of shared memory, and has {shared_bytes:,}"
    return why


def _choose(plan: Plan, found: _Found, blocks: int, most_bytes: int) -> Design | None:
    """The design whose layers are the fastest of those that take at most so many bytes each, if there are any."""
    assert plan.optimizer is not None and plan.loss is not None and plan.target_kind is not None
    rows, slots, copied = plan.capacity, len(plan.optimizer.slots), 0
    chosen: list[tuple[_Dense, bool, Cut]] = []
    for place, dense in enumerate(found.dense):
        size = dense.lines * dense.n_out
        is_replicated = place > 0 and size <= MOST_COPIED and copied + size <= MOST_COPIED_IN_ALL
        copied += size if is_replicated else 0
        cuts = [cut for cut in _cuts(dense, blocks) if 4 * cut.shared_floats(rows, slots, place == 0) <= most_bytes]
        if not cuts:
            return None
        clocks = [_clocks(cut, dense.n_in, rows, blocks, place == 0, is_replicated) for cut in cuts]
        chosen.append((dense, is_replicated, cuts[clocks.index(min(clocks))]))
    blocks = min(blocks, max(rows, sum(cut.tiles for _, _, cut in chosen)))
    firsts = accumulate((cut.tiles for _, _, cut in chosen), initial=0)
    layers = tuple(
        DenseLayer(d.n_in, d.has_bias, d.activation, d.saves_z, d.dropout, is_replicated, cut, first % blocks)
        for (d, is_replicated, cut), first in zip(chosen, firsts, strict=False)
    )
    return Design(
        rows, blocks, layers, found.input_dropout, plan.loss, plan.target_kind, type(plan.optimizer).__name__, slots,
        found.scaled_inputs, found.scaled_targets,
    )  # fmt: skip


# --- reading the plan ---


@dataclass
class _Dense:
    n_in: int
    n_out: int
    has_bias: bool
    activation: str
    saves_z: bool
    dropout: Dropout | None = None

    @property
    def lines(self) -> int:
        return self.n_in + self.has_bias


@dataclass
class _Found:
    dense: list[_Dense]
    input_dropout: Dropout | None = None
    scaled_inputs: tuple[At, At] | None = None
    scaled_targets: tuple[At, At] | None = None


def _layers_of(plan: Plan) -> _Found | str:
    """What the forward operations are, if they are a stack of dense layers with nothing unusual between."""
    statistics = {s.name: At("statistics", s.offset) for s in plan.statistics}
    segments = {p.name: p for p in plan.parameters}
    found, end = _Found([]), 0
    for op in plan.training:
        if isinstance(op, ops.Loss):
            break
        if isinstance(op, ops.Standardize):
            scaled = statistics[op.mean], statistics[op.scale]
            if op.x == "target":
                found.scaled_targets = scaled
            elif found.dense or found.input_dropout or found.scaled_inputs:
                return "inputs are standardized twice, or after a dropout"
            else:
                found.scaled_inputs = scaled
        elif isinstance(op, ops.Dropout):
            dropped = Dropout(op.layer, op.rate)
            if (found.dense[-1].dropout if found.dense else found.input_dropout) is not None:
                return "a dropout follows another"
            if found.dense:
                found.dense[-1].dropout = dropped
            else:
                found.input_dropout = dropped
        elif isinstance(op, ops.Dense):
            weight, bias = segments[op.weight], segments[op.bias] if op.bias else None
            if weight.offset != end:
                return "layers share their weights"
            end = (bias or weight).end
            n_in, n_out = weight.shape
            found.dense.append(_Dense(n_in, n_out, bias is not None, op.activation, op.z is not None))
        elif not isinstance(op, ops.Gather):
            return f"it holds {type(op).__name__}"
    return found if found.dense else "nothing is trained"


# --- choosing tiles ---


def _cuts(dense: _Dense, blocks: int) -> list[Cut]:
    """All into at most so many tiles, fewer tiles first."""
    quads, fewest = ceil_div(dense.lines, 4), ceil_div(dense.n_out, MOST_COLUMNS)
    cuts = [
        Cut(dense.lines, dense.n_out, line_slices, column_slices)
        for column_slices in range(fewest, min(dense.n_out, blocks) + 1)
        for line_slices in range(1, min(quads, blocks // column_slices) + 1)
    ]
    return sorted((cut for cut in cuts if cut.quads <= THREADS // 2), key=lambda cut: cut.tiles)


def _clocks(cut: Cut, n_in: int, rows: int, blocks: int, is_first: bool, is_replicated: bool) -> float:
    """About what a step of the layer takes a multiprocessor."""
    lines, own_rows = 4 * cut.quads, ceil_div(rows, blocks)
    products = rows * lines * cut.pitch
    # Of the first layer these are not words but plain numbers, which come beside other work.
    received = rows * cut.columns + rows * lines / (4 if is_first else 2)
    if not is_replicated:
        products += staged_rows(rows) * 4 * round_up(cut.quads, cut.line_parts(rows)) * cut.pitch
        received += own_rows * cut.line_slices * cut.n_out
        if not is_first:
            products += rows * lines * cut.pitch
            received += own_rows * cut.column_slices * n_in
    return products / MULTIPLY_ADDS_PER_CLOCK + received / WORDS_PER_CLOCK
