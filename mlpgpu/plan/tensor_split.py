"""How the layers of a network are split into parts that ranks compute: plain functions of widths and their number.

A dense layer is split *by columns* of its weight (split C: each part has the whole x and makes columns of y, as one
process would) or *by rows* (split A, along k: each part has columns of x, and the products of all parts are added up).
A layer by columns and one by rows after it need one exchange of activations between them, and one of deltas.  The
number of parts is fixed for a run, as shards are; a rank has some of them, neighbours.  Which layer is split how, where
parts begin, and the tree of additions follow from widths and the number of parts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from .sharding import shards_of

Split = Literal["whole", "columns", "rows"]

MOST_PARTS = 1024
# Of a layer that must be split; a smaller one is where that costs the least.  An exchange between two H100s takes 12 µs
# by NCCL, and such a layer is counted at less than that in all of a step.
LEAST_WEIGHTS = 1 << 14
ALIGNMENT = 16  # numbers that a part begins at a multiple of, where parts have several times as many
LATENCY = 256  # numbers of a row whose exchange takes about as long as to begin one
READ = 0.125  # what a number of the data that is read counts for, where one that is exchanged counts for 1


@dataclass(frozen=True)
class Parts:
    """The parts of a network, and whose they are.

    Attributes:
        count: how many (P) there are.
        rank, ranks: of the process that this is, and how many there are.
    """

    count: int
    rank: int = 0
    ranks: int = 1

    @property
    def own(self) -> range:
        """This rank's."""
        return self.of(self.rank)

    def of(self, rank: int) -> range:
        """A rank's: neighbours, as many as the others' or one more."""
        return shards_of(rank, self.ranks, self.count)


@dataclass(frozen=True)
class Stage:
    """What a split depends on, of one layer with weights.

    Attributes:
        n_in, n_out: its widths.
        weights: how many it has.
        can_split: whether it is a dense layer whose arrays no other layer uses.
        has_dx: whether the loss's derivative by its input is asked for.
        reads_data: whether its input is the data's.
    """

    n_in: int
    n_out: int
    weights: int
    can_split: bool
    has_dx: bool
    reads_data: bool = False


def bounds(width: int, count: int) -> tuple[int, ...]:
    """Where the parts of ``width`` columns begin, and the last one's end, (count + 1,); about equally wide."""
    step = ALIGNMENT if width >= 4 * ALIGNMENT * count else 1
    return (*(width * part // count // step * step for part in range(count)), width)


def columns_of(width: int, count: int) -> tuple[slice, ...]:
    """The columns of each part."""
    return tuple(slice(*ends) for ends in pairwise(bounds(width, count)))


def choose_splits(stages: Sequence[Stage], count: int) -> tuple[Split, ...]:
    """How each of the layers, from first to last, is split: such that ranks exchange the least for a row.

    Activations between layers are whole on every rank, or in parts.  The first layer's input is whole, or read in
    parts; the logits are whole.  A layer of at least ``LEAST_WEIGHTS`` is split wherever it can be.
    """
    # The cheapest way to have the activations so far whole, and in parts: what it costs, and the splits.
    whole: tuple[float, tuple[Split, ...]] = 0.0, ()
    parts: tuple[float, tuple[Split, ...]] | None = None
    for stage in stages:
        join_in, sum_in = _joined(stage.n_in, count), _summed(stage.n_in, count)
        sum_out = _summed(stage.n_out, count)
        before = whole
        if parts is not None and parts[0] + join_in < whole[0]:
            before = parts[0] + join_in, parts[1]
        if stage.reads_data:  # each rank, all of it, unless the layer is split by rows
            before = before[0] + READ * stage.n_in, before[1]
        read_again = READ * stage.n_in * stage.reads_data * (1 - 1 / count)
        by_columns = stage.can_split and stage.n_out >= count
        by_rows = stage.can_split and stage.n_in >= count
        ways: list[tuple[float, tuple[Split, ...]]] = []  # to whole activations
        if by_rows:
            if parts is not None:
                ways.append((parts[0] + sum_out, (*parts[1], "rows")))
            # Each part takes its columns of x, and its columns of dx are put together with the others'.
            ways.append((before[0] - read_again + sum_out + join_in * stage.has_dx, (*before[1], "rows")))
        after: tuple[float, tuple[Split, ...]] | None = None
        if by_columns:
            after = before[0] + sum_in * stage.has_dx, (*before[1], "columns")
            ways.append((after[0] + _joined(stage.n_out, count), after[1]))
        if not ways or stage.weights < LEAST_WEIGHTS:
            ways.append((before[0], (*before[1], "whole")))
        whole, parts = min(ways, key=lambda way: way[0]), after
    return whole[1]


def _summed(width: int, count: int) -> float:
    """What the sum of all parts' products costs, in numbers that a rank sends for a row."""
    return 2.0 * width * (count - 1) / count + LATENCY


def _joined(width: int, count: int) -> float:
    """What it costs to put columns together."""
    return width * (count - 1) / count + LATENCY
