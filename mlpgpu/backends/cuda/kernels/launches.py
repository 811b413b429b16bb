"""A plan's launches, as plain data: what lowering makes, and what a program packs and runs.

Arrays are named; the program that owns the memory puts addresses in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from . import Entry, padded_columns, padded_rows

MOST_RUN_STEPS = 4096  # of the table of rates in constant memory
BLOCKS_PER_MULTIPROCESSOR = 8  # at most, of a kernel whose threads stride over an array
PARTIALS, SQUARES, PARAMETERS, OPERANDS = "partials", "squares", "parameters", "operands"  # kinds of exchanges
SUMS, COLUMNS = "sums of parts", "columns of parts"
# Two arrays that the launch which moves several layers reads: in one their x lie side by side, in the other their dz.
OUTPUTS, DELTAS = "updates of layers, outputs", "updates of layers, deltas"
KEPT_ELEMENTS = (
    "kept elements"  # what the arrays are called that say, bit by bit, which elements a shard's dropouts keep
)
# Of a step by blocks of rows on tensor cores: all weights' components, and what blocks leave of the gradients.
IMAGES, LEFT = "blocks of rows, images", "blocks of rows, parts of gradients"
EXCHANGED_SUMS = "exchanged sums"  # the table of a launch that exchanges sums of parts itself, and the host's word
ABORTED = "aborted"  # that ends its waits
GRAPH_STEPS = (32, 16, 8, 4, 2, 1)  # steps of the graphs that a run replays: between two of them the card waits


@dataclass(frozen=True)
class At:
    """An element of a named array, as the value of a pointer argument."""

    array: str
    offset: int = 0


@dataclass(frozen=True)
class Map:
    """The copy engine's map of components, (components, rows, columns), as the value of a pointer argument.

    ``box`` is how many rows and columns the kernel copies at once; ``place`` the number of the step whose components
    these are, where those of several steps lie one after another.
    """

    array: str
    components: int
    rows: int
    columns: int
    box: tuple[int, int]
    place: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the components, padding included."""
        return 2 * self.components * padded_rows(self.rows) * padded_columns(self.columns)


Value = At | Map | int | float | None


@dataclass(frozen=True)
class Launch:
    """One kernel launch; ``values`` are those of the entry's arguments, by name.

    ``operation`` is the plan's, by its number and kind: ``"1 Dense"``.  It is empty for a launch that no
    operation asked for, and the first one's for a launch that does the work of two.  ``lengths`` are those of
    arrays' axes, by name, that no argument tells.  A launch ``on_side_stream`` may run beside all that follows
    in its step; ``after_others`` leaves room to those first.  With ``pdl``, programmatic dependent launch, a
    launch may begin before the launch before it is complete.  It ``awaits`` pieces, by their numbers, that ranks
    exchanged at the end of the step before, beside which the launches before it may run, and ``receives`` those of its
    own step.  Where ranks have parts of a network, its stream makes the ``exchange`` right before it.
    """

    entry: Entry
    grid: tuple[int, int, int]
    values: Mapping[str, Value]
    operation: str = ""
    lengths: Mapping[str, int] = field(default_factory=dict)
    on_side_stream: bool = False
    after_others: bool = False
    pdl: bool = False
    awaits: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    exchange: Collective | None = None


@dataclass(frozen=True)
class Transfer:
    """So many elements that go to another rank, ``peer``, or come from it; ``item_bytes`` are those of one."""

    peer: int
    at: At
    count: int
    item_bytes: int


@dataclass(frozen=True)
class Collective:
    """What a rank sends to the others and receives from them at one point of a step, all of it at once.

    Between two ranks the first transfer that one sends is the first that the other receives, and so on.

    Attributes:
        kind: what is exchanged: partial gradients, with the sums of the loss; squares of a norm; parameters; operands
            that tensor cores read in the place of weights; of parts of a network what is added up, and columns.
        operation: the plan's, as of a :class:`Launch`.
        by_kernel: whether a kernel sends, where cards reach each other's memory; the same on all ranks.
    """

    kind: str
    sent: tuple[Transfer, ...]
    received: tuple[Transfer, ...]
    operation: str = ""
    by_kernel: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it is of what has moved, of which ranks gather each other's."""
        return self.kind in (PARAMETERS, OPERANDS)


@dataclass(frozen=True)
class Piece:
    """A part of the gradient that ranks exchange while later parts are computed.

    Attributes:
        shards: what each shard's stream runs to make it.
        exchange: what further streams run when all shards have, piece after piece; its parameters come last.
        at_end: whether it is exchanged in the last step of a graph alone: no step reads what it moves.
    """

    shards: list[list[Launch]]
    exchange: list[Launch | Collective]
    at_end: bool = False


@dataclass(frozen=True)
class PartSums:
    """Sums of parts, (rows, columns) each, that a launch exchanges itself: how many parts, and which is this rank's."""

    count: int
    own: int
    rows: int
    columns: int


@dataclass
class Lowered:
    """A plan as launches; of a plan of several ranks, those of one rank.

    Attributes:
        bytes: of each array that a program of this plan owns.
        words: what arrays of whole numbers hold, which no launch changes.
        notes: which of several ways some operations take, and why.
        column_scales: lengths of the column scales that lie side by side in the array ``"column scales"``, by name.
        stages: for how many steps of a graph one launch of ``staged`` splits the inputs, a step for each index of the
            grid's second axis; ``staged_bytes`` are what it stores for a step, by array.
        initialise: what a graph begins with.
        run_begin: what runs before the first of several steps, where the parameters may have been set since the last.
        prologue: what a first step needs that in other steps the step before has done.
        begin: what a step begins with, once.
        shards: what each shard's stream runs in a step; ``finish`` follows when all have.  Of a plan of several ranks
            these are the shards of one, perhaps none.
        part_sums: what a launch of these exchanges itself, by the table :data:`EXCHANGED_SUMS`.
        pieces: what follows the launches of ``shards`` where there are several ranks, in place of ``finish``.  The next
            step may begin meanwhile, as far as its launches do not await them.
        evaluation_begin: what runs before the first batch of an evaluation.
        evaluation: what an evaluation runs for a batch.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    words: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    column_scales: dict[str, int] = field(default_factory=dict)
    stages: int = 1
    staged: list[Launch] = field(default_factory=list)
    staged_bytes: dict[str, int] = field(default_factory=dict)
    initialise: list[Launch] = field(default_factory=list)
    run_begin: list[Launch] = field(default_factory=list)
    prologue: list[Launch] = field(default_factory=list)
    begin: list[Launch] = field(default_factory=list)
    shards: list[list[Launch]] = field(default_factory=list)
    part_sums: PartSums | None = None
    pieces: list[Piece] = field(default_factory=list)
    finish: list[Launch] = field(default_factory=list)
    evaluation_begin: list[Launch] = field(default_factory=list)
    evaluation: list[Launch] = field(default_factory=list)

    @property
    def loss_alone(self) -> list[Launch]:
        """What an evaluation runs for a batch of which no predictions are asked for."""
        count = len(self.evaluation)
        while count and self.evaluation[count - 1].operation.endswith(" Output"):
            count -= 1
        return self.evaluation[:count]

    def without_evaluation(self) -> Lowered:
        """The same without its evaluation, and the operands of weights that this alone reads."""
        kept = replace(self, evaluation_begin=[], evaluation=[])
        values = (value for launch in kept.launches() for value in launch.values.values())
        read = {value.array for value in values if isinstance(value, (At, Map))}
        sizes = {name: size for name, size in self.bytes.items() if name in read or not name.endswith(".components")}
        return replace(kept, bytes=sizes)

    def launches(self) -> list[Launch]:
        """All of them: those of a step, then those of an evaluation."""
        shards = [launch for shard in self.shards for launch in shard]
        steps = [*self.run_begin, *self.prologue, *self.initialise, *self.staged, *self.begin, *shards, *self.finish]
        for piece in self.pieces:
            steps += [launch for shard in piece.shards for launch in shard]
            steps += [each for each in piece.exchange if isinstance(each, Launch)]
        return [*steps, *self.evaluation_begin, *self.evaluation]

    def collectives(self) -> list[Collective]:
        """What a step exchanges with other ranks, in order."""
        launches = [*(launch for shard in self.shards for launch in shard), *self.finish]
        of_launches = [launch.exchange for launch in launches if launch.exchange is not None]
        return [
            *of_launches,
            *(each for piece in self.pieces for each in piece.exchange if isinstance(each, Collective)),
        ]

    def evaluation_collectives(self) -> list[Collective]:
        """What an evaluation exchanges for a batch, in order."""
        return [launch.exchange for launch in self.evaluation if launch.exchange is not None]

    def maps(self) -> list[Map]:
        """All maps that launches take, each once, those of staged components for each place."""
        values = (value for launch in self.launches() for value in launch.values.values())
        return [
            replace(value, place=place)
            for value in dict.fromkeys(value for value in values if isinstance(value, Map))
            for place in range(self.stages if value.array in self.staged_bytes else 1)
        ]

    def entries(self) -> list[Entry]:
        """All entries launched, each once."""
        return list(dict.fromkeys(launch.entry for launch in self.launches()))
