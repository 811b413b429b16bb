"""Layers: pure descriptions of one place in a network.

A layer knows its widths, its parameters and which operations it lowers to; it holds no values.  The
same object placed twice in a network shares its parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from . import plan
from .activations import ACTIVATIONS
from .errors import (
    ConfigurationError,
    DtypeError,
    ReadOnlyError,
    ShapeError,
    check_integer,
    check_number,
    check_truth,
    keep_checked,
    lookup,
    shown,
)
from .initializers import INITIALIZERS
from .names import ActivationName, InitializerName

MOST_LAYERS = 1024  # of a network
MOST_WIDTH = 2**31 - 1  # columns of a layer, as kernels count them


# Initial values of a dense layer that is told none; docs/defaults.md has the measurements.
# Sigmoid and softplus pass on a constant and little of what changes, and would need long to learn from small weights.
WEIGHTS: InitializerName = "small_uniform"
WEIGHTS_BEFORE: dict[str, InitializerName] = {"sigmoid": "he_uniform", "softplus": "glorot_uniform"}
BIASES: InitializerName = "fan_in_uniform"


class Layer(ABC):
    """A step from rows of one width to rows of another.  Layers are frozen dataclasses of plain data.

    ``n_in`` is the number of columns expected, or None for any number.  Values of fields that most layers leave at
    their defaults, such as ``trainable``, stand in a layer's repr only where they differ from them.
    """

    n_in: int | None

    def __repr__(self) -> str:
        described = fields(self)  # type: ignore[arg-type]
        shown = (f for f in described if not (f.metadata.get("came_later") and getattr(self, f.name) == f.default))
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    @abstractmethod
    def output_width(self, n_in: int) -> int:
        """Columns produced from ``n_in``.

        Raises:
            ShapeError: the layer does not take ``n_in`` columns.
        """

    @abstractmethod
    def lower(self, builder: plan.Builder, x: str) -> str:
        """Add this layer's operations on buffer ``x (B, n_in)``; return the name of the result's buffer."""

    def _check_input(self, n_in: int) -> None:
        if n_in != self.n_in:
            raise ShapeError(repr(self), expected=f"{self.n_in} columns", got=f"{n_in} columns")


@dataclass(frozen=True, repr=False)
class Dense(Layer):
    """``y = f(x W + b)``: x (B, n_in), W (n_in, n_out), b (n_out,), y (B, n_out).

    Arguments:
        n_in, n_out: widths, at least 1.
        activation: f, a name in :data:`~mlpgpu.activations.ACTIVATIONS`.
        bias: whether there is a b.
        init: how W starts, a name in :data:`~mlpgpu.initializers.INITIALIZERS`; b then starts at 0.  With None
            both start by what ``docs/defaults.md`` chose: W by ``"small_uniform"``, before sigmoid by
            ``"he_uniform"`` and softplus by ``"glorot_uniform"``, and b by ``"fan_in_uniform"``.
        trainable: whether steps move W and b.  Where not, neither rate, penalty nor clipped norm touches them, their
            slots stay 0, and no gradient of theirs is computed; nor is any below the lowest layer that is trained.
            :meth:`Network.frozen` changes it of a network that has values.

    Raises:
        DtypeError, ConfigurationError, UnknownNameError: an argument has no meaning.
    """

    n_in: int
    n_out: int
    activation: ActivationName = "identity"
    bias: bool = True
    init: InitializerName | None = None
    trainable: bool = field(default=True, metadata={"came_later": True})

    def __post_init__(self) -> None:
        keep_checked(
            self,
            n_in=check_integer("Dense n_in", self.n_in, least=1, limit=MOST_WIDTH),
            n_out=check_integer("Dense n_out", self.n_out, least=1, limit=MOST_WIDTH),
            activation=lookup("Dense activation", self.activation, ACTIVATIONS),
            bias=check_truth("Dense bias", self.bias),
            init=None if self.init is None else lookup("Dense init", self.init, INITIALIZERS),
            trainable=check_truth("Dense trainable", self.trainable),
        )

    def output_width(self, n_in: int) -> int:
        self._check_input(n_in)
        return self.n_out

    def lower(self, builder: plan.Builder, x: str) -> str:
        activation = ACTIVATIONS[self.activation]
        fans = (self.n_in, self.n_out)
        chosen = WEIGHTS_BEFORE.get(self.activation, WEIGHTS), BIASES
        of_weight, of_bias = chosen if self.init is None else (self.init, "zeros")
        weight = builder.parameter("weight", fans, fans, of_weight, trainable=self.trainable)
        shape = (self.n_out,)
        bias = builder.parameter("bias", shape, fans, of_bias, trainable=self.trainable) if self.bias else None
        z = builder.buffer(f"z{builder.place}", self.n_out) if activation.saves == "z" else None
        y = builder.buffer(f"y{builder.place}", self.n_out)
        builder.add(plan.Dense(x, weight, bias, self.activation, z, y))
        return y


@dataclass(frozen=True, repr=False)
class LocallyConnected(Layer):
    """``y_i = f(b_i + Σ_{r < window} w[r, i] · x_{i + r})``: each output sees ``window`` neighbouring columns.

    Unlike a convolution's, weights are each output's own: w (window, n_in - window + 1), so that the weights
    of neighbouring outputs are neighbours.  After a layer that gives fewer than ``n_in`` columns it uses its
    first columns of w and b alone; so one layer placed K times makes a stack that shrinks by window - 1 each
    time, all of it on the same weights.

    Arguments:
        n_in: the most columns it takes, at least ``window``.
        window: columns that an output sees, at least 1.
        activation: f, a name in :data:`~mlpgpu.activations.ACTIVATIONS`.
        bias: ``"output"`` for a b of each output, ``"layer"`` for one that all share, or None; it starts at 0.
        init: how w starts, a name in :data:`~mlpgpu.initializers.INITIALIZERS`; None follows the activation.
        trainable: whether steps move w and b, as in :class:`Dense`.

    Raises:
        DtypeError, ConfigurationError, UnknownNameError: an argument has no meaning.
    """

    n_in: int
    window: int
    activation: ActivationName = "identity"
    bias: Literal["output", "layer"] | None = "output"
    init: InitializerName | None = None
    trainable: bool = field(default=True, metadata={"came_later": True})

    def __post_init__(self) -> None:
        keep_checked(
            self,
            n_in=check_integer("LocallyConnected n_in", self.n_in, least=1, limit=MOST_WIDTH),
            window=check_integer("LocallyConnected window", self.window, least=1, limit=MOST_WIDTH),
            activation=lookup("LocallyConnected activation", self.activation, ACTIVATIONS),
            bias=None if self.bias is None else lookup("LocallyConnected bias", self.bias, ("output", "layer")),
            init=None if self.init is None else lookup("LocallyConnected init", self.init, INITIALIZERS),
            trainable=check_truth("LocallyConnected trainable", self.trainable),
        )
        if self.window > self.n_in:
            expected = f"at most n_in, {self.n_in}"
            raise ConfigurationError("LocallyConnected window", expected=expected, got=self.window)

    def output_width(self, n_in: int) -> int:
        if not self.window <= n_in <= self.n_in:
            raise ShapeError(repr(self), expected=f"{self.window} to {self.n_in} columns", got=f"{n_in} columns")
        return n_in - self.window + 1

    def lower(self, builder: plan.Builder, x: str) -> str:
        activation = ACTIVATIONS[self.activation]
        most, n = self.output_width(self.n_in), self.output_width(builder.width(x))
        fans = (self.window, self.window)
        init = self.init or activation.initializer
        weight = builder.parameter("weight", (self.window, most), fans, init, trainable=self.trainable)
        shape = (most if self.bias == "output" else 1,)
        bias = builder.parameter("bias", shape, fans, "zeros", trainable=self.trainable) if self.bias else None
        z = builder.buffer(f"z{builder.place}", n) if activation.saves == "z" else None
        y = builder.buffer(f"y{builder.place}", n)
        builder.add(plan.LocallyConnected(x, weight, bias, self.activation, z, y))
        return y


@dataclass(frozen=True, repr=False)
class Dropout(Layer):
    """While training, sets each value to 0 with probability ``rate`` and divides the others by 1 - ``rate``.

    The probability is rounded up to a multiple of 2⁻¹⁶, since 16 random bits decide on a value.
    Source: Srivastava et al., "Dropout", JMLR 15, 2014, in the inverted form: nothing changes in use.

    Raises:
        DtypeError, ConfigurationError: ``rate`` is not a number in [0, 1).
    """

    rate: float

    def __post_init__(self) -> None:
        keep_checked(self, rate=check_number("Dropout rate", self.rate, least=0.0, below=1.0))

    @property
    def n_in(self) -> None:  # type: ignore[override]
        """Any width."""
        return None

    def output_width(self, n_in: int) -> int:
        return n_in

    def lower(self, builder: plan.Builder, x: str) -> str:
        if not builder.training or self.rate == 0.0:
            return x
        y = builder.buffer(f"y{builder.place}", builder.width(x))
        builder.add(plan.Dropout(x, y, self.rate, builder.place))
        return y


@dataclass(frozen=True, repr=False)
class Standardize(Layer):
    """Shifts and scales each of ``n_in`` columns to mean 0 and standard deviation 1 over the training set.

    As the first layer it standardizes inputs; those of float64 and integers in float64, before they are rounded to
    the network's precision, so that timestamps keep their digits.  As the last layer of a regression it standardizes
    targets: the network learns them so, and ``predict`` and the metrics scale its outputs back.
    ``Network.adapt`` fits it; a column that does not vary is only shifted.

    Raises:
        DtypeError, ConfigurationError: ``n_in`` is not a whole number of at least 1.
    """

    n_in: int

    def __post_init__(self) -> None:
        keep_checked(self, n_in=check_integer("Standardize n_in", self.n_in, least=1, limit=MOST_WIDTH))

    def output_width(self, n_in: int) -> int:
        self._check_input(n_in)
        return n_in

    def lower(self, builder: plan.Builder, x: str) -> str:
        mean = builder.statistic("mean", (self.n_in,))
        scale = builder.statistic("scale", (self.n_in,))
        if builder.place > 0:
            if not builder.is_last:
                where = f"place {builder.place} of the network"
                raise ConfigurationError("Standardize", expected="to be the first layer or the last", got=where)
            builder.target_statistics = mean, scale
            return x
        y = builder.buffer(f"y{builder.place}", self.n_in)
        builder.add(plan.Standardize(x, mean, scale, y))
        return y


LAYERS: dict[str, type[Layer]] = {kind.__name__: kind for kind in (Dense, LocallyConnected, Dropout, Standardize)}


def _refuse_assignment(layer: Layer, name: str, value: object) -> None:
    hint = "make a new layer, and a new Network([…])"
    if name == "trainable":
        hint = "network.frozen(0, 1) is a network of the same values with the layers at these places frozen"
    what = f"{type(layer).__name__}.{name}"
    raise ReadOnlyError(what, expected="to be read: a layer stays as it was made", got="an assignment", hint=hint)


for _kind in LAYERS.values():  # a dataclass raises an error of its own, which tells no way out
    _kind.__setattr__ = _refuse_assignment  # type: ignore[assignment, method-assign]


def with_trainable(layer: Layer, trainable: bool) -> Layer:
    """``layer`` if it is so, or has no parameters; else one like it that is."""
    if not isinstance(layer, (Dense, LocallyConnected)) or layer.trainable == trainable:
        return layer
    return replace(layer, trainable=trainable)


def check_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """``layers`` as a tuple.

    Raises:
        DtypeError: they are no sequence of layers.
        ConfigurationError: there are more than ``MOST_LAYERS``.
    """
    if isinstance(layers, Layer) or not isinstance(layers, Sequence):
        raise DtypeError("layers", expected="a list of layers", got=type(layers).__name__)
    if len(layers) > MOST_LAYERS:
        raise ConfigurationError("layers", expected=f"at most {MOST_LAYERS} of them", got=len(layers))
    for place, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise DtypeError(f"layers[{place}]", expected="a layer", got=shown(layer))
    return tuple(layers)


def input_width(layers: Sequence[Layer]) -> int:
    """Columns that the first layer takes; each layer must take what the one before gives.

    Raises:
        ConfigurationError: no layer states its width.
        ShapeError: two neighbours do not fit.
    """
    n_in = next((layer.n_in for layer in layers if layer.n_in is not None), None)
    if n_in is None:
        raise ConfigurationError("layers", expected="at least one with parameters", got=list(layers))
    width = n_in
    for place, layer in enumerate(layers):
        try:
            width = layer.output_width(width)
        except ShapeError as error:
            before = f"layers[{place - 1}] {layers[place - 1]!r}"
            what = f"layers[{place}] {layer!r} after {before}"
            raise ShapeError(what, expected=error.expected, got=error.got) from None
    return n_in
