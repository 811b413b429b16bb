"""The card that tests run on, and its kernels, compiled once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry
from mlpgpu.backends.cuda.run import program
from mlpgpu.backends.cuda.runtime import Device, compiler, find_device
from mlpgpu.backends.cuda.runtime.compiler import Cubin
from mlpgpu.errors import BackendError


@pytest.fixture(scope="session")
def device() -> Device:
    """Card 0.  Without one the tests skip, or with ``MLPGPU_REQUIRE_GPU=1`` fail: there, nobody would notice."""
    try:
        return find_device(0)
    except BackendError as error:
        if os.environ.get("MLPGPU_REQUIRE_GPU") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cubins(device: Device) -> dict[str, Cubin]:
    """All kernels of the table that the card can run, by header."""
    runnable = (entry for entry in kernels.all_entries() if entry.runs_on(device.arch))
    return compiler.compile_units(kernels.units(runnable), device.arch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans train launch by launch, also those that could inside one kernel."""
    monkeypatch.setattr(program, "choose_kernel", lambda *_, **__: "a test asks for it")


@pytest.fixture(scope="module")
def compiled_once(cubins: dict[str, Cubin]) -> Iterator[None]:
    """In this process every plan takes its kernels from one compilation of all of them, save persistent ones."""
    compile_units = compiler.compile_units

    def take(units: Mapping[str, Sequence[Entry]], arch: str, **options: Any) -> dict[str, Cubin]:
        own = {header: entries for header, entries in units.items() if header not in cubins}
        return {header: cubins[header] for header in units if header in cubins} | compile_units(own, arch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_units", take)
        yield
