"""Files of arrays: NumPy's ``.npy`` and ``.npz``, and IDX."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from ..datasets import read_idx
from ..errors import ConfigurationError, DataError, FileFormatError, ShapeError, StorageError, did_you_mean
from ..storage.files import check_path, reason

IDX_PARTS = ("idx", "ubyte")  # one of them stands in the name of an IDX file
INPUT_NAMES, TARGET_NAMES, WEIGHT_NAME = ("x", "x_train", "X", "X_train"), ("y", "y_train"), "weight"


def is_array_file(path: Path) -> bool:
    """Whether a file has arrays, by its name."""
    return path.suffix.lower() in (".npy", ".npz") or is_idx(path)


def is_idx(path: Path) -> bool:
    """Whether a name is that of an IDX file, such as ``train-images.idx3-ubyte.gz``."""
    return any(part in path.name.lower() for part in IDX_PARTS)


def read_array(path: Path) -> np.ndarray:
    """The array of a ``.npy`` or an IDX file; a memory map of the former.

    Raises:
        FileFormatError: there is none, or it holds Python objects, which are not read.
        StorageError: the file cannot be read.
    """
    if is_idx(path):
        return read_idx(path)
    what = f"file {check_path('file', path, ('.npy',))}"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise StorageError(what, expected="a readable file", got=reason(error)) from error
    except Exception as error:  # NumPy meets damage with errors of every kind
        raise FileFormatError(what, expected="an array of numbers or text", got=error) from error


def read_arrays(path: Path, target: str | None = None) -> dict[str, np.ndarray]:
    """``x``, and ``y`` and ``weight`` where they are there, of a ``.npz`` file; ``target`` names another ``y``.

    Raises:
        FileFormatError: the file is damaged or holds Python objects.
        ShapeError: there is no such array.
        StorageError: the file cannot be read, or does not fit into memory.
    """
    what = f"file {check_path('file', path, ('.npz',))}"
    try:
        with zipfile.ZipFile(path) as archive:
            size, free = sum(entry.file_size for entry in archive.infolist()), psutil.virtual_memory().available
        if size > free:
            raise StorageError(what, expected=f"at most the {free:,} bytes of free memory", got=f"{size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            names = _names(what, list(arrays.files), target)
            return {kind: arrays[name] for kind, name in names.items()}
    except (StorageError, ShapeError):
        raise
    except OSError as error:
        raise StorageError(what, expected="a readable file", got=reason(error)) from error
    except Exception as error:  # archives, what they are packed by, and NumPy have errors of every kind
        raise FileFormatError(what, expected="arrays of numbers or text", got=error) from error


def _names(what: str, there: Sequence[str], target: str | None) -> dict[str, str]:
    """The names in the file of ``x``, ``y`` and ``weight``."""
    inputs = next((name for name in INPUT_NAMES if name in there), None)
    if inputs is None:
        raise ShapeError(what, expected="an array x", got=f"{', '.join(there)}")
    names = {"x": inputs}
    if target is not None and target not in there:
        hint = did_you_mean(target, there)
        raise ShapeError(f"{what}, --target", expected=f"one of {', '.join(there)}", got=repr(target), hint=hint)
    targets = target or next((name for name in TARGET_NAMES if name in there), None)
    return names | ({"y": targets} if targets else {}) | ({"weight": WEIGHT_NAME} if WEIGHT_NAME in there else {})


def split_columns(what: str, array: np.ndarray, target: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the target of an array (rows, columns); ``target`` is the number of a column, the last by default.

    Raises:
        ShapeError: the array has no such columns.
        ConfigurationError: ``target`` is no number.
    """
    if array.ndim != 2 or array.shape[1] < 2:
        hint = "--labels names a file of targets"
        raise ShapeError(what, expected="(rows, columns), targets among them", got=f"shape {array.shape}", hint=hint)
    try:
        place = int(target if target is not None else -1)
    except ValueError:
        raise ConfigurationError("--target", expected="the number of a column of an array", got=repr(target)) from None
    if not -array.shape[1] <= place < array.shape[1]:
        raise ShapeError("--target", expected=f"a column from 0 to {array.shape[1] - 1}", got=place)
    return np.delete(array, place, axis=1), array[:, place]


def check_whole_targets(y: np.ndarray) -> np.ndarray:
    """Class numbers (rows,) of whole numbers that may be floats.

    Raises:
        DataError: some are not whole, or negative.
    """
    if y.dtype.kind in "US":
        return y
    if not (np.isfinite(y) & (y == np.floor(y)) & (y >= 0)).all():
        raise DataError("targets", expected="whole numbers from 0 on, for a classification", got="others")
    return y.astype(np.int64)
