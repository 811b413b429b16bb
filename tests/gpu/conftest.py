"""The card that tests run on, and its kernels, compiled once.

``--kernels REGEX`` compiles those alone whose names it finds, and leaves out cases of others: a change of some kernels
is tried in a minute by ``pytest tests/gpu/test_parity.py -m gpu -k against_numpy --kernels backward_weight``.
"""

from __future__ import annotations

import os
import re
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", metavar="REGEX", help="compile and test kernels alone whose names it finds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if _is_asked(config, _entry_of(item)) else others).append(item)
    if others:
        items[:] = kept
        config.hook.pytest_deselected(items=others)


def _entry_of(item: pytest.Item) -> Entry | None:
    """The kernel that a test is a case of."""
    case = item.callspec.params.get("case") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return getattr(case, "entry", None)


def _is_asked(config: pytest.Config, entry: Entry | None) -> bool:
    asked = config.getoption("--kernels", default=None)
    return asked is None or entry is None or re.search(asked, entry.name) is not None


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
def pieces(device: Device, pytestconfig: pytest.Config) -> dict[str, list[Entry]]:
    """All kernels of the table that the card can run, in the pieces of units that are compiled one by one."""
    entries = (entry for entry in kernels.all_entries() if _is_asked(pytestconfig, entry))
    runnable = (entry for entry in entries if entry.runs_on(device.arch))
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
