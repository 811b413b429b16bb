"""PyCUDA, cuda-bindings and nccl4py, where they are installed.  This is the one module that imports them.

PyCUDA owns the context, memory, streams and modules, and launches kernels.  cuda-bindings does what PyCUDA cannot:
graphs, texture objects, tensor maps, cooperative launches, and launches that overlap the one before.  nccl4py sends
from card to card, and is imported where several ranks train on cards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ....errors import MissingPackageError

__all__ = ["CallError", "call", "cu", "drv", "load_nccl", "missing", "pycuda", "version_text"]

missing: ImportError | None = None  # why they could not be imported
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyCUDA warns before it raises the same as an error
        import pycuda
        import pycuda.driver as drv
    from cuda.bindings import driver as cu
except ImportError as error:
    # Without its traceback, which would keep the variables of whoever was calling alive.
    missing, pycuda, drv, cu = error.with_traceback(None), None, None, None


class CallError(Exception):
    """A call of cuda-bindings failed."""


def call(function: Callable[..., tuple], *arguments: object) -> Any:
    """Call a function of cuda-bindings; returns its result, a list of them if there are several, or None."""
    status, *results = function(*arguments)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise CallError(f"{function.__name__} failed: {status.name}")
    return results if len(results) > 1 else results[0] if results else None


def version_text(number: int) -> str:
    """A version of CUDA as the driver states it: 13000 is ``13.0``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def load_nccl() -> Any:
    """nccl4py's functions, which are those of NCCL's library.

    Raises:
        MissingPackageError: nccl4py is not installed, or finds no library.
    """
    try:
        from nccl.bindings import nccl

        nccl.get_version()  # which loads the library
    except (ImportError, OSError, RuntimeError) as error:
        hint = 'pip install "mlpgpu[nccl]"'
        what = "several cards"
        raise MissingPackageError(what, expected="nccl4py and NCCL's library", got=error, hint=hint) from error
    return nccl
