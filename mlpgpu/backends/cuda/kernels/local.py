"""Locally connected layers: ``local/layer.cuh``, and stacks of them, ``local/stack.cuh``."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ....activations import ACTIVATIONS
from ...sources import camel
from .entry import ROW_THREADS, ROWS, SUM_BYTES, WARP, Entry, Product, arguments, ceil_div
from .updates import slot_count

LOCAL_ROWS = 4  # of local/layer.cuh


_PRODUCTS = (Product(("rows", "window", "n")),)


def _local(
    name: str,
    rest: str,
    *,
    activation: str | None = None,
    shared_bytes: int = 0,
    block: str = "PlainBlock",
    products: tuple[Product, ...] = (),
) -> Entry:
    kind = f"{name}_{activation}" if activation else name
    instance = f"{name}<{camel(activation)}>" if activation else name
    signature = arguments(f"{ROWS}, {rest}")
    return Entry(
        kind, "local/layer.cuh", instance, signature, ROW_THREADS, shared_bytes, block=block, products=products
    )


def local_forward(activation: str) -> Entry:
    rest = (
        "const float* x[rows,m], const float* w[window,n], const float* b[n], float* z[rows,n], float* y[rows,n], "
        "int m, int n, int window, int pitch, int b_step"
    )
    return _local("local_forward", rest, activation=activation, products=_PRODUCTS)


def local_backward_input(activation: str) -> Entry:
    rest = (
        "const float* dz[rows,n], const float* w[window,n], const float* saved[rows,m], float* dx[rows,m], int m, "
        "int n, int window, int pitch"
    )
    return _local("local_backward_input", rest, activation=activation, products=_PRODUCTS)


def local_backward_weight() -> Entry:
    rest = (
        "const float* x[rows,m], const float* dz[rows,n], float* dw[window,pitch], int m, int n, int window, int pitch"
    )
    return _local("local_backward_weight", rest, products=_PRODUCTS)


def local_backward_bias() -> Entry:
    return _local("local_backward_bias", "const float* dz[rows,n], float* db[pitch], int n, int pitch")


def local_backward_shared_bias() -> Entry:
    return _local(
        "local_backward_shared_bias",
        "const float* dz[rows,n], float* db[], int n",
        shared_bytes=SUM_BYTES,
        block="SumBlock",
    )


def local_entries() -> list[Entry]:
    """All of locally connected layers."""
    activated = [entry(activation) for activation in ACTIVATIONS for entry in (local_forward, local_backward_input)]
    return [*activated, local_backward_weight(), local_backward_bias(), local_backward_shared_bias()]


# --- stacks of layers in one kernel: local/stack.cuh.  A plan's stack has entries of its own (`..local_stack`). ---

STACK_SHARED_BYTES = 227 << 10  # of a block, on the one architecture that they are for
STACK_MOST_HALO = 64
STACK_MOST_STAGES = 64  # of small ones; more gain nothing

# One product of each layer.  Launches of a stack tell the lengths: ``products`` of a row in all layers, of which
# ``first_products`` are the first layer's and ``inner_products`` the others'; ``weights`` that are used, each once for
# each layer or once in all; ``outputs`` of all layers, and ``n`` of the last one.
STACK_PRODUCT = Product(("rows", "products"))


@dataclass(frozen=True)
class StackShape:
    """How columns and rows are divided among threads: ``StackShape<warps, rows, columns>``."""

    warps: int
    rows: int
    columns: int = 4

    def __str__(self) -> str:
        return f"StackShape<{self.warps}, {self.rows}, {self.columns}>"

    @property
    def span(self) -> int:
        """The columns of a block."""
        return self.columns * WARP * self.warps

    @property
    def input_bytes(self) -> int:
        """Two layers' inputs in shared memory, and the warps' barriers."""
        return 4 * 2 * self.rows * (self.span + STACK_MOST_HALO + 8) + 16 * self.warps

    @property
    def delta_bytes(self) -> int:
        """What the backward pass has there beside its ring: ``StackDeltas``, and the warps' barriers."""
        of_warp = 4 * WARP + STACK_MOST_HALO + WARP
        floats = self.span + 2 * (self.warps + 1) * STACK_MOST_HALO + self.warps * of_warp
        return 4 * self.rows * floats + 16 * self.warps


@dataclass(frozen=True)
class StreamedWeights:
    """Weights that come through a ring of stages, each of so many weight rows."""

    shape: StackShape
    weight_rows: int

    @property
    def stages(self) -> int:
        return stack_stages(self.shape, self.weight_rows, self.shape.input_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.shape.input_bytes + self.stages * stack_stage_bytes(self.shape, self.weight_rows)

    @property
    def threads(self) -> int:
        return WARP * (self.shape.warps + 1)

    def __str__(self) -> str:
        return f"StreamedWeights<{self.shape}, {self.stages}, {self.weight_rows}>"


@dataclass(frozen=True)
class OnChipWeights:
    """Weights that stay on the chip: as many rows as fit in registers, the others in shared memory."""

    shape: StackShape
    window: int

    COLUMNS, MOST_WARPS = 6, 12  # few threads, with many registers each
    MOST_IN_REGISTERS = 20

    @property
    def in_registers(self) -> int:
        return min(self.window, self.MOST_IN_REGISTERS)

    @property
    def shared_bytes(self) -> int:
        return self.shape.input_bytes + 4 * (self.window - self.in_registers) * self.shape.span

    @property
    def threads(self) -> int:
        return WARP * self.shape.warps

    @property
    def update_bytes(self) -> int:
        """Shared memory in the backward pass: a layer's outputs beside all that, or inputs and the gradient."""
        weight_rows = ceil_div(self.window, ceil_div(self.window, 32))
        columns = self.COLUMNS // 2 * WARP
        stage = WARP * ceil_div(columns + weight_rows - 1, WARP) + columns
        of_gradient = 4 * self.shape.warps * max(8 * stage, (weight_rows + 1) * columns)
        return max(self.shared_bytes + 4 * self.shape.span, self.shape.input_bytes + of_gradient)

    def __str__(self) -> str:
        return f"OnChipWeights<{self.shape}, {self.window}, {self.in_registers}>"

    @property
    def mirrored(self) -> str:
        """The struct of the backward pass, which numbers columns from the right."""
        return f"{str(self)[:-1]}, true>"


def stack_stage_bytes(shape: StackShape, weight_rows: int) -> int:
    """A stage of the ring, with its two barriers."""
    return 4 * weight_rows * (shape.span + 4) + 16


def stack_stages(shape: StackShape, weight_rows: int, others: int) -> int:
    """The stages that shared memory holds beside so many other bytes."""
    return min(STACK_MOST_STAGES, (STACK_SHARED_BYTES - others) // stack_stage_bytes(shape, weight_rows))


def local_stack_forward(activation: str, weights: StreamedWeights | OnChipWeights) -> Entry:
    rest = (
        "const float* x[rows,m], const float* parameters[weights], const StackLayer* layers[count], int count, int m, "
        "int halo, float* kept[rows,outputs], float* kept_z[rows,outputs], float* y[rows,n], uint64_t* messages[0], "
        "unsigned* launches[]"
    )
    function = f"local_stack_forward<{weights}, {camel(activation)}>"
    return _stack_entry(
        "local/stack.cuh", function, activation, rest, weights.threads, weights.shared_bytes,
        block=str(weights), products=(STACK_PRODUCT,),
    )  # fmt: skip


def stack_update_stages(rule: str, shape: StackShape) -> int:
    """Stages of the ring through which weights come with their slots."""
    return stack_stages(shape, _update_rows(rule), shape.delta_bytes)


def _update_rows(rule: str) -> int:
    """Rows of such a stage: four of weights, or fewer with their slots."""
    slots = slot_count(rule)
    return (4 >> slots) * (1 + slots)


def _update(rule: str) -> str:
    return (
        "const float* x[rows,m], const StackLayer* layers[count], int count, int m, int halo, "
        "const float* kept[rows,outputs], const float* kept_z[rows,outputs], const float* y[rows,n], "
        "const float* dy[rows,n], int is_derived, const double* totals[2], inout float* parameters[weights], "
        f"inout float* slots[{slot_count(rule)},weights], int64_t size, float* dx[rows,m], double* bias_sums[0], "
        "uint64_t* messages[0], unsigned* launches[]"
    )


# Gradients of the weights, and of all layers' inputs; of the first layer's if they are asked for.
_UPDATE_PRODUCTS = (
    STACK_PRODUCT, Product(("rows", "inner_products")), Product(("rows", "first_products"), when=("dx",)),
)  # fmt: skip


def local_stack_update(activation: str, rule: str, shape: StackShape) -> Entry:
    """The backward pass through a stack, with the rule's step."""
    stages = stack_update_stages(rule, shape)
    arguments_of = f"<{shape}, {stages}, {rule}Rule, {camel(activation)}>"
    stage_bytes = stack_stage_bytes(shape, _update_rows(rule))
    return _stack_entry(
        "local/stack_update.cuh", f"local_stack_update{arguments_of}", f"{rule}_{activation}", _update(rule),
        WARP * (shape.warps + 1), shape.delta_bytes + stages * stage_bytes, block=f"StackUpdate{arguments_of}",
        constants=True, products=_UPDATE_PRODUCTS,
    )  # fmt: skip


def local_stack_tied_update(activation: str, rule: str, weights: OnChipWeights) -> Entry:
    """The backward pass through a stack of one matrix, with the rule's step."""
    arguments_of = f"<{weights.mirrored}, {rule}Rule, {camel(activation)}>"
    return _stack_entry(
        "local/stack_tied_update.cuh", f"local_stack_tied_update{arguments_of}", f"{rule}_{activation}",
        f"{_update(rule)}, inout float* deltas[rows,outputs]", weights.threads, weights.update_bytes,
        block=f"TiedUpdate{arguments_of}", constants=True, products=_UPDATE_PRODUCTS,
    )  # fmt: skip


def _stack_entry(
    header: str, function: str, what: str, rest: str, threads: int, shared_bytes: int, *,
    block: str, products: tuple[Product, ...], constants: bool = False,
) -> Entry:  # fmt: skip
    name = f"{function.partition('<')[0]}_{what}_{zlib.crc32(function.encode()):08x}"
    # Around the loops, where spans are so wide that a thread has few registers.
    return Entry(
        name, header, function, arguments(f"{ROWS}, {rest}"), threads, shared_bytes, cooperative=True, block=block,
        spill_bytes=320, needs="sm_90a", constants=constants, products=products,
    )  # fmt: skip
