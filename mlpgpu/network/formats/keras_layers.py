"""Keras' layers as steps, and steps as Keras' layers: configurations are JSON, and names stand for functions.

Nothing that a configuration names is ever imported: what is not in the tables here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...activations import LEAKY_SLOPE
from ...errors import ConfigurationError, FileFormatError, check_integer, check_number
from .steps import Activation, Dropout, Linear, Local, Output, Rescale, Standardize, Step

# Keras' Normalization divides by at least so much, and keeps variances in the precision of its layer.
LEAST_SCALE = 1e-7

# Names of ours -> names of Keras, where both are the same function; its leaky_relu has another slope.
FUNCTIONS = {
    "identity": "linear",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "relu": "relu",
    "elu": "elu",
    "softplus": "softplus",
    "gelu": "gelu",
    "silu": "silu",
    "softmax": "softmax",
    "exp": "exponential",
}
READ = {keras: ours for ours, keras in FUNCTIONS.items()} | {"swish": "silu"}
OUTPUTS = ("sigmoid", "softmax", "exp")  # which are an output's functions where they come last
MODULES = ("keras", "keras.layers", "keras.activations", "keras.src", "tf_keras", "tensorflow", "builtins")


@dataclass(frozen=True)
class KerasLayer:
    """A layer of a stack that is to be written.

    Attributes:
        kind: its class.
        config: all of its arguments but name, precision and whether it is trained.
        place: of its values; layers of one place are one layer.
        trainable: whether it is trained.
    """

    kind: str
    config: dict[str, Any]
    place: int | None = None
    trainable: bool = True


def keras_layers(steps: Sequence[Step], named: Mapping[str, np.ndarray], dtype: np.dtype) -> list[KerasLayer]:
    """The layers of Keras that do these steps, without the input's.

    Raises:
        ConfigurationError: Keras cannot say one of them.
    """
    made: list[KerasLayer] = []
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else None
        if isinstance(step, Rescale):
            made.append(KerasLayer("Rescaling", {"scale": step.factor, "offset": 0.0}))
        elif isinstance(step, Standardize):
            _check_scales(named[f"{step.place}.scale"], dtype)
            config = {"axis": [-1], "invert": step.is_inverse, "mean": None, "variance": None}
            made.append(KerasLayer("Normalization", config))
        elif isinstance(step, Local):
            hint = "ONNX has graphs of them"
            raise ConfigurationError("layers for Keras", expected="Dense ones", got="LocallyConnected", hint=hint)
        elif isinstance(step, Linear):
            is_named = isinstance(following, Activation) and following.name in FUNCTIONS
            name = FUNCTIONS[following.name] if isinstance(following, Activation) and is_named else "linear"
            config = {"units": step.n_out, "activation": name, "use_bias": step.has_bias}
            made.append(KerasLayer("Dense", config, step.place, step.trainable))
        elif isinstance(step, Dropout):
            made.append(KerasLayer("Dropout", {"rate": step.rate, "seed": None, "noise_shape": None}))
        elif isinstance(step, Output):
            made.append(KerasLayer("Activation", {"activation": FUNCTIONS[step.name]}))
        elif step.name not in FUNCTIONS:
            made.append(KerasLayer("LeakyReLU", {"negative_slope": LEAKY_SLOPE}))
    return made


def _check_scales(scale: np.ndarray, dtype: np.dtype) -> None:
    limits = np.finfo(dtype)
    least, most = max(LEAST_SCALE, math.sqrt(float(limits.tiny))), math.sqrt(float(limits.max))
    if not ((scale >= least) & (scale < most)).all():
        expected = f"deviations from {least:g} to {most:.3g}, which its Normalization takes"
        worst = scale[(scale < least) | (scale >= most)][0]
        hint = "ONNX and safetensors take any"
        raise ConfigurationError("Standardize for Keras", expected=expected, got=f"{worst:g}", hint=hint)


@dataclass(frozen=True)
class FoundLayer:
    """A layer of a configuration that is read.

    Attributes:
        kind: its class.
        config: its arguments, unchecked.
        place: its number among the layers of the model, by which it is found in a file of weights.
    """

    kind: str
    config: Mapping[str, Any]
    place: int


class StackReader:
    """Makes steps of layers, one after the other.

    Attributes:
        steps, values: of the layers so far.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.steps: list[Step] = []
        self.values: dict[str, np.ndarray] = {}
        self._shape: Sequence[Any] | None = None  # of the input, with its rows
        self._is_flat: bool | None = None  # whether its columns are one axis; None if nothing has told

    def add(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        """Add a layer with its values in the order in which Keras has them.

        Raises:
            FileFormatError: it is of a class, or has an argument, that no network of ours has.
            Exception: an argument is of a type without meaning.
        """
        shape = layer.config.get("batch_shape") or layer.config.get("batch_input_shape")
        if shape is not None and self._shape is None:
            self._shape, self._is_flat = shape, len(shape) == 2
        read = _LAYERS.get(layer.kind)
        if read is None:
            self._refuse(f"a layer of {', '.join(_LAYERS)}", layer.kind)
        assert read is not None
        if layer.kind in ("Dense", "Normalization") and self._is_flat is False:
            self._refuse(f"Flatten before {layer.kind} where inputs have several axes", self._shape)
        read(self, layer, arrays)

    def take_shape(self, shape: Sequence[Any] | None) -> None:
        """Take the shape of the inputs, with their rows, where the model tells it."""
        if shape is not None and self._shape is None:
            self._shape, self._is_flat = shape, len(shape) == 2

    def finish(self, *, output_is_last: bool = True) -> None:
        """Take a last function, before targets are scaled back, as that of the output."""
        last = len(self.steps) - 1
        if last >= 0 and isinstance(self.steps[last], Standardize):
            last -= 1
        step = self.steps[last] if last >= 0 else None
        if output_is_last and isinstance(step, Activation) and step.name in OUTPUTS:
            self.steps[last] = Output(step.name)  # type: ignore[arg-type]

    def _refuse(self, expected: str, got: object) -> None:
        raise FileFormatError(self.what, expected=expected, got=got)

    def _expect(self, layer: FoundLayer, **expected: Any) -> None:
        """Refuse arguments that are there and others than expected: of each a tuple of what is taken."""
        for name, values in expected.items():
            found = layer.config.get(name)
            if found is not None and not any(_is_same(found, value) for value in values):
                allowed = " or ".join(map(repr, values))
                self._refuse(f"{name}={allowed} of {layer.kind}", repr(found)[:100])

    def _input(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, sparse=(False,), ragged=(False,))

    def _flatten(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, data_format=("channels_last",))
        self._is_flat = True

    def _dense(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, quantization_config=(), lora_rank=())
        units = check_integer("units of Dense", layer.config["units"], least=1)
        has_bias = layer.config.get("use_bias", True) is True
        shapes = [array.shape for array in arrays]
        fits = len(shapes) == 1 + has_bias and len(shapes[0]) == 2 and shapes[0][1] == units
        if not fits or (has_bias and shapes[1] != (units,)):
            self._refuse(f"values of Dense: (n_in, {units})" + f" and ({units},)" * has_bias, shapes or "none")
        trainable = layer.config.get("trainable", True) is not False
        self.steps.append(Linear(layer.place, shapes[0][0], units, has_bias, trainable))
        self.values |= {f"{layer.place}.{n}": v for n, v in zip(("weight", "bias"), arrays, strict=False)}
        self._function(layer.config.get("activation"))

    def _activation(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._function(layer.config.get("activation"))

    def _function(self, found: Any) -> None:
        """Add a function by its name, or by what Keras makes of functions and layers that stand for them."""
        if isinstance(found, Mapping):
            config = found.get("config")
            if isinstance(config, Mapping):  # a layer as an activation
                kind = found.get("class_name")
                if kind not in ("ReLU", "LeakyReLU", "ELU", "Softmax") or not is_of_keras(found):
                    self._refuse("an activation of Keras", repr(found)[:100])
                self.add(FoundLayer(str(kind), config, -1), ())
                return
            found = config if is_of_keras(found) else repr(found)[:100]
        name = "linear" if found is None else found
        if not isinstance(name, str) or name not in READ:
            hint = "its slope is 0.2; LeakyReLU(negative_slope=0.01) is read" if name == "leaky_relu" else ""
            expected = f"an activation of {', '.join(READ)}"
            raise FileFormatError(self.what, expected=expected, got=repr(name)[:100], hint=hint)
        if READ[name] != "identity":
            self.steps.append(Activation(READ[name]))

    def _relu(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, max_value=(), threshold=(0.0,), negative_slope=(0.0, LEAKY_SLOPE))
        slope = layer.config.get("negative_slope") or 0.0
        self.steps.append(Activation("relu" if slope == 0.0 else "leaky_relu"))

    def _leaky_relu(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        slope = layer.config.get("negative_slope", layer.config.get("alpha", 0.3))
        if not _is_same(slope, LEAKY_SLOPE):
            self._refuse(f"negative_slope={LEAKY_SLOPE} of LeakyReLU", slope)
        self.steps.append(Activation("leaky_relu"))

    def _elu(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, alpha=(1.0,))
        self.steps.append(Activation("elu"))

    def _softmax(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, axis=(-1, 1))
        self.steps.append(Activation("softmax"))

    def _dropout(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, noise_shape=())
        self.steps.append(Dropout(check_number("rate of Dropout", layer.config["rate"], least=0.0, below=1.0)))

    def _rescaling(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, offset=(0.0,))
        self.steps.append(Rescale(check_number("scale of Rescaling", layer.config["scale"], above=0.0)))

    def _normalization(self, layer: FoundLayer, arrays: Sequence[np.ndarray]) -> None:
        self._expect(layer, axis=(-1, 1, [-1], [1]))
        mean, variance = layer.config.get("mean"), layer.config.get("variance")
        if mean is None:
            if len(arrays) not in (2, 3):
                self._refuse("mean, variance and count of Normalization", [array.shape for array in arrays])
            mean, variance = arrays[0], arrays[1]
        mean, variance = np.ravel(np.asarray(mean, np.float64)), np.ravel(np.asarray(variance, np.float64))
        if mean.shape != variance.shape or not (variance >= 0.0).all():
            self._refuse("variances from 0 on, one for each mean", f"{variance.shape} of {mean.shape}")
        place = layer.place
        self.steps.append(Standardize(place, layer.config.get("invert", False) is True))
        self.values |= {f"{place}.mean": mean, f"{place}.scale": np.maximum(np.sqrt(variance), LEAST_SCALE)}


_LAYERS = {
    "InputLayer": StackReader._input,
    "Flatten": StackReader._flatten,
    "Dense": StackReader._dense,
    "Activation": StackReader._activation,
    "ReLU": StackReader._relu,
    "LeakyReLU": StackReader._leaky_relu,
    "ELU": StackReader._elu,
    "Softmax": StackReader._softmax,
    "Dropout": StackReader._dropout,
    "Rescaling": StackReader._rescaling,
    "Normalization": StackReader._normalization,
}


def is_of_keras(described: Mapping[str, Any]) -> bool:
    """Whether a class or function is Keras' own, and not one that somebody registered under a name of Keras'."""
    module, name = described.get("module") or "keras", described.get("registered_name")
    return str(module).split(".")[0] in {part.split(".")[0] for part in MODULES} and (
        name in (None, "function", described.get("class_name"))
    )


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float):  # files of Keras 2 have numbers of float32
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        return is_number and math.isclose(found, expected, rel_tol=1e-6)
    return type(found) is type(expected) and bool(found == expected)
