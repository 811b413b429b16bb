"""A plan: what one training step and one evaluation compute, as data that one can print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from ..losses import Loss, TargetKind
from ..optimizers import Optimizer
from ..random import Purpose
from ..text import html, table
from .links import SHARED_MEMORY, Traffic
from .operations import (
    ExchangePartials,
    Gather,
    GatherParameters,
    GatherPartials,
    JoinParts,
    Norm,
    Operation,
    SumParts,
    Update,
    Weighted,
    WeightedBackward,
)
from .sharding import Node, additions, block_size, nodes_of, parts_of, shards_of
from .tensor_split import Parts, Split, bounds, columns_of

Precision = Literal["float32", "float32-ieee", "float64", "tf32", "bfloat16"]
Reduction = Literal["ordered", "atomic", "fast"]
Way = Literal["one", "data", "tensor"]  # which of several ranks compute a step, and how
PRECISIONS: tuple[Precision, ...] = ("float32", "float32-ieee", "float64", "tf32", "bfloat16")
CARD_PRECISIONS: tuple[Precision, ...] = ("tf32", "bfloat16")  # computed by the CUDA backend alone
WAYS: tuple[Way, ...] = ("one", "data", "tensor")
REDUCTIONS: tuple[Reduction, ...] = ("ordered", "atomic", "fast")
LEAST_SLICED = 1 << 14  # numbers of a sum over parts from which on each of more than two ranks adds up a slice of it
NORM_BLOCK = 1 << 15  # elements of an array's part whose squares are summed up at a time
SUMS_BYTES = 16  # of a shard's loss and weight, float64
SQUARE_BYTES = 8  # of a block's sum of squares, float64
EXCHANGED_ALIGNED = "<<>>>><"  # columns of the table of exchanges


@dataclass(frozen=True)
class Buffer:
    """A named array: what its axes are, and their lengths, rows at capacity."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    holds: Literal["real", "index"] = "real"


@dataclass(frozen=True)
class Segment:
    """A named array of shape ``shape`` inside a flat one, from element ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class PartOf:
    """Which part of a layer's array a rank has: of ``whole``, along ``axis``, from ``first`` up to ``end``."""

    whole: Parameter
    axis: int
    first: int
    end: int
    part: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it lies in the whole array."""
        return (*(slice(None),) * self.axis, slice(self.first, self.end))


@dataclass(frozen=True)
class Parameter(Segment):
    """An array of a layer: which one that is, how initial values are drawn, and whether steps train them.

    ``of`` says which part of the layer's array it is, where ranks have parts of a network.
    """

    layer: int
    fans: tuple[int, int]
    initializer: str
    trainable: bool = True
    of: PartOf | None = None

    @property
    def is_bias(self) -> bool:
        """Whether it is added to a layer's product, not a factor of it."""
        return (self.of.whole.name if self.of else self.name).endswith(".bias")

    @property
    def purpose(self) -> Purpose:
        """Of the random words of its initial values: a bias shares none with its layer's weights."""
        return Purpose.INITIAL_BIASES if self.is_bias else Purpose.INITIAL_VALUES


@dataclass(frozen=True)
class Partial(Segment):
    """Where one use of ``parameter`` leaves its gradient, in the flat array of each shard."""

    parameter: str


@dataclass(frozen=True)
class TrainedRange:
    """Parameters that an update moves, all those between two frozen ones.

    Attributes:
        offset: where they begin in the flat array of parameters, and in each slot.
        gradient: where their gradient begins, which frozen parameters have no room in.
        size: how many elements they are.
        alpha: the optimizer's, where they are weights; 0 for biases.
    """

    offset: int
    gradient: int
    size: int
    alpha: float = 0.0


@dataclass(frozen=True)
class Slice:
    """A rank's part of the flat arrays: the parameters that it moves, and the gradient of those that are trained."""

    parameters: slice
    gradient: slice


@dataclass(frozen=True)
class Choice:
    """Which of several ranks compute a plan's steps, where nobody said so.

    Attributes:
        ranks: how many there are.
        way: ``"data"``, all of them, each some of the shards; ``"tensor"``, all of them, each a part of the network; or
            ``"one"``, rank 0, whose results the others get.
        one, data, tensor: seconds of a step each way, as :mod:`mlpgpu.plan.costs` counts them; None where it cannot, or
            where the network is not to be split.
        is_kept: whether the run was begun so, whatever the costs are.
    """

    ranks: int
    way: Way
    one: float | None = None
    data: float | None = None
    tensor: float | None = None
    is_kept: bool = False

    def __str__(self) -> str:
        who = f"rank 0 of {self.ranks} trains for all" if self.way == "one" else f"{self.ranks} ranks train together"
        if self.way == "tensor":
            who += ", each a part of the network"
        if self.is_kept:
            return f"{who}, as the run was begun"
        if self.one is None or self.data is None:
            return f"{who}, as no costs are known here"
        by_parts = "" if self.tensor is None else f", by parts {self.tensor * 1e6:,.0f} µs"
        return f"{who}: by counts a step takes one {self.one * 1e6:,.0f} µs, all {self.data * 1e6:,.0f} µs{by_parts}"


@dataclass(frozen=True, repr=False)
class Tensor:
    """How a network is split into parts, of which a plan has those of one rank.

    Attributes:
        parts: how many there are, and whose they are.
        splits: how each layer is split, by its weight.
        whole: the plan for one process, without parts.
    """

    parts: Parts
    splits: Mapping[str, Split]
    whole: Plan

    def sent_numbers(self, operation: SumParts | JoinParts, rank: int, to: int, width: int, rows: int) -> list[int]:
        """Numbers in each array that a rank sends to another one, of ``rows`` rows of ``width`` columns."""
        parts, count = self.parts, rows * width
        if isinstance(operation, JoinParts):
            ends = bounds(width, parts.count)
            return [rows * (ends[part + 1] - ends[part]) for part in parts.of(rank)]
        nodes = len(nodes_of(parts.of(rank), parts.count))
        if not self.sums_in_slices(width):
            return [count] * nodes
        slices = slices_of(count, parts.ranks)
        sums, sent = slices[rank], slices[to]
        return [*([sent.stop - sent.start] * nodes), sums.stop - sums.start]

    def shapes(self, parameter: Parameter) -> list[tuple[int, ...]]:
        """The shapes of all parts of a parameter of the whole network."""
        axis = split_axis(parameter, self.splits)
        if axis is None:
            return [parameter.shape]
        ends = bounds(parameter.shape[axis], self.parts.count)
        sizes = [end - first for first, end in pairwise(ends)]
        return [(*parameter.shape[:axis], size, *parameter.shape[axis + 1 :]) for size in sizes]

    def blocks_of_norm(self) -> tuple[list[int], list[int]]:
        """How many blocks of squares each array has that every rank has, and each part of the network, in order."""
        whole = [p for p in self.whole.parameters if p.trainable and split_axis(p, self.splits) is None]
        return [-(-p.size // self.norm_block) for p in whole], self.norm_blocks()

    @property
    def norm_block(self) -> int:
        """Elements of an array's part whose squares are summed up at a time, for a clipped norm."""
        return NORM_BLOCK

    def norm_blocks(self) -> list[int]:
        """How many blocks of squares each part of the network has, all its arrays together."""
        counts = [0] * self.parts.count
        for parameter in self.whole.parameters:
            axis = split_axis(parameter, self.splits)
            if axis is not None and parameter.trainable:
                length = parameter.shape[axis]
                for part, columns in enumerate(columns_of(length, self.parts.count)):
                    size = parameter.size // length * (columns.stop - columns.start)
                    counts[part] += -(-size // NORM_BLOCK)
        return counts

    def sums_in_slices(self, width: int) -> bool:
        """Whether each rank adds up a slice of a sum and sends that, or every rank all of it, in one exchange less."""
        return self.parts.ranks > 2 and self.whole.capacity * width >= LEAST_SLICED


@dataclass(frozen=True, repr=False)
class Plan:
    """One training step and one evaluation, lowered.

    Attributes:
        n_in, n_out: widths of inputs and logits.
        capacity: the most rows a step can have.
        shards: how many shards (S) a batch's rows are split into.
        replicas: how many networks of this shape run side by side; the leading axis of every array.
        precision, reduction: how much products may err, and how partials are added; ``"fast"`` for several ranks
            alone, and then in an order that depends on their number.
        parameters, statistics: segments of the flat arrays of parameters and of fitted values.
        partials: segments of each shard's flat array.
        buffers: by name.
        training, evaluation: operations, in order.  ``training`` is empty without an optimizer.
        loss, optimizer: None where the plan is for predicting only.
        logits, output: the buffers that hold the network's logits and predictions.
        ranks: how many processes run the training step together, each some of the shards.
        tensor: how the network is split into parts; None where every process has all of it.
        choice: which of several ranks compute it, and why, where that was left to be chosen.
    """

    n_in: int
    n_out: int
    capacity: int
    shards: int
    replicas: int
    precision: Precision
    reduction: Reduction
    parameters: tuple[Parameter, ...]
    statistics: tuple[Segment, ...]
    partials: tuple[Partial, ...]
    buffers: Mapping[str, Buffer]
    training: tuple[Operation, ...]
    evaluation: tuple[Operation, ...]
    loss: Loss | None
    target_kind: TargetKind | None
    optimizer: Optimizer | None
    logits: str
    output: str
    ranks: int = 1
    tensor: Tensor | None = None
    choice: Choice | None = None

    @property
    def dtype(self) -> np.dtype:
        """The type of the parameters and of what the plan computes: float64 or float32."""
        return np.dtype("float64" if self.precision == "float64" else "float32")

    @property
    def parameter_count(self) -> int:
        """Elements of the flat parameter array of one replica."""
        return self.parameters[-1].end if self.parameters else 0

    @cached_property
    def gradient(self) -> tuple[Segment, ...]:
        """Segments of the flat gradient: the trained parameters, by their names and in their order."""
        found: list[Segment] = []
        for parameter in self.parameters:
            if parameter.trainable:
                found.append(Segment(parameter.name, parameter.shape, found[-1].end if found else 0))
        return tuple(found)

    @property
    def gradient_count(self) -> int:
        """Elements of the flat gradient of one replica."""
        return self.gradient[-1].end if self.gradient else 0

    @cached_property
    def trained_ranges(self) -> tuple[TrainedRange, ...]:
        """The parameters that an update moves, neighbours of one penalty together; often one range of all."""
        known = {parameter.name: parameter for parameter in self.parameters}
        of_weights = self.optimizer.alpha if self.optimizer is not None else 0.0
        ranges: list[TrainedRange] = []
        for segment in self.gradient:
            offset, alpha = known[segment.name].offset, 0.0 if known[segment.name].is_bias else of_weights
            if ranges and ranges[-1].offset + ranges[-1].size == offset and ranges[-1].alpha == alpha:
                ranges[-1] = replace(ranges[-1], size=ranges[-1].size + segment.size)
            else:
                ranges.append(TrainedRange(offset, segment.offset, segment.size, alpha))
        return tuple(ranges)

    @property
    def processes(self) -> int:
        """How many processes run the plan together, each some of the shards or some parts of the network."""
        return self.ranks if self.tensor is None else self.tensor.parts.ranks

    @property
    def moves_all(self) -> bool:
        """Whether each rank moves all parameters, which then are alike without being gathered."""
        return any(isinstance(operation, GatherPartials) for operation in self.training)

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """What each rank moves: whole parameters where that deals them nearly as evenly.

        A norm, which is clipped, is a sum over blocks, of which each lies in one slice.
        """
        if self.moves_all:
            return (Slice(slice(0, self.parameter_count), slice(0, self.gradient_count)),) * self.ranks
        is_clipped = any(isinstance(operation, Norm) for operation in self.training)
        ends = () if is_clipped else [segment.end for segment in self.gradient]
        parts = parts_of(self.gradient_count, self.ranks, ends)
        starts = [0, *(self._parameter_at(part.start) for part in parts[1:]), self.parameter_count]
        return tuple(Slice(slice(*ends), part) for ends, part in zip(pairwise(starts), parts, strict=True))

    def _parameter_at(self, element: int) -> int:
        """Where the parameter lies that an element of the flat gradient belongs to; for the gradient's end, the end."""
        for each in self.trained_ranges:
            if element < each.gradient + each.size:
                return each.offset + element - each.gradient
        return self.parameter_count

    def trained_in(self, gradient: slice) -> list[TrainedRange]:
        """The parts of :attr:`trained_ranges` whose gradient lies in a part of the flat gradient."""
        found = []
        for each in self.trained_ranges:
            first, end = max(each.gradient, gradient.start), min(each.gradient + each.size, gradient.stop)
            if first < end:
                offset = each.offset + first - each.gradient
                found.append(replace(each, offset=offset, gradient=first, size=end - first))
        return found

    def nodes(self, rank: int) -> tuple[Node, ...]:
        """The sums of shards that a rank makes and sends: nodes of the tree, or one sum of all its shards."""
        if self.reduction == "fast":
            own = shards_of(rank, self.ranks, self.shards)
            return (own,) if own else ()
        return nodes_of(shards_of(rank, self.ranks, self.shards), self.shards)

    def additions(self) -> list[tuple[int, int]]:
        """How the sums of all ranks are added, in their order: pairs (i, j), j is added to i; the first has all."""
        sums = [node for rank in range(self.ranks) for node in self.nodes(rank)]
        if self.reduction == "fast":
            return additions(range(len(sums)), [range(place, place + 1) for place in range(len(sums))])
        return additions(range(self.shards), sums)

    @cached_property
    def _counts(self) -> tuple[list[int], list[int], list[int]]:
        """Of each rank: how many sums it sends, how many shards it has, how many elements of the gradient it moves."""
        shards = [shards_of(rank, self.ranks, self.shards) for rank in range(self.ranks)]
        nodes = [len(self.nodes(rank)) for rank in range(self.ranks)]
        return nodes, list(map(len, shards)), [each.gradient.stop - each.gradient.start for each in self.slices]

    def traffic(self, operation: Operation, rank: int) -> Traffic:
        """What a rank sends to others and receives of them in ``operation``."""
        if isinstance(operation, (SumParts, JoinParts)):
            return self._between_parts(operation, rank)
        if self.tensor is not None and isinstance(operation, Norm):
            parts, blocks = self.tensor.parts, self.tensor.norm_blocks()
            each = [sum(blocks[part] for part in parts.of(other)) for other in range(parts.ranks)]
            return _gathered(each, rank, SQUARE_BYTES)
        if self.tensor is not None or self.ranks == 1:
            return Traffic()
        item = self.dtype.itemsize
        nodes, shards, elements = self._counts
        if isinstance(operation, ExchangePartials):
            own, of_others, is_moved = nodes[rank], sum(nodes) - nodes[rank], elements[rank] > 0
            losses = _gathered(shards, rank, SUMS_BYTES)
            return Traffic(
                own * (sum(elements) - elements[rank]) * item + losses.sent,
                of_others * elements[rank] * item + losses.received,
                own * (sum(count > 0 for count in elements) - is_moved) + of_others * is_moved + losses.messages,
            )
        if isinstance(operation, GatherParameters):
            moved = [each.parameters.stop - each.parameters.start for each in self.slices]
            return _gathered(moved, rank, item)
        if isinstance(operation, Norm) and not self.moves_all:
            block = block_size(self.gradient_count)
            return _gathered([-(-count // block) for count in elements], rank, SQUARE_BYTES)
        return Traffic()

    def _between_parts(self, operation: SumParts | JoinParts, rank: int) -> Traffic:
        assert self.tensor is not None
        width, item = self.buffers[operation.y].shape[-1], self.dtype.itemsize

        def sizes(sender: int, to: int) -> list[int]:
            return self.tensor.sent_numbers(operation, sender, to, width, self.capacity) if self.tensor else []

        others = [other for other in range(self.processes) if other != rank]
        sent = [size for other in others for size in sizes(rank, other)]
        received = [size for other in others for size in sizes(other, rank)]
        messages = sum(size > 0 for size in (*sent, *received))
        return Traffic(sum(sent) * item, sum(received) * item, messages)

    def sent_bytes(self, operation: Operation, rank: int) -> int:
        """Bytes of arrays that a rank sends to others in ``operation``."""
        return self.traffic(operation, rank).sent

    def exchanges(self) -> list[tuple[int, Traffic]]:
        """The places in ``training`` of what ranks exchange, each with the traffic of the rank that moves most."""
        ranks = range(self.processes)
        each = [
            (place, max((self.traffic(operation, rank) for rank in ranks), key=lambda found: found.most))
            for place, operation in enumerate(self.training)
        ]
        return [(place, found) for place, found in each if found.messages]

    def hiding(self, place: int) -> list[Operation]:
        """The products behind which the exchange at a place of ``training`` may hide.

        They stand after it, and before the first operation that reads what it brings.
        """
        brought, found = set(self.training[place].writes), []
        for operation in self.training[place + 1 :]:
            if brought & set(operation.reads):
                break
            if self.flops(operation, self.capacity):
                found.append(operation)
        return found

    @property
    def statistic_count(self) -> int:
        """Elements of the flat array of fitted statistics of one replica."""
        return self.statistics[-1].end if self.statistics else 0

    @property
    def ends_with_gradient(self) -> bool:
        """Whether a training step updates nothing: its gradient is all that is asked of it."""
        return bool(self.training) and not any(isinstance(op, Update) for op in self.training)

    def to_gradient(self) -> Plan:
        """This plan with a training step that ends with the gradient, computed and stored in float32."""
        kept = tuple(op for op in self.training if not isinstance(op, (Norm, Update)))
        return replace(self, training=kept, precision="float32-ieee", reduction="ordered")

    def alone(self) -> Plan:
        """This plan for one process, which computes all shards, or a network that has no parts."""
        if self.tensor is not None:
            return self.tensor.whole
        between = ExchangePartials, GatherParameters  # of which GatherPartials is one
        training = tuple(op for op in self.training if not isinstance(op, between))
        return replace(self, training=training, ranks=1, reduction=alone_reduction(self.reduction))

    def in_one_exchange(self) -> Plan:
        """This plan with all sums sent to all ranks, of which each then moves all parameters."""
        training = [
            GatherPartials(op.partials, op.value, op.weight) if isinstance(op, ExchangePartials) else op
            for op in self.training
            if not isinstance(op, GatherParameters)
        ]
        return replace(self, training=tuple(training))

    def with_capacity(self, rows: int) -> Plan:
        """This plan for at most so many rows."""
        buffers = dict(self.buffers)
        for name, buffer in self.buffers.items():
            if buffer.axes[1] == "row":
                buffers[name] = replace(buffer, shape=(buffer.shape[0], rows, *buffer.shape[2:]))
        return replace(self, capacity=rows, buffers=buffers)

    def input_columns(self) -> dict[str, slice]:
        """The columns of the data that steps and evaluations read, by the names of arrays of rows: all are ``"data"``.

        Of a rank that reads those of its parts of a network alone they are ``"data/1"`` and so on, an array each.
        """
        gathers = [op for op in (*self.training, *self.evaluation) if isinstance(op, Gather)]
        return {inputs_of(op): slice(*(op.columns or (0, self.n_in))) for op in gathers}

    def outputs(self) -> dict[str, str]:
        """The buffers that hold the outputs of layers with parameters in a training step, by ``"0.activation"``, …"""
        return {f"{op.y.removeprefix('y')}.activation": op.y for op in self.training if isinstance(op, Weighted)}

    def shard_rows(self, rows: int) -> tuple[slice, ...]:
        """The rows of each shard of a batch of ``rows``; sizes differ by at most one, and may be 0."""
        bounds = [rows * shard // self.shards for shard in range(self.shards + 1)]
        return tuple(slice(low, high) for low, high in pairwise(bounds))

    def flops(self, operation: Operation, rows: int) -> int:
        """Multiplications and additions of the matrix products in ``operation`` for ``rows`` rows."""
        if isinstance(operation, Weighted):
            return 2 * rows * self._terms(operation.weight, operation.y)
        if isinstance(operation, WeightedBackward):
            return 2 * rows * self._terms(operation.weight, operation.dz) * operation.products
        return 0

    def _terms(self, weight: str, y: str) -> int:
        """Products that a row of ``y`` sums up: each of its columns has as many as the weight has rows."""
        terms = next(p.shape[0] for p in self.parameters if p.name == weight)
        return terms * self.buffers[y].shape[-1]

    def __repr__(self) -> str:
        return f"Plan({self._summary}, {len(self.training or self.evaluation)} operations)"

    def __str__(self) -> str:
        """A table: each operation, what it reads and writes with shapes, and its products' arithmetic."""
        chosen = [f"parallel='auto': {self.choice}"] if self.choice else []
        lines = [f"plan: {self._summary}", *chosen, table(self._rows(), "<<<<>"), self._products]
        if exchanged := self._exchanged():
            lines += ["", table(exchanged, EXCHANGED_ALIGNED), self._exchanges]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        exchanged = self._exchanged()
        below = html(exchanged, EXCHANGED_ALIGNED, f"Exchanges: {self._exchanges}") if exchanged else ""
        chosen = f"; parallel='auto': {self.choice}" if self.choice else ""
        return html(self._rows(), "<<<<>", f"Plan: {self._summary}{chosen}; {self._products}") + below

    @property
    def _summary(self) -> str:
        frozen = self.parameter_count - self.gradient_count
        of_them = f" ({frozen:,} frozen)" if frozen else ""
        return (
            f"{self.n_in} → {self.n_out}, {self.parameter_count:,} parameters{of_them}, {self.precision}, "
            f"up to {self.capacity} rows in {self.shards} shard{'s' * (self.shards > 1)}"
            f"{f' on {self.ranks} ranks' * (self.ranks > 1)}, {self.reduction}{self._split}"
        )

    @property
    def _split(self) -> str:
        """How the network is split, and which part of it this is."""
        if self.tensor is None:
            return ""
        parts = self.tensor.parts
        own = f"{parts.own.start} to {parts.own.stop - 1}" if len(parts.own) > 1 else str(parts.own.start)
        layers = ", ".join(f"{name} by {split}" for name, split in self.tensor.splits.items() if split != "whole")
        of_all = f"of {self.tensor.whole.parameter_count:,} parameters in all"
        return f"; part {own} of {parts.count} on rank {parts.rank} of {parts.ranks}, {of_all}, {layers}"

    @property
    def _products(self) -> str:
        total = sum(self.flops(operation, self.capacity) for operation in self.training or self.evaluation)
        ranks = self.ranks if self.tensor is None else self.tensor.parts.ranks
        sent = sum(self.sent_bytes(operation, rank) for operation in self.training for rank in range(ranks))
        between = f"; {sent / 1e3:,.1f} kB between ranks" if sent else ""
        return f"products: {total / 1e6:.3f} MFLOP a step{between}"

    def _exchanged(self) -> list[tuple[str, ...]]:
        """The cells of the table of exchanges, heads first; nothing where there are none."""
        rows: list[tuple[str, ...]] = []
        for place, traffic in self.exchanges():
            behind = ", ".join(f"{_title(operation)} {operation.writes[0]}" for operation in self.hiding(place))
            rows.append(
                (
                    str(place),
                    _title(self.training[place]),
                    f"{traffic.sent / 1e3:,.1f}",
                    f"{traffic.received / 1e3:,.1f}",
                    str(traffic.messages),
                    f"{SHARED_MEMORY.seconds(traffic) * 1e6:,.1f}",
                    behind or "nothing",
                )
            )
        return (
            [("#", "exchange", "sent kB", "received kB", "messages", "floor µs", "hides behind"), *rows] if rows else []
        )

    @property
    def _exchanges(self) -> str:
        seconds = sum(SHARED_MEMORY.seconds(traffic) for _, traffic in self.exchanges())
        return f"of the rank that moves most; floor {seconds * 1e6:,.1f} µs a step by {SHARED_MEMORY}"

    def _rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, heads first."""
        operations = self.training or self.evaluation
        rows: list[tuple[str, ...]] = [("#", "operation", "reads", "writes", "MFLOP")]
        for number, operation in enumerate(operations):
            flops = self.flops(operation, self.capacity)
            reads, writes = operation.reads, (f"{name} {self._shape(name)}" for name in operation.writes)
            mflop = f"{flops / 1e6:.3f}" if flops else ""
            rows.append((str(number), _title(operation), ", ".join(reads), ", ".join(writes), mflop))
        return rows

    def _shape(self, name: str) -> str:
        segments = {s.name: s.shape for s in (*self.parameters, *self.partials, *self.statistics)}
        if name in segments:
            return "×".join(map(str, segments[name]))
        # The replica axis is left out: it is 1 in every plan that a backend runs today.
        return "×".join(map(str, self.buffers[name].shape[1:]))


def _gathered(counts: Sequence[int], rank: int, size: int) -> Traffic:
    """The traffic of a rank where each of them sends its ``counts`` things of so many bytes to all others at once."""
    own, others = counts[rank], len(counts) - 1
    messages = others * (own > 0) + sum(count > 0 for count in counts) - (own > 0)
    return Traffic(others * own * size, (sum(counts) - own) * size, messages)


def inputs_of(gather: Gather) -> str:
    """The name of the array of rows that a gather reads."""
    return "data" if gather.columns is None else f"data/{gather.x.rpartition('/')[2]}"


def alone_reduction(reduction: Reduction) -> Reduction:
    """How a process by itself adds partials: what is fast between ranks is not asked there."""
    return "ordered" if reduction == "fast" else reduction


def split_axis(parameter: Parameter, splits: Mapping[str, Split]) -> int | None:
    """The axis that a parameter of a whole network is split along; None where every rank has all of it."""
    split = splits.get(f"{parameter.layer}.weight", "whole")
    if split == "columns":
        return len(parameter.shape) - 1
    return 0 if split == "rows" and not parameter.is_bias else None


def slices_of(count: int, ranks: int) -> list[slice]:
    """Each rank's slice of a sum over parts of ``count`` numbers; sizes differ by at most one."""
    return [slice(count * rank // ranks, count * (rank + 1) // ranks) for rank in range(ranks)]


def _title(operation: Operation) -> str:
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in type(operation).__name__).strip()
    for key in ("activation", "loss", "rate"):
        value = getattr(operation, key, None)
        if value is not None and value != "identity":
            words += f" {value}"
    return f"{words} {type(operation.optimizer).__name__}" if isinstance(operation, Update) else words
