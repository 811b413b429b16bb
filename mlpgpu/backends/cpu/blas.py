"""How many threads BLAS may use: a limit of the whole process, which steps and predictions take turns to set.

A BLAS with another number of threads adds up in another order.  So whatever computes here holds :data:`BLAS` with the
number that its bits are made by: at once where numbers are equal, in turn where they differ, and what was found before
the first one is given back after the last.  A fork waits until nothing computes, because the child would otherwise
begin with half a step, and with locks of BLAS that nobody opens.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ...locks import GroupLock, at_fork

FORK_SECONDS = 60.0  # at most, that a fork waits for a step to end

# What OpenBLAS calls those of its kernels for x86 whose vectors have less than 64 bytes.  It may run them on processors
# that have longer ones: a variable of the environment, OPENBLAS_CORETYPE, can ask for them, and older versions take
# processors that they do not know for the last ones that they do.
SHORT_VECTORS = {
    "Katmai", "Coppermine", "Northwood", "Prescott", "Banias", "Atom", "Core2", "Penryn", "Dunnington", "Nehalem",
    "Sandybridge", "Haswell", "Athlon", "Opteron", "Opteron_SSE3", "Barcelona", "Bobcat", "Bulldozer", "Piledriver",
    "Steamroller", "Excavator", "Zen",
}  # fmt: skip

# What OpenBLAS calls its functions in the builds of NumPy, conda and distributions.
_AFFIXES = tuple(itertools.product(("", "scipy_"), ("", "64_", "_64")))


@dataclass(frozen=True)
class Products:
    """Where BLAS's ``gemm`` and ``gemv`` lie of one type of numbers, and how many bits its integers have."""

    gemm: int
    gemv: int
    bits: int


@dataclass(frozen=True)
class Library:
    """A BLAS that NumPy's products may run in: its number of threads is read by ``get`` and set by ``set``.

    Attributes:
        has_short_vectors: whether it is known to have vectors of less than 64 bytes on this processor.
    """

    get: Callable[[], int]
    set: Callable[[int], object]
    name: str
    products: Mapping[np.dtype, Products] = field(default_factory=dict)
    has_short_vectors: bool = False


class BlasThreads(GroupLock):
    """The lock on BLAS's number of threads, which is the key."""

    def __init__(self) -> None:
        super().__init__()
        self._libraries: list[Library] | None = None
        # With what was set when nobody held the lock, and what is since, which may be less than what was asked for.
        self._found: list[tuple[Library, int, int]] = []
        self._forking = 0  # the thread that is about to fork

    @property
    def libraries(self) -> list[Library]:
        """The libraries, searched for once: NumPy has loaded its own before us."""
        if self._libraries is None:
            loaded = [found for found in ThreadpoolController().lib_controllers if found.user_api == "blas"]
            # SciPy brings a BLAS of its own, in which NumPy's products do not run.
            of_numpy = [found for found in loaded if "numpy" in found.filepath] or loaded
            self._libraries = [_library(found) for found in of_numpy]
        return self._libraries

    def products(self, dtype: np.dtype) -> Products | None:
        """The functions that NumPy's products of such numbers are made by, where they are known."""
        return self.libraries[0].products.get(dtype) if len(self.libraries) == 1 else None

    @property
    def has_short_vectors(self) -> bool:
        """Whether products that it makes are known to have vectors of less than 64 bytes."""
        return len(self.libraries) == 1 and self.libraries[0].has_short_vectors

    def begin(self, key: Hashable) -> None:
        self._found.clear()
        if key is None:  # nothing is computed
            return
        assert isinstance(key, int)
        for library in self._libraries or self.libraries:
            found = library.get()
            if found != key:
                library.set(key)
            self._found.append((library, found, library.get() if found != key else key))

    def end(self) -> None:
        is_changed = False
        for library, found, limit in self._found:
            if library.get() != limit:
                is_changed = True  # by somebody who means it, so that it stays
            elif found != limit:
                library.set(found)
        if is_changed:
            message = "the threads of BLAS were set by somebody else during a step: its bits may differ in another run"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def pause(self) -> None:
        """Before a fork: wait for what computes, and let nothing begin."""
        # A signal's handler may fork in the middle of a step.
        if not self.is_held_here and self.acquire(seconds=FORK_SECONDS):
            self._forking = get_ident()

    def go_on(self) -> None:
        """After a fork, in either process."""
        if self._forking == get_ident():
            self._forking = 0
            self.release()


def _library(found: Any) -> Library:
    """One of threadpoolctl's libraries.

    Its own way to set OpenBLAS's threads takes ten times as long, and does nothing in all threads but one.
    """
    name = " ".join(str(value) for value in (found.internal_api, found.version, getattr(found, "architecture", None)))
    if found.internal_api == "openblas":
        library = ctypes.CDLL(found.filepath)
        for prefix, suffix in _AFFIXES:
            get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            if get is not None:
                set_ = getattr(library, f"{prefix}openblas_set_num_threads{suffix}")
                is_short = getattr(found, "architecture", None) in SHORT_VECTORS
                return Library(get, set_, name, _products(library, prefix, suffix), is_short)
    return Library(found.get_num_threads, found.set_num_threads, name)


def _products(library: ctypes.CDLL, prefix: str, suffix: str) -> dict[np.dtype, Products]:
    """Those of OpenBLAS, by the type of numbers."""
    described = getattr(library, f"{prefix}openblas_get_config{suffix}", None)
    if described is None:
        return {}
    described.restype = ctypes.c_char_p
    bits, found = 64 if b"USE64BITINT" in (described() or b"") else 32, {}
    for letter, dtype in ("s", np.float32), ("d", np.float64):
        functions = (getattr(library, f"{prefix}cblas_{letter}{name}{suffix}", None) for name in ("gemm", "gemv"))
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions if each is not None]
        if len(addresses) == 2:
            gemm, gemv = addresses
            found[np.dtype(dtype)] = Products(gemm, gemv, bits)
    return found


BLAS = BlasThreads()
at_fork(before=BLAS.pause, after_in_parent=BLAS.go_on, after_in_child=BLAS.go_on)


def blas_name() -> str:
    """What NumPy's products run in: library, version and, of OpenBLAS, the processors that it is made for."""
    return ", ".join(sorted({library.name for library in BLAS.libraries}))
