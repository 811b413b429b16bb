"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigurationError, DtypeError, MlpgpuError, StorageError, shown


def check_path(what: str, path: object, suffixes: Sequence[str] = ()) -> Path:
    """``path`` as a Path, if it names a file that ends in one of ``suffixes``, in either case.

    Raises:
        DtypeError: it is no path.
        ConfigurationError: it names no file, or one that ends in something else.
        StorageError: no file can have such a name.
    """
    checked = as_path(what, path)
    if not checked.name or (suffixes and checked.suffix.lower() not in suffixes):
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise ConfigurationError(what, expected=f"a file name{ending}", got=repr(str(checked)))
    return checked


def as_path(what: str, path: object) -> Path:
    """``path`` as a Path, if it is one that the file system can be asked for.

    Raises:
        DtypeError: it is no path, or one of bytes.
        StorageError: it holds a NUL, or characters that no file's name can.
    """
    expected = "a string or a path"
    try:
        name = os.fspath(path) if isinstance(path, (str, PathLike)) else None
    except Exception as error:  # of whoever wrote its __fspath__
        raise DtypeError(what, expected=expected, got=f"{type(path).__name__}: {error}") from error
    if not isinstance(name, str):
        raise DtypeError(what, expected=expected, got=shown(path))
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise StorageError(what, expected="characters that a file's name can have", got=repr(name)) from error
    if b"\0" in encoded:
        raise StorageError(f"{what} {name}", expected="a name that a file can have", got="an embedded null byte")
    return Path(name)


def reason(error: Exception) -> str:
    """What an error of the file system says, without the path."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def replace_file(what: str, path: str | PathLike[str], contents: bytes | memoryview) -> None:
    """Write a file beside ``path`` and move it into place, as :func:`replacing` does.

    Raises:
        StorageError: the file system refuses; what was at ``path`` is as before.
    """
    with replacing(what, path) as file:
        file.write(contents)


@contextlib.contextmanager
def replacing(what: str, path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file to be written piece by piece, which is moved to ``path``: a reader finds the old file or the new, whole.

    The bytes are on the disk before the name changes.  A link at ``path`` stays one, and what it points
    to is replaced; a new file has the permissions of the one before, and where that is allowed its owner.
    Of two that write to one path at the same time, the last one's file stays.

    Raises:
        StorageError: the file system refuses; what was at ``path`` is as before, and so it is after any other error.
    """
    try:
        target = Path(os.path.realpath(path))
        before = os.stat(target) if target.exists() else None
        if before is not None and not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EEXIST, "a folder or a device")
        # Nobody can have put a link or a pipe under a name that is not known before.
        partial = target.with_name(f".{secrets.token_hex(8)}.partial")
        try:
            with _create(partial, 0o666 if before is None else 0o600) as file:
                yield file
                file.flush()
                if before is not None:
                    _take_over(file.fileno(), before)
                os.fsync(file.fileno())
                if not os.path.lexists(
                    partial
                ):  # linkat follows /proc's link only if it is given a folder's descriptor
                    os.link(f"/proc/self/fd/{file.fileno()}", partial, src_dir_fd=file.fileno())
            os.replace(partial, target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()  # gone already if all went well
    except MlpgpuError:  # of whoever writes
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorageError(what, expected="a place that can be written to", got=reason(error)) from error
    # The new file is in place: a file system that cannot sync a folder is no failure.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _create(partial: Path, mode: int) -> BinaryIO:
    """A new file to be written at ``partial``; where the system can, without a name yet, so that a kill leaves none."""
    try:
        descriptor = os.open(partial.parent, os.O_TMPFILE | os.O_RDWR, mode)
    except (AttributeError, OSError):  # another system, or a file system without such files
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(partial, flags, mode)
    return open(descriptor, "w+b")


def reserve(file: BinaryIO, size: int) -> None:
    """Make sure that the disk has room for so many bytes of an open file, where the system can.

    Raises:
        OSError: it has not.
    """
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file.fileno(), 0, size)


def _take_over(descriptor: int, before: os.stat_result) -> None:
    """Give an open file the owner, where that is allowed, and the permissions of the file that it replaces."""
    if hasattr(os, "fchown"):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
