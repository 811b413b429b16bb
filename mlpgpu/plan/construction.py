"""How a plan is made: layers lower themselves one after another, and each operation's backward rule follows it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

from ..errors import ConfigurationError
from ..losses import Loss as LossFunction
from ..losses import OutputName, TargetKind, as_loss
from ..optimizers import Optimizer
from .costs import is_one_exchange_faster
from .operations import (
    ActivationBackward,
    Dense,
    DenseBackward,
    Dropout,
    DropoutBackward,
    ExchangePartials,
    Gather,
    GatherParameters,
    LocallyConnected,
    LocallyConnectedBackward,
    Loss,
    Norm,
    Operation,
    Output,
    Reduce,
    Standardize,
    Update,
    Weighted,
)
from .plan import Buffer, Choice, Parameter, Partial, Plan, Precision, Reduction, Segment, alone_reduction
from .tensor import split_plan
from .tensor_split import Parts

MOST_NUMBERS = 2**48  # of an array

Placed = TypeVar("Placed", bound=Segment)


class Lowerable(Protocol):
    """What :func:`lower` asks of a layer."""

    def lower(self, builder: Builder, x: str) -> str:
        """Add this layer's operations on buffer ``x`` and return the name of the result's buffer."""
        ...


class Builder:
    """Collects a plan's operations while layers lower themselves, one after another.

    Attributes:
        training: whether this is for a training step; in an evaluation layers leave out what only training needs.
        place: the current layer's place in the network.
        home: the first place of the same layer; both places share its parameters.
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
        self._trained: set[str] = set()  # buffers that depend on a parameter that is trained
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
        """Declare a buffer of one flat array, or of several, which ``axis`` then counts: shape (…, elements)."""
        axes = ("replica", axis, "element") if len(shape) > 1 else ("replica", "element")
        self.buffers[name] = Buffer(name, axes, (self._replicas, *shape))
        return name

    def width(self, name: str) -> int:
        """Columns of a buffer."""
        return self.buffers[name].shape[-1]

    def parameter(
        self, name: str, shape: tuple[int, ...], fans: tuple[int, int], initializer: str, *, trainable: bool = True
    ) -> str:
        """Declare an array of the current layer; a layer placed twice declares the same array again.

        Of one that is not ``trainable`` no step makes a gradient.
        """
        full = f"{self.home}.{name}"
        if full not in self.parameters:
            end = _end(self.parameters)
            self.parameters[full] = Parameter(full, shape, end, self.home, fans, initializer, trainable)
        return full

    def is_trainable(self, parameter: str) -> bool:
        """Whether steps move a parameter."""
        return parameter in self.parameters and self.parameters[parameter].trainable

    def statistic(self, name: str, shape: tuple[int, ...]) -> str:
        """Declare an array of fitted values of the current layer."""
        full = f"{self.place}.{name}"
        self.statistics[full] = Segment(full, shape, _end(self.statistics))
        return full

    def add(self, operation: Operation) -> None:
        """Append a forward operation."""
        self.forward.append(operation)
        if any(name in self._trained or self.is_trainable(name) for name in operation.reads):
            self._trained.update(operation.writes)

    def is_trained(self, name: str) -> bool:
        """Whether buffer ``name`` depends on a parameter that is trained."""
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
        """The partials of all uses, in the order of the parameters: if each is used once, both are laid out alike."""
        placed: dict[str, Partial] = {}
        for parameter in self.parameters.values():
            for use in range(self._uses.get(parameter.name, 0)):
                name = _partial_name(parameter.name, use)
                placed[name] = Partial(name, parameter.shape, _end(placed), parameter.name)
        return tuple(placed.values())


def _end(placed: dict[str, Placed]) -> int:
    """Where the last one placed ends, each having been placed where the one before ended."""
    return placed[next(reversed(placed))].end if placed else 0


def _partial_name(parameter: str, use: int) -> str:
    return f"d{parameter}" + (f"#{use}" if use else "")


def _weighted_backward(builder: Builder, forward: Weighted, dy: str) -> list[Operation]:
    operations: list[Operation] = []
    if forward.activation != "identity":
        operations.append(ActivationBackward(forward.activation, forward.z or forward.y, dy))
    is_trained = builder.is_trainable(forward.weight)
    dweight = builder.partial(forward.weight) if is_trained else None
    dbias = builder.partial(forward.bias) if is_trained and forward.bias else None
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
    """The backward operations of the forward ones, last first, down to the first that is trained."""
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


def _gather(builder: Builder, loss: LossFunction | None, kind: TargetKind | None, n_out: int) -> list[Operation]:
    """What comes before the layers: the rows are gathered, and standardized targets are scaled."""
    if loss is None or kind is None:
        return [Gather("x")]
    target = builder.buffer("target", None if kind == "index" else n_out, holds="index" if kind == "index" else "real")
    operations: list[Operation] = [Gather("x", target, builder.buffer("row_weight", None))]
    if builder.target_statistics:
        if kind == "index" or loss.output != "identity":
            raise ConfigurationError("Standardize as the last layer", expected="a regression loss", got=loss)
        mean, scale = builder.target_statistics
        operations.append(Standardize(target, mean, scale, target))
    return operations


def _check_sizes(parameters: int, buffers: Iterable[Buffer]) -> None:
    """Refuse arrays that no memory could hold, and whose elements could not be counted."""
    expected = f"arrays of at most {MOST_NUMBERS} numbers"
    if parameters > MOST_NUMBERS:
        raise ConfigurationError("layers", expected=expected, got=f"{parameters} parameters")
    for buffer in buffers:
        if math.prod(buffer.shape) > MOST_NUMBERS:
            what = "streams" if "shard" in buffer.axes else "layers" if "element" in buffer.axes else "batch_size"
            raise ConfigurationError(what, expected=expected, got=f"{buffer.name} of shape {buffer.shape}")


def lower(
    layers: Sequence[Lowerable],
    n_in: int,
    *,
    capacity: int,
    loss: str | LossFunction | None = None,
    target_kind: TargetKind | None = None,
    optimizer: Optimizer | None = None,
    output: OutputName = "identity",
    precision: Precision = "float32",
    reduction: Reduction = "ordered",
    shards: int = 1,
    replicas: int = 1,
    ranks: int = 1,
    parts: Parts | None = None,
    one_exchange: bool | None = None,
    choice: Choice | None = None,
) -> Plan:
    """Lower layers, a loss and an optimizer to a plan for at most ``capacity`` rows.

    Without an optimizer the plan has no training step.  Without a loss it has neither values nor
    targets, and ``output`` names the function that turns logits into predictions.  ``target_kind``
    is the loss's usual one if left out.  ``ranks`` make one exchange a step or two, whichever costs less by
    :func:`~mlpgpu.plan.costs.is_one_exchange_faster`, unless ``one_exchange`` says; the bits are the same.  ``parts``
    splits the layers, for ranks that have some parts each.  ``choice`` says why there are so many ranks.

    Raises:
        ConfigurationError: an array would be larger than any memory, targets are standardized and the loss is not
            one for regression, there is an optimizer and all layers are frozen, or no layer can be split.
    """
    if loss is not None:
        loss = as_loss(loss)
        target_kind = target_kind or loss.targets[0]
        output = loss.output

    inference = Builder(training=False, capacity=capacity, replicas=replicas)
    logits = _lower_forward(layers, n_in, inference)
    n_out = inference.width(logits)
    evaluation = [*_gather(inference, loss, target_kind, n_out), *inference.forward]
    if loss is not None and target_kind is not None:
        value = inference.buffer("value", None)
        evaluation.append(Loss(loss, target_kind, logits, "target", "row_weight", value, None))
    mean, scale = inference.target_statistics or (None, None)
    evaluation.append(Output(logits, output, mean, scale, inference.buffer("output", n_out)))

    step = Builder(training=True, capacity=capacity, replicas=replicas)
    training: list[Operation] = []
    if optimizer is not None and loss is not None and target_kind is not None:
        y = _lower_forward(layers, n_in, step)
        if not step.is_trained(y):
            hint = "network.frozen() is the same network with all layers trainable"
            expected = "one with trainable=True, for a step to train"
            raise ConfigurationError("layers", expected=expected, got="frozen ones alone", hint=hint)
        training = [*_gather(step, loss, target_kind, n_out), *step.forward]
        delta, value = step.buffer(f"d{y}", n_out), step.buffer("value", None)
        training.append(Loss(loss, target_kind, y, "target", "row_weight", value, delta))
        training += _backward(step)
        count, trained = _end(step.parameters), sum(p.size for p in step.parameters.values() if p.trainable)
        partials = step.flat("partials", "shard", shards, _end({p.name: p for p in step.partials()}))
        gradient = step.flat("gradient", "element", trained)
        training.append(Reduce(partials, "row_weight", gradient))
        if optimizer.clip_norm is not None:
            training.append(Norm(gradient, optimizer.clip_norm))
        slots = step.flat("slots", "slot", len(optimizer.slots), count) if optimizer.slots else None
        parameters = step.flat("parameters", "element", count)
        training.append(Update(optimizer, gradient, parameters, slots))

    buffers = {**inference.buffers, **step.buffers}
    _check_sizes(_end(inference.parameters), buffers.values())
    plan = Plan(
        n_in=n_in,
        n_out=n_out,
        capacity=capacity,
        shards=shards,
        replicas=replicas,
        precision=precision,
        reduction=alone_reduction(reduction),
        parameters=tuple(inference.parameters.values()),
        statistics=tuple(inference.statistics.values()),
        partials=step.partials(),
        buffers=buffers,
        training=tuple(training),
        evaluation=tuple(evaluation),
        loss=loss,
        target_kind=target_kind,
        optimizer=optimizer,
        logits=logits,
        output="output",
        choice=choice,
    )
    if parts is not None:
        return split_plan(plan, parts)
    return on_ranks(plan, ranks, one_exchange=one_exchange, is_fast=reduction == "fast")


def on_ranks(plan: Plan, ranks: int, *, one_exchange: bool | None = None, is_fast: bool = False) -> Plan:
    """The plan of so many processes together, each some of the shards, as :func:`lower` makes it.

    A plan without a training step stays one of a process by itself.  With ``is_fast`` each rank sends one sum of its
    shards, however many there are, so that bits depend on the number of ranks.
    """
    plan = plan.alone()
    if ranks == 1 or not plan.training:
        return plan
    training: list[Operation] = []
    for operation in plan.training:
        if isinstance(operation, Reduce):
            training.append(ExchangePartials(operation.partials, "value", operation.weight))
        training.append(operation)
        if isinstance(operation, Update):
            training.append(GatherParameters(operation.parameters))
    together = replace(plan, training=tuple(training), ranks=ranks, reduction="fast" if is_fast else plan.reduction)
    if one_exchange is None:
        one_exchange = is_one_exchange_faster(together)
    return together.in_one_exchange() if one_exchange else together
