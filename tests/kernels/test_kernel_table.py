"""nvcc compiles the entries of the table, for each generation of cards, to what the table says.

Every entry is compiled for ``sm_90a``.  For two older generations a third is drawn by the kernels' sources, another one
whenever a kernel changes; with ``MLPGPU_WHOLE_TABLE=1`` all entries are compiled for these too.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kernel_cases.tensor import TILES_SAMPLED_BY_NVCC, is_sampled

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry, all_entries, unit_source, units
from mlpgpu.backends.cuda.runtime.compiler import Cubin, compile_units

QUICK = ("sm_80", "sm_90a")
LISTED = ("sm_75", "sm_80", "sm_90a")
SUPERSEDED = {"sm_90a": {"gemm/gemm_sm80.cuh"}}  # by products that use what only this architecture has
OTHERS = ("sm_86", "sm_89", "sm_100", "sm_120")
DRAWN = 1.0 if os.environ.get("MLPGPU_WHOLE_TABLE") == "1" else 1 / 3  # of the entries, for the older ones of LISTED
KERNELS = Path(__file__).parents[2] / "cuda"
PER_PIECE = 16
PER_SAMPLE = 6  # so that two processes have their share of them


@dataclass(frozen=True)
class Piece:
    """Entries that are compiled together for an architecture, of whichever units, since nvcc reads the headers once.

    Attributes:
        is_sample: whether it has the last entry of each of some units, to see that nvcc takes the file.
    """

    arch: str
    entries: tuple[Entry, ...]
    is_sample: bool

    def __str__(self) -> str:
        return f"{self.arch}-{self.entries[0].name}"


def drawn(arch: str, entries: Sequence[Entry]) -> list[Entry]:
    """The entries that are compiled for ``arch``, by what the kernels' sources hold: a red run can be repeated."""
    if arch not in SUPERSEDED:
        texts = b"".join(path.read_bytes() for path in sorted(KERNELS.rglob("*.cuh")))
        chosen = set(random.Random(zlib.crc32(texts + arch.encode())).sample(entries, round(DRAWN * len(entries))))
        entries = [entry for entry in entries if entry in chosen]
    return list(entries)


def chunks(entries: Sequence[Entry], size: int) -> Iterator[tuple[Entry, ...]]:
    return (tuple(entries[i : i + size]) for i in range(0, len(entries), size))


def pieces(arch: str) -> Iterator[Piece]:
    """What to compile for ``arch``: of each file the last entry, and of the others those that are drawn."""
    by_unit = units(e for e in all_entries() if e.runs_on(arch) and is_sampled(e, TILES_SAMPLED_BY_NVCC))
    for chosen in chunks([entries[-1] for entries in by_unit.values()], PER_SAMPLE):
        yield Piece(arch, chosen, is_sample=True)
    if arch in LISTED:
        counted = [entries[:-1] for unit, entries in by_unit.items() if unit not in SUPERSEDED.get(arch, set())]
        for chosen in chunks(drawn(arch, [entry for entries in counted for entry in entries]), PER_PIECE):
            yield Piece(arch, chosen, is_sample=False)


PIECES = [piece for arch in (*LISTED, *OTHERS) for piece in pieces(arch)]


def parameters(architectures: tuple[str, ...]) -> list[Any]:
    """Pieces, each for one process; the whole table is for thorough runs."""
    return [
        pytest.param(
            piece,
            id=str(piece),
            marks=[
                pytest.mark.xdist_group(str(piece)),
                *([] if piece.is_sample and piece.arch in QUICK else [pytest.mark.thorough]),
            ],
        )
        for piece in PIECES
        if piece.arch in architectures
    ]


def test_every_entry_is_compiled_against_the_block_in_its_file() -> None:
    for entry in all_entries():
        sizes = f"{entry.block}::THREADS == {entry.threads} && {entry.block}::SHARED_BYTES == {entry.shared_bytes}"
        assert f"static_assert({sizes}" in unit_source([entry]), entry.name


@pytest.mark.parametrize("changed", [{"threads": 128}, {"shared_bytes": 4}, {}])
def test_the_compiler_refuses_another_block(changed: dict[str, int]) -> None:
    shim = Path(__file__).parent / "shim" / "cuda.h"
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-include", str(shim), f"-I{KERNELS}", "-"]
    text = unit_source([replace(kernels.squares(), **changed)]).partition('extern "C"')[0] + "}"
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert (done.returncode != 0) == bool(changed)
    assert ("lays out another block than the table of entries" in done.stderr) == bool(changed)


REGISTERS = 65536  # of a multiprocessor, since compute capability 3.0
SHARED_BYTES = {"sm_80": 99 << 10, "sm_90a": 227 << 10}  # of a block that needs that architecture or a later one
PLAIN_SHARED_BYTES = 64 << 10  # of any other: what a block of compute capability 7.5 may ask for

EACH = pytest.mark.parametrize("piece", parameters((*LISTED, *OTHERS)))
EACH_LISTED = pytest.mark.parametrize("piece", parameters(LISTED))


@functools.cache
def compiled(piece: Piece, *, source_places: bool) -> Cubin:
    """Warnings are errors to nvcc."""
    (cubin,) = compile_units({"table.cuh": piece.entries}, piece.arch, source_places=source_places).values()
    return cubin


def made(piece: Piece) -> Cubin:
    """A sample is made as every program is; the rest without places in the sources, a sixth of nvcc's time."""
    return compiled(piece, source_places=piece.is_sample)


@EACH
def test_the_table_is_what_is_compiled(piece: Piece) -> None:
    # A kernel's code lies in an ELF section of its name.
    found = re.findall(rb"\0\.text\.(\w+)(?=\0)", made(piece).image)
    assert {name.decode() for name in found} == names_of(*piece.entries)


@EACH
def test_kernels_fit(piece: Piece) -> None:
    resources = made(piece).resources
    assert set(resources) == names_of(*piece.entries)
    for entry in piece.entries:
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


def listing(cubin: Cubin) -> str:
    """The machine code of all kernels: each instruction, and its bits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.image)
        file.flush()
        return subprocess.run([cuobjdump(), "-sass", file.name], check=True, capture_output=True, text=True).stdout


@functools.cache
def instructions(piece: Piece) -> dict[str, set[str]]:
    """The names of each kernel's instructions, such as FFMA, by the kernel's name."""
    found: dict[str, set[str]] = {}
    for part in listing(made(piece)).split("Function : ")[1:]:
        found[part.split(maxsplit=1)[0]] = set(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?\s*(\w+)", part))
    assert set(found) == names_of(*piece.entries)
    return found


def names_with(piece: Piece, *wanted: str) -> set[str]:
    return {name for name, kinds in instructions(piece).items() if kinds & set(wanted)}


def names_of(*entries: Entry) -> set[str]:
    return {entry.name for entry in entries}


@pytest.mark.thorough
@pytest.mark.parametrize("piece", [piece for piece in PIECES if piece.is_sample and piece.arch == "sm_90a"], ids=str)
def test_places_in_the_sources_change_no_instruction(piece: Piece) -> None:
    assert listing(compiled(piece, source_places=True)) == listing(compiled(piece, source_places=False))


@EACH_LISTED
def test_only_the_atomic_kernel_adds_in_any_order(piece: Piece) -> None:
    atomics = names_with(piece, "RED", "REDG", "ATOM", "ATOMG", "ATOMS")
    words = {"arrived", "tile_sums", "counts"}
    counting = [entry for entry in all_entries() if words & {a.name for a in entry.arguments}]  # in whole numbers
    scaled = [
        operand_format for operand_format in kernels.OPERAND_FORMATS if operand_format.scaled
    ]  # whose rows and columns are flagged, bit by bit
    flagging = [
        entry
        for operand_format in scaled
        for entry in (kernels.split_rows(operand_format), kernels.split_weights(operand_format))
    ]
    assert atomics == names_of(kernels.dense_backward_atomic(), *counting, *flagging) & names_of(*piece.entries)


@EACH_LISTED
def test_tensor_cores_multiply_split_operands(piece: Piece) -> None:
    products = [entry for entry in all_entries() if entry.products and entry.operand_format]
    assert names_with(piece, "HMMA", "HGMMA") == names_of(*products) & names_of(*piece.entries)


@EACH_LISTED
def test_textures_are_read_as_such(piece: Piece) -> None:
    textured = [entry for entry in all_entries() if any(a.ctype == "Texture" for a in entry.arguments)]
    assert names_with(piece, "TEX", "TLD") == names_of(*textured) & names_of(*piece.entries)


@EACH_LISTED
def test_products_fuse_multiplication_and_addition(piece: Piece) -> None:
    products = [
        entry for entry in all_entries() if entry.products and entry.operand_format not in kernels.OPERAND_FORMATS
    ]
    assert names_of(*products) & names_of(*piece.entries) <= names_with(piece, "FFMA")
