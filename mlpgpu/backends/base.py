"""The interface between a plan and whatever runs it.

A backend compiles a plan to a program; a program holds the arrays and runs steps.  Both assume valid
input: checks stand in the public classes above them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..datasets import Dataset
from ..datasets.interchange import CardArray
from ..errors import ConfigurationError
from ..losses import Loss, TargetKind
from ..plan import Plan
from ..random import epoch_order

MEMORY_SHARE = 0.5
MOST_BINS = 4096  # of a histogram
MOST_ROWS = 2**31 - 1  # of a batch, as kernels count them
MOST_SHARDS = 1024  # of a batch
MOST_THREADS = 1024  # of the host

Source = Literal["parameters", "snapshot"] | int  # of flat arrays: of a program's parameters, or a slot by its number
Histogram = tuple[np.ndarray, np.ndarray]  # counts (bins,), int64, and edges (bins + 1,), float64


@dataclass(frozen=True)
class State:
    """What a program carries from step to step, as flat arrays with a leading replica axis (R).

    Attributes:
        parameters: (R, P), laid out as ``plan.parameters``.
        slots: (K, R, P), the optimizer's K arrays; K is 0 without an optimizer.  Of several ranks each has, and loads,
            those of the parameters that it moves, and 0 elsewhere.
        statistics: (R, C), laid out as ``plan.statistics``.
    """

    parameters: np.ndarray
    slots: np.ndarray
    statistics: np.ndarray


@dataclass(frozen=True)
class Sampling:
    """Which rows each step trains on.

    Steps count from ``first_step``, where epoch ``first_epoch`` begins.  An epoch visits ``rows``
    rows in batches of ``batch_size``, the last one smaller, or left out if ``drop_last``.

    Attributes:
        seed: of the shuffles and of dropout.
        shuffle: whether each epoch has an order of its own.
    """

    rows: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    first_step: int = 0
    first_epoch: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """At least 1: a set smaller than a batch is one batch, unless the last is dropped."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of ``step``, and its batch in that epoch."""
        epochs, batch = divmod(step - self.first_step, self.steps_per_epoch)
        return self.first_epoch + epochs, batch

    def order(self, epoch: int) -> np.ndarray:
        """The rows in the order in which ``epoch`` visits them, shape (rows,), int64."""
        return epoch_order(self.rows, seed=self.seed, epoch=epoch) if self.shuffle else np.arange(self.rows)

    def batch(self, batch: int) -> slice:
        """The part of an epoch's order that makes its batch number ``batch``."""
        start = batch * self.batch_size
        return slice(start, min(start + self.batch_size, self.rows))


def target_array(dataset: Dataset, plan: Plan, dtype: np.dtype) -> np.ndarray:
    """The targets as the plan's loss takes them: (rows,) class numbers, or (rows, n_out) of ``dtype``."""
    return target_values(dataset, plan.loss, plan.target_kind, plan.n_out, dtype)


def target_values(
    dataset: Dataset, loss: Loss | None, kind: TargetKind | None, n_out: int, dtype: np.dtype
) -> np.ndarray:
    """The targets as a loss takes them: (rows,) class numbers, or (rows, n_out) of ``dtype``.

    Raises:
        ShapeError, DtypeError, DataError: the data set's targets are not of that form.
    """
    if kind == "index":
        return dataset.labels(n_out)
    is_binary = loss is not None and loss.output == "sigmoid" and n_out == 1
    if is_binary and dataset.classes is not None:
        return dataset.labels(2)[:, np.newaxis].astype(dtype)
    return dataset.targets(n_out, dtype)


def bin_edges(low: float, high: float, bins: int) -> np.ndarray:
    """Edges of equal bins from ``low`` to ``high``, (bins + 1,).

    Where the two lie too close to be divided, bins go from ½ below to ½ above; where ``high`` is below
    ``low``, which stands for no values, from 0 to 1.
    """
    if low > high:
        low, high = 0.0, 1.0
    edges = np.linspace(low, high, bins + 1)
    return edges if (np.diff(edges) > 0.0).all() else np.linspace(low - 0.5, high + 0.5, bins + 1)


def count_values(values: np.ndarray, bins: int) -> Histogram:
    """The finite values, counted in equal bins."""
    finite = values[np.isfinite(values)]
    edges = bin_edges(float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf)), bins)
    return np.histogram(finite, edges)


def scaled(histogram: Histogram, factor: float) -> Histogram:
    """The histogram of the values times a factor above 0."""
    counts, edges = histogram
    return counts, edges * factor


class StepLog:
    """Which steps of a run are finished, known whatever ends the run.

    A program tells the log before it begins to change its state and when the state is that of a finished step again.
    Each of these changes the log by one assignment, so an exception between any two instructions leaves the truth in
    it, or less: a step that was finished and not yet said to be counts as unfinished.

    Attributes:
        sums: (steps, 2), float64, those of finished steps: as :meth:`Program.run` gives them.
    """

    def __init__(self, steps: int) -> None:
        self.sums = np.empty((steps, 2))
        # How many are finished; whether the state is being changed; what waits for further ones and gives their sums.
        self._stands: tuple[int, bool, tuple[Callable[[], np.ndarray], ...]] = 0, False, ()

    @property
    def finished(self) -> int:
        """How many steps are finished."""
        return self._stands[0]

    @property
    def under_way(self) -> int:
        """How many calls of :meth:`put` have steps that are not known to be finished."""
        return len(self._stands[2])

    @property
    def is_whole(self) -> bool:
        """Whether the state is that of the finished steps; otherwise it lies between two steps."""
        _, is_changing, waits = self._stands
        return not is_changing and not waits

    def begin(self) -> None:
        """The state is about to change."""
        finished, _, waits = self._stands
        self._stands = finished, True, waits

    def end(self, finished: int) -> None:
        """The state is that of so many finished steps, whose sums are there."""
        self._stands = finished, False, ()

    def put(self, wait: Callable[[], np.ndarray]) -> None:
        """Further steps are under way elsewhere, behind those put before, and nothing more has to be done for them.

        ``wait()`` returns their sums once they are finished, however often it is called.
        """
        finished, _, waits = self._stands
        self._stands = finished, False, (*waits, wait)

    def finish_first(self) -> None:
        """Wait for the steps that were put first of those under way.

        Raises:
            BackendError: they cannot be finished any more.
        """
        finished, is_changing, (wait, *others) = self._stands
        sums = wait()
        self.sums[finished : finished + len(sums)] = sums
        self._stands = finished + len(sums), is_changing, tuple(others)

    def finish(self) -> None:
        """Wait for all steps that are under way.

        Raises:
            BackendError: they cannot be finished any more.
        """
        while self.under_way:
            self.finish_first()


def square_sum(values: np.ndarray, parts: Sequence[slice]) -> float:
    """The sum of the squares of these parts of ``values`` (P,)."""
    return float(sum(np.dot(values[part], values[part]) for part in parts))


class Program(ABC):
    """A compiled plan with its arrays.

    Attributes:
        is_readable_while_running: whether other threads may call ``read`` and ``is_finite`` while :meth:`run` is under
            way, and get the state of one finished step; otherwise they are kept waiting until it ends.
        together: where ranks have parts of the network each, what a method is called under that all of them have to
            call: given its name and arguments, it sees to it that they do.
    """

    is_readable_while_running = False
    together: Callable[..., AbstractContextManager[None]] = staticmethod(lambda *call: nullcontext())

    @abstractmethod
    def load(self, state: State, *, snapshot: bool = False) -> None:
        """Copy ``state`` in, to compute on; with ``snapshot``, its parameters to the snapshot instead."""

    @abstractmethod
    def draw(self, seed: int, statistics: np.ndarray) -> None:
        """Begin anew: the initial parameters of ``seed``, as float32 has them; slots of 0; ``statistics`` (R, C)."""

    @abstractmethod
    def read(self, *, snapshot: bool = False) -> State:
        """Copy the state out; with ``snapshot``, the parameters are the snapshot's."""

    def read_parameters(self) -> np.ndarray:
        """The parameters alone, (P,)."""
        return self.read().parameters[0]

    def prefetch(self) -> None:  # noqa: B027 (a program whose state is at hand has nothing to do)
        """Begin to copy the state out; a :meth:`read` that follows before anything changes it waits less."""

    def own_parts(self, name: str) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """What this rank has of a parameter: where each part lies in the whole array, and a copy of it."""
        raise NotImplementedError("a program that has all of a network is read as a whole")

    def pieces(self, source: Source, places: Sequence[int]) -> Iterator[np.ndarray]:
        """Arrays of a network in parts, on rank 0 alone, of the parameters, the snapshot, or a slot by its number.

        ``places`` are those of the arrays in the whole plan, one after another; each comes in pieces along its first
        axis, which no longer hold once the next is asked for.  The other ranks call :meth:`send_pieces` meanwhile.
        """
        raise NotImplementedError("a program that has all of a network is read as a whole")

    def load_pieces(self, source: Source, rows: Callable[[int, int, int], np.ndarray]) -> None:
        """Load this rank's parts of one of them, by a function that reads rows of an array of the whole plan.

        Arguments:
            rows: given the array's place, the first of its rows and the end of those that it is to return.
        """
        raise NotImplementedError("a program that has all of a network is loaded as a whole")

    def load_statistics(self, statistics: np.ndarray) -> None:
        """Load ``statistics`` (C,) beside such pieces."""
        raise NotImplementedError("a program that has all of a network is loaded as a whole")

    def send_pieces(self) -> Any:
        """Send rank 0 this one's parts of what it asks for, until it ends that; returns what it then says."""
        raise NotImplementedError("a program that has all of a network is read as a whole")

    def end_pieces(self, told: Any) -> None:
        """Have :meth:`send_pieces` of the others return ``told``, on rank 0."""
        raise NotImplementedError("a program that has all of a network is read as a whole")

    @abstractmethod
    def snapshot(self) -> None:
        """Keep the parameters as they are now, in place of what was kept before."""

    @abstractmethod
    def restore(self) -> None:
        """Put the parameters that were kept back."""

    def square_sum(self, parts: Sequence[slice]) -> float:
        """The sum of the squares of these parts of the parameters, (P,)."""
        return square_sum(self.read().parameters[0], parts)

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether every parameter is a finite number."""

    @abstractmethod
    def histograms(self, bins: int) -> dict[str, Histogram]:
        """Each parameter's finite values, counted as NumPy does in equal bins from the least to the greatest."""

    @abstractmethod
    def sample(self, rows: int, step: int, bins: int) -> dict[str, Histogram]:
        """Histograms of one step on the first ``rows`` rows of the data set attached; nothing changes.

        They are of the outputs of each layer with parameters, ``"0.activation"``, and of the gradient, without
        penalties and before its norm is clipped, ``"0.weight.gradient"``.  ``step`` decides what is dropped out.
        """

    @abstractmethod
    def attach(self, dataset: Dataset, sampling: Sampling) -> None:
        """Name the data set that steps train on, and the rows of each step."""

    @abstractmethod
    def run(self, first_step: int, rates: np.ndarray, log: StepLog | None = None) -> np.ndarray:
        """Train for ``len(rates)`` steps from ``first_step``, at ``rates`` (steps,), float64.

        ``log``, of so many steps, knows afterwards which of them are finished, also if an exception ends the run.

        Returns:
            (steps, 2), float64: the loss summed over each step's rows with their weights, and the
            summed weight.  Their quotient is the step's loss before its update.
        """

    @abstractmethod
    def evaluate(self, dataset: Dataset, names: Sequence[str], *, shared: bool = False) -> dict[str, np.ndarray]:
        """Sums over a data set: ``"loss"``, as :meth:`run` gives it, (2,), and rows of ``metrics.SUMS`` by name.

        With ``shared``, the ranks of the plan all call this; each computes some of the rows, and all get the same sums.
        """

    @abstractmethod
    def predict(self, dataset: Dataset, *, logits: bool = False) -> np.ndarray:
        """Predictions, or logits, of a data set's inputs, (rows, n_out) in the plan's precision."""

    @abstractmethod
    def close(self) -> None:
        """Wait for work that is under way, end threads and give memory back; nothing else is called afterwards."""


class Inference(ABC):
    """A plan without a loss, compiled once for many predictions; any thread may call any method at any time.

    A call computes with the parameters that were there when it began, whatever is loaded meanwhile.
    """

    @abstractmethod
    def load(self, state: State) -> None:
        """Take the parameters and statistics of ``state``, whose arrays nobody changes, for calls that begin later."""

    def load_from(self, program: Program) -> bool:
        """Take those that ``program``, which trains the same network, has after its last finished step.

        Returns:
            whether that was possible without a way over the caller's memory; if not, nothing was done.
        """
        return False

    @abstractmethod
    def draw(self, seed: int, statistics: np.ndarray) -> None:
        """Take the initial parameters of ``seed`` as :meth:`Program.draw` does, with ``statistics`` (R, C)."""

    @abstractmethod
    def run(
        self,
        x: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
        scale: float | None = None,
        logits: bool = False,
    ) -> bool:
        """Write predictions, or logits, for rows of ``x`` to ``out``, piece by piece.

        Arguments:
            x: (any, n_in), booleans, integers or floats of up to 64 bits, in any byte order and with any strides,
                perhaps a memory map; never written to.
            out: (rows, n_out) in the plan's precision, C-contiguous, apart from ``x``.
            rows: (rows,) int64, which rows of ``x`` in which order; all of them if None.  At least one.
            scale: what bytes are multiplied by, where ``x`` is uint8.

        Returns:
            whether each input is finite in the plan's precision; if not, ``out`` is of no use.
        """

    def run_on_card(
        self,
        x: CardArray,
        shape: tuple[int, ...],
        *,
        rows: np.ndarray | None = None,
        scale: float | None = None,
        logits: bool = False,
    ) -> Any:
        """Predictions, or logits, for rows of finite inputs that lie on this backend's card.

        Returns:
            an array there of this shape, (rows, n_out) or (rows,), complete, which speaks DLPack.
        """
        raise NotImplementedError("a backend without a card is given no array on one")

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls under way and free everything; closing twice does nothing.  It is also done at the end."""


class Backend(ABC):
    """Something that can run plans.

    Attributes:
        prediction_rows: the capacity of a plan for :meth:`infer` where nobody bounds it.
        card: the number of the card that it computes on, or None.
    """

    name: str
    prediction_rows = 1024
    card: int | None = None

    def check_place(self, dataset: Dataset) -> None:
        """Raise ConfigurationError if the inputs lie on a card, and the backend does not compute there."""
        if dataset.card is None or dataset.card == self.card:
            return
        got = f"inputs on GPU {dataset.card}"
        if self.card is None:
            hint = "Dataset(data.x, data.y, data.weight) is a copy on the host"
            raise ConfigurationError("data for the cpu backend", expected="inputs on the host", got=got, hint=hint)
        hint = f"backend='cuda:{dataset.card}' computes there; Dataset(data.x, data.y, data.weight) is on the host"
        expected = f"inputs on GPU {self.card} or on the host"
        raise ConfigurationError(f"data for the {self.name} backend", expected=expected, got=got, hint=hint)

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raise ConfigurationError if the backend cannot run ``plan``; nothing is allocated."""

    @abstractmethod
    def compile(self, plan: Plan, *, threads: int | None = None, memory_share: float = MEMORY_SHARE) -> Program:
        """A program for ``plan``, its state all zero.

        ``threads`` overrides the number of host threads that the backend's rule gives; ``memory_share`` is
        how much of a card's memory a data set may take, and a larger set is streamed.

        Raises:
            ConfigurationError: the backend cannot run such a plan.
        """

    @abstractmethod
    def infer(self, plan: Plan) -> Inference:
        """Predictions by ``plan``, which has no loss; :meth:`Inference.load` comes before the first.

        The plan's capacity is the most rows that are computed at a time.

        Raises:
            ConfigurationError: the backend cannot run such a plan.
        """

    def step_seconds(self, plan: Plan, *, threads: int | None = None) -> float | None:
        """Seconds of a step by counts, of a plan whose ranks share this host; None if nobody counts them.

        They follow from the plan, ``threads``, the number of cores and a card's architecture, never from a clock.
        """
        return None

    @abstractmethod
    def fingerprint(self, plan: Plan, *, threads: int | None = None) -> dict[str, str | int]:
        """What the bits of a run depend on beside the plan: libraries, versions, threads."""
