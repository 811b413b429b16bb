"""What several libraries in C++ are made of, for the host: rows of arrays as they read them, and threads that help."""

from __future__ import annotations

from .rows import BYTES, COPY, KINDS, described

__all__ = ["BYTES", "COPY", "KINDS", "described"]
