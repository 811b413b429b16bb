"""From a plan to kernel launches: which entries, on which grids, with which arrays.

This is plain data, made without a GPU from the plan and the card's number of multiprocessors alone.
Arrays are named; the program that owns the memory puts addresses in.  Where neighbours allow, one
launch does the work of two operations, and what the second one read is then never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ... import plan as ops
from ...plan import Plan
from ...random import Purpose
from . import kernels
from .kernels import Entry, MatrixTile, ProductTile, ceil_div, padded_columns, padded_rows

# A product this long along k and this narrow is cut into parts along k, so that it makes up to MOST_PARTS tiles
# of so many columns.  The cut decides in which order sums are made, so it follows the widths alone.
PART_LEAST_K, PART_MOST_N, PART_K, MOST_PARTS, PART_COLUMNS = 4096, 512, 256, 256, 128
FEW_LEAST_SIZE, FEW_MOST_SIZE = 1 << 18, 1 << 31  # of a weight that a few rows are not worth a product for
BLOCKS_PER_MULTIPROCESSOR = 8
MOST_SUM_BLOCKS = 1 << 16
MOST_RUN_STEPS = 4096  # of the table of rates in constant memory
SQUARE_BLOCKS = 256
MOST_GRID_Y = 65535

STEP_BYTES, SUMS_BYTES = 24, 16


@dataclass(frozen=True)
class At:
    """An element of a named array, as the value of a pointer argument."""

    array: str
    offset: int = 0


@dataclass(frozen=True)
class Map:
    """The copy engine's map of planes, (planes, rows, columns), as the value of a pointer argument.

    ``box_rows`` is how many rows the kernel copies at once.
    """

    array: str
    planes: int
    rows: int
    columns: int
    box_rows: int


Value = At | Map | int | float | None


@dataclass(frozen=True)
class Launch:
    """One kernel launch; ``values`` are those of the entry's arguments, by name.

    ``operation`` is the plan's, by its number and kind: ``"1 Dense"``.  It is empty for a launch that no
    operation asked for, and the first one's for a launch that does the work of two.
    """

    entry: Entry
    grid: tuple[int, int, int]
    values: Mapping[str, Value]
    operation: str = ""


@dataclass
class Lowered:
    """A plan as launches.

    Attributes:
        bytes: of each array that a program of this plan owns.
        columns: lengths of the flags that lie side by side in the array of this name.
        run_begin: what runs before the first of several steps.
        begin: what a step begins with, once.
        shares: what each share's stream runs in a step; ``finish`` follows when all have.
        evaluation_begin: what runs before the first batch of an evaluation.
        evaluation: what an evaluation runs for a batch.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    run_begin: list[Launch] = field(default_factory=list)
    begin: list[Launch] = field(default_factory=list)
    shares: list[list[Launch]] = field(default_factory=list)
    finish: list[Launch] = field(default_factory=list)
    evaluation_begin: list[Launch] = field(default_factory=list)
    evaluation: list[Launch] = field(default_factory=list)

    def launches(self) -> list[Launch]:
        """All of them: those of a step, then those of an evaluation."""
        shares = [launch for share in self.shares for launch in share]
        return [*self.run_begin, *self.begin, *shares, *self.finish, *self.evaluation_begin, *self.evaluation]

    def maps(self) -> list[Map]:
        """All maps that launches take, each once."""
        values = (value for launch in self.launches() for value in launch.values.values())
        return list(dict.fromkeys(value for value in values if isinstance(value, Map)))

    def entries(self) -> list[Entry]:
        """All entries launched, each once."""
        return list(dict.fromkeys(launch.entry for launch in self.launches()))


def part_length(k: int, n: int) -> int | None:
    """How much of k each part of a product takes; None for the whole of it."""
    if k < PART_LEAST_K or n > PART_MOST_N:
        return None
    return max(PART_K, 16 * kernels.ceil_div(k, 16 * (MOST_PARTS // kernels.ceil_div(n, PART_COLUMNS))))


def updates_in_place(plan: Plan) -> bool:
    """Whether the products that make gradients also move the parameters.

    Each parameter must have one partial, which is its whole gradient; all of them dense layers' products must
    make, and nothing may come between.
    """
    made = {name for op in plan.training if isinstance(op, ops.DenseBackward) for name in (op.dweight, op.dbias)}
    return (
        plan.shares == 1
        and plan.reduction == "ordered"
        and len(plan.partials) == len(plan.parameters)
        and all(partial.name in made for partial in plan.partials)
        and not any(isinstance(op, ops.Norm) for op in plan.training)
    )


@dataclass(frozen=True)
class _Card:
    """What launches depend on."""

    multiprocessors: int
    arch: str


class _Lowering:
    """Lowers the operations of one share, one after another."""

    def __init__(
        self,
        plan: Plan,
        operations: tuple[ops.Operation, ...],
        card: _Card,
        source: str,
        textured: bool,
        lowered: Lowered,
        share: int,
        shares: int,
    ) -> None:
        self.plan, self.lowered, self.source, self.textured = plan, lowered, source, textured
        self.operations, self.is_training = operations, operations is plan.training
        self.multiprocessors, self.arch = card.multiprocessors, card.arch
        self.form = kernels.form_of(plan.precision, card.arch) if plan.reduction == "ordered" else None
        self.in_planes: set[str] = set()  # buffers of which there are planes
        self.rows = kernels.ceil_div(plan.capacity, shares)  # the most that a share has
        self.common: dict[str, Value] = {"step": At("step"), "share": share, "shares": shares}
        self.share, self.shares = share, shares
        self.launches: list[Launch] = []
        self.operation = ""  # the one that is being lowered
        self.fetched: set[str] = set()  # inputs that their readers fetch from the data set by themselves
        self.head: tuple[ops.Dense, str] | None = None  # the last layer, if the loss's kernel does it; its title
        self.made: set[str] = set()  # deltas that were made before their operation's turn
        self.segments: dict[str, At] = {p.name: At("parameters", p.offset) for p in plan.parameters}
        self.segments |= {s.name: At("statistics", s.offset) for s in plan.statistics}
        pitch = _end(plan.partials)
        self.segments |= {p.name: At("partials", share * pitch + p.offset) for p in plan.partials}
        self.shapes = {p.name: p.shape for p in plan.parameters}
        self.target_statistics: tuple[Value, Value] = (None, None)

    def rows_of(self, name: str) -> dict[str, Value]:
        """A product's input: a buffer, or rows of the data set by the order."""
        if name in self.fetched:
            return {"x": At("data"), "order": At("order")}
        return {"x": self.at(name), "order": None}

    def at(self, name: str | None) -> Value:
        return None if name is None else self.segments.get(name, At(name))

    def stored(self, name: str) -> Value:
        """A buffer of the plan that is really kept in memory."""
        self.lowered.bytes[name] = 4 * math.prod(self.plan.buffers[name].shape)
        return At(name)

    def add(self, entry: Entry, grid: tuple[int, int, int], **values: Value) -> None:
        self.launches.append(Launch(entry, grid, {**self.common, **values}, self.operation))

    def over_elements(self, n: int, per_thread: int = 1) -> tuple[int, int, int]:
        blocks = kernels.ceil_div(self.rows * n, kernels.ROW_THREADS * per_thread)
        return max(1, min(blocks, BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors)), 1, 1

    def over_rows(self) -> tuple[int, int, int]:
        return kernels.ceil_div(self.rows, kernels.WARPS_PER_BLOCK), 1, 1

    def width(self, name: str) -> int:
        return self.plan.buffers[name].shape[-1]

    # --- one method for each operation; `following` is the next one, for those that can take it in ---

    def gather(self, op: ops.Gather, following: ops.Operation | None) -> bool:
        readers = [other for other in self.operations if op.x in other.reads]
        products = ops.Dense if self.plan.reduction == "atomic" else (ops.Dense, ops.DenseBackward)
        # What makes planes of bfloat16 fetches too; scaled planes are made beside floats, which products may read.
        on_tensor_cores = any(map(self.on_tensor_cores, readers))
        if (
            self.source == "float32"
            and all(isinstance(reader, products) for reader in readers)
            and not (on_tensor_cores and self.form and self.form.scaled)
        ):
            self.fetched.add(op.x)
            return False
        n = self.width(op.x)
        self.add(
            kernels.gather(self.source), self.over_elements(n),
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
        if self.on_tensor_cores(op):
            self._tensor_forward(op)
            return False
        k, n = self.shapes[op.weight]
        if self._is_head(op, following):
            self.head = op, self.operation
            return False
        z, y = self.stored(op.z) if op.z else None, self.stored(op.y)
        part = part_length(k, n)
        if part is None:
            tile = kernels.tile_for(self.rows, n, self.multiprocessors)
            self.add(
                kernels.dense_forward(op.activation, tile), tile.grid(self.rows, n),
                **self.rows_of(op.x), w=self.at(op.weight), b=self.at(op.bias), z=z, y=y, k=k, n=n,
            )  # fmt: skip
            return False
        count, capacity = kernels.ceil_div(k, part), self.plan.capacity
        parts = f"parts{self.share}"  # shares run side by side, and may be at different layers
        self.lowered.bytes[parts] = max(self.lowered.bytes.get(parts, 0), 4 * count * capacity * n)
        if self.rows <= kernels.FEW_ROWS:
            entry, grid = kernels.dense_forward_part_few(), (1, 1, count)
        else:
            wide = kernels.SPLIT if self._splits(k, n) else kernels.tile_for(self.rows, n, self.multiprocessors, count)
            entry, grid = kernels.dense_forward_part(wide), wide.grid(self.rows, n, count)
        self.add(
            entry, grid,
            **self.rows_of(op.x), w=self.at(op.weight), parts=At(parts), k=k, n=n, part=part, capacity=capacity,
        )  # fmt: skip
        blocks = min(kernels.ceil_div(self.rows * n, kernels.WARP), MOST_SUM_BLOCKS)
        self.add(
            kernels.dense_forward_sum(op.activation), (blocks, 1, 1),
            parts=At(parts), b=self.at(op.bias), z=z, y=y, n=n, count=count, capacity=capacity,
        )  # fmt: skip
        return False

    def over_columns(self, n: int, lines: int) -> tuple[int, int, int]:
        """Blocks for n columns and so many lines, of which a block may take several in turn."""
        return kernels.ceil_div(n, kernels.ROW_THREADS), min(lines, MOST_GRID_Y), 1

    def locally_connected(self, op: ops.LocallyConnected, following: ops.Operation | None) -> bool:
        (window, pitch), n = self.shapes[op.weight], self.width(op.y)
        z, y = self.stored(op.z) if op.z else None, self.stored(op.y)
        self.add(
            kernels.local_forward(op.activation), self.over_columns(n, kernels.ceil_div(self.rows, kernels.LOCAL_ROWS)),
            x=self.at(op.x), w=self.at(op.weight), b=self.at(op.bias), z=z, y=y, m=self.width(op.x), n=n,
            window=window, pitch=pitch, b_step=int(op.bias is not None and self.shapes[op.bias][0] == pitch),
        )  # fmt: skip
        return False

    def locally_connected_backward(self, op: ops.LocallyConnectedBackward, following: ops.Operation | None) -> bool:
        """Takes in an activation's derivative of dx.  No sum is made by atomics, in either mode."""
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
            self.over_columns(m, kernels.ceil_div(self.rows, kernels.LOCAL_ROWS)),
            dz=self.at(op.dz), w=self.at(op.weight), saved=saved, dx=self.stored(op.dx), m=m, n=n, window=window,
            pitch=pitch,
        )  # fmt: skip
        return saved is not None

    def taken_in(self, dx: str, following: ops.Operation | None) -> tuple[str, Value]:
        """The activation whose derivative a kernel that writes ``dx`` can apply at once, and what that takes."""
        if isinstance(following, ops.ActivationBackward) and following.dy == dx:
            return following.activation, self.at(following.saved)
        return "identity", None

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
        mean, scale = self.target_statistics
        blocks = self.over_rows()[0]
        total: dict[str, Value] = {"arrived": None, "totals": None, "losses": None}
        if self.shares == 1:  # the last block to end adds the batch up
            total = {name: At(name) for name in total}
        delta = self.stored(op.delta) if op.delta else None
        values: dict[str, Value] = {
            "order": At("order"), "targets": At("targets"), "weights": At("weights"), "mean": mean, "scale": scale,
            "delta": delta, "sums": At("sums", 2 * blocks * self.share), **total, "n": self.width(op.logits),
        }  # fmt: skip
        if self.head is None:
            entry = kernels.loss(op.loss, op.kind, textured=self.textured)
            self.add(entry, self.over_rows(), **values, logits=self.at(op.logits))
            return False
        dense, self.operation = self.head
        place, backward = next(
            (place, other)
            for place, other in enumerate(self.operations)
            if isinstance(other, ops.DenseBackward) and other.dz == op.delta
        )
        activation, saved, dx = "identity", None, None
        if backward.dx:
            activation, saved = self.taken_in(backward.dx, self.operations[place + 1])
            dx = self.stored(backward.dx)
            self.made.add(backward.dx)
        self.add(
            kernels.head(op.loss, op.kind, textured=self.textured), self.over_rows(),
            **values, x=self.at(dense.x), w=self.at(dense.weight), b=self.at(dense.bias), saved=saved,
            activation=kernels.activation_number(activation), dx=dx, k=self.shapes[dense.weight][0],
        )  # fmt: skip
        return False

    def _is_head(self, op: ops.Dense, following: ops.Operation | None) -> bool:
        """Whether the last layer and its loss are one kernel's work."""
        k, n = self.shapes[op.weight]
        return (
            isinstance(following, ops.Loss)
            and following.delta is not None
            and self.plan.reduction == "ordered"
            and op.activation == "identity"
            and op.x not in self.fetched
            and n <= kernels.HEAD_MOST_N
            and part_length(k, n) is None
        )

    def output(self, op: ops.Output, following: ops.Operation | None) -> bool:
        self.add(
            kernels.output(op.function), self.over_rows(),
            logits=self.at(op.logits), mean=self.at(op.mean), scale=self.at(op.scale), y=self.stored(op.y),
            n=self.width(op.logits),
        )  # fmt: skip
        return False

    def activation_backward(self, op: ops.ActivationBackward, following: ops.Operation | None) -> bool:
        n = self.width(op.dy)
        entry = kernels.activation_backward(op.activation)
        self.add(entry, self.over_elements(n), saved=self.at(op.saved), dy=self.at(op.dy), n=n)
        return False

    def dense_backward(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        """Two products, or in atomic mode one kernel for both; takes in an activation's derivative of dx."""
        if self.on_tensor_cores(op):
            return self._tensor_backward(op, following)
        k, n = self.shapes[op.weight]
        dw, db = self.at(op.dweight), self.at(op.dbias)
        if self.plan.reduction == "atomic":
            if op.dx:
                self.add(kernels.zero(), self.over_elements(k), x=self.stored(op.dx), n=k)
            self.add(
                kernels.dense_backward_atomic(), (kernels.ceil_div(k, 32), kernels.ceil_div(n, 32), 1),
                x=self.at(op.x), dz=self.at(op.dz), w=self.at(op.weight), dw=dw, db=db, dx=self.at(op.dx), k=k, n=n,
            )  # fmt: skip
            return False
        fused = self._dense_backward_input(op, following) if op.dx else False
        if updates_in_place(self.plan):
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
        entry, grid = self._updating(type(self.plan.optimizer).__name__, k, n)
        self.add(entry, grid, **self.rows_of(op.x), dz=self.at(op.dz), **self.updated(op), k=k, n=n)

    def updated(self, op: ops.DenseBackward) -> dict[str, Value]:
        """What a kernel changes that also makes the optimizer's step."""
        bias = next((partial.parameter for partial in self.plan.partials if partial.name == op.dbias), None)
        return {
            "totals": At("totals"), "weight": self.at(op.weight), "bias": self.at(bias),
            "weight_slots": self.slots_of(op.weight), "bias_slots": self.slots_of(bias),
            "size": self.plan.parameter_count,
        }  # fmt: skip

    def _updating(self, optimizer: str, k: int, n: int) -> tuple[Entry, tuple[int, int, int]]:
        """The kernel for a weight of this shape, and its grid."""
        is_few = self.rows <= kernels.FEW_ROWS and kernels.FEW_LEAST_N <= n <= kernels.FEW_MOST_N
        if is_few and FEW_LEAST_SIZE <= k * n < FEW_MOST_SIZE:
            return kernels.dense_backward_update(optimizer, "few"), kernels.few_grid(k, n)
        if self._splits(k, n):
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
        return self.form is not None and self.is_training and is_cut and self.rows > kernels.FEW_ROWS

    def slots_of(self, name: str | None) -> Value:
        """Where a parameter's first slot lies; each further one a flat array on."""
        place = self.at(name)
        has_slots = self.plan.optimizer is not None and self.plan.optimizer.slots
        return At("slots", place.offset) if isinstance(place, At) and has_slots else None

    # --- dense layers on tensor cores: planes of their operands, and the products ---

    def on_tensor_cores(self, op: ops.Operation | None) -> bool:
        """Whether tensor cores make the products of an operation."""
        if self.form is None or not isinstance(op, (ops.Dense, ops.DenseBackward)):
            return False
        k, n = self.shapes[op.weight]
        if part_length(k, n) is not None:
            return False
        return kernels.takes_tensor_cores(k, n, self.rows if self.is_training else None)

    def _multiplies(self, name: str) -> bool:
        """Whether tensor cores read a buffer."""
        return any(name in op.reads and self.on_tensor_cores(op) for op in self.operations)

    def _reads_floats(self, name: str) -> bool:
        """Whether anything but tensor cores reads a buffer."""
        if name in (self.plan.logits, self.plan.output):
            return True
        for before, op in zip((None, *self.operations), self.operations, strict=False):
            is_taken_in = (
                isinstance(op, ops.ActivationBackward)
                and isinstance(before, ops.DenseBackward)
                and self.on_tensor_cores(before)
                and before.dx == op.dy
            )
            if name in op.reads and not self.on_tensor_cores(op) and not is_taken_in:
                return True
        return False

    def _of_share(self, name: str) -> str:
        """Shares run side by side, so each has planes of its own."""
        return f"{name}@{self.share}" if self.share else name

    def _words(self, name: str, count: int) -> Value:
        """An array that tells of scaled lines; planes without scales have none."""
        if self.form is None or not self.form.scaled:
            return None
        self.lowered.bytes[name] = max(self.lowered.bytes.get(name, 0), 4 * count)
        return At(name)

    def _lines_of(self, name: str) -> Value:
        """The lines of a buffer's rows."""
        return self._words(self._of_share(f"{name}.lines"), padded_rows(self.rows))

    def _held(self, name: str) -> Value:
        """The float32 array beside planes: products read it where its scaled planes do not hold it."""
        return self.at(name) if self.form is not None and self.form.scaled else None

    def _columns(self, name: str, n: int) -> Value:
        """Flags of columns that several blocks set: all lie in one array, which is cleared at once."""
        if self.form is None or not self.form.scaled:
            return None
        sizes = self.lowered.columns
        sizes.setdefault(name, padded_columns(n))
        names = list(sizes)
        return At("columns", sum(sizes[other] for other in names[: names.index(name)]))

    def _plane(self, n: int) -> int:
        """Elements of one plane of the share's rows."""
        return padded_rows(self.rows) * padded_columns(n)

    def _planes(self, name: str, size: int) -> At:
        """The planes, of so many elements each, beside an array."""
        assert self.form is not None
        self.lowered.bytes[name] = max(self.lowered.bytes.get(name, 0), 2 * self.form.planes * size)
        return At(name)

    def _planes_of(self, name: str) -> At:
        """Those of a buffer."""
        return self._planes(self._of_share(f"{name}.planes"), self._plane(self.width(name)))

    def _written(self, name: str) -> tuple[Value, Value]:
        """The arrays that a product of planes leaves a buffer in: of floats, and of planes."""
        assert self.form is not None
        planes = None
        if not self.form.scaled and self._multiplies(name):
            self.in_planes.add(name)
            planes = self._planes_of(name)
        return self.stored(name) if planes is None or self._reads_floats(name) else None, planes

    def _sources(
        self, tile: ProductTile, a: tuple[At, int, int], b: tuple[At, int, int], *, a_inner: bool, b_inner: bool
    ) -> tuple[Value, Value]:
        """What a product is given of its operands, each (planes, rows, columns): planes, or maps of them."""
        if isinstance(tile, MatrixTile):
            return a[0], b[0]
        boxes = tile.box_rows(a_inner=a_inner, b_inner=b_inner)
        first, second = (
            Map(planes.array, tile.form.planes, padded_rows(rows), columns, box)
            for (planes, rows, columns), box in zip((a, b), boxes, strict=True)
        )
        return first, second

    def over_padded_rows(self) -> tuple[int, int, int]:
        return padded_rows(self.rows), 1, 1

    def split_weights(self) -> list[Launch]:
        """Planes of all weights that tensor cores read; their flags, and those of inputs, are cleared first."""
        launches: dict[str, Launch] = {}
        for op in self.operations:
            if self.form is None or not isinstance(op, ops.Dense) or not self.on_tensor_cores(op):
                continue
            k, n = self.shapes[op.weight]
            launches[op.weight] = Launch(
                kernels.split_weights(self.form),
                (padded_rows(k), 1, 1),
                {"w": self.at(op.weight), **self._weight(op.weight), "k": k, "n": n},
                _title(self.operations, op),
            )
        return list(launches.values())

    def _weight_planes(self, weight: str) -> At:
        k, n = self.shapes[weight]
        return self._planes(f"{weight}.planes", padded_rows(k) * padded_columns(n))

    def _weight(self, weight: str) -> dict[str, Value]:
        k, n = self.shapes[weight]
        return {
            "planes": self._weight_planes(weight),
            "lines": self._words(f"{weight}.lines", padded_rows(k)),
            "columns": self._columns(f"{weight}.columns", n),
        }

    def _tensor_forward(self, op: ops.Dense) -> None:
        assert self.form is not None
        k, n = self.shapes[op.weight]
        weight, w_planes, x_planes = self._weight(op.weight), self._weight_planes(op.weight), self._planes_of(op.x)
        x_lines = self._lines_of(op.x)
        if op.x not in self.in_planes:
            self.in_planes.add(op.x)
            self.add(
                kernels.split_rows(self.form), self.over_padded_rows(),
                **self.rows_of(op.x), weight_lines=weight["lines"], planes=x_planes, plane=self._plane(k),
                lines=x_lines,
                columns=self._columns(self._of_share(f"{op.x}.columns"), k) if self.is_training else None, n=k,
            )  # fmt: skip
        z = self.stored(op.z) if op.z else None
        y, y_planes = self._written(op.y)
        tile = kernels.matrix_tile_for(self.form, self.rows, n, self.multiprocessors, self.arch)
        x_source, w_source = self._sources(
            tile, (x_planes, self.rows, k), (w_planes, k, n), a_inner=True, b_inner=False
        )
        self.add(
            kernels.tensor_forward(op.activation, tile),
            tile.grid(padded_rows(self.rows) if y_planes else self.rows, n, self.multiprocessors),
            x_planes=x_source, x_plane=self._plane(k), w_planes=w_source, x_lines=x_lines,
            w_columns=weight["columns"], x=self._held(op.x), w=self._held(op.weight), b=self.at(op.bias), z=z, y=y,
            y_planes=y_planes, k=k, n=n,
        )  # fmt: skip

    def _tensor_backward(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        """Both products; takes in an activation's derivative of dx."""
        assert self.form is not None
        form, (k, n), plane = self.form, self.shapes[op.weight], self._plane(self.shapes[op.weight][1])
        lines = self._lines_of(op.dz)
        weight_lines = self._weight(op.weight)["lines"]
        if form.scaled:
            rows = self._planes_of(op.dz) if op.dx else None
            self.add(
                kernels.split_rows(form), self.over_padded_rows(),
                x=self.at(op.dz), order=None, weight_lines=None, planes=rows, plane=plane, lines=lines,
                columns=None, n=n,
            )  # fmt: skip
        name = f"{op.dz}.planes for {op.dweight}" if form.scaled else f"{op.dz}.planes"
        planes = self._planes(self._of_share(name), plane)
        columns = self._words(self._of_share(f"{op.dz}.columns"), padded_columns(n))
        x_lines = self._lines_of(op.x)
        db = self.at(op.dbias)
        if op.dbias and updates_in_place(self.plan):
            self.lowered.bytes[op.dbias] = 4 * n
            db = At(op.dbias)
        if op.dz not in self.in_planes:
            self.add(
                kernels.split_columns(form), (padded_columns(n) // kernels.WARP, 1, 1),
                dz=self.at(op.dz), lines=lines, x_lines=x_lines, planes=planes, plane=plane, columns=columns, db=db,
                n=n,
            )  # fmt: skip
        elif op.dbias:
            self.add(kernels.sum_columns(), (ceil_div(n, kernels.WARP), 1, 1), dz=planes, db=db, n=n)
        fused = self._tensor_backward_input(op, following) if op.dx else False
        tile = kernels.matrix_tile_for(form, k, n, self.multiprocessors, self.arch)
        x_source, dz_source = self._sources(
            tile, (self._planes_of(op.x), self.rows, k), (planes, self.rows, n), a_inner=False, b_inner=False
        )
        operands: dict[str, Value] = {
            "x_planes": x_source, "x_plane": self._plane(k), "dz_planes": dz_source, "dz_plane": plane,
            "x_columns": self._columns(self._of_share(f"{op.x}.columns"), k), "w_lines": weight_lines,
            "dz_columns": columns, "x": self._held(op.x), "dz": self._held(op.dz), "k": k, "n": n,
        }  # fmt: skip
        grid = tile.grid(k, n, self.multiprocessors)
        if updates_in_place(self.plan):
            optimizer = type(self.plan.optimizer).__name__
            w_planes = None if form.scaled else self._weight_planes(op.weight)
            entry = kernels.tensor_backward_update(optimizer, tile)
            self.add(entry, grid, **operands, db=db, w_planes=w_planes, **self.updated(op))
        else:
            self.add(kernels.tensor_backward_weight(tile), grid, **operands, dw=self.at(op.dweight))
        return fused

    def _tensor_backward_input(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        assert self.form is not None and op.dx is not None
        k, n = self.shapes[op.weight]
        activation, array = self.taken_in(op.dx, following)
        saved: dict[str, Value] = {"saved": array, "saved_planes": None}
        if isinstance(array, At) and array.array not in self.lowered.bytes:
            saved = {"saved": None, "saved_planes": self._planes_of(array.array)}
        dx, dx_planes = self._written(op.dx)
        tile = kernels.matrix_tile_for(self.form, self.rows, k, self.multiprocessors, self.arch)
        w_planes = self._weight_planes(op.weight)
        dz_source, w_source = self._sources(
            tile, (self._planes_of(op.dz), self.rows, n), (w_planes, k, n), a_inner=True, b_inner=True
        )
        self.add(
            kernels.tensor_backward_input(activation, tile),
            tile.grid(padded_rows(self.rows) if dx_planes else self.rows, k, self.multiprocessors),
            dz_planes=dz_source, dz_plane=self._plane(n), w_planes=w_source,
            dz_lines=self._lines_of(op.dz), w_lines=self._weight(op.weight)["lines"],
            dz=self._held(op.dz), w=self._held(op.weight), **saved, dx=dx,
            dx_planes=dx_planes, k=k, n=n,
        )  # fmt: skip
        return array is not None


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
    lowered, card = Lowered(), _Card(multiprocessors, arch)
    for share in range(plan.shares if plan.training else 0):
        lowering = _Lowering(plan, plan.training, card, source, textured, lowered, share, plan.shares)
        if share == 0 and lowering.form and not lowering.form.scaled and updates_in_place(plan):
            lowered.run_begin = lowering.split_weights()  # the updates make those of later steps
        elif share == 0:
            lowered.begin = lowering.split_weights()
        lowered.shares.append(_lower_rows(plan.training, lowering))
    lowering = _Lowering(plan, plan.evaluation, card, source, textured, lowered, 0, 1)
    lowered.evaluation_begin = lowering.split_weights()
    lowered.evaluation = _lower_rows(plan.evaluation, lowering)
    if lowered.columns:
        clear = _clear_columns(lowered, multiprocessors)
        lowered.begin[:0], lowered.evaluation_begin[:0] = [clear] if lowered.begin else [], [clear]
    if plan.training:
        lowered.finish = _lower_finish(plan, multiprocessors, lowered)

    shares = max(1, plan.shares)
    most_blocks = shares * kernels.ceil_div(kernels.ceil_div(plan.capacity, shares), kernels.WARPS_PER_BLOCK)
    most_blocks = max(most_blocks, kernels.ceil_div(plan.capacity, kernels.WARPS_PER_BLOCK))
    slots = len(plan.optimizer.slots) if plan.optimizer else 0
    lowered.bytes |= {
        "step": STEP_BYTES,
        "parameters": 4 * plan.parameter_count,
        "snapshot": 4 * plan.parameter_count,
        "statistics": 4 * plan.statistic_count,
        "slots": 4 * slots * plan.parameter_count,
        "partials": 0 if updates_in_place(plan) else 4 * plan.shares * _end(plan.partials),
        "sums": SUMS_BYTES * most_blocks,
        "arrived": 4,
        "totals": SUMS_BYTES,
        "losses": SUMS_BYTES * MOST_RUN_STEPS,
    }
    return lowered


def _lower_rows(operations: tuple[ops.Operation, ...], lowering: _Lowering) -> list[Launch]:
    of_rows = [operation for operation in operations if type(operation) in _METHODS]
    taken_in = False  # whether the operation before did this one's work
    for operation, following in zip(of_rows, [*of_rows[1:], None], strict=True):
        lowering.operation = _title(operations, operation)
        taken_in = not taken_in and _METHODS[type(operation)](lowering, operation, following)
    return lowering.launches


def _clear_columns(lowered: Lowered, multiprocessors: int) -> Launch:
    size = sum(lowered.columns.values())
    lowered.bytes["columns"] = 4 * size
    blocks = min(ceil_div(size, kernels.ROW_THREADS), multiprocessors)
    return Launch(kernels.clear_words(), (blocks, 1, 1), {"words": At("columns"), "size": size})


def _title(operations: tuple[ops.Operation, ...], operation: ops.Operation) -> str:
    return f"{operations.index(operation)} {type(operation).__name__}"


def _title_of(operations: tuple[ops.Operation, ...], kind: type[ops.Operation]) -> str:
    return _title(operations, next(operation for operation in operations if isinstance(operation, kind)))


def _end(partials: Sequence[ops.Partial]) -> int:
    return partials[-1].end if partials else 0


def _lower_finish(plan: Plan, multiprocessors: int, lowered: Lowered) -> list[Launch]:
    """What is left to do once: the total error of several shares, Reduce, Norm, Update, the move to the next step."""
    assert plan.optimizer is not None
    advance = Launch(kernels.advance(), (1, 1, 1), {"step": At("step")})
    if updates_in_place(plan):
        return [advance]
    count, pitch = plan.parameter_count, _end(plan.partials)
    launches = []
    if plan.shares > 1:
        rows = kernels.ceil_div(plan.capacity, plan.shares)
        blocks = plan.shares * kernels.ceil_div(rows, kernels.WARPS_PER_BLOCK)
        values: dict[str, Value] = {
            "step": At("step"), "sums": At("sums"), "count": blocks, "totals": At("totals"), "losses": At("losses"),
        }  # fmt: skip
        launches.append(Launch(kernels.total_error(), (1, 1, 1), values, _title_of(plan.training, ops.Loss)))
    wide = min(kernels.ceil_div(count, kernels.ROW_THREADS), BLOCKS_PER_MULTIPROCESSOR * multiprocessors), 1, 1
    gradient: dict[str, Value] = {"partials": At("partials"), "pitch": pitch, "shares": plan.shares}
    clipped = any(isinstance(op, ops.Norm) for op in plan.training)

    # The update adds the shares up itself, unless a parameter is used twice or the norm comes between.
    if len(plan.partials) > len(plan.parameters) or (clipped and plan.shares > 1):
        lowered.bytes["gradient"] = 4 * count
        for parameter in plan.parameters:
            uses = [partial for partial in plan.partials if partial.parameter == parameter.name]
            values = {
                "partials": At("partials", uses[0].offset), "pitch": pitch, "shares": plan.shares, "uses": len(uses),
                "size": parameter.size, "gradient": At("gradient", parameter.offset),
            }  # fmt: skip
            launches.append(Launch(kernels.reduce(), wide, values, _title_of(plan.training, ops.Reduce)))
        gradient = {"partials": At("gradient"), "pitch": 0, "shares": 1}

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
    return [*launches, advance]
