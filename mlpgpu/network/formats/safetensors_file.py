"""Safetensors, written and read: a state dict by PyTorch's names.

What is written also has the network's description, as JSON under ``mlpgpu`` in the file's metadata, so that it is read
back with every bit.  Of other programs' files the names and shapes tell which layers there are; see ``state_dict.py``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...errors import FileFormatError, MlpgpuError
from ..saved import SavedNetwork, parse_description
from .hints import Hints
from .limits import MOST_ARRAYS, MOST_JSON_BYTES, check_bytes, missing_package, parse_json
from .state_dict import network_of_state_dict, state_dict, values_of
from .steps import steps_of

DESCRIPTION = "mlpgpu"  # the key of the metadata
DTYPES = {"F64": 8, "F32": 4, "F16": 2}  # bytes of a number


def write_safetensors(network: SavedNetwork) -> bytes:
    """The bytes of a safetensors file.

    Raises:
        BackendError: the package safetensors is missing.
    """
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise missing_package("export to safetensors", "safetensors", error) from error

    values = {name: np.ascontiguousarray(v) for name, v in state_dict(steps_of(network), network.named()).items()}
    return save(values, {DESCRIPTION: json.dumps(network.described(), sort_keys=True)})


def read_safetensors(path: Path, hints: Hints) -> SavedNetwork:
    """The network in a safetensors file.

    Raises:
        BackendError: the package safetensors is missing.
        FileFormatError: the file is damaged or has other things than a stack of Linear layers.
        ConfigurationError: ``hints`` are needed and not given, or given and not needed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise missing_package("load of safetensors", "safetensors", error) from error

    what = f"file {path}"
    _check_header(what, path)
    values: dict[str, np.ndarray] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            names = list(file.keys())
            if len(names) > MOST_ARRAYS:
                raise FileFormatError(what, expected=f"at most {MOST_ARRAYS} tensors", got=len(names))
            for name in names:
                piece = file.get_slice(name)
                if piece.get_dtype() not in DTYPES:
                    got = f"{piece.get_dtype()} of {name!r}"
                    raise FileFormatError(what, expected=f"tensors of {', '.join(DTYPES)}", got=got)
                check_bytes(what, math.prod(piece.get_shape()) * 8)
            for name in names:
                values[name] = file.get_tensor(name)
    except MlpgpuError:
        raise
    except Exception as error:  # the library has errors of its own, and others of NumPy
        raise FileFormatError(what, expected="an undamaged safetensors file", got=error) from error
    if DESCRIPTION not in metadata:
        return network_of_state_dict(what, values, hints, is_ordered=False)
    hints.refuse(what)
    return _described(what, parse_json(f"{what}, metadata", metadata[DESCRIPTION]), values)


def _check_header(what: str, path: Path) -> None:
    """Refuse a header longer than any of ours before it is parsed, and numbers that memory has no room for."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
    if length > MOST_JSON_BYTES:
        raise FileFormatError(what, expected=f"a header of at most {MOST_JSON_BYTES} bytes", got=length)
    check_bytes(what, size)


def _described(what: str, description: Mapping[str, object], values: dict[str, np.ndarray]) -> SavedNetwork:
    """The network of this description, whose values have the names that :func:`write_safetensors` gives them."""
    try:
        about = parse_description(description)
        return SavedNetwork.of(named=values_of(what, steps_of(about), values), **about.attributes())
    except FileFormatError:
        raise
    except (MlpgpuError, KeyError, TypeError, ValueError, IndexError) as error:
        raise FileFormatError(what, expected="a description that mlpgpu wrote", got=error) from error
