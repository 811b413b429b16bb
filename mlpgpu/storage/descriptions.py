"""Frozen dataclasses of plain data as mappings, for files, and back.

Layers, optimizers and schedules are such dataclasses.  A description is their class's name under
``"kind"`` and their fields by name; a field may hold another description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ConfigurationError, lookup

T = TypeVar("T")

MOST_DEPTH = 16  # of descriptions inside each other


def describe(described: Any, *, most_depth: int = MOST_DEPTH) -> dict[str, Any]:
    """The description of a dataclass instance: strings, numbers, booleans, None and further descriptions.

    Raises:
        ConfigurationError: descriptions would lie inside each other deeper than :func:`rebuild` reads.
    """
    _check_depth(type(described).__name__, most_depth)
    fields = {field.name: getattr(described, field.name) for field in dataclasses.fields(described)}
    plain = {
        name: describe(value, most_depth=most_depth - 1) if dataclasses.is_dataclass(value) else value
        for name, value in fields.items()
    }
    return {"kind": type(described).__name__, **plain}


def rebuild(
    what: str,
    description: Any,
    table: Mapping[str, type[T]],
    nested: Mapping[str, type] | None = None,
    *,
    most_depth: int = MOST_DEPTH,
) -> T:
    """The instance described, of a class in ``table``; descriptions inside it are of classes in ``nested``.

    Nothing but these classes is ever called, and they check their arguments.

    Raises:
        MlpgpuError: the description names no such class or not its fields, or holds values without meaning.
    """
    if not isinstance(description, Mapping):
        raise ConfigurationError(what, expected="a description with a kind", got=type(description).__name__)
    _check_depth(what, most_depth)
    kind = table[lookup(what, description.get("kind"), table)]
    described = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {field.name for field in described}
    # An older file lacks fields that came later, which say so.
    needed = {field.name for field in described if not field.metadata.get("came_later")}
    if not needed <= description.keys() - {"kind"} <= known:
        raise ConfigurationError(f"{what} {kind.__name__}", expected=f"fields {sorted(known)}", got=sorted(description))
    fields = {
        name: rebuild(f"{what} {name}", value, nested or {}, nested, most_depth=most_depth - 1)
        if isinstance(value, Mapping)
        else value
        for name, value in description.items()
        if name != "kind"
    }
    return kind(**fields)


def _check_depth(what: str, left: int) -> None:
    if left == 0:
        raise ConfigurationError(what, expected=f"descriptions nested at most {MOST_DEPTH} deep", got="deeper ones")
