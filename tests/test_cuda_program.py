"""What a program on a card decides before it touches one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mlpgpu as mg
from mlpgpu.backends.cuda.lowering import lower
from mlpgpu.backends.cuda.program import CudaProgram
from mlpgpu.errors import BackendError


def program_of(
    layers: list[mg.layers.Layer], rows: int, free: int, arch: str = "sm_75"
) -> tuple[CudaProgram, dict[str, int]]:
    """On a card with so much memory left; nothing is allocated."""
    network = mg.Network(layers, seed=1)
    plan = network.lower(capacity=rows, loss="squared_error", optimizer=mg.Adam(0.1))
    program = CudaProgram.__new__(CudaProgram)
    program._plan = plan
    program._device = SimpleNamespace(free_bytes=free, index=0)  # type: ignore[assignment]  # all that is asked of a card
    assert network.is_new
    return program, lower(plan, multiprocessors=132, source="float32", arch=arch).bytes


def test_too_many_rows_say_how_many_fit() -> None:
    program, sizes = program_of([mg.Dense(10, 1000)], 100_000, 100_000_000)
    with pytest.raises(
        BackendError, match=r"memory of GPU 0.*100,000,000 bytes.*at most about ([\d,]+) rows"
    ) as caught:
        program._check_room(sizes)
    fits = int(str(caught.value).rsplit("about ", 1)[1].split(" rows")[0].replace(",", ""))
    for rows, fit in ((fits * 9 // 10, True), (fits * 11 // 10, False)):
        program, sizes = program_of([mg.Dense(10, 1000)], rows, 100_000_000)
        if fit:
            program._check_room(sizes)
        else:
            with pytest.raises(BackendError):
                program._check_room(sizes)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_too_many_parameters_say_how_many_fit(arch: str) -> None:
    """Layer by layer, or as a stack, whose weights are too many for the card too."""
    layers = [mg.LocallyConnected(300_000 - 28 * k, 29) for k in range(100)]
    program, sizes = program_of(list(layers), 1, 10_000_000_000, arch)
    with pytest.raises(BackendError, match=r"parameters \(.*of the 8\d\d,\d{3},\d{3} parameters fit"):
        program._check_room(sizes)


def test_too_many_rows_of_a_stack_say_how_many_fit() -> None:
    """Of one matrix in all layers it is the outputs that are many, where the way back leaves no partials."""
    layer = mg.LocallyConnected(300_000, 29)
    for rows, fits in ((32, False), (16, True)):
        program, sizes = program_of([layer] * 100, rows, 6_000_000_000, "sm_90a")
        assert sizes["y0 to y99.kept"] > 100 * rows * 4 * 290_000
        if fits:
            program._check_room(sizes)
        else:
            with pytest.raises(BackendError, match=r"kept \(.*a batch of at most about (1[6-9]|2\d) rows fits"):
                program._check_room(sizes)
