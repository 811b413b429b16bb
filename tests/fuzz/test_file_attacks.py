"""Some hundred hostile files of each format: refused by an error of ours, or taken and of use."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers import first_and_thorough

if sys.platform != "linux":
    pytest.skip("limits of memory are those of Linux", allow_module_level=True)

import attack_files
from attack_files import attack, failures, judge, table
from hostile_files import bases

SEED = 20260


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("files", first_and_thorough([150, 500]))
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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_file_is_late_by_what_it_computes_and_a_crash_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what a busy machine lets it wait."""

    def judged(path: Path, suffix: str) -> tuple[str, str]:
        what = path.read_text()
        if what == "waits":
            time.sleep(1.0)
        while what == "computes":
            pass
        if what == "dies":
            os.kill(os.getpid(), signal.SIGTERM)
        return "refused", ""

    images = {index: what.encode() for index, what in enumerate(["waits", "computes", "dies", "is read"])}
    monkeypatch.setattr(attack_files, "SECONDS", 0.4)
    monkeypatch.setattr(attack_files, "judge", judged)
    monkeypatch.setattr(attack_files, "bases", lambda: {"base": next(iter(bases().values()))})
    monkeypatch.setattr(attack_files, "file_of", lambda seed, index, found: ("base", images[index]))
    verdicts = [(verdict, place) for _, _, verdict, place in sorted(attack(4, SEED, processes=1))]
    crash = "crash", f"signal {int(signal.SIGTERM)}, of base"
    assert verdicts == [("refused", ""), ("hang", ""), crash, ("refused", "")]
