"""Networks in other programs' formats, written and read; nothing in a file is ever executed."""

from __future__ import annotations

from .estimator import network_of_estimator
from .hints import Hints
from .table import FORMATS, Format, format_of, reader_of
from .torch_model import sequential_of

__all__ = ["FORMATS", "Format", "Hints", "format_of", "network_of_estimator", "reader_of", "sequential_of"]
