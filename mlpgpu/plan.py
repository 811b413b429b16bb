"""The plan: what one training step computes, as a flat list of typed operations over named buffers.

This is the narrow waist between describing a network and running it.  :func:`lower` turns layers, a
loss and an optimizer into a :class:`Plan`; a backend reads nothing else.  A plan fixes operations,
widths and shares; the number of rows is chosen at run time, up to a capacity.

A step runs gather → forward … → loss → backward … once for each share of the batch's rows, then
``Reduce`` → (``Norm``) → ``Update`` once.  Backward operations overwrite *partials*, one per share and
use of a parameter; ``Reduce`` alone adds them up, in that order, and divides by the batch's summed
sample weight.  A plan holds two such lists: ``training``, and ``evaluation`` without dropout or
backward.  Buffers name what is computed; what is stored, and where, is the backend's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal, Protocol

from .errors import ConfigurationError
from .losses import LOSSES, OutputName, TargetKind
from .optimizers import Optimizer

Precision = Literal["float32", "float32-ieee", "float64", "tf32", "bfloat16"]
Reduction = Literal["ordered", "atomic"]
PRECISIONS: tuple[Precision, ...] = ("float32", "float32-ieee", "float64", "tf32", "bfloat16")
CARD_PRECISIONS: tuple[Precision, ...] = ("tf32", "bfloat16")  # which no CPU computes
REDUCTIONS: tuple[Reduction, ...] = ("ordered", "atomic")


@dataclass(frozen=True)
class Buffer:
    """A named array: what its axes are, and their lengths, rows at capacity."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    holds: Literal["real", "index"] = "real"


@dataclass(frozen=True)
class Segment:
    """A named array of shape ``shape`` inside a flat one, from element ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Parameter(Segment):
    """A trained array: the layer it belongs to, and how its initial values are drawn."""

    layer: int
    fans: tuple[int, int]
    initializer: str


@dataclass(frozen=True)
class Partial(Segment):
    """Where one use of ``parameter`` leaves its gradient, in the flat array of each share."""

    parameter: str


class Operation:
    """One operation: a frozen dataclass whose fields named in READS and WRITES hold names of arrays."""

    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self._names(self.READS)

    @property
    def writes(self) -> tuple[str, ...]:
        return self._names(self.WRITES)

    def _names(self, where: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in (getattr(self, key) for key in where) if name is not None)


@dataclass(frozen=True)
class Gather(Operation):
    """Fetch the batch's rows: inputs in the plan's precision, targets, sample weights (1 if there are none)."""

    WRITES = ("x", "target", "weight")
    x: str
    target: str | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Standardize(Operation):
    """``y = (x - mean) / scale``, column by column."""

    READS, WRITES = ("x", "mean", "scale"), ("y",)
    x: str
    mean: str
    scale: str
    y: str


@dataclass(frozen=True)
class Weighted(Operation):
    """``y = f(z)``, ``z`` linear in ``x``; ``z`` is named only where the derivative of f takes it."""

    READS, WRITES = ("x", "weight", "bias"), ("z", "y")
    x: str
    weight: str
    bias: str | None
    activation: str
    z: str | None
    y: str


@dataclass(frozen=True)
class Dense(Weighted):
    """``z = x W + b``."""


@dataclass(frozen=True)
class LocallyConnected(Weighted):
    """``z_i = b_i + Σ_r w[r, i] x_{i + r}``, with as many columns of w as y has; b may be one number."""


@dataclass(frozen=True)
class Dropout(Operation):
    """``y = x · mask / (1 - rate)``; word (row in batch · width + unit) of the layer's step decides the mask."""

    READS, WRITES = ("x",), ("y",)
    x: str
    y: str
    rate: float
    layer: int


@dataclass(frozen=True)
class Loss(Operation):
    """Each row's value, and its derivative by the logits; both times the row's sample weight."""

    READS, WRITES = ("logits", "target", "weight"), ("value", "delta")
    loss: str
    kind: TargetKind
    logits: str
    target: str
    weight: str
    value: str
    delta: str | None


@dataclass(frozen=True)
class Output(Operation):
    """Predictions: the loss's output function of the logits, then ``· scale + mean`` where targets are standardized."""

    READS, WRITES = ("logits", "mean", "scale"), ("y",)
    logits: str
    function: OutputName
    mean: str | None
    scale: str | None
    y: str


@dataclass(frozen=True)
class ActivationBackward(Operation):
    """``dz = dy ∘ f′(saved)``, in place."""

    READS, WRITES = ("dy", "saved"), ("dy",)
    activation: str
    saved: str
    dy: str


@dataclass(frozen=True)
class WeightedBackward(Operation):
    """The gradients of a weight and a bias over the share's rows, overwriting partials; ``dx`` if wanted."""

    READS, WRITES = ("dz", "x", "weight"), ("dweight", "dbias", "dx")
    dz: str
    x: str
    weight: str
    dweight: str
    dbias: str | None
    dx: str | None


@dataclass(frozen=True)
class DenseBackward(WeightedBackward):
    """``dW = xᵀ dz``, ``db = Σ dz``, ``dx = dz Wᵀ``."""


@dataclass(frozen=True)
class LocallyConnectedBackward(WeightedBackward):
    """``dw[r, i] = Σ dz_i x_{i + r}``, 0 in unused columns; ``db = Σ dz``; ``dx_j = Σ_r w[r, j - r] dz_{j - r}``."""


@dataclass(frozen=True)
class DropoutBackward(Operation):
    """``dx = dy · mask / (1 - rate)`` with the forward pass's mask."""

    READS, WRITES = ("dy",), ("dx",)
    dy: str
    dx: str
    rate: float
    layer: int


@dataclass(frozen=True)
class Reduce(Operation):
    """``gradient = Σ over shares and uses of partials / Σ weight``, in fixed order; 0 where no row has weight."""

    READS, WRITES = ("partials", "weight"), ("gradient",)
    partials: str
    weight: str
    gradient: str


@dataclass(frozen=True)
class Norm(Operation):
    """``gradient *= min(1, limit / |gradient|)``, the Euclidean norm over all parameters."""

    READS, WRITES = ("gradient",), ("gradient",)
    gradient: str
    limit: float


@dataclass(frozen=True)
class Update(Operation):
    """The optimizer's rule on all parameters at once."""

    READS, WRITES = ("gradient", "parameters", "slots"), ("parameters", "slots")
    optimizer: Optimizer
    gradient: str
    parameters: str
    slots: str | None


@dataclass(frozen=True)
class Plan:
    """One training step and one evaluation, lowered.

    Attributes:
        n_in, n_out: widths of inputs and logits.
        capacity: the most rows a step can have.
        shares: how many shares (S) a batch's rows are split into.
        replicas: how many networks of this shape run side by side; the leading axis of every array.
        precision, reduction: how products are computed, and partials added.
        parameters, statistics: segments of the flat arrays of trained and of fitted values.
        partials: segments of each share's flat array.
        buffers: by name.
        training, evaluation: operations, in order.  ``training`` is empty without an optimizer.
        loss, optimizer: None where the plan is for predicting only.
        logits, output: the buffers that hold the network's logits and predictions.
    """

    n_in: int
    n_out: int
    capacity: int
    shares: int
    replicas: int
    precision: Precision
    reduction: Reduction
    parameters: tuple[Parameter, ...]
    statistics: tuple[Segment, ...]
    partials: tuple[Partial, ...]
    buffers: Mapping[str, Buffer]
    training: tuple[Operation, ...]
    evaluation: tuple[Operation, ...]
    loss: str | None
    target_kind: TargetKind | None
    optimizer: Optimizer | None
    logits: str
    output: str

    @property
    def parameter_count(self) -> int:
        """Elements of the flat parameter array of one replica."""
        return self.parameters[-1].end if self.parameters else 0

    @property
    def statistic_count(self) -> int:
        """Elements of the flat array of fitted statistics of one replica."""
        return self.statistics[-1].end if self.statistics else 0

    @property
    def ends_with_gradient(self) -> bool:
        """Whether a training step moves nothing, and is there to be looked at."""
        return bool(self.training) and not any(isinstance(op, Update) for op in self.training)

    def to_gradient(self) -> Plan:
        """This plan with a training step that ends with the gradient: in float32, which all its arrays are kept in."""
        kept = tuple(op for op in self.training if not isinstance(op, (Norm, Update)))
        return replace(self, training=kept, precision="float32-ieee", reduction="ordered")

    def outputs(self) -> dict[str, str]:
        """The buffers of a training step that hold what layers with parameters put out: of ``"0.activation"``, …"""
        return {f"{op.y.removeprefix('y')}.activation": op.y for op in self.training if isinstance(op, Weighted)}

    def share_rows(self, rows: int) -> tuple[slice, ...]:
        """The rows of each share of a batch of ``rows``; sizes differ by at most one, and may be 0."""
        bounds = [rows * share // self.shares for share in range(self.shares + 1)]
        return tuple(slice(low, high) for low, high in pairwise(bounds))

    def flops(self, operation: Operation, rows: int) -> int:
        """Multiplications and additions of the matrix products in ``operation`` for ``rows`` rows."""
        if isinstance(operation, Weighted):
            return 2 * rows * self._terms(operation.weight, operation.y)
        if isinstance(operation, WeightedBackward):
            return 2 * rows * self._terms(operation.weight, operation.dz) * (2 if operation.dx else 1)
        return 0

    def _terms(self, weight: str, y: str) -> int:
        """Products that a row of ``y`` sums up: each output has as many as the weight has rows."""
        terms = next(p.shape[0] for p in self.parameters if p.name == weight)
        return terms * self.buffers[y].shape[-1]

    def __str__(self) -> str:
        """A table: each operation, what it reads and writes with shapes, and its products' arithmetic."""
        operations = self.training or self.evaluation
        table = [("#", "operation", "reads", "writes", "MFLOP")]
        for number, operation in enumerate(operations):
            flops = self.flops(operation, self.capacity)
            table.append(
                (
                    str(number),
                    _title(operation),
                    ", ".join(operation.reads),
                    ", ".join(f"{name} {self._shape(name)}" for name in operation.writes),
                    f"{flops / 1e6:.3f}" if flops else "",
                )
            )
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        total = sum(self.flops(operation, self.capacity) for operation in operations)
        head = (
            f"plan: {self.n_in} → {self.n_out}, {self.parameter_count:,} parameters, {self.precision}, "
            f"up to {self.capacity} rows in {self.shares} share{'s' * (self.shares > 1)}, {self.reduction}"
        )
        lines = [
            "  ".join(
                [*(c.ljust(w) for c, w in zip(line[:-1], widths, strict=False)), line[-1].rjust(widths[-1])]
            ).rstrip()
            for line in table
        ]
        return "\n".join([head, *lines, f"products: {total / 1e6:.3f} MFLOP a step"])

    def _shape(self, name: str) -> str:
        segments = {s.name: s.shape for s in (*self.parameters, *self.partials, *self.statistics)}
        if name in segments:
            return "×".join(map(str, segments[name]))
        # The replica axis is 1 for now, and would only be in the way of reading.
        return "×".join(map(str, self.buffers[name].shape[1:]))


def _title(operation: Operation) -> str:
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in type(operation).__name__).strip()
    for key in ("activation", "loss", "rate"):
        value = getattr(operation, key, None)
        if value is not None and value != "identity":
            words += f" {value}"
    return f"{words} {type(operation.optimizer).__name__}" if isinstance(operation, Update) else words


class Lowerable(Protocol):
    """What :func:`lower` asks of a layer."""

    def lower(self, builder: Builder, x: str) -> str:
        """Add this layer's operations on buffer ``x`` and return the name of the result's buffer."""
        ...


class Builder:
    """Collects a plan's operations while layers lower themselves, one after another.

    Attributes:
        training: whether this is for a training step; otherwise layers leave out what only that needs.
        place: the current layer's place in the network.
        home: the first place of the same layer, whose parameters it shares.
        is_last: whether no layer follows.
        target_statistics: names of the mean and the scale of standardized targets, if they are.
    """

    def __init__(self, *, training: bool, capacity: int, replicas: int) -> None:
        self.training = training
        self.place = 0
        self.home = 0
        self.is_last = False
        self.target_statistics: tuple[str, str] | None = None
        self.parameters: dict[str, Parameter] = {}
        self.statistics: dict[str, Segment] = {}
        self.buffers: dict[str, Buffer] = {}
        self.forward: list[Operation] = []
        self._trained: set[str] = set()  # buffers that depend on a parameter
        self._uses: dict[str, int] = {}  # of each parameter in the backward pass
        self._capacity, self._replicas = capacity, replicas

    def buffer(self, name: str, n: int | None, *, holds: Literal["real", "index"] = "real") -> str:
        """Declare a buffer of ``n`` columns for each row, or one number for each row if ``n`` is None."""
        axes: tuple[str, ...] = ("replica", "row")
        shape: tuple[int, ...] = (self._replicas, self._capacity)
        if n is not None:
            axes, shape = (*axes, "unit"), (*shape, n)
        self.buffers[name] = Buffer(name, axes, shape, holds)
        return name

    def flat(self, name: str, axis: str, *shape: int) -> str:
        """Declare a buffer of flat arrays of elements, ``axis`` naming what there are several of."""
        axes = ("replica", axis, "element") if len(shape) > 1 else ("replica", "element")
        self.buffers[name] = Buffer(name, axes, (self._replicas, *shape))
        return name

    def width(self, name: str) -> int:
        """Columns of a buffer."""
        return self.buffers[name].shape[-1]

    def parameter(self, name: str, shape: tuple[int, ...], fans: tuple[int, int], initializer: str) -> str:
        """Declare a trained array of the current layer; a layer's second place means the same array."""
        full = f"{self.home}.{name}"
        if full not in self.parameters:
            self.parameters[full] = Parameter(full, shape, _end(self.parameters), self.home, fans, initializer)
        return full

    def statistic(self, name: str, shape: tuple[int, ...]) -> str:
        """Declare an array of fitted values of the current layer."""
        full = f"{self.place}.{name}"
        self.statistics[full] = Segment(full, shape, _end(self.statistics))
        return full

    def add(self, operation: Operation) -> None:
        """Append a forward operation."""
        self.forward.append(operation)
        if any(name in self._trained or name in self.parameters for name in operation.reads):
            self._trained.update(operation.writes)

    def is_trained(self, name: str) -> bool:
        """Whether buffer ``name`` depends on a parameter."""
        return name in self._trained

    def delta(self, name: str) -> str | None:
        """The buffer of the loss's derivative by buffer ``name``, or None where nothing below is trained."""
        return self.buffer(f"d{name}", self.width(name)) if self.is_trained(name) else None

    def partial(self, parameter: str) -> str:
        """The partial of one more use of ``parameter``."""
        use = self._uses.get(parameter, 0)
        self._uses[parameter] = use + 1
        return _partial_name(parameter, use)

    def partials(self) -> tuple[Partial, ...]:
        """The partials of all uses: in the order of the parameters, so that without ties both layouts are one."""
        placed: dict[str, Partial] = {}
        for parameter in self.parameters.values():
            for use in range(self._uses.get(parameter.name, 0)):
                name = _partial_name(parameter.name, use)
                placed[name] = Partial(name, parameter.shape, _end(placed), parameter.name)
        return tuple(placed.values())


def _end(placed: Mapping[str, Segment]) -> int:
    return max((segment.end for segment in placed.values()), default=0)


def _partial_name(parameter: str, use: int) -> str:
    return f"d{parameter}" + (f"#{use}" if use else "")


def _weighted_backward(builder: Builder, forward: Weighted, dy: str) -> list[Operation]:
    operations: list[Operation] = []
    if forward.activation != "identity":
        operations.append(ActivationBackward(forward.activation, forward.z or forward.y, dy))
    dweight = builder.partial(forward.weight)
    dbias = builder.partial(forward.bias) if forward.bias else None
    dx = builder.delta(forward.x)
    backward = DenseBackward if isinstance(forward, Dense) else LocallyConnectedBackward
    return [*operations, backward(dy, forward.x, forward.weight, dweight, dbias, dx)]


def _dropout_backward(builder: Builder, forward: Dropout, dy: str) -> list[Operation]:
    dx = builder.delta(forward.x)
    return [DropoutBackward(dy, dx, forward.rate, forward.layer)] if dx else []


_BACKWARD: dict[type[Operation], Callable[..., list[Operation]]] = {
    Dense: _weighted_backward,
    LocallyConnected: _weighted_backward,
    Dropout: _dropout_backward,
}


def _backward(builder: Builder) -> list[Operation]:
    """The backward operations of the forward ones, last first, for as long as something below is trained."""
    operations: list[Operation] = []
    for forward in reversed(builder.forward):
        (y,) = (name for name in forward.writes if name != getattr(forward, "z", None))
        if builder.is_trained(y):
            operations += _BACKWARD[type(forward)](builder, forward, f"d{y}")
    return operations


def _lower_forward(layers: Sequence[Lowerable], n_in: int, builder: Builder) -> str:
    """Lower all layers and return the logits' buffer."""
    y = builder.buffer("x", n_in)
    homes: dict[int, int] = {}
    for place, layer in enumerate(layers):
        builder.place, builder.home = place, homes.setdefault(id(layer), place)
        builder.is_last = place == len(layers) - 1
        y = layer.lower(builder, y)
    return y


def _head(builder: Builder, loss: str | None, kind: TargetKind | None, n_out: int) -> list[Operation]:
    """What comes before the layers: the gather, and the scaling of targets where they are standardized."""
    if loss is None or kind is None:
        return [Gather("x")]
    target = builder.buffer("target", None if kind == "index" else n_out, holds="index" if kind == "index" else "real")
    operations: list[Operation] = [Gather("x", target, builder.buffer("row_weight", None))]
    if builder.target_statistics:
        if kind == "index" or LOSSES[loss].output != "identity":
            raise ConfigurationError("Standardize as the last layer", expected="a regression loss", got=loss)
        mean, scale = builder.target_statistics
        operations.append(Standardize(target, mean, scale, target))
    return operations


def lower(
    layers: Sequence[Lowerable],
    n_in: int,
    *,
    capacity: int,
    loss: str | None = None,
    target_kind: TargetKind | None = None,
    optimizer: Optimizer | None = None,
    output: OutputName = "identity",
    precision: Precision = "float32",
    reduction: Reduction = "ordered",
    shares: int = 1,
    replicas: int = 1,
) -> Plan:
    """Lower layers, a loss and an optimizer to a plan for at most ``capacity`` rows.

    Without an optimizer there is no training step; without a loss neither values nor targets, and
    ``output`` names the function that predictions are made by.  ``target_kind`` is the loss's usual
    one if left out.

    Raises:
        ConfigurationError: targets are standardized and the loss is not one for regression.
    """
    if loss is not None:
        target_kind = target_kind or LOSSES[loss].targets[0]
        output = LOSSES[loss].output

    inference = Builder(training=False, capacity=capacity, replicas=replicas)
    logits = _lower_forward(layers, n_in, inference)
    n_out = inference.width(logits)
    evaluation = [*_head(inference, loss, target_kind, n_out), *inference.forward]
    if loss is not None and target_kind is not None:
        value = inference.buffer("value", None)
        evaluation.append(Loss(loss, target_kind, logits, "target", "row_weight", value, None))
    mean, scale = inference.target_statistics or (None, None)
    evaluation.append(Output(logits, output, mean, scale, inference.buffer("output", n_out)))

    step = Builder(training=True, capacity=capacity, replicas=replicas)
    training: list[Operation] = []
    if optimizer is not None and loss is not None and target_kind is not None:
        y = _lower_forward(layers, n_in, step)
        training = [*_head(step, loss, target_kind, n_out), *step.forward]
        delta, value = step.buffer(f"d{y}", n_out), step.buffer("value", None)
        training.append(Loss(loss, target_kind, y, "target", "row_weight", value, delta))
        training += _backward(step)
        count = _end(step.parameters)
        partials = step.flat("partials", "share", shares, _end({p.name: p for p in step.partials()}))
        gradient = step.flat("gradient", "element", count)
        training.append(Reduce(partials, "row_weight", gradient))
        if optimizer.clip_norm is not None:
            training.append(Norm(gradient, optimizer.clip_norm))
        slots = step.flat("slots", "slot", len(optimizer.slots), count) if optimizer.slots else None
        training.append(Update(optimizer, gradient, step.flat("parameters", "element", count), slots))

    return Plan(
        n_in=n_in,
        n_out=n_out,
        capacity=capacity,
        shares=shares,
        replicas=replicas,
        precision=precision,
        reduction=reduction,
        parameters=tuple(inference.parameters.values()),
        statistics=tuple(inference.statistics.values()),
        partials=step.partials(),
        buffers={**inference.buffers, **step.buffers},
        training=tuple(training),
        evaluation=tuple(evaluation),
        loss=loss,
        target_kind=target_kind,
        optimizer=optimizer,
        logits=logits,
        output="output",
    )
