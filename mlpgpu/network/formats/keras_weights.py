"""The values of a Keras model's layers in HDF5: by class and number as Keras 3 has them, or by name as before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import h5py
import numpy as np

from ...errors import FileFormatError
from .hdf5 import Reader
from .hints import Hints
from .keras_layers import FoundLayer, StackReader
from .limits import MOST_ARRAYS
from .steps import Standardize

LAYERS = ("layers", "_layer_checkpoint_dependencies")  # the latter in files of Keras 2.13
LEGACY = "layer_names"
WITH_VALUES = ("Dense", "Normalization")


def is_weights(reader: Reader) -> bool:
    """Whether a file has values as one of the versions of Keras writes them."""
    return (
        any(reader.group(reader.root, name) for name in LAYERS)
        or reader.names(_legacy_root(reader), LEGACY) is not None
    )


def values_of_layers(reader: Reader, layers: Sequence[FoundLayer]) -> dict[int, list[np.ndarray]]:
    """The values of each of a model's layers that can have some, by its place.

    Raises:
        FileFormatError: they are not as Keras has them.
    """
    if reader.names(_legacy_root(reader), LEGACY) is not None:
        by_name = _legacy_values(reader)
        named = {layer.place: layer.config["name"] for layer in layers if layer.kind in WITH_VALUES}
        return {place: by_name.get(name, []) for place, name in named.items()}
    root = _layers_group(reader)
    counts: Counter[str] = Counter()
    found: dict[int, list[np.ndarray]] = {}
    for layer in layers:
        if layer.kind in WITH_VALUES:
            name = layer.kind.lower() + (f"_{counts[layer.kind]}" if counts[layer.kind] else "")
            counts[layer.kind] += 1
            found[layer.place] = _variables(reader, root, name)
    return found


def read_weights(reader: Reader, hints: Hints, stack: StackReader) -> None:
    """Add the layers of a file of weights alone to a stack; ``hints`` say what functions follow them.

    One Normalization is that of the inputs, and a second one of the targets.

    Raises:
        FileFormatError: there are values of other layers.
        ConfigurationError: nobody said the functions.
    """
    if reader.names(_legacy_root(reader), LEGACY) is not None:
        found = [("Normalization" if len(v) == 3 else "Dense", v) for v in _legacy_values(reader).values() if v]
    else:
        found = _all_variables(reader)
    dense = [values for kind, values in found if kind == "Dense"]
    statistics = [values for kind, values in found if kind == "Normalization"]
    if not dense or len(statistics) > 2:
        expected = "values of Dense layers, and of at most two Normalization layers"
        raise FileFormatError(reader.what, expected=expected, got=f"{len(dense)} and {len(statistics)}")
    functions = hints.functions(reader.what, len(dense))
    for values in statistics[:1]:
        stack.add(FoundLayer("Normalization", {}, -1), values)
    for place, values in enumerate(dense):
        if len(values) not in (1, 2):
            shapes = [array.shape for array in values]
            raise FileFormatError(reader.what, expected="a kernel and a bias of each Dense layer", got=shapes)
        units = values[0].shape[1] if values[0].ndim == 2 else 0
        stack.add(FoundLayer("Dense", {"units": units, "use_bias": len(values) == 2}, place), values)
        stack.steps += functions[place]
    stack.steps += hints.outputs()
    for values in statistics[1:]:
        stack.add(FoundLayer("Normalization", {"invert": True}, -2), values)
    assert all(not isinstance(step, Standardize) or step.place < 0 for step in stack.steps)


def _all_variables(reader: Reader) -> list[tuple[str, list[np.ndarray]]]:
    """The values of all layers by class, in the order of their numbers."""
    root = _layers_group(reader)
    numbered: list[tuple[int, str, str]] = []
    for name in root:
        match = re.fullmatch(r"(dense|normalization)(?:_([1-9]\d{0,5}))?", name)
        if match is not None:
            numbered.append((int(match[2] or 0), match[1].capitalize(), name))
        elif _variables(reader, root, name):
            raise FileFormatError(reader.what, expected="values of Dense and Normalization", got=f"those of {name!r}")
    return [(kind, values) for _, kind, name in sorted(numbered) if (values := _variables(reader, root, name))]


def _layers_group(reader: Reader) -> h5py.Group:
    for name in LAYERS:
        group = reader.group(reader.root, name)
        if group is not None:
            if len(group) > MOST_ARRAYS:
                raise FileFormatError(reader.what, expected=f"at most {MOST_ARRAYS} layers", got=len(group))
            return group
    raise FileFormatError(reader.what, expected="a group /layers, as Keras 3 writes it", got="none")


def _variables(reader: Reader, root: h5py.Group, name: str) -> list[np.ndarray]:
    """What ``vars`` of a layer's group has, in the order of their numbers; empty if there is none."""
    layer = reader.group(root, name)
    variables = None if layer is None else reader.group(layer, "vars")
    if variables is None:
        return []
    if len(variables) > 3:
        raise FileFormatError(reader.what, expected=f"at most 3 values of {name}", got=len(variables))
    return [reader.numbers(variables, str(number)) for number in range(len(variables))]


def _legacy_root(reader: Reader) -> h5py.Group:
    """Where layers are by name: in a file of a whole model under one group, in one of weights at the root."""
    return reader.group(reader.root, "model_weights") or reader.root


def _legacy_values(reader: Reader) -> dict[str, list[np.ndarray]]:
    """The values of each layer by its name, in the order of the model; where they lie, the file's attributes say."""
    root = _legacy_root(reader)
    found: dict[str, list[np.ndarray]] = {}
    for name in reader.names(root, LEGACY) or []:
        layer = reader.group(root, name)
        weights = (reader.names(layer, "weight_names") or []) if layer is not None else []
        if len(weights) > 3:
            raise FileFormatError(reader.what, expected=f"at most 3 values of {name!r}", got=len(weights))
        found[name] = [reader.numbers(layer, weight) for weight in weights]
    return found
