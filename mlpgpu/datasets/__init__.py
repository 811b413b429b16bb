"""Data sets: :class:`Dataset`, named ones by :func:`load`, and the IDX format."""

from __future__ import annotations

from .arrays import Inputs
from .dataset import Dataset
from .idx import read_idx, write_idx
from .named import load

__all__ = ["Dataset", "Inputs", "load", "read_idx", "write_idx"]
