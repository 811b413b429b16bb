"""What a launch must do at least: the arithmetic of its products, and every operand moved once.

Both follow from the launch's arguments alone, by what each kernel's arrays are.
"""

from __future__ import annotations

import math
import re

from ..kernels import FORMS, Form
from ..kernels.launches import Launch
from .peak_rates import TENSOR_SPEED

# The axes of each array that a kernel takes, by the file that defines it and the argument's name; below,
# where one kernel differs.  `rows` are those of the launch's shard, other names are its arguments.
Axes = tuple[str | int, ...]
OF_LOSS: dict[str, Axes] = {
    "order": ("rows",), "targets": ("rows", "n"), "weights": ("rows",), "mean": ("n",), "scale": ("n",),
    "delta": ("rows", "n"), "sums": ("count", 2), "totals": (2,), "losses": (2,), "arrived": (),
    "errors": ("count", "capacity", 2),
}  # fmt: skip
OF_DENSE: dict[str, Axes] = {
    "x": ("rows", "k"), "w": ("k", "n"), "b": ("n",), "z": ("rows", "n"), "y": ("rows", "n"), "dz": ("rows", "n"),
    "saved": ("rows", "k"), "dx": ("rows", "k"), "dw": ("k", "n"), "db": ("n",), "parts": ("count", "rows", "n"),
    "order": ("rows",), "totals": (2,), "weight": ("k", "n"), "bias": ("n",),
    "weight_slots": ("slot_count", "k", "n"), "bias_slots": ("slot_count", "n"),
}  # fmt: skip
# Of the float32 arrays beside planes, products read what planes do not hold: nothing, as a rule.
OF_TENSOR_CORES: dict[str, Axes] = {
    **OF_LOSS, "delta_planes": ("rows", "n"),
    "x_planes": ("planes", "rows", "k"), "dz_planes": ("planes", "rows", "n"), "w_planes": ("planes", "k", "n"),
    "saved_planes": ("planes", "rows", "k"), "y_planes": ("planes", "rows", "n"),
    "dx_planes": ("planes", "rows", "k"), "x_lines": ("rows",),
    "dz_lines": ("rows",), "w_lines": ("k",), "w_columns": ("n",), "x_columns": ("k",), "dz_columns": ("n",),
    "x": (0,), "w": (0,), "dz": (0,), "b": ("n",), "z": ("rows", "n"), "y": ("rows", "n"), "saved": ("rows", "k"),
    "dx": ("rows", "k"), "dw": ("k", "n"), "db": ("n",), "totals": (2,), "weight": ("k", "n"), "bias": ("n",),
    "weight_slots": ("slot_count", "k", "n"), "bias_slots": ("slot_count", "n"), "db_parts": (0,),
}  # fmt: skip
OF_STACKS: dict[str, Axes] = {
    "x": ("rows", "m"), "parameters": ("weights",), "slots": ("slot_count", "weights"), "layers": ("count", 10),
    "kept": ("rows", "outputs"), "kept_z": ("rows", "outputs"), "y": ("rows", "n"), "dy": ("rows", "n"),
    "totals": (2,), "dx": ("rows", "m"), "deltas": ("rows", "outputs"), "bias_sums": (0,), "messages": (0,),
    "launches": (),
}  # fmt: skip
STACK_HEADERS = ("local/stack.cuh", "local/stack_update.cuh", "local/stack_tied_update.cuh")
TENSOR_HEADERS = ("dense/tensor_dense.cuh", "dense/tensor_loss.cuh", "dense/tensor_update.cuh")
DENSE_HEADERS = (
    *(
        "dense/dense.cuh",
        "dense/update.cuh",
        "dense/large_k_update.cuh",
        "dense/few_rows_update.cuh",
    ),
)
AXES: dict[str, dict[str, Axes]] = {
    **dict.fromkeys(DENSE_HEADERS, OF_DENSE),
    **dict.fromkeys(TENSOR_HEADERS, OF_TENSOR_CORES),
    "common/step.cuh": {},
    "gemm/operands.cuh": {
        "x": ("rows", "n"), "order": ("rows",), "weight_lines": ("n",), "copy": ("rows", "n"),
        "planes": ("planes", "rows", "n"), "row_planes": ("planes", "rows", "n"), "lines": ("rows",),
        "columns": ("n",), "dz": ("rows", "n"),
        "x_lines": ("rows",), "db": ("n",),
        "parts": (0,), "part_flags": (0,), "arrived": (), "words": ("size",),
    },
    "local/layer.cuh": {
        "x": ("rows", "m"), "w": ("window", "n"), "b": ("n",), "z": ("rows", "n"), "y": ("rows", "n"),
        "dz": ("rows", "n"), "saved": ("rows", "m"), "dx": ("rows", "m"), "dw": ("window", "pitch"), "db": ("n",),
    },
    **dict.fromkeys(STACK_HEADERS, OF_STACKS),
    "elementwise/rows.cuh": {
        "x": ("rows", "n"), "y": ("rows", "n"), "data": ("rows", "n"), "order": ("rows",), "mean": ("n",),
        "scale": ("n",), "saved": ("rows", "n"), "dy": ("rows", "n"),
    },
    "elementwise/loss.cuh": {
        **OF_LOSS, "logits": ("rows", "n"), "y": ("rows", "n"), "planes": ("plane_count", "rows", "n"),
    },
    "fused/head.cuh": {**OF_DENSE, **OF_LOSS, "dx_planes": ("dx_plane_count", "rows", "k"), "dx_lines": ("rows",)},
    # Of the layers behind the first, which are small, nothing is counted.
    "fused/tail.cuh": {
        **OF_LOSS, "parts": ("count", "rows", "n"), "parameters": (0,), "described": (0,), "y": ("rows", "n"),
        "dz": ("rows", "n"), "targets": ("rows",),
    },
    "elementwise/update.cuh": {
        "partials": ("shards", "uses", "size"), "gradient": ("size",), "sums": ("count",), "totals": (2,),
        "factor": (), "parameters": ("size",), "slots": ("slot_count", "size"), "described": ("count", 6),
        "column_parts": ("columns", "part_count"), "biases": ("columns",),
        "biases_slots": ("slot_count", "columns"),
    },
}  # fmt: skip
INDEX_AXES: dict[str, Axes] = {"targets": ("rows",)}  # of a loss that takes class numbers
# Read, and written.
IN_PLACE = {
    "dy", "deltas", "parameters", "slots", "weight", "bias", "biases", "weight_slots", "bias_slots", "biases_slots",
    "arrived", "words",
}  # fmt: skip

SPLIT_WEIGHTS_AXES: dict[str, Axes] = {
    "w": ("k", "n"), "planes": ("planes", "k", "n"), "lines": ("k",), "columns": ("n",),
    "other_w": ("other_k", "other_n"), "other_planes": ("planes", "other_k", "other_n"), "other_lines": ("other_k",),
    "other_columns": ("other_n",),
}  # fmt: skip

PRODUCTS = {
    "dense_forward": 1,
    "dense_forward_part": 1,
    "dense_backward_input": 1,
    "dense_backward_weight": 1,
    "dense_forward_part_few": 1,
    "dense_backward_update": 1,
    "dense_backward_update_narrow": 1,
    "dense_update_few": 2,
    "head": 2,
    "dense_backward_atomic": 2,
    "tensor_forward": 1,
    "tensor_forward_loss": 1,
    "tensor_backward_input": 1,
    "tensor_backward_weight": 1,
    "tensor_backward_update": 1,
    "local_forward": 1,
    "local_backward_input": 1,
    "local_backward_weight": 1,
    "local_stack_forward": 1,
    "local_stack_update": 2,
    "local_stack_tied_update": 2,
}
FACTORS = {  # of a product's multiplications, by header
    "local/layer.cuh": ("rows", "window", "n"),
    **dict.fromkeys(STACK_HEADERS, ("rows", "products")),
}
ITEM_BYTES = {"unsigned char": 1, "uint16_t": 2, "TensorMap": 2, "double": 8}  # by C type; others have 4


def flops(launch: Launch, rows: int) -> int:
    """Multiplications and additions of the matrix products in a launch for ``rows`` rows."""
    products = PRODUCTS.get(launch.entry.function.partition("<")[0], 0)
    if not products:
        return 0
    if "dx" in launch.values and launch.values["dx"] is None and launch.entry.header not in STACK_HEADERS:
        products = 1
    axes = FACTORS.get(launch.entry.header, ("rows", "k", "n"))
    return 2 * products * math.prod(_lengths(launch, rows)[axis] for axis in axes)


def moved_bytes(launch: Launch, rows: int, slot_count: int = 0) -> int:
    """The fewest bytes that a launch for ``rows`` rows moves: each array once, or twice if changed in place.

    The numbers of steps and what lies in constant memory are left out.
    """
    lengths = {**_lengths(launch, rows), "slot_count": slot_count}
    axes = AXES[launch.entry.header]
    if launch.entry.function.startswith("split_weights"):
        axes = SPLIT_WEIGHTS_AXES
    if "Index" in launch.entry.function:
        axes = {**axes, **INDEX_AXES}
    total = 0
    for argument in launch.entry.arguments:
        is_array = argument.is_pointer or argument.ctype == "Texture"
        if not is_array or "Step" in argument.ctype or launch.values[argument.name] is None:
            continue
        item = ITEM_BYTES.get(argument.ctype.removeprefix("const ").removesuffix("*"), 4)
        elements = math.prod(lengths[axis] if isinstance(axis, str) else axis for axis in axes[argument.name])
        is_changed = argument.name in IN_PLACE and not argument.ctype.startswith("const ")
        total += item * elements * (2 if is_changed else 1)
    return total


def form_in(launch: Launch) -> Form | None:
    """What a launch's planes hold, if it has any of a form of its own."""
    names = re.findall(r"\w+", launch.entry.function)
    return next((form for form in FORMS if form.struct in names), None)


def speed_of(launch: Launch) -> float:
    """How many times faster than plain cores the card could make a launch's products."""
    if launch.entry.header not in TENSOR_HEADERS:
        return 1.0
    form = form_in(launch)
    return TENSOR_SPEED / (form.products if form else 1)


def _lengths(launch: Launch, rows: int) -> dict[str, int]:
    given = {name: value for name, value in launch.values.items() if isinstance(value, int)}
    # A kernel that is not told how many parts or sums there are makes one for each layer or block of its grid.
    made = launch.grid[2] if "part" in given and launch.entry.header != "dense/update.cuh" else launch.grid[0]
    form = form_in(launch)
    known = {"uses": 1, "part_count": 1, "count": made, "planes": form.planes if form else 1}
    return {"rows": rows, **known, **given, **launch.lengths}
