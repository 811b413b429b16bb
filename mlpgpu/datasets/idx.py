"""The IDX format: one array of numbers in a file, plain or gzip.

Source: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits", section
"The IDX file format".  A file is, big-endian throughout:

=================  =======================================================
bytes              meaning
=================  =======================================================
0, 1               zero
2                  type code (:data:`TYPES`)
3                  number of axes
4 per axis         length of the axis, unsigned
the rest           the numbers, last axis fastest
=================  =======================================================
"""

from __future__ import annotations

import errno
import gzip
import math
import os
import stat
import struct
import zlib
from os import PathLike
from typing import BinaryIO, cast

import numpy as np

from ..errors import DtypeError, FileFormatError, ShapeError, StorageError, check_integer, shown
from ..storage.files import check_path, reason, replace_file
from .arrays import refuse_masked

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
MOST_AXES = 64  # of a NumPy array
CHUNK_BYTES = 1 << 20
MOST_UNPACKED_BYTES = 1 << 29  # of a compressed file, unless told otherwise


def read_idx(path: str | PathLike[str], *, most_bytes: int = MOST_UNPACKED_BYTES) -> np.ndarray:
    """The array in an IDX file, in native byte order; gzip is told by its first bytes, not by the name.

    Memory grows with what the file yields, never with what its header claims.  A compressed file may yield
    ``most_bytes`` of numbers, and is unpacked no further than one byte past its header's claim.

    Raises:
        FileFormatError: the file is not IDX, is truncated, has bytes left over, is corrupt gzip, or is gzip that
            claims more than ``most_bytes``.
        StorageError: it cannot be opened or read, or is no file.
        DtypeError, ConfigurationError: ``path`` is no path, or ``most_bytes`` no number of bytes.
    """
    most_bytes = check_integer("most_bytes", most_bytes, least=0)
    path = check_path("IDX file", path)
    what = f"IDX file {path}"
    try:
        # Asked first because opening a pipe would wait for its other end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "a folder or a device")
        with open(path, "rb") as file:
            if file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    return _read_array(what, cast(BinaryIO, unpacked), most_bytes)
            return _read_array(what, file, None)
    except FileFormatError:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(what, expected="a whole gzip file", got=error) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorageError(what, expected="a readable file", got=reason(error)) from error


def _read_array(what: str, stream: BinaryIO, most_bytes: int | None) -> np.ndarray:
    magic = _read_at_most(stream, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES:
        codes = ", ".join(f"0x{code:02X}" for code in TYPES)
        raise FileFormatError(what, expected=f"0x0000, then a type code of {codes}", got=f"0x{magic.hex()}")
    dtype, axes = np.dtype(TYPES[magic[2]]), magic[3]
    if not 1 <= axes <= MOST_AXES:
        raise FileFormatError(what, expected=f"1 to {MOST_AXES} axes", got=axes)
    lengths = _read_at_most(stream, 4 * axes)
    if len(lengths) < 4 * axes:
        raise FileFormatError(what, expected=f"a header of {4 + 4 * axes} bytes", got=f"{4 + len(lengths)} bytes")
    shape = struct.unpack(f">{axes}I", lengths)

    claimed = math.prod(shape) * dtype.itemsize
    # NumPy refuses shapes whose other axes overflow even where an axis of length 0 leaves no element.
    if math.prod(filter(None, shape)) * dtype.itemsize > np.iinfo(np.intp).max:
        raise FileFormatError(what, expected="a size that memory can address", got=f"shape {shape}")
    if most_bytes is not None and claimed > most_bytes:
        hint = f"read_idx(path, most_bytes={claimed}) where the file is to be trusted"
        raise FileFormatError(what, expected=f"at most {most_bytes} bytes once unpacked", got=claimed, hint=hint)
    numbers = _read_at_most(stream, claimed + 1)
    if len(numbers) != claimed:
        got = "more" if len(numbers) > claimed else f"{len(numbers)} bytes"
        raise FileFormatError(what, expected=f"{claimed} bytes after a header of shape {shape}", got=got)
    array = np.frombuffer(numbers, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_at_most(stream: BinaryIO, count: int) -> bytearray:
    """The next ``count`` bytes, or fewer where the stream ends before."""
    buffer = bytearray()
    while len(buffer) < count:
        chunk = stream.read(min(CHUNK_BYTES, count - len(buffer)))
        if not chunk:
            break
        buffer += chunk
    return buffer


def write_idx(path: str | PathLike[str], array: np.ndarray) -> None:
    """Write ``array`` to an IDX file, as gzip if the name ends in ``.gz``.

    The file is written beside and moved into place.  The gzip header carries neither time nor name:
    the same array and the same zlib give the same bytes.

    Raises:
        DtypeError: ``array`` is no array, or the format has no code for its dtype.
        DataError: some of its values are masked.
        ShapeError: it has no axis, too many, or one that is too long.
        StorageError: the file cannot be written.
    """
    path = check_path("IDX file", path)
    if not isinstance(array, np.ndarray):
        raise DtypeError("array", expected="a NumPy array", got=shown(array))
    refuse_masked("array", array)
    codes = {np.dtype(name): code for code, name in TYPES.items()}
    stored = array.dtype.newbyteorder(">")
    if stored not in codes:
        known = ", ".join(dtype.newbyteorder("=").name for dtype in codes)
        raise DtypeError("array", expected=f"one of {known}", got=array.dtype)
    if not 1 <= array.ndim <= MOST_AXES or max(array.shape) >= 2**32:
        raise ShapeError("array", expected=f"1 to {MOST_AXES} axes shorter than 2**32", got=f"shape {array.shape}")
    header = struct.pack(f">4B{array.ndim}I", 0, 0, codes[stored], array.ndim, *array.shape)
    contents = header + array.astype(stored, copy=False).tobytes()

    if path.suffix == ".gz":
        contents = gzip.compress(contents, mtime=0)
    replace_file(f"IDX file {path}", path, contents)
