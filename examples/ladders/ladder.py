"""What both ladders share: their command line, the loop in C that they are against, and how rungs are drawn."""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.errors import MlpgpuError

T = TypeVar("T", bound=Any)

FOLDER = Path(__file__).parent
PEERS = ("serial", "cuBLAS")  # lines of rungs whose names hold one of these are dotted


def command_line(description: str, picture: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line for each result there")
    parser.add_argument("--picture", type=Path, default=picture, help="where to draw (default: %(default)s)")
    parser.add_argument("--only-draw", action="store_true", help="measure nothing: draw what --json holds")
    return parser


def kept(path: Path, kind: type[T]) -> list[T]:
    """The results that were written to a file of JSON lines."""
    names = [field.name for field in fields(kind)]
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [kind(**{name: line[name] for name in names}) for line in lines]


def cuda() -> CudaBackend:
    """The backend, or the end of the script where there is none."""
    try:
        return CudaBackend()
    except MlpgpuError as error:
        sys.exit(str(error))


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """A file of C beside the scripts, as a library in ``folder``."""
    library = folder / Path(source).with_suffix(".so")
    command = ["cc", "-O2", "-std=c11", "-shared", "-fPIC", "-o", str(library), str(FOLDER / source), "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def draw_rungs(axes: Axes, label: str, rungs: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """A line for each rung through its (size, rate), the sizes along an axis of this label."""
    colours = colormaps["tab10" if len(rungs) <= 10 else "tab20"]
    for place, (name, points) in enumerate(rungs.items()):
        style = ":" if any(peer in name for peer in PEERS) else "-"
        x, y = zip(*sorted(points), strict=True) if points else ((), ())
        axes.plot(x, y, f"o{style}", color=colours(place % colours.N), label=name, ms=3)
    axes.set(xlabel=label, xscale="log", yscale="log")
    ticks = sorted({size for points in rungs.values() for size, _ in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)


def save(figure: Figure, path: Path) -> None:
    """With the rungs' names beside the second panel."""
    figure.axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
