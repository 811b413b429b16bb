"""Where gradients become parameters: in the products that make them, several weights' in one launch, or in launches of
their own; and beside which launches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .... import plan as ops
from ....plan import Plan
from ..kernels import ClusterSplitTile, Entry, OperandFormat, Sm90Tile, cluster_tiles
from . import thresholds
from .counted import grouped_clocks, moving_clocks, read_late_clocks
from .setting import Verdict, Work
from .tiles import weight_tile


def updates_in_place(plan: Plan, stacked: Collection[str] = ()) -> Verdict:
    """Whether the products that make gradients also move the parameters.

    Each parameter must have one partial, which is its whole gradient and a dense layer's product makes; or the kernels
    of stacks do without its partials, which are ``stacked``; and nothing may come between.
    """
    made = {name for op in plan.training if isinstance(op, ops.DenseBackward) for name in (op.dweight, op.dbias)}
    made |= {op.dbias for op in plan.training if isinstance(op, ops.BiasBackward)}
    others = [partial for partial in plan.partials if partial.name not in stacked]
    if plan.shards > 1:
        return Verdict(False, f"gradients of {plan.shards} shards are added up before the update")
    if plan.reduction != "ordered":
        return Verdict(False, 'reduction="atomic" stores gradients before the update')
    if len(others) > len({partial.parameter for partial in others}):
        return Verdict(False, "a parameter has several gradients to add up, since it is used more than once")
    if any(partial.name not in made for partial in others):
        return Verdict(False, "kernels of locally connected layers store their gradients")
    if any(isinstance(op, ops.Norm) for op in plan.training):
        return Verdict(False, "the gradient's norm is clipped before the update")
    if plan.ends_with_gradient:
        return Verdict(False, "the step ends with the gradient, without an update")
    return Verdict(True, "one product makes each gradient whole, so its epilogue applies the optimizer")


def leaves_bias_partials(plan: Plan, rows: int) -> Verdict:
    """Whether products that store a weight's gradient leave partial sums of the bias's, for batches of so many rows.

    One launch adds up those of a shard, behind all its products.  It follows from the number of shards, not of ranks.
    """
    least = thresholds.BIAS_PARTIALS_LEAST_ROWS
    if plan.shards == 1 and plan.ranks == 1:
        return Verdict(True, "one launch adds up what all products leave")
    is_clipped = any(isinstance(op, ops.Norm) for op in plan.training)
    is_tied = len(plan.partials) > len(plan.gradient)
    if plan.shards != 2 or is_clipped or is_tied:
        return Verdict(False, "sums of biases' gradients are exchanged with weights'")
    if rows < 2 * least:
        return Verdict(False, f"{rows:,} rows < {2 * least:,}: biases would be exchanged behind all products")
    return Verdict(True, f"{rows:,} rows ≥ {2 * least:,}: a launch that sums deltas would read them again")


@dataclass(frozen=True)
class MovedTogether:
    """Weights, by name, that one launch on tensor cores moves, with their biases, and its tile; or no weights."""

    why: str
    weights: frozenset[str] = frozenset()
    tile: ClusterSplitTile | None = None


def moved_together(shapes: Mapping[str, tuple[int, int]], work: Work) -> MovedTogether:
    """Which of the weights (k, n) that tensor cores move one launch moves.

    It is as many of the smallest ones as take the fewest clocks so, with the launches of the others.
    """
    operand_format, of_launch = work.operand_format, thresholds.LAUNCH_CLOCKS
    is_known = work.in_place and work.setting.arch == Sm90Tile.needs
    if not shapes or not is_known or operand_format is None or operand_format.scaled:
        return MovedTogether("no product moves a weight along operands without scales")
    if not thresholds.TENSOR_UPDATES_ARE_GROUPED:
        return MovedTogether("a test or a benchmark asks for a launch for each weight")
    size = {name: k * n for name, (k, n) in shapes.items()}
    ordered = sorted((name for name in shapes if size[name] <= thresholds.GROUPED_MOST_WEIGHTS), key=size.__getitem__)
    clocks = {name: _moving_clocks(operand_format, *shapes[name], work) for name in ordered}
    known = least = sum(clocks.values()) + of_launch  # which moves the biases
    best = MovedTogether("one launch is counted to take no less")
    fewest = min(2, len(shapes))  # a layer alone gains the launch of its bias
    for count in range(fewest, min(len(ordered), thresholds.GROUPED_MOST_LAYERS) + 1):
        weights, others = ordered[:count], [clocks[name] for name in ordered[count:]]
        tile, together = _grouped_tile(operand_format, [shapes[name] for name in weights], work)
        rest = sum(others) + of_launch * (count < len(shapes))
        if together + rest < least:
            least = together + rest
            why = f"one launch moves {count} layers; counted clocks: {together:,} so, {known - rest:,} by others"
            best = MovedTogether(why, frozenset(weights), tile)
    return best


def _grouped_tile(
    operand_format: OperandFormat, shapes: Sequence[tuple[int, int]], work: Work
) -> tuple[ClusterSplitTile, int]:
    """The tile of a launch that moves weights (k, n), and what it is counted at: of tiles that take about as long the
    first, of the fewest blocks."""
    late = thresholds.LAUNCH_CLOCKS + read_late_clocks(operand_format, shapes, work.rows)
    first, *others = cluster_tiles(operand_format)
    best, least = first, late + grouped_clocks(first, shapes, work.rows, work.setting.multiprocessors)
    for tile in others:
        clocks = late + grouped_clocks(tile, shapes, work.rows, work.setting.multiprocessors)
        if 100 * clocks < thresholds.GROUPED_HUNDREDTHS * least:
            best, least = tile, clocks
    return best, least


def _moving_clocks(operand_format: OperandFormat, k: int, n: int, work: Work) -> int:
    """Of the launch that moves a weight alone."""
    sms, arch = work.setting.multiprocessors, work.setting.arch
    chosen = weight_tile(operand_format, k, n, work.rows, sms, arch, in_place=True)
    if isinstance(chosen.tile, ClusterSplitTile):
        counted = grouped_clocks(chosen.tile, [(k, n)], work.rows, sms)
    else:
        assert isinstance(chosen.tile, Sm90Tile)
        counted = moving_clocks(chosen.tile, k, n, work.rows, sms)
    return thresholds.LAUNCH_CLOCKS + max(counted, chosen.clocks)


def runs_beside(update: Entry, blocks: int, rows: int, multiprocessors: int) -> Verdict:
    """Whether an update of so many blocks, by so many rows of the batch, runs beside the launches that follow it.

    Products on tensor cores ask for all of a multiprocessor's shared memory: beside a short update on tensor cores they
    wait longer for that than the update takes.
    """
    if not thresholds.UPDATES_RUN_BESIDE:
        return Verdict(False, "a test or a benchmark asks for one launch after another")
    least = thresholds.BESIDE_LEAST_ROWS * update.cluster
    if update.header in ("dense/tensor_update.cuh", "fused/tensor_updates.cuh") and rows < least:
        return Verdict(False, f"{rows:,} rows < {least:,}: others would wait for its shared memory")
    room = thresholds.BESIDE_TENTHS * update.blocks * multiprocessors // 10
    return Verdict(blocks <= room, f"{blocks:,} blocks {'≤' if blocks <= room else '>'} {room:,}, which leave room")
