"""The compiled loops: what C++ makes of ``loops.h``, once for a machine and a type of numbers, and kept in the cache.

They are made of the structs of ``cuda/math/``, so a row of a table that has its struct there has its loop too.  Where
there is no compiler, or none that can build them, NumPy computes all; :func:`why_not` says why.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import numpy as np

from ....activations import ACTIVATIONS
from ....losses import FORMS
from ....optimizers import OPTIMIZERS
from ...host_library import UnusableError, built
from ...sources import camel, native_folder, source_folder

# A compiler that could take 16 floats at a time prefers 8, as the first processors that can slow down for them: steps
# of an Intel Xeon of the fourth generation take 0.7 to 1.0 of the time by 16.
_WIDEST = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
# For some processors GCC fuses multiplications with additions in some tiles and not in others, whose bits then differ:
# this has it fuse them everywhere.
_FUSED = ("--param", "avoid-fma-max-bits=0")
# Sums and the absence of NaN are never assumed, so no option of -ffast-math's is here that would assume them.
OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", *_WIDEST, *_FUSED),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-pthread"),
)
REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}  # the types of numbers that loops are made for
LINKED = ("-fPIC", "-shared", "-lmvec", "-lm")

# Losses whose rows need more than a sum of their outputs' terms; of the last two NumPy is as fast.
_LOSSES_OF_ROWS = "softmax_cross_entropy", "smoothed_softmax_cross_entropy", "focal"
_PLAIN = (
    *("unpacked_product", "transpose", "column_sums", "multiply", "standardize", "unstandardize", "dropout", "weigh"),
    *("softmax_cross_entropy_of_index", "softmax_cross_entropy_of_dense", "softmax", "exponential", "find_infinite"),
    *("local_forward", "local_gradient", "local_input_gradient", "copy_rows"),
    *("gather", "standardize_inputs", "weigh_rows", "dropout_step", "total", "square_sum", "clip", "add_parts"),
)


class Library:
    """The loops of one type of numbers, by name: where each one lies, and what calls a list of them.

    Attributes:
        run: ``run(calls, count, step)``, of the address of so many structs Call of ``loops.h``.
        run_steps: ``run_steps(steps, count, parts, helpers, awake_nanoseconds, finished)``, of the addresses of so many
            structs TrainingStep of ``steps.h``, and of a number.
        compiler: the version of what compiled them.
        vector_bytes: of a vector register of the processor that they were compiled for.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(os.fspath(path))
        self._addresses: dict[str, int] = {}
        self.run, self.run_steps = self._library.run, self._library.run_steps
        self.run.restype = self.run_steps.restype = None
        self.run_steps.argtypes = ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p
        self.vector_bytes = ctypes.c_int.in_dll(self._library, "vector_bytes").value
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


def unit() -> str:
    """The text that is compiled: a function for each loop, of each row of the tables."""
    loops = {f"product{bits}": f"product<int{bits}_t>" for bits in (32, 64)}
    loops |= {f"vector_product{bits}": f"vector_product<int{bits}_t>" for bits in (32, 64)}
    loops |= {name: name for name in _PLAIN}
    for name, activation in ACTIVATIONS.items():
        loops[f"activate_{name}"] = f"activate<{camel(name)}>"
        if activation.with_slope is not None:
            loops[f"activate_with_slope_{name}"] = f"activate_with_slope<{camel(name)}>"
        else:
            loops[f"activation_backward_{name}"] = f"activation_backward<{camel(name)}>"
    loops |= {f"loss_{form}": f"loss_of_terms<{camel(form)}>" for form in FORMS if form not in _LOSSES_OF_ROWS}
    for name in OPTIMIZERS:
        loops |= {f"update_{name}": f"update<{name}Rule>", f"update_step_{name}": f"update_step<{name}Rule>"}
    lines = [f"LOOP({name}, {function})" for name, function in loops.items()]
    return "\n".join(['#include "steps.h"', "", "namespace mlpgpu {", *lines, "}  // namespace mlpgpu", ""])


@functools.cache
def _found(dtype: np.dtype) -> Library | str:
    """The loops, or why there are none."""
    if dtype not in REAL:
        return f"loops are made for {' and '.join(map(str, REAL))}, not for {dtype}"
    try:
        folders = [Path(__file__).parent, native_folder(), source_folder()]
        return Library(built("loops", unit(), folders, [*OPTIONS, f"-DMLPGPU_REAL={REAL[dtype]}"], LINKED))
    except (UnusableError, OSError, AttributeError) as error:
        return str(error).strip() or type(error).__name__


def library(dtype: np.dtype) -> Library | None:
    """The loops over such numbers; None where there are none.

    The first call on a machine compiles them, for two to four seconds.
    """
    found = _found(dtype)
    return found if isinstance(found, Library) else None


def has_loop(dtype: np.dtype, name: str) -> bool:
    """Whether there is such a loop."""
    found = library(dtype)
    return found is not None and found.has(name)


def has_long_vectors(dtype: np.dtype) -> bool:
    """Whether there are loops, over vectors of 64 bytes."""
    found = library(dtype)
    return found is not None and found.vector_bytes == 64


def why_not(dtype: np.dtype) -> str | None:
    """Why there are no loops, if so."""
    found = _found(dtype)
    return found if isinstance(found, str) else None


def loops_name(dtype: np.dtype) -> str:
    """What computes the loops: what compiled them, or NumPy."""
    found = library(dtype)
    return "NumPy" if found is None else found.compiler
