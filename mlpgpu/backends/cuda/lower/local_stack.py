"""Launches of stacks of locally connected layers that run as one kernel."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .... import plan as ops
from ..kernels import Entry
from ..kernels.launches import At, Launch, Value
from ..select.local_stack import LocalStack, find_stacks
from .shard import Shard


class Stacks:
    """Lowers the stacks among a shard's operations: whoever comes to one of their operations asks here."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._forward: dict[str, LocalStack] = {}  # by y of each layer
        self._backward: dict[str, LocalStack] = {}  # by dz of each layer, where the way back is one kernel too
        self._derived: dict[LocalStack, bool] = {}  # whether dy is already multiplied by the derivative
        kind = "training" if shard.is_training else "evaluation"
        stacks = find_stacks(
            shard.plan, shard.operations, shards=shard.count, multiprocessors=shard.setting.multiprocessors,
            arch=shard.setting.arch,
        )  # fmt: skip
        for run, stack in stacks.items():
            way = _way(run, stack)
            if not isinstance(stack, str):
                self._forward |= {op.y: stack for op in run}
                if shard.is_training:
                    no_update = stack.no_update or ("" if shard.in_place else "the step has more to do with gradients")
                    way += f"; back layer by layer, since {no_update}" if no_update else "; back in one kernel too"
                    self._backward |= {} if no_update else {f"d{op.y}": stack for op in run}
            if len(run) > 1 and shard.number == 0:
                shard.lowered.notes.append(f"{kind}, {run[0].y} to {run[-1].y}: {way}")

    def _take(self, stack: LocalStack, names: Collection[str]) -> dict[str, Value]:
        """The stack's arrays, by the names of the arguments."""
        lowered = self.shard.lowered
        for name in names:
            lowered.bytes[f"{stack.name}.{name}"] = stack.bytes[name]
        lowered.words[f"{stack.name}.layers"] = tuple(stack.table.view(np.int32).tolist())
        return {name: At(f"{stack.name}.{name}") if stack.bytes[name] else None for name in names}

    def forward(self, op: ops.LocallyConnected) -> bool:
        """Whether it is a stack's, which is launched with its first layer.

        In training all layers' y, and z, are parts of one array, save the last y.
        """
        shard, stack = self.shard, self._forward.get(op.y)
        if stack is None:
            return False
        if op is not stack.operations[0]:
            return True
        own = self._take(stack, ("layers", "messages", "launches"))
        own |= {"kept": None, "kept_z": None}
        last = stack.operations[-1]
        if shard.is_training:
            own |= self._take(stack, ("kept", "kept_z"))
            for each, place in zip(stack.operations, stack.table["y"], strict=True):
                if each is not last:
                    shard.segments[each.y] = At(f"{stack.name}.kept", int(place))
                if each.z:
                    shard.segments[each.z] = At(f"{stack.name}.kept_z", int(place))
        values = {"x": shard.at(op.x), "parameters": At("parameters"), "y": shard.stored(last.y)}
        self._launch(stack, stack.forward, {**own, **values})
        return True

    def derives(self, op: ops.ActivationBackward) -> bool:
        """Whether a stack's kernel multiplies by this derivative."""
        stack = self._backward.get(op.dy)
        if stack is None:
            return False
        if op.dy == f"d{stack.operations[-1].y}":
            self._derived[stack] = False
        return True

    def backward(self, op: ops.LocallyConnectedBackward) -> bool:
        """Whether it is a stack's, whose way back is launched with its last layer."""
        shard, stack = self.shard, self._backward.get(op.dz)
        if stack is None:
            return False
        last = stack.operations[-1]
        if op.dz != f"d{last.y}":
            return True
        assert shard.plan.optimizer is not None
        x = stack.operations[0].x
        dx = next(
            other.dx
            for other in shard.operations
            if isinstance(other, ops.LocallyConnectedBackward) and other.dz == f"d{stack.operations[0].y}"
        )
        values: dict[str, Value] = {
            "x": shard.at(x), "y": shard.at(last.y), "dy": shard.at(op.dz),
            "is_derived": int(self._derived.get(stack, True)), "totals": At("totals"),
            "parameters": At("parameters"), "slots": At("slots") if shard.plan.optimizer.slots else None,
            "size": shard.plan.parameter_count, "dx": shard.stored(dx) if dx else None,
        }  # fmt: skip
        entry = stack.update(type(shard.plan.optimizer).__name__)
        own = self._take(stack, [argument.name for argument in entry.arguments if argument.name in stack.bytes])
        self._launch(stack, entry, {**own, **values})
        return True

    def _launch(self, stack: LocalStack, entry: Entry, values: dict[str, Value]) -> None:
        shard = self.shard
        of_stack = {"count": len(stack.layers), "m": stack.m, "halo": stack.halo}
        grid, values = (stack.blocks, 1, 1), {**shard.common, **of_stack, **values}
        shard.launches.append(Launch(entry, grid, values, shard.operation, stack.lengths))


def _way(run: tuple[ops.LocallyConnected, ...], stack: LocalStack | str) -> str:
    return f"{len(run)} launches, since {stack}" if isinstance(stack, str) else str(stack)
