"""The NumPy backend: interprets a plan, and is the specification that every kernel is held to.

Compiling allocates every buffer at capacity.  The first step of a given number of rows binds each
operation to views of those buffers, as a list of closures; later steps call the closures and
allocate nothing.  Matrix products run in NumPy's BLAS, everything else in ufuncs with ``out=``; where there is
g++, both in one call of compiled loops (``loops/``).
"""

from __future__ import annotations

from ..cores import available_cores
from .backend import CpuBackend
from .blas import blas_name

__all__ = ["CpuBackend", "available_cores", "blas_name"]
