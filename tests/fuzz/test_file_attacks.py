"""Some hundred hostile files of each format: refused by an error of ours, or taken and of use."""

from __future__ import annotations

import sys

import pytest
from helpers import first_and_thorough

if sys.platform != "linux":
    pytest.skip("limits of memory are those of Linux", allow_module_level=True)

from attack_files import attack, failures, judge, table
from hostile_files import bases

SEED = 20260


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("files", first_and_thorough([150, 2000]))
def test_hostile_files_are_refused_or_of_use(files: int) -> None:
    results = attack(files, SEED, processes=1)
    assert len(results) == files
    assert failures(results) == [], table(results)
    verdicts = [verdict for _, _, verdict, _ in results]
    assert verdicts.count("refused") > files // 3 and verdicts.count("taken") > files // 30


@pytest.mark.filterwarnings("ignore")
def test_good_files_are_taken(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Else nothing would be said by files that are refused."""
    for name, base in bases().items():
        path = tmp_path / f"file{base.suffix}"
        path.write_bytes(base.image)
        assert judge(path, base.suffix) == ("taken", ""), name
