"""From a plan to kernel launches: which entries, on which grids, with which arrays.

This is plain data, made without a GPU from the plan and the card's number of multiprocessors alone.
Where neighbours allow, one launch does the work of two operations, and what the second one read is
then never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .... import plan as ops
from ....plan import Plan
from ....random import Purpose
from .. import kernels
from ..kernels import Entry, Team, ceil_div
from ..kernels.launches import GRAPH_STEPS, MOST_RUN_STEPS, At, Launch, Lowered, Value
from ..select.local_stack import stacked_partials
from .local_stack import Stacks
from .overlap import overlap
from .shard import (
    BLOCKS_PER_MULTIPROCESSOR,
    Setting,
    Shard,
    part_length,
    partials_pitch,
    split_part_length,
    title,
    updates_in_place,
)
from .tail import Tail, tail_of
from .tensor_cores import TensorCores, update_biases

FEW_LEAST_SIZE, FEW_MOST_SIZE = 1 << 18, 1 << 31  # of a weight that a few rows are not worth a product for
MOST_SUM_BLOCKS = 1 << 16
SQUARE_BLOCKS = 256

STEP_BYTES, SUMS_BYTES = 24, 16
MOST_STAGED_BYTES = 16 << 20


class _Lowering(Shard):
    """Lowers the operations of one shard, one after another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tensor_cores = TensorCores.of(self)
        self.stacks = Stacks(self)
        self.head: tuple[ops.Dense, str] | None = None  # the last layer, if the loss's kernel does it; its title
        self.made: set[str] = set()  # deltas that were made before their operation's turn
        self.tail = tail_of(self)
        self.parts: dict[str, Value] = {}  # of its first layer, as what adds them up is given them
        self.target_statistics: tuple[Value, Value] = (None, None)

    def lower(self) -> list[Launch]:
        """The launches of all operations that work row by row."""
        of_rows = [operation for operation in self.operations if type(operation) in _METHODS]
        taken_in = False  # whether the operation before did this one's work
        for operation, following in zip(of_rows, [*of_rows[1:], None], strict=True):
            self.operation = title(self.operations, operation)
            taken_in = not taken_in and _METHODS[type(operation)](self, operation, following)
        return self.launches

    def split_weights(self) -> list[Launch]:
        """What comes before all rows: planes of the weights that tensor cores read."""
        return self.tensor_cores.split_weights() if self.tensor_cores else []

    # --- one method for each operation; `following` is the next one, for those that can take it in ---

    def gather(self, op: ops.Gather, following: ops.Operation | None) -> bool:
        readers = [other for other in self.operations if op.x in other.reads]
        products = ops.Dense if self.plan.reduction == "atomic" else (ops.Dense, ops.DenseBackward)
        # Scaled planes are made beside floats, which products may read: who makes the planes leaves those too.
        cores = self.tensor_cores
        needs_floats = cores and cores.form.scaled and any(map(cores.makes, readers)) and not cores.makes(readers[0])
        if (
            self.setting.source == "float32"
            and all(isinstance(reader, products) for reader in readers)
            and not needs_floats
        ):
            self.fetched.add(op.x)
            return False
        n = self.width(op.x)
        self.add(
            kernels.gather(self.setting.source), self.over_elements(n),
            order=At("order"), data=At("data"), scale=At("scale"), x=self.stored(op.x), n=n,
        )  # fmt: skip
        return False

    def standardize(self, op: ops.Standardize, following: ops.Operation | None) -> bool:
        if op.x == "target":
            self.target_statistics = self.at(op.mean), self.at(op.scale)  # the loss does it
            return False
        n = self.width(op.x)
        self.add(
            kernels.standardize(), self.over_elements(n),
            x=self.at(op.x), mean=self.at(op.mean), scale=self.at(op.scale), y=self.stored(op.y), n=n,
        )  # fmt: skip
        return False

    def dense(self, op: ops.Dense, following: ops.Operation | None) -> bool:
        if self.tensor_cores and self.tensor_cores.makes(op):
            is_plain = self.target_statistics == (None, None)
            if isinstance(following, ops.Loss) and is_plain and self.tensor_cores.ends_with(op, following):
                self.tensor_cores.forward_loss(op, following, self._weighed_plainly)
                return True
            self.tensor_cores.forward(op)
            return False
        k, n = self.shapes[op.weight]
        part = part_length(k, n)
        if self.tail:  # the loss's kernel does all but the first one's product
            if op is self.tail.layers[0]:
                self.parts = self._forward_parts(op)
            return False
        if self._is_head(op, following):
            self.head = op, self.operation
            return False
        z, y = self.stored(op.z) if op.z else None, self.stored(op.y)
        if part is None:
            tile = kernels.tile_for(self.rows, n, self.multiprocessors)
            self.add(
                kernels.dense_forward(op.activation, tile), tile.grid(self.rows, n),
                **self.rows_of(op.x), w=self.at(op.weight), b=self.at(op.bias), z=z, y=y, k=k, n=n,
            )  # fmt: skip
            return False
        blocks = min(ceil_div(self.rows * n, kernels.WARP), MOST_SUM_BLOCKS)
        self.add(
            kernels.dense_forward_sum(op.activation), (blocks, 1, 1),
            **self._forward_parts(op), b=self.at(op.bias), z=z, y=y, n=n,
        )  # fmt: skip
        return False

    def _forward_parts(self, op: ops.Dense) -> dict[str, Value]:
        """The sums over parts of k, and what adds them up is given: by a launch, unless the step before left them."""
        k, n = self.shapes[op.weight]
        part, capacity = self._part(k, n), self.plan.capacity
        count = ceil_div(k, part)
        parts = f"parts{self.number}"  # shards run side by side, and may be at different layers
        self.lowered.bytes[parts] = max(self.lowered.bytes.get(parts, 0), 4 * count * capacity * n)
        found: dict[str, Value] = {"parts": At(parts), "count": count, "capacity": capacity}
        if self._is_ahead(op):
            before = dict.fromkeys(("dz", "totals", "bias", "bias_slots"))
            entry, grid, values = self._few(op.x, op.weight)
            self.lowered.ahead = [Launch(entry, grid, {**values, **before}, self.operation)]
            return found
        if self.rows <= kernels.FEW_ROWS:
            entry, grid = kernels.dense_forward_part_few(), (1, 1, count)
        else:
            entry, grid = self._part_product(k, n, count)
        self.add(
            entry, grid,
            **self.rows_of(op.x), w=self.at(op.weight), parts=At(parts), k=k, n=n, part=part, capacity=capacity,
        )  # fmt: skip
        return found

    def _part_product(self, k: int, n: int, count: int) -> tuple[Entry, tuple[int, int, int]]:
        """The kernel that makes sums over so many parts of k, and its grid."""
        if self._splits(k, n):
            by_warpgroups = kernels.dense_forward_part(kernels.WARPGROUP_SPLIT)
            if by_warpgroups.runs_on(self.arch):
                return by_warpgroups, kernels.WARPGROUP_SPLIT.grid(self.rows, n, count)
            return kernels.dense_forward_part(kernels.SPLIT), kernels.SPLIT.grid(self.rows, n, count)
        tile = kernels.tile_for(self.rows, n, self.multiprocessors, count)
        return kernels.dense_forward_part(tile), tile.grid(self.rows, n, count)

    def _part(self, k: int, n: int) -> int:
        """How much of k a part of the layer's product takes."""
        if self._splits(k, n):
            return split_part_length(k)
        if self._streams(k, n):
            return min(split_part_length(k), kernels.STREAM_PART)
        part = part_length(k, n) or k
        return min(part, kernels.FEW_PART) if self._updates_few(k, n) else part

    def _updates_few(self, k: int, n: int) -> bool:
        """Whether an update is that for few rows."""
        is_few = self.is_training and self.in_place and self.rows <= kernels.FEW_ROWS
        return is_few and FEW_LEAST_SIZE <= k * n < FEW_MOST_SIZE

    def _streams(self, k: int, n: int) -> bool:
        """Whether such an update is one that takes W as a stream."""
        return self._updates_few(k, n) and n <= kernels.STREAM_COLUMNS and self.arch == "sm_90a"

    def _is_ahead(self, op: ops.Dense | ops.DenseBackward) -> bool:
        """Whether the update makes the next step's parts too: of rows that the order tells it."""
        k, n = self.shapes[op.weight]
        return op.x in self.fetched and part_length(k, n) is not None and self._updates_few(k, n)

    def _few(self, x: str, weight: str) -> tuple[Entry, tuple[int, int, int], dict[str, Value]]:
        """The update of few rows, its grid, and those of its values that a run's first step begins with."""
        k, n = self.shapes[weight]
        optimizer, part = type(self.plan.optimizer).__name__, self._part(k, n)
        entry = kernels.dense_update_few(optimizer, stream=self._streams(k, n))
        values: dict[str, Value] = {
            "step": At("step"), **self.rows_of(x), "weight": self.at(weight), "weight_slots": self.slots_of(weight),
            "size": self.plan.parameter_count, "parts": At("parts0"), "k": k, "n": n, "part": part,
            "capacity": self.plan.capacity,
        }  # fmt: skip
        return entry, kernels.few_grid(k, n, part), values

    def locally_connected(self, op: ops.LocallyConnected, following: ops.Operation | None) -> bool:
        if self.stacks.forward(op):
            return False
        (window, pitch), n = self.shapes[op.weight], self.width(op.y)
        z, y = self.stored(op.z) if op.z else None, self.stored(op.y)
        self.add(
            kernels.local_forward(op.activation), self.over_columns(n, ceil_div(self.rows, kernels.LOCAL_ROWS)),
            x=self.at(op.x), w=self.at(op.weight), b=self.at(op.bias), z=z, y=y, m=self.width(op.x), n=n,
            window=window, pitch=pitch, b_step=int(op.bias is not None and self.shapes[op.bias][0] == pitch),
        )  # fmt: skip
        return False

    def locally_connected_backward(self, op: ops.LocallyConnectedBackward, following: ops.Operation | None) -> bool:
        """Takes in an activation's derivative of dx.  No sum is made by atomics, in either mode."""
        if self.stacks.backward(op):
            return False
        (window, pitch), m, n = self.shapes[op.weight], self.width(op.x), self.width(op.dz)
        self.add(
            kernels.local_backward_weight(), self.over_columns(pitch, window),
            x=self.at(op.x), dz=self.at(op.dz), dw=self.at(op.dweight), m=m, n=n, window=window, pitch=pitch,
        )  # fmt: skip
        if op.dbias is not None:
            db = {"dz": self.at(op.dz), "db": self.at(op.dbias), "n": n}
            if next(p.size for p in self.plan.partials if p.name == op.dbias) == pitch:
                self.add(kernels.local_backward_bias(), self.over_columns(pitch, 1), **db, pitch=pitch)
            else:
                self.add(kernels.local_backward_shared_bias(), (1, 1, 1), **db)
        if op.dx is None:
            return False
        activation, saved = self.taken_in(op.dx, following)
        self.add(
            kernels.local_backward_input(activation),
            self.over_columns(m, ceil_div(self.rows, kernels.LOCAL_ROWS)),
            dz=self.at(op.dz), w=self.at(op.weight), saved=saved, dx=self.stored(op.dx), m=m, n=n, window=window,
            pitch=pitch,
        )  # fmt: skip
        return saved is not None

    def dropout(self, op: ops.Dropout, following: ops.Operation | None) -> bool:
        self._dropout(op.x, op.y, op)
        return False

    def dropout_backward(self, op: ops.DropoutBackward, following: ops.Operation | None) -> bool:
        self._dropout(op.dy, op.dx, op)
        return False

    def _dropout(self, x: str, y: str, op: ops.Dropout | ops.DropoutBackward) -> None:
        n = self.width(x)
        self.add(
            kernels.dropout(), self.over_elements(n, per_thread=4),
            x=self.at(x), y=self.stored(y), n=n, seed=At("seed"), purpose=int(Purpose.DROPOUT), layer=op.layer,
            threshold=math.ceil(op.rate * 2**53), keep=1.0 / (1.0 - op.rate),
        )  # fmt: skip

    def loss(self, op: ops.Loss, following: ops.Operation | None) -> bool:
        if self.tail:
            self._loss_of_tail(op, self.tail)
        elif self.head:
            self._loss_of_head(op, *self.head)
        else:
            delta, planes, held = None, None, self._held_in(op.logits)
            if op.delta and isinstance(following, ops.ActivationBackward):  # which changes the delta as floats
                delta = self.stored(op.delta)
            elif op.delta:
                delta, planes = self._written(op.delta)
            team, rows = Team.of(self.width(op.logits)), kernels.padded_rows(self.rows) if planes else self.rows
            grid = ceil_div(rows, team.block_rows), 1, 1
            self.add(
                kernels.loss(op.loss, op.kind, textured=self.setting.textured, team=team), grid,
                **self._weighed(grid), delta=delta, planes=planes, plane=held[0], plane_count=held[1],
                logits=self.at(op.logits), n=self.width(op.logits),
            )  # fmt: skip
        return False

    def _written(self, delta: str) -> tuple[Value, Value]:
        """The arrays that a loss or a head leaves deltas in: of floats, and of planes."""
        return self.tensor_cores.written(delta) if self.tensor_cores else (self.stored(delta), None)

    def _held_in(self, name: str) -> tuple[int, int]:
        """How many elements a plane of a buffer has, and how many planes there are of it."""
        cores = self.tensor_cores
        return (cores.plane_of(name), cores.form.planes) if cores else (0, 0)

    def _weighed(self, grid: tuple[int, int, int]) -> dict[str, Value]:
        """What a loss is given beside its rows; each block leaves a sum."""
        mean, scale = self.target_statistics
        return {**self._weighed_plainly(grid), "mean": mean, "scale": scale}

    def _weighed_plainly(self, grid: tuple[int, int, int]) -> dict[str, Value]:
        """The same of one that takes no standardized targets."""
        blocks = math.prod(grid)
        if self.is_training:
            self.lowered.bytes["sums"] = SUMS_BYTES * self.count * blocks
        total: dict[str, Value] = {"arrived": None, "totals": None, "losses": None}
        if self.count == 1:  # the last block to end adds the batch up
            total = {name: At(name) for name in total}
        return {
            "order": At("order"), "targets": At("targets"), "weights": At("weights"),
            "sums": At("sums", 2 * blocks * self.number), **total,
        }  # fmt: skip

    def _loss_of_tail(self, op: ops.Loss, tail: Tail) -> None:
        self.segments |= tail.places(self)
        self.lowered.words["tail.layers"] = tail.words(self)
        self.made |= {backward.dx for backward in tail.backwards if backward.dx}
        grid = self.rows, 1, 1
        self.add(
            kernels.tail(op.loss, op.kind, textured=self.setting.textured), grid,
            **self._weighed(grid), **self.parts, parameters=At("parameters"), described=At("tail.layers"),
            layer_count=len(tail.layers), y=At("tail.y"), dz=At("tail.dz"), n=self.width(tail.layers[0].y),
        )  # fmt: skip
        self.launches[-1] = replace(self.launches[-1], lengths=tail.lengths(self))

    def _loss_of_head(self, op: ops.Loss, dense: ops.Dense, its_title: str) -> None:
        place, backward = next(
            (place, other)
            for place, other in enumerate(self.operations)
            if isinstance(other, ops.DenseBackward) and other.dz == op.delta
        )
        self.operation = its_title
        delta = self.stored(backward.dz)
        activation, saved, dx, planes, lines = "identity", None, None, None, None
        plane, plane_count = self._held_in(dense.x)
        if backward.dx:
            activation, saved = self.taken_in(backward.dx, self.operations[place + 1])
            dx, planes = self._written(backward.dx)
            lines = self.tensor_cores.exponents_of(backward.dx) if self.tensor_cores else None
            self.made.add(backward.dx)
        rows = kernels.padded_rows(self.rows) if planes else self.rows
        grid = ceil_div(rows, kernels.HEAD_ROWS), 1, 1
        self.add(
            kernels.head(op.loss, op.kind, textured=self.setting.textured), grid,
            **self._weighed(grid), x=self.at(dense.x), w=self.at(dense.weight), b=self.at(dense.bias), delta=delta,
            saved=saved, activation=kernels.activation_number(activation), dx=dx, dx_planes=planes, dx_plane=plane,
            dx_plane_count=plane_count, dx_lines=lines, k=self.shapes[dense.weight][0], n=self.width(op.logits),
        )  # fmt: skip

    def _is_head(self, op: ops.Dense, following: ops.Operation | None) -> bool:
        """Whether the last layer and its loss are one kernel's work."""
        k, n = self.shapes[op.weight]
        return (
            isinstance(following, ops.Loss)
            and following.delta is not None
            and self.plan.reduction == "ordered"
            and not self.plan.ends_with_gradient  # the head's kernel does not store y
            and op.activation == "identity"
            and op.x not in self.fetched
            and n <= kernels.HEAD_MOST_N
            and part_length(k, n) is None
        )

    def output(self, op: ops.Output, following: ops.Operation | None) -> bool:
        team = Team.of(self.width(op.y))
        self.add(
            kernels.output(op.function, team=team), self.over_rows(team),
            logits=self.at(op.logits), mean=self.at(op.mean), scale=self.at(op.scale), y=self.stored(op.y),
            n=self.width(op.logits),
        )  # fmt: skip
        return False

    def activation_backward(self, op: ops.ActivationBackward, following: ops.Operation | None) -> bool:
        if self.stacks.derives(op):
            return False
        n = self.width(op.dy)
        entry = kernels.activation_backward(op.activation)
        self.add(entry, self.over_elements(n), saved=self.at(op.saved), dy=self.at(op.dy), n=n)
        return False

    def dense_backward(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        """Two products, or in atomic mode one kernel for both; takes in an activation's derivative of dx."""
        if self.tensor_cores and self.tensor_cores.makes(op):
            return self.tensor_cores.backward(op, following)
        k, n = self.shapes[op.weight]
        dw, db = self.at(op.dweight), self.at(op.dbias)
        if self.plan.reduction == "atomic":
            if op.dx:
                self.add(kernels.zero(), self.over_elements(k), x=self.stored(op.dx), n=k)
            self.add(
                kernels.dense_backward_atomic(), (ceil_div(k, 32), ceil_div(n, 32), 1),
                x=self.at(op.x), dz=self.at(op.dz), w=self.at(op.weight), dw=dw, db=db, dx=self.at(op.dx), k=k, n=n,
            )  # fmt: skip
            return False
        fused = self._dense_backward_input(op, following) if op.dx else False
        if self.in_place:
            self._dense_backward_update(op)
            return fused
        tile = kernels.tile_for(k, n, self.multiprocessors)
        self.add(
            kernels.dense_backward_weight(tile), tile.grid(k, n),
            **self.rows_of(op.x), dz=self.at(op.dz), dw=dw, db=db, k=k, n=n,
        )  # fmt: skip
        return fused

    def _dense_backward_input(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        """It comes first: the other product may change the weights."""
        assert op.dx is not None
        k, n = self.shapes[op.weight]
        activation, saved = self.taken_in(op.dx, following)
        if op.dx not in self.made:
            tile = kernels.tile_for(self.rows, k, self.multiprocessors)
            self.add(
                kernels.dense_backward_input(activation, tile), tile.grid(self.rows, k),
                dz=self.at(op.dz), w=self.at(op.weight), saved=saved, dx=self.stored(op.dx), k=k, n=n,
            )  # fmt: skip
        return saved is not None

    def _dense_backward_update(self, op: ops.DenseBackward) -> None:
        k, n = self.shapes[op.weight]
        if self._updates_few(k, n):
            entry, grid, few = self._few(op.x, op.weight)
            parts = few["parts"] if self._is_ahead(op) else None
            few |= {name: value for name, value in self.updated(op).items() if name not in few}
            self.launches.append(Launch(entry, grid, {**few, "dz": self.at(op.dz), "parts": parts}, self.operation))
            return
        entry, grid = self._updating(type(self.plan.optimizer).__name__, k, n)
        self.add(entry, grid, **self.rows_of(op.x), dz=self.at(op.dz), **self.updated(op), k=k, n=n)
        if self.tail and op.dx:  # beside the first layer's update, for which these blocks leave room
            behind = self.rows > kernels.FEW_ROWS  # of few rows that update is the shorter one
            self.launches[-1] = replace(self.launches[-1], aside=True, behind=behind)

    def _updating(self, optimizer: str, k: int, n: int) -> tuple[Entry, tuple[int, int, int]]:
        """The kernel for a weight of this shape, and its grid."""
        if self._splits(k, n):
            tall = kernels.dense_backward_update(optimizer, "tall")
            if self.rows <= kernels.TALL_ROWS and n <= kernels.TALL_COLUMNS and tall.runs_on(self.arch):
                return tall, (min(self.multiprocessors, ceil_div(k, kernels.TALL_LINES)), 1, 1)
            return kernels.dense_backward_update(optimizer, kernels.SPLIT), kernels.SPLIT.grid(k, n)
        tile = kernels.tile_for(k, n, self.multiprocessors)
        grid = tile.grid(k, n)
        if n <= kernels.NARROW_COLUMNS or 10 * math.prod(grid) < 9 * self.multiprocessors:
            return kernels.dense_backward_update(optimizer, "narrow"), kernels.narrow_grid(k, n)
        return kernels.dense_backward_update(optimizer, tile), grid

    def _splits(self, k: int, n: int) -> bool:
        """Whether tensor cores make the products of a layer that is cut along k, of operands that they split.

        In a step alone: what an evaluation computes must not depend on how many rows there are.
        """
        is_cut = part_length(k, n) is not None and n >= kernels.SPLIT_LEAST_N
        return self.tensor_cores is not None and self.is_training and is_cut and self.rows > kernels.FEW_ROWS


_METHODS: dict[type[ops.Operation], Callable[..., bool]] = {
    ops.Gather: _Lowering.gather,
    ops.Standardize: _Lowering.standardize,
    ops.Dense: _Lowering.dense,
    ops.LocallyConnected: _Lowering.locally_connected,
    ops.Dropout: _Lowering.dropout,
    ops.Loss: _Lowering.loss,
    ops.Output: _Lowering.output,
    ops.ActivationBackward: _Lowering.activation_backward,
    ops.DenseBackward: _Lowering.dense_backward,
    ops.LocallyConnectedBackward: _Lowering.locally_connected_backward,
    ops.DropoutBackward: _Lowering.dropout_backward,
}


def lower(plan: Plan, *, multiprocessors: int, source: str, textured: bool = True, arch: str = "sm_75") -> Lowered:
    """The launches of ``plan`` on a card with so many multiprocessors, for inputs of type ``source``.

    ``source`` is ``"float32"`` or ``"uint8"``; ``textured`` whether targets are read through a texture; ``arch``
    what the card is compiled for.
    """
    lowered, setting = Lowered(), Setting(multiprocessors, arch, source, textured)
    stacked = stacked_partials(plan, multiprocessors=setting.multiprocessors, arch=setting.arch)
    in_place = updates_in_place(plan, stacked)
    for number in range(plan.shards if plan.training else 0):
        shard = _Lowering(plan, plan.training, setting, lowered, number, plan.shards, in_place)
        cores = shard.tensor_cores
        if number == 0 and cores and not cores.form.scaled and in_place:
            lowered.run_begin = shard.split_weights()  # the updates make those of later steps
        elif number == 0:
            lowered.begin = shard.split_weights()
        lowered.shards.append(shard.lower())
    whole = _Lowering(plan, plan.evaluation, setting, lowered)
    lowered.evaluation_begin = whole.split_weights()
    lowered.evaluation = whole.lower()
    if lowered.columns:
        forget_all, keep_used = (_mask_columns(lowered, multiprocessors, mask) for mask in (0, kernels.USED))
        lowered.evaluation_begin.insert(0, forget_all)
        if lowered.begin:
            lowered.run_begin.insert(0, forget_all)
            lowered.begin.insert(0, keep_used)
    if plan.training:
        lowered.finish = _lower_finish(plan, multiprocessors, lowered, in_place)
        dealt: dict[str, Value] = {"next": At("step"), "steps": At("steps"), "count": At("graph_steps")}
        lowered.deal = [Launch(kernels.deal_steps(), (1, 1, 1), dealt)]
        lowered.bytes["steps"] = STEP_BYTES * GRAPH_STEPS[0]
        lowered.stages = _stages(lowered)
    overlap(lowered)

    of_evaluation = SUMS_BYTES * ceil_div(plan.capacity, Team.of(plan.n_out).block_rows)
    slots = len(plan.optimizer.slots) if plan.optimizer else 0
    lowered.bytes |= {
        "step": STEP_BYTES,
        "parameters": 4 * plan.parameter_count,
        "statistics": 4 * plan.statistic_count,
        "slots": 4 * slots * plan.parameter_count,
        "partials": 0 if in_place else 4 * plan.shards * partials_pitch(plan),
        "sums": max(of_evaluation, lowered.bytes.get("sums", 0)),
        "arrived": 4,
        "totals": SUMS_BYTES,
        "losses": SUMS_BYTES * MOST_RUN_STEPS,
        **{name: 4 * len(words) for name, words in lowered.words.items()},
    }
    return lowered


def _stages(lowered: Lowered) -> int:
    """How many steps are made ready together: a power of two, for which what that leaves stays in a card's cache."""
    of_step = sum(lowered.staged_bytes.values())
    stages = max(steps for steps in GRAPH_STEPS if steps == 1 or steps * of_step <= MOST_STAGED_BYTES)
    for name, size in lowered.staged_bytes.items():
        lowered.bytes[name] = stages * size
    return stages


def _mask_columns(lowered: Lowered, multiprocessors: int, mask: int) -> Launch:
    """Of the flags of columns only ``mask`` stays.

    From step to step that is what nearly all columns have: blocks would meet at their words, all at once.  It does no
    harm in a column that has become zero, where sums are 0 whether they are made again or not.
    """
    size = sum(lowered.columns.values())
    lowered.bytes["columns"] = 4 * size
    blocks = min(ceil_div(size, kernels.ROW_THREADS), multiprocessors)
    return Launch(kernels.mask_words(), (blocks, 1, 1), {"words": At("columns"), "mask": mask, "size": size})


def _title_of(operations: tuple[ops.Operation, ...], kind: type[ops.Operation]) -> str:
    return title(operations, next(operation for operation in operations if isinstance(operation, kind)))


def _lower_finish(plan: Plan, multiprocessors: int, lowered: Lowered, in_place: bool) -> list[Launch]:
    """What is left to do once: the total error of several shards, Reduce, Norm, Update."""
    assert plan.optimizer is not None
    if in_place:
        return update_biases(plan, lowered)
    count, pitch = plan.parameter_count, partials_pitch(plan)
    launches = []
    if plan.shards > 1:
        blocks = lowered.bytes["sums"] // SUMS_BYTES
        values: dict[str, Value] = {
            "step": At("step"), "sums": At("sums"), "count": blocks, "totals": At("totals"), "losses": At("losses"),
        }  # fmt: skip
        launches.append(Launch(kernels.total_error(), (1, 1, 1), values, _title_of(plan.training, ops.Loss)))
    wide = min(ceil_div(count, kernels.ROW_THREADS), BLOCKS_PER_MULTIPROCESSOR * multiprocessors), 1, 1
    gradient: dict[str, Value] = {"partials": At("partials"), "pitch": pitch, "shards": plan.shards}
    clipped = any(isinstance(op, ops.Norm) for op in plan.training)

    # The update adds the shards up itself, unless a parameter is used twice or the norm comes between.
    if plan.ends_with_gradient or len(plan.partials) > len(plan.parameters) or (clipped and plan.shards > 1):
        lowered.bytes["gradient"] = 4 * count
        for parameter in plan.parameters:
            uses = [partial for partial in plan.partials if partial.parameter == parameter.name]
            values = {
                "partials": At("partials", uses[0].offset), "pitch": pitch, "shards": plan.shards, "uses": len(uses),
                "size": parameter.size, "gradient": At("gradient", parameter.offset),
            }  # fmt: skip
            launches.append(Launch(kernels.reduce(), wide, values, _title_of(plan.training, ops.Reduce)))
        gradient = {"partials": At("gradient"), "pitch": 0, "shards": 1}
    if plan.ends_with_gradient:
        return launches

    factor = None
    if clipped:
        lowered.bytes |= {"squares": 8 * SQUARE_BLOCKS, "factor": 4}
        factor = At("factor")
        values = {"gradient": gradient["partials"], "size": count, "sums": At("squares")}
        launches.append(Launch(kernels.squares(), (SQUARE_BLOCKS, 1, 1), values, _title_of(plan.training, ops.Norm)))
        values = {"sums": At("squares"), "count": SQUARE_BLOCKS, "totals": At("totals"), "factor": factor}
        launches.append(Launch(kernels.clip(), (1, 1, 1), values, _title_of(plan.training, ops.Norm)))

    values = {
        "step": At("step"), "totals": At("totals"), "factor": factor, **gradient, "parameters": At("parameters"),
        "slots": At("slots") if plan.optimizer.slots else None, "size": count,
    }  # fmt: skip
    entry = kernels.update(type(plan.optimizer).__name__)
    launches.append(Launch(entry, wide, values, _title_of(plan.training, ops.Update)))
    return launches
