"""The environment of a comparison on the CPU: as libraries find it where nobody set anything.

A machine may have variables set that hold one library down to older instructions, so that its bits are those of another
machine: then NumPy and scikit-learn would be measured at half of what the processor does, beside others at all of it.
"""

from __future__ import annotations

import os
import sys

# Which instructions a library may use, or for which processor it is made: OpenBLAS, NVPL, MKL, oneDNN, PyTorch, NumPy.
LIMITS = (
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "NVPL_BLAS_DEBUG_CPU_TYPE", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip


def begin_without_limits() -> None:
    """Start this script anew without those variables, if some are set: libraries read them when they are loaded."""
    found = [f"{name}={os.environ.pop(name)}" for name in LIMITS if name in os.environ]
    if found:
        print(f"measured without {', '.join(found)}", file=sys.stderr, flush=True)
        os.execv(sys.executable, sys.orig_argv)
