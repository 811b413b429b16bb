"""Plans on an NVIDIA GPU, by hand-written kernels."""

from __future__ import annotations

from ...errors import ConfigurationError
from ...plan import Plan
from ...version import __version__
from ..base import MEMORY_SHARE, Backend, Program
from .driver import Device, find_device
from .program import CudaProgram

__all__ = ["CudaBackend"]


class CudaBackend(Backend):
    """Runs plans on the card number ``index``, in float32; ``device`` is the card.

    Raises:
        BackendError: there is no such card, or nothing to reach it by.
    """

    def __init__(self, index: int = 0) -> None:
        self.name = "cuda" if index == 0 else f"cuda:{index}"
        self.device: Device = find_device(index)

    def check(self, plan: Plan) -> None:
        if plan.precision != "float32":
            raise ConfigurationError("precision on the cuda backend", expected="float32", got=plan.precision)
        if plan.replicas != 1:
            raise ConfigurationError("replicas on the cuda backend", expected=1, got=plan.replicas)

    def compile(self, plan: Plan, *, threads: int | None = None, memory_share: float = MEMORY_SHARE) -> Program:
        self.check(plan)
        return CudaProgram(plan, self.device, memory_share)

    def fingerprint(self, plan: Plan, *, threads: int | None = None) -> dict[str, str | int]:
        return {"backend": "cuda", "card": self.device.name, "mlpgpu": __version__, "threads": threads or 1}
