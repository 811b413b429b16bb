"""Keras' files: ``.keras`` archives, written and read, and HDF5 files of whole models and of weights, read.

An archive that is written has a whole file of ours as its weights, which Keras reads where it has them itself, so that
it is read back with every bit and its checksums.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import h5py

from ... import storage
from ...errors import FileFormatError, MlpgpuError
from ...layers import input_width
from ...version import __version__
from ..saved import SavedNetwork
from .hdf5 import Reader, has_link
from .hints import Hints
from .keras_layers import StackReader, keras_layers
from .keras_model import find_layers, model_config
from .keras_weights import is_weights, read_weights, values_of_layers
from .limits import MOST_JSON_BYTES, MOST_MEMBERS, check_bytes, parse_json
from .steps import network_of, steps_of

CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
KERAS_VERSION = "3.5.0"  # whose archives these are
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that an archive can say: the same network gives the same bytes
OURS = "mlpgpu"  # the group that a file of ours has


def write_keras(network: SavedNetwork) -> bytes:
    """The bytes of a ``.keras`` archive.

    Raises:
        ConfigurationError: a layer or a scale is none that Keras has.
    """
    dtype = network.parameters.dtype
    layers = keras_layers(list(steps_of(network)), network.named(), dtype)
    config = model_config(layers, input_width(network.layers), dtype)
    metadata = {"keras_version": KERAS_VERSION, "date_saved": "", "mlpgpu_version": __version__}
    members = {
        METADATA: json.dumps(metadata).encode(),
        CONFIG: json.dumps(config).encode(),
        WEIGHTS: storage.image("weights for Keras", network.contents()).getbuffer(),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # without compression, as Keras writes it
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name, EPOCH), bytes(data))
    return archive.getvalue()


def read_keras_archive(path: Path, hints: Hints) -> SavedNetwork:
    """The network in a ``.keras`` archive.

    Raises:
        FileFormatError: it is damaged, or a model that is no stack of ours.
        ConfigurationError: ``hints`` say what the file says.
    """
    hints.refuse(f"file {path}")
    what = f"file {path}"
    try:
        with zipfile.ZipFile(path) as archive:
            if len(archive.infolist()) > MOST_MEMBERS:
                raise FileFormatError(what, expected=f"at most {MOST_MEMBERS} members", got=len(archive.infolist()))
            config = _member(what, archive, CONFIG, MOST_JSON_BYTES)
            weights = _member(what, archive, WEIGHTS, path.stat().st_size)
        document = parse_json(f"{what}, {CONFIG}", config)
        with h5py.File(io.BytesIO(weights), "r") as file:
            if has_link(file["/"], OURS):
                return SavedNetwork.parse(storage.parse(f"{what}, {WEIGHTS}", io.BytesIO(weights), len(weights)))
            return _read_model(what, document, Reader(f"{what}, {WEIGHTS}", file, len(weights)))
    except FileFormatError:
        raise
    except Exception as error:  # archives, HDF5 and configurations without meaning have errors of every kind
        raise FileFormatError(what, expected="an undamaged .keras archive", got=_told(error)) from error


def _member(what: str, archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    """The bytes of a member, if the archive claims no more than there may be."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise FileFormatError(what, expected=f"a member {name}", got="none") from None
    # Keras stores members as they are; what is compressed could be of any size.
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most_bytes:
        got = f"{info.file_size} bytes, {'stored' if info.compress_type == zipfile.ZIP_STORED else 'compressed'}"
        raise FileFormatError(what, expected=f"{name} stored as it is, at most {most_bytes} bytes", got=got)
    check_bytes(what, info.file_size)
    return archive.read(info)


def is_foreign_hdf5(path: Path) -> bool:
    """Whether a file is HDF5, and none of ours; damaged ones are."""
    try:
        with h5py.File(path, "r") as file:
            return not has_link(file["/"], OURS)
    except Exception:  # HDF5 meets damage with errors of every kind
        return False


def read_keras_hdf5(path: Path, hints: Hints) -> SavedNetwork:
    """The network in an HDF5 file of Keras: a whole model, or weights alone.

    Raises:
        FileFormatError: it is damaged, or has what no stack of ours has.
        ConfigurationError: ``hints`` are needed and not given, or given and not needed.
    """
    what = f"file {path}"
    try:
        with open(path, "rb") as stream, h5py.File(stream, "r") as file:
            return _read_hdf5(what, Reader(what, file, os.fstat(stream.fileno()).st_size), hints)
    except MlpgpuError:
        raise
    except Exception as error:
        raise FileFormatError(what, expected="an undamaged HDF5 file of Keras", got=_told(error)) from error


def _read_hdf5(what: str, reader: Reader, hints: Hints) -> SavedNetwork:
    text = reader.text(reader.root, "model_config")
    if text is not None:
        hints.refuse(what)
        return _read_model(what, parse_json(f"{what}, model_config", text), reader)
    if not is_weights(reader):
        raise FileFormatError(what, expected="an HDF5 file of mlpgpu or of Keras", got="another one")
    stack = StackReader(what)
    read_weights(reader, hints, stack)
    return network_of(what, stack.steps, stack.values)


def _read_model(what: str, document: dict[str, Any], reader: Reader) -> SavedNetwork:
    named, ordered, shape = find_layers(what, document)
    values = values_of_layers(reader, named)
    stack = StackReader(what)
    stack.take_shape(shape)
    for layer in ordered:
        stack.add(layer, values.get(layer.place, ()))
    stack.finish()
    return network_of(what, stack.steps, stack.values)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
