"""Networks in other programs' formats, written and read; nothing in a file is ever executed."""

from __future__ import annotations

from .hints import Hints
from .table import FORMATS, Format, reader_of

__all__ = ["FORMATS", "Format", "Hints", "reader_of"]
