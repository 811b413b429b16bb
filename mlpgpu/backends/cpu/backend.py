"""The backend: which plans it runs, and what makes their bits."""

from __future__ import annotations

import platform

import numpy as np

from ...errors import ConfigurationError, check_integer, room_for
from ...plan import Plan
from ...plan.costs import step_seconds
from ..base import MEMORY_SHARE, MOST_THREADS, Backend, Inference, Program
from ..cores import available_cores
from .blas import blas_name
from .inference import CpuInference
from .loops import loops_name
from .program import CpuProgram
from .tensor_program import TensorProgram
from .threads import thread_count, threads_of_bits

PRECISIONS = ("float32", "float32-ieee", "float64")
SMALLER = "a smaller batch_size, fewer streams or narrower layers take less"


class CpuBackend(Backend):
    """Runs plans with NumPy on the host, in float32 or float64."""

    name = "cpu"
    prediction_rows = 8192  # or fewer, so that a call's widest array has no more than inference.CALL_BYTES

    def check(self, plan: Plan) -> None:
        if plan.precision not in PRECISIONS:
            expected = "one of " + ", ".join(PRECISIONS)
            raise ConfigurationError("precision on the cpu backend", expected=expected, got=plan.precision)
        if plan.replicas != 1:
            raise ConfigurationError("replicas on the cpu backend", expected=1, got=plan.replicas)

    def compile(self, plan: Plan, *, threads: int | None = None, memory_share: float = MEMORY_SHARE) -> Program:
        self.check(plan)
        count = _thread_count(plan, threads)
        with room_for(f"a batch_size of {plan.capacity} rows in {plan.shards} shards", SMALLER):
            return CpuProgram(plan, count) if plan.tensor is None else TensorProgram(plan, count)

    def infer(self, plan: Plan) -> Inference:
        self.check(plan)
        with room_for(f"a batch_size of {plan.capacity} rows", SMALLER):
            return CpuInference(plan)

    def step_seconds(self, plan: Plan, *, threads: int | None = None) -> float | None:
        return step_seconds(plan, _thread_count(plan, threads), available_cores())

    def fingerprint(self, plan: Plan, *, threads: int | None = None) -> dict[str, str | int]:
        in_ranks = {"ranks": plan.ranks} if plan.reduction == "fast" else {}
        return {
            **in_ranks,
            "backend": self.name,
            "machine": platform.machine(),
            "numpy": np.__version__,
            "blas": blas_name(),
            "loops": loops_name(plan.dtype),
            "threads": threads_of_bits(plan, _thread_count(plan, threads)),
        }


def _thread_count(plan: Plan, threads: int | None) -> int:
    return thread_count(plan) if threads is None else check_integer("threads", threads, least=1, limit=MOST_THREADS)
