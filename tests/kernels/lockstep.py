"""Several ranks on the host, in lockstep: launches by the kernels' sources, and messages moved between arrays.

What runs when is decided as on cards: the program's own code puts launches and collectives on streams, here ones that
write down what must come before what; then whatever may run next is drawn, of all ranks.  So what nothing orders comes
in one order today and in the other tomorrow.  A message is read when it is sent or when it is taken, also drawn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from host_program import HostProgram

from mlpgpu import Dataset
from mlpgpu.backends import Sampling, State
from mlpgpu.backends.cuda.kernels import initialise_steps
from mlpgpu.backends.cuda.kernels.launches import Collective, Launch, Transfer
from mlpgpu.backends.cuda.run import graphs
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.plan import Plan

MODES = ("drawn", "exchanges first", "exchanges last")


class Deadlock(AssertionError):
    """No rank can go on."""


class Work:
    """A launch or a collective of a rank, and what it follows."""

    def __init__(self, rank: int, what: Launch | Collective, after: set[Work], stream: str, place: int) -> None:
        self.rank, self.what, self.after, self.stream = rank, what, after, stream
        self.place = place  # of its step
        self.waiting = list(what.received) if isinstance(what, Collective) else []
        self.untaken = 0  # messages that it sent and that nobody has yet


class WrittenStream:
    """A stream that writes down what it is given."""

    def __init__(self, device: object, name: str = "") -> None:
        self.name, self.after = name, set[Work]()
        self.works: list[Work] = []

    def put(self, rank: int, what: Launch | Collective, works: list[Work], place: int) -> None:
        work = Work(rank, what, set(self.after), self.name, place)
        works.append(work)
        self.after = {work}

    def record(self, event: WrittenEvent) -> None:
        event.after = set(self.after)

    def wait(self, event: WrittenEvent) -> None:
        self.after |= event.after


class WrittenEvent:
    def __init__(self, device: object) -> None:
        self.after = set[Work]()


class Rank:
    """One rank: its program's launches on the host, and its streams."""

    lanes = 2  # as of cards that are linked: more is left open than by one

    def __init__(self, rank: int, plan: Plan, data: Dataset, sampling: Sampling, **options: Any) -> None:
        self.rank, self.plan = rank, plan
        self.host = HostProgram(plan, data, sampling, rank=rank if plan.tensor is None else 0, **options)
        self.lowered = self.host.low
        self.lowered.stages = 1  # a launch cannot be told several steps here
        self.works: list[Work] = []
        shards = len(self.lowered.shards)
        self.streams = graphs.ShardStreams(None, WrittenStream(None), shards, exchanges=True)  # type: ignore[arg-type]
        addresses = dict.fromkeys([*self.lowered.bytes, "steps"], 0)
        self.steps = graphs.StepGraphs(self, self.streams, addresses, self)  # type: ignore[arg-type]

    def bind(self, what: Launch | Collective, *others: object, **values: object) -> Callable[[Any], None]:
        """As a Binder binds launches, and an Exchange collectives."""

        # Steps have no structs of their own here: a launch is told its step's by the address.
        place = int(values.get("step", 0)) // STEP.itemsize  # type: ignore[call-overload]

        def put(stream: WrittenStream) -> None:
            if isinstance(what, Collective) or what.entry != initialise_steps():
                stream.put(self.rank, what, self.works, place)

        return put

    def launch(self, work: Work, constants: dict[str, np.ndarray]) -> None:
        """Run a launch."""
        sampling, step = self.host.sampling, work.place
        if step >= 0:
            self.host.arrays["step"] = np.array([(step, step, step, sampling.batch_size, sampling.rows)], STEP)
        assert isinstance(work.what, Launch)
        self.host.launch(work.what, constants)

    def load(self, state: State) -> None:
        """The state, of whose slots it has its own; of a network in parts it is this rank's."""
        if self.plan.tensor is not None:
            self.host.load(state)
            return
        own = self.plan.slices[self.rank].parameters
        self.host.load(State(state.parameters, state.slots[:, :, own], state.statistics))


class Lockstep:
    """All ranks of a plan.

    Arguments:
        plan: of all ranks, or where they have parts of a network, each one's.
        seed: of what is drawn.
        mode: what runs first where there is a choice, one of ``MODES``.
    """

    def __init__(
        self, plan: Plan | Sequence[Plan], data: Dataset, sampling: Sampling, *, seed: int, mode: str,
        patch: pytest.MonkeyPatch, **options: Any,
    ) -> None:  # fmt: skip
        patch.setattr(graphs, "Stream", WrittenStream)
        patch.setattr(graphs, "Event", WrittenEvent)
        plans = [plan] * plan.ranks if isinstance(plan, Plan) else plan
        self.ranks = [Rank(rank, own, data, sampling, **options) for rank, own in enumerate(plans)]
        self.draw, self.mode = random.Random(seed), mode

    def run(self, state: State | Sequence[State], rates: np.ndarray) -> None:
        """Train from a state, or from each rank's, on all ranks, in one graph of all steps."""
        constants: list[dict[str, np.ndarray]] = []
        states = [state] * len(self.ranks) if isinstance(state, State) else state
        for each, own in zip(self.ranks, states, strict=True):
            each.load(own)
            constants.append(each.host.begin(rates))
        for each in self.ranks:
            each.steps.put(len(rates))
        self._play(constants)

    def evaluate(self) -> list[np.ndarray]:
        """Each rank's predictions of the first batch."""
        constants = []
        for each in self.ranks:
            constants.append(each.host.begin_evaluation())
            stream, each.works = WrittenStream(None), []
            for launch in (*each.lowered.evaluation_begin, *each.lowered.evaluation):
                for what in (launch.exchange, launch):
                    if what is not None:
                        stream.put(each.rank, what, each.works, -1)
        self._play(constants)
        return [each.host.predictions for each in self.ranks]

    def _play(self, constants: Sequence[dict[str, np.ndarray]]) -> None:
        waiting = [work for each in self.ranks for work in each.works]
        done: set[Work] = set()
        begun: list[Work] = []  # collectives
        channels: dict[tuple[int, int, str], deque[tuple[Work, Transfer, np.ndarray | None]]] = {}
        while waiting or begun:
            ready = [work for work in waiting if work.after <= done]
            if ready:
                work = self._next(ready)
                waiting.remove(work)
                if isinstance(work.what, Launch):
                    self.ranks[work.rank].launch(work, constants[work.rank])
                    done.add(work)
                else:
                    for transfer in work.what.sent:
                        read = self._elements(work.rank, transfer).copy() if self.draw.random() < 0.5 else None
                        channel = channels.setdefault((work.rank, transfer.peer, work.stream), deque())
                        channel.append((work, transfer, read))
                        work.untaken += 1
                    begun.append(work)
            moved = self._move(begun, channels)
            ended = [work for work in begun if not work.waiting and not work.untaken]
            done.update(ended)
            begun = [work for work in begun if work not in ended]
            if not ready and not moved and not ended:
                raise Deadlock([(work.rank, work.what.kind) for work in begun])  # type: ignore[union-attr]
        assert not any(channels.values())

    def _next(self, ready: Sequence[Work]) -> Work:
        if self.mode != "drawn":
            is_first = self.mode == "exchanges first"
            preferred = [work for work in ready if (work.stream in ("exchange", "gather")) == is_first]
            ready = preferred or ready
        return self.draw.choice(ready)

    def _move(self, begun: Sequence[Work], channels: dict[tuple[int, int, str], deque[Any]]) -> bool:
        """Take what has been sent, for collectives that wait for it; whether there was any."""
        has_moved = False
        for work in begun:
            for transfer in list(work.waiting):
                earlier = work.waiting[: work.waiting.index(transfer)]
                channel = channels.get((transfer.peer, work.rank, work.stream))
                if not channel or any(other.peer == transfer.peer for other in earlier):
                    continue
                sender, sent, read = channel.popleft()
                values = self._elements(sender.rank, sent) if read is None else read
                assert len(values) == transfer.count, (sent, transfer)
                self._elements(work.rank, transfer)[:] = values
                work.waiting.remove(transfer)
                sender.untaken -= 1
                has_moved = True
        return has_moved

    def _elements(self, rank: int, transfer: Transfer) -> np.ndarray:
        """The elements of an array that a message is of, as a view; never more than there are."""
        arrays = self.ranks[rank].host.arrays
        array = arrays[transfer.at.array]
        if not array.flags.writeable:
            array = arrays[transfer.at.array] = array.copy()
        typed = array.view({8: np.float64, 4: np.float32, 2: np.uint16}[transfer.item_bytes])
        part = typed[transfer.at.offset : transfer.at.offset + transfer.count]
        assert len(part) == transfer.count, (transfer, len(typed))
        return part
