"""The operations that plans are made of: frozen dataclasses that name the arrays they read and write.

An operation says what is computed, with formulas in its docstring, and nothing of how.  Arrays are
named; their shapes stand in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..losses import Loss as LossFunction
from ..losses import OutputName, TargetKind
from ..optimizers import Optimizer


class Operation:
    """One operation: a frozen dataclass whose fields named in READS and WRITES hold names of arrays."""

    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arrays that it reads."""
        return self._names(self.READS)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the arrays that it writes."""
        return self._names(self.WRITES)

    def _names(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in (getattr(self, field) for field in fields) if name is not None)


@dataclass(frozen=True)
class Gather(Operation):
    """Fetch the batch's rows: inputs in the plan's precision, targets, sample weights (1 if the data have none).

    ``columns`` are those of the inputs that are fetched, first and end; all if None.
    """

    WRITES = ("x", "target", "weight")
    x: str
    target: str | None = None
    weight: str | None = None
    columns: tuple[int, int] | None = None


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
    """``y = f(z)``, ``z`` linear in ``x``; ``z`` is named only where the derivative of f is computed from it."""

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
    """``z_i = b_i + Σ_r w[r, i] x_{i + r}``, on the first columns of w, as many as y has; b may be one number."""


@dataclass(frozen=True)
class Dropout(Operation):
    """``y = x · mask / (1 - rate)``; half word (row in batch · width + unit) of the layer's step decides the mask.

    ``part_of`` is there where x has some columns of the layer's alone: the unit of the first, and the layer's width.
    """

    READS, WRITES = ("x",), ("y",)
    x: str
    y: str
    rate: float
    layer: int
    part_of: tuple[int, int] | None = None


@dataclass(frozen=True)
class Loss(Operation):
    """Each row's value, and its derivative by the logits; both times the row's sample weight."""

    READS, WRITES = ("logits", "target", "weight"), ("value", "delta")
    loss: LossFunction
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
    """The gradients of a weight and a bias over the shard's rows, overwriting partials; ``dx`` where it is named.

    A frozen layer has no ``dweight`` and no ``dbias``: it passes the delta on, and reads no ``x``.
    """

    READS, WRITES = ("dz", "x", "weight"), ("dweight", "dbias", "dx")
    dz: str
    x: str
    weight: str
    dweight: str | None
    dbias: str | None
    dx: str | None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arrays that it reads."""
        return super().reads if self.dweight else (self.dz, self.weight)

    @property
    def products(self) -> int:
        """How many matrix products it makes: one for ``dweight``, one for ``dx``."""
        return (self.dweight is not None) + (self.dx is not None)


@dataclass(frozen=True)
class DenseBackward(WeightedBackward):
    """``dW = xᵀ dz``, ``db = Σ dz``, ``dx = dz Wᵀ``."""


@dataclass(frozen=True)
class BiasBackward(Operation):
    """``db = Σ dz`` over the shard's rows, overwriting a partial: of a bias that is whole beside parts of a weight."""

    READS, WRITES = ("dz",), ("dbias",)
    dz: str
    dbias: str


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
    part_of: tuple[int, int] | None = None


@dataclass(frozen=True)
class TakeColumns(Operation):
    """``y``: as many columns of x as it has, from column ``first`` on."""

    READS, WRITES = ("x",), ("y",)
    x: str
    first: int
    y: str


@dataclass(frozen=True)
class BetweenParts(Operation):
    """What ranks exchange that have some parts of a network each; ``parts`` are this rank's buffers, in order."""

    parts: tuple[str, ...]
    y: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arrays that it reads."""
        return *self.parts, *self._names(self.READS)


@dataclass(frozen=True)
class JoinParts(BetweenParts):
    """``y``: the columns of all parts beside each other, on every rank."""

    WRITES = ("y",)


@dataclass(frozen=True)
class SumParts(BetweenParts):
    """``y = f(Σ parts + b)`` on every rank, parts added by the binary tree of :mod:`mlpgpu.plan.sharding`."""

    READS, WRITES = ("bias",), ("z", "y")
    bias: str | None = None
    activation: str = "identity"
    z: str | None = None


@dataclass(frozen=True)
class ExchangePartials(Operation):
    """Each rank adds its shards' partials up and sends every other rank that one's slice of them.

    So each rank receives all shards' sums for its slice of the gradient, and all learn the batch's loss and weight.
    """

    READS, WRITES = ("partials", "value", "weight"), ("partials",)
    partials: str
    value: str
    weight: str


@dataclass(frozen=True)
class GatherPartials(ExchangePartials):
    """Each rank adds its shards' partials up and sends the sums to all others, with the batch's loss and weight.

    So each rank makes the whole gradient and moves all parameters, and nothing is left to gather: one exchange, of more
    bytes, in place of two.
    """


@dataclass(frozen=True)
class GatherParameters(Operation):
    """Each rank sends its slice of the parameters, which it has moved, to all others."""

    READS, WRITES = ("parameters",), ("parameters",)
    parameters: str


@dataclass(frozen=True)
class Reduce(Operation):
    """``gradient = Σ over shards and uses of partials / Σ weight``, in fixed order; 0 where no row has weight.

    The uses of a shard are added one after another, the shards by a binary tree (:mod:`mlpgpu.plan.sharding`).
    """

    READS, WRITES = ("partials", "weight"), ("gradient",)
    partials: str
    weight: str
    gradient: str


@dataclass(frozen=True)
class Norm(Operation):
    """``gradient *= min(1, limit / |gradient|)``, the Euclidean norm over all that are trained."""

    READS, WRITES = ("gradient",), ("gradient",)
    gradient: str
    limit: float


@dataclass(frozen=True)
class Update(Operation):
    """The optimizer's rule on all parameters that are trained, at once; frozen ones and their slots stay."""

    READS, WRITES = ("gradient", "parameters", "slots"), ("parameters", "slots")
    optimizer: Optimizer
    gradient: str
    parameters: str
    slots: str | None
