"""The layers behind a long first one as one kernel's work (``fused/tail.cuh``): which plans have them, where they
lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .... import plan as ops
from ....activations import ACTIVATIONS
from .. import kernels
from ..kernels.launches import At
from .shard import Shard, part_length

MOST_ROWS = 256  # that are worth a block each


@dataclass(frozen=True)
class Tail:
    """All dense layers of a shard, of which the first is cut along k.

    Attributes:
        layers: in order.
        backwards: their gradients, in the same order.
    """

    layers: tuple[ops.Dense, ...]
    backwards: tuple[ops.DenseBackward, ...]

    def places(self, shard: Shard) -> dict[str, At]:
        """Where the kernel leaves the outputs and deltas of layers."""
        found, units = {}, 0
        for layer, backward in zip(self.layers, self.backwards, strict=True):
            found[layer.y] = At("tail.y", shard.plan.capacity * units)
            found[backward.dz] = At("tail.dz", shard.plan.capacity * units)
            units += shard.width(layer.y)
        shard.lowered.bytes |= dict.fromkeys(("tail.y", "tail.dz"), 4 * shard.plan.capacity * units)
        return found

    def lengths(self, shard: Shard) -> dict[str, int]:
        """The lengths that the kernel's entry names beside its arguments."""
        widths = [shard.width(layer.y) for layer in self.layers]
        products = sum(k * n for k, n in pairwise(widths))
        biases = sum(n for layer, n in zip(self.layers, widths, strict=True) if layer.bias is not None)
        return {
            "units": sum(widths), "outputs": widths[-1], "products": products, "parameters": products + biases,
        }  # fmt: skip

    def words(self, shard: Shard) -> tuple[int, ...]:
        """The layers as the kernel is told of them, ``TailLayer`` each."""
        offsets = {parameter.name: parameter.offset for parameter in shard.plan.parameters}
        found: list[int] = []
        for place, layer in enumerate(self.layers):
            weight = offsets[layer.weight] if place else -1
            bias = -1 if layer.bias is None else offsets[layer.bias]
            saves_z = ACTIVATIONS[layer.activation].saves == "z"
            number = kernels.activation_number(layer.activation)
            found += [shard.width(layer.y), weight, bias, number, int(saves_z)]
        return tuple(found)


def tail_of(shard: Shard) -> Tail | None:
    """That of a shard in training, if all of its layers are one."""
    layers = tuple(op for op in shard.operations if isinstance(op, ops.Dense))
    backwards = tuple(op for op in shard.operations if isinstance(op, ops.DenseBackward))[::-1]
    known = (ops.Gather, ops.Dense, ops.Loss, ops.DenseBackward, ops.ActivationBackward)
    once = (ops.Reduce, ops.Norm, ops.Update)
    if (
        not shard.is_training
        or shard.plan.ends_with_gradient
        or shard.count > 1
        or shard.plan.reduction != "ordered"
        or shard.rows > MOST_ROWS
        or not 2 <= len(layers) <= kernels.TAIL_MOST_LAYERS
        or len(layers) != len(backwards)
        or not all(isinstance(op, (*known, *once)) for op in shard.operations)
        or layers[-1].activation != "identity"
        or max(part.offset + part.size for part in shard.plan.parameters) >= 1 << 31
    ):
        return None
    first, *others = (shard.shapes[layer.weight] for layer in layers)
    weights = sum(k * n for k, n in others)
    units = sum(n for _, n in (first, *others))
    fits = weights <= kernels.TAIL_MOST_WEIGHTS and units <= kernels.TAIL_MOST_UNITS
    return Tail(layers, backwards) if fits and part_length(*first) is not None else None
