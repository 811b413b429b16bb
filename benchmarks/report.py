"""Tables and charts of what peers.py and predict.py measured, in docs/results.md; six rows of steps in README.md too.

python benchmarks/report.py [RESULTS]      # a JSON record a row, of either; by default both in benchmarks/results/
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
PREDICTIONS, PREDICTIONS_CHART = RESULTS.with_name("predict.jsonl"), ROOT / "docs" / "predict.png"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"  # each has a part between the marks
BEGIN, END = "<!-- made by benchmarks/report.py -->", "<!-- end of what it made -->"
PREDICTIONS_MARKS = (
    "<!-- predictions: made by benchmarks/report.py -->",
    "<!-- predictions: end of what it made -->",
)

OURS, PEERS = "mlpgpu", ("PyTorch", "JAX")
COLOURS = {
    **{OURS: "#d1495b", "PyTorch": "#8d99ae", "JAX": "#2e4057"},
    **{"scikit-learn": "#edae49", "ONNX Runtime": "#00798c"},
}
PREDICTING = (OURS, "scikit-learn", "PyTorch", "ONNX Runtime", "JAX")  # in the order of columns
PLACES = {"host": "From host to host", "card": "Mean loss and accuracy of data that lie on the card"}
README_ROWS = [
    *(("tiny", "float32"), ("medium", "float32"), ("medium", "bfloat16")),
    *(("large", "float32"), ("large", "bfloat16"), ("tall", "float32")),
]
FORMS = {"forward": "x W", "backward_input": "dz Wᵀ", "backward_weight": "xᵀ dz"}

# Peak rates from which floors are computed: operations a second by precision, as products of this card reach them
# (float32: three products of 16-bit operands), and bytes a second.  State of up to CHIP_BYTES can stay on the chip.
PEAK_RATES = {"NVIDIA H200": {"float32": 790e12 / 3, "tf32": 790e12, "bfloat16": 790e12}}
BANDWIDTH = {"NVIDIA H200": 4.3e12}
CHIP_BYTES = 50e6

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    return parse(path.read_text(encoding="utf-8"))


def parse(lines: str) -> list[Record]:
    return [json.loads(line) for line in lines.splitlines()]


def floor(record: Record) -> float | None:
    """The fewest microseconds of a step: its operations at the card's rate, or what must come from memory."""
    card = record.get("card")
    if card not in PEAK_RATES:
        return None
    moved = record["batch_bytes"] + (2 * record["state_bytes"] if record["state_bytes"] > CHIP_BYTES else 0)
    return 1e6 * max(record["flops"] / PEAK_RATES[card][record["precision"]], moved / BANDWIDTH[card])


def by_workload(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """Of each workload and precision, our record and that of each peer's fastest form."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in (record for record in records if "contender" in record):
        best = found.setdefault((record["workload"], record["precision"]), {})
        who = next(name for name in (OURS, *PEERS) if record["contender"].startswith(name))
        if who not in best or record["microseconds"] < best[who]["microseconds"]:
            best[who] = record
    return found


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def lead(best: dict[str, Record]) -> float | None:
    """How many times as long as ours the better peer's step takes."""
    peers = [best[name]["microseconds"] for name in PEERS if name in best]
    return min(peers) / float(best[OURS]["microseconds"]) if peers and OURS in best else None


def steps_table(records: Sequence[Record], *, floors: bool = True) -> str:
    """Microseconds a step, a row for each workload and precision."""
    rows = []
    for (_, precision), best in by_workload(records).items():
        any_record = next(iter(best.values()))
        ours = best.get(OURS)
        row = [
            f"{any_record['network']}, {any_record['batch_size']:,}",
            precision,
            f"**{digits(ours['microseconds'])}**" if ours else "–",
        ]
        for name in PEERS:
            form = best[name]["contender"].removeprefix(name).strip(", ") if name in best else ""
            row.append(f"{digits(best[name]['microseconds'])} {form}".strip() if name in best else "–")
        times = lead(best)
        row.append("–" if times is None else f"× {times:.2f}")
        least = floor(any_record)
        row.append("–" if least is None else digits(least))
        row.append(f"{least / ours['microseconds']:.0%}".replace("%", " %") if ours and least else "–")
        rows.append(row)
    heads = ["network, batch", "precision", OURS, *PEERS, "better peer", "floor", "reached"]
    shown = len(heads) if floors else heads.index("floor")
    return markdown(heads[:shown], (row[:shown] for row in rows))


def errors_table(records: Sequence[Record]) -> str:
    """Errors of a product, a row for each precision, a column for each contender."""
    errors: dict[str, dict[str, float]] = {}
    for record in (record for record in records if record.get("error") is not None):
        errors.setdefault(record["precision"], {})[record["contender"].partition(",")[0]] = record["error"]
    names = list(dict.fromkeys(name for found in errors.values() for name in found))
    rows = [
        [precision, *(f"{found[name]:.1e}" if name in found else "–" for name in names)]
        for precision, found in errors.items()
    ]
    return markdown(["precision", *names], rows)


def products_table(records: Sequence[Record]) -> str:
    """TFLOP/s of a step's products by precision and form, medians of its launches, and the slowest beside cuBLAS."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in (record for record in records if "kernel" in record):
        groups.setdefault((record["precision"], record["form"]), []).append(record)
    rows = []
    for (precision, form), found in groups.items():
        row = [precision, FORMS[form]]
        for way in ("", "alone_", "cublas_"):
            row.append(
                f"{statistics.median(1e3 * each['gigaflop'] / each[f'{way}microseconds'] for each in found):.0f}"
            )
        for way in ("alone_", ""):
            ratios = [each["cublas_microseconds"] / each[f"{way}microseconds"] for each in found]
            row.append(f"× {statistics.median(ratios):.2f} (× {min(ratios):.2f})")
        rows.append(row)
    heads = ["precision", "product", "in a step", "alone", "cuBLAS", "alone / cuBLAS", "in a step / cuBLAS"]
    return markdown(heads, rows)


def surroundings(records: Sequence[Record]) -> str:
    """The card, the versions, and the commits that were measured."""
    about = records[0]
    names = {"torch": "PyTorch", "jax": "JAX"}
    versions = [f"{name} {about['versions'][key]}" for key, name in names.items() if about["versions"].get(key)]
    commits = dict.fromkeys(record["commit"][:10] for record in records if record.get("commit"))
    ours = f"mlpgpu {about['versions'][OURS]}" + (f" at {' and '.join(commits)}" if commits else "")
    return ", ".join([f"{about['card']}, driver {about['driver']}", *versions, ours])


def readme_part(records: Sequence[Record]) -> str:
    """Six of the workloads and precisions."""
    steps = [record for record in records if "contender" in record]
    chosen = [record for record in steps if (record["workload"], record["precision"]) in README_ROWS]
    leads = [times for best in by_workload(steps).values() if (times := lead(best)) is not None]
    about = f"Microseconds of a training step on an {surroundings(records)}; each peer in its fastest form, by name."
    if leads:
        extent = f"{min(leads):.2f} to {max(leads):.2f} times"
        about += f" In all {len(leads)} cases measured the better peer takes {extent} as long."
    return "\n\n".join([fill(about), steps_table(chosen, floors=False)])


def page_part(records: Sequence[Record]) -> str:
    """All that was measured, for docs/results.md."""
    parts = [
        fill(
            f"One run of `benchmarks/peers.py` on an {surroundings(records)}: microseconds of a training step, medians "
            "of rounds in which all contenders take turns, each peer in its fastest form, by name. *Better peer* says "
            "how many times as long as mlpgpu the faster of the two takes. *Floor* is the step's operations at the "
            "rate of the tensor cores or its bytes at that of the memory, whichever takes longer, and *reached* is how "
            "much of it mlpgpu reaches."
        ),
        steps_table(records),
        f"![Microseconds a step by workload and precision]({CHART.name})",
        fill(
            "What a precision is worth: the error of a product of two matrices of 4,096 by 4,096 normal values against "
            "float64, relative, by Frobenius norms."
        ),
        errors_table(records),
    ]
    if any("kernel" in record for record in records):
        about = (
            "TFLOP/s of the products of 4096-4096-4096-4096-4096: as its steps launch them, with the bias, the "
            "activation or its derivative, or the update of the weights; alone, where the same kernels only store "
            "what they computed; and by cuBLAS. All multiplied the same numbers in turns of 5 ms on the warm card. "
            "Figures are medians over a step's launches of that product, in brackets the launch that compares worst."
        )
        parts += [fill(about), products_table(records)]
    return "\n\n".join(parts)


# --- predictions ---


def by_task(records: Iterable[Record]) -> dict[tuple[str, str, str, int], dict[str, Record]]:
    """Of each place, network, type of inputs and number of rows, the record of each contender's fastest form."""
    found: dict[tuple[str, str, str, int], dict[str, Record]] = {}
    for record in records:
        best = found.setdefault((record["place"], record["network"], record["dtype"], record["rows"]), {})
        who = record["contender"]
        if who not in best or record["microseconds"] < best[who]["microseconds"]:
            best[who] = record
    return found


def predictions_table(records: Sequence[Record]) -> str:
    """Microseconds of a call, median and 99th percentile, a row for each task of one place on one backend."""
    names = [name for name in PREDICTING if any(record["contender"] == name for record in records)]
    threads = {record["threads"] for record in records if record["backend"] == "cpu"}
    rows = []
    for (_, network, dtype, count), best in by_task(records).items():
        row = [network, dtype, f"{count:,}"]
        for name in names:
            if name not in best:
                row.append("–")
                continue
            record = best[name]
            figures = f"{digits(record['microseconds'])} ({digits(record['p99'])})"
            form = "" if name == OURS else f" {record['form']}"
            form += (
                f", {record['threads']} thread{'s' * (record['threads'] > 1)}"
                if name != OURS and len(threads) > 1
                else ""
            )
            row.append(
                f"**{digits(record['microseconds'])}** ({digits(record['p99'])})" if not form else figures + form
            )
        peers = [record["microseconds"] for name, record in best.items() if name != OURS]
        row.append(f"× {min(peers) / best[OURS]['microseconds']:.2f}" if peers and OURS in best else "–")
        rows.append(row)
    return markdown(["network", "inputs", "rows", *names, "best peer"], rows)


def predictions_part(records: Sequence[Record]) -> str:
    """All that predict.py measured, for docs/results.md."""
    parts = []
    for backend in dict.fromkeys(record["backend"] for record in records):
        of_backend = [record for record in records if record["backend"] == backend]
        names = {"scikit-learn": "scikit-learn", "torch": "PyTorch", "onnxruntime": "ONNX Runtime", "jax": "JAX"}
        about = of_backend[0]
        versions = [f"{name} {about['versions'][key]}" for key, name in names.items() if about["versions"].get(key)]
        commit = f" at {about['commit'][:10]}" if about["commit"] else ""
        machine = f"{about['cores']} cores of {about['machine']}"
        if backend == "cuda":
            machine = f"an {about['card']}, driver {about['driver']}"
        ours = f"mlpgpu {about['versions'][OURS]}{commit}"
        for place in dict.fromkeys(record["place"] for record in of_backend):
            parts += [
                fill(f"{PLACES[place]}, on {', '.join([machine, *versions, ours])}:"),
                predictions_table([record for record in of_backend if record["place"] == place]),
            ]
    return "\n\n".join([*parts, f"![Microseconds of a prediction by network and rows]({PREDICTIONS_CHART.name})"])


def draw_predictions(records: Sequence[Record], path: Path) -> None:
    """A panel for each backend, place and network of float32 inputs: microseconds over rows, both logarithmic."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in (record for record in records if record["dtype"] == "float32"):
        groups.setdefault((record["backend"], record["place"], record["network"]), []).append(record)
    columns = max(1, min(3, len(groups)))
    height = max(1, -(-len(groups) // columns))
    figure = Figure(figsize=(4.2 * columns, 3.2 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).ravel()
    for axes, ((backend, place, network), of_panel) in zip(panels, groups.items(), strict=False):
        for name in PREDICTING:
            best = sorted(
                (task[3], each[name]["microseconds"]) for task, each in by_task(of_panel).items() if name in each
            )
            if best:
                rows, micro = zip(*best, strict=True)
                axes.loglog(rows, micro, marker="o", markersize=3, color=COLOURS[name], label=name)
        axes.set_title(f"{network}, {backend}, {'host to host' if place == 'host' else 'evaluated'}", fontsize=9)
        axes.set_xlabel("rows", fontsize=8)
        axes.set_ylabel("µs", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=150)


# --- pages ---


def fill(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel for each workload, a group of bars for each precision."""
    found = by_workload(records)
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
        axes.margins(y=0.12)  # room for the figures below the title
        axes.set_ylabel(f"{unit} a step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(workloads) :]:
        axes.set_visible(False)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def insert(path: Path, part: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The file's text with ``part`` between the marks."""
    begin, end = marks
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path}: expected the marks {begin} and {end}")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tables and charts of what peers.py and predict.py measured.")
    parser.add_argument("results", type=Path, nargs="?", help="of either (default: both in benchmarks/results/)")
    given = parser.parse_args().results
    for path in [given] if given else [each for each in (RESULTS, PREDICTIONS) if each.exists()]:
        records = read(path)
        if "place" in records[0]:
            PAGE.write_text(insert(PAGE, predictions_part(records), PREDICTIONS_MARKS), encoding="utf-8")
            draw_predictions(records, PREDICTIONS_CHART)
            continue
        for page, part in ((README, readme_part(records)), (PAGE, page_part(records))):
            page.write_text(insert(page, part), encoding="utf-8")
        draw(records, CHART)


if __name__ == "__main__":
    main()
