"""Metrics on a card: what an evaluation launches for them beside the plan, as plain data.

The sums of most metrics grow batch by batch.  For ranking metrics each batch leaves its scores behind; after the last
batch each curve is a sort, two prefix sums and an area.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ....metrics import SUMS, Compared
from ....plan import Plan
from ...evaluation import compared_widths, problem, zero_sums
from .. import kernels
from ..kernels import WARPS_PER_BLOCK, ceil_div, strided_grid
from ..kernels.launches import At, Launch, Value
from .primitives import Chain, grid_over

AREA_BLOCKS = 256  # at most, as one block adds their sums up
CLEARED = {"tile sums", "areas done"}  # the arrays of ranking metrics that are 0 before an evaluation


def has_labels(plan: Plan) -> bool:
    """Whether a row may have any number of labels, each with a curve of its own."""
    return problem(plan) == "multilabel"


def array_of(name: str) -> str:
    """The array of a row of SUMS."""
    return f"sums of {name}"


def metric_bytes(plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """Bytes of each array that rows of SUMS need beside the plan's."""
    sizes = dict.fromkeys(("predicted", "actual", "ranks"), 4 * plan.capacity)
    return sizes | {array_of(name): sums.nbytes for name, sums in zero_sums(plan, names).items()}


def metric_launches(plan: Plan, names: Sequence[str], *, textured: bool = True) -> list[Launch]:
    """The launches that, after a batch's evaluation, add to rows of SUMS, or keep the scores to be ranked."""
    assert plan.target_kind is not None
    widths, output, targets = compared_widths(plan), At(plan.output), At("targets")
    rows: dict[str, Value] = {"step": At("step"), "order": At("order")}
    launches, kinds = [], {SUMS[name].of for name in names}
    grid = ceil_div(plan.capacity, WARPS_PER_BLOCK)
    if kinds & {"classes", "ranks"} or ("rankings" in kinds and not has_labels(plan)):
        entry = kernels.classes(plan.target_kind, textured=textured)
        values = {
            **rows, "output": output, "targets": targets, "predicted": At("predicted"), "actual": At("actual"),
            "n": plan.n_out, "classes": widths["classes"],
        }  # fmt: skip
        launches.append(Launch(entry, (grid, 1, 1), values))
    if "ranks" in kinds:
        values = {
            "step": At("step"), "output": output, "actual": At("actual"), "ranks": At("ranks"), "n": plan.n_out,
        }  # fmt: skip
        launches.append(Launch(kernels.true_class_ranks(), (grid, 1, 1), values))
    if "rankings" in kinds:
        values = {
            **rows, "weights": At("weights"), "output": output, "actual": None if has_labels(plan) else At("actual"),
            "keys": At("rank keys"), "of_class": At("rank classes"), "of_weight": At("rank weights"), "n": plan.n_out,
            "curves": widths["rankings"],
        }  # fmt: skip
        over = grid_over(plan.capacity * widths["rankings"])
        launches.append(Launch(kernels.rank_keys(), over, values))
        if has_labels(plan):
            values = {**rows, "targets": targets, "of_class": At("rank classes"), "n": plan.n_out}
            launches.append(Launch(kernels.rank_labels(textured=textured), over, values))
    compared: dict[Compared, tuple[At, At]] = {
        "classes": (At("predicted"), At("actual")),
        "ranks": (At("ranks"), At("actual")),
        "numbers": (output, targets),
        "probabilities": (output, targets),
    }
    for name, sums in zero_sums(plan, names).items():
        of = SUMS[name].of
        if of == "rankings":
            continue
        values = {
            **rows, "weights": At("weights"), "output": compared[of][0], "targets": compared[of][1],
            "sums": At(array_of(name)), "n": widths[of],
        }  # fmt: skip
        columns = math.prod(sums.shape[1:])
        launches.append(Launch(kernels.metric(name, plan.target_kind, textured=textured), (columns, 1, 1), values))
    return launches


# --- ranking metrics ---


def rank_bytes(plan: Plan, names: Sequence[str], rows: int) -> dict[str, int]:
    """Bytes of each array that ranking metrics need for a set of so many rows; empty where there are none of them."""
    if not any(SUMS[name].of == "rankings" for name in names):
        return {}
    curves = compared_widths(plan)["rankings"]
    sizes = {"rank keys": 4 * curves * rows, "rank classes": 4 * rows * (curves if has_labels(plan) else 1)}
    sizes |= dict.fromkeys(("rank weights", "sorted keys", "ranked rows", "sorted rows"), 4 * rows)
    sizes |= dict.fromkeys(("positives", "negatives"), 8 * rows)
    return sizes | _ranked(plan, names, rows)[0].bytes | {"areas": 8 * AREA_BLOCKS, "areas done": 4}


def rank_launches(plan: Plan, names: Sequence[str], rows: int) -> list[Launch]:
    """The launches that fill the sums of ranking metrics after the last batch of a set of so many rows."""
    return _ranked(plan, names, rows)[1]


def _ranked(plan: Plan, names: Sequence[str], rows: int) -> tuple[Chain, list[Launch]]:
    ranked = [name for name in names if SUMS[name].of == "rankings"]
    widths, chain = compared_widths(plan), Chain()
    curves, first = widths["rankings"], widths["classes"] - widths["rankings"]  # the first curve's class
    launches: list[Launch] = []
    for curve in range(curves if ranked else 0):
        positives = (At("rank classes", curve * rows), 1) if has_labels(plan) else (At("rank classes"), first + curve)
        launches += _curve(chain, rows, curve, curves, positives, ranked)
    return chain, launches


def _curve(
    chain: Chain, rows: int, curve: int, curves: int, positives: tuple[At, int], names: Sequence[str]
) -> Iterator[Launch]:
    """Sort a curve's keys, and add the area up for each metric; ``positives`` are an array and what it has of them."""
    keys, ranked = At("rank keys", curve * rows), At("ranked rows")
    spare = At("sorted keys"), At("sorted rows")
    yield from chain.sort("uint32", rows, keys, None, sorted_values=ranked, spare=spare)
    sides: dict[str, Value] = {"positives": At("positives"), "negatives": At("negatives")}
    values: dict[str, Value] = {
        "rows": ranked, "of_class": positives[0], "of_weight": At("rank weights"), "n": rows,
        "positive": positives[1],
    }  # fmt: skip
    yield Launch(kernels.rank_weights(), grid_over(rows), values | sides)
    for side in sides:
        yield chain.prefix_sum("float64", At(side), rows, exclusive=False)
    grid = strided_grid(rows, AREA_BLOCKS)
    for name in names:
        values = {
            "keys": keys, **sides, "n": rows, "partials": At("areas"), "arrived": At("areas done"),
            "sums": At(array_of(name)), "curve": curve, "curves": curves,
        }  # fmt: skip
        yield Launch(kernels.rank_area(name), grid, values)
