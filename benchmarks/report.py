"""Tables and a chart of what peers.py measured: README.md's part between two marks, and docs/peers.png.

python benchmarks/report.py [RESULTS]      # lines of JSON; benchmarks/results/peers.jsonl by default
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers.jsonl"
CHART = ROOT / "docs" / "peers.png"
README = ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks/report.py -->", "<!-- end of what it made -->"

OURS, PEERS = "mlpgpu", ("PyTorch", "JAX")
COLOURS = {OURS: "#d1495b", "PyTorch": "#8d99ae", "JAX": "#2e4057"}
FORMS = {"forward": "x W", "backward_input": "dz Wᵀ", "backward_weight": "xᵀ dz"}

# Peak rates from which floors are computed: operations a second by precision, as products of this card reach them
# (float32: three products of 16-bit operands), and bytes a second.  State of up to CHIP_BYTES can stay on the chip.
PEAK_RATES = {"NVIDIA H200": {"float32": 790e12 / 3, "tf32": 790e12, "bfloat16": 790e12}}
BANDWIDTH = {"NVIDIA H200": 4.3e12}
CHIP_BYTES = 50e6

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def floor(line: Line) -> float | None:
    """The fewest microseconds of a step: its operations at the card's rate, or what must come from memory."""
    card = line.get("card")
    if card not in PEAK_RATES:
        return None
    moved = line["batch_bytes"] + (2 * line["state_bytes"] if line["state_bytes"] > CHIP_BYTES else 0)
    return 1e6 * max(line["flops"] / PEAK_RATES[card][line["precision"]], moved / BANDWIDTH[card])


def by_workload(lines: Iterable[Line]) -> dict[tuple[str, str], dict[str, Line]]:
    """Of each workload and precision, our line and the fastest one of each peer's forms."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for line in (line for line in lines if "contender" in line):
        best = found.setdefault((line["workload"], line["precision"]), {})
        who = next(name for name in (OURS, *PEERS) if line["contender"].startswith(name))
        if who not in best or line["microseconds"] < best[who]["microseconds"]:
            best[who] = line
    return found


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def steps_table(lines: Sequence[Line]) -> str:
    """Microseconds a step, a row for each workload and precision."""
    rows = []
    for (_, precision), best in by_workload(lines).items():
        one = next(iter(best.values()))
        ours = best.get(OURS)
        row = [
            f"{one['network']}, {one['batch_size']:,}",
            precision,
            f"**{digits(ours['microseconds'])}**" if ours else "–",
        ]
        for name in PEERS:
            form = best[name]["contender"].removeprefix(name).strip(", ") if name in best else ""
            row.append(f"{digits(best[name]['microseconds'])} {form}".strip() if name in best else "–")
        peers = [best[name]["microseconds"] for name in PEERS if name in best]
        row.append(f"× {min(peers) / ours['microseconds']:.2f}" if ours and peers else "–")
        least = floor(one)
        row.append("–" if least is None else digits(least))
        row.append(f"{least / ours['microseconds']:.0%}".replace("%", " %") if ours and least else "–")
        rows.append(row)
    heads = ["network, batch", "precision", "mlpgpu", "PyTorch", "JAX", "better peer", "floor", "reached"]
    return markdown(heads, rows)


def errors_table(lines: Sequence[Line]) -> str:
    """Errors of a product, a row for each precision, a column for each contender."""
    errors: dict[str, dict[str, float]] = {}
    for line in (line for line in lines if line.get("error") is not None):
        errors.setdefault(line["precision"], {})[line["contender"].partition(",")[0]] = line["error"]
    names = list(dict.fromkeys(name for found in errors.values() for name in found))
    rows = [
        [precision, *(f"{found[name]:.1e}" if name in found else "–" for name in names)]
        for precision, found in errors.items()
    ]
    return markdown(["precision", *names], rows)


def products_table(lines: Sequence[Line]) -> str:
    """TFLOP/s of the products of one form in a step, medians of its launches, and how much of cuBLAS's that is."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in (line for line in lines if "kernel" in line):
        groups.setdefault((line["precision"], line["form"]), []).append(line)
    rows = []
    for (precision, form), found in groups.items():
        row = [precision, FORMS[form]]
        rates = [
            statistics.median(1e3 * line["gigaflop"] / line[f"{way}microseconds"] for line in found)
            for way in ("", "alone_", "cublas_")
        ]
        row += [f"{rate:.0f}" for rate in rates]
        row += [
            f"× {statistics.median(line['cublas_microseconds'] / line[f'{way}microseconds'] for line in found):.2f}"
            for way in ("alone_", "")
        ]
        rows.append(row)
    return markdown(
        ["precision", "product", "in a step", "alone", "cuBLAS", "alone / cuBLAS", "in a step / cuBLAS"], rows
    )


def report(lines: Sequence[Line]) -> str:
    """The README's part."""
    about = lines[0]
    names = {"torch": "PyTorch", "jax": "JAX"}
    versions = [f"{name} {about['versions'][key]}" for key, name in names.items() if about["versions"].get(key)]
    ours = f"mlpgpu {about['versions'][OURS]}" + (f" at {about['commit'][:10]}" if about["commit"] else "")
    where = ", ".join([f"{about['card']}, driver {about['driver']}", *versions, ours])
    parts = [
        fill(
            f"One run of `benchmarks/peers.py` on an {where}: microseconds a step over whole epochs, shuffles "
            "included, with the data on the card. PyTorch and JAX stand in their fastest forms. The last columns: how "
            "many times as long as mlpgpu the better peer takes; a floor, the operations at the rate of the tensor "
            "cores or the bytes at that of the memory, whichever is longer; and how much of it is reached."
        ),
        steps_table(lines),
        f"![Microseconds a step by workload and precision]({CHART.relative_to(ROOT).as_posix()})",
        fill(
            "What a precision is worth: the error of a product of two matrices of 4,096 by 4,096 normal values against "
            "float64, relative, by Frobenius norms."
        ),
        errors_table(lines),
    ]
    if any("kernel" in line for line in lines):
        told = (
            "TFLOP/s of the products of 4096-4096-4096-4096-4096: as its steps launch them, with the bias, the "
            "activation or its derivative, or the update of the weights; alone, where the same kernels only store "
            "what they computed; and by cuBLAS. All multiplied the same numbers in turns of 5 ms on the warm card; "
            "medians of rounds."
        )
        parts += [fill(told), products_table(lines)]
    return "\n\n".join(parts)


def fill(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def draw(lines: Sequence[Line], path: Path) -> None:
    """A panel for each workload, a group of bars for each precision."""
    found = by_workload(lines)
    workloads = list(dict.fromkeys(key for key, _ in found))
    columns = min(3, len(workloads))
    figure = Figure(figsize=(4.2 * columns, 3.2 * -(-len(workloads) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(workloads) // columns), columns, squeeze=False).ravel()
    for axes, key in zip(panels, workloads, strict=False):
        groups = {precision: best for (workload, precision), best in found.items() if workload == key}
        one = next(iter(next(iter(groups.values())).values()))
        unit, scale = ("ms", 1e-3) if one["microseconds"] > 2000 else ("µs", 1.0)
        for place, name in enumerate((OURS, *PEERS)):
            heights = {
                group: scale * best[name]["microseconds"] for group, best in enumerate(groups.values()) if name in best
            }
            places = [group + 0.29 * (place - 1) for group in heights]
            bars = axes.bar(places, list(heights.values()), 0.27, color=COLOURS[name], label=name)
            axes.bar_label(bars, [digits(height) for height in heights.values()], fontsize=8, padding=1)
        axes.set_title(f"{one['network']}, batch {one['batch_size']:,}", fontsize=9)
        axes.set_xticks(range(len(groups)), list(groups))
        middle = (len(groups) - 1) / 2
        axes.set_xlim(middle - 1.5, middle + 1.5)  # bars as wide in each panel
        axes.set_ylabel(f"{unit} a step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(workloads) :]:
        axes.set_visible(False)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def insert(text: str, part: str) -> str:
    """``text`` with ``part`` between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{README}: expected the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make README.md's tables and chart of what peers.py measured.")
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    lines = read(parser.parse_args().results)
    README.write_text(insert(README.read_text(encoding="utf-8"), report(lines)), encoding="utf-8")
    draw(lines, CHART)


if __name__ == "__main__":
    main()
