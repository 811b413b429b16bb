"""How a plan runs on a card, in words: the path of every operation with its reason.  It needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ....plan import Plan
from ....text import table
from ..lower.lowering import lower, passes
from ..persistent.kernel import PersistentKernel
from ..select.persistent import choose_kernel
from ..select.setting import Setting
from .predicted import FITTED_TO, predicted_seconds


@dataclass(frozen=True)
class Card:
    """What paths follow from of a card.

    Attributes:
        shared_bytes: the most shared memory of a block.
    """

    name: str
    arch: str
    multiprocessors: int
    shared_bytes: int
    compute_capability: tuple[int, int]


CARDS = {
    card.name: card
    for card in (
        Card("T4", "sm_75", 40, 64 << 10, (7, 5)),
        Card("A100", "sm_80", 108, 163 << 10, (8, 0)),
        Card("H200", "sm_90a", 132, 227 << 10, (9, 0)),
    )
}


def describe_paths(plan: Plan, multiprocessors: int, arch: str, source: str) -> str:
    """The paths of a training step, or where there is none of an evaluation, and what becomes one launch.

    Args:
        source: of the inputs, ``"float32"`` or ``"uint8"``.
    """
    made = passes(plan, Setting(multiprocessors, arch, source, textured=True))
    fused = made.training or made.evaluation
    return f"{fused.selection}\n\n{fused}"


def describe_on(plan: Plan, card: Card, source: str) -> str:
    """The same on a card that need not be here, with what is said of a plan that trains inside one kernel."""
    paths = describe_paths(plan, card.multiprocessors, card.arch, source)
    if not plan.training:
        return paths
    if card.arch == FITTED_TO:
        paths = f"{paths}\n\n{_predicted(plan, card, source)}"
    kernel = choose_kernel(plan, multiprocessors=card.multiprocessors, shared_bytes=card.shared_bytes, arch=card.arch)
    way = f"trains launch by launch, since {kernel}:"
    if isinstance(kernel, PersistentKernel):
        way = f"trains inside one kernel on {kernel.layout.blocks} multiprocessors.  Launch by launch it would be:"
    return f"{way}\n\n{paths}"


def _predicted(plan: Plan, card: Card, source: str) -> str:
    """What the launches of a step are predicted to take, those of the first shard standing for all of them."""
    lowered = lower(plan, multiprocessors=card.multiprocessors, source=source, arch=card.arch)
    rows = plan.shard_rows(plan.capacity)[0].stop
    launches = [*lowered.begin, *(lowered.shards[0] if lowered.shards else ()), *lowered.finish]
    found = [(each, predicted_seconds(each, rows, card.multiprocessors)) for each in launches]
    table_rows = [("operation", "kernel", "grid", "predicted µs")]
    for launch, seconds in found:
        grid = "×".join(map(str, launch.grid))
        table_rows.append((launch.operation, launch.entry.name, grid, f"{seconds * 1e6:,.1f}"))
    table_rows.append(("", "in all", "", f"{sum(seconds for _, seconds in found) * 1e6:,.1f}"))
    return table(table_rows, "<<>>")
