"""What g++ and nvcc made in earlier runs, and how long it is kept."""

from __future__ import annotations

import time
from pathlib import Path

KEPT_DAYS = 30


def forget_unused(cache: Path) -> None:
    """Remove what no run has made or used for a month: the sources that it was made of have changed since."""
    oldest = time.time() - KEPT_DAYS * 86400
    for path in cache.glob("*/*"):
        if path.is_file() and max(path.stat().st_atime, path.stat().st_mtime) < oldest:
            path.unlink(missing_ok=True)
