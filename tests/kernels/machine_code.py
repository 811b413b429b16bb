"""Machine code: what instructions the kernels of a cubin have, by name.

To disassemble a cubin takes seconds, most of them for operands that no test reads.  Since compute capability 7.0 an
instruction has 16 bytes, and the lowest 12 bits of the first word (its opcode, and the kinds of its operands) settle
its name.  So `names` shows nvdisasm one instruction of each opcode, and a test holds that against all instructions.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

INSTRUCTION_BYTES = 16
OPCODE = np.uint64(0xFFF)
FLOATING = ("F", "D", "H", "MUFU")  # with what the names of instructions begin that compute with such numbers
_NAME = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", re.MULTILINE)
_SECTION = struct.Struct(
    "<IIQQQQ"
)  # the beginning of an ELF section's header: name, type, flags, address, offset, size

_names: dict[str, dict[int, str]] = {}  # by architecture and opcode


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The code of each kernel, by the kernel's name: a cubin is an ELF file, and ``.text.<kernel>`` a section."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [_SECTION.unpack_from(cubin, headers + i * size) for i in range(count)]
    names = sections[of_names][4]
    code = {}
    for name, _, _, _, offset, length in sections:
        start = names + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            code[text.removeprefix(".text.")] = cubin[offset : offset + length]
    return code


def opcodes(code: bytes) -> np.ndarray:
    """Of each instruction."""
    return np.frombuffer(code, "<u8")[:: INSTRUCTION_BYTES // 8] & OPCODE


def names(arch: str, code: bytes) -> set[str]:
    """The names of the instructions in ``code``, such as FFMA."""
    known = _names.setdefault(arch, {})
    found, first = np.unique(opcodes(code), return_index=True)
    new = {int(o): i * INSTRUCTION_BYTES for o, i in zip(found, first, strict=True) if int(o) not in known}
    if new:
        examples = b"".join(code[place : place + INSTRUCTION_BYTES] for place in new.values())
        known |= zip(new, disassembled(arch, examples), strict=True)
    return {known[int(opcode)] for opcode in found}


def arithmetic(arch: str, code: bytes) -> list[str]:
    """The names of the instructions that compute with floating-point numbers, in their order."""
    found, place = np.unique(opcodes(code), return_inverse=True)
    examples = [int(np.argmax(place == number)) * INSTRUCTION_BYTES for number in range(len(found))]
    of_opcode = [next(iter(names(arch, code[at : at + INSTRUCTION_BYTES]))) for at in examples]
    return [of_opcode[number] for number in place if of_opcode[number].startswith(FLOATING)]


def disassembled(arch: str, code: bytes) -> Sequence[str]:
    """The name of each instruction, as nvdisasm has it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [_nvdisasm(), "--no-dataflow", "--binary", arch.replace("sm_", "SM"), file.name]
        found = _NAME.findall(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(found) == len(code) // INSTRUCTION_BYTES
    return found


@functools.cache
def _nvdisasm() -> str:
    """From the PATH, or PyPI's package nvidia-cuda-nvdisasm."""
    folders = [os.environ.get("PATH", "")]
    folders += [str(folder) for place in sys.path if place for folder in Path(place).glob("nvidia/cu*/bin")]
    found = shutil.which("nvdisasm", path=os.pathsep.join(folders))
    assert found, "these tests read machine code: install the CUDA toolkit or nvidia-cuda-nvdisasm"
    return found
