"""A safe container: JSON data and plain arrays in one HDF5 file, replaced as a whole or not at all.

It knows neither networks nor trainers; ``docs/file-format.md`` gives the layout.  A file is read as
if an enemy had written it: whatever it claims is held against its own description, its size and the
checksums before anything of it is returned.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import h5py
import numpy as np

from ..errors import ConfigurationError, DtypeError, FileFormatError, StorageError
from .files import as_path, reason, replace_file, replacing, reserve

FORMAT_VERSION = 1
DTYPES = ("<f4", "<f8", "<i8", "|u1")
MOST_DESCRIPTION_BYTES = 16 << 20
MOST_PATHS = 16 << 10  # arrays and groups of a file
MOST_NESTING = 64  # of lists and objects inside each other; what goes through a description may recurse
CHUNK_BYTES = 1 << 20

_GROUP, _DESCRIPTION = "/mlpgpu", "/mlpgpu/description"
_PATH = re.compile(r"(/\w[\w.-]*){1,8}", re.ASCII)


@dataclass(frozen=True, eq=False)
class Contents:
    """What one file holds.

    Attributes:
        description: plain JSON data: dicts with string keys, lists, strings, finite numbers, booleans, None.
        arrays: absolute HDF5 path -> array of float32, float64, int64 or uint8, of any shape.
        groups: paths of groups that stand in the file even if they are empty.
    """

    description: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    groups: tuple[str, ...] = ()


def write(path: str | PathLike[str], contents: Contents) -> None:
    """Write ``contents`` beside ``path`` and move them into place; the same contents give the same bytes.

    A failure at any moment, a crash included, leaves the previous file as it was.

    Raises:
        ConfigurationError: the description is not plain JSON data or too long; paths are malformed or clash.
        DtypeError: an array has another dtype than those listed at :class:`Contents`, or is none.
        StorageError: the file system refused.
    """
    what = _what(path)
    with image(what, contents).getbuffer() as contents_of_file:  # given back even if an error keeps this frame alive
        replace_file(what, path, contents_of_file)


@dataclass(frozen=True, eq=False)
class Pieces:
    """An array that comes piece by piece, since nobody has room for all of it.

    Attributes:
        shape, dtype: the array's; one of those that a file holds.
        pieces: parts of it along the first axis, one after another; to be gone through once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Iterable[np.ndarray]


def write_pieces(path: str | PathLike[str], contents: Contents, arrays: Mapping[str, Pieces]) -> None:
    """As :func:`write`, with these arrays besides, which take the place of those of the same name; of the same bytes.

    They are asked for one after another, sorted by name, and never held as a whole.  What they raise ends it, and
    leaves the previous file as it was.

    Raises:
        ConfigurationError, DtypeError, StorageError: as :func:`write` does.
    """
    what = _what(path)
    held = {name: array for name, array in contents.arrays.items() if name not in arrays}
    if fault := _fault([*held, *arrays], contents.groups):
        raise ConfigurationError(what, expected="paths that can stand in one file", got=fault)
    held = {name: _little_endian(f"{what}, {name}", array) for name, array in held.items()}
    size = sum(array.nbytes for array in held.values())
    for name, coming in arrays.items():
        if coming.dtype.str not in DTYPES:
            raise DtypeError(f"{what}, {name}", expected="float32, float64, int64 or uint8", got=coming.dtype)
        size += math.prod(coming.shape) * coming.dtype.itemsize
    groups = sorted(set(contents.groups))
    with replacing(what, path) as stream, h5py.File(stream, "w", libver="earliest") as file:
        reserve(stream, size)  # so that HDF5 meets no full disk; it takes no file that has bytes already
        _create_groups(file, [*held, *arrays], groups)
        inventory = {}
        for name in sorted([*held, *arrays]):
            if name in held:
                file.create_dataset(name, data=held[name], track_times=False)
                inventory[name] = _entry(held[name].shape, held[name].dtype, zlib.crc32(held[name]))
            else:
                crc = _write_pieces(file, f"{what}, {name}", name, arrays[name])
                inventory[name] = _entry(arrays[name].shape, arrays[name].dtype, crc)
        _finish(file, _encode(what, contents.description, inventory, groups))


def _write_pieces(file: h5py.File, what: str, name: str, array: Pieces) -> int:
    """Write an array piece by piece; returns its CRC."""
    dataset = file.create_dataset(name, array.shape, array.dtype, track_times=False)
    crc, first = 0, 0
    for piece in array.pieces:
        whole = np.ascontiguousarray(piece, array.dtype)
        if whole.size:
            dataset[first : first + len(whole)] = whole
        crc, first = zlib.crc32(whole, crc), first + len(whole)
    _expect(first == array.shape[0], what, f"pieces of {array.shape[0]} rows in all", first)
    return crc


def image(what: str, contents: Contents) -> io.BytesIO:
    """The bytes of the file that :func:`write` makes; ``what`` is what errors call it, and they are that function's."""
    if fault := _fault(contents.arrays, contents.groups):
        raise ConfigurationError(what, expected="paths that can stand in one file", got=fault)
    arrays = {name: _little_endian(f"{what}, {name}", contents.arrays[name]) for name in sorted(contents.arrays)}
    groups = sorted(set(contents.groups))
    inventory = {name: _entry(array.shape, array.dtype, zlib.crc32(array)) for name, array in arrays.items()}
    return _image(arrays, groups, _encode(what, contents.description, inventory, groups))


def read(path: str | PathLike[str]) -> Contents:
    """The contents of a file that :func:`write` made, arrays, groups and keys sorted by name.

    Nothing is allocated for an array before its bytes are known to be in the file.

    Raises:
        FileFormatError: the file is damaged, foreign, newer than this package, or holds anything that
            :func:`write` does not write.
        StorageError: it cannot be opened or read.
    """
    what = _what(path)
    with _opened(what, path) as stream:
        return parse(what, stream, os.fstat(stream.fileno()).st_size)


@contextmanager
def _opened(what: str, path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file that is read, and closed at the end, with errors of ours."""
    try:
        # Asked first because opening a pipe would wait for its other end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "a folder or a device")
        with open(path, "rb") as stream:
            yield stream
    except FileFormatError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(what, expected="a readable file", got=reason(error)) from error


@dataclass(frozen=True)
class _Lying:
    """Where an array lies in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


class OpenFile:
    """A file that :func:`write` made, open and found to be undamaged, of which arrays are read in parts.

    Whatever takes its place under its name, it stays the same.  It is closed when it is dropped.

    Attributes:
        what: what errors call it.
        description: as in :class:`Contents`.
        crc: a number that tells it from files of other contents.
    """

    def __init__(
        self, what: str, stream: BinaryIO, description: dict[str, Any], arrays: dict[str, _Lying], crc: int
    ) -> None:
        self.what, self.description, self.crc = what, description, crc
        self._stream, self._arrays = stream, arrays
        weakref.finalize(self, stream.close)

    def form(self, path: str) -> tuple[tuple[int, ...], np.dtype] | None:
        """Shape and dtype of an array, or None if there is none."""
        lying = self._arrays.get(path)
        return None if lying is None else (lying.shape, lying.dtype)

    def read(self, path: str, first: int, count: int) -> np.ndarray:
        """So many elements of an array from element ``first`` on, in C order, (count,).

        Raises:
            StorageError: they cannot be read any more.
        """
        lying, values = self._arrays[path], np.empty(count, self._arrays[path].dtype)
        try:
            self._stream.seek(lying.offset + first * lying.dtype.itemsize)
            if self._stream.readinto(values) != values.nbytes:  # type: ignore[attr-defined]
                raise OSError(errno.EIO, "the file's end")
        except OSError as error:
            raise StorageError(self.what, expected="a readable file", got=reason(error)) from error
        return values

    def contents(self, *beginnings: str) -> Contents:
        """The description and the arrays whose paths begin so, without their groups."""
        found = {
            path: self.read(path, 0, math.prod(lying.shape)).reshape(lying.shape)
            for path, lying in self._arrays.items()
            if path.startswith(beginnings)
        }
        return Contents(self.description, found)


def open_file(path: str | PathLike[str]) -> OpenFile:
    """A file that :func:`write` made, whose arrays nobody may have room for, after the checks of :func:`read`.

    Raises:
        FileFormatError, StorageError: as :func:`read` says.
    """
    what = _what(path)
    with _opened(what, path) as stream:
        with _format_errors(what), h5py.File(stream, "r") as file:
            document, datasets = _checked(what, file["/"], stream, os.fstat(stream.fileno()).st_size)
            lying = {
                name: _Lying(tuple(entry["shape"]), np.dtype(entry["dtype"]), datasets[name].id.get_offset() or 0)
                for name, entry in document["arrays"].items()
            }
            crc = int(file[_GROUP].attrs["crc32"])  # of the arrays' CRCs, too
        return OpenFile(what, os.fdopen(os.dup(stream.fileno()), "rb"), document["content"], lying, crc)


def _what(path: object) -> str:
    return f"file {as_path('path of a file', path)}"


def _groups(arrays: Iterable[str], groups: Iterable[str]) -> set[str]:
    """All groups in a file that holds these arrays and groups, without the root."""
    found = set(groups)
    for path in [*arrays, *groups, _DESCRIPTION]:
        found.update(str(parent) for parent in PurePosixPath(path).parents)
    return found - {"/"}


def _fault(arrays: Iterable[str], groups: Iterable[str]) -> str:
    """Why these paths cannot stand in one file; empty if they can."""
    arrays, groups = list(arrays), list(groups)
    if len(arrays) + len(groups) > MOST_PATHS:
        return f"{len(arrays) + len(groups)} of them, which is more than {MOST_PATHS}"
    for path in [*arrays, *groups]:
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            return f"{path!r}, which is no absolute path of 1 to 8 names of letters, digits and _ . -"
    for path in sorted(_groups(arrays, groups) & {*arrays, _DESCRIPTION}):
        return f"{path!r} as an array and as a group"
    return f"{_DESCRIPTION!r}, which is the description's own" if _DESCRIPTION in arrays else ""


def _little_endian(what: str, array: object) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise DtypeError(what, expected="a NumPy array", got=type(array).__name__)
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in DTYPES:
        raise DtypeError(what, expected="float32, float64, int64 or uint8", got=array.dtype)
    return np.asarray(array, dtype=dtype, order="C")


def _entry(shape: tuple[int, ...], dtype: np.dtype, crc: int) -> dict[str, Any]:
    """What the inventory says of an array."""
    return {"shape": list(shape), "dtype": dtype.str, "crc32": crc}


def _encode(what: str, description: dict[str, Any], inventory: dict[str, dict[str, Any]], groups: list[str]) -> bytes:
    """The description and the inventory of the file as JSON."""
    what = f"{what}, description"
    if not isinstance(description, dict):
        raise DtypeError(what, expected="a dict", got=type(description).__name__)
    document = {"content": description, "arrays": inventory, "groups": groups}
    try:
        text = json.dumps(document, sort_keys=True, allow_nan=False, ensure_ascii=False)
        data = text.encode()
        kept = json.loads(text)["content"] == description
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(what, expected="plain JSON data", got=error) from error
    if not kept:
        got = "a tuple, a key that is no string or another value that JSON changes"
        raise ConfigurationError(what, expected="plain JSON data", got=got)
    if _is_too_deep(document):
        raise ConfigurationError(what, expected=f"JSON nested at most {MOST_NESTING} deep", got="deeper one")
    if len(data) > MOST_DESCRIPTION_BYTES:
        raise ConfigurationError(what, expected=f"at most {MOST_DESCRIPTION_BYTES} bytes of JSON", got=len(data))
    return data


def _is_too_deep(document: Any) -> bool:
    """Whether lists and objects lie inside each other deeper than files have them."""
    level = [document]
    for _ in range(MOST_NESTING + 1):
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def _image(arrays: dict[str, np.ndarray], groups: list[str], description: bytes) -> io.BytesIO:
    """The bytes of the file.  Made in memory, so that HDF5 never meets a full disk."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver="earliest") as file:
        _create_groups(file, arrays, groups)
        for path, array in arrays.items():
            file.create_dataset(path, data=array, track_times=False)
        _finish(file, description)
    return image


def _create_groups(file: h5py.File, arrays: Iterable[str], groups: list[str]) -> None:
    for path in sorted(_groups(arrays, groups)):
        file.create_group(path)


def _finish(file: h5py.File, description: bytes) -> None:
    """Write what is known when all arrays are there."""
    file.create_dataset(_DESCRIPTION, data=np.frombuffer(description, np.uint8), track_times=False)
    file[_GROUP].attrs.create("format_version", FORMAT_VERSION, dtype="<i8")
    file[_GROUP].attrs.create("crc32", zlib.crc32(description), dtype="<i8")


def parse(what: str, stream: BinaryIO, size: int) -> Contents:
    """The contents of a file of ``size`` bytes; as :func:`read` says.

    Raises:
        FileFormatError: as :func:`read` says.
    """
    with _format_errors(what), h5py.File(stream, "r") as file:
        document, datasets = _checked(what, file["/"], stream, size)
        inventory = document["arrays"]
        arrays = {path: _read_array(f"{what}, {path}", datasets[path], inventory[path]) for path in inventory}
        return Contents(document["content"], arrays, tuple(document["groups"]))


@contextmanager
def _format_errors(what: str) -> Iterator[None]:
    try:
        yield
    except FileFormatError:
        raise
    except Exception as error:  # HDF5 meets damage with errors of every kind
        raise FileFormatError(what, expected="an undamaged HDF5 file", got=reason(error)) from error


def _checked(
    what: str, root: h5py.Group, stream: BinaryIO, size: int
) -> tuple[dict[str, Any], dict[str, h5py.Dataset]]:
    """The document and the datasets of a file, once all of it was found to be what it says."""
    document = _read_document(what, root, size)
    inventory, groups = document["arrays"], document["groups"]
    if fault := _fault(inventory, groups):
        raise FileFormatError(what, expected="an inventory of paths that can stand in one file", got=fault)
    datasets = _find(what, root, {*inventory, _DESCRIPTION}, _groups(inventory, groups))
    for path, entry in inventory.items():
        _check_dataset(f"{what}, {path}", datasets[path], tuple(entry["shape"]), entry["dtype"], size)
    # Arrays that share bytes could ask for any amount of memory.
    total = sum(dataset.id.get_storage_size() for dataset in datasets.values())
    _expect(total <= size, what, f"arrays of at most the file's {size} bytes", total)
    for path, entry in inventory.items():
        _check_bytes(f"{what}, {path}", datasets[path], entry["crc32"], stream)
    return document, datasets


def _expect(holds: bool, what: str, expected: str, got: object, hint: str = "") -> None:
    if not holds:
        raise FileFormatError(what, expected=expected, got=got, hint=hint)


def _read_document(what: str, root: h5py.Group, size: int) -> dict[str, Any]:
    """The JSON in ``/mlpgpu/description``: keys content (a dict), arrays and groups, the latter two unchecked."""
    hint = "mlpgpu.load reads some files of other programs"
    _expect(_GROUP[1:] in set(root), what, f"a group {_GROUP}", "a foreign HDF5 file", hint)
    group = _member(what, root, _GROUP, h5py.Group)
    version = _read_integer(what, group, "format_version")
    hint = "written by a newer mlpgpu" if version > FORMAT_VERSION else ""
    _expect(1 <= version <= FORMAT_VERSION, what, f"a format version from 1 to {FORMAT_VERSION}", version, hint)
    dataset = _member(what, group, _DESCRIPTION, h5py.Dataset)
    what = f"{what}, {_DESCRIPTION}"
    _check_dataset(what, dataset, dataset.shape, "|u1", min(size, MOST_DESCRIPTION_BYTES))
    data = dataset[()].tobytes()
    _expect(zlib.crc32(data) == _read_integer(what, group, "crc32"), what, "bytes that bear out their CRC", "others")
    document = json.loads(data, parse_constant=_refuse_constant)
    _expect(not _is_too_deep(document), what, f"JSON nested at most {MOST_NESTING} deep", "deeper one")
    _expect(isinstance(document["content"], dict), what, "a dict as content", type(document["content"]).__name__)
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} in JSON")


def _read_integer(what: str, group: h5py.Group, name: str) -> int:
    attribute = group.attrs.get_id(name)
    plain = attribute.shape == () and attribute.get_type().equal(h5py.h5t.STD_I64LE)
    _expect(plain, f"{what}, attribute {name} of {_GROUP}", "one int64", "something else")
    return int(group.attrs[name])


def _member(what: str, group: h5py.Group, path: str, kind: type) -> Any:
    """The object of this ``kind`` at ``path``, in ``group``; no link but a hard one is ever followed."""
    name = path.rpartition("/")[2]
    hard = group.id.links.get_info(name.encode()).type == h5py.h5l.TYPE_HARD
    _expect(hard, f"{what}, {path}", "a hard link", "a soft or external one")
    item = group[name]
    _expect(isinstance(item, kind), f"{what}, {path}", f"a {kind.__name__.lower()}", item)
    return item


def _find(what: str, root: h5py.Group, arrays: set[str], groups: set[str]) -> dict[str, h5py.Dataset]:
    """The datasets at ``arrays``.  A cycle of links ends at its first path that is not listed."""
    found: dict[str, Any] = {}
    missing = arrays | groups
    pending = [("", root)]
    while pending:
        prefix, group = pending.pop()
        for name in group:
            path = f"{prefix}/{name}"
            _expect("/" not in name and path in missing, what, "nothing that its inventory does not list", repr(path))
            missing.remove(path)
            if path in arrays:
                found[path] = _member(what, group, path, h5py.Dataset)
            else:
                pending.append((path, _member(what, group, path, h5py.Group)))
    _expect(not missing, what, "all that its inventory lists", f"a file without {', '.join(sorted(missing))}")
    return found


def _check_dataset(what: str, dataset: h5py.Dataset, shape: tuple[int, ...], dtype: str, most_bytes: int) -> None:
    """Refuse whatever is not ``shape`` numbers of ``dtype`` in one piece, uncompressed, within ``most_bytes``."""
    _expect(dtype in DTYPES, what, f"a dtype of {', '.join(DTYPES)}", repr(dtype))
    same = dataset.id.get_type().equal(h5py.h5t.py_create(np.dtype(dtype)))
    _expect(same, what, f"numbers of dtype {dtype}", "another type")
    _expect(dataset.shape == shape, what, f"shape {shape}", dataset.shape)
    properties = dataset.id.get_create_plist()
    plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count() == 0
    _expect(plain, what, "numbers in one piece", "chunked, compressed, virtual or external storage")
    claimed, stored = math.prod(shape) * np.dtype(dtype).itemsize, dataset.id.get_storage_size()
    _expect(claimed == stored, what, f"{claimed} bytes", stored)
    _expect(claimed <= most_bytes, what, f"at most {most_bytes} bytes", claimed)


def _check_bytes(what: str, dataset: h5py.Dataset, crc: int, stream: BinaryIO) -> None:
    """Refuse numbers that do not bear out their CRC, before memory is allocated for them.

    The bytes are read where HDF5 says that they lie, a chunk at a time: a sparse file claims any size.
    """
    left, found = dataset.id.get_storage_size(), 0
    if left:
        stream.seek(dataset.id.get_offset())
    while left:
        chunk = stream.read(min(left, CHUNK_BYTES))
        _expect(bool(chunk), what, f"{left} more bytes", "the file's end")
        found, left = zlib.crc32(chunk, found), left - len(chunk)
    _expect(found == crc, what, "numbers that bear out their CRC", "others")


def _read_array(what: str, dataset: h5py.Dataset, entry: dict[str, Any]) -> np.ndarray:
    array = np.empty(dataset.shape, entry["dtype"])
    if array.size:
        dataset.read_direct(array)
    _expect(zlib.crc32(array) == entry["crc32"], what, "numbers that bear out their CRC", "others")
    return array
