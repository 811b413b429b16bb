"""The layers behind a long first one as one kernel's work (``tail.cuh``): which plans have them, where they lie."""

from __future__ import annotations

from dataclasses import dataclass

from ... import plan as ops
from ...activations import ACTIVATIONS
from . import kernels
from .launches import At
from .share import Share, part_length

MOST_ROWS = 256  # that are worth a block each


@dataclass(frozen=True)
class Tail:
    """All dense layers of a share, of which the first is cut along k.

    Attributes:
        layers: in order.
        backwards: their gradients, in the same order.
    """

    layers: tuple[ops.Dense, ...]
    backwards: tuple[ops.DenseBackward, ...]

    def places(self, share: Share) -> dict[str, At]:
        """Where the kernel leaves the outputs and deltas of layers."""
        found, units = {}, 0
        for layer, backward in zip(self.layers, self.backwards, strict=True):
            found[layer.y] = At("tail.y", share.plan.capacity * units)
            found[backward.dz] = At("tail.dz", share.plan.capacity * units)
            units += share.width(layer.y)
        share.lowered.bytes |= dict.fromkeys(("tail.y", "tail.dz"), 4 * share.plan.capacity * units)
        return found

    def words(self, share: Share) -> tuple[int, ...]:
        """The layers as the kernel is told of them, ``TailLayer`` each."""
        offsets = {parameter.name: parameter.offset for parameter in share.plan.parameters}
        found: list[int] = []
        for place, layer in enumerate(self.layers):
            weight = offsets[layer.weight] if place else -1
            bias = -1 if layer.bias is None else offsets[layer.bias]
            saves_z = ACTIVATIONS[layer.activation].saves == "z"
            number = kernels.activation_number(layer.activation)
            found += [share.width(layer.y), weight, bias, number, int(saves_z)]
        return tuple(found)


def tail_of(share: Share) -> Tail | None:
    """That of a share in training, if all of its layers are one."""
    layers = tuple(op for op in share.operations if isinstance(op, ops.Dense))
    backwards = tuple(op for op in share.operations if isinstance(op, ops.DenseBackward))[::-1]
    known = (ops.Gather, ops.Dense, ops.Loss, ops.DenseBackward, ops.ActivationBackward)
    once = (ops.Reduce, ops.Norm, ops.Update)
    if (
        not share.is_training
        or share.plan.ends_with_gradient
        or share.count > 1
        or share.plan.reduction != "ordered"
        or share.rows > MOST_ROWS
        or not 2 <= len(layers) <= kernels.TAIL_MOST_LAYERS
        or len(layers) != len(backwards)
        or not all(isinstance(op, (*known, *once)) for op in share.operations)
        or layers[-1].activation != "identity"
        or max(part.offset + part.size for part in share.plan.parameters) >= 1 << 31
    ):
        return None
    first, *others = (share.shapes[layer.weight] for layer in layers)
    weights = sum(k * n for k, n in others)
    units = sum(n for _, n in (first, *others))
    fits = weights <= kernels.TAIL_MOST_WEIGHTS and units <= kernels.TAIL_MOST_UNITS
    return Tail(layers, backwards) if fits and part_length(*first) is not None else None
