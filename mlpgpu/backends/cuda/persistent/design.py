"""Whether a plan trains inside one kernel that keeps the network on the chip, and how it is cut up for that.

``persistent/persistent.cuh`` is that kernel: each block holds a tile of every layer's weights, and does what lies
between products for some rows of the batch.  :func:`design` decides from the plan, the card's multiprocessors and its
shared memory alone, and gives plain data: the cut of each layer, the bytes of everything, the kernel's entry.
"""

from __future__ import annotations

import math
import struct
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from .... import plan as ops
from ....plan import Plan
from ....random import Purpose
from .. import kernels
from ..kernels import Entry, arguments, camel, ceil_div
from ..kernels.launches import MOST_RUN_STEPS, At, Launch, Value

IS_USED = True  # False: every plan trains launch by launch
BFLOATS = -1  # for a number of tf32: operands of the first layer's products are bfloat16
MANY_ROWS = 96  # of which Z is not made in parts
THREADS, COURIERS = 512, 128  # of a block: those that compute, and those that fetch the next step's batch
RATES = 3  # of a step: COLUMNS of elementwise/update.cuh
WARP, WARPS = kernels.WARP, THREADS // kernels.WARP
MOST_ROWS = 1024  # of a batch: what a step's rows leave of the loss is kept for every step of a launch
MOST_COLUMNS, MOST_ADDED_COLUMNS = 16, 12  # of a tile: on tensor cores, and by multiply-adds, in registers
MOST_COPIED = 8192  # weights of a layer of which each block holds a copy
MOST_COPIED_IN_ALL = 16384
KEPT_BLOCKS = 4  # at most, for the tiles of such layers
MEMORY_SHARES = (16, 13, 10, 8, 6, 5, 4, 3, 2, 1)  # of 16 of a block's memory, for one layer

# What the choice of tiles weighs, in clocks of a multiprocessor: multiply-adds, and words from and to other blocks.
MULTIPLY_ADDS_PER_CLOCK, WORDS_PER_CLOCK = 64, 2


def round_up(a: int, b: int) -> int:
    """The next multiple of ``b``."""
    return ceil_div(a, b) * b


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
    """A layer's weights with the biases as a last line, ``lines`` by ``n_out``, cut into tiles by slices each way.

    Slices begin at multiples of four, a *quad*.
    """

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
        return 4 * ceil_div(ceil_div(self.n_out, 4), self.column_slices)

    @property
    def out_pitch(self) -> int:
        """Of a row of outputs among others: words go from block to block in pairs."""
        return round_up(self.n_out, 2)

    @property
    def copy_pitch(self) -> int:
        """Of a line of a replicated layer's copy: an odd multiple of two."""
        return self.out_pitch | 2

    @property
    def input_pitch(self) -> int:
        """Of a row of the tile's inputs in shared memory."""
        return round_up(4 * self.quads, 8) + 4

    @property
    def floats(self) -> int:
        """Of a tile in shared memory."""
        return round_up(self.quads, 2) * (4 * (24 if self.columns > 8 else 8) + 4)

    @property
    def sum_pitch(self) -> int:
        """Of a row of a part of Z in shared memory."""
        return self.columns + 4


@dataclass(frozen=True)
class Products(ABC):
    """How a block's threads share the products of a tile, in about how many clocks."""

    cut: Cut
    rows: int

    def operand_floats(self, batches: int) -> int:
        """Of what products read beside the weights, in float32: inputs of so many batches, dZ."""
        return round_up(self.rows, 8) * (batches * self.input_pitch + 4 * (self.cut.columns // 4 | 1)) + 8

    def shared_floats(self, slots: int, is_first: bool) -> int:
        """What grows with the tile: weights, slots, inputs (of the first layer two batches), dZ."""
        return (1 + slots) * self.cut.floats + self.operand_floats(2 if is_first else 1)

    @property
    def input_pitch(self) -> int:
        """Of a row of the tile's inputs in shared memory."""
        return self.cut.input_pitch

    input_bytes = 4  # of an element

    @property
    @abstractmethod
    def z_parts(self) -> int:
        """Into how many parts a tile's lines are cut."""

    @property
    @abstractmethod
    def dw_parts(self) -> int:
        """Into how many parts rows are cut."""

    @property
    @abstractmethod
    def z_clocks(self) -> float: ...

    @property
    @abstractmethod
    def dw_clocks(self) -> float: ...

    def sums(self, is_replicated: bool) -> int:
        """What threads leave each other to be added up, in floats: parts of Z, if tiles make it, then of dW."""
        z = 0 if is_replicated or self.z_parts == 1 else self.z_parts * self.rows * self.cut.sum_pitch
        return max(z, 0 if self.dw_parts == 1 else self.dw_parts * self.cut.floats)


@dataclass(frozen=True)
class MultiplyAdds(Products):
    """What bounds them is what they read of shared memory, a word of each lane a clock."""

    @property
    def _row_warps(self) -> int:
        return ceil_div(self.rows, (2 if self.rows > WARP else 1) * WARP)

    @property
    def z_parts(self) -> int:
        return min(self.cut.quads, max(1, WARPS // self._row_warps))

    @property
    def dw_parts(self) -> int:
        return min(ceil_div(self.rows, 4), 14, THREADS // (1 << (self.cut.quads - 1).bit_length()))

    @property
    def z_clocks(self) -> float:
        rows_and_columns = (2 if self.rows > WARP else 1) + self.cut.columns
        return 4 * round_up(self.cut.quads, self.z_parts) * self._row_warps * rows_and_columns

    @property
    def dw_clocks(self) -> float:
        return self.rows * ceil_div(self.cut.quads, WARP) * (4 + self.cut.columns)


@dataclass(frozen=True)
class TensorCores(Products):
    """What bounds them is that a warp issues an instruction every fourth clock or so."""

    @property
    def z_parts(self) -> int:
        if self.rows >= MANY_ROWS:
            return 1
        return self._parts(ceil_div(self.rows, 16), ceil_div(4 * self.cut.quads, 8))

    @property
    def dw_parts(self) -> int:
        return self._parts(ceil_div(4 * self.cut.quads, 16), ceil_div(self.rows, 8))

    @staticmethod
    def _parts(sixteens: int, steps: int) -> int:
        return min(steps, max(1, WARPS // sixteens))

    @property
    def z_clocks(self) -> float:
        return self._clocks(ceil_div(self.rows, 16), ceil_div(4 * self.cut.quads, 8))

    @property
    def dw_clocks(self) -> float:
        return self._clocks(ceil_div(4 * self.cut.quads, 16), ceil_div(self.rows, 8))

    def _clocks(self, sixteens: int, steps: int) -> float:
        parts = self._parts(sixteens, steps)
        of_a_warp = ceil_div(sixteens, WARPS // parts) * ceil_div(steps, parts)
        return 4 * of_a_warp * (20 + 12 * ceil_div(self.cut.columns, 8))


def most_columns(numbers: int) -> int:
    """Of a tile."""
    return MOST_COLUMNS if numbers else MOST_ADDED_COLUMNS


@dataclass(frozen=True)
class Bfloats(TensorCores):
    """Tensor cores' of operands that lie in shared memory as bfloat16."""

    input_bytes = 2

    @property
    def z_parts(self) -> int:
        return 1

    @property
    def dw_parts(self) -> int:
        return 1

    @property
    def input_pitch(self) -> int:
        return round_up(4 * self.cut.quads, 16) + 8

    def operand_floats(self, batches: int) -> int:
        pitch = 8 if self.cut.columns <= 8 else 24  # of weights and of dZ
        inputs = batches * round_up(self.rows, 16) * self.input_pitch
        return (inputs + pitch * (round_up(4 * self.cut.quads, 32) + round_up(self.rows, 32))) // 2 + 8


def _products(cut: Cut, rows: int, numbers: int, is_first: bool) -> Products:
    """By multiply-adds, or on tensor cores with so many numbers of tf32 for an operand, or with bfloat16."""
    if numbers == BFLOATS and is_first:
        return Bfloats(cut, rows)
    return TensorCores(cut, rows) if numbers else MultiplyAdds(cut, rows)


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer of a resident network, with the dropout after it: ``ResidentDense`` of
    persistent/persistent.cuh."""

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
        numbers: of tf32 that an operand of a tile's products is taken as; 0: products are multiply-adds.
        has_copy_engine: whether that brings inputs.
        scaled: the names of the mean and the scale of standardized inputs, and of targets, or None.
    """

    rows: int
    blocks: int
    numbers: int
    has_copy_engine: bool
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
        """Of a block: laid out as ``Place`` and ``BatchPlace`` of persistent/memory.cuh are."""
        floats = 0
        for place, layer in enumerate(self.layers):
            cut = layer.cut
            floats += _products(cut, self.rows, self.numbers, place == 0).shared_floats(self.slots, place == 0)
            floats += round_up(cut.lines * cut.copy_pitch, 4) if layer.is_replicated else 0
            floats += 3 * round_up(self.own_rows * cut.out_pitch, 4)
        targets = 1 if self.target_kind == "index" else self.layers[-1].cut.n_out
        floats += 4 + round_up(2 * self.rows, 4) + round_up(2 * self.own_rows * targets, 4)
        floats += 2 * (RATES + 1)
        floats += (WARPS + 2) * WARP // 2 if self._turns else 0
        sums = (
            _products(each.cut, self.rows, self.numbers, place == 0).sums(each.is_replicated)
            for place, each in enumerate(self.layers)
        )
        return 4 * (floats + max(sums))

    @property
    def _turns(self) -> bool:
        """Whether rows turn back in one stage: ``ResidentNetwork::turns`` of persistent/shape.cuh."""
        *below, last = self.layers
        return (
            bool(below)
            and self.own_rows == 1
            and last.is_replicated
            and last.cut.n_out <= WARP // 2
            and round_up(last.n_in, 2) // 2 <= THREADS
        )

    @property
    def dealt_bytes(self) -> int:
        """Of the inputs of three batches, cut up for the tiles: ``Dealt`` of persistent/inputs.cuh."""
        cut = self.layers[0].cut
        products = _products(cut, self.rows, self.numbers, True)
        return 3 * cut.line_slices * self.rows * products.input_pitch * products.input_bytes

    @cached_property
    def mail_words(self) -> int:
        """Between blocks: laid out as ``Mail`` of persistent/memory.cuh is."""
        words = 0
        for place, layer in enumerate(self.layers):
            cut = layer.cut
            if layer.is_replicated:
                words += cut.lines * cut.out_pitch
            else:
                words += self.rows * cut.line_slices * cut.out_pitch
                words += self.rows * cut.column_slices * round_up(layer.n_in, 2) if place else 0
            is_short = self.numbers == BFLOATS and place == 0
            words += self.rows * (round_up(cut.out_pitch // 2, 2) if is_short else cut.out_pitch)
            words += self.rows * cut.out_pitch if place < len(self.layers) - 1 else 0
        return 2 * words + round_up(self.blocks, 2)

    @property
    def bytes(self) -> dict[str, int]:
        """Of each array that the kernel takes beside the launches' own."""
        return {"mail": 8 * self.mail_words, "dealt": self.dealt_bytes, "row errors": 8 * self.rows * MOST_RUN_STEPS}

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
            "slots": At("slots") if self.slots else None, "mail": At("mail"), "dealt": At("dealt"),
            "errors": At("row errors"),
        }  # fmt: skip
        return Launch(entry, (self.blocks, 1, 1), values)

    def add_errors(self, steps: int) -> Launch:
        """The launch that follows so many steps."""
        values: dict[str, Value] = {
            "step": At("step"), "errors": At("row errors"), "capacity": self.rows, "losses": At("losses"),
        }  # fmt: skip
        return Launch(kernels.step_errors(), (steps, 1, 1), values)

    @property
    def _needs(self) -> str:
        """The oldest architecture that has the kernel's instructions."""
        return "sm_90" if self.has_copy_engine else "sm_80" if self.numbers else "sm_75"

    def _entry(self, source: str, textured: bool) -> Entry:
        ctype, texels = kernels.SOURCES[source], "Texture" if textured else "const float*"
        target = {"index": "Index", "dense": "DenseTarget"}[self.target_kind]
        layers = ", ".join(map(str, self.layers))
        flags = ", ".join(str(flag).lower() for flag in (self.has_copy_engine, self.scaled_inputs is not None))
        head = f"{self.rows}, {self.blocks}, {self.numbers}, {flags}"
        network = f"ResidentNetwork<{head}, {self.input_dropout or 'NotDropped'}, {layers}>"
        function = (
            f"resident<{network}, {camel(self.loss)}, {target}, {texels}, {self.optimizer}Rule, {ctype}, "
            f"{self.shared_bytes}, {self.mail_words}>"
        )
        signature = (
            f"const Step* step, int steps, uint32_t tag, const int* order, const {ctype}* inputs, float scale, "
            f"const float* mean, const float* deviation, {texels} targets, const float* weights, "
            "const float* target_mean, const float* target_scale, uint64_t seed, uint64_t purpose, "
            "float* parameters, float* slots, uint64_t* mail, void* dealt, float* errors"
        )
        widths = "_".join(str(width) for width in (self.layers[0].n_in, *(layer.cut.n_out for layer in self.layers)))
        name = f"resident_{widths}_{zlib.crc32(function.encode()):08x}"
        shared = self.shared_bytes
        # A few words around the loops: of so many threads each has 96 registers.
        return Entry(
            name, "persistent/persistent.cuh", function, arguments(signature), THREADS + COURIERS, shared,
            cooperative=True, spill_bytes=256, constants=True, needs=self._needs,
        )  # fmt: skip


def design(plan: Plan, *, multiprocessors: int, shared_bytes: int, arch: str) -> Design | str:
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
    if plan.shards > 1:
        return "the batch is split over streams"
    if plan.optimizer.clip_norm is not None:
        return "the gradient's norm is clipped"
    if plan.capacity > MOST_ROWS:
        return f"a batch of {plan.capacity} rows is larger than {MOST_ROWS}"
    found = _layers_of(plan)
    if isinstance(found, str):
        return found
    numbers = {"float32-ieee": 0, "float32": 2, "tf32": 1, "bfloat16": BFLOATS}[plan.precision]
    if kernels.architecture(arch) < kernels.architecture("sm_80"):
        numbers = 0
    has_copy_engine = kernels.architecture(arch) >= kernels.architecture("sm_90")
    widest = max(dense.n_out for dense in found.dense)
    if ceil_div(widest, most_columns(numbers)) > multiprocessors:
        return f"a layer of {widest} units is too wide for {multiprocessors} multiprocessors"
    # Tiles are chosen for speed, then, where they do not fit together, each among those of less and less memory.
    why = f"a tile of its weights, with {plan.capacity} rows of inputs, takes more than {shared_bytes:,} bytes"
    for sixteenths in MEMORY_SHARES:
        made = _choose(plan, found, multiprocessors, shared_bytes * sixteenths // 16, numbers, has_copy_engine)
        if made is None:
            break
        if made.shared_bytes <= shared_bytes:
            return made
        why = f"a block would need {made.shared_bytes:,} bytes of shared memory, and has {shared_bytes:,}"
    return why


def _choose(
    plan: Plan, found: _Found, blocks: int, most_bytes: int, numbers: int, has_copy_engine: bool
) -> Design | None:
    """The design whose layers are the fastest of those that take at most so many bytes each, if there are any."""
    assert plan.optimizer is not None and plan.loss is not None and plan.target_kind is not None
    rows, slots, copied = plan.capacity, len(plan.optimizer.slots), 0
    replicated = []
    for place, dense in enumerate(found.dense):
        size = dense.lines * dense.n_out
        replicated.append(place > 0 and size <= MOST_COPIED and copied + size <= MOST_COPIED_IN_ALL)
        copied += size if replicated[-1] else 0
    # Tiles of replicated layers come last: on blocks without others they cost no time, for rows wait for tiled layers.
    widest = max(dense.n_out for dense in found.dense)
    kept = min(KEPT_BLOCKS, blocks // 8, blocks - ceil_div(widest, most_columns(numbers))) if any(replicated) else 0
    cuts: dict[int, Cut] = {}
    first_blocks: dict[int, int] = {}
    taken, busy = 0, 0.0
    for place in sorted(range(len(replicated)), key=replicated.__getitem__):
        dense, is_replicated = found.dense[place], replicated[place]
        best = math.inf
        for cut in _cuts(dense, blocks if is_replicated else blocks - kept, most_columns(numbers)):
            products = _products(cut, rows, numbers, place == 0)
            floats = products.shared_floats(slots, place == 0) + products.sums(is_replicated)
            if 4 * floats > most_bytes:
                continue
            clocks = _clocks(cut, dense.n_in, rows, blocks, place == 0, is_replicated, numbers)
            clocks += busy if is_replicated and taken + cut.tiles > blocks else 0.0
            if clocks < best:
                best, cuts[place] = clocks, cut
        if place not in cuts:
            return None
        first_blocks[place], taken = taken, taken + cuts[place].tiles
        busy = max(busy, best)
    blocks = min(blocks, max(rows, taken))
    layers = tuple(
        DenseLayer(
            dense.n_in, dense.has_bias, dense.activation, dense.saves_z, dense.dropout, replicated[place], cuts[place],
            first_blocks[place] % blocks,
        )
        for place, dense in enumerate(found.dense)
    )  # fmt: skip
    return Design(
        rows, blocks, numbers, has_copy_engine, layers, found.input_dropout, plan.loss, plan.target_kind,
        type(plan.optimizer).__name__, slots, found.scaled_inputs, found.scaled_targets,
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


def _cuts(dense: _Dense, blocks: int, most_columns: int) -> list[Cut]:
    """All into at most so many tiles, fewer tiles first."""
    line_quads, column_quads = ceil_div(dense.lines, 4), ceil_div(dense.n_out, 4)
    cuts = [
        Cut(dense.lines, dense.n_out, line_slices, column_slices)
        for column_slices in range(ceil_div(dense.n_out, most_columns), min(column_quads, blocks) + 1)
        for line_slices in range(1, min(line_quads, blocks // column_slices) + 1)
    ]
    return sorted((cut for cut in cuts if cut.quads <= THREADS // 2), key=lambda cut: cut.tiles)


def _clocks(cut: Cut, n_in: int, rows: int, blocks: int, is_first: bool, is_replicated: bool, numbers: int) -> float:
    """About what a step of the layer takes a multiprocessor."""
    own_rows, lines = ceil_div(rows, blocks), 4 * cut.quads
    products = _products(cut, rows, numbers, is_first)
    clocks = products.dw_clocks
    words = rows * cut.columns + rows * lines / (
        4 if is_first else 1
    )  # dZ, and inputs: of the data no words but floats
    if not is_replicated:
        clocks += products.z_clocks
        words += rows * cut.columns + own_rows * cut.line_slices * cut.n_out
        if not is_first:
            clocks += rows * lines * cut.columns / MULTIPLY_ADDS_PER_CLOCK
            words += rows * lines + own_rows * cut.column_slices * n_in
    return clocks + words / WORDS_PER_CLOCK
