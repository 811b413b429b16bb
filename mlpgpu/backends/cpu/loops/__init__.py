"""Passes over numbers as compiled loops, where a compiler is: NumPy's calls take longer, and hold Python's lock."""

from __future__ import annotations

from .calls import Bound, Call, address_of, joined, steps_of, table_of
from .library import has_long_vectors, has_loop, library, loops_name, why_not
from .shared import Parts, Phases, helpers_of, run_steps, shared

__all__ = [
    "Bound",
    "Call",
    "Parts",
    "Phases",
    "address_of",
    "has_long_vectors",
    "has_loop",
    "helpers_of",
    "joined",
    "library",
    "loops_name",
    "run_steps",
    "shared",
    "steps_of",
    "table_of",
    "why_not",
]
