"""The formats of files: those written by the endings of their names, those read by a file's first bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from ...errors import FileFormatError
from ...storage.files import check_path
from ..saved import SavedNetwork
from .hints import Hints
from .keras_file import is_foreign_hdf5, read_keras_archive, read_keras_hdf5, write_keras
from .onnx_file import write_onnx
from .plain_files import write_hdf5, write_json, write_npz
from .safetensors_file import read_safetensors, write_safetensors
from .torch_file import is_torch, read_torch


@dataclass(frozen=True)
class Format:
    """A format that networks are exported to.

    Attributes:
        name: for people.
        write: makes a file's bytes, which predict what the network does.
    """

    name: str
    write: Callable[[SavedNetwork], bytes]


FORMATS: dict[str, Format] = {
    ".onnx": Format("ONNX, opset 17", write_onnx),
    ".safetensors": Format("safetensors, with PyTorch's names", write_safetensors),
    ".keras": Format("a Keras 3 model", write_keras),
    ".weights.h5": Format("weights that Keras 3 loads, and mlpgpu", write_hdf5),
    ".h5": Format("the network, without the run that it was trained in", write_hdf5),
    ".npz": Format("parameters as arrays of NumPy", write_npz),
    ".json": Format("layers and columns, without parameters", write_json),
}


def format_of(what: str, path: object) -> tuple[Path, Format]:
    """``path``, and the format that its ending asks for, the longest one that suits.

    Raises:
        DtypeError, ConfigurationError, StorageError: it is no path, or asks for none.
    """
    checked = check_path(what, path, tuple({Path(f"x{suffix}").suffix: None for suffix in FORMATS}))
    suiting = [suffix for suffix in FORMATS if checked.name.lower().endswith(suffix)]
    return checked, FORMATS[max(suiting, key=len)]


Read = Callable[[Path, Hints], SavedNetwork]


def reader_of(what: str, path: Path) -> Read | None:
    """What reads the file at ``path``, by its first bytes; None if it is none of these formats.

    Raises:
        OSError: the file cannot be read.
        FileFormatError: it is a pickle, which may do anything when it is read.
    """
    with open(path, "rb") as file:
        first = file.read(16)
    if first[:8] == b"\x89HDF\r\n\x1a\n":
        return read_keras_hdf5 if is_foreign_hdf5(path) else None
    if first[:4] == b"PK\x03\x04":
        return _reader_of_archive(what, path)
    if first[8:9] == b"{":
        return read_safetensors
    if first[:1] == b"\x80" and first[1:2] in b"\x02\x03\x04\x05":
        hint = "torch.save(model.state_dict(), path) of PyTorch 1.6 or later writes an archive that is safe to read"
        raise FileFormatError(what, expected="a format that nothing is executed of", got="a pickle", hint=hint)
    return None


def _reader_of_archive(what: str, path: Path) -> Read:
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except (BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        raise FileFormatError(what, expected="an undamaged archive of Keras or PyTorch", got=error) from error
    if names and all(name.endswith(".npy") for name in names):
        hint = "numpy.load reads them; a file that ends in .h5 is loaded"
        raise FileFormatError(what, expected="a network", got="arrays of NumPy without its layers", hint=hint)
    return read_torch if is_torch(names) else read_keras_archive
