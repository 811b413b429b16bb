"""What foreign files are held to before anything of their size is made, and what is said where a package is missing."""

from __future__ import annotations

import json
from typing import Any

import psutil

from ...errors import BackendError, FileFormatError

MOST_JSON_BYTES = 16 << 20  # of a header or a configuration
MOST_ARRAYS = 16 << 10  # of a file
MOST_MEMBERS = 16 << 10  # of an archive
MEMORY_SHARE = 0.5  # of the memory that is free, for a file's numbers


def check_bytes(what: str, count: int) -> None:
    """Refuse numbers that would take more than half of the memory that is free.

    Raises:
        FileFormatError: they would.
    """
    most = int(psutil.virtual_memory().available * MEMORY_SHARE)
    if not 0 <= count <= most:
        raise FileFormatError(what, expected=f"at most {most} bytes, half of the free memory", got=f"{count} bytes")


def parse_json(what: str, data: bytes | str) -> dict[str, Any]:
    """A JSON object of finite numbers.

    Raises:
        FileFormatError: it is another thing, too long, or too deep.
    """
    if len(data) > MOST_JSON_BYTES:
        raise FileFormatError(what, expected=f"at most {MOST_JSON_BYTES} bytes of JSON", got=len(data))
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise FileFormatError(what, expected="JSON", got=error) from error
    if not isinstance(found, dict):
        raise FileFormatError(what, expected="a JSON object", got=type(found).__name__)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} in JSON")


def missing_package(what: str, package: str, error: ImportError) -> BackendError:
    """The error that says how to install an optional package; ``what`` is what needed it."""
    hint = f"pip install {package}" if package == "torch" else f"pip install 'mlpgpu[{package}]'"
    return BackendError(what, expected=f"the package {package}", got=error, hint=hint)
