"""The compiled loops: what C++ makes of ``loops.h``, once for a machine, and kept in the cache.

They are made of the structs of ``cuda/math/``, so a row of a table that has its struct there has its loop too.  Where
there is no compiler, or none that can build them, NumPy computes all; :func:`why_not` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ....activations import ACTIVATIONS
from ....losses import FORMS
from ....optimizers import OPTIMIZERS
from ...sources import cache_folder, camel, key_of, source_folder

SWITCH = "MLPGPU_LOOPS"  # set to 0, it leaves everything to NumPy
# Sums and the absence of NaN are never assumed, so no option of -ffast-math's is here that would assume them.
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
LINKED = ("-fPIC", "-shared", "-lmvec", "-lm")
BUILD_SECONDS = 120.0

# Losses whose rows need more than a sum of their outputs' terms; of the last two NumPy is as fast.
_LOSSES_OF_ROWS = "softmax_cross_entropy", "smoothed_softmax_cross_entropy", "focal"
_PLAIN = (
    *("few_rows_product", "transpose", "column_sums", "multiply", "standardize", "unstandardize", "dropout", "weigh"),
    *("softmax_cross_entropy_of_index", "softmax_cross_entropy_of_dense", "softmax", "exponential", "find_infinite"),
)


class Library:
    """The loops, by name: where each one lies, and what calls a list of them.

    Attributes:
        run: ``run(calls, count)``, of the address of so many structs Call of ``loops.h``.
        compiler: the version of what compiled them.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(os.fspath(path))
        self._addresses: dict[str, int] = {}
        self.run = self._library.run
        self.run.restype = None
        self.compiler = (ctypes.c_char_p.in_dll(self._library, "compiler").value or b"").decode()

    def address(self, name: str) -> int:
        """The address of a loop."""
        address = self._addresses.get(name)
        if address is None:
            address = ctypes.cast(getattr(self._library, f"loop_{name}"), ctypes.c_void_p).value
            assert address is not None
            self._addresses[name] = address
        return address

    def has(self, name: str) -> bool:
        """Whether there is such a loop."""
        return hasattr(self._library, f"loop_{name}")


class _Unusable(Exception):
    """The loops cannot be compiled or loaded; the message says why."""


def unit() -> str:
    """The text that is compiled: a function for each loop, of each row of the tables."""
    loops = {f"product{bits}": f"product<int{bits}_t>" for bits in (32, 64)}
    loops |= {f"row_product{bits}": f"row_product<int{bits}_t>" for bits in (32, 64)}
    loops |= {name: name for name in _PLAIN}
    for name, activation in ACTIVATIONS.items():
        loops[f"activate_{name}"] = f"activate<{camel(name)}>"
        if activation.with_slope is not None:
            loops[f"activate_with_slope_{name}"] = f"activate_with_slope<{camel(name)}>"
        else:
            loops[f"activation_backward_{name}"] = f"activation_backward<{camel(name)}>"
    loops |= {f"loss_{form}": f"loss_of_terms<{camel(form)}>" for form in FORMS if form not in _LOSSES_OF_ROWS}
    loops |= {f"update_{name}": f"update<{name}Rule>" for name in OPTIMIZERS}
    lines = [f"LOOP({name}, {function})" for name, function in loops.items()]
    return "\n".join(['#include "loops.h"', "", "namespace mlpgpu {", *lines, "}  // namespace mlpgpu", ""])


@functools.cache
def _found() -> Library | str:
    """The loops, or why there are none."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    try:
        return Library(_built())
    except (_Unusable, OSError, AttributeError) as error:
        return str(error).strip() or type(error).__name__


def library() -> Library | None:
    """The loops; None where there are none.  The first call on a machine compiles them, for about two seconds."""
    found = _found()
    return found if isinstance(found, Library) else None


def why_not() -> str | None:
    """Why there are no loops, if so."""
    found = _found()
    return found if isinstance(found, str) else None


def loops_name() -> str:
    """What computes the loops: what compiled them, or NumPy."""
    found = library()
    return "NumPy" if found is None else found.compiler


def _built() -> Path:
    """The library's file, from the cache or the compiler."""
    text, folders, cache = unit(), [Path(__file__).parent, source_folder()], cache_folder("loops")
    # Machines of different processors may share the cache's folder.
    stem = f"loops-{key_of(text, folders, [*OPTIONS, *LINKED, platform.machine(), _processor()])}"
    note = cache / f"{stem}.json"
    kept = _noted(note)
    if kept is not None:
        return kept
    name = os.environ.get("CXX") or "g++"
    compiler = shutil.which(name)
    if compiler is None:
        raise _Unusable(f"{name} is not there")
    print(f"mlpgpu: compiling loops for this processor (kept in {cache})", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as folder:
        source, made, said = Path(folder, "loops.cpp"), Path(folder, "loops.so"), Path(folder, "loops.json")
        source.write_text(text, encoding="utf-8")
        command = [compiler, *OPTIONS, *(f"-I{each}" for each in folders), str(source), "-o", str(made), *LINKED]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise _Unusable(f"{compiler} took more than {BUILD_SECONDS:.0f} s") from None
        if done.returncode:
            raise _Unusable(f"{compiler}: {_first_error(done.stderr)}")
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
