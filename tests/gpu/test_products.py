"""Products of a step run one at a time, as benchmarks/peers.py has them beside another library's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from helpers import EPS32
from kernel_cases.case import joined, wide
from kernel_cases.tensor import ERRORS

import mlpgpu as mg
from mlpgpu.backends.cuda.kernels import BFLOAT16, OF_PRECISION, padded_columns
from mlpgpu.backends.cuda.kernels.launches import Launch
from mlpgpu.backends.cuda.profile.explain import random_data
from mlpgpu.backends.cuda.profile.products import SCRATCH, Operand, Products
from mlpgpu.backends.cuda.runtime import Device
from mlpgpu.backends.cuda.select.operands import operand_format

pytestmark = pytest.mark.gpu

ROWS, WIDTHS = 384, (512, 768, 1024, 512)


def matrix(products: Products, operand: Operand) -> np.ndarray:
    if not operand.components:
        values = np.empty((operand.rows, operand.pitch), np.float32)
        products.stream.download(values, operand.address)
        products.stream.synchronize()
        return wide(values)[:, : operand.columns]
    words = np.empty((operand.components, operand.rows, operand.pitch), np.uint16)
    for number, component in enumerate(words):
        products.stream.download(component, operand.address + 2 * number * operand.component_stride)
    products.stream.synchronize()
    return joined(words)[..., : operand.columns]


def left(products: Products, launch: Launch, rows: int, columns: int) -> np.ndarray:
    """What a launch of a product alone has left, in its type."""
    is_component = any(
        "components" in name and getattr(value, "array", "") == SCRATCH for name, value in launch.values.items()
    )
    pitch = padded_columns(columns) if is_component else columns
    return matrix(products, Operand(products.address(SCRATCH), rows, columns, pitch, int(is_component)))


@pytest.mark.parametrize("precision", OF_PRECISION)
def test_products_alone_are_those_of_their_operands(device: Device, precision: str) -> None:
    if operand_format(precision, device.arch, is_large=False) is None:
        pytest.skip("needs tensor cores")  # older cards multiply on plain cores, which test_parity.py tests
    layers = [mg.Dense(k, n, "relu") for k, n in pairwise(WIDTHS)]
    layers[-1] = mg.Dense(*WIDTHS[-2:])  # whose product may end with the loss
    network = mg.Network(layers, seed=1)
    plan = network.lower(capacity=ROWS, loss="squared_error", optimizer=mg.Momentum(0.1), precision=precision)
    state = network.state(plan.optimizer)
    products = Products(plan, device, lambda program: program.load(state), random_data(plan, None))
    assert len(products.launches) == 3 + 2 + 3
    for launch in products.launches:
        alone = products.alone(launch)
        with device:
            assert products.timer(launch, 1e-4)() > 0.0 and products.timer(alone, 1e-4)() > 0.0
            a, b = (matrix(products, operand) for operand in products.operands(launch))
            if "weight" in alone.entry.name:
                a = a.T
            elif "input" in alone.entry.name:
                b = b.T
            found = left(products, alone, len(a), b.shape[1])
        reach = abs(a) @ abs(b)
        of_launch = launch.entry.operand_format
        assert of_launch is not None
        rounded = ERRORS[of_launch.struct] + 2 * (a.shape[1] + 16) * EPS32 + (2.0**-8 if of_launch == BFLOAT16 else 0.0)
        assert (abs(found - a @ b) <= rounded * reach).all(), launch.entry.name
