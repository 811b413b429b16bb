"""benchmarks/counted.py: every launch of a step is counted, and the documentation has what it prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.bench import PRECISIONS, Workload

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "experiments" / name for name in ("small-batches.md", "many-rows.md")]


@pytest.fixture(scope="module")
def counted() -> ModuleType:
    spec = importlib.util.spec_from_file_location("counted", ROOT / "benchmarks" / "counted.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["counted"] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_pages_have_what_is_counted(counted: ModuleType) -> None:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    found = [*counted.rows(), *counted.rows(many_rows=True)]
    assert len(found) == len(PRECISIONS) * (len(counted.WORKLOADS) + len(counted.MANY_ROWS))
    for row in found:
        assert f"| {' | '.join(row)} |" in lines


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_counted_without_and_with_narrow_tiles(counted: ModuleType, precision: str) -> None:
    workload = counted.WORKLOADS["512s at 64"]
    with counted.narrow_tiles(used=False):
        before = counted.step(workload, precision)
    after = counted.step(workload, precision)
    assert sum(each.microseconds for each in after) < sum(each.microseconds for each in before)
    assert all(each.microseconds > 0 for each in (*before, *after))
    assert thresholds.NARROW_TILES_ARE_USED


def test_a_network_inside_one_kernel_has_no_launches(counted: ModuleType) -> None:
    assert counted.step(Workload((784, 128, 10), 128, 1280, 1e-3), "float32") == "one kernel"


def test_the_switch_is_put_back(counted: ModuleType) -> None:
    before = thresholds.NARROW_TILES_ARE_USED, thresholds.NARROW_LEAST_ROWS
    with pytest.raises(ZeroDivisionError), counted.narrow_tiles(on_tensor_cores=False):
        assert thresholds.NARROW_TILES_ARE_USED and thresholds.NARROW_LEAST_ROWS > 1 << 20
        _ = 1 / 0
    assert before == (thresholds.NARROW_TILES_ARE_USED, thresholds.NARROW_LEAST_ROWS)
    switches = [getattr(thresholds, name) for name in counted.SWITCHES]
    with pytest.raises(ZeroDivisionError), counted.without(*counted.SWITCHES):
        assert not any(getattr(thresholds, name) for name in counted.SWITCHES)
        _ = 1 / 0
    assert all(switches) and switches == [getattr(thresholds, name) for name in counted.SWITCHES]


def test_counts_in_the_place_of_limits_take_no_step_longer(counted: ModuleType) -> None:
    """By what they count, within the tenth by which tensor cores must be faster."""
    for *_, before, _, after, _ in counted.rows(many_rows=True):
        assert float(after) <= 1.1 * float(before)
