"""What g++ makes of C++ for the processor at hand, once for a machine, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .sources import cache_folder, key_of

SWITCH = "MLPGPU_LOOPS"  # set to 0, it leaves everything to NumPy
BUILD_SECONDS = 120.0


class UnusableError(Exception):
    """A library cannot be compiled or loaded; the message says why."""


def built(what: str, text: str, folders: Sequence[Path], options: Sequence[str], linked: Sequence[str]) -> Path:
    """The file of the library ``what``, from the cache's folder of that name or from the compiler.

    Arguments:
        text: the unit that is compiled.
        folders: of the files that it includes.
        linked: what stands behind it in the compiler's command, such as libraries.

    Raises:
        UnusableError: there is no compiler, it failed, or :data:`SWITCH` is 0.
        OSError: the cache cannot be written.
    """
    if os.environ.get(SWITCH) == "0":
        raise UnusableError(f"{SWITCH} is 0")
    cache = cache_folder(what)
    # Machines of different processors may share the cache's folder.
    note = cache / f"{what}-{key_of(text, folders, [*options, *linked, platform.machine(), _processor()])}.json"
    kept = _noted(note)
    if kept is not None:
        return kept
    name = os.environ.get("CXX") or "g++"
    compiler = shutil.which(name)
    if compiler is None:
        raise UnusableError(f"{name} is not there")
    print(f"mlpgpu: compiling {what} for this processor (kept in {cache})", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as folder:
        source, made, said = (Path(folder, f"{what}.{kind}") for kind in ("cpp", "so", "json"))
        source.write_text(text, encoding="utf-8")
        command = [compiler, *options, *(f"-I{each}" for each in folders), str(source), "-o", str(made), *linked]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UnusableError(f"{compiler} took more than {BUILD_SECONDS:.0f} s") from None
        if done.returncode:
            raise UnusableError(f"{compiler}: {_first_error(done.stderr)}")
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        said.write_text(json.dumps({"sha256": digest}), encoding="utf-8")
        # Named by its hash and moved into place whole: of several processes that compile at once all are right.
        path = cache / f"{digest}.so"
        os.replace(made, path)
        os.replace(said, note)
    return path


def _noted(note: Path) -> Path | None:
    """The library that a note names, if both are whole."""
    try:
        digest = json.loads(note.read_bytes())["sha256"]
        path = note.with_name(f"{digest}.so")
        return path if hashlib.sha256(path.read_bytes()).hexdigest() == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _processor() -> str:
    """What tells processors apart whose instructions differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in kinds}))


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["it failed, and said nothing"]
    return next((line for line in lines if "error" in line), lines[0])
