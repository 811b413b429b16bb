"""Backends by name.  This is the only place that names them, and none is imported before it is asked for."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from ..datasets.interchange import CardArray, set_reader
from ..errors import BackendError, ConfigurationError, lookup
from ..plan import Plan
from .base import MEMORY_SHARE as MEMORY_SHARE
from .base import MOST_BINS as MOST_BINS
from .base import MOST_ROWS as MOST_ROWS
from .base import MOST_SHARDS as MOST_SHARDS
from .base import MOST_THREADS as MOST_THREADS
from .base import Backend as Backend
from .base import Histogram as Histogram
from .base import Inference as Inference
from .base import Program as Program
from .base import Sampling as Sampling
from .base import Source as Source
from .base import State as State
from .base import StepLog as StepLog
from .base import square_sum as square_sum
from .base import target_values as target_values

BACKENDS = ("auto", "cpu", "cuda")

_CARD = re.compile(r"cuda:(\d+)")
_told: list[str] = []  # why "auto" is the CPU, once said


def _open_on_card(what: str, x: Any) -> CardArray:
    """See :func:`mlpgpu.datasets.interchange.open_on_card`."""
    from .cuda import open_card_array

    return open_card_array(what, x)


set_reader(_open_on_card)


def choose_backend(name: str, plan: Plan) -> Backend:
    """The backend ``name``, if it can run ``plan``; ``"auto"`` is then one that can.

    Raises:
        ConfigurationError: the backend named cannot run the plan.
        and as :func:`get_backend` does.
    """
    backend = get_backend(name)
    try:
        backend.check(plan)
    except ConfigurationError:
        has_ranks = plan.ranks > 1 or plan.tensor is not None
        if name != "auto" or has_ranks:  # which ranks compute on a card or here is no detail
            raise
        backend = get_backend("cpu")
        backend.check(plan)
    return backend


def get_backend(name: str) -> Backend:
    """The backend ``name``: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` for another card, or ``"auto"``.

    ``"auto"`` is what ``$MLPGPU_BACKEND`` names, if it is set; else the first card if there is one that
    can be used, and the CPU otherwise.  A line on standard error then says why, once.

    Raises:
        DtypeError, UnknownNameError: there is no backend of that name.
        BackendError: a card is asked for, and cannot be used.
    """
    from .cpu import CpuBackend

    if isinstance(name, str) and name == "auto":
        name = os.environ.get("MLPGPU_BACKEND", name)
    card = _CARD.fullmatch(name) if isinstance(name, str) else None
    if card is None and lookup("backend", name, BACKENDS) == "cpu":
        return CpuBackend()
    from .cuda import CudaBackend

    if name != "auto":
        return CudaBackend(int(card[1]) if card else None)
    try:
        return CudaBackend()
    except BackendError as error:
        if not _told:
            _told.append(str(error))
            print(f"mlpgpu: computing on the CPU; {error}", file=sys.stderr)
        return CpuBackend()
