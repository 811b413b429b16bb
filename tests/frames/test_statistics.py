"""What is learnt of numbers that come piece by piece is what they are as a whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpgpu.tables import statistics
from mlpgpu.tables.statistics import NumberStatistics


def added(numbers: np.ndarray, cuts: list[int]) -> NumberStatistics:
    """Statistics of numbers that come in pieces, cut at these rows."""
    found = NumberStatistics()
    places = [0, *sorted(cuts), len(numbers)]
    for first, end in itertools.pairwise(places):
        found.add(numbers[first:end], first)
    return found


@given(st.integers(2, 200), st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_moments_and_quartiles(rows: int, cuts: list[int], has_missing: bool) -> None:
    numbers = np.random.default_rng(rows).normal(1e6, 1.0, rows)
    if has_missing:
        numbers[1::3] = np.nan
    there = numbers[~np.isnan(numbers)]
    found = added(numbers, [min(cut, rows) for cut in cuts])
    assert (found.count, found.missing) == (len(there), rows - len(there))
    assert (found.least, found.most) == (there.min(), there.max())
    np.testing.assert_allclose(found.mean, there.mean(), rtol=1e-14)
    if len(there) > 1:
        # Of numbers around 1e6, subtracting their mean leaves an error of about 1e6 · 2⁻⁵³ in each.
        np.testing.assert_allclose(found.deviation, there.std(), atol=1e6 * 2.0**-50)
    assert found.quartiles() == tuple(np.quantile(there, (0.25, 0.5, 0.75)))


@given(st.lists(st.integers(0, 1000), max_size=6))
def test_the_sample_is_that_of_every_so_many_rows_whatever_the_pieces(cuts: list[int]) -> None:
    numbers = np.random.default_rng(1).normal(size=1000)
    numbers[::7] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "SAMPLE", 100)
        found = added(numbers, cuts)
    sampled = numbers[::16]  # 63 rows; 125 of every eighth are too many
    assert found.quartiles() == tuple(np.quantile(sampled[~np.isnan(sampled)], (0.25, 0.5, 0.75)))
    assert found.count == np.isfinite(numbers).sum()


def test_scaling_of_what_does_not_vary() -> None:
    found = added(np.full(10, 3.0), [])
    assert found.scaling("standard") == found.scaling("robust") == (3.0, 1.0)
    assert found.scaling("none") == (0.0, 1.0)
