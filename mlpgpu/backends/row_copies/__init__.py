"""Rows of an array, copied to other memory by threads in C++ that all who copy share, where a compiler is."""

from __future__ import annotations

from .copies import Begun, RowCopies, is_there, why_not

__all__ = ["Begun", "RowCopies", "is_there", "why_not"]
