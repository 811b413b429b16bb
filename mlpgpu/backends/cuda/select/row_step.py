"""Whether a step of a small network goes by blocks of rows, on plain cores or on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....plan import Plan
from ..kernels import (
    COMPONENTS_OF_PRECISION,
    INPUT_LAYER_MOST_ROWS,
    INPUT_LAYER_SLAB,
    ITEM_BYTES,
    ROW_STEP_MOST_LEVELS,
    ROW_STEP_ROWS,
    ROW_STEP_TABLE_BYTES,
    SOURCES,
    TENSOR_ROW_STEP_MOST_LEVELS,
    InputLayer,
    TensorRowStep,
    ceil_div,
    row_step_shared_bytes,
    tensor_row_step_columns,
)
from ..persistent.network import PersistentNetwork, read_network
from . import thresholds
from .counted import input_layer_clocks, is_faster, row_step_clocks, tensor_row_step_clocks
from .dense import CountedStep, is_bound_by_rows, is_cut, on_tensor_cores, small_update_clocks
from .setting import Verdict, Work

# Shared memory of a block by the technical specifications in the CUDA C++ Programming Guide; of an architecture that is
# not here what every one has since sm_75.
_ROOM = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
_SYSTEM_BYTES = 1 << 10  # that each block takes besides


def room_of(arch: str) -> int:
    """The most bytes of shared memory that a block of an architecture may ask for."""
    return _ROOM.get(arch, ROW_STEP_TABLE_BYTES)


def widths_of(network: PersistentNetwork) -> tuple[int, ...]:
    """From the inputs to the outputs."""
    return (network.layers[0].n_in, *(layer.n_out for layer in network.layers))


@dataclass(frozen=True)
class BlocksOfRows(Verdict):
    """Whether a step goes by blocks of rows.

    Attributes:
        form: how it does on tensor cores, by ``grid`` blocks; None on plain cores.
        input_layer: the first layer, if its launches stand before and after those of ``form``, which has the others.
        slopes: as of :func:`slope_columns`, from the level on that ``form`` begins with.
        clocks: that the launch is counted at, without its start.
    """

    form: TensorRowStep | None = None
    input_layer: InputLayer | None = None
    grid: int = 0
    slopes: tuple[int, ...] = ()
    clocks: int = 0

    @property
    def left(self) -> int:
        """Floats of gradients that its blocks leave."""
        return self.form.partials[-1] * self.grid if self.form else 0

    @property
    def images(self) -> int:
        """Elements of the components of the weights that its blocks read."""
        return self.form.images[-1] if self.form else 0


def blocks_of_rows(
    plan: Plan, work: Work, step: CountedStep | None = None, *, may_be_apart: bool = True
) -> BlocksOfRows:
    """Whether a step goes by blocks of rows, and on which cores.

    Args:
        step: what launch by launch is counted at, with products on tensor cores.
        may_be_apart: whether a first layer may have launches of its own.
    """
    plain, tensor = row_step(plan, work, step), tensor_row_step(plan, work, may_be_apart=may_be_apart)
    if not tensor:
        return BlocksOfRows(plain.holds, f"{plain.why}; on tensor cores: {tensor.why}")
    network, others = read_network(plan), step.clocks if step else None
    if plain and isinstance(network, PersistentNetwork):
        others = _plain_clocks(network, work)
    counted = tensor.clocks + thresholds.TENSOR_ROW_STEP_CLOCKS + _apart_clocks(tensor.input_layer, work)
    if others is None:
        return BlocksOfRows(plain.holds, f"{plain.why}; on tensor cores: launches are not counted")
    if tensor.input_layer and not plain:
        others = _launches_clocks(others, tensor.input_layer, work)
    compared = f"counted clocks: {counted:,}, {others:,} otherwise"
    if 10 * counted >= thresholds.TENSOR_ROW_STEP_TENTHS * others:
        if tensor.input_layer:
            return blocks_of_rows(plan, work, step, may_be_apart=False)
        return BlocksOfRows(plain.holds, f"{plain.why}; on tensor cores: {compared}")
    return replace(tensor, why=f"{tensor.why}; {compared}")


def row_step(plan: Plan, work: Work, step: CountedStep | None = None) -> Verdict:
    """Whether a block goes with some rows through all layers, the loss and back, all weights in its shared memory.

    Args:
        step: what launch by launch is counted at, with products on tensor cores.
    """
    if not thresholds.ROW_STEP_IS_USED:
        return Verdict(False, "a test or a benchmark asks for other launches")
    if not work.is_training or work.ends_with_gradient:
        return Verdict(False, "it is for training steps that store no logits")
    network = read_network(plan)
    if isinstance(network, str):
        return Verdict(False, network)
    widths = widths_of(network)
    if len(widths) > ROW_STEP_MOST_LEVELS or plan.parameter_count >= 1 << 31:
        return Verdict(
            False, f"{len(network.layers)} layers, {plan.parameter_count:,} parameters are more than it counts"
        )
    shapes = [(layer.n_in, layer.n_out) for layer in network.layers]
    of_launches = replace(work, tensor_shapes=frozenset()) if step else work
    if any(is_cut(k, n) or on_tensor_cores(k, n, of_launches) for k, n in shapes):
        return Verdict(False, "a layer's products are split along k, or on tensor cores")
    needed, room = row_step_shared_bytes(widths), room_of(work.setting.arch)
    if needed > room:
        return Verdict(False, f"weights and rows take {needed:,} bytes of shared memory, a block has {room:,}")
    size = f"weights and {ROW_STEP_ROWS} rows take {needed:,} of {room:,} bytes of shared memory"
    why = f"{size}: a block takes its rows through all layers, the loss and back"
    if not step or not (step.shapes or any(is_bound_by_rows(k, n, work) for k, n in shapes)):
        return Verdict(True, why)
    by_rows = _plain_clocks(network, work)
    counted = f"counted clocks: {by_rows:,} by blocks of rows, {step.clocks:,} by launches"
    by_launches = is_faster(step.clocks, by_rows)
    return Verdict(not by_launches, counted if by_launches else f"{why}; {counted}")


def _plain_clocks(network: PersistentNetwork, work: Work) -> int:
    """Of a step by blocks of rows on plain cores, and of the launch that moves its weights after it."""
    sms = work.setting.multiprocessors
    moved = [(layer.n_in, layer.n_out) for layer in network.layers if layer.is_trained]
    weights = sum(layer.n_in * layer.n_out for layer in network.layers)
    return row_step_clocks(weights, work.rows, sms) + small_update_clocks(moved, work) + 2 * thresholds.LAUNCH_CLOCKS


def tensor_row_step(plan: Plan, work: Work, *, may_be_apart: bool = True) -> BlocksOfRows:
    """Whether a block goes with some rows through all layers, the loss and back on tensor cores, to their gradients."""
    if not thresholds.TENSOR_ROW_STEP_IS_USED:
        return BlocksOfRows(False, "a test or a benchmark asks for other launches")
    if not work.is_training or not work.in_place:
        return BlocksOfRows(False, "it is for training steps that move all parameters where they stand")
    if plan.precision not in COMPONENTS_OF_PRECISION or work.setting.arch != "sm_90a":
        return BlocksOfRows(False, f"there is no such kernel for {plan.precision} on {work.setting.arch}")
    network = read_network(plan)
    if isinstance(network, str):
        return BlocksOfRows(False, network)
    if not all(layer.is_trained for layer in network.layers):
        return BlocksOfRows(False, "a layer is frozen")
    if network.layers[-1].activation != "identity" or network.layers[-1].dropout is not None:
        return BlocksOfRows(False, "something follows the last layer's sums")
    widths = widths_of(network)
    if len(widths) > TENSOR_ROW_STEP_MOST_LEVELS or plan.parameter_count >= 1 << 31:
        return BlocksOfRows(False, f"{len(network.layers)} layers are more than it counts")
    if work.rows < thresholds.TENSOR_ROW_STEP_LEAST_ROWS:
        return BlocksOfRows(False, f"{work.rows} rows < {thresholds.TENSOR_ROW_STEP_LEAST_ROWS}")
    whole = _with_form(network, plan.precision, work, None)
    layer = input_layer(network, plan.precision, work) if may_be_apart else None
    apart = _with_form(network, plan.precision, work, layer) if layer else whole
    if apart and (not whole or whole.clocks > apart.clocks + _apart_clocks(layer, work)):
        return apart
    return whole


def _with_form(network: PersistentNetwork, precision: str, work: Work, layer: InputLayer | None) -> BlocksOfRows:
    """By the form that is counted least, behind a first layer apart if there is one."""
    forms = _tensor_forms(network, precision, work, behind=layer is not None)
    found = min(forms, key=lambda each: each[0], default=None)
    if found is None:
        room = room_of(work.setting.arch)
        return BlocksOfRows(False, f"{room:,} bytes of shared memory have no room for the largest weight and its rows")
    clocks, grid, form = found
    others = "all layers" if layer is None else "the layers behind the first one, which has launches of its own"
    why = f"{grid} blocks take {form.tile} rows at a time through {others}, the loss and back, on tensor cores"
    first, *columns = slope_columns(network)
    slopes = columns if layer else [first, *columns]
    return BlocksOfRows(True, why, form, layer, grid, tuple(slopes), clocks)


def input_layer(network: PersistentNetwork, precision: str, work: Work) -> InputLayer | None:
    """How the first layer is made apart; None where it cannot be, or nothing follows it."""
    first, components = network.layers[0], COMPONENTS_OF_PRECISION[precision]
    is_possible = len(network.layers) > 1 and network.input_dropout is None
    if not thresholds.INPUT_LAYER_IS_APART or not is_possible or first.n_out > thresholds.INPUT_LAYER_MOST_N:
        return None
    k, n, sms = first.n_in, first.n_out, work.setting.multiprocessors
    found = []
    for row_warps in (8, 4, 2):
        layer = InputLayer(k, n, components, row_warps, 0, INPUT_LAYER_SLAB)
        part = _part_of(k, max(1, sms * layer.together // ceil_div(work.rows, layer.tile)), layer.slab)
        row_parts = max(1, sms * layer.gradient_together // layer.gradient_blocks)
        row_part = _part_of(work.rows, row_parts, INPUT_LAYER_SLAB)
        layer = replace(layer, part=part, row_part=min(row_part, INPUT_LAYER_MOST_ROWS))
        if layer.together * (layer.shared_bytes + _SYSTEM_BYTES) <= room_of(work.setting.arch) + _SYSTEM_BYTES:
            found.append(layer)
    return min(found, key=lambda each: _apart_clocks(each, work))


def _part_of(whole: int, parts: int, slab: int) -> int:
    """What each of so many parts has at most, in whole slabs."""
    return slab * ceil_div(ceil_div(whole, parts), slab)


def _apart_clocks(layer: InputLayer | None, work: Work) -> int:
    item_bytes = ITEM_BYTES[SOURCES[work.setting.source]]
    return input_layer_clocks(layer, work.rows, item_bytes, work.setting.multiprocessors) if layer else 0


def _launches_clocks(counted: int, layer: InputLayer, work: Work) -> int:
    """Of a step launch by launch whose products are counted at so many: short launches overlap, and the inputs of such
    a layer are read, split and read again."""
    moved = thresholds.INPUT_LAYER_PASSES * work.rows * layer.k * ITEM_BYTES[SOURCES[work.setting.source]]
    return thresholds.INPUT_LAYER_OTHERS_TENTHS * counted // 10 + moved // thresholds.INPUT_LAYER_BYTES_PER_CLOCK


def slope_columns(network: PersistentNetwork) -> list[int]:
    """Padded columns of stored slopes before those of each level but the last, -1 where slopes follow from what a level
    leaves; then all of them."""
    found, columns = [-1], 0
    for layer in network.layers[:-1]:
        is_stored = layer.saves_z or (layer.dropout is not None and layer.activation != "relu")
        found.append(columns if is_stored else -1)
        columns += tensor_row_step_columns(layer.n_out) * is_stored
    return [*found, columns]


def _tensor_forms(
    network: PersistentNetwork, precision: str, work: Work, *, behind: bool
) -> Iterator[tuple[int, int, TensorRowStep]]:
    """What each form is counted at, its blocks and the form: of all layers, or of those behind the first one."""
    layers, widths = network.layers[behind:], widths_of(network)[behind:]
    costly = [(layer.activation not in thresholds.CHEAP_ACTIVATIONS) + (layer.dropout is not None) for layer in layers]
    for tile in thresholds.TENSOR_ROW_STEP_TILES:
        # Of all networks the same shared memory, so that they share a kernel.
        room = room_of(work.setting.arch)
        form = TensorRowStep(widths, COMPONENTS_OF_PRECISION[precision], tile, room)
        grid = min(ceil_div(work.rows, tile), work.setting.multiprocessors)
        if form.rooms:
            yield tensor_row_step_clocks(form, costly, work.rows, grid, behind=behind), grid, form
