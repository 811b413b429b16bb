"""Passes over numbers as compiled loops, where a compiler is: NumPy's calls take longer, and hold Python's lock."""

from __future__ import annotations

from .calls import Bound, Call, address_of, joined
from .library import library, loops_name, why_not

__all__ = ["Bound", "Call", "address_of", "joined", "library", "loops_name", "why_not"]
