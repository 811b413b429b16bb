"""Numbers and names in HDF5 files of others, read as if an enemy had written them.

Whatever is wrong with a file is an error of any kind in HDF5's library; callers of these functions make a
``FileFormatError`` of it.
"""

from __future__ import annotations

import math

import h5py
import numpy as np

from ...errors import FileFormatError
from .limits import MOST_ARRAYS, check_bytes

BFLOAT16 = "bfloat16"  # what Keras calls numbers that HDF5 has no type for


class Reader:
    """What one file holds.

    Arguments:
        what: what errors call it.
        file: it, open.
        size: its bytes.
    """

    def __init__(self, what: str, file: h5py.File, size: int) -> None:
        self.what, self.root = what, file["/"]
        self._left = size  # bytes that its arrays may still claim: those that share theirs could claim any number

    def group(self, parent: h5py.Group, name: str) -> h5py.Group | None:
        """The group ``name`` of ``parent``, or None if there is nothing of the name."""
        return self._member(parent, name, h5py.Group) if has_link(parent, name) else None

    def numbers(self, parent: h5py.Group, name: str) -> np.ndarray:
        """The array ``name`` of ``parent``, float32 or float64; int64 for integers.

        Raises:
            FileFormatError: it is none, or not stored in one piece as it is.
        """
        what = f"{self.what}, {parent.name}/{name}"
        dataset = self._member(parent, name, h5py.Dataset)
        is_bfloat16 = dataset.dtype.kind == "V" and dataset.dtype.itemsize == 2 and self._text(dataset) == BFLOAT16
        if dataset.dtype.kind not in "fiu" and not is_bfloat16:
            raise FileFormatError(what, expected="numbers", got=dataset.dtype)
        properties = dataset.id.get_create_plist()
        plain = properties.get_layout() in (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)
        if not plain or properties.get_external_count():
            got = "chunked, compressed, virtual or external storage"
            raise FileFormatError(what, expected="numbers in one piece, as Keras writes them", got=got)
        claimed = math.prod(dataset.shape) * dataset.dtype.itemsize
        if dataset.id.get_storage_size() != claimed or claimed > self._left:
            raise FileFormatError(what, expected="numbers that are in the file", got=f"{claimed} bytes of them")
        self._left -= claimed
        check_bytes(what, claimed * 4)
        array = dataset[()]
        if is_bfloat16:
            return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        kind = np.int64 if array.dtype.kind in "iu" else np.float64 if array.dtype.itemsize == 8 else np.float32
        return np.asarray(array).astype(kind)

    def names(self, group: h5py.Group, attribute: str) -> list[str] | None:
        """A list of names in attributes ``attribute``, or ``attribute0``, ``attribute1``, …; None if there is none."""
        if attribute in group.attrs:
            return self._names(group, attribute)
        if f"{attribute}0" not in group.attrs:
            return None
        found: list[str] = []
        for chunk in range(MOST_ARRAYS):
            if f"{attribute}{chunk}" not in group.attrs or len(found) > MOST_ARRAYS:
                break
            found += self._names(group, f"{attribute}{chunk}")
        return found

    def _names(self, group: h5py.Group, attribute: str) -> list[str]:
        if math.prod(group.attrs.get_id(attribute).shape) > MOST_ARRAYS:
            raise FileFormatError(f"{self.what}, {attribute}", expected=f"at most {MOST_ARRAYS} names", got="more")
        return [_decoded(name) for name in np.atleast_1d(group.attrs[attribute]).tolist()]

    def text(self, group: h5py.Group, attribute: str) -> str | None:
        """The text in an attribute, or None if there is none."""
        return _decoded(group.attrs[attribute]) if attribute in group.attrs else None

    def _text(self, dataset: h5py.Dataset) -> str | None:
        return _decoded(dataset.attrs["dtype"]) if "dtype" in dataset.attrs else None

    def _member(self, parent: h5py.Group, name: str, kind: type) -> h5py.Group | h5py.Dataset:
        """What ``parent`` has under ``name``, by a hard link; a name with slashes leads through groups."""
        for part in name.split("/")[:-1]:
            parent = self._member(parent, part, h5py.Group)
        name = name.rpartition("/")[2]
        what = f"{self.what}, {parent.name}/{name}"
        if name in ("", ".") or not has_link(parent, name):
            raise FileFormatError(what, expected=f"a {kind.__name__.lower()}", got="nothing")
        if parent.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise FileFormatError(what, expected="a hard link", got="a soft or external one")
        item = parent[name]
        if not isinstance(item, kind):
            raise FileFormatError(what, expected=f"a {kind.__name__.lower()}", got=type(item).__name__.lower())
        return item


def has_link(group: h5py.Group, name: str) -> bool:
    """Whether the group has a link of this name, whatever it leads to; none is followed."""
    return bool(group.id.links.exists(name.encode()))


def _decoded(text: object) -> str:
    if isinstance(text, bytes):
        return text.decode()
    if not isinstance(text, str):
        raise TypeError(f"text as {type(text).__name__}")
    return text
