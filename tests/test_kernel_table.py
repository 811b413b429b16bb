"""nvcc compiles every entry of the table, for each generation of cards, to what the table says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_cases.tensor import is_sampled

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry, all_entries, units
from mlpgpu.backends.cuda.runtime.compiler import Cubin, compile_units

COMPLETE = ("sm_75", "sm_80", "sm_90a")
SUPERSEDED = {"sm_90a": {"gemm/gemm_sm80.cuh"}}  # by products that use what only this architecture has


def of_table(arch: str) -> dict[str, list[Entry]]:
    """The entries to compile for ``arch``: of some, the last of each file, to see that nvcc takes the file."""
    runnable = units(entry for entry in all_entries() if entry.runs_on(arch) and is_sampled(entry))
    complete = set(runnable) - SUPERSEDED.get(arch, set()) if arch in COMPLETE else set()
    return {header: entries if header in complete else entries[-1:] for header, entries in runnable.items()}


ARCHITECTURES = {arch: of_table(arch) for arch in (*COMPLETE, "sm_86", "sm_89", "sm_100", "sm_120")}

REGISTERS = 65536  # of a multiprocessor, since compute capability 3.0
SHARED_BYTES = {"sm_80": 99 << 10, "sm_90a": 227 << 10}  # of a block that needs that architecture or a later one
PLAIN_SHARED_BYTES = 64 << 10  # of any other: what a block of compute capability 7.5 may ask for

Cubins = dict[str, dict[str, Cubin]]


@pytest.fixture(scope="module")
def cubins() -> Cubins:
    """By architecture and header; warnings are errors to nvcc."""
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda arch: compile_units(ARCHITECTURES[arch], arch), ARCHITECTURES)
        return dict(zip(ARCHITECTURES, made, strict=True))


EACH = pytest.mark.parametrize("arch", ARCHITECTURES)


@EACH
def test_the_table_is_what_is_compiled(arch: str, cubins: Cubins) -> None:
    for header, entries in ARCHITECTURES[arch].items():
        # A kernel's code lies in an ELF section of its name.
        found = re.findall(rb"\0\.text\.(\w+)(?=\0)", cubins[arch][header].image)
        assert {name.decode() for name in found} == {entry.name for entry in entries}


@EACH
def test_kernels_fit(arch: str, cubins: Cubins) -> None:
    for header, entries in ARCHITECTURES[arch].items():
        resources = cubins[arch][header].resources
        assert set(resources) == {entry.name for entry in entries}
        for entry in entries:
            kernel = resources[entry.name]
            assert max(kernel.spill_bytes, kernel.stack_bytes) <= entry.spill_bytes, entry.name
            assert kernel.registers * entry.threads <= REGISTERS
            assert kernel.shared_bytes == 0  # all of it is dynamic
            assert entry.shared_bytes <= SHARED_BYTES.get(entry.needs, PLAIN_SHARED_BYTES)


def cuobjdump() -> str:
    """From the PATH, or PyPI's package nvidia-cuda-cuobjdump."""
    folders = [os.environ.get("PATH", "")]
    folders += [str(folder) for place in sys.path if place for folder in Path(place).glob("nvidia/cu*/bin")]
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    assert found, "these tests read machine code with cuobjdump: install the CUDA toolkit or nvidia-cuda-cuobjdump"
    return found


@pytest.fixture(scope="module", params=COMPLETE)
def instructions(
    request: pytest.FixtureRequest, cubins: Cubins, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[str]]:
    """The names of each kernel's instructions, such as FFMA, by the kernel's name."""
    folder = tmp_path_factory.mktemp("sass")
    found: dict[str, set[str]] = {}
    for header, cubin in cubins[request.param].items():
        path = folder / (header.replace("/", "-") + ".cubin")
        path.write_bytes(cubin.image)
        listing = subprocess.run([cuobjdump(), "-sass", path], check=True, capture_output=True, text=True).stdout
        for part in listing.split("Function : ")[1:]:
            found[part.split(maxsplit=1)[0]] = set(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?\s*(\w+)", part))
    assert set(found) == {entry.name for entries in ARCHITECTURES[request.param].values() for entry in entries}
    return found


def names_with(instructions: dict[str, set[str]], *wanted: str) -> set[str]:
    return {name for name, kinds in instructions.items() if kinds & set(wanted)}


def names_of(*entries: Entry) -> set[str]:
    return {entry.name for entry in entries}


def test_only_the_atomic_kernel_adds_in_any_order(instructions: dict[str, set[str]]) -> None:
    atomics = names_with(instructions, "RED", "REDG", "ATOM", "ATOMG", "ATOMS")
    words = {"arrived", "tile_sums", "counts"}
    counting = [entry for entry in all_entries() if words & {a.name for a in entry.arguments}]  # in whole numbers
    scaled = [
        operand_format for operand_format in kernels.OPERAND_FORMATS if operand_format.scaled
    ]  # whose lines are flagged, bit by bit
    flagging = [
        entry
        for operand_format in scaled
        for entry in (kernels.split_rows(operand_format), kernels.split_weights(operand_format))
    ]
    assert atomics == names_of(kernels.dense_backward_atomic(), *counting, *flagging) & set(instructions)


def test_tensor_cores_multiply_split_operands(instructions: dict[str, set[str]]) -> None:
    products = [entry for entry in all_entries() if entry.products and entry.operand_format]
    assert names_with(instructions, "HMMA", "HGMMA") == names_of(*products) & set(instructions)


def test_textures_are_read_as_such(instructions: dict[str, set[str]]) -> None:
    textured = [entry for entry in all_entries() if any(a.ctype == "Texture" for a in entry.arguments)]
    assert names_with(instructions, "TEX", "TLD") == names_of(*textured)


def test_products_fuse_multiplication_and_addition(instructions: dict[str, set[str]]) -> None:
    products = [
        entry for entry in all_entries() if entry.products and entry.operand_format not in kernels.OPERAND_FORMATS
    ]
    assert names_of(*products) & set(instructions) <= names_with(instructions, "FFMA")
