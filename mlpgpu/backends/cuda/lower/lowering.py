"""From a plan to kernel launches: which entries, on which grids, with which arrays.

This is plain data, made without a GPU from the plan and the card's number of multiprocessors alone, in four passes,
each a function from data to data that one can print: *select* finds a path for each operation (:mod:`..select`), *fuse*
makes groups of neighbours (:mod:`.fuse`), *emit* writes their launches (:mod:`.emit`), *overlap* says which may begin
early (:mod:`.overlap`).  :func:`passes` gives what the first two make.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....plan import Plan, shards_of
from .. import kernels
from ..kernels import ceil_div
from ..kernels.launches import GRAPH_STEPS, MOST_RUN_STEPS, At, Launch, Lowered, Value
from ..select.loss import team_of
from ..select.select import select
from ..select.setting import Setting
from ..select.stages import stages_of
from .emit.emit import emit
from .emit.exchange import Exchange
from .emit.gemm import split_weights
from .emit.pieces import launches_of_piece, put_pieces
from .emit.rows import SUMS_BYTES
from .emit.shard import Shard, partials_pitch
from .fuse import fuse
from .groups import Fused
from .overlap import overlap

STEP_BYTES = 24


@dataclass(frozen=True)
class Passes:
    """The groups of a plan's training step, which is None where there is none, and of its evaluation."""

    training: Fused | None
    evaluation: Fused

    def __str__(self) -> str:
        """The selected paths of each list of operations, then its groups."""
        made = [fused for fused in (self.training, self.evaluation) if fused]
        return "\n\n".join(f"{fused.selection}\n\n{fused}" for fused in made)


def passes(plan: Plan, setting: Setting) -> Passes:
    """The selected paths of a plan, and its groups: ``print(passes(plan, setting))`` shows both."""
    training = fuse(select(plan, setting, is_training=True)) if plan.training else None
    return Passes(training, fuse(select(plan, setting, is_training=False)))


def lower(
    plan: Plan,
    *,
    multiprocessors: int,
    source: str,
    textured: bool = True,
    arch: str = "sm_75",
    rank: int = 0,
    reaches_cards: bool = False,
) -> Lowered:
    """The launches of ``plan`` on a card with so many multiprocessors, for inputs of type ``source``.

    ``source`` is ``"float32"`` or ``"uint8"``; ``textured`` whether targets are read through a texture; ``arch``
    what the card is compiled for; ``rank`` whose launches they are, of a plan of several ranks and shards;
    ``reaches_cards`` whether kernels reach the memory of other ranks' cards.
    """
    made = passes(plan, Setting(multiprocessors, arch, source, textured, reaches_cards))
    return overlap(_emit(plan, made, rank), plan, multiprocessors)


def lower_evaluation(
    plan: Plan, rows: int, *, multiprocessors: int, source: str, textured: bool = True, arch: str = "sm_75"
) -> Lowered:
    """The launches of an evaluation of ``plan`` for at most ``rows`` rows, no more than its capacity.

    They need no array that those of the plan itself lack or have smaller, and give a row, and the sums over a batch,
    the same bits.
    """
    of_rows = plan.with_capacity(rows)
    made = Passes(None, fuse(select(of_rows, Setting(multiprocessors, arch, source, textured), is_training=False)))
    return overlap(_emit(of_rows, made), of_rows, multiprocessors)


def _emit(plan: Plan, made: Passes, rank: int = 0) -> Lowered:
    lowered, training, evaluation = Lowered(), made.training, made.evaluation
    multiprocessors = evaluation.selection.work.setting.multiprocessors
    in_place = evaluation.selection.in_place.holds
    own = shards_of(rank, plan.ranks, plan.shards)
    of_pieces: list[list[list[Launch]]] = []  # of each shard
    exchange = Exchange(Shard(training.selection, lowered), rank) if training and training.pieces else None
    for number in own if training else ():
        assert training is not None
        shard = Shard(training.selection, lowered, number, own.start)
        if number == own.start:
            weights = split_weights(shard, training.weights)
            is_split_before = training.updates_split_weights or training.pieces_split_weights
            lowered.run_begin, lowered.begin = (weights, []) if is_split_before else ([], weights)
        lowered.shards.append(emit(shard, training.groups))
        of_pieces.append([launches_of_piece(shard, piece, exchange) for piece in training.pieces if exchange])
    whole = Shard(evaluation.selection, lowered)
    lowered.evaluation_begin = split_weights(whole, evaluation.weights)
    lowered.evaluation = emit(whole, evaluation.groups)
    lowered.notes = [note for fused in (training, evaluation) if fused for note in fused.notes]
    if lowered.column_scales:
        forget_all, keep_used = (_mask_column_scales(lowered, multiprocessors, mask) for mask in (0, kernels.NONZERO))
        lowered.evaluation_begin.insert(0, forget_all)
        step_format = training.selection.work.operand_format if training else None
        if lowered.begin and step_format is not None and step_format.scaled:
            lowered.run_begin.insert(0, forget_all)
            lowered.begin.insert(0, keep_used)
    of_rank: dict[str, int] = {}
    if training and exchange:
        of_rank = put_pieces(lowered, training, exchange, of_pieces)
    if training:
        lowered.finish = emit(Shard(training.selection, lowered), training.finish)
        initial: dict[str, Value] = {"next": At("step"), "steps": At("steps"), "count": At("graph_steps")}
        lowered.initialise = [Launch(kernels.initialise_steps(), (1, 1, 1), initial)]
        lowered.bytes["steps"] = STEP_BYTES * GRAPH_STEPS[0]
        lowered.stages = stages_of(sum(lowered.staged_bytes.values()))
        lowered.bytes |= {name: lowered.stages * size for name, size in lowered.staged_bytes.items()}

    of_evaluation = SUMS_BYTES * ceil_div(plan.capacity, team_of(plan.n_out).block_rows)
    slots = len(plan.optimizer.slots) if plan.optimizer else 0
    lowered.bytes |= {
        "step": STEP_BYTES,
        "parameters": 4 * plan.parameter_count,
        "statistics": 4 * plan.statistic_count,
        "slots": 4 * slots * kernels.slot_pitch(plan.parameter_count),
        "partials": 0 if in_place else 4 * plan.shards * partials_pitch(plan),
        "sums": max(of_evaluation, lowered.bytes.get("sums", 0)),
        "arrived": 4,
        "totals": SUMS_BYTES,
        "losses": SUMS_BYTES * MOST_RUN_STEPS,
        **{name: 4 * len(words) for name, words in lowered.words.items()},
        **of_rank,
    }
    return lowered


def _mask_column_scales(lowered: Lowered, multiprocessors: int, mask: int) -> Launch:
    """A launch that clears all flags of columns but those of ``mask``.

    From step to step the flag NONZERO is kept, because nearly all columns have it, and all blocks would set it at once.
    It does no harm in a column that has become zero, where sums are 0 whether they are recomputed or not.
    """
    size = sum(lowered.column_scales.values())
    lowered.bytes["column scales"] = 4 * size
    blocks = min(ceil_div(size, kernels.ROW_THREADS), multiprocessors)
    return Launch(kernels.mask_words(), (blocks, 1, 1), {"words": At("column scales"), "mask": mask, "size": size})
