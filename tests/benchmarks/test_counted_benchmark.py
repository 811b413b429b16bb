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
PAGE = ROOT / "docs" / "experiments" / "small-batches.md"


@pytest.fixture(scope="module")
def counted() -> ModuleType:
    spec = importlib.util.spec_from_file_location("counted", ROOT / "benchmarks" / "counted.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["counted"] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_is_counted(counted: ModuleType) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = list(counted.rows())
    assert len(found) == len(PRECISIONS) * len(counted.WORKLOADS)
    for row in found:
        assert f"| {' | '.join(row)} |" in lines


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_counted_without_and_with_narrow_tiles(counted: ModuleType, precision: str) -> None:
    workload = counted.WORKLOADS["512s at 64"]
    before, after = (counted.step(workload, precision, used=used) for used in (False, True))
    assert sum(each.microseconds for each in after) < sum(each.microseconds for each in before)
    assert all(each.microseconds > 0 for each in (*before, *after))
    assert thresholds.NARROW_TILES_ARE_USED


def test_a_network_inside_one_kernel_has_no_launches(counted: ModuleType) -> None:
    assert counted.step(Workload((784, 128, 10), 128, 1280, 1e-3), "float32", used=True) == "one kernel"


def test_the_switch_is_put_back(counted: ModuleType) -> None:
    before = thresholds.NARROW_TILES_ARE_USED, thresholds.NARROW_LEAST_ROWS
    with pytest.raises(ZeroDivisionError), counted.narrow_tiles(on_tensor_cores=False):
        assert thresholds.NARROW_TILES_ARE_USED and thresholds.NARROW_LEAST_ROWS > 1 << 20
        _ = 1 / 0
    assert before == (thresholds.NARROW_TILES_ARE_USED, thresholds.NARROW_LEAST_ROWS)
