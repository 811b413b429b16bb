"""Steps by blocks of rows: ``fused/row_step.cuh``, and on tensor cores ``fused/tensor_row_step.cuh``.

Inputs that are too long for a block's memory are those of a layer apart, ``fused/input_layer.cuh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import gcd

from ....activations import ACTIVATIONS
from ....losses import FORMS
from ...sources import camel
from .dense import FORMAT_OF_COMPONENTS
from .entry import ROW_THREADS, ROWS, SOURCES, WARP, Entry, Product, arguments, ceil_div
from .losses import LOSS_SUMS, TargetReader, reads_numbers
from .updates import RULES, slot_count

# RowStepShape of fused/row_step.cuh.
ROW_STEP_ROWS, ROW_STEP_THREADS, ROW_STEP_MOST_LEVELS = 8, 256, 32
ROW_STEP_LEVEL_WORDS = 8

# Of the entries in the table: what a block may ask for on any card since sm_75.
ROW_STEP_TABLE_BYTES = 64 << 10


def row_step_pitch(n: int) -> int:
    """Floats between rows of n columns in shared memory: an odd number of vectors of four."""
    return 4 * (ceil_div(n, 4) | 1)


def row_step_shared_bytes(widths: Sequence[int]) -> int:
    """What a block needs of shared memory, for widths from the inputs to the outputs."""
    rows = ROW_STEP_ROWS * (2 * row_step_pitch(max(widths)) + sum(map(row_step_pitch, widths[1:])))
    weights = sum((k + 1) * row_step_pitch(n) for k, n in pairwise(widths))
    return 4 * (ROW_STEP_MOST_LEVELS * ROW_STEP_LEVEL_WORDS + rows + weights)


def row_step(name: str, kind: str, *, textured: bool = True, shared_bytes: int = ROW_STEP_TABLE_BYTES) -> Entry:
    """All of a step but the gradients; arguments as of :func:`.losses.loss`.

    Its launches tell the lengths ``inputs`` and ``outputs`` of a row, ``hidden``, those of all layers but the last,
    ``deltas``, of all layers that have one, the ``products`` and ``passed`` of a row, forward and back, and that of
    the ``parameters``.
    """
    reader = TargetReader(kind, textured)
    signature = (
        f"{ROWS}, const int* order[rows], const float* data[rows,inputs], const unsigned char* bytes[rows,inputs], "
        "float scale, const float* mean[inputs], const float* deviation[inputs], const float* parameters[parameters], "
        "const RowStepLevel* described[layer_count], int layer_count, int lowest, int widest, "
        f"{reader.argument('outputs')}, const float* weights[rows], const float* target_mean[outputs], "
        "const float* target_scale[outputs], uint64_t seed, float* x[rows,inputs], "
        f"float* y[rows,hidden], float* dz[rows,deltas], {LOSS_SUMS}, int capacity"
    )
    return Entry(
        f"row_step_{name}_{kind}{reader.suffix}", "fused/row_step.cuh",
        f"row_step<{camel(name)}, {reader.struct}>", arguments(signature), ROW_STEP_THREADS, shared_bytes,
        block=f"RowStep<{shared_bytes}>", loss_numbers=reads_numbers(name),
        prefetched=tuple((name, 0) for name in ("order", "data", "bytes", "mean", "deviation", "described")),
        products=(Product(("rows", "products")), Product(("rows", "passed"))),
    )  # fmt: skip


def row_step_entries() -> list[Entry]:
    """The entries of all losses, for networks of which a block of any card holds the weights."""
    return [
        row_step(name, kind, textured=textured)
        for name, row in FORMS.items()
        for kind, textured in product(row.targets, (True, False))
    ]


# TensorRowStepShape of fused/tensor_row_step.cuh, and ComponentsShape of gemm/components.cuh.
TENSOR_ROW_STEP_THREADS, TENSOR_ROW_STEP_MOST_LEVELS, TENSOR_ROW_STEP_MOST_ROWS = 512, 32, 128
TENSOR_ROW_STEP_LEVEL_WORDS, TENSOR_ROW_STEP_STEP, _BANKS_APART = 12, 16, 8
_BARRIER_WORDS, TENSOR_ROW_STEP_ITEM_EIGHTS = 4, 2
# Of fused/update_from_blocks.cuh: threads of a block, and what one of them adds up before another warp shares its sum.
SUM_OF_BLOCKS_THREADS, SUM_OF_BLOCKS_RUN = 256, 4

# Three components' fragments leave too few registers for what is read before a product.
TENSOR_ROW_STEP_SPILL_BYTES = {1: 0, 2: 0, 3: 96}

# Components of a number that a precision multiplies.
COMPONENTS_OF_PRECISION = {"bfloat16": 1, "tf32": 2, "float32": 3}


def tensor_row_step_columns(n: int) -> int:
    """What so many columns are padded to."""
    return TENSOR_ROW_STEP_STEP * ceil_div(n, TENSOR_ROW_STEP_STEP)


@dataclass(frozen=True)
class TensorRowStep:
    """How ``fused/tensor_row_step.cuh`` goes through a network.

    Attributes:
        widths: from the inputs to the outputs.
        components: bfloat16 numbers whose sum stands for a number.
        tile: rows of a block at a time.
        shared_bytes: of a block, of which what rows leave is room for weights.
    """

    widths: tuple[int, ...]
    components: int
    tile: int
    shared_bytes: int

    @property
    def products(self) -> int:
        """Of components, in the place of one of numbers."""
        return self.components * (self.components + 1) // 2

    @property
    def places(self) -> list[int]:
        """Elements of a row's component before each level's; then those of all levels."""
        return [0, *accumulate(tensor_row_step_columns(n) + _BANKS_APART for n in self.widths)]

    @property
    def images(self) -> list[int]:
        """Elements before the weight of each layer among all weights' components; then those of all of them."""
        sizes = (
            self.components * tensor_row_step_columns(k) * (tensor_row_step_columns(n) + _BANKS_APART)
            for k, n in pairwise(self.widths)
        )
        return [0, *accumulate(sizes)]

    @property
    def biases(self) -> list[int]:
        """Columns of the layers before each layer; then those of all of them."""
        return [0, *accumulate(self.widths[1:])]

    @property
    def partials(self) -> list[int]:
        """Floats before the gradient of each layer in a block's partials; then all of them."""
        return [0, *accumulate((k + 1) * 8 * ceil_div(n, 8) for k, n in pairwise(self.widths))]

    @property
    def _row_bytes(self) -> int:
        """Of all rows of a block, their logits, biases and the levels' descriptions."""
        logits = 4 * ceil_div(self.tile * (self.widths[-1] | 1), 4)
        words = TENSOR_ROW_STEP_MOST_LEVELS * TENSOR_ROW_STEP_LEVEL_WORDS + TENSOR_ROW_STEP_MOST_ROWS + logits
        words += _BARRIER_WORDS + 4 * ceil_div(self.biases[-1], 4)
        return 4 * words + 2 * self.components * self.tile * self.places[-1]

    @property
    def room(self) -> int:
        """Elements of a room that holds any of the weights."""
        return max(second - first for first, second in pairwise(self.images))

    @property
    def rooms(self) -> int:
        """For how many weights there is room, of which two are enough: the next one comes while one is multiplied."""
        return min(2, max(0, self.shared_bytes - self._row_bytes) // (2 * self.room))


# InputLayerShape of fused/input_layer.cuh.
INPUT_LAYER_WARPS, INPUT_LAYER_SLAB, INPUT_LAYER_STAGES, INPUT_LAYER_MOST_ROWS = 8, 64, 3, 2048
INPUT_LAYER_INPUTS = 2  # neighbours of which a lane makes the gradient
# Of the entries in the table: neighbouring inputs that one instruction loads, tiles of 16 outputs, warps of rows.
INPUT_LAYER_FORMS = (2, 1, 2), (1, 3, 4), (4, 8, 8)
_INPUT_LAYER_BARRIERS = 32  # bytes
# The most tiles, by components, whose sums leave registers for two blocks on a multiprocessor: forward, of the
# gradient, and of the gradient with loads that are twice as far ahead.
_FORWARD_PAIR, _GRADIENT_PAIR, _GRADIENT_PAIR_AHEAD = {1: 6, 2: 3, 3: 2}, {1: 7, 2: 6, 3: 3}, {1: 5, 2: 4, 3: 2}
_INPUT_LAYER_SPILL_BYTES = 96  # forward, where sums and inputs in flight have nearly all registers


@dataclass(frozen=True)
class InputLayer:
    """How ``fused/input_layer.cuh`` takes a first layer of k inputs and n outputs.

    Attributes:
        components: as of :class:`TensorRowStep`.
        row_warps: of a block forward, which have 16 rows each; others have the same rows and other inputs.
        part: of the inputs, of a block forward, a multiple of a slab.
        row_part: of a batch's rows, of a block of the gradient, a multiple of a slab.
    """

    k: int
    n: int
    components: int
    row_warps: int
    part: int
    row_part: int

    @property
    def tiles(self) -> int:
        """Of 16 outputs, for which a kernel is made."""
        return ceil_div(self.n, TENSOR_ROW_STEP_STEP)

    @property
    def together(self) -> int:
        """Blocks that share a multiprocessor forward."""
        return 1 + (self.tiles <= _FORWARD_PAIR[self.components])

    @property
    def gradient_together(self) -> int:
        """Blocks of the gradient that do."""
        return 1 + (self.tiles <= _GRADIENT_PAIR[self.components])

    @property
    def ahead(self) -> int:
        """Products of the gradient whose inputs are in flight."""
        is_limited = self.gradient_together > 1 and self.tiles > _GRADIENT_PAIR_AHEAD[self.components]
        return 2 if is_limited else 4

    @property
    def shared_bytes(self) -> int:
        """Of a block forward: slabs of W, whose place the sums take where warps share them."""
        sums = 4 * INPUT_LAYER_WARPS * TENSOR_ROW_STEP_STEP * self.pitch
        return _INPUT_LAYER_BARRIERS + max(self._slab_bytes(self.slab), sums * (self.row_warps < INPUT_LAYER_WARPS))

    @property
    def gradient_shared_bytes(self) -> int:
        """Of a block of the gradient: the numbers of its rows, and slabs of deltas."""
        return _INPUT_LAYER_BARRIERS + 4 * INPUT_LAYER_MOST_ROWS + self._slab_bytes(INPUT_LAYER_SLAB)

    def _slab_bytes(self, slab: int) -> int:
        return 2 * INPUT_LAYER_STAGES * self.components * slab * self.pitch

    @property
    def columns(self) -> int:
        return tensor_row_step_columns(self.n)

    @property
    def tile(self) -> int:
        """Rows of a block forward."""
        return TENSOR_ROW_STEP_STEP * self.row_warps

    @property
    def slab(self) -> int:
        """Inputs of a block forward that come to its memory together."""
        return INPUT_LAYER_SLAB * INPUT_LAYER_WARPS // self.row_warps

    @property
    def parts(self) -> int:
        return ceil_div(self.k, self.part)

    @property
    def gradient_blocks(self) -> int:
        """Along the inputs, and the bias behind them."""
        return ceil_div(self.k + 1, 8 * INPUT_LAYER_WARPS * INPUT_LAYER_INPUTS)

    @property
    def gradient_floats(self) -> int:
        """Of a part of the rows."""
        return (self.k + 1) * 8 * ceil_div(self.n, 8)

    @property
    def image(self) -> int:
        """Elements of the weight's components."""
        return self.components * tensor_row_step_columns(self.k) * self.pitch

    @property
    def pitch(self) -> int:
        """Elements from row to row of the components of W and of the deltas."""
        return self.columns + _BANKS_APART


def _of_input_layer(
    name: str, layer: InputLayer, source: str, function: str, arguments_of: str, together: int, shared_bytes: int
) -> Entry:
    components, tiles, of_bytes = layer.components, layer.tiles, "" if source == "float32" else f"_{source}"
    shape = f"InputLayerShape<{components}, {tiles}, {shared_bytes}>"
    signature = (
        f"{ROWS}, const int* order[rows], const {SOURCES[source]}* data[rows,k], float scale, const float* mean[k], "
        f"const float* deviation[k], {arguments_of}"
    )
    return Entry(
        f"{name}{of_bytes}_{components}_{TENSOR_ROW_STEP_STEP * tiles}", "fused/input_layer.cuh",
        function.format(shape), arguments(signature), WARP * INPUT_LAYER_WARPS, shared_bytes, block=shape,
        blocks=together, spill_bytes=_INPUT_LAYER_SPILL_BYTES, needs="sm_90a",
        operand_format=FORMAT_OF_COMPONENTS[components], products=(Product(("rows", "k", "n")),),
        prefetched=tuple((name, 0) for name in ("order", "data", "mean", "deviation")),
    )  # fmt: skip


def input_layer_forward(layer: InputLayer, source: str = "float32") -> Entry:
    """The first layer's sums over parts of its inputs, of this type in the data set.

    Its launches tell the ``elements`` of W's components, and to how many ``columns`` outputs are padded.
    """
    return _of_input_layer(
        "input_layer_forward", layer, source, f"input_layer_forward<{{}}, {gcd(layer.k, 4)}, {SOURCES[source]}>",
        "const uint16_t* image[elements], float* partials[grid.y,rows,columns], int k, int n, int part, int row_warps, "
        "int capacity", layer.together, layer.shared_bytes,
    )  # fmt: skip


def input_layer_gradient(layer: InputLayer, source: str = "float32") -> Entry:
    """The first layer's gradient over parts of the rows.

    Its launches tell the ``delta_elements`` of a row's deltas, and the floats of a ``gradient``.
    """
    return _of_input_layer(
        "input_layer_gradient", layer, source,
        f"input_layer_gradient<{{}}, {layer.ahead}, {gcd(layer.k, INPUT_LAYER_INPUTS)}, {SOURCES[source]}>",
        "const uint16_t* deltas[rows,delta_elements], float* partials[grid.y,gradient], int k, int n, int part, "
        "int delta_rows", layer.gradient_together, layer.gradient_shared_bytes,
    )  # fmt: skip


_DATA = (
    "const float* data[rows,inputs], const unsigned char* bytes[rows,inputs], float scale, const float* mean[inputs], "
    "const float* deviation[inputs]"
)
_SUMS_OF_INPUT_LAYER = (
    "const float* input_sums[input_parts,rows,columns], int input_parts, int capacity, "
    "uint16_t* deltas[rows,delta_elements], int delta_rows"
)


def tensor_row_step(
    name: str,
    kind: str,
    form: TensorRowStep,
    activations: Sequence[str],
    *,
    textured: bool = True,
    behind: bool = False,
) -> Entry:
    """All of a step but the sum of its gradients, on tensor cores; arguments as of :func:`.losses.loss`.

    The kernel knows the network's ``activations``, each once, by their numbers in this order.  Its launches tell the
    lengths ``inputs`` and ``outputs`` of a row, the ``products`` of a row, those that are ``passed`` back, the
    ``elements`` of all weights' components and the ``parameters``; and at how many ``clocks`` they are counted.

    Args:
        behind: whether a first layer is apart; then they tell the lengths of its sums and deltas as well.
    """
    reader = TargetReader(kind, textured)
    signature = (
        f"{ROWS}, const int* order[rows], {_SUMS_OF_INPUT_LAYER if behind else _DATA}, "
        "const float* parameters[parameters], const uint16_t* images[elements], "
        "const TensorRowStepLevel* described[layer_count], int layer_count, "
        f"int tile, int room, int room_count, int bias_count, {reader.argument('outputs')}, "
        "const float* weights[rows], const float* target_mean[outputs], const float* target_scale[outputs], "
        "uint64_t seed, float* slopes[rows,slope_columns], int slope_columns, float* partials[grid.x,pitch], "
        f"int pitch, {LOSS_SUMS}"
    )
    listed = ", ".join(map(camel, activations))
    function, read_first = "tensor_row_step_behind" if behind else "tensor_row_step", ["order", "described"]
    read_first += [] if behind else ["data", "bytes", "mean", "deviation"]
    return Entry(
        f"{function}_{form.components}_{'_'.join(activations)}_{name}_{kind}{reader.suffix}",
        "fused/tensor_row_step.cuh",
        f"{function}<{camel(name)}, {reader.struct}, {form.components}, ActivationList<{listed}>>",
        arguments(signature), TENSOR_ROW_STEP_THREADS, form.shared_bytes, block=f"TensorRowStep<{form.shared_bytes}>",
        needs="sm_90a", spill_bytes=TENSOR_ROW_STEP_SPILL_BYTES[form.components], loss_numbers=reads_numbers(name),
        operand_format=FORMAT_OF_COMPONENTS[form.components], prefetched=tuple((name, 0) for name in read_first),
        products=(Product(("rows", "products")), Product(("rows", "products")), Product(("rows", "passed"))),
    )  # fmt: skip


def sum_runs(blocks: int) -> int:
    """Warps that share the sum of what so many blocks have left, a power of two."""
    shares = ceil_div(blocks, SUM_OF_BLOCKS_RUN)
    return min(SUM_OF_BLOCKS_THREADS // WARP, 1 << (shares - 1).bit_length())


def blocks_of_sum(k: int, n: int, runs: int) -> int:
    """Blocks that move a layer, of whose sums so many warps share each."""
    return ceil_div((k + 1) * ceil_div(n, 8) * 2, SUM_OF_BLOCKS_THREADS // runs)


def update_from_blocks(rule: str, components: int) -> Entry:
    """The sum of what blocks left of the gradients, and the step of all parameters.

    Its launches tell how many floats the blocks have ``left``, how many ``moved`` parameters there are, and the
    ``elements`` of all weights' components.
    """
    signature = (
        "const Step* step[0], const LayerOfBlocks* described[layer_count], int layer_count, "
        "const float* partials[left], const double* totals[2], "
        f"inout float* parameters[moved], inout float* slots[{slot_count(rule)},moved], int64_t size, "
        "uint16_t* images[elements]"
    )
    threads = SUM_OF_BLOCKS_THREADS
    return Entry(
        f"update_from_blocks_{components}_{rule}", "fused/update_from_blocks.cuh",
        f"update_from_blocks<{rule}Rule, {components}>", arguments(signature), threads, 16 * threads,
        block="SumOfBlocks", needs="sm_90a", constants=True, prefetched=(("described", 0),),
    )  # fmt: skip


def images_of_weights(components: int) -> Entry:
    """Weights' components as they are before the first step of a run; lengths as of :func:`update_from_blocks`."""
    signature = "const LayerOfBlocks* described[grid.y], const float* parameters[moved], uint16_t* images[elements]"
    return Entry(
        f"images_of_weights_{components}", "fused/update_from_blocks.cuh", f"images_of_weights<{components}>",
        arguments(signature), ROW_THREADS, needs="sm_90a",
    )  # fmt: skip


def tensor_row_step_entries() -> list[Entry]:
    """The entries of all losses, optimizers and activations, for networks that need little shared memory."""
    entries, losses = [], [(name, kind) for name, row in FORMS.items() for kind in row.targets]
    for precision, components in COMPONENTS_OF_PRECISION.items():
        form = TensorRowStep((1, 1), components, TENSOR_ROW_STEP_STEP, ROW_STEP_TABLE_BYTES)
        activations = tuple(ACTIVATIONS) if precision == "float32" else ("identity",)
        for (name, kind), textured in product(losses if precision == "bfloat16" else losses[:1], (True, False)):
            entries.append(tensor_row_step(name, kind, form, activations, textured=textured))
        entries.append(tensor_row_step(*losses[0], form, activations, behind=True))
        for k, tiles, warps in INPUT_LAYER_FORMS:
            layer = InputLayer(k, TENSOR_ROW_STEP_STEP * tiles, components, warps, INPUT_LAYER_SLAB, INPUT_LAYER_SLAB)
            entries += [of(layer, source) for of in (input_layer_forward, input_layer_gradient) for source in SOURCES]
        entries += [update_from_blocks(rule, components) for rule in RULES]
        entries.append(images_of_weights(components))
    return entries
