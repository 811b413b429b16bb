"""What a program on a card decides before it touches one."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.run.arrays import check_room
from mlpgpu.backends.cuda.run.primitives import grid_over
from mlpgpu.backends.cuda.run.state import DeviceState
from mlpgpu.errors import BackendError
from mlpgpu.plan import Plan


def arrays_of(
    layers: list[mg.layers.Layer], rows: int, arch: str = "sm_75", shards: int = 1
) -> tuple[Plan, dict[str, int]]:
    """A plan, and the bytes of its arrays; nothing is allocated."""
    network = mg.Network(layers, seed=1)
    plan = network.lower(capacity=rows, loss="squared_error", optimizer=mg.Adam(0.1), shards=shards)
    assert network.is_new
    return plan, lower(plan, multiprocessors=132, source="float32", arch=arch).bytes


def card(free: int) -> Any:
    """All that is asked of a card: how much of its memory is left."""
    return SimpleNamespace(free_bytes=free, index=0)


def test_too_many_rows_say_how_many_fit() -> None:
    plan, sizes = arrays_of([mg.Dense(10, 1000)], 100_000)
    with pytest.raises(
        BackendError, match=r"memory of GPU 0.*100,000,000 bytes.*at most about ([\d,]+) rows"
    ) as caught:
        check_room(plan, card(100_000_000), sizes)
    fits = int(str(caught.value).rsplit("about ", 1)[1].split(" rows")[0].replace(",", ""))
    for rows, fit in ((fits * 9 // 10, True), (fits * 11 // 10, False)):
        plan, sizes = arrays_of([mg.Dense(10, 1000)], rows)
        with nullcontext() if fit else pytest.raises(BackendError):
            check_room(plan, card(100_000_000), sizes)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_too_many_parameters_say_how_many_fit(arch: str) -> None:
    """Layer by layer, or as a stack, whose weights are too many for the card too."""
    layers = [mg.LocallyConnected(300_000 - 28 * k, 29) for k in range(100)]
    plan, sizes = arrays_of(list(layers), 1, arch)
    with pytest.raises(BackendError, match=r"parameters \(.*of the 8\d\d,\d{3},\d{3} parameters fit\)$"):
        check_room(plan, card(10_000_000_000), sizes)


def test_cards_can_have_parts_of_what_one_does_not_hold() -> None:
    layers: list[mg.layers.Layer] = [mg.Dense(65_536, 65_536, "relu"), mg.Dense(65_536, 10)]
    plan, sizes = arrays_of(layers, 1, "sm_90a")
    network = mg.Network(layers, seed=1)
    of_two = network.lower(capacity=1, loss="squared_error", optimizer=mg.Adam(0.1), shards=2, ranks=2)
    for asked, how in ((plan, "under mpirun, a rank for each, parallel='tensor'"), (of_two, "parallel='tensor'")):
        with pytest.raises(BackendError, match=f"parameters fit; {how} gives every card a part of the network"):
            check_room(asked, card(10_000_000_000), sizes)


def test_too_many_rows_of_a_stack_say_how_many_fit() -> None:
    """Of one matrix in all layers it is the outputs that are many, where the backward pass leaves no partials."""
    layer = mg.LocallyConnected(300_000, 29)
    for rows, fits in ((32, False), (16, True)):
        plan, sizes = arrays_of([layer] * 100, rows, "sm_90a")
        assert sizes["y0 to y99.kept"] > 100 * rows * 4 * 290_000
        with (
            nullcontext()
            if fits
            else pytest.raises(BackendError, match=r"kept \(.*a batch of at most about (1[6-9]|2\d) rows fits")
        ):
            check_room(plan, card(6_000_000_000), sizes)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_too_many_rows_of_dense_layers_say_how_many_fit(arch: str, shards: int) -> None:
    """Whatever is beside the buffers: operands for tensor cores, what a step by blocks of rows leaves."""
    layers: list[mg.layers.Layer] = [mg.Dense(20, 33, "tanh"), mg.Dropout(0.2), mg.Dense(33, 5)]
    plan, sizes = arrays_of(layers, 2**31 - 1, arch, shards)
    with pytest.raises(BackendError, match=r"a batch of at most about \d+,\d{3},\d{3} rows fits"):
        check_room(plan, card(10_000_000_000), sizes)


def test_squares_are_added_up_where_parameters_lie() -> None:
    """A launch for each part; the host gets the sums of blocks, of each part its own."""
    parameters = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    held = {"parameters": parameters}
    addresses = {"parameters": parameters.ctypes.data}

    def take(sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            held[name] = np.full(size // 8, np.nan)
            addresses[name] = held[name].ctypes.data

    def launch_over(entry: Any, elements: int, values: Any) -> None:
        x, size, in_block, to = values
        assert entry.name == "squares" and elements == size
        blocks = grid_over(size)[0]
        assert (blocks - 1) * in_block < size <= blocks * in_block
        part = np.frombuffer((ctypes.c_char * (4 * size)).from_address(x), np.float32).astype(np.float64)
        sums = np.array([np.square(part[block * in_block : (block + 1) * in_block]).sum() for block in range(blocks)])
        ctypes.memmove(to, sums.ctypes.data, sums.nbytes)

    stream = SimpleNamespace(
        fill=lambda address, nbytes: ctypes.memset(address, 0, nbytes),
        download=lambda array, address: ctypes.memmove(array.ctypes.data, address, array.nbytes),
        synchronize=lambda: None,
    )
    arrays = SimpleNamespace(addresses=addresses)
    workspace: Any = SimpleNamespace(
        plan=None, device=nullcontext(), stream=stream, arrays=arrays, take=take, launch_over=launch_over
    )
    for parts in ([slice(0, 5000)], [slice(3, 700), slice(4000, 4001)], [slice(1000, 4900)]):
        expected = sum(float(np.square(parameters[part].astype(np.float64)).sum()) for part in parts)
        assert DeviceState(workspace).square_sum(parts) == pytest.approx(expected, rel=1e-12)
