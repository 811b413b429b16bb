"""Whether a stack of locally connected layers runs as one kernel, and how its columns are divided for that.

``local/stack.cuh`` is that kernel: each block has a span of columns through all layers.  What becomes of layers that
follow each other depends on widths, capacity and card alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from .... import plan as ops
from ....plan import Plan
from .. import kernels
from ..kernels import Entry, OnChipWeights, StackShape, StreamedWeights, ceil_div
from . import thresholds

ROW_ARRAYS = (".kept", ".kept_z", ".deltas", ".messages")  # ends of the names of arrays that grow with the rows
# StackLayer of local/stack.cuh.
LAYER = np.dtype(
    [("weight", "<i8"), ("bias", "<i8"), ("y", "<i8"), ("n", "<i4"), ("window", "<i4"), ("pitch", "<i4"),
     ("bias_step", "<i4")]
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LocalStack:
    """A stack that runs as one kernel.

    Attributes:
        operations: of the layers, the first one first.
        m: columns of its input.
        layers: the kernel's table of them.
        rows: the most of a batch.
        blocks: of the grid, all of which run at once.
        no_update: why no kernel does the backward pass with the update; empty if there is one.
    """

    operations: tuple[ops.LocallyConnected, ...]
    m: int
    layers: tuple[tuple[int, ...], ...]
    rows: int
    blocks: int
    weights: StreamedWeights | OnChipWeights
    no_update: str

    @property
    def name(self) -> str:
        """What the names of its arrays begin with."""
        return f"{self.operations[0].y} to {self.operations[-1].y}"

    @property
    def forward(self) -> Entry:
        return kernels.local_stack_forward(self.operations[0].activation, self.weights)

    def update(self, rule: str) -> Entry:
        """The kernel of the backward pass, which also moves the weights."""
        activation = self.operations[0].activation
        if isinstance(self.weights, OnChipWeights):
            return kernels.local_stack_tied_update(activation, rule, self.weights)
        return kernels.local_stack_update(activation, rule, self.weights.shape)

    @cached_property
    def table(self) -> np.ndarray:
        """(layers,) of LAYER."""
        return np.array(list(self.layers), LAYER)

    @cached_property
    def halo(self) -> int:
        """The most columns that a block needs of its neighbour's."""
        return int(self.table["window"].max()) - 1

    @cached_property
    def kept_elements(self) -> int:
        """Elements of all layers' y, for a whole batch."""
        return int(self.table["y"][-1]) + _padded(self.rows * int(self.table["n"][-1]))

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The lengths that the kernels' entries name beside their arguments (kernels/local.py)."""
        table = self.table.astype([(name, "<i8") for name in LAYER.names or ()])
        used = table["n"] * table["window"]
        weights = int(used.max() if isinstance(self.weights, OnChipWeights) else used.sum())
        outputs, n = int(table["n"].sum()), int(table["n"][-1])
        first, products = int(used[0]), int(used.sum())
        return {
            "products": products, "first_products": first, "inner_products": products - first, "weights": weights,
            "outputs": outputs, "n": n,
        }  # fmt: skip

    @property
    def message_words(self) -> int:
        """Words of messages of all passes, laid out as ``local_stack_forward`` has them."""
        shape = self.weights.shape
        passes = ceil_div(self.rows, shape.rows)
        return passes * len(self.layers) * self.blocks * shape.rows * self.halo

    @cached_property
    def bytes(self) -> dict[str, int]:
        """The size of each array that its kernels take beside the plan's: the kernels' arguments name them."""
        shared_biases = {layer["bias"] for layer in self.table if layer["bias"] >= 0 and not layer["bias_step"]}
        sums = 1 if isinstance(self.weights, OnChipWeights) else len(self.layers)
        kept, shape = 4 * self.kept_elements, self.weights.shape
        return {
            "layers": self.table.nbytes, "kept": kept, "kept_z": kept if self.operations[0].z else 0,
            "deltas": 4 * self.rows * len(self.layers) * self.blocks * (shape.span + kernels.STACK_MOST_HALO),
            "messages": 8 * self.message_words, "launches": 8,
            "bias_sums": 8 * sums * self.blocks * shape.warps if shared_biases else 0,
        }  # fmt: skip

    def __str__(self) -> str:
        way = "kept on the chip" if isinstance(self.weights, OnChipWeights) else "streamed through shared memory"
        return f"{len(self.layers)} layers in one kernel on {self.blocks} multiprocessors, weights {way}"


def _padded(elements: int) -> int:
    return 4 * ceil_div(elements, 4)


def runs_of_layers(operations: Sequence[ops.Operation]) -> list[tuple[ops.LocallyConnected, ...]]:
    """The locally connected layers of a plan, those together that follow each other with the same activation."""
    runs: list[tuple[ops.LocallyConnected, ...]] = []
    for op in operations:
        if not isinstance(op, ops.LocallyConnected):
            continue
        follows = runs and runs[-1][-1].y == op.x and runs[-1][-1].activation == op.activation
        if follows:
            runs[-1] = (*runs[-1], op)
        else:
            runs.append((op,))
    return runs


def choose_stack(
    plan: Plan, run: tuple[ops.LocallyConnected, ...], *, shards: int, multiprocessors: int, arch: str
) -> LocalStack | str:
    """One kernel for layers that follow each other, or why each is a launch."""
    if not thresholds.STACKS_ARE_USED:
        return "kernels for stacks are switched off"
    if len(run) < 2:
        return "a stack has at least two layers"
    if arch != "sm_90a":
        return f"the kernel for stacks needs the copy engine of sm_90a, and this card is {arch}"
    if shards > 1:
        return "the batch is split over streams"
    if plan.ends_with_gradient:
        return "the step stores each layer's outputs"
    if plan.capacity > thresholds.STACK_MOST_ROWS:
        return f"a batch of {plan.capacity} rows is larger than {thresholds.STACK_MOST_ROWS}"
    layers, m = _layers(plan, run), plan.buffers[run[0].x].shape[-1]
    table = np.array(list(layers), LAYER)
    if table["window"].max() - 1 > kernels.STACK_MOST_HALO:
        return f"a window of {table['window'].max()} is larger than {kernels.STACK_MOST_HALO + 1}"
    warps = ceil_div(m, 4 * kernels.WARP * multiprocessors)
    fitting = [rows for rows, most in thresholds.STACK_MOST_WARPS.items() if warps <= most and rows < 2 * plan.capacity]
    if not fitting:
        most = 4 * kernels.WARP * multiprocessors * thresholds.STACK_MOST_WARPS[1]
        return f"{m:,} columns are more than {most:,}, which {multiprocessors} multiprocessors hold"
    on_chip = _on_chip(run, m, int(table["window"][0]), multiprocessors)
    weights = on_chip or streamed_weights(StackShape(warps, fitting[0]))
    is_frozen = any(not p.trainable for p in plan.parameters if p.name in {op.weight for op in run})
    no_update = "a layer of it is frozen" if is_frozen else _no_update(table, weights, plan.capacity)
    return LocalStack(run, m, layers, plan.capacity, ceil_div(m, weights.shape.span), weights, no_update)


def _no_update(table: np.ndarray, weights: StreamedWeights | OnChipWeights, rows: int) -> str:
    """Why the backward pass, which moves each weight once, is not one kernel."""
    used: dict[int, int] = {}  # the most columns of each weight that a layer uses
    for layer in table:
        used[layer["weight"]] = max(used.get(layer["weight"], 0), layer["n"])
    if any(used[layer["weight"]] < layer["pitch"] for layer in table):
        return "the optimizer updates columns of a weight that no layer uses"
    if isinstance(weights, OnChipWeights):
        return ""
    if len(used) < len(table):
        return "layers share weights that do not fit on the chip"
    return f"a block computes {weights.shape.rows} of {rows} rows at once" if rows > weights.shape.rows else ""


def _layers(plan: Plan, run: tuple[ops.LocallyConnected, ...]) -> tuple[tuple[int, ...], ...]:
    segments = {p.name: p for p in plan.parameters}
    widths = [plan.buffers[op.y].shape[-1] for op in run]
    offsets = accumulate((_padded(plan.capacity * n) for n in widths), initial=0)
    layers = []
    for op, n, offset in zip(run, widths, offsets, strict=False):
        weight, bias = segments[op.weight], segments[op.bias] if op.bias else None
        window, pitch = weight.shape
        step = int(bias is not None and bias.size == pitch)
        layers.append((weight.offset, bias.offset if bias else -1, offset, n, window, pitch, step))
    return tuple(layers)


def _on_chip(run: tuple[ops.LocallyConnected, ...], m: int, window: int, multiprocessors: int) -> OnChipWeights | None:
    """The weights, if one matrix serves all layers and the chip has room for it; rows then pass one by one."""
    warps = ceil_div(m, OnChipWeights.COLUMNS * kernels.WARP * multiprocessors)
    weights = OnChipWeights(StackShape(warps, 1, OnChipWeights.COLUMNS), window)
    is_one = len({op.weight for op in run}) == 1
    fits = warps <= OnChipWeights.MOST_WARPS and weights.update_bytes <= kernels.STACK_SHARED_BYTES
    return weights if is_one and fits else None


def streamed_weights(shape: StackShape) -> StreamedWeights:
    """The ring that weights come through: several weight rows a stage, if that leaves enough stages."""
    several = StreamedWeights(shape, thresholds.STACK_STAGE_ROWS)
    return several if several.stages >= thresholds.STACK_LEAST_STAGES else StreamedWeights(shape, 1)


def find_stacks(
    plan: Plan, operations: Sequence[ops.Operation], *, shards: int, multiprocessors: int, arch: str
) -> dict[tuple[ops.LocallyConnected, ...], LocalStack | str]:
    """What becomes of all locally connected layers, those together that follow each other."""
    return {
        run: choose_stack(plan, run, shards=shards, multiprocessors=multiprocessors, arch=arch)
        for run in runs_of_layers(operations)
    }


def stacked_partials(plan: Plan, *, multiprocessors: int, arch: str) -> set[str]:
    """The partials that a training step need not have, because kernels of stacks can move the parameters.

    Of a parameter that is used more than once one kernel must have all uses.
    """
    names: set[str] = set()
    stacks = find_stacks(plan, plan.training, shards=plan.shards, multiprocessors=multiprocessors, arch=arch)
    for stack in stacks.values():
        if isinstance(stack, str) or stack.no_update:
            continue
        deltas = {f"d{op.y}" for op in stack.operations}
        back = [op for op in plan.training if isinstance(op, ops.LocallyConnectedBackward) and op.dz in deltas]
        partials = {name for op in back for name in (op.dweight, op.dbias) if name is not None}
        parameters = {partial.parameter for partial in plan.partials if partial.name in partials}
        if partials == {partial.name for partial in plan.partials if partial.parameter in parameters}:
            names |= partials
    return names
