"""Storage: files replaced as a whole, the HDF5 container of networks and runs, and descriptions as JSON."""

from __future__ import annotations

from .container import FORMAT_VERSION, Contents, Pieces, image, parse, read, write, write_pieces

__all__ = ["FORMAT_VERSION", "Contents", "Pieces", "image", "parse", "read", "write", "write_pieces"]
