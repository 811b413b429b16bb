"""The program that trains a network, what of a run lies in it, and how far it has come."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import storage
from ..backends import Backend, Histogram, Program, Sampling, Source, StepLog
from ..errors import BackendError, ConfigurationError, DivergenceError, RankError, TornStateError
from ..layers import Standardize
from ..losses import TargetKind, problem_of
from ..metrics import sums_of, values_of
from ..network import Network
from ..network.stored import StoredParameters
from ..plan import Parts, Plan
from ..schedules import Clock, Plateau, Schedule, as_schedule
from .interrupt import uninterrupted
from .progress import Pending, Progress
from .task import MetricFunction, Prepared, call_metric
from .team import Team, sendable


@dataclass(frozen=True, eq=False)
class InFile:
    """A run that lies in a file, of which a rank loads its parts.

    Attributes:
        parameters: what the network's parameters were when it was read.
        flat: where the flat arrays are, by what they are: numbers of slots, ``"snapshot"``.
    """

    file: storage.OpenFile
    parameters: StoredParameters
    flat: Mapping[Source, str]


@dataclass(frozen=True, eq=False)
class Aside:
    """What belongs to a run while no program has it: the optimizer's slots (K, 1, P), and the kept parameters (P,).

    Or both lie in a file.
    """

    slots: np.ndarray | None
    kept: np.ndarray | None
    in_file: InFile | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """Steps that a program was asked for.

    Attributes:
        log: what it says of them.
        first_step, rates: the number of the first, and the rate of each.
        due: the keys of the callbacks to be told of the end of a step.
        ends: after how many of the steps an epoch ends within the run, in order; the run's own end is none of them.
        close: closes the books of an epoch that ended at this time, in the progress at its end.
        started: when the run began, as ``time.perf_counter`` has it.
    """

    log: StepLog
    first_step: int
    rates: np.ndarray
    due: Callable[[int], tuple[str, ...]]
    ends: Sequence[int]
    close: Callable[[Progress, float], Progress]
    started: float


class Engine:
    """Trains and evaluates a network through one program, which owns the network's parameters meanwhile.

    Whatever uses the program comes through :meth:`ready`.  It is the only place that asks whether somebody
    else took or set the parameters since, and then loads them.  The optimizer's slots and the kept
    parameters belong to the run: they are taken along where a program is loaded anew or replaced.
    An exception at any moment, such as Ctrl-C, leaves them with the program or aside, and never half with either.

    Arguments:
        team: the ranks that train the network, of which each has an engine; none of its methods but those that say so
            talk to the others.
        lower: gives the plan for a ``target_kind``.
        options: further arguments of ``backend.compile``.

    Attributes:
        program: compiled when it is first needed.
        plan: what it runs.
        schedule: of the rates.
        progress: counts what was done.
        saved: where the run was saved last, and as of how many steps; None before that.
    """

    def __init__(
        self, network: Network, backend: Backend, team: Team, plan: Plan, lower: Callable[..., Plan], **options: Any
    ) -> None:
        assert plan.optimizer is not None
        self.plan = plan
        self.program: Program | None = None
        self.schedule = as_schedule(plan.optimizer.rate)
        self.progress = Progress()
        self.saved: tuple[str, int] | None = None
        self._network, self._backend, self._lower, self._options = network, backend, lower, options
        self._team = team
        # Where ranks have parts of the network in a fit alone: all of them, which each rank has between fits, and
        # the kind of targets and the program of whichever is not the case at the moment.
        self._all_parts: Parts | None = None
        self._has_all = False
        self._resting: tuple[TargetKind, Program] | None = None
        self._attached: tuple[Prepared, Sampling] | None = None  # what was trained on last
        self._is_dealt = False  # whether each rank knows its own slots alone, since steps were taken
        self._gathered: np.ndarray | None = None  # the slots of all ranks (K, 1, P), until the next step
        self._handed: int | None = None  # the version of the parameters that rank 0 handed out last
        self._is_trained = False  # whether what the program was loaded with went through a step
        self._aside: Aside | None = None  # while the program has it not
        self._keeps = False  # whether parameters were kept
        self._run: Run | None = None  # the last one
        self._runner: int | None = None  # the thread in which it is under way
        # For the other kind of targets: the kind, a program that only evaluates, and which values it has.
        self._other: tuple[TargetKind, Program] | None = None
        self._loaded: tuple[int | None, np.ndarray | None] = None, None

    # --- the program ---

    def ready(self, kind: TargetKind | None = None) -> Program:
        """The program with the network's current parameters; for targets of this kind, or as it is if None."""
        if self.program is None or kind not in (None, self.plan.target_kind):
            plan = self.plan if kind is None else self._lowered(kind)
            program = self._compile(plan)
            self._set_aside()
            self._load(program, plan)
            self.plan, self.program = plan, program
        elif not self._network.values.is_owned_by(self.program):
            self._set_aside()
            self._load(self.program, self.plan)
        self._aside = None
        return self.program

    def _lowered(self, kind: TargetKind | None) -> Plan:
        """The plan for targets of this kind, of the parts of the network that this rank has."""
        return self._lower(target_kind=kind, parts=self._all_parts) if self._has_all else self._lower(target_kind=kind)

    @property
    def plan_of_fit(self) -> Plan:
        """What the steps of a fit run."""
        return self._lower(target_kind=self.plan.target_kind) if self._has_all else self.plan

    def _compile(self, plan: Plan) -> Program:
        program = self._backend.compile(plan, **self._options)
        program.together = self._team.together
        return program

    @property
    def has_parts(self) -> bool:
        """Whether each rank has parts of the network, so that all of them are asked together for what is whole."""
        return self.plan.tensor is not None and not self._has_all

    @property
    def is_by_one(self) -> bool:
        """Whether rank 0 computes the steps for all ranks, which get the parameters after each run of steps."""
        return self._team.ranks > 1 and self.plan.choice is not None and self.plan.choice.way == "one"

    def _set_aside(self) -> None:
        """Take what belongs to the run out of the program, and the parameters if it owns them."""
        if self.program is None or self._aside is not None:  # it is there since an exception ended a call
            return
        state = self.program.read()
        kept = self.program.read(snapshot=True).parameters[0] if self._keeps else None
        if self._network.values.is_owned_by(self.program):
            self._network.values.replace(state.parameters[0])
        self._aside = Aside(state.slots, kept)

    def _load(self, program: Program, plan: Plan) -> None:
        """Give the program the network's parameters, which it owns from then on, and what was set aside."""
        self._is_trained = False
        if self._aside is None:
            self._network.start(program, plan.optimizer)
        elif self._aside.in_file is not None:
            self._load_from_file(program, plan, self._aside.in_file)
        else:
            state = self._network.state(plan.optimizer)
            if self._aside.slots is not None:
                state = dataclasses.replace(state, slots=self._aside.slots)
            program.load(state)
            if self._aside.kept is not None:
                program.load(dataclasses.replace(state, parameters=self._aside.kept[np.newaxis]), snapshot=True)
        self._network.values.give_to(program, plan.dtype)

    def _load_from_file(self, program: Program, plan: Plan, run: InFile) -> None:
        """Give the program its parts of what lies in a file, and the network's parameters, wherever they are."""
        assert plan.tensor is not None
        arrays = plan.tensor.whole.parameters
        if self._network.values.is_owned_by(run.parameters):
            program.load_pieces("parameters", run.parameters.rows)
            program.load_statistics(self._network.flat_statistics())
        else:  # they were set since
            program.load(self._network.state(plan.optimizer))
        for source, path in run.flat.items():

            def rows(place: int, first: int, end: int, path: str = path) -> np.ndarray:
                array = arrays[place]
                row = array.size // array.shape[0]
                read = run.file.read(path, array.offset + first * row, (end - first) * row)
                return read.reshape(-1, *array.shape[1:])

            program.load_pieces(source, rows)

    # --- training ---

    def set_schedule(self, schedule: Schedule, lower: Callable[..., Plan]) -> None:
        """Train at other rates from here on; what a schedule remembered is forgotten."""
        self._lower = lower
        self.plan = self._lowered(self.plan.target_kind)
        self.schedule, self.progress = schedule, self.progress.changed(plateau=Plateau())

    def set_lowering(self, lower: Callable[..., Plan], all_parts: Parts | None = None) -> None:
        """Train by other plans, before anything was computed.

        With ``all_parts`` ranks have parts of the network in a fit alone; see :meth:`sharing`.
        """
        assert self.program is None
        self._lower, self._all_parts, self._has_all = lower, all_parts, all_parts is not None
        self.plan = self._lowered(self.plan.target_kind)

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """While all ranks train together; they call this together.

        Where they have parts of the network in a fit alone, each gives up the others' parts, and at the end has all of
        the run again, so that none has to ask the others between fits.  Not so if they cannot be reached any more.
        """
        if not self._has_all:
            yield
            return
        self._change_parts()
        try:
            yield
        except RankError:
            raise
        except BaseException:
            with contextlib.suppress(RankError):
                self._change_parts()
            raise
        self._change_parts()

    def _change_parts(self) -> None:
        """Go on with this rank's parts of the network in place of all of them, or the other way."""
        with uninterrupted():
            self._set_aside()
            if self._other is not None:
                self._other[1].close()
            kind, resting = self.plan.target_kind, self._resting
            assert kind is not None
            self._other, self._resting = None, None if self.program is None else (kind, self.program)
            self._has_all = not self._has_all
            self.plan, self.program = self._lowered(kind), None
            if resting is not None and resting[0] == kind:
                self.program = resting[1]
            elif resting is not None:
                resting[1].close()

    def attach(self, data: Prepared, sampling: Sampling) -> None:
        """Make ready to train on a data set."""
        self.ready(data.kind).attach(data.weighted, sampling)
        self._attached = data, sampling

    def take_steps(
        self,
        clock: Clock,
        due: Callable[[int], tuple[str, ...]] = lambda steps: (),
        ends: Sequence[int] = (),
        close: Callable[[Progress, float], Progress] = lambda progress, ended: progress,
    ) -> np.ndarray:
        """Train for the steps of ``clock``; returns (steps, 2), their losses and weights, summed over rows.

        All ranks do so together.

        The callbacks that are ``due`` after the last finished step are pending from then on.  Epochs that end after
        ``ends`` of the steps are closed by ``close``, as :class:`Run` says, until a loss is not finite.

        Raises:
            DivergenceError: a loss is not finite.
        """
        self.check_whole()
        rates, first_step = self.schedule.rates(clock), self.progress.steps
        deals = self._team.ranks > 1 and self.plan.tensor is None and not self.plan.moves_all
        self._is_dealt, self._gathered = deals, None
        follows = self.is_by_one and not self._team.is_leader
        program, log = None if follows else self.ready(), StepLog(len(rates))
        self._run = Run(log, first_step, rates, due, ends, close, time.perf_counter())
        self._runner = threading.get_ident()
        try:
            if program is None:
                self._take_handed(log)
            else:
                with self._network.values.changing():
                    program.run(first_step, rates, log)
                if self.is_by_one:
                    self._hand_out(log)
        finally:
            self.count_steps()
            self._runner = None
        self._is_trained = True
        is_finite = np.isfinite(log.sums[:, 0])
        if not is_finite.all():
            raise self._diverged("loss", first_step + int(np.argmin(is_finite)))
        return log.sums

    def _hand_out(self, log: StepLog) -> None:
        """Send all other ranks what a run of steps left, as they wait for it in :meth:`_take_handed`."""
        communicator = self._team.communicator
        assert communicator is not None
        handed = [self._network.flat_parameters(), log.sums]
        communicator.exchange_several([handed] * self._team.ranks, [[]] * self._team.ranks)

    def _take_handed(self, log: StepLog) -> None:
        """Wait for the run of steps that rank 0 computes, and take what it left."""
        communicator, values = self._team.communicator, self._network.values
        assert communicator is not None
        parameters = np.empty(self.plan.parameter_count, self.plan.dtype)
        nothing: list[list[np.ndarray]] = [[] for _ in range(self._team.ranks - 1)]
        communicator.exchange_several([[], *nothing], [[parameters, log.sums], *nothing])
        log.begin()
        values.replace(parameters)
        log.end(len(log.sums))
        self._handed = values.version

    def count_steps(self) -> None:
        """Count what is finished of the last run, whatever ended it; nothing is counted twice."""
        run, progress = self._run, self.progress
        if run is None or self._runner not in (None, threading.get_ident()):
            return
        with contextlib.suppress(BackendError, RankError):  # then the state lies between two steps
            run.log.finish()
        counted, finished = progress.steps - run.first_step, run.log.finished
        if not 0 <= counted < finished:
            return
        a_step = (time.perf_counter() - run.started) / finished
        for end in run.ends:
            if counted < end <= finished and np.isfinite(run.log.sums[:end, 0]).all():
                progress = run.close(_after(progress, run, counted, end), run.started + a_step * end)
                counted = end
        steps = run.first_step + finished
        pending = Pending("step_end", keys) if (keys := run.due(steps)) else None
        self.progress = _after(progress, run, counted, finished).changed(pending=pending)

    def check_whole(self) -> None:
        """Count what is finished, and refuse to go on from between two steps.

        Raises:
            TornStateError: an exception ended a step in its middle.
        """
        self.count_steps()
        if self._run is not None and not self._run.log.is_whole and self._runner in (None, threading.get_ident()):
            what = f"trainer after {self.progress.steps} finished steps"
            got = "parameters and slots in the middle of the next step, which an exception ended"
            hint, broken = self._last_saved(), None
            try:
                self._run.log.finish()
            except BackendError as error:  # of a card that faulted: this process has no other
                hint, broken = f"GPU work needs a new process; there, {hint}", error
            raise TornStateError(what, expected="the state of a finished step", got=got, hint=hint) from broken

    def _last_saved(self) -> str:
        if self.saved is None:
            return "this run was never saved: a new Trainer begins anew"
        return f"Trainer.resume({self.saved[0]!r}) goes on from step {self.saved[1]}"

    def evaluate(
        self,
        data: Prepared,
        metrics: Sequence[str],
        functions: Mapping[str, MetricFunction],
        *,
        together: bool = False,
    ) -> dict[str, Any]:
        """The mean loss over a data set, ``"loss"``, and metrics by name, of which ``functions`` has one's own.

        Every rank evaluates by itself, or, with ``together``, all of them do, each some of the rows, or rank 0 for all
        where it trains for all.

        Raises:
            DivergenceError: the loss is not finite, because a parameter is not.
        """
        if together and self.is_by_one:
            return self._team.lead(lambda: self.evaluate(data, metrics, functions), None)
        is_unused = self.program is None and self._resting is None
        if is_unused or data.kind == self.plan.target_kind:
            program = self.ready(data.kind)
        else:  # a fit may be under way on the other kind, and goes on with its program
            program = self._evaluator(data.kind)
        assert self.plan.loss is not None
        problem = problem_of(self.plan.loss.output, self.plan.n_out)
        named = [name for name in metrics if name not in functions]
        sums = program.evaluate(data.dataset, sums_of(named, problem), shared=together)
        value, weight = sums.pop("loss")
        if not np.isfinite(value):
            self.check_finite()
        values: dict[str, Any] = {"loss": float(value / weight), **values_of(named, problem, sums)}

        def predicted() -> np.ndarray:
            return self._network.shaped(program.predict(data.dataset), data.dataset)

        whole = predicted() if functions and self.has_parts else None  # which all ranks make together

        def own_values() -> dict[str, Any]:
            prediction = predicted() if whole is None else whole
            return {name: call_metric(name, function, data.dataset, prediction) for name, function in functions.items()}

        if functions:
            values |= self._team.lead(own_values, self) if together else own_values()
        return {name: values[name] for name in ("loss", *metrics)}

    def _read_along(self, name: str, *arguments: Any) -> None:
        """Have rank 0 read what this rank has a part of, by a method of :class:`Program`; it is a follower's method."""
        if name == "read_parameters":
            self._network.values.read()  # which then has them, as rank 0's has
        else:
            getattr(self.ready(), name)(*arguments)

    def _evaluator(self, kind: TargetKind) -> Program:
        """A program that only evaluates, on targets of this kind, with the network's current parameters."""
        if self._other is None or self._other[0] != kind:
            plan = self._lowered(kind)
            self._other = kind, self._compile(dataclasses.replace(plan, training=(), optimizer=None))
            self._loaded = None, None
        version, statistics = self._network.values.version, self._network.flat_statistics()
        if version is None or version != self._loaded[0] or statistics is not self._loaded[1]:
            self._network.start(self._other[1])
            self._loaded = version, statistics
        return self._other[1]

    def check_finite(self) -> None:
        """Raise DivergenceError, as of the last step, if a parameter or a loss of this epoch is not finite."""
        fit = self.progress.fit
        if fit is not None and not math.isfinite(fit.loss):
            raise self._diverged("loss", self.progress.steps - 1)
        if not self._network.values.is_finite():
            raise self._diverged("a parameter", self.progress.steps - 1)

    def _diverged(self, what: str, step: int) -> DivergenceError:
        """The error for ``what`` not being finite after ``step``, with what is not done yet as the way out."""
        optimizer, layers = self.plan.optimizer, self._network.layers
        ways = ["a lower rate"]
        if optimizer is not None:
            kind = type(optimizer)
            rate, usual = optimizer.rate, kind().rate
            if not isinstance(rate, Schedule) and not isinstance(usual, Schedule) and rate > usual:
                ways = [f"a lower rate ({kind.__name__} has {usual:g} by default)"]
        if optimizer is not None and optimizer.clip_norm is None:
            ways.append("clip_norm=")
        if not isinstance(layers[0], Standardize):
            ways.append("inputs standardized by mlpgpu.Standardize as the first layer")
        if self._network.output == "identity" and not isinstance(layers[-1], Standardize):
            ways.append("targets standardized by mlpgpu.Standardize as the last layer")
        hint = f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]
        hint += " may help; the network's parameters are of no use any more"
        if self.saved is not None:
            hint += f"; {self.saved[0]} holds the run as of step {self.saved[1]}"
        error = DivergenceError(f"{what} at step {step}", expected="a finite value", got="NaN or infinity", hint=hint)
        error.step = step
        return error

    def histograms(self, bins: int, of: Sequence[str]) -> dict[str, Histogram]:
        """Those of :meth:`~mlpgpu.backends.Program.histograms` and ``sample`` that ``of`` asks for.

        Raises:
            ConfigurationError: those of a step are asked for, and there was none.
        """
        of_steps = sorted({"activations", "gradients"} & set(of))
        if of_steps and self._attached is None:
            what, expected = f"histograms of {' and '.join(of_steps)}", "a fit or a step before, on whose data they are"
            raise ConfigurationError(what, expected=expected, got="none by this trainer")
        program = self.ready()
        found = program.histograms(bins) if "parameters" in of else {}
        if of_steps and self._attached is not None:
            if self._has_all:  # which was not what took the steps of a fit
                program.attach(self._attached[0].weighted, self._attached[1])
            kinds = {"activation": "activations", "gradient": "gradients"}
            sampled = program.sample(self.plan.capacity, self.progress.steps, bins)
            found |= {name: counted for name, counted in sampled.items() if kinds[name.rpartition(".")[2]] in of}
        return found

    # --- what of a run lies in the program ---

    def prefetch(self) -> None:
        """Begin to copy the state out, for a save that is to come before anything changes it."""
        self.ready().prefetch()

    def keep(self) -> None:
        """Keep the parameters as they are now, in place of what was kept before."""
        self.ready().snapshot()
        self._keeps = True

    def restore_kept(self) -> None:
        """Put the parameters that were kept back."""
        if self.program is not None and self._keeps:
            program = self.ready()
            with self._network.values.changing():
                program.restore()

    def slots_and_kept(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The optimizer's slots (K, 1, P), None before the first step; the kept parameters (P,), None without any.

        With several ranks all of them ask together, unless nothing was trained since :meth:`gather`.
        """
        self.check_whole()
        if self._aside is not None and self._aside.in_file is not None:
            self.ready()
        if self._aside is not None:
            return self._slots(self._aside.slots), self._aside.kept
        if self.program is None:
            return None, None
        kept = self.program.read(snapshot=True).parameters[0] if self._keeps else None
        return self._slots(None if self._gathered is not None else self.program.read().slots), kept

    def _slots(self, own: np.ndarray | None) -> np.ndarray | None:
        """All ranks' slots, of which this one has its ``own``."""
        if self._gathered is None and own is not None and self._is_dealt:
            communicator, self._gathered = self._team.communicator, own.copy()
            assert communicator is not None
            parts = [part.parameters for part in self.plan.slices]
            if self.is_by_one:  # whose slots are all that there are
                parts += [slice(0, 0)] * (self._team.ranks - 1)
            for slot in self._gathered:
                communicator.all_gather(slot[0], parts)
        return own if self._gathered is None else self._gathered

    def gather(self) -> None:
        """Have each rank know the slots of all, so that whichever asks next for them needs no other; all call it.

        Where ranks have parts of the network, none may have room for all of it, and the slots stay where they are.
        """
        if self._team.ranks > 1 and not self.has_parts:
            self.slots_and_kept()

    @property
    def keeps(self) -> bool:
        """Whether parameters were kept."""
        return self._keeps

    @contextlib.contextmanager
    def gathering(self) -> Iterator[Callable[..., storage.Pieces] | None]:
        """While rank 0 gets arrays of a network in parts, which it gathers piece by piece; all ranks call this.

        Gives rank 0 a function: of what, ``"parameters"``, ``"snapshot"`` or the number of a slot, and of an array's
        place, or of all of them as one flat array.  The other ranks get None, and raise what rank 0 raises.
        """
        program = self.ready()
        assert self.plan.tensor is not None
        arrays, dtype = self.plan.tensor.whole.parameters, self.plan.dtype
        if not self._team.is_leader:
            error = program.send_pieces()
            if error is not None:
                raise error
            yield None
            return

        def gathered(source: Source, place: int | None = None) -> storage.Pieces:
            if place is not None:
                return storage.Pieces(arrays[place].shape, dtype, program.pieces(source, [place]))
            flat = (piece.reshape(-1) for piece in program.pieces(source, range(len(arrays))))
            return storage.Pieces((arrays[-1].end,), dtype, flat)

        try:
            yield gathered
        except BaseException as error:
            program.end_pieces(sendable(error))
            raise
        program.end_pieces(None)

    @property
    def has_values(self) -> bool:
        """Whether nobody took or set the network's parameters since the program has them."""
        return self.program is not None and self._network.values.is_owned_by(self.program)

    @property
    def file_crc(self) -> int | None:
        """What tells the file that all of the run still lies in from others; None if no such file has all of it."""
        run = None if self._aside is None else self._aside.in_file
        return run.file.crc if run is not None and self._network.values.is_owned_by(run.parameters) else None

    @property
    def has_trained_values(self) -> bool:
        """Whether the network's parameters are what steps made of them, and nobody set them since."""
        is_handed = self._handed is not None and self._handed == self._network.values.version
        return is_handed or (self._is_trained and self.has_values)

    def close(self) -> None:
        """Give the parameters back to the network, and free the programs with all that they hold.

        Raises:
            BackendError: a card does not give the parameters back; the programs are freed all the same.
        """
        program, other, resting = self.program, self._other, self._resting
        try:
            if program is not None and self._network.values.is_owned_by(program):
                self._network.values.take_back()
        finally:
            self.program = self._other = self._aside = self._gathered = self._resting = self._attached = None
            if program is not None:
                program.close()
            for kept in (other, resting):
                if kept is not None:
                    kept[1].close()

    def resume(
        self,
        kind: TargetKind,
        progress: Progress,
        slots: np.ndarray | None,
        kept: np.ndarray | None,
        in_file: InFile | None = None,
    ) -> None:
        """Go on from where another engine stood, on targets of this kind."""
        self.plan, self.progress = self._lowered(kind), progress
        self._aside = Aside(slots, kept, in_file)
        self._keeps = kept is not None or (in_file is not None and "snapshot" in in_file.flat)
        self._gathered = None if self._team.ranks == 1 else slots


def _after(progress: Progress, run: Run, counted: int, finished: int) -> Progress:
    """The progress once so many steps of a run are finished, of which it counts the first ones already."""
    fit = progress.fit
    if fit is not None and counted < finished:
        loss, weight = fit.loss, fit.weight
        # Added one by one, so that the sum does not depend on how many steps ran at a time.
        for of_loss, of_weight in run.log.sums[counted:finished].tolist():
            loss += of_loss
            weight += of_weight
        fit = fit.changed(loss=loss, weight=weight, rate=float(run.rates[finished - 1]))
    return progress.changed(steps=run.first_step + finished, fit=fit)
