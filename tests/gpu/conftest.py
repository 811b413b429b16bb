"""The card that tests run on, and its kernels, compiled once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from turns import turn

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry
from mlpgpu.backends.cuda.run import program
from mlpgpu.backends.cuda.runtime import Device, compiler, find_device
from mlpgpu.backends.cuda.runtime.compiler import Cubin
from mlpgpu.errors import BackendError

PIECE_ENTRIES = 8  # few enough for all cores to have work until the last is compiled


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
def pieces(device: Device) -> dict[str, list[Entry]]:
    """All kernels of the table that the card can run, in the pieces of units that are compiled one by one."""
    runnable = (entry for entry in kernels.all_entries() if entry.runs_on(device.arch))
    return {
        f"{unit} {first}": entries[first : first + PIECE_ENTRIES]
        for unit, entries in kernels.units(runnable).items()
        for first in range(0, len(entries), PIECE_ENTRIES)
    }


@pytest.fixture(scope="session")
def cubins(device: Device, pieces: dict[str, list[Entry]]) -> dict[str, Cubin]:
    """What the pieces are compiled to."""
    return compiler.compile_units(pieces, device.arch)


@pytest.fixture(autouse=True)
def a_turn_on_the_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is marked ``alone`` has the card to itself, however many processes run tests."""
    folder = Path(tempfile.gettempdir()) / f"mlpgpu-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with turn(folder, alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans train launch by launch, also those that could inside one kernel."""
    monkeypatch.setattr(program, "choose_kernel", lambda *_, **__: "a test asks for it")


@pytest.fixture(scope="module")
def compiled_once(pieces: dict[str, list[Entry]], cubins: dict[str, Cubin]) -> Iterator[None]:
    """In this process every plan takes its kernels from one compilation of all of them, save persistent ones."""
    compile_entries = compiler.compile_entries
    piece_of = {entry: name for name, entries in pieces.items() for entry in entries}

    def take(entries: Iterable[Entry], arch: str, **options: Any) -> dict[Entry, Cubin]:
        entries = list(entries)
        others = [entry for entry in entries if entry not in piece_of]
        return {e: cubins[piece_of[e]] for e in entries if e in piece_of} | compile_entries(others, arch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_entries", take)
        yield
