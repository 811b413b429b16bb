"""The report of benchmarks/map.py: ratios over width and batch, their distribution, and the worst points."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlpgpu import text

WORST = 20
OURS = "mlpgpu"
LIMITS = (0.9, 1.0, 1.3)  # ratios below which points are counted
CLOSE = 1.1  # times the fastest way's time, up to which the chosen one is as good
COLOURS_REACH = 3.0  # a ratio and its inverse, at which colours end
Line = dict[str, Any]


def merged(lines: Iterable[Line]) -> list[Line]:
    """A line for each point: of several ones the last of each peer counts, so that peers may come from several runs."""
    found: dict[tuple[str, str, int], Line] = {}
    for line in lines:
        key = line["backend"], line["seed"], line["number"]
        before = found.get(key, {})
        ratios = {**before.get("ratios", {}), **line.get("ratios", {})}
        fastest = {**before.get("fastest", {}), **line.get("fastest", {})}
        contenders = {**before.get("contenders", {}), **line["contenders"]}
        joined = {**before, **line, "ratios": ratios, "fastest": fastest, "contenders": contenders}
        joined["ratio"] = min(ratios.values(), default=None)
        found[key] = joined
    return list(found.values())


def summary(line: Line) -> str:
    """A point's times, ratios and failures in a few words."""
    parts = []
    for name, each in line["contenders"].items():
        if "microseconds" in each:
            parts.append(f"{name} {each['microseconds']:,.1f} µs")
        elif "failed" in each:
            parts.append(f"{name} FAILED: {each['failed']}")
    if "failed" in line:
        parts.append(f"FAILED: {line['failed']}")
    if line.get("ratio") is not None:
        parts.append(f"× {line['ratio']:.2f}")
    return "; ".join(parts)


def report(lines: Iterable[Line], picture: Path | None = None) -> str:
    """The figures as text; with ``picture`` the map is drawn there too."""
    points = merged(lines)
    measured = [line for line in points if line["ratio"] is not None]
    parts = [f"{len(points)} points, {len(measured)} of them beside a peer"]
    if measured:
        parts += [_where(measured), _counts(measured), _histogram(measured), _worst(measured)]
    parts += [_ways(points)] if any(line.get("ways") for line in points) else []
    failures = [f"{_name(line)}: {summary(line)}" for line in points if "FAILED" in summary(line)]
    other = [f"{_name(line)}: {', '.join(line['other_losses'])}" for line in points if line.get("other_losses")]
    parts += ["\n".join(["failed:", *failures])] if failures else []
    parts += ["\n".join(["trained to another loss than mlpgpu:", *other])] if other else []
    if picture is not None and measured:
        draw(measured, picture)
    return "\n\n".join(parts)


def _where(points: list[Line]) -> str:
    """What the points were measured on."""
    on = sorted({f"{line.get('card') or line['machine']}, driver {line.get('driver')}" for line in points})
    versions = {
        f"{name} {version}" for line in points for name, version in line["versions"].items() if version is not None
    }
    commits = sorted({str(line.get("commit"))[:10] for line in points})
    return f"{'; '.join(on)}; {', '.join(sorted(versions))}; commit {', '.join(commits)}"


def _counts(points: list[Line]) -> str:
    """How ratios are distributed, in all and by precision and peer."""
    rows = [("", "points", "least", "median", "greatest", *(f"< {limit}" for limit in LIMITS), "error")]
    groups = {"all": points}
    for key, title in (("precision", str), ("optimizer", str), ("dropout", lambda v: "dropout" if v else "no dropout")):
        for line in points:
            groups.setdefault(title(line[key]), []).append(line)
    cells = {name: [line["ratio"] for line in group] for name, group in groups.items()}
    for library in sorted({library for line in points for library in line["ratios"]}):
        cells[f"beside {library}"] = [line["ratios"][library] for line in points if library in line["ratios"]]
    for name, values in cells.items():
        found = [
            line["contenders"][OURS]["error"]
            for line in groups.get(name, [])
            if line["contenders"].get(OURS, {}).get("error") is not None
        ]
        worst = f"{max(found):.1e}" if found else ""
        numbers = [min(values), statistics.median(values), max(values)]
        below = [str(sum(value < limit for value in values)) for limit in LIMITS]
        rows.append((name, str(len(values)), *(f"{value:.2f}" for value in numbers), *below, worst))
    return text.table(rows, "<" + ">" * (len(rows[0]) - 1))


EDGES = (0.0, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.5, 1.8, 2.2, 2.7, 3.5, 5.0, 8.0, math.inf)


def _histogram(points: list[Line]) -> str:
    """Bars of ratios."""
    rows = [("ratio", "points", "")]
    for low, high in pairwise(EDGES):
        count = sum(low <= line["ratio"] < high for line in points)
        rows.append((f"{low:g} to {high:g}", str(count), "█" * math.ceil(50 * count / len(points))))
    return text.table(rows, "<><")


def _name(line: Line) -> str:
    extra = [line["optimizer"], line["activation"]]
    extra += [f"dropout {line['dropout']}"] if line["dropout"] else []
    extra += ["bytes"] if line["source"] == "uint8" else []
    widths = "-".join(map(str, line["widths"]))
    return f"{line['seed']} {line['number']}: {widths}, {line['batch_size']:,}, {line['precision']}, {' '.join(extra)}"


def _worst(points: list[Line]) -> str:
    """The points with the least ratios, and what takes most of mlpgpu's step there."""
    heads = ("network, batch, precision", "µs", "peer's", "ratio", "costs most", "share", "of", "error", "peak MB")
    rows = [heads]
    for line in sorted(points, key=lambda line: line["ratio"])[:WORST]:
        library = min(line["ratios"], key=line["ratios"].__getitem__)
        both = line["contenders"][OURS], line["contenders"].get(line["fastest"].get(library), {})
        peer = both[1]
        costliest = line.get("costliest", {})
        rows.append(
            (
                _name(line),
                f"{line['contenders'][OURS]['microseconds']:,.1f}",
                f"{peer['microseconds']:,.1f} {library}" if "microseconds" in peer else library,
                f"{line['ratio']:.2f}",
                costliest.get("launch", ""),
                f"{costliest['share']:.0%}" if costliest else "",
                str(costliest.get("launches", "")),
                " / ".join(_or_dash(each.get("error"), ".1e") for each in both),
                " / ".join(_or_dash(each.get("peak_bytes"), ",.0f", 1e-6) for each in both),
            )
        )
    note = (
        "the share is of the sum over all launches; errors of one step's gradient against float64, and peaks of memory"
    )
    title = f"the worst {len(rows) - 1} ({note}: mlpgpu's / the peer's)"
    return "\n".join([title, text.table(rows, "<>>><>>>>")])


def _ways(points: list[Line]) -> str:
    """Where mlpgpu in another way than the chosen one takes less, and how often the chosen one is within a tenth."""
    measured = [line for line in points if line.get("ways")]
    least = {_name(line): min(line["ways"].items(), key=lambda way: way[1]) for line in measured}
    close = sum(ratio >= 1 / CLOSE for _, ratio in least.values())
    rows = [("network, batch, precision", "fastest other way", "of the chosen one's time")]
    for name, (way, ratio) in sorted(least.items(), key=lambda each: each[1][1]):
        rows.append((name, way, f"{ratio:.2f}"))
    title = f"of {len(measured)} points with other ways the chosen one takes at most {CLOSE} times the fastest: {close}"
    return "\n".join([title, text.table(rows, "<<>")])


def _or_dash(value: float | None, form: str, factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


# --- the picture ---


def draw(points: list[Line], path: Path) -> None:
    """Ratios by the widest hidden layer and the batch, a panel a precision, above their histogram."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    panels = [
        (backend, precision)
        for backend in sorted({line["backend"] for line in points})
        for precision in ("float32", "tf32", "bfloat16")
        if any((line["backend"], line["precision"]) == (backend, precision) for line in points)
    ]
    figure = Figure(figsize=(5 * max(2, len(panels)), 8), layout="constrained")
    grid = figure.add_gridspec(2, len(panels), height_ratios=(3, 2))
    colours = LogNorm(1 / COLOURS_REACH, COLOURS_REACH)
    axes = []
    for place, (backend, precision) in enumerate(panels):
        panel = figure.add_subplot(grid[0, place])
        shown = [line for line in points if (line["backend"], line["precision"]) == (backend, precision)]
        # Points of one width and batch are drawn worst last, above the others.
        shown.sort(key=lambda line: -line["ratio"])
        widest = [max(line["widths"][1:-1]) for line in shown]
        batches = [line["batch_size"] for line in shown]
        values = [line["ratio"] for line in shown]
        edges = ["black" if value < 1 else "none" for value in values]
        dots = panel.scatter(widest, batches, c=values, norm=colours, cmap="RdYlGn", edgecolors=edges, s=60)
        panel.set(xscale="log", yscale="log", xlabel="widest hidden layer", title=f"{precision} on {backend}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        axes.append(panel)
    axes[0].set_ylabel("batch")
    bar = figure.colorbar(dots, ax=axes, ticks=[1 / 3, 0.5, 0.7, 1, 1.4, 2, 3], extend="both")
    bar.ax.set_yticklabels(["0.33", "0.5", "0.7", "1", "1.4", "2", "3"])
    bar.minorticks_off()  # whose labels would be powers of ten
    bar.set_label("time of the fastest peer / mlpgpu's")
    below = figure.add_subplot(grid[1, :])
    low = min(0.5, *(line["ratio"] for line in points)) if len(points) > 1 else 0.3
    high = max(8.0, *(line["ratio"] for line in points)) if len(points) > 1 else 8.0
    bins = [low * (high / low) ** (k / 40) for k in range(41)]
    below.hist([line["ratio"] for line in points], bins=bins, color="#d1495b")
    below.axvline(1.0, color="black", linewidth=1)
    below.set(xscale="log", xlabel="time of the fastest peer / mlpgpu's", ylabel="points")
    ticks = [ratio for ratio in (0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 3, 5, 8, 15, 30) if low <= ratio <= high]
    below.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks])
    below.minorticks_off()
    figure.savefig(path, dpi=120)
