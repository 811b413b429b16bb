"""Whether a stack of locally connected layers runs as one kernel, and how it is dealt out for that.

``local/stack.cuh`` is that kernel: each block has a span of columns through all layers.  :func:`design` says what
becomes of layers that follow each other, from widths, capacity and card alone; :class:`Stacks` lowers them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from .... import plan as ops
from ....plan import Plan
from .. import kernels
from ..kernels import Entry, HeldWeights, StackShape, StreamedWeights, ceil_div
from ..kernels.launches import At, Launch, Value
from .shard import Setting, Shard

IS_USED = True  # False: every layer is a launch
MOST_ROWS = 32  # of a batch; each pass of them has mail of its own
OF_ROWS = (".kept", ".kept_z", ".deltas", ".mail")  # what names of arrays end in that grow with the rows
# By the rows of a pass: as many warps of a block as leave a thread the registers that it needs.
MOST_WARPS = {8: 7, 4: 11, 2: 19, 1: 27}

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
        no_update: why there is no kernel for the way back, with the update; nothing where there is one.
    """

    operations: tuple[ops.LocallyConnected, ...]
    m: int
    layers: tuple[tuple[int, ...], ...]
    rows: int
    blocks: int
    weights: StreamedWeights | HeldWeights
    no_update: str

    @property
    def name(self) -> str:
        """What the names of its arrays begin with."""
        return f"{self.operations[0].y} to {self.operations[-1].y}"

    @property
    def forward(self) -> Entry:
        return kernels.local_stack_forward(self.operations[0].activation, self.weights)

    def update(self, optimizer: str) -> Entry:
        """The kernel of the way back."""
        activation = self.operations[0].activation
        if isinstance(self.weights, HeldWeights):
            return kernels.local_stack_tied_update(activation, optimizer, self.weights)
        return kernels.local_stack_update(activation, optimizer, self.weights.shape)

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
        """Of all layers' y, for a whole batch."""
        return int(self.table["y"][-1]) + _padded(self.rows * int(self.table["n"][-1]))

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Products of a row; weights that are used, each once for each layer or once in all; outputs of all layers."""
        table = self.table.astype([(name, "<i8") for name in LAYER.names or ()])
        used = table["n"] * table["window"]
        weights = int(used.max() if isinstance(self.weights, HeldWeights) else used.sum())
        outputs, n = int(table["n"].sum()), int(table["n"][-1])
        return {"products": int(used.sum()), "weights": weights, "outputs": outputs, "n": n}

    @property
    def mail_words(self) -> int:
        """Of all passes, laid out as ``local_stack_forward`` has it."""
        shape = self.weights.shape
        passes = ceil_div(self.rows, shape.rows)
        return passes * len(self.layers) * self.blocks * shape.rows * self.halo

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Of each array that its kernels take beside the plan's own: the kernels' arguments name them."""
        shared_biases = {layer["bias"] for layer in self.table if layer["bias"] >= 0 and not layer["bias_step"]}
        sums = 1 if isinstance(self.weights, HeldWeights) else len(self.layers)
        kept, shape = 4 * self.kept_elements, self.weights.shape
        return {
            "layers": self.table.nbytes, "kept": kept, "kept_z": kept if self.operations[0].z else 0,
            "deltas": 4 * self.rows * len(self.layers) * self.blocks * (shape.span + kernels.STACK_MOST_HALO),
            "mail": 8 * self.mail_words, "launches": 8,
            "bias_sums": 8 * sums * self.blocks * shape.warps if shared_biases else 0,
        }  # fmt: skip

    def __str__(self) -> str:
        way = "held on the chip" if isinstance(self.weights, HeldWeights) else "streamed"
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


def design(
    plan: Plan, run: tuple[ops.LocallyConnected, ...], *, shards: int, multiprocessors: int, arch: str
) -> LocalStack | str:
    """One kernel for layers that follow each other, or why each is a launch."""
    if not IS_USED:
        return "kernels for stacks are switched off"
    if len(run) < 2:
        return "it is one layer"
    if arch != "sm_90a":
        return f"{arch} lacks the copy engine or is untried"
    if shards > 1:
        return "the batch is split over streams"
    if plan.ends_with_gradient:
        return "each layer's outputs are looked at"
    if plan.capacity > MOST_ROWS:
        return f"a batch of {plan.capacity} rows is larger than {MOST_ROWS}"
    layers, m = _layers(plan, run), plan.buffers[run[0].x].shape[-1]
    table = np.array(list(layers), LAYER)
    if table["window"].max() - 1 > kernels.STACK_MOST_HALO:
        return f"a window of {table['window'].max()} is larger than {kernels.STACK_MOST_HALO + 1}"
    warps = ceil_div(m, 4 * kernels.WARP * multiprocessors)
    fitting = [rows for rows, most in MOST_WARPS.items() if warps <= most and rows < 2 * plan.capacity]
    if not fitting:
        most = 4 * kernels.WARP * multiprocessors * MOST_WARPS[1]
        return f"{m:,} columns are more than {most:,}, which {multiprocessors} multiprocessors hold"
    weights = _held(run, m, int(table["window"][0]), multiprocessors) or StreamedWeights(StackShape(warps, fitting[0]))
    no_update = _no_update(table, weights, plan.capacity)
    return LocalStack(run, m, layers, plan.capacity, ceil_div(m, weights.shape.span), weights, no_update)


def _no_update(table: np.ndarray, weights: StreamedWeights | HeldWeights, rows: int) -> str:
    """Why the way back, which moves each weight once, is not one kernel."""
    used: dict[int, int] = {}  # the most columns of each weight that a layer uses
    for layer in table:
        used[layer["weight"]] = max(used.get(layer["weight"], 0), layer["n"])
    if any(used[layer["weight"]] < layer["pitch"] for layer in table):
        return "no layer uses the last columns of a weight, which the optimizer may move"
    if isinstance(weights, HeldWeights):
        return ""
    if len(used) < len(table):
        return "layers share weights that the chip does not hold"
    return f"only {weights.shape.rows} of {rows} rows pass at once" if rows > weights.shape.rows else ""


def _layers(plan: Plan, run: tuple[ops.LocallyConnected, ...]) -> tuple[tuple[int, ...], ...]:
    segments = {p.name: p for p in plan.parameters}
    widths = [plan.buffers[op.y].shape[-1] for op in run]
    places = accumulate((_padded(plan.capacity * n) for n in widths), initial=0)
    layers = []
    for op, n, place in zip(run, widths, places, strict=False):
        weight, bias = segments[op.weight], segments[op.bias] if op.bias else None
        window, pitch = weight.shape
        step = int(bias is not None and bias.size == pitch)
        layers.append((weight.offset, bias.offset if bias else -1, place, n, window, pitch, step))
    return tuple(layers)


def _held(run: tuple[ops.LocallyConnected, ...], m: int, window: int, multiprocessors: int) -> HeldWeights | None:
    """Where one matrix serves all layers, and the chip has room for it; rows pass one by one."""
    warps = ceil_div(m, HeldWeights.COLUMNS * kernels.WARP * multiprocessors)
    held = HeldWeights(StackShape(warps, 1, HeldWeights.COLUMNS), window)
    is_one = len({op.weight for op in run}) == 1
    fits = warps <= HeldWeights.MOST_WARPS and held.update_bytes <= kernels.STACK_SHARED_BYTES
    return held if is_one and fits else None


def find_stacks(
    plan: Plan, operations: Sequence[ops.Operation], shards: int, setting: Setting
) -> dict[tuple[ops.LocallyConnected, ...], LocalStack | str]:
    """What becomes of all locally connected layers, those together that follow each other."""
    return {
        run: design(plan, run, shards=shards, multiprocessors=setting.multiprocessors, arch=setting.arch)
        for run in runs_of_layers(operations)
    }


def stacked_partials(plan: Plan, setting: Setting) -> set[str]:
    """The partials that a training step need not have, because kernels of stacks can move the parameters.

    Of a parameter that is used more than once one kernel must have all uses.
    """
    names: set[str] = set()
    for stack in find_stacks(plan, plan.training, plan.shards, setting).values():
        if isinstance(stack, str) or stack.no_update:
            continue
        deltas = {f"d{op.y}" for op in stack.operations}
        back = [op for op in plan.training if isinstance(op, ops.LocallyConnectedBackward) and op.dz in deltas]
        own = {name for op in back for name in (op.dweight, op.dbias) if name is not None}
        parameters = {partial.parameter for partial in plan.partials if partial.name in own}
        if own == {partial.name for partial in plan.partials if partial.parameter in parameters}:
            names |= own
    return names


class Stacks:
    """Lowers the stacks among a shard's operations: whoever comes to one of their operations asks here."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._forward: dict[str, LocalStack] = {}  # by y of each layer
        self._backward: dict[str, LocalStack] = {}  # by dz of each layer, where the way back is one kernel too
        self._derived: dict[LocalStack, bool] = {}  # whether dy is already multiplied by the derivative
        kind = "training" if shard.is_training else "evaluation"
        for run, stack in find_stacks(shard.plan, shard.operations, shard.count, shard.setting).items():
            way = _way(run, stack)
            if not isinstance(stack, str):
                self._forward |= {op.y: stack for op in run}
                if shard.is_training:
                    no_update = stack.no_update or ("" if shard.in_place else "the step has more to do with gradients")
                    way += f"; back layer by layer, since {no_update}" if no_update else "; back in one kernel too"
                    self._backward |= {} if no_update else {f"d{op.y}": stack for op in run}
            if len(run) > 1 and shard.number == 0:
                shard.lowered.notes.append(f"{kind}, {run[0].y} to {run[-1].y}: {way}")

    def _take(self, stack: LocalStack, names: Collection[str]) -> dict[str, Value]:
        """Arrays of a stack's own, by the names of the arguments."""
        lowered = self.shard.lowered
        for name in names:
            lowered.bytes[f"{stack.name}.{name}"] = stack.bytes[name]
        lowered.words[f"{stack.name}.layers"] = tuple(stack.table.view(np.int32).tolist())
        return {name: At(f"{stack.name}.{name}") if stack.bytes[name] else None for name in names}

    def forward(self, op: ops.LocallyConnected) -> bool:
        """Whether it is a stack's, which is launched with its first layer.

        In training all layers' y, and z, are parts of one array, save the last y.
        """
        shard, stack = self.shard, self._forward.get(op.y)
        if stack is None:
            return False
        if op is not stack.operations[0]:
            return True
        own = self._take(stack, ("layers", "mail", "launches"))
        own |= {"kept": None, "kept_z": None}
        last = stack.operations[-1]
        if shard.is_training:
            own |= self._take(stack, ("kept", "kept_z"))
            for each, place in zip(stack.operations, stack.table["y"], strict=True):
                if each is not last:
                    shard.segments[each.y] = At(f"{stack.name}.kept", int(place))
                if each.z:
                    shard.segments[each.z] = At(f"{stack.name}.kept_z", int(place))
        values = {"x": shard.at(op.x), "parameters": At("parameters"), "y": shard.stored(last.y)}
        self._launch(stack, stack.forward, {**own, **values})
        return True

    def derives(self, op: ops.ActivationBackward) -> bool:
        """Whether a stack's kernel multiplies by this derivative."""
        stack = self._backward.get(op.dy)
        if stack is None:
            return False
        if op.dy == f"d{stack.operations[-1].y}":
            self._derived[stack] = False
        return True

    def backward(self, op: ops.LocallyConnectedBackward) -> bool:
        """Whether it is a stack's, whose way back is launched with its last layer."""
        shard, stack = self.shard, self._backward.get(op.dz)
        if stack is None:
            return False
        last = stack.operations[-1]
        if op.dz != f"d{last.y}":
            return True
        assert shard.plan.optimizer is not None
        x = stack.operations[0].x
        dx = next(
            other.dx
            for other in shard.operations
            if isinstance(other, ops.LocallyConnectedBackward) and other.dz == f"d{stack.operations[0].y}"
        )
        values: dict[str, Value] = {
            "x": shard.at(x), "y": shard.at(last.y), "dy": shard.at(op.dz),
            "is_derived": int(self._derived.get(stack, True)), "totals": At("totals"),
            "parameters": At("parameters"), "slots": At("slots") if shard.plan.optimizer.slots else None,
            "size": shard.plan.parameter_count, "dx": shard.stored(dx) if dx else None,
        }  # fmt: skip
        entry = stack.update(type(shard.plan.optimizer).__name__)
        own = self._take(stack, [argument.name for argument in entry.arguments if argument.name in stack.bytes])
        self._launch(stack, entry, {**own, **values})
        return True

    def _launch(self, stack: LocalStack, entry: Entry, values: dict[str, Value]) -> None:
        shard = self.shard
        of_stack = {"count": len(stack.layers), "m": stack.m, "halo": stack.halo}
        grid, values = (stack.blocks, 1, 1), {**shard.common, **of_stack, **values}
        shard.launches.append(Launch(entry, grid, values, shard.operation, stack.lengths))


def _way(run: tuple[ops.LocallyConnected, ...], stack: LocalStack | str) -> str:
    return f"{len(run)} launches, since {stack}" if isinstance(stack, str) else str(stack)
