"""Data sets: :class:`Dataset`, named ones by :func:`load`, and the IDX format."""

from __future__ import annotations

from .dataset import Dataset
from .idx import read_idx, write_idx
from .named import load

__all__ = ["Dataset", "load", "read_idx", "write_idx"]
