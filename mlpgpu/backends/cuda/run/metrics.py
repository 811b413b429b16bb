"""Metrics on a card: what an evaluation launches for them beside the plan, as plain data.

The sums of most metrics grow batch by batch.  For ranking metrics each batch leaves its scores behind; after the last
batch each curve is a sort, two prefix sums and an area.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ....metrics import METRICS
from ....plan import Plan
from ...evaluation import compared_widths, zero_sums
from .. import kernels
from ..kernels import WARPS_PER_BLOCK, ceil_div, strided_grid
from ..kernels.launches import At, Launch, Value
from .primitives import Chain, grid_over

AREA_BLOCKS = 256  # at most, as one block adds their sums up
CLEARED = {"tile sums", "areas done"}  # the arrays of ranking metrics that are 0 before an evaluation


def sums_of(metric: str) -> str:
    """The array of a metric's sums."""
    return f"sums of {metric}"


def metric_bytes(plan: Plan, metrics: Sequence[str]) -> dict[str, int]:
    """Bytes of each array that metrics need beside the plan's."""
    sizes = dict.fromkeys(("predicted", "actual"), 4 * plan.capacity)
    return sizes | {sums_of(name): sums.nbytes for name, sums in zero_sums(plan, metrics).items()}


def metric_launches(plan: Plan, metrics: Sequence[str], *, textured: bool = True) -> list[Launch]:
    """The launches that, after a batch's evaluation, add to the sums of metrics, or keep the scores to be ranked."""
    assert plan.target_kind is not None
    widths, output, targets = compared_widths(plan), At(plan.output), At("targets")
    rows: dict[str, Value] = {"step": At("step"), "order": At("order")}
    launches, kinds = [], {METRICS[name].of for name in metrics}
    if kinds & {"classes", "rankings"}:
        entry, grid = kernels.classes(plan.target_kind, textured=textured), ceil_div(plan.capacity, WARPS_PER_BLOCK)
        values = {
            **rows, "output": output, "targets": targets, "predicted": At("predicted"), "actual": At("actual"),
            "n": plan.n_out, "classes": widths["classes"],
        }  # fmt: skip
        launches.append(Launch(entry, (grid, 1, 1), values))
    if "rankings" in kinds:
        values = {
            **rows, "weights": At("weights"), "output": output, "actual": At("actual"), "keys": At("rank keys"),
            "of_class": At("rank classes"), "of_weight": At("rank weights"), "n": plan.n_out,
            "curves": widths["rankings"],
        }  # fmt: skip
        launches.append(Launch(kernels.rank_keys(), grid_over(plan.capacity * widths["rankings"]), values))
    compared = {"classes": (At("predicted"), At("actual")), "numbers": (output, targets)}
    for name, sums in zero_sums(plan, metrics).items():
        of = METRICS[name].of
        if of == "rankings":
            continue
        values = {
            **rows, "weights": At("weights"), "output": compared[of][0], "targets": compared[of][1],
            "sums": At(sums_of(name)), "n": widths[of],
        }  # fmt: skip
        columns = math.prod(sums.shape[1:])
        launches.append(Launch(kernels.metric(name, textured=textured), (columns, 1, 1), values))
    return launches


# --- ranking metrics ---


def rank_bytes(plan: Plan, metrics: Sequence[str], rows: int) -> dict[str, int]:
    """Bytes of each array that ranking metrics need for a set of so many rows; empty where there are none of them."""
    if not any(METRICS[name].of == "rankings" for name in metrics):
        return {}
    sizes = {"rank keys": 4 * compared_widths(plan)["rankings"] * rows}
    sizes |= dict.fromkeys(("rank classes", "rank weights", "sorted keys", "ranked rows", "sorted rows"), 4 * rows)
    sizes |= dict.fromkeys(("positives", "negatives"), 8 * rows)
    return sizes | _ranked(plan, metrics, rows)[0].bytes | {"areas": 8 * AREA_BLOCKS, "areas done": 4}


def rank_launches(plan: Plan, metrics: Sequence[str], rows: int) -> list[Launch]:
    """The launches that fill the sums of ranking metrics after the last batch of a set of so many rows."""
    return _ranked(plan, metrics, rows)[1]


def _ranked(plan: Plan, metrics: Sequence[str], rows: int) -> tuple[Chain, list[Launch]]:
    names = [name for name in metrics if METRICS[name].of == "rankings"]
    widths, chain = compared_widths(plan), Chain()
    curves, first = widths["rankings"], widths["classes"] - widths["rankings"]  # the first curve's class
    return chain, [
        launch for curve in range(curves if names else 0) for launch in _curve(chain, rows, curve, curves, first, names)
    ]


def _curve(chain: Chain, rows: int, curve: int, curves: int, first: int, metrics: Sequence[str]) -> Iterator[Launch]:
    """Sort a curve's keys, and add the area up for each metric."""
    keys, ranked = At("rank keys", curve * rows), At("ranked rows")
    spare = At("sorted keys"), At("sorted rows")
    yield from chain.sort("uint32", rows, keys, None, sorted_values=ranked, spare=spare)
    sides: dict[str, Value] = {"positives": At("positives"), "negatives": At("negatives")}
    values: dict[str, Value] = {
        "rows": ranked, "of_class": At("rank classes"), "of_weight": At("rank weights"), "n": rows,
        "positive": first + curve,
    }  # fmt: skip
    yield Launch(kernels.rank_weights(), grid_over(rows), values | sides)
    for side in sides:
        yield chain.prefix_sum("float64", At(side), rows, exclusive=False)
    grid = strided_grid(rows, AREA_BLOCKS)
    for name in metrics:
        values = {
            "keys": keys, **sides, "n": rows, "partials": At("areas"), "arrived": At("areas done"),
            "sums": At(sums_of(name)), "curve": curve, "curves": curves,
        }  # fmt: skip
        yield Launch(kernels.rank_area(name), grid, values)
