"""A plan on a card: the interface of programs, in front of state, training and evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ....datasets import Dataset
from ....errors import BackendError
from ....plan import Plan, shards_of
from ....ranks import communicator, rank
from ...base import Histogram, Program, Sampling, State, StepLog, scaled
from ..exchange import Exchange, join
from ..persistent.kernel import PersistentKernel
from ..runtime import Device
from ..select.inference import evaluation_rows
from ..select.persistent import choose_kernel
from .evaluation import Evaluation
from .graphs import ShardStreams
from .persistent import PersistentSteps
from .state import DeviceState
from .trace import Trace
from .training import Training
from .workspace import Workspace


class CudaProgram(Program):
    """A plan, its arrays and its launches on a card.

    Arguments:
        memory_share: how much of the card's memory a data set may take.
        launches_because: a reason to train launch by launch even where the plan could train inside one kernel.
        shared: addresses of arrays that another program owns.
        trace: is told what runs when.

    Attributes:
        device: the card.
        persistent: the kernel inside which the plan trains, or why it trains launch by launch.
        persistent_steps: launches of that kernel, or None.
        workspace: the plan's arrays and kernels.
        training: the steps on the set that was attached last, or None.
        evaluation: evaluations of data sets.

    Raises:
        BackendError: the card has not the memory.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        memory_share: float,
        *,
        launches_because: str = "",
        shared: Mapping[str, int] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._is_shared = plan.processes > 1
        if plan.shards == 1 and plan.tensor is None:  # each rank computes all of it, and has nothing to tell the others
            plan = plan.alone()
        own_rank = rank() if plan.ranks > 1 else 0
        self._plan, self.device, self._memory_share, self._trace = plan, device, memory_share, trace
        launches_because = launches_because or ("ranks have parts of the network" if plan.tensor is not None else "")
        self.persistent: PersistentKernel | str = launches_because or choose_kernel(
            plan, multiprocessors=device.multiprocessors, shared_bytes=device.shared_bytes, arch=device.arch
        )
        self.training: Training | None = None
        self._sampler: Sampler | None = None
        with device:
            self.workspace = Workspace(
                plan, device, self.persistent, memory_share=memory_share, shared=shared, trace=trace,
                evaluates=not self._has_own_evaluation, rank=own_rank,
            )  # fmt: skip
            shards = len(shards_of(own_rank, plan.ranks, plan.shards))
            self._streams = ShardStreams(device, self.workspace.stream, shards, exchanges=plan.ranks > 1)
            self.workspace.stream.synchronize()
        self.state = DeviceState(self.workspace)
        # What makes the workspace does not hold the program, which a cycle would keep until garbage is collected.
        make = partial(_evaluation_workspace, self.workspace, memory_share) if self._has_own_evaluation else None
        # By which ranks that have parts of the network evaluate together, as they train.
        exchange = partial(_join_parts, device) if self._is_shared and plan.tensor is not None else None
        self.evaluation = Evaluation(make or self.workspace, exchange)
        self.persistent_steps: PersistentSteps | None = None
        if isinstance(self.persistent, PersistentKernel):
            self.persistent_steps = PersistentSteps(self.workspace, self.persistent)

    @property
    def has_parts(self) -> bool:
        """Whether it has parts of a network alone."""
        return self._plan.tensor is not None

    def address(self, array: str) -> int:
        """The address of one of the program's arrays on the card."""
        return self.workspace.arrays.addresses[array]

    # --- state ---

    def load(self, state: State, *, snapshot: bool = False) -> None:
        self.state.load(state, snapshot=snapshot)
        self._tell_statistics()

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        self.state.draw(seed, statistics)
        self._tell_statistics()

    def _tell_statistics(self) -> None:
        """Evaluations may have a workspace of their own, whose feeds scale rows on the host."""
        with self.device:
            self.evaluation.set_statistics(self.workspace.fitted)

    def read(self, *, snapshot: bool = False) -> State:
        return self.state.read(snapshot=snapshot)

    def prefetch(self) -> None:
        self.state.prefetch()

    def snapshot(self) -> None:
        self.state.snapshot()

    def restore(self) -> None:
        self.state.restore()

    def is_finite(self) -> bool:
        return self.state.is_finite()

    def square_sum(self, parts: Sequence[slice]) -> float:
        return self.state.square_sum(parts)

    def histograms(self, bins: int) -> dict[str, Histogram]:
        return self.state.histograms(bins)

    # --- steps ---

    def attach(self, dataset: Dataset, sampling: Sampling) -> None:
        with self.device:
            if self.training is not None:
                self.training.close()
            self.training = None  # the old set makes room for the new one
            self.state.were_set = True  # for all that this program knows: its parameters may be another one's
            exchange = None
            if self._is_shared and self._plan.tensor is not None:
                exchange = _join_parts(self.device)
            elif self._is_shared:
                exchange = join(self.device)
                if self._plan.ranks == 1:  # one shard, which each rank computes
                    exchange.check_kinds()
                    exchange = None
            self.training = Training(
                self.workspace, self.state, self._streams, self.persistent_steps, dataset, sampling, exchange
            )

    def run(self, first_step: int, rates: np.ndarray, log: StepLog | None = None) -> np.ndarray:
        assert self.training is not None
        return self.training.run(first_step, rates, log or StepLog(len(rates)))

    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        assert self.training is not None
        data, sampling = self.training.data, self.training.sampling
        if self._sampler is None:
            addresses = self.workspace.arrays.addresses
            shared = {name: addresses[name] for name in ("parameters", "slots", "statistics")}
            self._sampler = Sampler(self._plan.alone(), self.device, self._memory_share, shared)
        self._sampler.set_statistics(self.workspace.fitted)
        return self._sampler.histograms(data.dataset.first(rows), sampling.seed, step, bins)

    # --- evaluations ---

    @property
    def _has_own_evaluation(self) -> bool:
        """Whether an evaluation takes more rows at a time than a step, and arrays of its own for them."""
        return bool(self._plan.training) and evaluation_rows(self._plan) > self._plan.capacity

    def evaluate(self, dataset: Dataset, names: Sequence[str], *, shared: bool = False) -> dict[str, np.ndarray]:
        sums = self.evaluation.evaluate(dataset, names)
        ranks = communicator() if shared and self._is_shared and self._plan.tensor is None else None
        return sums if ranks is None else ranks.broadcast(sums)  # those of another kind of card might differ

    def predict(self, dataset: Dataset, *, logits: bool = False) -> np.ndarray:
        return self.evaluation.predict(dataset, logits=logits)

    def close(self) -> None:
        training, self.training = self.training, None
        sampler, self._sampler = self._sampler, None
        # On a card that faulted, or that a fork left to the parent, there is nothing to wait for or to give back.
        with contextlib.suppress(BackendError), self.device:
            if training is not None:
                training.close()
            if sampler is not None:
                sampler.close()
            self.evaluation.close()
            self.workspace.close()


def _join_parts(device: Device) -> Exchange:
    """The exchange of ranks that have parts of a network, and compute alike what is whole on each."""
    exchange = join(device)
    exchange.check_kinds("cards of ranks that have parts of a network", "parallel='data' trains on several kinds")
    return exchange


def _evaluation_workspace(of_training: Workspace, memory_share: float) -> Workspace:
    """A workspace to evaluate in by more rows at a time than a step takes, on the parameters of another one."""
    plan = of_training.plan
    alone = replace(plan, training=(), optimizer=None, partials=(), ranks=1)
    shared = {name: of_training.arrays.addresses[name] for name in ("parameters", "statistics")}
    with of_training.device:
        workspace = Workspace(
            alone.with_capacity(evaluation_rows(plan)), of_training.device, "it evaluates alone",
            memory_share=memory_share, shared=shared, trace=of_training.trace,
        )  # fmt: skip
        workspace.set_statistics(of_training.fitted)
        return workspace


class Sampler:
    """Histograms of what a step computes.

    A second program makes the step on the parameters of the first one, launch by launch, and ends with the gradient:
    it keeps what the fused kernels of a training step do not store.
    """

    def __init__(self, plan: Plan, device: Device, memory_share: float, shared: Mapping[str, int]) -> None:
        self._plan, self._device = plan.to_gradient(), device
        self._program = CudaProgram(
            self._plan, device, memory_share, launches_because="its arrays are read", shared=shared
        )

    def set_statistics(self, fitted: np.ndarray) -> None:
        """Take the statistics (C,) of the first program, whose arrays it shares."""
        with self._device:
            self._program.workspace.set_statistics(fitted)

    def close(self) -> None:
        """Free the second program."""
        self._program.close()

    def histograms(self, data: Dataset, seed: int, step: int, bins: int) -> dict[str, Histogram]:
        """Histograms of the layers' outputs for these rows, and of the gradient."""
        plan, rows, count = self._plan, len(data), self._program.state.count
        self._program.attach(data, Sampling(rows, rows, seed=seed, shuffle=False, first_step=step))
        ((_, weight),) = self._program.run(step, np.zeros(1))
        factor = 1.0 / weight if weight > 0.0 else 1.0
        with self._device:
            found = {name: count(y, 0, rows * plan.buffers[y].shape[-1], bins) for name, y in plan.outputs().items()}
            for p in plan.gradient:
                found[f"{p.name}.gradient"] = scaled(count("gradient", p.offset, p.size, bins), factor)
        return found
