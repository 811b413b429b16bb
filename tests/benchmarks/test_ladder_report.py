"""Tables that benchmarks/ladder_report.py makes, and where it puts them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ladder_report.py"
ABOUT = {"card": "Card", "driver": "1.2", "commit": "0123456789abcdef", "versions": {"mlpgpu": "0.1"}}
TIMED = {"seconds": 0.5, "gflops": 1234.5, "speedup": 10.0, "error": 1e-7, "of_cublas": None, "of_limit": 0.25}
LEFT_OUT = dict.fromkeys(TIMED)


def product(rung: str, n: int, k: int, figures: dict) -> dict:
    return {"rung": rung, "m": n, "n": n, "k": k, **figures, **ABOUT}


def test_tables_stand_between_their_marks(tmp_path: Path) -> None:
    report = runpy.run_path(str(SCRIPT))
    page = report["PAGE"].read_text(encoding="utf-8")
    lines = [product("naive", 10, 10, TIMED), product("naive", 20, 20, LEFT_OUT), product("tiles", 20, 20, TIMED)]
    layer = {**product("mlpgpu, tf32", 20, 20, TIMED), "m": 40}
    step = {"form": "forward", "workload": "large", "precision": "tf32"}
    step |= {"gigaflop": 250.2, "microseconds": 1000.0, "alone_microseconds": 500.0}
    others = [{**step, "form": "backward_weight"}, {**step, "precision": "bfloat16"}]
    tables = report["gemm_tables"]([*lines, product("tiles", 20, 4, TIMED), layer], [step, *others])
    assert "where m = 40 and n = k = 20" in tables and "| tf32 | 1 | 500 | 250 |" in tables and "bfloat16" not in tables
    assert "| rung | 10 | 20 |\n| --- | --- | --- |\n| naive | 1,234 | – |\n| tiles | – | 1,234 |" in tables
    assert "| tiles | 10 × / – / 25% / 1.0e-07 |" in tables and "by k, where m = n = 20" in tables
    assert "on an Card, driver 1.2, mlpgpu 0.1 at 0123456789." in tables
    layer = {"rung": "staged", "n": 50, "k": 3, "outputs_per_second": 1.5e9, "seconds": 0.002, **ABOUT}
    both = [{**layer, "weights": "distinct", "of_limit": 0.5}, {**layer, "weights": "reused", "of_limit": None}]
    layers = report["local_tables"](both)
    assert "| staged | 1.5e+09 (2.00 ms, 50% of limit) |" in layers and "| staged | 1.5e+09 (2.00 ms) |" in layers
    filled = report["fill"](report["fill"](page, "gemm_ladder", "one"), "gemm_ladder", tables)
    assert filled.count("![gemm_ladder](gemm_ladder.png)") == 1 and tables in filled
    assert report["fill"](filled, "local_ladder", layers).count("end of what it made") == 4
    with pytest.raises(SystemExit, match="expected the marks"):
        report["fill"]("nothing", "gemm_ladder", tables)


def test_the_report_s_table_has_a_column_of_ours() -> None:
    report = runpy.run_path(str(SCRIPT))
    line = {"what": "forward", "weights": "reused", "n": 50_000, "k": 1000, "ms": 0.5, "floor_ms": None}
    step = {**line, "what": "training step", "weights": "distinct", "ms": 26.0, "floor_ms": 24.0, "pytorch_ms": None}
    half = {**step, "weights": "reused", "pytorch_ms": 40.0, "pytorch_layers": 500}
    text = report["stack_tables"]({"results": [step, half, {**line, "pytorch_ms": 6.0}], **ABOUT})
    assert "| 50,000 | 1,000 | 969 ms | 9.25 ms | 6.00 ms | 0.50 ms |" in text and "100,000" not in text
    assert "| training step | distinct | 26.00 ms | 24.00 ms | – |" in text
    assert "| training step | reused | 26.00 ms | 24.00 ms | 80.00 ms, by 500 layers, which fit |" in text
    page = report["fill"](report["PAGE"].read_text(encoding="utf-8"), "local", text, picture=False)
    assert text in page and "local.png" not in page


def test_products_over_ranks() -> None:
    report = runpy.run_path(str(SCRIPT))
    about = {"machine": "Machine", "cores": 2, "commit": None, "versions": {"mlpgpu": "0.1"}}
    line = {"m": 1000, "n": 1000, "k": 1000, "seconds": 0.5, "seconds_of_products": 0.25, "gflops": 4.0, **about}
    serial = {**line, "rung": "serial", "ranks": 1, "speedup": 1.0, "error": 0.0}
    flat = {**line, "rung": "split A", "ranks": 2, "k": 8, "speedup": 1.5, "error": 3e-7}
    text = report["rank_tables"]([serial, flat])
    assert "| rung | 1,000 | 1,000 × 1,000, k = 8 |" in text and "Machine, 2 cores, mlpgpu 0.1." in text
    assert "| serial | 4 (8), 1.00 ×, 0.0e+00 | – |" in text
    assert "| split A, 2 ranks | – | 4 (0), 1.50 ×, 3.0e-07 |" in text


def test_sizes_are_spread() -> None:
    spread = runpy.run_path(str(SCRIPT))["spread"]
    assert spread([1]) == [1] and spread([1, 2, 3]) == [1, 2, 3]
    assert spread(list(range(9))) == [0, 2, 4, 6, 8] and spread(list(range(10))) == [0, 2, 4, 6, 8, 9]


def test_without_results_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    page = tmp_path / "ladder.md"
    page.write_text(
        "<!-- local_ladder: made by benchmarks/ladder_report.py -->\n<!-- local_ladder: end of what it made -->"
    )
    main.__globals__.update(RESULTS=tmp_path, PAGE=page)
    with pytest.raises(SystemExit, match="got none"):
        main()
    layer = {"rung": "staged", "n": 50, "k": 3, "weights": "reused", "of_limit": None, **ABOUT}
    (tmp_path / "local_ladder.jsonl").write_text(
        json.dumps({**layer, "outputs_per_second": 1.0, "seconds": 1.0}) + "\n"
    )
    main()
    assert "| staged | 1 (1,000.00 ms) |" in page.read_text()
