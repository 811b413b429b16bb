"""How much of the gradient ranks exchange at a time, and who moves a weight."""

from __future__ import annotations

from ....plan import Norm, Parts, Plan, Segment
from .. import kernels
from . import thresholds
from .setting import Setting, Verdict


def exchanged_apart(elements: int, rest: int, *, in_one: bool) -> Verdict:
    """Whether so many elements of the gradient are a piece by themselves, with so many behind them.

    ``in_one`` if the plan makes one exchange of all sums.
    """
    least = thresholds.EXCHANGE_LEAST_ELEMENTS
    if in_one:
        return Verdict(False, f"{elements:,} elements: the plan makes one exchange a step")
    if elements < least and rest:
        return Verdict(False, f"{elements:,} elements < {least:,}: a message's latency would be most of its time")
    if rest < least:
        return Verdict(False, f"{elements:,} elements, to the end")
    return Verdict(True, f"{elements:,} elements ≥ {least:,}")


def moved_where_made(plan: Plan, weight: Segment) -> tuple[int | None, str]:
    """The rank that adds the other one's gradient of a weight to its own and moves the weight in one launch, and why.

    None where none does: where there are not two ranks with a shard each, or a norm comes between, or a parameter is
    used twice, or both have some of the weight's slots.
    """
    is_clipped = any(isinstance(operation, Norm) for operation in plan.training)
    is_tied = len(plan.partials) > len(plan.gradient)
    least = thresholds.MOVED_LEAST_ELEMENTS
    if plan.ranks != 2 or plan.shards != 2 or plan.moves_all or is_clipped or is_tied or weight.size < least:
        return None, "sums are moved behind the exchange"
    for rank, each in enumerate(plan.slices):
        if each.gradient.start <= weight.offset and weight.end <= each.gradient.stop:
            return (
                rank,
                f"{weight.size:,} elements ≥ {least:,}, whose slots rank {rank} has: it makes the gradient last",
            )
    return None, "each rank has some of its slots"


def made_in_the_wait(elements: int, of_owner: int) -> Verdict:
    """Whether a rank makes its gradient of a weight, of so many elements, while it waits for the other rank's, and
    moves it in a launch of its own; else one launch does both.  No rank moves more than ``of_owner`` weights."""
    most = thresholds.IN_THE_WAIT_MOST_ELEMENTS
    if of_owner > 1:
        return Verdict(
            False, f"the other gradient comes beside the products for the {of_owner} weights that a rank sends"
        )
    if elements > most:
        return Verdict(False, f"{elements:,} elements > {most:,}: another pass over it takes as long as the wait")
    return Verdict(True, f"{elements:,} elements ≤ {most:,}: nothing else is left to do until the other gradient comes")


def fills_the_wait(others: int) -> Verdict:
    """Whether two ranks make the other gradients, of so many elements, while they wait for those of weights.

    Else they make and send them first, so that they are in flight beside the products for the weights' gradients.
    """
    least = thresholds.EXCHANGE_LEAST_ELEMENTS
    if others < least:
        return Verdict(True, f"{others:,} elements < {least:,}, whose exchange takes little more than the latency")
    return Verdict(False, f"{others:,} elements ≥ {least:,} are in flight beside the weights' products")


def exchanged_by_tail(parts: Parts, rows: int, columns: int, setting: Setting) -> Verdict:
    """Whether the tail behind a first layer in parts exchanges their sums, (rows, columns), itself."""
    if parts.ranks == 1:
        return Verdict(False, "all parts are here")
    if not setting.reaches_cards:
        return Verdict(False, "kernels do not reach the memory of other cards")
    if parts.count > parts.ranks or parts.count > kernels.TAIL_MOST_PARTS:
        most = kernels.TAIL_MOST_PARTS
        return Verdict(False, f"{parts.count} parts; a tail exchanges one of each rank, and no more than {most}")
    if columns > kernels.TAIL_MOST_PART_COLUMNS:
        return Verdict(False, f"{columns} columns > {kernels.TAIL_MOST_PART_COLUMNS}: a block has not the threads")
    if rows > setting.multiprocessors:
        return Verdict(False, f"{rows} rows > {setting.multiprocessors} multiprocessors: blocks would wait for others")
    return Verdict(True, f"{rows} rows ≤ {setting.multiprocessors} multiprocessors: it exchanges the sums of parts")


def sent_by_kernel(nbytes: int) -> Verdict:
    """Whether a kernel sends what the next launch waits for, if the rank that sends the most sends so many bytes."""
    return _by_kernel(nbytes, thresholds.MESSAGE_KERNEL_MOST_BYTES)


def shards_sent_by_kernel(plan: Plan) -> Verdict:
    """Whether kernels send what ranks exchange of their shards: it comes beside products, which wait for its blocks."""
    return _by_kernel(4 * plan.gradient_count, thresholds.SHARDS_KERNEL_MOST_BYTES)


def _by_kernel(nbytes: int, most: int) -> Verdict:
    if nbytes > most:
        return Verdict(False, f"{nbytes:,} bytes > {most:,}: copy engines move more in the time")
    return Verdict(True, f"{nbytes:,} bytes ≤ {most:,}: a copy engine would take longer to begin")
