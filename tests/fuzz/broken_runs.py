"""Random runs that are broken off again and again, and go on: they must end with the bits of unbroken ones.

    python tests/fuzz/broken_runs.py --exceptions 200 --interrupts 100 --kills 300 --seed 1
    python tests/fuzz/broken_runs.py --backend cuda --kills 30 --plans 5

An exception is raised before any statement of the package; Ctrl-C comes from outside, up to three times; a kill is
SIGKILL, up to three of a run.  Counted is what became of each, and each that went wrong is told of by its seed.  On a
card, where every plan's kernels are compiled, a few plans are broken off again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from killed_runs import Unbroken, killed, latest, run_with_checkpoint
from random_runs import CHECKPOINTS, RandomRun, differences, outcome

import mlpgpu as mg
from mlpgpu.errors import BackendError, TornStateError
from mlpgpu.training import interrupt

PACKAGE = str(Path(mg.__file__).parent)
HANG_SECONDS = 120.0
BREAKS = 3  # of a run, at most

Breaks = Callable[[random.Random, int], "contextlib.AbstractContextManager[Any]"]


class Traced:
    """Counts the statements of the package that this thread comes to, and raises before one of them."""

    def __init__(self, at: int | None = None, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.count, self._at, self._kind = 0, at, kind

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                raise self._kind(f"before line {frame.f_lineno} of {frame.f_code.co_filename}")
        return self._line

    def __enter__(self) -> Traced:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def exceptions(chance: random.Random, statements: int) -> Traced:
    """An exception before some statement."""
    return Traced(chance.randint(1, statements), chance.choice([KeyboardInterrupt, MemoryError, SystemExit]))


@contextmanager
def interrupts(chance: random.Random, statements: int) -> Iterator[None]:
    """Ctrl-C twice, or three times, at random moments of some hundredth of a second."""
    interrupt._last = -interrupt.AGAIN_SECONDS  # as if none had been for a while
    moments = sorted(chance.uniform(0.0, 0.03) for _ in range(chance.choice([2, 2, 3])))
    is_over = threading.Event()

    def press() -> None:
        started = time.perf_counter()
        for moment in moments:
            if is_over.wait(max(0.0, moment - (time.perf_counter() - started))):
                return
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    # A shell has what it starts in the background pass over Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser.start()
    try:
        yield
    finally:
        # The remaining presses would meet the test itself.
        with contextlib.suppress(KeyboardInterrupt):
            is_over.set()
            presser.join()
        signal.signal(signal.SIGINT, before)


def broken_off(run: RandomRun, folder: Path, chance: random.Random, breaks: Breaks, statements: int) -> list[str]:
    """Break a run off up to three times, saving it in a ``finally``, and end it; returns what became of each."""
    found = []
    saved = folder / "saved.h5"
    left = chance.randint(1, BREAKS)
    while True:
        trainer = latest(run, [saved, *(folder / name for name in CHECKPOINTS)])
        ends = "finished"
        try:
            with breaks(chance, statements) if left else contextlib.nullcontext():
                if run.fit(trainer, folder).interrupted:
                    ends = "stopped"
        except (KeyboardInterrupt, MemoryError, SystemExit):
            ends = "raised"
        except BackendError as error:
            if not isinstance(error.__cause__, MemoryError):
                raise
            ends = "raised"  # while a program was made
        if ends == "finished":
            return found + _check(run, trainer, folder)
        left -= 1
        try:
            _quietly(lambda trainer=trainer: trainer.save(saved))
            found.append(f"{ends}, saved")
        except TornStateError:
            found.append(f"{ends}, said to be torn")


def _quietly(call: Callable[[], object]) -> None:
    """Call it; a Ctrl-C that was sent before and comes late is passed over."""
    for _ in range(4):
        with contextlib.suppress(KeyboardInterrupt):
            call()
            return


def _check(run: RandomRun, trainer: mg.Trainer, folder: Path) -> list[str]:
    whole = folder.parent / f"{folder.name}.whole"
    whole.mkdir()
    unbroken = run.trainer()
    run.fit(unbroken, whole)
    wrong = differences(outcome(trainer, folder), outcome(unbroken, whole))
    return [f"WRONG BITS: {', '.join(wrong)}"] if wrong else []


def attack(seed: int, how: str, run: RandomRun | None = None, unbroken: Unbroken | None = None) -> list[str]:
    """What became of a run, by default that of this seed on the CPU, that is broken off as the seed has it."""
    run, chance = run or run_of_seed(seed, how), random.Random(seed)
    before = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    folder = Path(tempfile.mkdtemp(prefix="mlpgpu-"))
    sync, os.fsync = os.fsync, lambda descriptor: None  # a kill leaves what was written to the system; this is faster
    (folder / "run").mkdir()
    try:
        if how == "kills":
            return killed(run, folder / "run", chance, unbroken or Unbroken())
        statements = 0
        if how == "exceptions":
            with Traced() as traced:
                run.fit(run.trainer(), folder)
            statements = traced.count
        ways: dict[str, Breaks] = {"exceptions": exceptions, "interrupts": interrupts}
        return broken_off(run, folder / "run", chance, ways[how], statements)
    except BaseException as error:
        traceback.print_exception(error)
        if isinstance(error, Hang) or "it hung" in str(error):
            return [f"HANG: {error}"]
        return [f"FOREIGN ERROR: {type(error).__name__}: {error}"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        os.fsync = sync
        shutil.rmtree(folder)


class Hang(BaseException):
    """It takes too long."""


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def run_of_seed(seed: int, how: str, backend: str = "cpu") -> RandomRun:
    return run_with_checkpoint(seed, backend) if how == "kills" else RandomRun(seed, backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = ("kills", "exceptions", "interrupts")  # kills first: the others start CUDA in this process
    for how in ways:
        parser.add_argument(f"--{how}", type=int, default=0, help="how many runs")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first run")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--plans", type=int, default=None, help="how many different runs there are; by default all are")
    options = parser.parse_args()
    is_wrong = False
    for how in ways:
        number, counted, unbroken = getattr(options, how), Counter[str](), Unbroken()
        seeds = range(options.seed, options.seed + number)
        runs = [run_of_seed(seed, how, options.backend) for seed in seeds[: options.plans]]
        if how == "kills" and options.plans is not None:
            unbroken.begin(runs)
            for run in runs:
                unbroken.outcome(run)
        for seed, run in zip(seeds, itertools.cycle(runs)):
            found = attack(seed, how, run, unbroken)
            counted.update(what.partition(":")[0] for what in found)
            for what in found:
                if what.split(":")[0].isupper():
                    print(f"{how}, seed {seed}: {what}")
                    is_wrong = True
        if number and not counted:
            print(f"{how}: none of the runs was broken off")
            is_wrong = True
        if number:
            print(f"{how}, {number} runs from seed {options.seed}: {dict(sorted(counted.items()))}", flush=True)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
