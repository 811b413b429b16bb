"""What is done to each row by itself, and losses and outputs: ``elementwise/rows.cuh``, ``elementwise/loss.cuh``."""

from __future__ import annotations

import math

from ..... import plan as ops
from .....random import least_kept
from ... import kernels
from ...kernels import ceil_div, strided_grid
from ...kernels.launches import At, Value
from ...select.loss import loss_blocks
from ..groups import Differentiate, DrawDropouts, DropOut, GatherRows, LossRows, OutputRows, StandardizeRows
from .operands import component_count, elements_of, written
from .shard import Grid, Shard

SUMS_BYTES = 16
DRAWN_DROPOUTS = "drawn dropouts"


def gather(shard: Shard, group: GatherRows) -> None:
    n = shard.width(group.op.x)
    shard.add(
        group, kernels.gather(shard.setting.source), shard.over_elements(n),
        order=At("order"), data=shard.inputs[group.op.x], scale=At("scale"), x=shard.stored(group.op.x), n=n,
    )  # fmt: skip


def standardize(shard: Shard, group: StandardizeRows) -> None:
    op, n = group.op, shard.width(group.op.x)
    shard.add(
        group, kernels.standardize(), shard.over_elements(n),
        x=shard.ref(op.x), mean=shard.ref(op.mean), scale=shard.ref(op.scale), y=shard.stored(op.y), n=n,
    )  # fmt: skip


def dropout(shard: Shard, group: DropOut) -> None:
    n, derivative = shard.width(group.x), group.derivative
    if group.op.part_of is not None:
        first, width = group.op.part_of
        blocks = strided_grid(shard.rows * (n // kernels.DROPOUT_BLOCK + 2), shard.most_blocks)
        shard.add(
            group, kernels.dropout_of_part(), blocks, x=shard.ref(group.x), y=shard.stored(group.y), n=n, first=first,
            width=width, **shard.dropout(group.op),
        )  # fmt: skip
        return
    y, components = written(shard, group.y, group.forms)
    shard.add(
        group, kernels.dropout(derivative.activation), shard.over_elements(n, per_thread=kernels.DROPOUT_BLOCK),
        x=shard.ref(group.x), saved=shard.ref(derivative.saved), y=y,
        components=components, component_stride=elements_of(shard, group.y), component_count=component_count(shard),
        n=n, **shard.dropout(group.op),
    )  # fmt: skip


def draw_dropouts(shard: Shard, group: DrawDropouts) -> None:
    """One launch for several steps: what it draws depends on a step's number alone."""
    described: list[int] = []
    for op in group.ops:
        described += [op.layer, shard.width(op.x), least_kept(op.rate), shard.lay_kept(op)]
    shard.lowered.words[DRAWN_DROPOUTS] = tuple(described)
    kept = shard.kept_elements
    words = shard.lowered.staged_bytes[kept] // 4
    blocks = ceil_div(words, kernels.ROW_THREADS), 1, 1
    launch = shard.launch(
        group, kernels.draw_dropouts(), blocks, described=At(DRAWN_DROPOUTS), count=len(group.ops), kept=At(kept),
        words=words, seed=At("seed"),
    )  # fmt: skip
    shard.lowered.staged.append(launch)


def differentiate(shard: Shard, group: Differentiate) -> None:
    op, n = group.op, shard.width(group.op.dy)
    entry = kernels.activation_backward(op.activation)
    shard.add(group, entry, shard.over_elements(n), saved=shard.ref(op.saved), dy=shard.ref(op.dy), n=n)


def output(shard: Shard, group: OutputRows) -> None:
    op = group.op
    shard.add(
        group, kernels.output(op.function, team=group.team), shard.over_rows(group.team),
        logits=shard.ref(op.logits), mean=shard.ref(op.mean), scale=shard.ref(op.scale), y=shard.stored(op.y),
        n=shard.width(op.logits),
    )  # fmt: skip


def loss(shard: Shard, group: LossRows) -> None:
    op, n = group.op, shard.width(group.op.logits)
    delta, components = written(shard, op.delta, group.delta)
    rows = kernels.filled_rows(shard.rows) if components else shard.rows
    grid = loss_blocks(rows, group.team, shard.multiprocessors), 1, 1
    shard.add(
        group, kernels.loss(op.loss.form, op.kind, textured=shard.setting.textured, team=group.team), grid,
        **weighed(shard, grid), **statistics(shard, group.targets), delta=delta, components=components,
        component_stride=elements_of(shard, op.logits), component_count=component_count(shard),
        logits=shard.ref(op.logits), n=n,
    )  # fmt: skip


def of_data(shard: Shard, inputs: ops.Standardize | None) -> dict[str, Value]:
    """The data set's inputs, as numbers or as bytes, and what standardizes them."""
    is_bytes = shard.setting.source == "uint8"
    return {
        "data": None if is_bytes else At("data"), "bytes": At("data") if is_bytes else None, "scale": At("scale"),
        "mean": shard.ref(inputs.mean) if inputs else None, "deviation": shard.ref(inputs.scale) if inputs else None,
    }  # fmt: skip


def statistics(shard: Shard, targets: ops.Standardize | None) -> dict[str, Value]:
    """What standardized targets are given beside the rows of a loss."""
    if targets is None:
        return {"mean": None, "scale": None}
    return {"mean": shard.ref(targets.mean), "scale": shard.ref(targets.scale)}


def weighed(shard: Shard, grid: Grid) -> dict[str, Value]:
    """What a loss is given beside its rows; each block leaves a sum."""
    blocks, shards = math.prod(grid), shard.work.shards
    if shard.work.is_training:
        shard.lowered.bytes["sums"] = SUMS_BYTES * shards * blocks
    total: dict[str, Value] = {"arrived": None, "totals": None, "losses": None}
    if shards == 1:  # the last block to end adds the batch up
        total = {name: At(name) for name in total}
    return {
        "order": At("order"), "targets": At("targets"), "weights": At("weights"),
        "sums": At("sums", 2 * blocks * shard.number), **total,
    }  # fmt: skip
