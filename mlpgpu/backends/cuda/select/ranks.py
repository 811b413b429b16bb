"""How much of the gradient ranks exchange at a time."""

from __future__ import annotations

from . import thresholds
from .setting import Verdict


def exchanged_apart(elements: int, rest: int, *, in_one: bool) -> Verdict:
    """Whether so many elements of the gradient are a piece by themselves, with so many behind them.

    ``in_one`` if the plan makes one exchange of all sums.
    """
    least = thresholds.EXCHANGE_LEAST_ELEMENTS
    if in_one:
        return Verdict(False, f"{elements:,} elements: the plan makes one exchange a step")
    if elements < least and rest:
        return Verdict(False, f"{elements:,} elements < {least:,}: a message's latency would be most of its time")
    if rest < least:
        return Verdict(False, f"{elements:,} elements, to the end")
    return Verdict(True, f"{elements:,} elements ≥ {least:,}")
