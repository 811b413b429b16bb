"""The machine code of every kernel, written down and compared: what a change that only moves or renames must keep.

    python benchmarks/machine_code.py record before.json            # of this checkout, for sm_75, sm_80 and sm_90a
    python benchmarks/machine_code.py compare before.json after.json

A record holds, for each architecture and entry, a hash of the instructions with all names taken out, and what ptxas
said of registers and spills.  Kernels are matched by their code alone, so they may bear other names.  Beside the
table's entries a record holds kernels that are made for a plan: persistent ones, and stacks of local layers.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlpgpu as mg
from mlpgpu.backends.cuda.kernels import Entry, all_entries, unit_source, units
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.runtime.compiler import OPTIONS, find_nvcc
from mlpgpu.backends.cuda.select.persistent import choose_kernel
from mlpgpu.backends.sources import source_folder
from mlpgpu.names import ActivationName, LossName
from mlpgpu.optimizers import Optimizer

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a")
MULTIPROCESSORS = {"sm_75": 40, "sm_80": 108, "sm_90a": 132}
SHARED_BYTES = {"sm_75": 65_536, "sm_80": 166_912, "sm_90a": 232_448}
ENTRIES_PER_UNIT = 6  # few enough for all cores to have work until the end

# Widths, activation, rows of a batch, loss, optimizer: networks that train inside one kernel.
PERSISTENT: tuple[tuple[tuple[int, ...], ActivationName, int, LossName, Optimizer], ...] = (
    ((784, 128, 10), "relu", 128, "softmax_cross_entropy", mg.Momentum(0.1)),
    ((783, 30, 10), "sigmoid", 32, "squared_error", mg.SGD(0.1)),
    ((20, 64, 64, 2), "tanh", 64, "softmax_cross_entropy", mg.Adam(1e-3)),
    ((64, 128, 10), "gelu", 100, "huber", mg.Nesterov(0.1)),
    ((5, 7, 3), "elu", 9, "binary_cross_entropy", mg.RMSprop(1e-3)),
)
PRECISIONS = ("float32-ieee", "float32", "tf32", "bfloat16")


def persistent_entries(arch: str) -> Iterator[Entry]:
    """The persistent kernels of some networks on a card of this architecture."""
    for widths, activation, rows, loss, optimizer in PERSISTENT:
        layers = [
            mg.Dense(k, n, activation=activation if n != widths[-1] else "identity")
            for k, n in itertools.pairwise(widths)
        ]
        for precision in PRECISIONS:
            network = mg.Network([layers[0], mg.Dropout(0.2), *layers[1:]], seed=1)
            plan = network.lower(capacity=rows, loss=loss, optimizer=optimizer, precision=precision)
            kernel = choose_kernel(
                plan, multiprocessors=MULTIPROCESSORS[arch], shared_bytes=SHARED_BYTES[arch], arch=arch
            )
            if isinstance(kernel, PersistentKernel):
                yield kernel.train("uint8", textured=True).entry


def stack_entries(arch: str) -> Iterator[Entry]:
    """The kernels of stacks of locally connected layers, with weights of each layer's own and with one for all."""
    for rows, tied in ((1, False), (4, False), (1, True), (4, True)):
        first = mg.LocallyConnected(5000, 29, activation="tanh")
        layers = [first] * 6 if tied else [mg.LocallyConnected(5000 - 28 * i, 29, activation="tanh") for i in range(6)]
        plan = mg.Network(layers, seed=1).lower(capacity=rows, loss="squared_error", optimizer=mg.Momentum(0.1))
        lowered = lower(plan, multiprocessors=MULTIPROCESSORS[arch], source="float32", arch=arch)
        yield from (entry for entry in lowered.entries() if "stack" in entry.header)


def compiled(entries: list[Entry], arch: str, folder: Path) -> dict[str, dict[str, object]]:
    """Of each entry, by its name: the hash of its instructions, and its registers and spilled bytes."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        unit, cubin = Path(place, "unit.cu"), Path(place, "unit.cubin")
        unit.write_text(unit_source(entries))
        target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
        options = [option for option in OPTIONS if option != "-lineinfo"]
        command = [str(find_nvcc()), *options, target, f"-I{source_folder()}", "--cubin", "-o", str(cubin), str(unit)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            sys.exit(f"{entries[0].name}, …:\n{made.stdout}{made.stderr}")
        sass = subprocess.run([_cuobjdump(), "-sass", str(cubin)], check=True, capture_output=True, text=True).stdout
    found: dict[str, dict[str, object]] = {}
    for function in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name, _, code = function.partition("\n")
        found[name.strip()] = {"code": hashlib.sha256(_without_names(code).encode()).hexdigest()}
    for match in re.finditer(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        made.stderr + made.stdout,
        re.DOTALL,
    ):
        name, stores, loads, registers = match.groups()
        found[name] |= {"registers": int(registers), "spills": int(stores) + int(loads)}
    return found


@functools.cache
def _cuobjdump() -> str:
    """The disassembler's driver: on the PATH, or PyPI's ``nvidia-cuda-cuobjdump``, which finds nvdisasm beside it."""
    wheels = [str(folder) for place in sys.path if place for folder in Path(place).glob("nvidia/cu*/bin")]
    found = shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *wheels]))
    return found or sys.exit("cuobjdump is not here: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def _without_names(code: str) -> str:
    """Instructions alone: no comments with encodings, no names of symbols."""
    lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in code.splitlines())
    return "\n".join(re.sub(r"\b_Z\w+|`\([^)]*\)", "symbol", line) for line in lines if line)


def record(archs: Iterable[str]) -> dict[str, dict[str, dict[str, object]]]:
    """By architecture and entry."""
    result: dict[str, dict[str, dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for arch in archs:
            runnable = [entry for entry in all_entries() if entry.runs_on(arch)]
            groups = [
                group[i : i + ENTRIES_PER_UNIT]
                for group in units([*runnable, *persistent_entries(arch), *stack_entries(arch)]).values()
                for i in range(0, len(group), ENTRIES_PER_UNIT)
            ]
            result[arch] = {}
            compile_group = functools.partial(compiled, arch=arch, folder=Path(folder))
            for done, found in enumerate(pool.map(compile_group, groups), 1):
                result[arch] |= found
                print(f"\r{arch}: {done} of {len(groups)} units", end="", file=sys.stderr)
            print(file=sys.stderr)
    return result


def compare(before: dict, after: dict) -> bool:
    """Print which kernels have other code than before; whether there are none."""
    same = True
    for arch in before:
        old, new = ({name: kernel["code"] for name, kernel in side[arch].items()} for side in (before, after))
        codes = Counter(old.values()), Counter(new.values())
        only = [
            sorted(name for name, code in side.items() if code in (mine - other))
            for side, mine, other in ((old, codes[0], codes[1]), (new, codes[1], codes[0]))
        ]
        print(f"{arch}: {len(old)} kernels before, {len(new)} after; {sum((codes[0] & codes[1]).values())} the same")
        for what, side, names in (("before", before, only[0]), ("after", after, only[1])):
            same = same and not names
            for name in names:
                kernel = side[arch][name]
                print(f"    only {what}: {name}, {kernel.get('registers')} registers, {kernel.get('spills')} spilled")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--arch", action="append", choices=ARCHITECTURES)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        given.file.write_text(json.dumps(record(given.arch or ARCHITECTURES), indent=1))
    elif not compare(json.loads(given.before.read_text()), json.loads(given.after.read_text())):
        sys.exit(1)


if __name__ == "__main__":
    main()
