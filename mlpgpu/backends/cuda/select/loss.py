"""By how many threads a row of a loss or an output is taken; which last layers one kernel does with the loss."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels import (
    CLUSTER_HEAD,
    COLUMN_HEAD,
    FEW_ROWS,
    FEW_ROWS_HEAD,
    HEAD_MOST_N,
    LOSS_COLUMNS,
    ROW_HEAD,
    SMALL_N_COLUMNS,
    SUMS_OF_TERMS,
    TAIL_MOST_LAYERS,
    TAIL_MOST_UNITS,
    TAIL_MOST_WEIGHTS,
    WARP_TEAM,
    WHOLE_HEAD,
    WHOLE_HEAD_MOST_K,
    WHOLE_HEAD_MOST_N,
    WIDE_TEAM,
    HeadForm,
    Team,
    ceil_div,
    fits_row_head,
)
from . import thresholds
from .counted import column_head_clocks, is_faster, row_head_clocks, simt_clocks
from .dense import is_cut, on_tensor_cores, product_rows, split_clocks
from .setting import Verdict, Work
from .tiles import small_batch_tile


def team_of(n: int) -> Team:
    """The threads for rows so wide: the order of a row's sums must follow from that alone."""
    return WIDE_TEAM if n >= thresholds.WIDE_ROW_LEAST_N else WARP_TEAM


def team_reason(n: int) -> str:
    """Why these."""
    limit = thresholds.WIDE_ROW_LEAST_N
    return f"{n:,} columns {'≥' if n >= limit else '<'} {limit:,}"


def loss_blocks(rows: int, team: Team, multiprocessors: int) -> int:
    """How many blocks share the rows of a loss."""
    return min(ceil_div(rows, team.block_rows), thresholds.LOSS_BLOCKS * multiprocessors)


def head(k: int, n: int, activation: str, work: Work) -> Verdict:
    """Whether a last layer of this shape and its loss can be one kernel's work."""
    if work.reduction != "ordered":
        return Verdict(False, 'reduction="atomic"')
    if work.ends_with_gradient:
        return Verdict(False, "the step stores the logits, which a head does not")
    if activation != "identity":
        return Verdict(False, f"the last layer has the activation {activation}")
    if n > HEAD_MOST_N:
        return Verdict(False, f"{n:,} outputs > {HEAD_MOST_N}, the most of a head")
    why = f"{n} outputs ≤ {HEAD_MOST_N}: the last layer, the loss and dx are one launch, the head"
    return _head_of_cut(k, n, work, why) if is_cut(k, n) else _head_of_rows(k, n, work, why)


def _head_of_rows(k: int, n: int, work: Work, why: str) -> Verdict:
    """The same of other layers, unless their products and the loss are counted to take less apart: of many rows."""
    form, _ = head_form(k, n, work)
    # Of fewer columns most of a tile is padding, for which counts are too low.
    if not work.is_training or form is not COLUMN_HEAD or n <= SMALL_N_COLUMNS:
        return Verdict(True, why)
    rows, sms = product_rows(work), work.setting.multiprocessors
    by_head = column_head_clocks(form, head_parts(form, k, ceil_div(rows, form.rows), work), k, n, work.rows, sms)
    products = small_batch_tile(rows, n, k, sms), small_batch_tile(rows, k, n, sms)
    of_products = sum(
        simt_clocks(tile, *sizes, sms) for (tile, _), sizes in zip(products, ((rows, n, k), (rows, k, n)), strict=True)
    )
    apart = of_products + loss_clocks(rows, team_of(n), sms) + 2 * thresholds.LAUNCH_CLOCKS
    counted = f"counted clocks: {by_head:,} by a head, {apart:,} by products on plain cores and a loss"
    is_worth_it = not is_faster(apart, by_head)
    return Verdict(is_worth_it, f"{why}; {counted}" if is_worth_it else counted)


def loss_clocks(rows: int, team: Team, multiprocessors: int) -> int:
    """Of a loss by its own launch, whose teams take one row after another."""
    in_turn = ceil_div(rows, team.block_rows * loss_blocks(rows, team, multiprocessors))
    return thresholds.LOSS_CLOCKS + thresholds.LOSS_ROW_CLOCKS * in_turn


def _head_of_cut(k: int, n: int, work: Work, why: str) -> Verdict:
    """The same of a layer that is split along k else, where the head is counted to take less."""
    cut = f"its product is split along k = {k:,}"
    if not (thresholds.CUT_LAYERS_HAVE_HEADS and thresholds.COLUMN_HEADS_ARE_USED):
        return Verdict(False, cut)
    by_head = cut_head_clocks(k, n, work)
    apart = split_clocks(k, n, work) + thresholds.LOSS_CLOCKS + 3 * thresholds.LAUNCH_CLOCKS
    counted = f"counted clocks: {by_head:,} by a head, {apart:,} with k = {k:,} split, a sum, the loss and dx"
    is_worth_it = is_faster(by_head, apart)
    return Verdict(is_worth_it, f"{why}; {counted}" if is_worth_it else f"{cut}; {counted}")


def cut_head_clocks(k: int, n: int, work: Work) -> int:
    """What a head is counted at in the place of a product that is split along k, and of what follows it.

    By columns, until a card has measured those by rows.
    """
    found, _ = head_form(k, n, work)
    has_scales = work.operand_format is not None and work.operand_format.scaled
    leaves_scales = has_scales and work.rows >= thresholds.NARROW_LEAST_ROWS  # which ask for whole rows of dx
    form = COLUMN_HEAD if found is ROW_HEAD else head_form_of_operands(found) if leaves_scales else found
    parts = 1 if leaves_scales else head_parts(form, k, ceil_div(product_rows(work), form.rows), work)
    return column_head_clocks(form, parts, k, n, work.rows, work.setting.multiprocessors)


def head_form(k: int, n: int, work: Work) -> tuple[HeadForm, str]:
    """The kernel of a head, and why it is another one than that of 8 rows which keeps x in registers, if it is.

    The order of its sums over k follows from that.
    """
    if not thresholds.COLUMN_HEADS_ARE_USED:
        return WHOLE_HEAD, ""
    if _has_cluster_head(k, n, work):
        rows = f"{work.rows} ≤ {thresholds.CLUSTER_HEAD_MOST_ROWS} rows"
        weights = f"{k * n:,} weights ≥ {thresholds.CLUSTER_HEAD_LEAST_WEIGHTS:,}"
        return CLUSTER_HEAD, f"{rows}, {weights}: {CLUSTER_HEAD.split} blocks share k, and a block has two rows"
    is_whole = k <= WHOLE_HEAD_MOST_K and n <= WHOLE_HEAD_MOST_N
    is_wave = work.rows <= WHOLE_HEAD.rows * work.setting.multiprocessors
    is_large = k * n > thresholds.COLUMN_HEAD_MOST_WEIGHTS
    is_read_often = work.rows * k * n > thresholds.FEW_ROWS_HEAD_READS
    if is_whole and is_wave and is_large and is_read_often:
        return WHOLE_HEAD, ""
    most_rows = thresholds.FEW_ROWS_HEAD_ROWS * work.setting.multiprocessors
    if work.rows <= most_rows:
        return FEW_ROWS_HEAD, f"{work.rows} ≤ {most_rows} rows: a block has two, a thread a column of W"
    sms = work.setting.multiprocessors
    by_rows = row_head_clocks(k, n, work.rows, sms)
    by_columns = column_head_clocks(COLUMN_HEAD, 1, k, n, work.rows, sms)
    is_one_wave = work.rows <= COLUMN_HEAD.rows * COLUMN_HEAD.blocks * sms
    if thresholds.ROW_HEADS_ARE_USED and not is_one_wave and fits_row_head(k, n) and by_rows < by_columns:
        return ROW_HEAD, f"a warp has two rows at a time; counted clocks: {by_rows:,} so, {by_columns:,} by columns"
    return COLUMN_HEAD, f"{k:,}×{n}, {work.rows:,} rows: a thread has a column of W"


def _has_cluster_head(k: int, n: int, work: Work) -> bool:
    """Whether the blocks of a cluster share a last layer (k, n): of few rows and a large weight."""
    is_there = thresholds.CLUSTER_HEADS_ARE_USED and work.setting.arch == "sm_90a"
    is_large = k * n >= thresholds.CLUSTER_HEAD_LEAST_WEIGHTS and k >= thresholds.HEAD_PART_LEAST_K
    return is_there and is_large and work.rows <= thresholds.CLUSTER_HEAD_MOST_ROWS


def head_form_of_operands(form: HeadForm) -> HeadForm:
    """The kernel of a head that leaves dx as operands as well, whose scales ask for whole rows of it, and whose padding
    for more clusters than are on a card at once."""
    return FEW_ROWS_HEAD if form is CLUSTER_HEAD else form


def head_parts(form: HeadForm, k: int, row_blocks: int, work: Work) -> int:
    """How many blocks have the same rows, each with a part of k in dx, where a card has room for them; or clusters."""
    if form in (WHOLE_HEAD, ROW_HEAD, CLUSTER_HEAD):
        return 1
    return max(1, min(work.setting.multiprocessors // row_blocks, ceil_div(k, thresholds.HEAD_PART_LEAST_K)))


def product_with_loss(n: int, activation: str, loss: str, work: Work) -> Verdict:
    """Whether a product on tensor cores can end with the loss, and leave no logits."""
    if work.operand_format is None:
        return Verdict(False, "tensor cores do not make it")
    if not work.operand_format.is_single:
        return Verdict(False, f"it writes deltas as one bfloat16, and operands are {work.operand_format.contents}")
    if work.ends_with_gradient:
        return Verdict(False, "the step stores the logits")
    if activation != "identity":
        return Verdict(False, f"the last layer has the activation {activation}")
    if loss not in SUMS_OF_TERMS:
        return Verdict(False, f"{loss} needs whole rows of logits, or no product ends with it")
    if n % LOSS_COLUMNS:
        return Verdict(False, f"{n:,} outputs are not a multiple of {LOSS_COLUMNS}")
    return Verdict(True, f"each term of {loss} needs one logit alone: the product's epilogue computes it")


def tail(
    layers: Sequence[tuple[int, int]],
    last_activation: str,
    work: Work,
    parameter_count: int,
    *,
    has_frozen: bool = False,
) -> Verdict:
    """Whether the layers after a first one that is split along k, and the loss, are one kernel's work.

    Args:
        layers: (k, n) of each dense layer.
        has_frozen: whether some of them are frozen.
    """
    if not work.is_training or work.ends_with_gradient:
        return Verdict(False, "a tail is for training steps that store no logits")
    if work.shards > 1 or work.reduction != "ordered":
        return Verdict(
            False, f"{work.shards} shards, and a tail takes one" if work.shards > 1 else 'reduction="atomic"'
        )
    if has_frozen:
        return Verdict(False, "a layer is frozen, and a tail makes the deltas of all")
    if work.rows > thresholds.TAIL_MOST_ROWS:
        return Verdict(
            False, f"{work.rows:,} rows > {thresholds.TAIL_MOST_ROWS}: launches that share weights are faster"
        )
    if not 2 <= len(layers) <= TAIL_MOST_LAYERS or not is_cut(*layers[0]):
        return Verdict(False, f"a tail follows a first layer split along k, of 2 to {TAIL_MOST_LAYERS} dense layers")
    if last_activation != "identity":
        return Verdict(False, f"the last layer has the activation {last_activation}")
    first, *others = layers
    if any(on_tensor_cores(k, n, work) for k, n in others):
        return Verdict(False, "tensor cores make the product of a later layer")
    weights, units = sum(k * n for k, n in others), sum(n for _, n in (first, *others))
    if weights > TAIL_MOST_WEIGHTS or units > TAIL_MOST_UNITS or parameter_count >= 1 << 31:
        room = f"a block has room for {TAIL_MOST_WEIGHTS:,} and {TAIL_MOST_UNITS:,}"
        return Verdict(False, f"{weights:,} weights after the first layer and {units:,} units: {room}")
    size = f"{weights:,} ≤ {TAIL_MOST_WEIGHTS:,} weights after a first layer of k = {first[0]:,}"
    return Verdict(True, f"{size}: those layers and the loss are one launch with a block per row, the tail")


def updates_after_others(work: Work) -> Verdict:
    """Whether the updates of a tail's layers are put on their stream after the first layer's."""
    if work.rows > FEW_ROWS:
        return Verdict(True, f"after it, since with {work.rows} > {FEW_ROWS} rows it would wait for their blocks")
    return Verdict(False, f"at once, since with at most {FEW_ROWS} rows it is the shorter one")
