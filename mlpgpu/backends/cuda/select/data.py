"""What a kernel does to data and parameters, and what the host; whether targets are read through a texture."""

from __future__ import annotations

from . import thresholds
from .setting import Verdict


def by_texture(elements: int, most_texels: int) -> Verdict:
    """Whether targets are read through a texture object, which reaches so many elements on this card.

    It is kept where it reaches and gains nothing on an H200: plain loads take 0.4 to 1.2 % less of a step
    (``docs/results.md``).
    """
    if elements <= most_texels:
        return Verdict(True, f"{elements:,} targets are at most {most_texels:,} texels")
    return Verdict(False, f"{elements:,} targets are more than {most_texels:,} texels: plain loads read them")


def by_kernel(values: int) -> Verdict:
    """Whether a kernel of its own looks at so many parameters, or draws them."""
    least = thresholds.KERNEL_LEAST_VALUES
    which = "at least" if values >= least else "fewer than"
    return Verdict(values >= least, f"{values:,} values are {which} {least:,}")


def sorts_on_card(rows: int) -> Verdict:
    """Whether the card makes the orders of a set's epochs, if it has the room."""
    least = thresholds.SORT_LEAST_ROWS
    return Verdict(rows >= least, f"{rows:,} rows are {'at least' if rows >= least else 'fewer than'} {least:,}")
