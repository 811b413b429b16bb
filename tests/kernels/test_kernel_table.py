"""nvcc compiles the entries of the table, for each generation of cards, to what the table says.

Of each file one entry is compiled for the architectures of ``LISTED`` and for one of the others; of the rest a share,
``SHARES``.  What is compiled of a file is drawn by what it and its includes hold, so that each change brings other
entries and a red run can be repeated; with ``MLPGPU_WHOLE=1`` everything is compiled.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine_code
import pytest
from drawn import IS_WHOLE, generator, share_of
from kernel_cases.tensor import TILES_SAMPLED_BY_NVCC, is_sampled

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry, all_entries, unit_source, units
from mlpgpu.backends.cuda.runtime.compiler import Cubin, compile_units

QUICK = ("sm_80", "sm_90a")
LISTED = ("sm_75", "sm_80", "sm_90a")
SUPERSEDED = {"sm_90a": {"gemm/gemm_sm80.cuh"}}  # by products that use what only this architecture has
OTHERS = ("sm_86", "sm_89", "sm_100", "sm_120")
SHARES = {"sm_75": 1 / 32, "sm_80": 1 / 32, "sm_90a": 1 / 16}  # of the entries that are no sample
OTHERS_OF_A_FILE = 1  # architectures
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


def sampled_for(unit: str) -> Sequence[str]:
    """The architectures for which a sample of a file is compiled."""
    return (*LISTED, *(OTHERS if IS_WHOLE else generator("others", unit).sample(OTHERS, OTHERS_OF_A_FILE)))


def chunks(entries: Sequence[Entry], size: int) -> Iterator[tuple[Entry, ...]]:
    return (tuple(entries[i : i + size]) for i in range(0, len(entries), size))


def pieces(arch: str) -> Iterator[Piece]:
    """What to compile for ``arch``: of each file the last entry, and of the others those that are drawn."""
    by_unit = units(e for e in all_entries() if e.runs_on(arch) and is_sampled(e, TILES_SAMPLED_BY_NVCC))
    samples = [entries[-1] for unit, entries in by_unit.items() if arch in sampled_for(unit)]
    for chosen in chunks(samples, PER_SAMPLE):
        yield Piece(arch, chosen, is_sample=True)
    if arch in LISTED:
        counted = [(u, entries[:-1]) for u, entries in by_unit.items() if u not in SUPERSEDED.get(arch, set())]
        drawn = [entry for u, entries in counted for entry in share_of(entries, SHARES[arch], arch, u)]
        for chosen in chunks(drawn, PER_PIECE):
            yield Piece(arch, chosen, is_sample=False)


PIECES = [piece for arch in (*LISTED, *OTHERS) for piece in pieces(arch)]
SAMPLES = [p for p in PIECES if p.arch == "sm_90a" and p.is_sample]
COMPILED_TWICE = SAMPLES if IS_WHOLE else [generator("places").choice(SAMPLES)]
DISASSEMBLED = [generator(arch).choice([p for p in PIECES if p.arch == arch and p.is_sample]) for arch in LISTED]


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
    assert set(machine_code.code_of(made(piece).image)) == names_of(*piece.entries)


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


@functools.cache
def instructions(piece: Piece) -> dict[str, set[str]]:
    """The names of each kernel's instructions, such as FFMA, by the kernel's name."""
    code = machine_code.code_of(made(piece).image)
    return {name: machine_code.names(piece.arch, instructions) for name, instructions in code.items()}


def names_with(piece: Piece, *wanted: str) -> set[str]:
    return {name for name, kinds in instructions(piece).items() if kinds & set(wanted)}


def names_of(*entries: Entry) -> set[str]:
    return {entry.name for entry in entries}


@pytest.mark.parametrize("piece", [p for p in parameters(LISTED) if IS_WHOLE or p.values[0] in DISASSEMBLED])
def test_an_opcode_settles_a_name(piece: Piece) -> None:
    code = b"".join(machine_code.code_of(made(piece).image).values())
    pairs = set(zip(machine_code.opcodes(code).tolist(), machine_code.disassembled(piece.arch, code), strict=True))
    assert len(pairs) == len({opcode for opcode, _ in pairs})
    assert {name for _, name in pairs} == machine_code.names(piece.arch, code)


@pytest.mark.thorough
@pytest.mark.parametrize("piece", [p for p in parameters(("sm_90a",)) if p.values[0] in COMPILED_TWICE])
def test_places_in_the_sources_change_no_instruction(piece: Piece) -> None:
    codes = [machine_code.code_of(compiled(piece, source_places=places).image) for places in (True, False)]
    assert codes[0] == codes[1]


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
        for entry in (
            kernels.split_rows(operand_format),
            kernels.split_rows(operand_format, "uint8"),
            kernels.split_weights(operand_format),
        )
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
    products = [entry for entry in all_entries() if entry.products and entry.operand_format is None]
    assert names_of(*products) & names_of(*piece.entries) <= names_with(piece, "FFMA")
