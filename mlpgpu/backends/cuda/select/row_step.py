"""Whether forward, loss and deltas of a small network are one launch by blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....plan import Plan
from ..kernels import (
    ROW_STEP_MOST_LEVELS,
    ROW_STEP_ROWS,
    ROW_STEP_TABLE_BYTES,
    row_step_shared_bytes,
)
from ..persistent.network import PersistentNetwork, read_network
from . import thresholds
from .counted import is_faster, row_step_clocks
from .dense import CountedStep, is_cut, on_tensor_cores, small_update_clocks
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


def room_of(arch: str) -> int:
    """The most bytes of shared memory that a block of an architecture may ask for."""
    return _ROOM.get(arch, ROW_STEP_TABLE_BYTES)


def widths_of(network: PersistentNetwork) -> tuple[int, ...]:
    """From the inputs to the outputs."""
    return (network.layers[0].n_in, *(layer.n_out for layer in network.layers))


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
    if not step or not step.shapes:
        return Verdict(True, why)
    by_rows = _clocks([(layer.n_in, layer.n_out) for layer in network.layers if layer.is_trained], shapes, work)
    counted = f"counted clocks: {by_rows:,} by blocks of rows, {step.clocks:,} by launches, some on tensor cores"
    by_launches = is_faster(step.clocks, by_rows)
    return Verdict(not by_launches, counted if by_launches else f"{why}; {counted}")


def _clocks(moved: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, int]], work: Work) -> int:
    """Of a step by blocks of rows, and of the launch that moves its weights after it."""
    sms = work.setting.multiprocessors
    weights = sum(k * n for k, n in shapes)
    return row_step_clocks(weights, work.rows, sms) + small_update_clocks(moved, work) + 2 * thresholds.LAUNCH_CLOCKS
