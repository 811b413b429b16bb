"""A plan's launches one by one: what each asks of the card, and how long it takes there, as tables.

The floor of a launch is the time that the least it must do (:mod:`.costs`) takes at the card's peak rates
(:mod:`.peak_rates`); what it is predicted to take follows from counts (:mod:`.predicted`); its time is measured
(:mod:`.probe`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....datasets import Dataset
from ....plan import Plan
from ....text import table
from ...base import Sampling, State
from ..run.program import CudaProgram
from ..run.trace import Span
from ..runtime import Device
from .paths import describe_paths
from .peak_rates import MultiplyAdds, PeakRates, measure_peak_rates
from .probe import Probe, TimedLaunch, persistent_seconds

DATA_BYTES, MOST_BATCHES = 1 << 28, 1024  # of the random data that are trained on
DELAY_SECONDS = 0.03  # for which the card is kept busy while the host puts a step on its streams
GANTT_COLUMNS = 60


@dataclass(frozen=True)
class Profile:
    """A step of a plan, or without an optimizer an evaluation of one batch, measured.

    Attributes:
        title: what was measured, and on which card.
        launches: in order; those of the first shard stand for all shards.
        seconds: the time of the whole when it is replayed as one graph.
        arrays: bytes of each array on the card, by name.
        timelines: what ran when, by heading, where that was asked for.
        way: how the plan trains: inside one kernel, or by these launches, and why.
        paths: which kernel each operation takes, and why.
    """

    title: str
    rates: PeakRates
    launches: Sequence[TimedLaunch]
    seconds: float
    arrays: Mapping[str, int]
    timelines: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    way: str = ""
    paths: str = ""

    @property
    def kernel_seconds(self) -> float:
        """The sum over all launches."""
        return sum(each.count * each.seconds for each in self.launches)

    def __str__(self) -> str:
        head = "\n".join(filter(None, (self.title, str(self.rates), self.way)))
        parts = [head, *filter(None, (self.paths,)), self._kernels(), self._arrays()]
        return "\n\n".join(parts + [f"{heading}\n{gantt(spans)}" for heading, spans in self.timelines.items()])

    def _kernels(self) -> str:
        heads = ("operation", "kernel", "launches", "grid", "threads", "registers", "shared B", "MFLOP", "kB")
        rows = [(*heads, "floor µs", "predicted µs", "time µs", "floor/time")]
        for each in self.launches:
            entry = each.launch.entry
            rows.append(
                (
                    each.launch.operation,
                    entry.name,
                    str(each.count),
                    "×".join(map(str, each.launch.grid)),
                    str(entry.threads),
                    str(each.registers),
                    f"{each.shared_bytes:,}",
                    f"{each.flops / 1e6:,.3f}" if each.flops else "",
                    f"{each.bytes / 1e3:,.1f}",
                    f"{each.floor * 1e6:,.2f}",
                    "–" if each.predicted is None else f"{each.predicted * 1e6:,.2f}",
                    f"{each.seconds * 1e6:,.2f}",
                    f"{each.floor / each.seconds:.1%}",
                )
            )
        known = [each.count * each.predicted for each in self.launches if each.predicted is not None]
        predicted = f", predicted {float(sum(known)) * 1e6:,.2f} µs" if len(known) == len(self.launches) else ""
        ratio = self.kernel_seconds / self.seconds
        total = (
            f"sum of the launches {self.kernel_seconds * 1e6:,.2f} µs{predicted}, the whole as one graph "
            f"{self.seconds * 1e6:,.2f} µs (ratio {ratio:.2f}"
        )
        beside = ", as shards run side by side" if any(each.count > 1 for each in self.launches) else ""
        if updates := [each.launch.operation for each in self.launches if each.launch.on_side_stream]:
            beside += f", as the updates of {', '.join(updates)} run beside the launches that follow them"
        return "\n".join([table(rows, "<<" + ">" * (len(rows[0]) - 2)), f"{total}{beside})"])

    def _arrays(self) -> str:
        rows = [("array on the card", "bytes")]
        rows += [(name, f"{size:,}") for name, size in sorted(self.arrays.items(), key=lambda item: -item[1]) if size]
        return table([*rows, ("total", f"{sum(self.arrays.values()):,}")], "<>")


def gantt(spans: Sequence[Span]) -> str:
    """A text of one row for each span, stream by stream, with a bar from its start to its end."""
    whole = max(span.end for span in spans)
    rows = [("stream", "", "start µs", "end µs", "")]
    for span in sorted(spans, key=lambda span: (span.stream, span.start)):
        first = min(int(span.start / whole * GANTT_COLUMNS), GANTT_COLUMNS - 1)
        last = max(first + 1, round(span.end / whole * GANTT_COLUMNS))
        bar = " " * first + "=" * (last - first)
        rows.append(
            (
                span.stream,
                span.name,
                f"{span.start * 1e6:,.1f}",
                f"{span.end * 1e6:,.1f}",
                bar.ljust(GANTT_COLUMNS),
            )
        )
    return table(rows, "<<>>>")


def profile(plan: Plan, device: Device, state: State, *, scale: float | None = None, timeline: bool = False) -> Profile:
    """Run a plan on random data, and measure it launch by launch.

    Args:
        state: to begin from; rates are 0, so that parameters stay as they are.
        scale: of inputs that are bytes, or None where they are float32.
        timeline: whether to record what runs when, in a step and while the data come to the card.

    Raises:
        BackendError: the card has too little memory, or kernels cannot be compiled.
    """
    data = random_data(plan, scale)
    probe = Probe(plan, device, lambda program: program.load(state), data)
    with device:
        multiply_adds = MultiplyAdds(device)
        rates = measure_peak_rates(device, multiply_adds)
        seconds = probe.seconds()
        launches = probe.launches(rates)
        timelines = {}
        if timeline:
            delay = DELAY_SECONDS * rates.computed
            timelines["one step"] = probe.timeline(lambda stream: multiply_adds.put(stream, delay))
    if timeline and plan.training:
        heading = "the first steps of a first epoch, whose rows come to the card piece by piece"
        timelines[heading] = probe.first_epoch()
    what = "a step" if plan.training else "the evaluation"
    title = f"{what} of {plan.capacity} rows on {device.name}, measured on random data"
    way = "\n".join([*([_way(plan, device, state, data)] if plan.training else []), *probe.notes])
    paths = describe_paths(plan, device.multiprocessors, device.arch, "float32" if scale is None else "uint8")
    return Profile(title, rates, launches, seconds, probe.arrays, timelines, way, paths)


def _way(plan: Plan, device: Device, state: State, data: Dataset) -> str:
    """How a plan trains, in words, with the time of a step where another kernel than the table's launches trains."""
    program = CudaProgram(plan, device, 1.0)
    if isinstance(program.persistent, str):
        return f"trains launch by launch, since {program.persistent}"
    program.load(state)
    program.attach(data, Sampling(len(data), plan.capacity, seed=0))
    seconds, kernel = persistent_seconds(program), program.persistent
    entry = kernel.train("float32" if data.scale is None else "uint8", textured=True).entry
    return (
        f"trains inside one kernel, {entry.name}: {kernel.layout.blocks} blocks of {entry.threads} threads, each with "
        f"{entry.shared_bytes:,} bytes of shared memory; a step takes {seconds * 1e6:,.2f} µs.  Launch by launch it "
        "would be:"
    )


def random_data(plan: Plan, scale: float | None) -> Dataset:
    """Random rows such as a plan trains on: as many batches as exceed a cache, or one for an evaluation."""
    random = np.random.default_rng(0)
    row_bytes = plan.n_in * (4 if scale is None else 1) + 4 * plan.n_out
    batches = min(MOST_BATCHES, max(1, DATA_BYTES // (plan.capacity * row_bytes))) if plan.training else 1
    rows = plan.capacity * batches
    x = random.random((rows, plan.n_in), np.float32)
    y = None
    if plan.target_kind is not None:
        is_index = plan.target_kind == "index"
        y = random.integers(plan.n_out, size=rows) if is_index else random.random((rows, plan.n_out), np.float32)
    return Dataset(x if scale is None else (255 * x).astype(np.uint8), y, scale=scale)
