"""The drawings of how_it_works.md, as SVG; what they say of a plan is read from one."""

from __future__ import annotations

import io
from collections.abc import Callable

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import mlpgpu as mg
from mlpgpu.backends.cuda.lower.lowering import lower, passes
from mlpgpu.backends.cuda.profile.paths import CARDS
from mlpgpu.backends.cuda.select.setting import Setting
from mlpgpu.plan import Plan

BLUE, ORANGE, GREEN, GREY = "#cfe2f3", "#fce5cd", "#d9ead3", "#e6e6e6"
CARD = CARDS["H200"]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches without axes, on which a unit is an inch; y points down."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str = GREY) -> None:
    """A rectangle with its upper left corner at (x, y), its text in the middle."""
    axes.add_patch(
        mpl.patches.FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.06", fc=colour, ec="k")
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """``text`` stands right of its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "fc": "k", "shrinkA": 0, "shrinkB": 0})
    middle = ((start[0] + end[0]) / 2 + 0.1, (start[1] + end[1]) / 2)
    axes.text(*middle, text, ha="left", va="center", fontsize=8, style="italic")


def describe_plan_run() -> Figure:
    figure, axes = canvas(7.5, 4.1)
    for x, text in ((0.3, "Network"), (2.8, "Loss"), (5.3, "Optimizer")):
        box(axes, x, 0.15, 1.9, 0.5, text, BLUE)
        arrow(axes, (x + 0.95, 0.65), (3.75 + 0.25 * (x - 2.8), 1.3), "plan.lower" if x == 2.8 else "")
    box(
        axes,
        1.5,
        1.3,
        4.5,
        0.6,
        "Plan: operations over named buffers\nplain data, printed and tested without a device",
        GREEN,
    )
    for x, name, text in (
        (0.3, "CPU backend", "NumPy, preallocated buffers:\nthe specification"),
        (4.2, "CUDA backend", "kernels, captured graphs,\nor one persistent kernel"),
    ):
        arrow(axes, (3.75 + (x - 2.2) * 0.5, 1.9), (x + 1.5, 2.6), "compile")
        box(axes, x, 2.6, 3.0, 1.2, f"{name}\n\n{text}", ORANGE)
    return figure


def small_plan() -> Plan:
    """64-128-10 with dropout and a clipped norm at batch size 128."""
    network = mg.Network([mg.Dense(64, 128, activation="relu"), mg.Dropout(0.1), mg.Dense(128, 10)], seed=1)
    optimizer = mg.Momentum(0.1, clip_norm=1.0)
    return mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=128, backend="cpu").plan


def step() -> Figure:
    plan = small_plan()
    height, rows = 0.36, len(plan.training)
    figure, axes = canvas(7.5, 0.5 + rows * (height + 0.14))
    for number, operation in enumerate(plan.training):
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in type(operation).__name__).strip()
        once = words in ("reduce", "norm", "update")
        colour = GREY if once else ORANGE if words.endswith("backward") else BLUE
        y = 0.15 + number * (height + 0.14)
        box(axes, 0.3, y, 1.9, height, words, colour)
        if number:
            arrow(axes, (1.25, y - 0.14), (1.25, y))
        if operation.reads:
            axes.text(2.5, y + height / 2, f"reads {', '.join(operation.reads)}", va="center", fontsize=8)
        axes.text(5.1, y + height / 2, f"writes {', '.join(operation.writes)}", va="center", fontsize=8)
    return figure


def ordered_sums() -> Figure:
    figure, axes = canvas(7.5, 2.6)
    for row, (start, length) in enumerate(((0.9, 2.4), (0.9, 1.5), (0.9, 1.9))):
        y = 0.2 + row * 0.6
        axes.text(0.75, y + 0.2, f"shard {row}", ha="right", va="center", fontsize=9)
        box(axes, start, y, length, 0.4, "forward … backward", BLUE)
        arrow(axes, (start + length, y + 0.2), (4.1, y + 0.2))
        box(axes, 4.1, y, 0.8, 0.4, f"partial {row}", ORANGE)
        arrow(axes, (4.9, y + 0.2), (5.4, 1.0 + 0.1 * (row - 1)))
    box(axes, 5.4, 0.65, 1.9, 0.7, "reduce\n(p₀ + p₁) + p₂", GREY)
    arrow(axes, (0.9, 2.2), (4.0, 2.2))
    axes.text(2.4, 2.4, "time", ha="center", fontsize=8)
    return figure


def addressed_random() -> Figure:
    figure, axes = canvas(8.0, 2.1)
    for y, text, broken in ((0.25, "unbroken", False), (1.35, "resumed", True)):
        axes.text(0.9, y + 0.25, text, ha="right", va="center", fontsize=9)
        for number, label in enumerate(("1", "2", "…", "99", "100", "101", "…")):
            x = 1.1 + number * 0.85 + (0.35 if broken and number >= 4 else 0.0)
            box(axes, x, y, 0.7, 0.5, label, GREEN if label == "100" else GREY)
        if broken:
            axes.text(4.59, y + 0.25, "⚡", ha="center", va="center", fontsize=12)
    axes.annotate("", (5.2, 1.3), (4.85, 0.8), arrowprops={"arrowstyle": "<|-|>", "fc": "k"})
    axes.text(5.25, 1.05, "the same words at (seed, purpose, step 100, …)", fontsize=8, va="center", ha="left")
    return figure


def from_plan_to_launches() -> Figure:
    layers = [mg.Dense(10_000, 90, activation="relu"), mg.Dense(90, 90, activation="relu"), mg.Dense(90, 10)]
    network = mg.Network(layers, seed=1)
    plan = mg.Trainer(network, "softmax_cross_entropy", mg.Momentum(0.1), batch_size=128, backend="cpu").plan
    made = passes(plan, Setting(CARD.multiprocessors, CARD.arch, "float32", textured=True)).training
    lowered = lower(plan, multiprocessors=CARD.multiprocessors, source="float32", arch=CARD.arch)
    assert made is not None
    figure, axes = canvas(7.5, 2.3)
    axes.text(0.15, 0.2, f"10000-90-90-10 at 128 rows, as an {CARD.name} would train it", va="center", fontsize=9)
    texts = (
        f"plan\n{len(plan.training)} operations",
        "select\na path for each",
        f"fuse\n{len(made.groups)} groups",
        f"emit\n{len(lowered.shards[0])} launches",
        "overlap\nwhich begin early",
    )
    for number, text in enumerate(texts):
        x = 0.15 + number * 1.48
        box(axes, x, 0.5, 1.28, 0.8, text, GREEN if number == 0 else ORANGE)
        if number:
            arrow(axes, (x - 0.2, 0.9), (x, 0.9))
    groups = [type(group).__name__ for group in made.groups]
    for number, name in enumerate(groups):
        width = 7.2 / len(groups)
        box(axes, 0.15 + number * width, 1.7, width - 0.12, 0.4, name, GREY)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "describe_plan_run": describe_plan_run,
    "step": step,
    "ordered_sums": ordered_sums,
    "addressed_random": addressed_random,
    "passes": from_plan_to_launches,
}


def draw_all() -> dict[str, bytes]:
    """Each drawing by its file's name, the same bytes every time."""
    drawn = {}
    with mpl.rc_context({"svg.hashsalt": "mlpgpu", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        for name, draw in DRAWINGS.items():
            file = io.BytesIO()
            draw().savefig(file, format="svg", metadata={"Date": None})
            drawn[f"{name}.svg"] = file.getvalue()
    return drawn
