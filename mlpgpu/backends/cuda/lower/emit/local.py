"""Locally connected layers, one by one or as stacks: ``local/layer.cuh``, ``local/stack.cuh``."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ... import kernels
from ...kernels import Entry, ceil_div
from ...kernels.launches import At, Launch, Value
from ...select.local_stack import LocalStack
from ..groups import Group, LocalBackward, LocalForward, StackBackward, StackForward
from .shard import Shard


def forward(shard: Shard, group: LocalForward) -> None:
    op, (window, pitch), n = group.op, shard.shapes[group.op.weight], shard.width(group.op.y)
    shard.add(
        group, kernels.local_forward(op.activation),
        shard.over_columns(n, ceil_div(shard.rows, kernels.LOCAL_ROWS)),
        x=shard.ref(op.x), w=shard.ref(op.weight), b=shard.ref(op.bias), z=shard.stored(op.z), y=shard.stored(op.y),
        m=shard.width(op.x), n=n, window=window, pitch=pitch,
        b_step=int(op.bias is not None and shard.shapes[op.bias][0] == pitch),
    )  # fmt: skip


def backward(shard: Shard, group: LocalBackward) -> None:
    """No sum is made by atomics, in either mode."""
    op, derivative = group.op, group.derivative
    (window, pitch), m, n = shard.shapes[op.weight], shard.width(op.x), shard.width(op.dz)
    if op.dweight is not None:
        shard.add(
            group, kernels.local_backward_weight(), shard.over_columns(pitch, window),
            x=shard.ref(op.x), dz=shard.ref(op.dz), dw=shard.ref(op.dweight), m=m, n=n, window=window, pitch=pitch,
        )  # fmt: skip
    if op.dbias is not None:
        db = {"dz": shard.ref(op.dz), "db": shard.ref(op.dbias), "n": n}
        if group.has_shared_bias:
            shard.add(group, kernels.local_backward_shared_bias(), (1, 1, 1), **db)
        else:
            shard.add(group, kernels.local_backward_bias(), shard.over_columns(pitch, 1), **db, pitch=pitch)
    if op.dx is None:
        return
    shard.add(
        group, kernels.local_backward_input(derivative.activation),
        shard.over_columns(m, ceil_div(shard.rows, kernels.LOCAL_ROWS)),
        dz=shard.ref(op.dz), w=shard.ref(op.weight), saved=shard.ref(derivative.saved), dx=shard.stored(op.dx), m=m,
        n=n, window=window, pitch=pitch,
    )  # fmt: skip


def stack_forward(shard: Shard, group: StackForward) -> None:
    """In training all layers' y, and z, are parts of one array, save the last y."""
    stack, last = group.stack, group.layers[-1]
    arrays = _arrays(shard, stack, ("layers", "messages", "launches"))
    arrays |= {"kept": None, "kept_z": None}
    if shard.work.is_training:
        arrays |= _arrays(shard, stack, ("kept", "kept_z"))
        for layer, offset in zip(group.layers, stack.table["y"], strict=True):
            if layer is not last:
                shard.segments[layer.y] = At(f"{stack.name}.kept", int(offset))
            if layer.z:
                shard.segments[layer.z] = At(f"{stack.name}.kept_z", int(offset))
    values = {"x": shard.ref(group.layers[0].x), "parameters": At("parameters"), "y": shard.stored(last.y)}
    _launch(shard, group, stack, stack.forward, {**arrays, **values})


def stack_backward(shard: Shard, group: StackBackward) -> None:
    """The backward pass of a whole stack, with the optimizer's step."""
    stack = group.stack
    first, last = stack.operations[0], stack.operations[-1]
    dx = next(op.dx for op in group.backwards if op.dz == f"d{first.y}")
    assert shard.plan.optimizer is not None
    values: dict[str, Value] = {
        "x": shard.ref(first.x), "y": shard.ref(last.y), "dy": shard.ref(f"d{last.y}"),
        "is_derived": int(group.is_derived), "totals": At("totals"), "parameters": At("parameters"),
        "slots": At("slots") if shard.plan.optimizer.slots else None, "size": shard.slot_pitch,
        "dx": shard.stored(dx),
    }  # fmt: skip
    entry = stack.update(shard.rule)
    names = [argument.name for argument in entry.arguments if argument.name in stack.bytes]
    _launch(shard, group, stack, entry, {**_arrays(shard, stack, names), **values})


def _arrays(shard: Shard, stack: LocalStack, names: Collection[str]) -> dict[str, Value]:
    """Arrays of a stack's own, by the names of the arguments."""
    lowered = shard.lowered
    for name in names:
        lowered.bytes[f"{stack.name}.{name}"] = stack.bytes[name]
    lowered.words[f"{stack.name}.layers"] = tuple(stack.table.view(np.int32).tolist())
    return {name: At(f"{stack.name}.{name}") if stack.bytes[name] else None for name in names}


def _launch(shard: Shard, group: Group, stack: LocalStack, entry: Entry, values: dict[str, Value]) -> None:
    of_stack = {"count": len(stack.layers), "m": stack.m, "halo": stack.halo}
    values = {**shard.common, **of_stack, **values}
    shard.launches.append(Launch(entry, (stack.blocks, 1, 1), values, group.title, stack.lengths))
