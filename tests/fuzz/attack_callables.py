"""Attacks every public callable: a call that works, with one or two arguments replaced by hostile values.

A call is judged by what it came to:

========  ==========================================================================================================
ok        it gave a result that is right, or an error of ours that names the argument
foreign   an exception that is none of ours
unnamed   an error of ours that does not say which argument
warning   a warning that is none of ours
wrong     a result that cannot be right, such as NaN, or a value that the annotation does not allow was taken
lost      what was accepted cannot be trained for a step, saved and read back as it was
hang      no answer within SECONDS
crash     the process died
========  ==========================================================================================================

    python tests/fuzz/attack_callables.py --calls 20000 [--seed 7] [--processes 2] [--only Trainer.fit] [--call 123]

Call ``index`` of a seed is always the same; ``--call`` repeats one and shows its traceback.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import inspect
import io
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hostile_values import COLUMNS, ROWS, hostile_values
from public_callables import OUTPUTS, Target, World, targets

import mlpgpu as mg
from mlpgpu.layers import Layer
from mlpgpu.optimizers import Optimizer
from mlpgpu.schedules import Schedule
from mlpgpu.training.run_file import ARGUMENTS

PACKAGE = Path(mg.__file__).parent
SECONDS = 60.0  # that a call may take, with matplotlib imported on a busy machine
MEMORY_BYTES = 6 << 30  # of addresses, so that what asks for too much is refused and no other process suffers
TRAINED_MOST = 1 << 20  # parameters; what has more is made, and trained only if it cannot fit into memory
NOT_TOGETHER = ({"epochs", "callbacks"},)  # without a callback that ends it, a fit of 2**40 epochs is one

# What errors call an argument that they do not call by its name.
OTHER_NAMES = {
    "path": ("file", "picture", "idx"),
    "name": ("data set", "parameter"),
    "key": ("parameter",),
    "other": ("parameter",),
    "folder": ("data set",),
    "column": ("history",),
    "value": ("",),
    "places": ("place of a layer",),
    "state": ("state of",),
    "n_in": ("x", "columns"),
    "x": ("input", "rows"),
    "y": ("target", "class labels", "classes"),
    "data": ("x", "y", "weight", "targets", "class", "input", "rows"),
    "validation": ("x", "y", "weight", "targets", "class", "input", "rows", "fraction", "held_out"),
    "loss": ("targets", "y", "metric", "class_weight"),
    "layers": ("dense", "standardize", "columns"),
    "rate": ("learning rate",),
    "precision": ("backend",),
    "backend": ("cuda",),
    "source": ("table", "frame", "column", "csv"),
    "target": ("column",),
    "kinds": ("column",),
    "rows": ("column",),
    "estimator": ("from_sklearn", "scikit-learn"),
    "records": ("record",),
    "n_classes": ("class labels", "y"),
    "n_out": ("y", "targets"),
    "classes": ("class labels",),
    "metrics": ("metric",),
    "callbacks": ("callback",),
    "values": ("parameter", "weight", "bias"),
    "array": ("idx",),
}


class Hang(BaseException):
    """No answer in time."""


@dataclasses.dataclass
class Outcome:
    """What a call came to."""

    kind: str
    detail: str = ""
    trace: str = ""


class Wrong(Exception):
    """A result that cannot be right."""


class Lost(Exception):
    """What was accepted does not survive."""


# --- what an argument may be, as far as its annotation says ---


def is_allowed(annotation: object, value: object) -> bool:
    """Whether the annotation, as written, allows ``value``; of what it does not say in plain types, True."""
    parts = {part.strip() for part in str(annotation).split("|")}
    if not parts <= {"int", "float", "bool", "str", "None", "PathLike[str]", "os.PathLike[str]"}:
        return True
    is_truth = isinstance(value, (bool, np.bool_))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
        is_truth = is_truth or isinstance(value, np.bool_)
    return (
        ("None" in parts and value is None)
        or ("bool" in parts and is_truth)
        or ("int" in parts and hasattr(value, "__index__") and not is_truth)
        or ("float" in parts and hasattr(value, "__float__") and not is_truth and not isinstance(value, (str, bytes)))
        or ("str" in parts and isinstance(value, str))
        or (any("PathLike" in part for part in parts) and isinstance(value, (str, os.PathLike)))
    )


def is_plain(value: object) -> bool:
    """Whether it is of Python's types alone, as a file holds them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(is_plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(is_plain(key) and is_plain(element) for key, element in value.items())
    return type(value) in (int, float, bool, str, type(None))


def _masked(value: object) -> bool:
    if isinstance(value, (list, tuple)) and len(value) <= ROWS:
        return any(_masked(element) for element in value if element is not value)
    if isinstance(value, Mapping):
        return any(map(_masked, value.values()))
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.getmaskarray(value).any())


# --- what must hold of what was accepted ---


def expect(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


def check_result(target: Target, given: Mapping[str, Any], owner: Any, result: Any) -> None:
    for name, value in given.items():
        annotation = target.parameters[name].annotation
        expect(is_allowed(annotation, value), f"{name}: {annotation} takes {type(value).__name__}")
        if name not in ("default", "out", "callbacks", "metrics", "class_weight", "state", "records", "classes", "of"):
            expect(not _masked(value), f"{name} takes masked values")
        kept = getattr(result, name, None)
        if type(kept) in (int, float) and type(value) in (int, float, bool):
            expect(kept == type(kept)(value), f"{name} is kept as another number")
    for array in [result] if isinstance(result, np.ndarray) else []:
        if array.dtype.kind == "f" and not target.name.startswith("datasets."):
            expect(np.isfinite(array).all(), "result is not finite")
    if isinstance(result, dict) and "loss" in result:
        expect(np.isfinite(result["loss"]), "loss is not finite")
    if target.name == "Trainer.step":
        expect(np.isfinite(result), "loss is not finite")
        expect(result != 0.0 or "weight" not in given, "loss is 0")
    if isinstance(result, mg.History) and owner is not None and len(result):
        expect(np.isfinite(result["loss"]).all(), "loss is not finite")
        expect(result.last["loss"] != 0.0, "loss is 0")


def check_dataset(data: mg.Dataset) -> None:
    arrays = {"x": data.x, "y": data.y, "weight": data.weight}
    expect(len(data) > 0, "a data set without rows")
    for name, array in arrays.items():
        if array is not None:
            expect(len(array) == len(data), f"{name} of other rows")
            expect(not array.flags.writeable, f"{name} is writable")
            expect(not isinstance(array, np.ma.MaskedArray), f"{name} is masked")
            expect(array.dtype.kind != "f" or np.isfinite(array).all(), f"{name} is not finite")
    twin = copy.deepcopy(data)
    expect(all(a is None or not a.flags.writeable for a in (twin.x, twin.y, twin.weight)), "a copy is writable")


def survive(world: World, made: Any) -> None:
    """Train ``made``, or with it, for a step or an epoch, save and resume: what it was is to be found again."""
    if isinstance(made, Layer):
        n_in = made.n_in or COLUMNS
        made = mg.Network([made, mg.Dense(made.output_width(n_in), OUTPUTS)])
    if isinstance(made, mg.Network):
        sizes = sum(segment.size for segment in made.segments.values())
        if TRAINED_MOST < sizes < MEMORY_BYTES // 4 or made.n_in > TRAINED_MOST:
            return
        if any(isinstance(layer, mg.Standardize) for layer in made.layers[1:]):
            return
        made = mg.Trainer(made, "mean_squared_error", "adam", backend="cpu")
    elif isinstance(made, mg.Loss):
        made = world.trainer(loss=made)
    elif isinstance(made, Optimizer):
        made = world.trainer(optimizer=made)
    elif isinstance(made, Schedule):
        made = world.trainer(optimizer=mg.SGD(made))
    elif isinstance(made, mg.Dataset):
        check_dataset(made)
        return survive_data(world, made)
    if isinstance(made, mg.Callback):
        trainer = world.trainer()
        trainer.fit(world.data(), 2, callbacks=[made], progress=False)
        save_and_resume(world, trainer)
    elif isinstance(made, mg.Trainer):
        if made.network.n_in == COLUMNS and made.network.n_out == OUTPUTS:
            made.fit(suitable(world, made), 1, progress=False)
        else:
            n_in, n_out = made.network.n_in, made.network.n_out
            expect(n_in * n_out < 1 << 30, "data of such widths cannot be made")
            made.fit((np.ones((2, n_in)), np.ones((2, n_out))), 1, progress=False)
        save_and_resume(world, made)
    elif isinstance(made, mg.Predictor):
        expect(np.isfinite(made(world.x)).all(), "predictions are not finite")


def suitable(world: World, trainer: mg.Trainer) -> tuple[np.ndarray, np.ndarray]:
    """Data for the trainer's loss."""
    if trainer.network.output == "softmax":
        return world.x, world.numbers
    targets = {"sigmoid": world.values > 0.0, "exp": np.abs(world.values)}
    return world.x, targets.get(trainer.network.output, world.values)


def survive_data(world: World, data: mg.Dataset) -> None:
    if data.y is None or data.n_in > 1000:
        return
    is_labels = data.y.ndim == 1 and data.y.dtype.kind in "iu" and 0 <= data.y.min() <= data.y.max() < 50
    n_out = len(data.classes or range(int(data.y.max()) + 1)) if is_labels else data.y[0].size
    if n_out > 1000 or (data.classes is not None and not is_labels) or (is_labels and n_out < 2):
        return
    network = mg.Network([mg.Dense(data.n_in, n_out)], seed=1)
    loss = "softmax_cross_entropy" if is_labels else "absolute_error"
    trainer = mg.Trainer(network, loss, mg.SGD(1e-3), batch_size=5, backend="cpu")
    history = trainer.fit(data, 1, progress=False)
    expect(np.isfinite(history.last["loss"]), "loss is not finite")
    save_and_resume(world, trainer)


def save_and_resume(world: World, trainer: mg.Trainer) -> None:
    path = world.folder / "survives.h5"
    try:
        trainer.save(path)
        functions = [{name: function} for name, function in trainer._functions.items()]
        resumed = mg.Trainer.resume(path, metrics=functions)
    except mg.errors.DivergenceError:
        return  # which a high rate may well lead to
    except mg.MlpgpuError as error:
        raise Lost(f"{type(error).__name__}: {error}"[:300]) from error
    for name in ARGUMENTS:
        before, after = getattr(trainer, name), getattr(resumed, name)
        if not is_plain(before):
            raise Lost(f"{name} is kept as {before!r}")
        if before != after or repr(before) != repr(after):
            raise Lost(f"{name} was {before!r}, is {after!r}")
    network, again = trainer.network, resumed.network
    for name in ("layers", "seed", "output", "classes", "columns", "adapted"):
        before, after = getattr(network, name), getattr(again, name)
        if not is_plain(before) or before != after or repr(before) != repr(after):
            raise Lost(f"{name} of the network was {before!r}, is {after!r}")


# --- a call ---


@dataclasses.dataclass
class Call:
    """Call ``index`` of a seed: what is called, with which hostile values by parameter."""

    target: Target
    hostile: dict[str, str]
    world: World

    def __str__(self) -> str:
        return f"{self.target.name}({', '.join(f'{name}=<{value}>' for name, value in self.hostile.items())})"


class Attack:
    """The calls of a seed, in a folder of their own."""

    def __init__(self, seed: int, folder: Path, only: str | None = None) -> None:
        self.seed, self.folder = seed, folder
        self.values = hostile_values(folder)
        found = targets(folder)
        self.targets = [target for name, target in found.items() if only is None or re.fullmatch(only, name)]
        # As often as it has parameters, or a constructor of ten would be as well known as a method of one.
        self.shares = [len(target.parameters) for target in self.targets]

    def call(self, index: int) -> Call:
        random = Random(f"{self.seed}/{index}")
        (target,) = random.choices(self.targets, self.shares)
        names = random.sample(list(target.parameters), min(len(target.parameters), random.choice((1, 1, 1, 2))))
        if any(pair <= set(names) for pair in NOT_TOGETHER):
            names = names[:1]
        world = World(self.folder, random)
        world.classifies = (world.classifies or "labels" in target.name) and "targets" not in target.name
        return Call(target, {name: random.choice(list(self.values)) for name in names}, world)

    def run(self, call: Call) -> Outcome:
        """Make the call, and judge it."""
        hostile = {name: self.values[value]() for name, value in call.hostile.items()}
        with warnings.catch_warnings(record=True) as caught, _time_limit():
            warnings.simplefilter("always")
            try:
                outcome = self._judge(call, hostile)
            except Hang:
                outcome = Outcome("hang", "", traceback.format_exc())
        foreign = [w for w in caught if w.category is not UserWarning or not _is_ours(w)]
        if foreign and outcome.kind == "ok":
            first = foreign[0]
            where = f"{Path(first.filename).name}:{first.lineno}"
            return Outcome("warning", f"{first.category.__name__} at {where}: {first.message}")
        return outcome

    def _judge(self, call: Call, hostile: dict[str, Any]) -> Outcome:
        target, world = call.target, call.world
        owner = target.owner(world) if target.owner else None
        given = {**target.usual(world), **hostile}
        try:
            result = target.invoke(owner, given)
            if inspect.isgenerator(result):
                result = list(result)
        except mg.MlpgpuError as error:
            message = str(error).lower()
            names = [known for name in hostile for known in (name, *OTHER_NAMES.get(name, ()))]
            if any(name.lower() in message for name in names) or "expected the package" in message:
                return Outcome("ok", "error")
            return Outcome("unnamed", f"{type(error).__name__}: {error}"[:200])
        except Exception as error:
            return _foreign(error, "")
        try:
            check_result(target, hostile, owner, result)
            for made in result if isinstance(result, tuple) else (result,):
                survive(world, made)
            if isinstance(owner, (mg.Trainer, mg.Network)):
                _survive_owner(world, target, owner)
        except Wrong as error:
            return Outcome("wrong", str(error))
        except Lost as error:
            return Outcome("lost", str(error), traceback.format_exc())
        except mg.MlpgpuError:
            return Outcome("ok", "error later")
        except Exception as error:
            return _foreign(error, "later ")
        return Outcome("ok", "taken")


def _survive_owner(world: World, target: Target, owner: Any) -> None:
    if isinstance(owner, mg.Trainer) and target.name not in ("Trainer.resume",):
        save_and_resume(world, owner)
    elif isinstance(owner, mg.Network):
        path = world.folder / "owner.h5"
        try:
            owner.save(path)
            again = mg.load(path)
        except mg.MlpgpuError as error:
            raise Lost(f"{type(error).__name__}: {error}"[:300]) from error
        for name in ("layers", "seed", "output", "classes", "adapted"):
            if getattr(owner, name) != getattr(again, name) or not is_plain(getattr(owner, name)):
                raise Lost(f"{name} of the network was {getattr(owner, name)!r}, is {getattr(again, name)!r}")


def _foreign(error: Exception, when: str) -> Outcome:
    if "a function that fails" in str(error):
        return Outcome("ok", "the caller's error")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the attack"
    return Outcome("foreign", f"{when}{type(error).__name__} at {where}: {error}"[:200], traceback.format_exc())


def _is_ours(warning: warnings.WarningMessage) -> bool:
    """Whether the package wrote it, which points at its caller, not into itself."""
    return Path(warning.filename).parent == Path(__file__).parent


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# --- many calls, in processes that may die ---


def work(seed: int, first: int, last: int, stride: int, only: str | None, folder: Path) -> None:
    """Make calls, and write what each came to as a row of JSON, before it begins and after it ended."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    attack = Attack(seed, folder, only)
    for index in range(first, last, stride):
        call = attack.call(index)
        print(json.dumps({"index": index, "call": str(call)}), file=out)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            outcome = attack.run(call)
        detail = outcome.detail.encode("ascii", "backslashreplace").decode()
        print(json.dumps({"index": index, "kind": outcome.kind, "detail": detail}), file=out)


class Worker:
    """A process that makes every ``stride``-th call, and is started again behind a call that it dies of."""

    def __init__(self, seed: int, first: int, last: int, stride: int, only: str | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlpgpu-fuzz-"))
        self._arguments = [
            f"--seed={seed}",
            f"--calls={last}",
            f"--stride={stride}",
            *([f"--only={only}"] * bool(only)),
        ]
        self._stride, self._last = stride, last
        self._start(first)

    def _start(self, first: int) -> None:
        self.next, self.under_way, self._rest = first, "", b""
        command = [sys.executable, __file__, "--work", str(self.folder), f"--first={first}", *self._arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=self.folder)

    def read(self) -> Iterator[tuple[int, str, Outcome]]:
        """Outcomes that have come; waits for SECONDS and half of it more at most, and then ends the process."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 1.5 * SECONDS)
        chunk = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
        if not ready:
            self.process.kill()
        *rows, self._rest = (self._rest + chunk).split(b"\n")
        for row in map(json.loads, rows):
            if "call" in row:
                self.next, self.under_way = row["index"], row["call"]
            else:
                yield row["index"], self.under_way, Outcome(row["kind"], row["detail"])
                self.under_way, self.next = "", row["index"] + self._stride
        if not chunk:
            code = self.process.wait()
            if code == 0 and not self.under_way:
                self.next = self._last
                return
            yield self.next, self.under_way, Outcome("crash" if ready else "hang", f"exit status {code}")
            self.process.communicate()  # closes the pipe
            self._start(self.next + self._stride)

    @property
    def is_done(self) -> bool:
        return self.next >= self._last

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


Found = list[tuple[int, str, Outcome]]


def attack_all(
    seed: int, calls: int, processes: int, only: str | None = None, tell: Callable[[int], None] = lambda done: None
) -> tuple[collections.Counter[str], Found]:
    """How many calls came to what, and those that were not ok, by index."""
    counts: collections.Counter[str] = collections.Counter()
    found: Found = []
    workers = [Worker(seed, first, calls, processes, only) for first in range(min(processes, calls))]
    try:
        while left := [worker for worker in workers if not worker.is_done]:
            for worker in left:
                for index, call, outcome in worker.read():
                    counts[outcome.kind] += 1
                    if outcome.kind != "ok":
                        found.append((index, call, outcome))
            tell(counts.total())
    finally:
        for worker in workers:
            worker.close()
    return counts, sorted(found, key=lambda row: row[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", help="a pattern that a callable's whole name matches")
    parser.add_argument("--call", type=int, help="make this one call, and show its traceback")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shown", type=int, default=400, help="kinds of finding to list")
    options = parser.parse_args()
    if options.work:
        work(options.seed, options.first, options.calls, options.stride, options.only, options.work)
        return 0
    if options.call is not None:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            attack = Attack(options.seed, Path(folder), options.only)
            call = attack.call(options.call)
            outcome = attack.run(call)
            print(call, outcome.kind, outcome.detail.encode("ascii", "backslashreplace").decode(), sep="\n")
            print(outcome.trace.encode("ascii", "backslashreplace").decode())
            os.chdir("/")
        return outcome.kind != "ok"
    counts, found = attack_all(options.seed, options.calls, options.processes, options.only)
    alike: dict[tuple[str, str], list[tuple[int, str, Outcome]]] = {}
    for row in found:
        alike.setdefault(
            (row[2].kind, re.sub(r"(: .*|/tmp.*|takes .*|\bkept as .*|\bwas .*)", "", row[2].detail)), []
        ).append(row)
    for (kind, _), rows in sorted(alike.items(), key=lambda item: -len(item[1]))[: options.shown]:
        index, call, outcome = rows[0]
        print(f"{len(rows):5} {kind:8} {' '.join(outcome.detail.split())}\n{'':15}{index} {call}")
    print(f"seed {options.seed}: {counts.total():,} calls: " + ", ".join(f"{n:,} {k}" for k, n in counts.most_common()))
    return counts.total() != counts["ok"]


if __name__ == "__main__":
    sys.exit(main())
