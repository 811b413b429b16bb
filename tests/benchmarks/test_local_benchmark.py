"""What benchmarks/local.py holds the card's outputs to, held to the CPU's."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "local.py"


@pytest.mark.parametrize("distinct", [True, False])
def test_spans_are_those_of_the_network(distinct: bool) -> None:
    local = runpy.run_path(str(SCRIPT))
    stack = local["Stack"](300, 5, distinct)
    network, window = stack.network(), local["WINDOW"]
    plan = network.lower(capacity=1)
    x = np.random.default_rng(1).normal(size=(1, 300)).astype(np.float32)
    weights = network.parameters["0.weight"]
    np.testing.assert_array_equal(local["drawn"](plan, 0, 37, 50).astype(np.float32), weights.ravel()[37:87])
    y = network.forward(x)[0]
    assert local["check"](plan, stack, x[0], y) < 1e-6
    used = sum(window * (300 - (window - 1) * layer) for layer in range(1, 6))
    assert stack.weight_bytes == 4 * used
    if distinct:
        assert plan.parameter_count == used
    wrong = y.copy()
    wrong[-1] += 1e-3
    with pytest.raises(SystemExit, match="off by"):
        local["check"](plan, stack, x[0], wrong)
