"""What a step costs, by counts: products, calls, passes over arrays, messages, bytes.

``parallel="auto"`` and the choice of one exchange or two follow from these counts, never from a clock, so that all
ranks come to the same, and so does every run.  Ranks that share a host share its cores: where there are more threads
than cores, each takes as much longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigurationError
from .links import SHARED_MEMORY, Link
from .operations import Update
from .plan import Choice, Plan, Way
from .tensor_split import Parts


@dataclass(frozen=True)
class Machine:
    """What the processes compute with.

    Attributes:
        flop_rate: multiplications and additions a second, of one thread, in products.
        call_seconds: of an operation on a shard, beside its arithmetic.
        step_seconds: of a step, beside its operations.
        pass_rate: bytes a second that a thread reads and writes in passes over arrays.
        wake_seconds: until a shard runs on another thread, for each thread beyond the first.
        thread_loss: how much longer a thread takes beside others, which share memory with it.
        wait_seconds: from one rank's coming to an exchange until the last one's.
    """

    flop_rate: float
    call_seconds: float
    step_seconds: float
    pass_rate: float
    wake_seconds: float
    thread_loss: float
    wait_seconds: float


# Fitted by benchmarks/ranks_model.py to nine networks on two cores of an AMD EPYC (Zen 5) that others used as well: one
# rank and two, one thread and two, 1 to 4 shards, the fastest epochs of two sessions.  Counts are 7 % off in the mean,
# and a factor of 1.43 at most.  One exchange took 11 and 14 µs a step less than two with 5,634 and 27,553 parameters,
# and 12 more with 101,770 (Momentum, medians of 25 epochs in turns): by these constants they are equal at 57,000.
CORES = Machine(
    flop_rate=102e9,
    call_seconds=0.8e-6,
    step_seconds=22e-6,
    pass_rate=23e9,
    wake_seconds=28e-6,
    thread_loss=0.27,
    wait_seconds=40e-6,
)
CROWDED_SECONDS = 50e-6  # that a rank sleeps in an exchange where another one needs its core
LEAST_GAIN = 0.1  # of a step, for which all ranks train, or parts of a network: counts are no better than that
ROW_PASSES = 3  # over each array of rows that an operation writes
REDUCE_PASSES = 3  # arrays that one addition of two sums reads and writes
UPDATE_PASSES, SLOT_PASSES = 4, 3  # those of an update, and of each of its slots


def is_one_exchange_faster(plan: Plan, link: Link = SHARED_MEMORY, machine: Machine = CORES) -> bool:
    """Whether ranks that send each other all their sums take less time than those that exchange slices twice.

    One exchange has one latency less, or two with a clipped norm, and has each rank add up and move all parameters.
    """
    return end_seconds(plan.in_one_exchange(), link, machine) < end_seconds(plan, link, machine)


def end_seconds(plan: Plan, link: Link, machine: Machine) -> float:
    """Seconds of a step between the last backward product and the next step, of the rank with the most to do."""
    return passes_seconds(plan, machine) + exchange_seconds(plan, link, machine)


def passes_seconds(plan: Plan, machine: Machine) -> float:
    """Seconds in which a rank adds up the sums of all, and moves what it moves."""
    nodes = sum(len(plan.nodes(rank)) for rank in range(plan.ranks))
    elements = max(each.gradient.stop - each.gradient.start for each in plan.slices)
    passes = (nodes - 1) * REDUCE_PASSES
    for operation in plan.training:
        if isinstance(operation, Update):
            passes += UPDATE_PASSES + SLOT_PASSES * len(operation.optimizer.slots)
    return passes * elements * plan.dtype.itemsize / machine.pass_rate


def exchange_seconds(plan: Plan, link: Link, machine: Machine) -> float:
    """Seconds of a step's exchanges, of the rank that moves most."""
    return sum(link.seconds(traffic) + machine.wait_seconds for _, traffic in plan.exchanges())


def shard_seconds(plan: Plan, rows: float, threads: int, machine: Machine) -> tuple[float, float]:
    """Seconds of one shard of so many rows, from its rows to its partial gradients: of Python's, and of arithmetic.

    The first is of one thread at a time, however many there are.
    """
    calls, arithmetic = 0, 0.0
    for operation in plan.training:
        is_of_rows = any(name in plan.buffers and plan.buffers[name].axes[1] == "row" for name in operation.writes)
        if not is_of_rows and not plan.flops(operation, 1):
            continue  # done once for all shards
        widths = [plan.buffers[name].shape[-1] for name in operation.writes if _is_of_units(plan, name)]
        passed = ROW_PASSES * rows * sum(widths) * plan.dtype.itemsize
        calls += 1
        arithmetic += plan.flops(operation, 1) * rows / (machine.flop_rate * threads) + passed / machine.pass_rate
    return calls * machine.call_seconds, arithmetic


def _is_of_units(plan: Plan, name: str) -> bool:
    return name in plan.buffers and plan.buffers[name].axes[1:] == ("row", "unit")


def step_seconds(
    plan: Plan, threads: int, cores: int, *, link: Link = SHARED_MEMORY, machine: Machine = CORES
) -> float:
    """Seconds of a step of a plan whose ranks share a host of so many cores, with ``threads`` each where they can.

    With one shard BLAS has the threads, else each of a rank's shards is a thread, as many at a time as there are.
    """
    shards = -(-plan.shards // plan.ranks)
    beside = min(threads, shards) if plan.shards > 1 else 1
    in_blas = threads if plan.shards == 1 else 1
    crowd = max(1.0, plan.ranks * beside * in_blas / cores)
    calls, arithmetic = shard_seconds(plan, plan.capacity / plan.shards, in_blas, machine)
    if beside > 1:
        arithmetic *= 1 + machine.thread_loss
    sums = (shards - 1) * REDUCE_PASSES * plan.gradient_count * plan.dtype.itemsize / machine.pass_rate
    computed = shards * calls + -(-shards // beside) * arithmetic + (beside - 1) * machine.wake_seconds + sums
    naps = CROWDED_SECONDS * len(plan.exchanges()) if crowd > 1 else 0.0
    moved = max(1.0, plan.ranks / cores) * passes_seconds(plan, machine)
    return machine.step_seconds + crowd * computed + moved + exchange_seconds(plan, link, machine) + naps


def is_worth(before: float, after: float) -> bool:
    """Whether what takes so many seconds a step is to be done in place of what takes those before."""
    return after < (1 - LEAST_GAIN) * before


def choose_way(one: float, data: float, tensor: float | None = None) -> Way:
    """How ranks are to train, of seconds of a step by one of them, by all, and by all in parts of the network."""
    way: Way = "data" if is_worth(one, data) else "one"
    least = data if way == "data" else one
    return "tensor" if tensor is not None and is_worth(least, tensor) else way


def choice_of(
    ranks: int, lower: Callable[..., Plan], seconds: Callable[[Plan], float | None], *, may_split: bool
) -> Choice:
    """How so many ranks of one host are to train under ``parallel="auto"``, and why.

    Arguments:
        lower: gives the plan of a step for ``shards``, ``ranks`` and ``parts``, as :func:`mlpgpu.plan.lower` does.
        seconds: of a step, which a backend may be unable to count.
        may_split: whether ranks may have parts of the network.
    """
    data = lower(ranks=ranks)
    one, together, tensor = seconds(data.alone()), seconds(data), None
    if one is None or together is None:
        return Choice(ranks, "data")
    if may_split:
        with contextlib.suppress(ConfigurationError):  # no layer of this network can be split
            tensor = seconds(lower(shards=1, ranks=1, parts=Parts(ranks, 0, ranks)))
    return Choice(ranks, choose_way(one, together, tensor), one, together, tensor)
