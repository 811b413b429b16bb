"""Tables: what columns of a frame, a CSV or a Parquet file mean to a network."""

from __future__ import annotations

from .csv_file import CSV
from .table import Table

__all__ = ["CSV", "Table"]
