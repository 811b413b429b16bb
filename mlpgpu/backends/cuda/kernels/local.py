"""Locally connected layers: ``locally_connected.cuh``."""

from __future__ import annotations

from ....activations import ACTIVATIONS
from .entry import ROW_THREADS, ROWS, SUM_BYTES, Entry, arguments, camel

LOCAL_ROWS = 4  # of locally_connected.cuh


def _local(name: str, rest: str, *, activation: str | None = None, shared_bytes: int = 0) -> Entry:
    kind = f"{name}_{activation}" if activation else name
    instance = f"{name}<{camel(activation)}>" if activation else name
    signature = arguments(f"{ROWS}, {rest}")
    return Entry(kind, "locally_connected.cuh", instance, signature, ROW_THREADS, shared_bytes)


def local_forward(activation: str) -> Entry:
    rest = (
        "const float* x, const float* w, const float* b, float* z, float* y, int m, int n, int window, int pitch, "
        "int b_step"
    )
    return _local("local_forward", rest, activation=activation)


def local_backward_input(activation: str) -> Entry:
    rest = "const float* dz, const float* w, const float* saved, float* dx, int m, int n, int window, int pitch"
    return _local("local_backward_input", rest, activation=activation)


def local_backward_weight() -> Entry:
    rest = "const float* x, const float* dz, float* dw, int m, int n, int window, int pitch"
    return _local("local_backward_weight", rest)


def local_backward_bias() -> Entry:
    return _local("local_backward_bias", "const float* dz, float* db, int n, int pitch")


def local_backward_shared_bias() -> Entry:
    return _local("local_backward_shared_bias", "const float* dz, float* db, int n", shared_bytes=SUM_BYTES)


def local_entries() -> list[Entry]:
    """All of locally connected layers."""
    activated = [entry(activation) for activation in ACTIVATIONS for entry in (local_forward, local_backward_input)]
    return [*activated, local_backward_weight(), local_backward_bias(), local_backward_shared_bias()]
