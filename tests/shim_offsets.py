"""Kernels on the host with pointers into the middle of arrays, as a program passes them on a card.

The shim's arguments are whole, aligned arrays.  Here an entry gets one more argument for each pointer: the
element of its array at which it begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mlpgpu.backends.cuda.kernels import Argument, Entry, included, units

SUFFIX = "_from"


def with_offsets(entries: Iterable[Entry], folder: Path) -> dict[Entry, Entry]:
    """Entries by those whose kernels they run; their sources are written to ``folder``."""
    made: dict[Entry, Entry] = {}
    for unit, group in units(entries).items():
        path = folder / f"offsets_{unit.replace('/', '_')}"
        includes = [f'#include "{header}"' for header in included(group)]
        lines = ["#pragma once", *includes, "namespace mlpgpu {"]
        for entry in group:
            starts = tuple(Argument(a.name + SUFFIX, "int64_t") for a in entry.arguments if a.is_pointer)
            arguments = (*entry.arguments, *starts)
            function = f"{entry.name}_offset"
            parameters = ", ".join(f"{a.ctype} {a.name}" for a in arguments)
            call = ", ".join(f"{a.name} + {a.name}{SUFFIX}" if a.is_pointer else a.name for a in entry.arguments)
            lines.append(f"__device__ void {function}({parameters}) {{ {entry.function}({call}); }}")
            name, source = f"{function}_entry", str(path)
            made[entry] = replace(
                entry, name=name, header=source, main_loop=None, function=function, arguments=arguments
            )
        path.write_text("\n".join([*lines, "}", ""]))
    return made
