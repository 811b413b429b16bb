"""A network as steps over rows: what lies between our layers and every other program's format.

Writers read the steps of a network, in the order in which a prediction takes them; readers make steps of a file, and
:func:`network_of` makes a network of them, or says why none of ours does that.  A step names its values by its place,
as a network does: ``"0.weight"`` (n_in, n_out), ``"0.bias"``, ``"0.mean"``, ``"0.scale"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ... import layers
from ...activations import ACTIVATIONS
from ...datasets.arrays import Inputs
from ...errors import ConfigurationError, FileFormatError, MlpgpuError
from ...losses import OutputName
from ..remembered import Remembered
from ..saved import Description, SavedNetwork


@dataclass(frozen=True)
class Rescale:
    """Inputs that are bytes times ``factor``."""

    factor: float
    values: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Standardize:
    """``(x - mean) / scale``, or where it ``is_inverse`` ``x · scale + mean``, both (n,)."""

    place: int
    is_inverse: bool
    values: ClassVar[tuple[str, ...]] = ("mean", "scale")


@dataclass(frozen=True)
class Linear:
    """``x weight + bias``: weight (n_in, n_out), bias (n_out,).

    Attributes:
        place: of its values; steps that share them have one.
        n_in, n_out: widths.
        has_bias: whether there is a bias.
        trainable: whether training moves its values.
    """

    place: int
    n_in: int
    n_out: int
    has_bias: bool
    trainable: bool = True

    @property
    def values(self) -> tuple[str, ...]:
        """The names of its values, without the place."""
        return ("weight", "bias") if self.has_bias else ("weight",)


@dataclass(frozen=True)
class Local(Linear):
    """``y_i = bias_i + Σ_r weight[r, i] · x_{i + r}``, by the first ``n_out`` columns of its values.

    weight is (window, most), bias (most,), or (1,) for all columns.
    """


@dataclass(frozen=True)
class Activation:
    """A function in :data:`~mlpgpu.activations.ACTIVATIONS` but ``"identity"``."""

    name: str
    values: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Dropout:
    """Nothing but in training."""

    rate: float
    values: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Output:
    """What makes predictions of logits: ``"sigmoid"``, ``"softmax"`` or ``"exp"``."""

    name: OutputName
    values: ClassVar[tuple[str, ...]] = ()


Step: TypeAlias = Rescale | Standardize | Linear | Activation | Dropout | Output


def steps_of(network: SavedNetwork | Description) -> Iterator[Step]:
    """The steps of a prediction; identities are left out."""
    first = {id(layer): place for place, layer in reversed(list(enumerate(network.layers)))}
    ending: Standardize | None = None
    width = layers.input_width(network.layers)
    if network.remembered.scale is not None:
        yield Rescale(network.remembered.scale)
    for place, layer in enumerate(network.layers):
        n_in, width = width, layer.output_width(width)
        if isinstance(layer, layers.Standardize):
            if place > 0:
                ending = Standardize(place, is_inverse=True)
            else:
                yield Standardize(place, is_inverse=False)
        elif isinstance(layer, layers.Dropout):
            yield Dropout(layer.rate)
        elif isinstance(layer, (layers.Dense, layers.LocallyConnected)):
            kind = Linear if isinstance(layer, layers.Dense) else Local
            yield kind(first[id(layer)], n_in, width, bool(layer.bias), layer.trainable)
            if layer.activation != "identity":
                yield Activation(layer.activation)
        else:
            raise ConfigurationError("layer to export", expected=f"one of {', '.join(layers.LAYERS)}", got=layer)
    if network.output != "identity":
        yield Output(network.output)
    if ending is not None:
        yield ending


def network_of(what: str, steps: Sequence[Step], values: Mapping[str, np.ndarray], **remembered: Any) -> SavedNetwork:
    """The network that does these steps with these values.

    Arguments:
        what: what errors call the file.
        steps: those with one place have the same values, and are one layer if the same function follows them.
        values: by the steps' names; of other shapes than theirs they are refused.
        remembered: further attributes of :class:`Remembered`.

    Raises:
        FileFormatError: no network of ours does this, or values do not fit.
    """
    made: list[layers.Layer] = []
    named: dict[str, np.ndarray] = {}
    shared: dict[tuple[int, str], layers.Layer] = {}
    output: OutputName = "identity"
    for number, step in enumerate(steps):
        before = steps[number - 1] if number else None
        following = steps[number + 1] if number + 1 < len(steps) else None
        if isinstance(step, Rescale):
            _check(before is None, what, "inputs rescaled before all else", "a rescaling elsewhere")
            remembered["inputs"] = Inputs("bytes", step.factor)
        elif isinstance(step, Standardize):
            is_well_placed = number == len(steps) - 1 and bool(made) if step.is_inverse else not made
            expected = "inputs standardized first, and targets scaled back last"
            _check(is_well_placed, what, expected, "a standardization elsewhere")
            scale = values[f"{step.place}.scale"]
            _check(scale.ndim == 1 and scale.size > 0 and bool((scale > 0.0).all()), what, "scales over 0", "others")
            named |= _renamed(step, values, len(made))
            made.append(layers.Standardize(len(scale)))
        elif isinstance(step, Linear):
            _check(not isinstance(step, Local), what, "dense layers", "locally connected ones")
            _check(min(step.n_in, step.n_out) > 0, what, "layers of at least one column", (step.n_in, step.n_out))
            name = check_activation(what, following.name) if isinstance(following, Activation) else "identity"
            if (step.place, name) not in shared:
                named |= _renamed(step, values, len(made))
                shared[step.place, name] = layers.Dense(
                    step.n_in,
                    step.n_out,
                    name,  # type: ignore[arg-type]
                    step.has_bias,
                    trainable=step.trainable,
                )
            made.append(shared[step.place, name])
        elif isinstance(step, Activation):
            got = f"it after {'nothing' if before is None else type(before).__name__}"
            _check(isinstance(before, Linear), what, f"{step.name} right after a dense layer", got)
        elif isinstance(step, Dropout):
            made.append(layers.Dropout(step.rate))
        else:
            rest = [type(later) for later in steps[number + 1 :]]
            _check(rest in ([], [Standardize]), what, f"{step.name} as the last function", "layers after it")
            output = step.name
    _check(any(isinstance(layer, layers.Dense) for layer in made), what, "at least one dense layer", "none")
    try:
        return SavedNetwork.of(made, named, output=output, remembered=Remembered(**remembered))
    except MlpgpuError as error:
        raise FileFormatError(what, expected="layers and values that fit each other", got=error) from error


def _renamed(step: Standardize | Linear, values: Mapping[str, np.ndarray], place: int) -> dict[str, np.ndarray]:
    return {f"{place}.{name}": values[f"{step.place}.{name}"] for name in step.values}


def check_activation(what: str, name: str) -> str:
    """``name`` if it is one of ours.

    Raises:
        FileFormatError: it is none.
    """
    _check(name in ACTIVATIONS, what, f"an activation of {', '.join(ACTIVATIONS)}", repr(name))
    return name


def _check(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise FileFormatError(what, expected=expected, got=got)
