"""Files of other programs that lie are refused by errors of ours; ``foreign_files`` makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_files import KINDS, attack


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_refused_or_read(kind: str, tmp_path: Path) -> None:
    counts, wrong = attack(15, 25, tmp_path, kind)
    assert not wrong
    assert min(counts["read"], counts["refused"]) > 0
    assert counts["not made"] < 13
