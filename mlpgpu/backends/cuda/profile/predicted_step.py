"""How long a step is predicted to take, on one card or on several: its launches, and what ranks exchange beside them.

By this ``parallel="auto"`` chooses whether one card trains or all do.  ``benchmarks/ranks_model.py`` holds it to steps
that were measured on one card and on two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....plan import Link, Plan, Traffic
from ..kernels import MESSAGE_BLOCKS
from ..kernels.launches import Collective, Launch, Lowered, Transfer
from ..lower.lowering import lower
from .paths import CARDS
from .predicted import FITTED_TO, OTHER_SECONDS, predicted_seconds

CARD = CARDS["H200"]  # of which counts are
NVLINK = Link("NVLink", 8e-6, 340e9)  # messages by a kernel between two H200s (docs/ranks.md)
STEPS = 3  # that are followed: from the second on they are alike


def step_seconds(plan: Plan, arch: str, *, link: Link = NVLINK) -> float | None:
    """Seconds of a training step of float32 inputs, launch by launch; None on cards of another architecture.

    They are those of an H200 whatever the card, so that ranks with cards of several kinds come to the same.  Of a plan
    of several ranks, or of parts of a network, it is rank 0's step, with ``link`` between cards.
    """
    if arch != FITTED_TO or not plan.training:
        return None
    lowered = lower(plan, multiprocessors=CARD.multiprocessors, source="float32", arch=arch, reaches_cards=True)
    timeline = _Timeline(lowered, plan.shard_rows(plan.capacity)[0].stop, link)
    ends = [timeline.step() for _ in range(STEPS)]
    return ends[-1] - ends[-2]


class _Timeline:
    """Steps one after another, by the time when each of their launches ends.

    What ranks exchange has two further streams, one for sums and what moves parameters, one for what is gathered then
    (:mod:`..run.graphs`).
    """

    def __init__(self, lowered: Lowered, rows: int, link: Link) -> None:
        self._lowered, self._rows, self._link = lowered, rows, link
        self._computed = self._summed = self._gathered = 0.0  # when each stream comes to its end
        self._sent = 0.0  # when the last sums have come that a kernel sends
        self._sums, self._pieces = dict[int, float](), dict[int, float]()  # when they are complete, by their numbers

    def step(self) -> float:
        """Follow one more step; returns when the last launch ends of those that wait for no piece of it."""
        lowered = self._lowered
        shard = lowered.shards[0] if lowered.shards else ()
        self._compute([*lowered.staged, *lowered.begin, *shard, *lowered.finish])
        for number, piece in enumerate(lowered.pieces):
            self._compute(piece.shards[0] if piece.shards else ())
            if not piece.at_end:
                self._exchange(number, piece.exchange)
        return self._computed

    def _compute(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            awaited = [self._pieces.get(number, 0.0) for number in launch.awaits]
            awaited += [self._sums.get(number, 0.0) for number in launch.receives]
            between = self._link.seconds(traffic_of(launch.exchange)) if launch.exchange else 0.0  # parts of a network
            begin, seconds = max(self._computed, *awaited, 0.0) + between, self._seconds(launch)
            # What a kernel sends keeps some multiprocessors, on which blocks of a large product begin behind it.
            waits = self._sent > begin and math.prod(launch.grid) > CARD.multiprocessors - MESSAGE_BLOCKS
            self._computed = (self._sent if waits and launch.entry.products else begin) + seconds

    def _exchange(self, number: int, exchange: Sequence[Launch | Collective]) -> None:
        self._summed = max(self._summed, self._computed)
        for each in exchange:
            if isinstance(each, Collective) and each.gathers:
                self._gathered = max(self._gathered, self._summed) + self._link.seconds(traffic_of(each))
            elif isinstance(each, Collective):
                self._summed += self._link.seconds(traffic_of(each))
                if each.by_kernel:
                    self._sent = self._summed
            else:
                self._summed += predicted_seconds(each, self._rows, CARD.multiprocessors)
        self._sums[number], self._pieces[number] = self._summed, max(self._summed, self._gathered)

    def _seconds(self, launch: Launch) -> float:
        """Of a launch of the first shard, and of those of further ones, as far as they do not run beside it."""
        seconds = predicted_seconds(launch, self._rows, CARD.multiprocessors)
        busy = min(1.0, math.prod(launch.grid) / CARD.multiprocessors) * max(0.0, seconds - OTHER_SECONDS)
        return seconds + (max(1, len(self._lowered.shards)) - 1) * busy


def traffic_of(collective: Collective) -> Traffic:
    """What a rank moves in it."""

    def nbytes(transfers: Sequence[Transfer]) -> int:
        return sum(each.count * each.item_bytes for each in transfers)

    messages = len(collective.sent) + len(collective.received)
    return Traffic(nbytes(collective.sent), nbytes(collective.received), messages)
