"""Metrics on a card: what an evaluation launches for them beside the plan, as plain data.

Sums are added to batch by batch.  Of metrics of ranks a batch leaves scores behind; once the last one
is through, each curve is a sort, two prefix sums and an area.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...metrics import METRICS
from ...plan import Plan
from ..evaluation import compared_widths, zero_sums
from . import kernels
from .kernels import ROW_THREADS, SCAN_TILE, SORT_DIGITS, WARPS_PER_BLOCK, ceil_div
from .launches import At, Launch, Value

KEY_BITS, DIGIT_BITS = 32, 8
MOST_BLOCKS = 1024  # of a kernel that goes through a whole set
AREA_BLOCKS = 256  # whose sums one block adds up

CLEARED = {"nodes", "areas done"}  # of the arrays of ranks, those that are 0 before an evaluation


def sums_of(metric: str) -> str:
    """The array of a metric's sums."""
    return f"sums of {metric}"


def metric_bytes(plan: Plan, metrics: Sequence[str]) -> dict[str, int]:
    """Bytes of each array that metrics take beside the plan's."""
    sizes = dict.fromkeys(("predicted", "actual"), 4 * plan.capacity)
    return sizes | {sums_of(name): sums.nbytes for name, sums in zero_sums(plan, metrics).items()}


def metric_launches(plan: Plan, metrics: Sequence[str], *, textured: bool = True) -> list[Launch]:
    """What adds a batch to the sums of metrics once its evaluation has run, or leaves its scores to be ranked."""
    assert plan.target_kind is not None
    widths, output, targets = compared_widths(plan), At(plan.output), At("targets")
    rows: dict[str, Value] = {"step": At("step"), "order": At("order")}
    launches, kinds = [], {METRICS[name].of for name in metrics}
    if kinds & {"classes", "ranks"}:
        entry, grid = kernels.classes(plan.target_kind, textured=textured), ceil_div(plan.capacity, WARPS_PER_BLOCK)
        values = {
            **rows, "output": output, "targets": targets, "predicted": At("predicted"), "actual": At("actual"),
            "n": plan.n_out, "classes": widths["classes"],
        }  # fmt: skip
        launches.append(Launch(entry, (grid, 1, 1), values))
    if "ranks" in kinds:
        values = {
            **rows, "weights": At("weights"), "output": output, "actual": At("actual"), "keys": At("rank keys"),
            "of_class": At("rank classes"), "of_weight": At("rank weights"), "n": plan.n_out, "curves": widths["ranks"],
        }  # fmt: skip
        launches.append(Launch(kernels.rank_keys(), _over(plan.capacity * widths["ranks"]), values))
    compared = {"classes": (At("predicted"), At("actual")), "numbers": (output, targets)}
    for name, sums in zero_sums(plan, metrics).items():
        of = METRICS[name].of
        if of == "ranks":
            continue
        values = {
            **rows, "weights": At("weights"), "output": compared[of][0], "targets": compared[of][1],
            "sums": At(sums_of(name)), "n": widths[of],
        }  # fmt: skip
        columns = math.prod(sums.shape[1:])
        launches.append(Launch(kernels.metric(name, textured=textured), (columns, 1, 1), values))
    return launches


# --- ranks ---


def _over(elements: int) -> tuple[int, int, int]:
    return min(ceil_div(elements, ROW_THREADS), MOST_BLOCKS), 1, 1


def _digit_counts(rows: int) -> int:
    """How many counts a pass of the sort has, of each digit in each tile."""
    return SORT_DIGITS * ceil_div(rows, kernels.sort_tile("uint32"))


def _node_words(elements: int) -> int:
    """Words that a prefix sum finds at 0: its ticket and its tiles' nodes."""
    return 1 + ceil_div(elements, SCAN_TILE)


def rank_bytes(plan: Plan, metrics: Sequence[str], rows: int) -> dict[str, int]:
    """Bytes of each array that metrics of ranks take for a set of so many rows; of none without them."""
    if not any(METRICS[name].of == "ranks" for name in metrics):
        return {}
    curves = compared_widths(plan)["ranks"]
    sizes = {"rank keys": 4 * curves * rows, "digit counts": 4 * _digit_counts(rows)}
    sizes |= dict.fromkeys(("rank classes", "rank weights", "sorted keys", "ranked rows", "sorted rows"), 4 * rows)
    sizes |= dict.fromkeys(("positives", "negatives"), 8 * rows)
    passes = KEY_BITS // DIGIT_BITS
    nodes = curves * (passes * _node_words(_digit_counts(rows)) + 2 * _node_words(rows))
    return sizes | {"nodes": 8 * nodes, "areas": 8 * AREA_BLOCKS, "areas done": 4}


def rank_launches(plan: Plan, metrics: Sequence[str], rows: int) -> list[Launch]:
    """What fills the sums of metrics of ranks when a set of so many rows is through."""
    names = [name for name in metrics if METRICS[name].of == "ranks"]
    widths = compared_widths(plan)
    curves, first = widths["ranks"], widths["classes"] - widths["ranks"]  # the first curve's class
    chain = _Chain(rows)
    return [launch for curve in range(curves if names else 0) for launch in chain.curve(curve, curves, first, names)]


class _Chain:
    """The launches of one curve after another.  Each prefix sum has nodes of its own, so that one fill clears all."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._nodes = 0  # words given out

    def curve(self, curve: int, curves: int, first: int, metrics: Sequence[str]) -> Iterator[Launch]:
        """Sorts the curve's keys, and adds the area up for each metric."""
        yield from self._sort(At("rank keys", curve * self._rows))
        sides: dict[str, Value] = {"positives": At("positives"), "negatives": At("negatives")}
        values: dict[str, Value] = {
            "rows": At("ranked rows"), "of_class": At("rank classes"), "of_weight": At("rank weights"),
            "n": self._rows, "positive": first + curve,
        }  # fmt: skip
        yield Launch(kernels.rank_weights(), _over(self._rows), values | sides)
        for side in sides:
            yield self._prefix_sum("float64", At(side), self._rows, exclusive=False)
        grid = min(ceil_div(self._rows, ROW_THREADS), AREA_BLOCKS), 1, 1
        for name in metrics:
            values = {
                "keys": At("rank keys", curve * self._rows), **sides, "n": self._rows, "parts": At("areas"),
                "arrived": At("areas done"), "sums": At(sums_of(name)), "curve": curve, "curves": curves,
            }  # fmt: skip
            yield Launch(kernels.rank_area(name), grid, values)

    def _sort(self, keys: At) -> Iterator[Launch]:
        """Keys in place, by an even number of passes; and the rows they belonged to."""
        tiles, counts = ceil_div(self._rows, kernels.sort_tile("uint32")), At("digit counts")
        targets = (At("sorted keys"), At("sorted rows")), (keys, At("ranked rows"))
        source: tuple[At, At | None] = keys, None  # at first rows are the keys' places
        for number, shift in enumerate(range(0, KEY_BITS, DIGIT_BITS)):
            target = targets[number % 2]
            of_pass: dict[str, Value] = {"keys": source[0], "n": self._rows, "shift": shift}
            moved: dict[str, Value] = {
                "values": source[1], "starts": counts, "keys_out": target[0], "values_out": target[1],
            }  # fmt: skip
            yield Launch(kernels.sort_counts("uint32"), (tiles, 1, 1), of_pass | {"counts": counts})
            yield self._prefix_sum("int32", counts, _digit_counts(self._rows), exclusive=True)
            yield Launch(kernels.sort_scatter("uint32"), (tiles, 1, 1), of_pass | moved)
            source = target

    def _prefix_sum(self, dtype: str, array: At, n: int, *, exclusive: bool) -> Launch:
        ticket = self._nodes
        self._nodes += _node_words(n)
        values: dict[str, Value] = {
            "x": array, "y": array, "n": n, "exclusive": int(exclusive), "ticket": At("nodes", ticket),
            "nodes": At("nodes", ticket + 1),
        }  # fmt: skip
        return Launch(kernels.prefix_sum(dtype), (ceil_div(n, SCAN_TILE), 1, 1), values)
