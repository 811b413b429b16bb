"""Passes over numbers as compiled loops, where a compiler is: NumPy's calls take longer, and hold Python's lock."""

from __future__ import annotations

from .calls import Bound, Call, address_of, joined, steps_of, table_of
from .library import has_loop, library, loops_name, why_not

__all__ = [
    "Bound",
    "Call",
    "address_of",
    "has_loop",
    "joined",
    "library",
    "loops_name",
    "steps_of",
    "table_of",
    "why_not",
]
