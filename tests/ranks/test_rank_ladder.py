"""The ladder's product over ranks, by real ones under mpirun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launched import ROOT, mpirun, run

LADDER = ROOT / "examples" / "ladders"
SIZES = """
import sys
sys.path.insert(0, sys.argv[1])
import ranks_ladder
ranks_ladder.SQUARES, ranks_ladder.FLAT = [(1, 1, 1), (257, 257, 257)], [(300, 131, 5), (2, 140, 1000)]
sys.argv = ["ranks_ladder", *sys.argv[2:]]
ranks_ladder.main()
"""


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_split_c_has_the_serial_bits_and_split_a_nearly(ranks: int, tmp_path: Path) -> None:
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    command = [sys.executable, "-c", SIZES, str(LADDER), "--json", str(lines), "--picture", str(picture)]
    done = run([*mpirun(), "-n", str(ranks), *command] if ranks > 1 else command)
    assert done.code == 0, done.errors
    results = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert len(results) == 12 == len(done.output.splitlines())
    assert picture.stat().st_size > 1000
    errors = {(result["rung"], result["m"]): result["error"] for result in results}
    assert {error for (rung, _), error in errors.items() if rung in ("serial", "split C")} == {0.0}
    assert all(error < 1e-6 for error in errors.values())
    assert (errors["split A", 257] > 0.0) == (ranks > 1)
    assert all(result["speedup"] > 0.0 and result["seconds_of_products"] <= result["seconds"] for result in results)
