"""Passes over numbers as compiled loops, where a compiler is: NumPy's calls take longer, and hold Python's lock."""

from __future__ import annotations

from .calls import STEP, Bound, Call, address_of, joined, table_of
from .library import has_loop, library, loops_name, why_not

__all__ = ["STEP", "Bound", "Call", "address_of", "has_loop", "joined", "library", "loops_name", "table_of", "why_not"]
