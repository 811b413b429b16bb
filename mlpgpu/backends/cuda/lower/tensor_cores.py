"""Dense layers on tensor cores: planes of their operands, and the products of planes.

The planes are the program's own arrays, named after the float32 arrays beside which they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from .... import plan as ops
from ....plan import Plan
from .. import kernels
from ..kernels import Entry, Form, MatrixTile, ProductTile, ceil_div, padded_columns, padded_rows
from ..kernels.launches import At, Launch, Lowered, Map, Value
from .shard import Shard, part_length, title

# Below, plain cores have made a product before tensor cores have its operands.
LEAST_WIDTH, LEAST_WEIGHTS, LEAST_ROWS = 128, 1 << 18, 256

# Up to here in each layer, more products without scales take less time than passes that scale what goes between them.
MOST_UNSCALED_WEIGHTS = 1 << 21

Grid = tuple[int, int, int]

# Arrays: parts of biases' gradients, and what is known of each, PartedBias of elementwise/update.cuh.
BIAS_PARTS, PARTED_BIASES, PARTED_WORDS = "bias parts", "biases in parts", 6


def update_biases(plan: Plan, lowered: Lowered) -> list[Launch]:
    """The launch that ends a step where products have left parts of biases' gradients."""
    words = lowered.words.get(PARTED_BIASES, ())
    if not words:
        return []
    assert plan.optimizer is not None
    update = next(op for op in plan.training if isinstance(op, ops.Update))
    known = [words[first : first + PARTED_WORDS] for first in range(0, len(words), PARTED_WORDS)]
    columns, parts = sum(n for _, _, _, n, *_ in known), max(parts for _, parts, *_ in known)
    values: dict[str, Value] = {
        "step": At("step"), "totals": At("totals"), "described": At(PARTED_BIASES), "count": len(known),
        "column_parts": At(BIAS_PARTS), "biases": At("parameters"),
        "biases_slots": At("slots") if plan.optimizer.slots else None, "size": plan.parameter_count,
        "columns": columns,
    }  # fmt: skip
    entry = kernels.update_biases(type(plan.optimizer).__name__)
    grid = ceil_div(columns, entry.threads), 1, 1
    return [Launch(entry, grid, values, title(plan.training, update), {"part_count": parts})]


class TensorCores:
    """Lowers those dense layers of a shard whose products tensor cores make.

    Attributes:
        form: what planes hold.
        in_planes: buffers of which there are planes.
        looked_at: deltas whose rows' exponents whoever made them has left.
    """

    def __init__(self, shard: Shard, form: Form) -> None:
        self.shard, self.form = shard, form
        self.in_planes: set[str] = set()
        self.looked_at: set[str] = set()

    @classmethod
    def of(cls, shard: Shard) -> TensorCores | None:
        """Those of a shard, if any of the plan's products may be made there."""
        plan = shard.plan
        widths = [shard.shapes[op.weight] for op in plan.evaluation if isinstance(op, ops.Dense)]
        weights = max((k * n for k, n in widths if cls._is_wide(k, n)), default=0)
        form = kernels.form_of(plan.precision, shard.arch, is_large=weights > MOST_UNSCALED_WEIGHTS)
        return cls(shard, form) if form and plan.reduction == "ordered" else None

    @staticmethod
    def _is_wide(k: int, n: int) -> bool:
        return min(k, n) >= LEAST_WIDTH and k * n >= LEAST_WEIGHTS and part_length(k, n) is None

    def makes(self, op: ops.Operation) -> bool:
        """Whether tensor cores make the products of an operation.

        In an evaluation the widths alone decide: the bits of a row must not depend on how many go with it.
        """
        if not isinstance(op, (ops.Dense, ops.DenseBackward)):
            return False
        is_wide = self._is_wide(*self.shard.shapes[op.weight])
        return is_wide and (self.shard.rows >= LEAST_ROWS or not self.shard.is_training)

    def _multiplies(self, name: str) -> bool:
        """Whether tensor cores read a buffer."""
        return any(name in op.reads and self.makes(op) for op in self.shard.operations)

    def _reads_floats(self, name: str) -> bool:
        """Whether anything but tensor cores reads a buffer."""
        shard = self.shard
        if name in (shard.plan.logits, shard.plan.output):
            return True
        for before, op in zip((None, *shard.operations), shard.operations, strict=False):
            is_taken_in = (
                isinstance(op, ops.ActivationBackward) and isinstance(before, ops.DenseBackward) and before.dx == op.dy
            )
            if name in op.reads and not self.makes(op) and not is_taken_in:
                return True
        return False

    def _of_shard(self, name: str) -> str:
        """Shards run side by side, so each has planes of its own."""
        return f"{name}@{self.shard.number}" if self.shard.number else name

    def _words(self, name: str, count: int) -> Value:
        """An array that tells of scaled lines; planes without scales have none."""
        if not self.form.scaled:
            return None
        self.shard.lowered.bytes[name] = max(self.shard.lowered.bytes.get(name, 0), 4 * count)
        return At(name)

    def _lines_of(self, name: str) -> Value:
        """The lines of a buffer's rows."""
        return self._words(self._of_shard(f"{name}.lines"), padded_rows(self.shard.rows))

    def _held(self, name: str) -> Value:
        """The float32 array beside planes: products read it where its scaled planes do not hold it."""
        return self.shard.at(name) if self.form.scaled else None

    def _columns(self, name: str, n: int) -> Value:
        """Flags of columns that several blocks set: all lie in one array, which is cleared at once."""
        if not self.form.scaled:
            return None
        sizes = self.shard.lowered.columns
        sizes.setdefault(name, padded_columns(n))
        names = list(sizes)
        return At("columns", sum(sizes[other] for other in names[: names.index(name)]))

    def _plane(self, n: int) -> int:
        """Elements of one plane of the shard's rows."""
        return padded_rows(self.shard.rows) * padded_columns(n)

    def plane_of(self, name: str) -> int:
        """The same of a buffer."""
        return self._plane(self.shard.width(name))

    def _planes(self, name: str, size: int) -> At:
        """The planes, of so many elements each, beside an array."""
        self.shard.lowered.bytes[name] = max(self.shard.lowered.bytes.get(name, 0), 2 * self.form.planes * size)
        return At(name)

    def _planes_of(self, name: str) -> At:
        """Those of a buffer."""
        return self._planes(self._of_shard(f"{name}.planes"), self.plane_of(name))

    def written(self, name: str) -> tuple[Value, Value]:
        """The arrays that a kernel which can make planes leaves a buffer in: of floats, and of planes."""
        planes = None
        if not self.form.scaled and self._multiplies(name):
            self.in_planes.add(name)
            planes = self._planes_of(name)
        return self.shard.stored(name) if planes is None or self._reads_floats(name) else None, planes

    def exponents_of(self, delta: str) -> Value:
        """Where a kernel that makes whole rows of a delta leaves their exponents, if they are asked for."""
        readers = (op for op in self.shard.operations if isinstance(op, ops.DenseBackward) and op.dz == delta)
        if not self.form.scaled or not any(map(self.makes, readers)):
            return None
        self.looked_at.add(delta)
        return self._lines_of(delta)

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

    def split_weights(self) -> list[Launch]:
        """Planes of all weights that tensor cores read, of two in a launch."""
        shard = self.shard
        readers = {op.weight: op for op in shard.operations if isinstance(op, ops.Dense) and self.makes(op)}
        weights = list(readers)
        launches = []
        for first, second in zip_longest(weights[::2], weights[1::2]):
            blocks = sum(kernels.row_blocks(*shard.shapes[weight])[0] for weight in (first, second) if weight)
            launches.append(
                Launch(
                    kernels.split_weights(self.form),
                    (blocks, 1, 1),
                    {**self._split(first, ""), **self._split(second, "other_")},
                    title(shard.operations, readers[first]),
                )
            )
        return launches

    def _split(self, weight: str | None, prefix: str) -> dict[str, Value]:
        """A weight as an argument of the kernel that splits it."""
        values: dict[str, Value] = dict.fromkeys(("w", "planes", "lines", "columns"))
        k = n = 0
        if weight:
            k, n = self.shard.shapes[weight]
            values = {"w": self.shard.at(weight), **self._weight(weight)}
        return {prefix + name: value for name, value in {**values, "k": k, "n": n}.items()}

    def _weight_planes(self, weight: str) -> At:
        k, n = self.shard.shapes[weight]
        return self._planes(f"{weight}.planes", padded_rows(k) * padded_columns(n))

    def _weight(self, weight: str) -> dict[str, Value]:
        k, n = self.shard.shapes[weight]
        return {
            "planes": self._weight_planes(weight),
            "lines": self._words(f"{weight}.lines", padded_rows(k)),
            "columns": self._columns(f"{weight}.columns", n),
        }

    def forward(self, op: ops.Dense) -> None:
        """The product, of planes that are made before it where nothing has left them yet."""
        shard = self.shard
        k, n = shard.shapes[op.weight]
        tile, operands = self._forward_operands(op)
        z = shard.stored(op.z) if op.z else None
        y, y_planes = self.written(op.y)
        shard.add(
            kernels.tensor_forward(op.activation, tile),
            tile.grid(padded_rows(shard.rows) if y_planes else shard.rows, n, shard.multiprocessors),
            **operands, x_lines=self._lines_of(op.x), w_columns=self._weight(op.weight)["columns"],
            x=self._held(op.x), w=self._held(op.weight), b=shard.at(op.bias), z=z, y=y, y_planes=y_planes,
            y_plane=self._plane(n), early=0, k=k, n=n,
        )  # fmt: skip

    def ends_with(self, op: ops.Dense, loss: ops.Loss) -> bool:
        """Whether a layer's product can end with the loss, which leaves no logits, and deltas as a plane alone."""
        return (
            self.makes(op)
            and self.form.is_single  # exponents are known when a row is whole
            and not self.shard.plan.ends_with_gradient  # whose logits are looked at
            and op.activation == "identity"
            and loss.loss in kernels.SUMS_OF_TERMS
            and loss.delta is not None
            and self.shard.width(op.y) % kernels.LOSS_COLUMNS == 0
            and self._multiplies(loss.delta)
            and not self._reads_floats(loss.delta)
        )

    def forward_loss(self, op: ops.Dense, loss: ops.Loss, weighed: Callable[[Grid], dict[str, Value]]) -> None:
        """The product and the loss; ``weighed`` tells what that is given beside its rows, for a grid."""
        shard = self.shard
        k, n = shard.shapes[op.weight]
        assert loss.delta is not None
        tile, operands = self._forward_operands(op)
        _, delta_planes = self.written(loss.delta)
        entry = kernels.tensor_forward_loss(loss.loss, tile)
        grid = tile.grid(padded_rows(shard.rows), n, shard.multiprocessors)
        given = {**operands, **weighed(grid), "targets": At("plain targets")}
        shard.add(entry, grid, **given, b=shard.at(op.bias), delta_planes=delta_planes, k=k, n=n)

    def _forward_operands(self, op: ops.Dense) -> tuple[ProductTile, dict[str, Value]]:
        """The tile of x W, and its operands; their planes are made here where nothing has left them yet."""
        shard = self.shard
        k, n = shard.shapes[op.weight]
        weight, w_planes, x_planes = self._weight(op.weight), self._weight_planes(op.weight), self._planes_of(op.x)
        x_lines = self._lines_of(op.x)
        if op.x not in self.in_planes:
            self.in_planes.add(op.x)
            rows, copy = shard.rows_of(op.x), None
            if self.form.scaled and op.x in shard.fetched:
                shard.fetched.remove(op.x)  # from here on it is there: products may read it beside its planes
                copy = shard.stored(op.x)
            splitting = shard.launch(
                kernels.split_rows(self.form), kernels.row_blocks(shard.rows, k),
                **rows, weight_lines=weight["lines"], copy=copy, planes=x_planes, plane=self._plane(k), lines=x_lines,
                columns=self._columns(self._of_shard(f"{op.x}.columns"), k) if shard.is_training else None, n=k,
            )  # fmt: skip
            if op.x in shard.fetched and shard.is_training:  # the order tells its rows before their step begins
                shard.lowered.staged.append(splitting)
                shard.lowered.staged_bytes[x_planes.array] = 2 * self.form.planes * self._plane(k)
            else:
                shard.launches.append(splitting)
        tile = kernels.matrix_tile_for(self.form, shard.rows, n, shard.multiprocessors, shard.arch)
        x_source, w_source = self._sources(
            tile, (x_planes, shard.rows, k), (w_planes, k, n), a_inner=True, b_inner=False
        )
        return tile, {"x_planes": x_source, "x_plane": self._plane(k), "w_planes": w_source}

    def backward(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        """Both products; takes in an activation's derivative of dx."""
        shard, form = self.shard, self.form
        k, n = shard.shapes[op.weight]
        plane = self._plane(n)
        lines = self._lines_of(op.dz)
        weight_lines = self._weight(op.weight)["lines"]
        rows = self._planes_of(op.dz) if form.scaled and op.dx else None
        if form.scaled and op.dz not in self.looked_at:
            shard.add(
                kernels.split_rows(form), kernels.row_blocks(shard.rows, n),
                x=shard.at(op.dz), order=None, weight_lines=None, copy=None, planes=rows, plane=plane, lines=lines,
                columns=None, n=n,
            )  # fmt: skip
        name = f"{op.dz}.planes for {op.dweight}" if form.scaled else f"{op.dz}.planes"
        planes = self._planes(self._of_shard(name), plane)
        columns = self._words(self._of_shard(f"{op.dz}.columns"), padded_columns(n))
        x_lines = self._lines_of(op.x)
        tile = kernels.matrix_tile_for(form, k, n, shard.multiprocessors, shard.arch)
        parts = tile.column_parts(k) if shard.in_place and op.dbias else None
        db = shard.at(op.dbias) if parts is None else None
        if db and shard.in_place:
            shard.lowered.bytes[str(op.dbias)] = 4 * n
            db = At(str(op.dbias))
        if op.dz not in self.in_planes:
            dz = {"dz": shard.at(op.dz), "lines": lines, "x_lines": x_lines, "planes": planes, "columns": columns}
            dz["row_planes"] = rows if op.dz in self.looked_at else None
            self._add_columns(kernels.split_columns(form), n, **dz, db=db)
        elif db:
            given: dict[str, Value] = dict.fromkeys(("lines", "x_lines", "planes", "row_planes", "columns"))
            self._add_columns(kernels.sum_columns(form), n, **given, dz=planes, db=db)
        fused = self._backward_input(op, following) if op.dx else False
        x_source, dz_source = self._sources(
            tile, (self._planes_of(op.x), shard.rows, k), (planes, shard.rows, n), a_inner=False, b_inner=False
        )
        operands: dict[str, Value] = {
            "x_planes": x_source, "x_plane": self._plane(k), "dz_planes": dz_source, "dz_plane": plane,
            "x_columns": self._columns(self._of_shard(f"{op.x}.columns"), k), "w_lines": weight_lines,
            "dz_columns": columns, "x": self._held(op.x), "dz": self._held(op.dz), "early": 0, "k": k, "n": n,
        }  # fmt: skip
        grid = tile.grid(k, n, shard.multiprocessors)
        if shard.in_place:
            optimizer = type(shard.plan.optimizer).__name__
            w_planes = None if form.scaled else self._weight_planes(op.weight)
            entry = kernels.tensor_backward_update(optimizer, tile)
            updated = shard.updated(op)
            db_parts = None if parts is None else self._parted(updated, parts, n)
            shard.add(entry, grid, **operands, db=db, db_parts=db_parts, w_planes=w_planes, **updated)
        else:
            shard.add(kernels.tensor_backward_weight(tile), grid, **operands, dw=shard.at(op.dweight))
        return fused

    def _parted(self, updated: dict[str, Value], parts: int, n: int) -> At:
        """Where a product leaves so many parts of a bias's gradient; the bias moves when all are there."""
        lowered, pitch = self.shard.lowered, padded_columns(n)
        begin = lowered.bytes.get(BIAS_PARTS, 0) // 4
        lowered.bytes[BIAS_PARTS] = 4 * (begin + parts * pitch)
        bias = updated["bias"]
        assert isinstance(bias, At)
        words = begin, parts, pitch, n, *divmod(bias.offset, 1 << 31)[::-1]
        lowered.words[PARTED_BIASES] = (*lowered.words.get(PARTED_BIASES, ()), *words)
        updated |= {"bias": None, "bias_slots": None}
        return At(BIAS_PARTS, begin)

    def _add_columns(self, entry: Entry, n: int, **values: Value) -> None:
        """A launch that goes through the columns of deltas."""
        shard, grid = self.shard, kernels.column_blocks(self.shard.rows, n)
        sizes = {"column parts": 4 * grid[1] * padded_columns(n), "columns arrived": 4 * grid[0]}
        if self.form.scaled:
            sizes["column part flags"] = sizes["column parts"]
        for name, size in sizes.items():
            name = self._of_shard(name)
            shard.lowered.bytes[name] = max(shard.lowered.bytes.get(name, 0), size)
        shard.add(
            entry, grid,
            **values, plane=self._plane(n), parts=At(self._of_shard("column parts")),
            part_flags=At(self._of_shard("column part flags")) if self.form.scaled else None,
            arrived=At(self._of_shard("columns arrived")), n=n,
        )  # fmt: skip

    def _backward_input(self, op: ops.DenseBackward, following: ops.Operation | None) -> bool:
        shard = self.shard
        assert op.dx is not None
        k, n = shard.shapes[op.weight]
        activation, array = shard.taken_in(op.dx, following)
        saved: dict[str, Value] = {"saved": array, "saved_planes": None}
        if isinstance(array, At) and array.array not in shard.lowered.bytes:
            saved = {"saved": None, "saved_planes": self._planes_of(array.array)}
        dx, dx_planes = self.written(op.dx)
        tile = kernels.matrix_tile_for(self.form, shard.rows, k, shard.multiprocessors, shard.arch)
        w_planes = self._weight_planes(op.weight)
        dz_source, w_source = self._sources(
            tile, (self._planes_of(op.dz), shard.rows, n), (w_planes, k, n), a_inner=True, b_inner=True
        )
        shard.add(
            kernels.tensor_backward_input(activation, tile),
            tile.grid(padded_rows(shard.rows) if dx_planes else shard.rows, k, shard.multiprocessors),
            dz_planes=dz_source, dz_plane=self._plane(n), w_planes=w_source,
            dz_lines=self._lines_of(op.dz), w_lines=self._weight(op.weight)["lines"],
            dz=self._held(op.dz), w=self._held(op.weight), **saved, dx=dx,
            dx_planes=dx_planes, dx_plane=self._plane(k), early=0, k=k, n=n,
        )  # fmt: skip
        return array is not None
