"""What measures the card: ``bench/peak_rates.cuh``.  No plan asks for it."""

from __future__ import annotations

from .entry import ROW_THREADS, Entry, arguments

CHAINS = 8  # of bench/peak_rates.cuh


def multiply_add() -> Entry:
    """Chains of multiply-adds that do not wait for each other."""
    signature = f"float a, float b, int rounds, float* y[grid.x,{ROW_THREADS}]"
    return Entry("multiply_add", "bench/peak_rates.cuh", "multiply_add", arguments(signature), ROW_THREADS)
