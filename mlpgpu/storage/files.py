"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from ..errors import ConfigurationError, DtypeError, StorageError


def check_path(what: str, path: object, suffixes: Sequence[str] = ()) -> Path:
    """``path`` as a Path, if it names a file that ends in one of ``suffixes``, in either case.

    Raises:
        DtypeError: it is no path.
        ConfigurationError: it names no file, or one that ends in something else.
    """
    if not isinstance(path, (str, PathLike)):
        raise DtypeError(what, expected="a string or a path", got=f"{type(path).__name__} {path!r}")
    checked = Path(path)
    if not checked.name or (suffixes and checked.suffix.lower() not in suffixes):
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise ConfigurationError(what, expected=f"a file name{ending}", got=repr(os.fspath(path)))
    return checked


def reason(error: Exception) -> str:
    """What an error of the file system says, without the path."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def replace_file(what: str, path: str | PathLike[str], contents: bytes | memoryview) -> None:
    """Write a file beside ``path`` and move it into place: a reader finds the old file or the new, whole.

    The bytes are on the disk before the name changes.  A link at ``path`` stays one, and what it points
    to is replaced.  Two processes must not write to one path at the same time.

    Raises:
        StorageError: the file system refuses; what was at ``path`` is as before.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise OSError(errno.EEXIST, "a folder or a device")
        partial = target.with_name(f".{target.name}.partial")
        try:
            with open(partial, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()  # gone already if all went well
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorageError(what, expected="a place that can be written to", got=reason(error)) from error
    # The new file is in place: a file system that cannot sync a folder is no failure.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
