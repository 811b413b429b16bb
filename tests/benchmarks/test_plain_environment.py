"""Comparisons on the CPU begin without variables that hold a library down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import json, os, sys
from plain_environment import LIMITS, begin_without_limits
begin_without_limits()
print(json.dumps({"arguments": sys.argv[1:], "set": [name for name in LIMITS if name in os.environ], "kept": os.environ["KEPT"]}))
"""  # noqa: E501 (a script's line)


def run(tmp_path: Path, **variables: str) -> tuple[dict[str, object], str]:
    """What the script says of itself, and what it told before."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    plain = {name: value for name, value in os.environ.items() if "OPENBLAS" not in name and "NVPL" not in name}
    environment = {**plain, "PYTHONPATH": str(BENCHMARKS), "KEPT": "kept", **variables}
    command = [sys.executable, str(script), "--only", "a b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_a_script_begins_anew_without_them(tmp_path: Path) -> None:
    found, told = run(tmp_path, OPENBLAS_CORETYPE="Haswell", ONEDNN_MAX_CPU_ISA="AVX2")
    assert found == {"arguments": ["--only", "a b"], "set": [], "kept": "kept"}
    assert "OPENBLAS_CORETYPE=Haswell" in told and "ONEDNN_MAX_CPU_ISA=AVX2" in told


def test_where_none_is_set_it_goes_on(tmp_path: Path) -> None:
    found, told = run(tmp_path)
    assert found == {"arguments": ["--only", "a b"], "set": [], "kept": "kept"}
    assert told == ""
