"""Configurations of whole Keras models: which layers there are, in which order; and ours as one that Keras loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import FileFormatError
from ...layers import MOST_LAYERS
from .keras_layers import FoundLayer, KerasLayer, is_of_keras

MOST_MODEL_LAYERS = 4 * MOST_LAYERS  # with those that are no layers of ours
MODELS = ("Sequential", "Functional", "Model")


def model_config(layers: Sequence[KerasLayer], n_in: int, dtype: np.dtype) -> dict[str, Any]:
    """The configuration of a model of these layers: a Sequential, or a Functional where a layer has several places."""
    names = _names(layers)
    config = {"batch_shape": [None, n_in], "dtype": dtype.name, "sparse": False, "ragged": False, "name": "input"}
    described = [_described("InputLayer", config)]
    width = n_in
    calls: dict[str, list[tuple[str, int, int]]] = {}  # of each layer, the layer, call and columns that it takes
    last = ("input", 0)
    for name, layer in zip(names, layers, strict=True):
        if name not in calls:
            config = {"name": name, "trainable": layer.trainable, "dtype": dtype.name, **layer.config}
            described.append({**_described(layer.kind, config), "build_config": {"input_shape": [None, width]}})
        calls.setdefault(name, []).append((*last, width))
        last = name, len(calls[name]) - 1
        width = layer.config.get("units", width)
    is_sequential = len(calls) == len(names)
    if is_sequential:
        about: dict[str, Any] = {"layers": described, "build_input_shape": [None, n_in]}
    else:
        for entry in described:
            entry["name"] = entry["config"]["name"]
            taken = calls.get(entry["name"], [])
            entry["inbound_nodes"] = [_node(source, call, columns, dtype) for source, call, columns in taken]
        about = {"layers": described, "input_layers": ["input", 0, 0], "output_layers": [*last, 0]}
    kind = "Sequential" if is_sequential else "Functional"
    return {
        **_described(kind, {"name": "mlpgpu", "trainable": True, **about}),
        "module": "keras" if is_sequential else "keras.src.models.functional",
        "build_config": {"input_shape": [None, n_in]},
    }


def _described(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}


def _node(source: str, call: int, columns: int, dtype: np.dtype) -> dict[str, Any]:
    config = {"shape": [None, columns], "dtype": dtype.name, "keras_history": [source, call, 0]}
    return {"args": [{"class_name": "__keras_tensor__", "config": config}], "kwargs": {}}


def _names(layers: Sequence[KerasLayer]) -> list[str]:
    """A name for each layer, the same where a layer has several places."""
    counts: Counter[str] = Counter()
    known: dict[int, str] = {}
    names: list[str] = []
    for layer in layers:
        if layer.place in known:
            names.append(known[layer.place])
            continue
        name = layer.kind.lower() + (f"_{counts[layer.kind]}" if counts[layer.kind] else "")
        counts[layer.kind] += 1
        if layer.place is not None:
            known[layer.place] = name
        names.append(name)
    return names


def find_layers(what: str, document: Mapping[str, Any]) -> tuple[list[FoundLayer], list[FoundLayer], Any]:
    """The layers in a model's configuration: in the order in which it names them, and in that of a prediction.

    Returns:
        both, and the shape of the inputs, if the model tells it.

    Raises:
        FileFormatError: it is no chain of layers.
        Exception: it has no meaning.
    """
    kind = document["class_name"]
    if kind not in MODELS or not is_of_keras({**document, "registered_name": None}):
        raise FileFormatError(what, expected=f"a model of {', '.join(MODELS)}", got=repr(kind)[:100])
    config = document["config"]
    entries = config if isinstance(config, list) else config["layers"]  # the former in the oldest files
    if len(entries) > MOST_MODEL_LAYERS:
        raise FileFormatError(what, expected=f"at most {MOST_MODEL_LAYERS} layers", got=len(entries))
    found = []
    for place, entry in enumerate(entries):
        if not isinstance(entry["class_name"], str) or not is_of_keras(entry):
            raise FileFormatError(what, expected="layers of Keras", got=repr(entry["class_name"])[:100])
        found.append(FoundLayer(entry["class_name"], entry["config"], place))
    shape = None if isinstance(config, list) else config.get("build_input_shape")
    if kind == "Sequential":
        return found, found, shape
    by_name = {entry["config"]["name"]: place for place, entry in enumerate(entries)}
    order: list[FoundLayer] = []
    name, call = _end(what, config["output_layers"])
    while True:
        place = by_name[name]
        order.append(found[place])
        if len(order) > MOST_MODEL_LAYERS:
            raise FileFormatError(what, expected="layers that end somewhere", got="a cycle")
        nodes = entries[place]["inbound_nodes"]
        if not nodes:
            break
        sources = list(_sources(nodes[call]))
        if len(sources) != 1:
            raise FileFormatError(what, expected="layers one after the other", got=f"{len(sources)} inputs of {name!r}")
        name, call = sources[0]
    return found, order[::-1], shape


def _end(what: str, outputs: Any) -> tuple[str, int]:
    """The one output's layer and call, of ``["dense", 0, 0]`` or ``[["dense", 0, 0]]``."""
    if len(outputs) == 1:
        outputs = outputs[0]
    if len(outputs) != 3 or not isinstance(outputs[0], str):
        raise FileFormatError(what, expected="one output", got=repr(outputs)[:100])
    return outputs[0], int(outputs[1])


def _sources(node: Any) -> list[tuple[str, int]]:
    """The layers and calls that a call takes its inputs of, as Keras 3 writes it, or Keras 2."""
    if isinstance(node, Mapping):
        if "keras_history" in node:
            name, call, _ = node["keras_history"]
            return [(name, int(call))]
        return [source for value in node.values() for source in _sources(value)]
    if isinstance(node, list):
        if len(node) in (3, 4) and isinstance(node[0], str) and isinstance(node[1], int):
            return [(node[0], node[1])]
        return [source for value in node for source in _sources(value)]
    return []
