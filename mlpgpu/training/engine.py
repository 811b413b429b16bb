"""The program that trains a network, what of a run lies in it, and how far it has come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backends import Backend, Histogram, Program, Sampling
from ..errors import DivergenceError
from ..layers import Standardize
from ..losses import TargetKind, problem_of
from ..metrics import sums_of, values_of
from ..network import Network
from ..plan import Plan
from ..schedules import Clock, Plateau, Schedule, as_schedule
from .progress import Progress
from .task import MetricFunction, Prepared, call_metric


class Engine:
    """Trains and evaluates a network through one program, which owns the network's parameters meanwhile.

    Whatever uses the program comes through :meth:`ready`.  It is the only place that asks whether somebody
    else took or set the parameters since, and then loads them.  The optimizer's slots and the kept
    parameters belong to the run: they are taken along where a program is loaded anew or replaced.

    Arguments:
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
        self, network: Network, backend: Backend, plan: Plan, lower: Callable[..., Plan], **options: Any
    ) -> None:
        assert plan.optimizer is not None
        self.plan = plan
        self.program: Program | None = None
        self.schedule = as_schedule(plan.optimizer.rate)
        self.progress = Progress()
        self.saved: tuple[str, int] | None = None
        self._network, self._backend, self._lower, self._options = network, backend, lower, options
        self._slots: np.ndarray | None = None  # (K, 1, P), while no program has them
        self._kept: np.ndarray | None = None  # (P,), likewise
        self._keeps = False  # whether parameters were kept
        # For the other kind of targets: the kind, a program that only evaluates, and which values it has.
        self._other: tuple[TargetKind, Program] | None = None
        self._loaded: tuple[int | None, np.ndarray | None] = None, None

    # --- the program ---

    def ready(self, kind: TargetKind | None = None) -> Program:
        """The program with the network's current parameters; for targets of this kind, or as it is if None."""
        if self.program is None or kind not in (None, self.plan.target_kind):
            plan = self.plan if kind is None else self._lower(target_kind=kind)
            program = self._compile(plan)
            self._set_aside()
            self.plan, self.program = plan, program
            self._load(program)
        elif not self._network.values.is_owned_by(self.program):
            self._set_aside()
            self._load(self.program)
        return self.program

    def _compile(self, plan: Plan) -> Program:
        return self._backend.compile(plan, **self._options)

    def _set_aside(self) -> None:
        """Take what belongs to the run out of the program, and the parameters if it owns them."""
        if self.program is not None:
            state = self.program.read()
            self._slots = state.slots
            self._kept = self.program.read(snapshot=True).parameters[0] if self._keeps else None
            if self._network.values.is_owned_by(self.program):
                self._network.values.replace(state.parameters[0])

    def _load(self, program: Program) -> None:
        """Give the program the network's parameters, which it owns from then on, and what was set aside."""
        if self._slots is None:
            self._network.start(program, self.plan.optimizer)
        else:
            state = dataclasses.replace(self._network.state(), slots=self._slots)
            program.load(state)
            if self._kept is not None:
                program.load(dataclasses.replace(state, parameters=self._kept[np.newaxis]), snapshot=True)
        self._slots = self._kept = None
        self._network.values.give_to(program, self.plan.dtype)

    # --- training ---

    def set_schedule(self, schedule: Schedule, lower: Callable[..., Plan]) -> None:
        """Train at other rates from here on; what a schedule remembered is forgotten."""
        self._lower = lower
        self.plan = self._lower(target_kind=self.plan.target_kind)
        self.schedule, self.progress.plateau = schedule, Plateau()

    def attach(self, data: Prepared, sampling: Sampling) -> None:
        """Make ready to train on a data set."""
        self.ready(data.kind).attach(data.weighted, sampling)

    def take_steps(self, clock: Clock) -> np.ndarray:
        """Train for the steps of ``clock``; returns (steps, 2), their losses and weights, summed over rows.

        Raises:
            DivergenceError: a loss is not finite.
        """
        rates, progress = self.schedule.rates(clock), self.progress
        program = self.ready()
        with self._network.values.changing():
            sums = program.run(progress.steps, rates)
            progress.steps += len(rates)
        if progress.fit is not None:
            progress.fit.rate = float(rates[-1])
        is_finite = np.isfinite(sums[:, 0])
        if not is_finite.all():
            raise self._diverged("loss", progress.steps - len(rates) + int(np.argmin(is_finite)))
        return sums

    def evaluate(
        self, data: Prepared, metrics: Sequence[str], functions: Mapping[str, MetricFunction]
    ) -> dict[str, Any]:
        """The mean loss over a data set, ``"loss"``, and metrics by name, of which ``functions`` has one's own.

        Raises:
            DivergenceError: the loss is not finite, because a parameter is not.
        """
        if self.program is None or data.kind == self.plan.target_kind:
            program = self.ready(data.kind)
        else:  # a fit may be under way on the other kind, and goes on with its program
            program = self._evaluator(data.kind)
        assert self.plan.loss is not None
        problem = problem_of(self.plan.loss.output, self.plan.n_out)
        named = [name for name in metrics if name not in functions]
        sums = program.evaluate(data.dataset, sums_of(named, problem))
        prediction = self._network.shaped(program.predict(data.dataset), data.dataset) if functions else None
        value, weight = sums.pop("loss")
        if not np.isfinite(value):
            self.check_finite()
        values: dict[str, Any] = {"loss": float(value / weight), **values_of(named, problem, sums)}
        for name, function in functions.items():
            assert prediction is not None
            values[name] = call_metric(name, function, data.dataset, prediction)
        return {name: values[name] for name in ("loss", *metrics)}

    def _evaluator(self, kind: TargetKind) -> Program:
        """A program that only evaluates, on targets of this kind, with the network's current parameters."""
        if self._other is None or self._other[0] != kind:
            plan = self._lower(target_kind=kind)
            self._other = kind, self._compile(dataclasses.replace(plan, training=(), optimizer=None))
            self._loaded = None, None
        version, statistics = self._network.values.version, self._network.flat_statistics()
        if version is None or version != self._loaded[0] or statistics is not self._loaded[1]:
            self._network.start(self._other[1])
            self._loaded = version, statistics
        return self._other[1]

    def check_finite(self) -> None:
        """Raise DivergenceError, as of the last step, if a parameter is not finite."""
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
        """Those of :meth:`~mlpgpu.backends.Program.histograms` and ``sample`` that ``of`` asks for."""
        program = self.ready()
        found = program.histograms(bins) if "parameters" in of else {}
        if {"activations", "gradients"} & set(of):
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
        """The optimizer's slots (K, 1, P), None before the first step; the kept parameters (P,), None without any."""
        if self.program is None:
            return self._slots, self._kept
        kept = self.program.read(snapshot=True).parameters[0] if self._keeps else None
        return self.program.read().slots, kept

    def resume(self, kind: TargetKind, progress: Progress, slots: np.ndarray | None, kept: np.ndarray | None) -> None:
        """Go on from where another engine stood, on targets of this kind."""
        self.plan, self.progress = self._lower(target_kind=kind), progress
        self._slots, self._kept, self._keeps = slots, kept, kept is not None
