"""How a plan runs on a card, in words: the path of every operation with its reason.  It needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ....plan import Plan
from ..lower.lowering import passes
from ..persistent.kernel import PersistentKernel
from ..select.persistent import choose_kernel
from ..select.setting import Setting


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
    kernel = choose_kernel(plan, multiprocessors=card.multiprocessors, shared_bytes=card.shared_bytes, arch=card.arch)
    way = f"trains launch by launch, since {kernel}:"
    if isinstance(kernel, PersistentKernel):
        way = f"trains inside one kernel on {kernel.layout.blocks} multiprocessors.  Launch by launch it would be:"
    return f"{way}\n\n{paths}"
