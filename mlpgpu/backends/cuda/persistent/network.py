"""What the persistent kernel needs to know of a plan: its dense layers, with dropouts and scalings between them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from .... import plan as ops
from ....plan import Plan
from ....random import least_kept
from ..kernels import rule_of
from ..kernels.launches import At


@dataclass(frozen=True)
class Dropout:
    """A dropout: the number of its layer, which addresses its random words, and its rate."""

    layer: int
    rate: float

    def __str__(self) -> str:
        (keep,) = struct.unpack("<I", struct.pack("<f", 1.0 / (1.0 - self.rate)))
        return f"Dropped<{self.layer}, {least_kept(self.rate)}u, {keep}u>"


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer with the dropout after it; one that is not trained has no gradient and no update."""

    n_in: int
    n_out: int
    has_bias: bool
    activation: str
    saves_z: bool
    is_trained: bool = True
    dropout: Dropout | None = None

    @property
    def weight_rows(self) -> int:
        """Rows of the weight matrix, of which the biases are the last one."""
        return self.n_in + self.has_bias


@dataclass(frozen=True)
class PersistentNetwork:
    """What a plan trains, as the persistent kernel needs to know it.

    Attributes:
        rows: the most of a batch.
        rule: by which parameters move, one of ``RULES``.
        slots: of the rule, for each parameter.
        scaled_inputs: the mean and the scale of standardized inputs; ``scaled_targets`` those of targets.
    """

    rows: int
    layers: tuple[DenseLayer, ...]
    loss: str
    target_kind: str
    rule: str
    slots: int
    input_dropout: Dropout | None
    scaled_inputs: tuple[At, At] | None
    scaled_targets: tuple[At, At] | None

    @property
    def widest(self) -> int:
        """Units of the widest layer."""
        return max(layer.n_out for layer in self.layers)

    @property
    def targets(self) -> int:
        """Numbers of a row's target."""
        return 1 if self.target_kind == "index" else self.layers[-1].n_out


def read_network(plan: Plan) -> PersistentNetwork | str:
    """The network that a plan trains, or why the persistent kernel cannot train it."""
    if plan.optimizer is None or plan.loss is None or plan.target_kind is None:
        return "there is no training step"
    if plan.reduction != "ordered":
        return 'reduction="atomic"'
    if plan.shards > 1:
        return "the batch is split over streams"
    if plan.optimizer.clip_norm is not None:
        return "the gradient's norm is clipped"
    statistics = {s.name: At("statistics", s.offset) for s in plan.statistics}
    segments = {p.name: p for p in plan.parameters}
    layers: list[DenseLayer] = []
    input_dropout, end = None, 0
    scaled_inputs, scaled_targets = None, None
    for op in plan.training:
        if isinstance(op, ops.Loss):
            break
        if isinstance(op, ops.Standardize):
            scaled = statistics[op.mean], statistics[op.scale]
            if op.x == "target":
                scaled_targets = scaled
            elif layers or input_dropout or scaled_inputs:
                return "inputs are standardized twice, or after a dropout"
            else:
                scaled_inputs = scaled
        elif isinstance(op, ops.Dropout):
            dropout = Dropout(op.layer, op.rate)
            if (layers[-1].dropout if layers else input_dropout) is not None:
                return "a dropout follows another"
            if layers:
                layers[-1] = replace(layers[-1], dropout=dropout)
            else:
                input_dropout = dropout
        elif isinstance(op, ops.Dense):
            weight, bias = segments[op.weight], segments[op.bias] if op.bias else None
            if weight.offset != end:
                return "layers share their weights"
            end = (bias or weight).end
            n_in, n_out = weight.shape
            layers.append(DenseLayer(n_in, n_out, bias is not None, op.activation, op.z is not None, weight.trainable))
        elif not isinstance(op, ops.Gather):
            return f"the persistent kernel has no {type(op).__name__}"
    if not layers:
        return "nothing is trained"
    return PersistentNetwork(
        plan.capacity, tuple(layers), plan.loss.form, plan.target_kind, rule_of(plan.optimizer),
        len(plan.optimizer.slots), input_dropout, scaled_inputs, scaled_targets,
    )  # fmt: skip
