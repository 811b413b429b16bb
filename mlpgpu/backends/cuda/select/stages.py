"""How many steps' inputs are made ready by one launch."""

from __future__ import annotations

from ..kernels.launches import GRAPH_STEPS
from . import thresholds


def stages_of(step_bytes: int) -> int:
    """A power of two of steps, for which what a launch leaves, so many bytes for each, stays in a card's cache."""
    return max(steps for steps in GRAPH_STEPS if steps == 1 or steps * step_bytes <= thresholds.MOST_STAGED_BYTES)
