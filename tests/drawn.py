"""Which tests of a large family run: drawn by the kernels' sources, so that each change of a kernel brings others.

A red run can be repeated, since the same sources give the same draw.  With ``MLPGPU_WHOLE=1`` all run.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

KERNELS = Path(__file__).parents[1] / "cuda"
IS_WHOLE = os.environ.get("MLPGPU_WHOLE") == "1"

Value = TypeVar("Value")


@functools.cache
def _checksum(header: str | None) -> int:
    """Of all sources, or of a header with those that it includes."""
    files = sorted(KERNELS.rglob("*.cuh")) if header is None else sorted(_included(KERNELS / header, set()))
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def _included(path: Path, found: set[Path]) -> set[Path]:
    if path not in found:
        found.add(path)
        for name in re.findall(r'^\s*#\s*include\s*"(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            _included(KERNELS / name, found)
    return found


def generator(what: str, header: str | None = None) -> random.Random:
    """Random numbers whose seed is what they are for and what the sources hold, all or those of one header."""
    return random.Random(zlib.crc32(what.encode(), _checksum(header)))


def share_of(values: Sequence[Value], share: float, what: str, header: str | None = None) -> list[Value]:
    """About so much of the values, in their order; of few values the number is drawn too."""
    draw = generator(what, header)
    chosen = set(draw.sample(range(len(values)), int(share * len(values) + draw.random())))
    return [value for i, value in enumerate(values) if IS_WHOLE or i in chosen]


def first_and_drawn(values: Iterable[Any], share: float, what: str) -> list[Any]:
    """Parameters of a test: the first runs always, a share of the others with the thorough tests."""
    first, *others = (value if isinstance(value, tuple) else (value,) for value in values)
    thorough = (pytest.param(*value, marks=pytest.mark.thorough) for value in share_of(others, share, what))
    return [pytest.param(*first), *thorough]


def covering(what: str, *axes: Iterable[Any], rounds: int = 1) -> list[tuple[Any, ...]]:
    """Drawn combinations of values, one from each axis, among which each value occurs ``rounds`` times or more."""
    draw, lists = generator(what), [list(axis) for axis in axes]
    if IS_WHOLE:
        return list(itertools.product(*lists))
    longest, found = max(map(len, lists)), {}
    for _ in range(rounds):
        columns = [
            [value for _ in range(-(-longest // len(axis))) for value in draw.sample(range(len(axis)), len(axis))]
            for axis in lists
        ]
        found.update(dict.fromkeys(zip(*columns, strict=False)))
    return [tuple(axis[i] for axis, i in zip(lists, places, strict=True)) for places in sorted(found)]
