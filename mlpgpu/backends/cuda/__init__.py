"""Plans on an NVIDIA GPU, by hand-written kernels."""

from __future__ import annotations

from ...errors import ConfigurationError
from ...plan import Plan
from ...ranks import local_rank, rank, ranks
from ...version import __version__
from ..base import MEMORY_SHARE, Backend, Inference, Program
from .inference.inference import CudaInference
from .profile.predicted_step import step_seconds
from .run.card_arrays import open_card_array
from .run.program import CudaProgram
from .runtime import Device, count_devices, find_device
from .select.inference import most_rows
from .tensor_program import CudaTensorProgram

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
    if plan.tensor is not None and plan.reduction != "ordered":
        what = "reduction of parallel='tensor' on the cuda backend"
        raise ConfigurationError(what, expected="'ordered'", got=repr(plan.reduction))
    if plan.reduction == "fast":
        expected = "'ordered' or 'atomic' for several ranks"
        raise ConfigurationError("reduction on the cuda backend", expected=expected, got="'fast'")


def own_card() -> int:
    """The number of this process's card among those of its host: where several ranks train, each has its own.

    Where a launcher shows each rank one card alone, it is that.

    Raises:
        ConfigurationError: there are fewer cards than ranks on this host.
    """
    if ranks() == 1:
        return 0
    cards = count_devices()
    own = local_rank() if cards > 1 else 0
    if own >= cards:
        hint = "start as many ranks on a host as it has cards; CUDA_VISIBLE_DEVICES may hide some"
        what = f"cards of rank {rank()}'s host"
        raise ConfigurationError(what, expected=f"{own + 1} or more, one for each rank", got=cards, hint=hint)
    return own


class CudaBackend(Backend):
    """Runs plans on the card number ``index``, in any precision but float64; ``device`` is the card.

    Without a number it is the first card, or of several ranks each one's own.

    Raises:
        BackendError: there is no such card, or nothing to reach it by.
        ConfigurationError: there are fewer cards than ranks on this host.
    """

    prediction_rows = most_rows()

    def __init__(self, index: int | None = None) -> None:
        self.name = f"cuda:{index}" if index else "cuda"
        index = own_card() if index is None else index
        self.device: Device = find_device(index)
        self.card = index

    def check(self, plan: Plan) -> None:
        check_plan(plan, self.device.name, self.device.compute_capability)

    def compile(self, plan: Plan, *, threads: int | None = None, memory_share: float = MEMORY_SHARE) -> Program:
        self.check(plan)
        made = CudaProgram if plan.tensor is None else CudaTensorProgram
        return made(plan, self.device, memory_share)

    def infer(self, plan: Plan) -> Inference:
        self.check(plan)
        return CudaInference(plan, self.device)

    def step_seconds(self, plan: Plan, *, threads: int | None = None) -> float | None:
        return step_seconds(plan, self.device.arch)

    def fingerprint(self, plan: Plan, *, threads: int | None = None) -> dict[str, str | int]:
        return {"backend": "cuda", "card": self.device.name, "mlpgpu": __version__, "threads": threads or 1}
