"""Dates in text: the formats that are tried, and reading them."""

from __future__ import annotations

import numpy as np

from .frames import load_pandas
from .values import seconds_of

ISO = "ISO 8601"
DAYS = ("%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d %b %Y", "%d-%b-%Y", "%b %d, %Y")
TIMES = ("", " %H:%M", " %H:%M:%S")
# In the order in which they are tried; where two read all of a column, it is for the user to say which is meant.
FORMATS = (ISO, *(day + time for day in DAYS for time in TIMES))


def read_dates(texts: np.ndarray, form: str) -> np.ndarray:
    """Texts (n,) as seconds since 1970 UTC, (n,) float64, NaN where one is no date of this format.

    A date without a time zone counts as UTC.

    Raises:
        ValueError: ``form`` is no format.
    """
    pandas = load_pandas()
    named = "ISO8601" if form == ISO else form
    series = pandas.Series(texts, dtype=object)
    return seconds_of(pandas.to_datetime(series, format=named, errors="coerce", utc=True))


def candidates(texts: np.ndarray) -> tuple[str, ...]:
    """The formats that read at least half of these texts."""
    has_digits = [any(letter.isdigit() for letter in text) for text in texts[:100]]
    if sum(has_digits) * 2 < len(has_digits):
        return ()
    tried = texts[:1000]
    found = [form for form in FORMATS if 2 * np.isfinite(read_dates(tried, form)).sum() >= len(tried)]
    return tuple(found)
