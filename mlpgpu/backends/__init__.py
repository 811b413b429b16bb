"""Backends by name.  This is the only place that names them, and none is imported before it is asked for."""

from __future__ import annotations

from ..errors import lookup
from .base import Backend, Program, Sampling, State, target_array

__all__ = ["BACKENDS", "Backend", "Program", "Sampling", "State", "get_backend", "target_array"]

BACKENDS = ("auto", "cpu")


def get_backend(name: str) -> Backend:
    """The backend ``name``; ``"auto"`` is the fastest one that this machine can run.

    Raises:
        DtypeError, UnknownNameError: there is no backend of that name.
    """
    lookup("backend", name, BACKENDS)
    from .cpu import CpuBackend

    return CpuBackend()
