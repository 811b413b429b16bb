"""The products of mlpgpu's largest network, launch by launch, beside cuBLAS's of the very same numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peers_torch import products_in

from mlpgpu import bench
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.backends.cuda.profile.costs import flops
from mlpgpu.backends.cuda.profile.explain import random_data
from mlpgpu.backends.cuda.profile.products import Operand, Products

TURN_SECONDS = 5e-3  # about what a turn at one product takes


@dataclass(frozen=True)
class Kernel:
    """A product that a step launches, measured three ways in turns; times are medians of rounds.

    Attributes:
        microseconds: of the launch as a step has it, with its whole epilogue.
        alone_microseconds: of the same kernel with an epilogue that only stores C: in bfloat16 in that precision, but
            gradients of weights in float32.
        cublas_microseconds: of cuBLAS's product of the same numbers, in the order that they are stored in.
    """

    workload: str
    precision: str
    operation: str
    kernel: str
    form: str
    gigaflop: float
    microseconds: float
    alone_microseconds: float
    cublas_microseconds: float

    def __str__(self) -> str:
        times = self.microseconds, self.alone_microseconds, self.cublas_microseconds
        as_launched, alone, cublas = (1e3 * self.gigaflop / microseconds for microseconds in times)  # TFLOP/s
        return (
            f"{self.precision:9} {self.operation:14} {self.kernel:50} {self.microseconds:9,.1f} µs, alone "
            f"{self.alone_microseconds:9,.1f}, cuBLAS {self.cublas_microseconds:9,.1f}: TFLOP/s {as_launched:6.1f} "
            f"{alone:6.1f} {cublas:6.1f}, {as_launched / cublas:.3f} and {alone / cublas:.3f} of cuBLAS"
        )


# Whether the first and the second operand are transposed.
FORMS = {"backward_input": (False, True), "backward_weight": (True, False), "forward": (False, False)}


def kernels(key: str, precision: str, backend: CudaBackend, rounds: int) -> list[Kernel]:
    """Each product that a step launches: all of them and cuBLAS's take turns, so that the card is as warm for each."""
    trainer = bench.WORKLOADS[key].trainer(backend="cuda", precision=precision)
    state = trainer.network.state(trainer.plan.optimizer)
    device, data = backend.device, random_data(trainer.plan, None)
    products = Products(trainer.plan, device, lambda program: program.load(state), data)
    running: dict[tuple[int, str], Callable[[], float]] = {}
    launches = products.launches
    for place, launch in enumerate(launches):
        form = bench.product_form(launch.entry.name)
        assert form is not None
        running[place, "as launched"] = products.timer(launch, TURN_SECONDS)
        running[place, "alone"] = products.timer(products.alone(launch), TURN_SECONDS)
        a, b = (_matrix(operand) for operand in products.operands(launch))
        running[place, "cuBLAS"] = _cublas_turn(form, a, b, precision)
    seconds: dict[tuple[int, str], list[float]] = {turn: [] for turn in running}
    for count in range(rounds + 1):  # the first one warms the card
        for turn, run in running.items():
            took = run()
            if count:
                seconds[turn].append(took)
    found = []
    for place, launch in enumerate(launches):
        name = launch.entry.name
        times = (1e6 * statistics.median(seconds[place, turn]) for turn in ("as launched", "alone", "cuBLAS"))
        gigaflop = 1e-9 * flops(launch, trainer.plan.capacity)
        found.append(Kernel(key, precision, launch.operation, name, str(bench.product_form(name)), gigaflop, *times))
    return found


class _CardArray:
    """Memory of the card as PyTorch takes it over."""

    def __init__(self, operand: Operand) -> None:
        self.__cuda_array_interface__ = {
            "shape": (max(1, operand.components), operand.rows, operand.pitch),
            "strides": None if operand.components < 2 else (2 * operand.component_stride, 2 * operand.pitch, 2),
            "typestr": "<i2" if operand.components else "<f4",
            "data": (operand.address, False),
            "version": 2,
        }


def _matrix(operand: Operand) -> Any:
    """A copy of a matrix that our product multiplies; of a split operand in bfloat16, its nearest bfloat16 alone."""
    matrix = torch.as_tensor(_CardArray(operand), device="cuda")[0, :, : operand.columns].clone()
    return matrix.view(torch.bfloat16) if operand.components else matrix


def _cublas_turn(form: str, a: Any, b: Any, precision: str) -> Callable[[], float]:
    """A function that runs cuBLAS's product, through PyTorch, for a turn, and returns the seconds of one product."""
    is_first, is_second = FORMS[form]
    left, right = a.T if is_first else a, b.T if is_second else b
    product = partial(
        torch.matmul, left, right, out=torch.empty(len(left), right.shape[1], device="cuda", dtype=a.dtype)
    )

    def run(repeats: int = 0) -> float:
        with products_in(precision):
            return _cuda_seconds(product, repeats or count)

    count = max(1, round(TURN_SECONDS / run(2)))
    return run


def _cuda_seconds(run: Callable[[], object], repeats: int) -> float:
    """The time of one call on the card, by events around ``repeats`` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats
