"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def available_cores() -> int:
    """Physical cores that this process may use: hyper-threads of one core slow a matrix product down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def granted_cores(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The same, and no more than the time of a container, by its control group, is that of."""
    quotas = (_numbers(groups / "cpu.max"), _numbers(groups / "cpu/cpu.cfs_quota_us", groups / "cpu/cpu.cfs_period_us"))
    quota = min((of / period for of, period in filter(None, quotas)), default=float("inf"))
    return max(1, int(min(available_cores(), quota)))


def _numbers(*paths: Path) -> tuple[float, float] | None:
    """Microseconds of each period, and the period, in one file or two; None where there is no limit."""
    try:
        quota, period = (float(word) for path in paths for word in path.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # it may say "max"
        return None
    return (quota, period) if quota > 0 and period > 0 else None
