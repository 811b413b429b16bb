"""Plans on an NVIDIA GPU, by hand-written kernels."""

from __future__ import annotations

from ...errors import ConfigurationError
from ...plan import Plan
from ...version import __version__
from ..base import MEMORY_SHARE, Backend, Inference, Program
from .inference.inference import CudaInference
from .run.card_arrays import open_card_array
from .run.program import CudaProgram
from .runtime import Device, find_device
from .select.inference import most_rows

__all__ = ["CudaBackend", "check_plan", "open_card_array"]

PRECISIONS = ("float32", "float32-ieee", "tf32", "bfloat16")
NEEDS_TENSOR_CORES, TENSOR_CORES = {"tf32", "bfloat16"}, (8, 0)


def check_plan(plan: Plan, card: str, compute_capability: tuple[int, int]) -> None:
    """Raise a ConfigurationError unless a card of this name and capability can run a plan."""
    if plan.precision == "float64":
        raise ConfigurationError(
            "precision on the cuda backend", expected="one of " + ", ".join(PRECISIONS), got="float64"
        )
    if plan.precision in NEEDS_TENSOR_CORES and compute_capability < TENSOR_CORES:
        expected = f"{plan.precision} on compute capability {'.'.join(map(str, TENSOR_CORES))} or later"
        got = f"{card}, of {'.'.join(map(str, compute_capability))}"
        raise ConfigurationError("precision on the cuda backend", expected=expected, got=got)
    if plan.replicas != 1:
        raise ConfigurationError("replicas on the cuda backend", expected=1, got=plan.replicas)
    if plan.tensor is not None:
        hint = "backend='cpu' trains it; parallel='none' trains a whole network on each card"
        expected, got = "a whole network", f"one in {plan.tensor.parts.count} parts, by parallel='tensor'"
        raise ConfigurationError("plan on the cuda backend", expected=expected, got=got, hint=hint)
    if plan.ranks != 1:
        hint = "backend='cpu' trains one network on all of them, parallel='none' a network on each"
        raise ConfigurationError("ranks on the cuda backend", expected=1, got=plan.ranks, hint=hint)


class CudaBackend(Backend):
    """Runs plans on the card number ``index``, in any precision but float64; ``device`` is the card.

    Raises:
        BackendError: there is no such card, or nothing to reach it by.
    """

    prediction_rows = most_rows()

    def __init__(self, index: int = 0) -> None:
        self.name = "cuda" if index == 0 else f"cuda:{index}"
        self.device: Device = find_device(index)
        self.card = index

    def check(self, plan: Plan) -> None:
        check_plan(plan, self.device.name, self.device.compute_capability)

    def compile(self, plan: Plan, *, threads: int | None = None, memory_share: float = MEMORY_SHARE) -> Program:
        self.check(plan)
        return CudaProgram(plan, self.device, memory_share)

    def infer(self, plan: Plan) -> Inference:
        self.check(plan)
        return CudaInference(plan, self.device)

    def fingerprint(self, plan: Plan, *, threads: int | None = None) -> dict[str, str | int]:
        return {"backend": "cuda", "card": self.device.name, "mlpgpu": __version__, "threads": threads or 1}
