"""By how many threads a row of a loss or an output is taken; which last layers one kernel does with the loss."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels import (
    FEW_ROWS,
    HEAD_MOST_N,
    LOSS_COLUMNS,
    SUMS_OF_TERMS,
    TAIL_MOST_LAYERS,
    TAIL_MOST_UNITS,
    TAIL_MOST_WEIGHTS,
    WARP_TEAM,
    WIDE_TEAM,
    Team,
)
from . import thresholds
from .dense import is_cut, on_tensor_cores
from .setting import Verdict, Work


def team_of(n: int) -> Team:
    """The threads for rows so wide: the order of a row's sums must follow from that alone."""
    return WIDE_TEAM if n >= thresholds.WIDE_ROW_LEAST_N else WARP_TEAM


def team_reason(n: int) -> str:
    """Why these."""
    limit = thresholds.WIDE_ROW_LEAST_N
    return (
        f"{n:,} columns are {'at least' if n >= limit else 'fewer than'} {limit:,}, from which on a block takes a row"
    )


def head(k: int, n: int, activation: str, work: Work) -> Verdict:
    """Whether a last layer of this shape and its loss can be one kernel's work."""
    if work.reduction != "ordered":
        return Verdict(False, "sums are atomic")
    if work.ends_with_gradient:
        return Verdict(False, "the layer's outputs are looked at, which the head does not store")
    if activation != "identity":
        return Verdict(False, f"the last layer ends with {activation}")
    if n > HEAD_MOST_N:
        return Verdict(False, f"{n:,} outputs are more than {HEAD_MOST_N}, which a head's row has room for")
    if is_cut(k, n):
        return Verdict(False, f"its product is cut along k = {k:,}")
    return Verdict(True, f"{n} outputs are at most {HEAD_MOST_N}: layer, loss and dx are one launch, the head")


def product_with_loss(n: int, activation: str, loss: str, work: Work) -> Verdict:
    """Whether a product on tensor cores can end with the loss, and leave no logits."""
    if work.operand_format is None or not work.operand_format.is_single:
        return Verdict(False, "scales are known when a row is whole, and a product sees tiles")
    if work.ends_with_gradient:
        return Verdict(False, "the logits are looked at")
    if activation != "identity":
        return Verdict(False, f"the last layer ends with {activation}")
    if loss not in SUMS_OF_TERMS:
        return Verdict(False, f"{loss} needs whole rows of logits")
    if n % LOSS_COLUMNS:
        return Verdict(False, f"{n:,} outputs are no multiple of {LOSS_COLUMNS}")
    return Verdict(True, f"each term of {loss} follows from one logit: the product's epilogue makes it")


def tail(
    layers: Sequence[tuple[int, int]],
    last_activation: str,
    work: Work,
    parameter_count: int,
    *,
    has_frozen: bool = False,
) -> Verdict:
    """Whether the layers after a first one that is cut along k, and the loss, are one kernel's work.

    Args:
        layers: (k, n) of each dense layer.
        has_frozen: whether some of them are frozen.
    """
    if not work.is_training or work.ends_with_gradient:
        return Verdict(False, "there is no training step whose outputs nobody looks at")
    if work.shards > 1 or work.reduction != "ordered":
        return Verdict(False, "the batch is split, or sums are atomic")
    if has_frozen:
        return Verdict(False, "a layer is frozen, and a tail makes the deltas of all")
    if work.rows > thresholds.TAIL_MOST_ROWS:
        return Verdict(
            False, f"{work.rows:,} rows are more than {thresholds.TAIL_MOST_ROWS}, which are worth a block each"
        )
    if not 2 <= len(layers) <= TAIL_MOST_LAYERS or not is_cut(*layers[0]):
        return Verdict(False, f"there are no 2 to {TAIL_MOST_LAYERS} layers, of which the first is cut along k")
    if last_activation != "identity":
        return Verdict(False, f"the last layer ends with {last_activation}")
    first, *others = layers
    if any(on_tensor_cores(k, n, work) for k, n in others):
        return Verdict(False, "tensor cores make the product of a later layer")
    weights, units = sum(k * n for k, n in others), sum(n for _, n in (first, *others))
    if weights > TAIL_MOST_WEIGHTS or units > TAIL_MOST_UNITS or parameter_count >= 1 << 31:
        held = f"{TAIL_MOST_WEIGHTS:,} weights and {TAIL_MOST_UNITS:,} units"
        return Verdict(False, f"{weights:,} weights or {units:,} units do not fit beside each other in {held}")
    return Verdict(True, f"{weights:,} weights after a first layer of k = {first[0]:,}: a block has a row of the batch")


def updates_after_others(work: Work) -> Verdict:
    """Whether the updates of a tail's layers are put on their stream after the first layer's."""
    if work.rows > FEW_ROWS:
        return Verdict(True, f"{work.rows} rows are more than {FEW_ROWS}: after it, which would wait for their blocks")
    return Verdict(False, f"of at most {FEW_ROWS} rows the first layer's update is the shorter one")
