"""The way of a batch through one fit: every function of mlpgpu that is entered, with its file, as a tree of calls.

    python benchmarks/walk.py [--backend NAME]

One epoch is trained, for which the plan is lowered and compiled, and then another one, for which everything is ready.
A function that one caller enters several times is printed once, with the number of its calls.  Checks and texts, which
no data go through, are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import mlpgpu as mg

PACKAGE = Path(mg.__file__).parent
DATA_FOLDERS = ("plan", "backends", "training", "datasets", "network")
SKIPPED = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>"}


@dataclass
class Call:
    """A function that was entered, and those that it entered, in order."""

    file: str
    function: str
    count: int = 1
    calls: list[Call] = field(default_factory=list)

    def entered(self, file: str, function: str) -> Call:
        for call in self.calls:
            if (call.file, call.function) == (file, function):
                call.count += 1
                return call
        self.calls.append(Call(file, function))
        return self.calls[-1]

    def lines(self, depth: int = 0) -> list[str]:
        times = f"  × {self.count}" if self.count > 1 else ""
        found = [f"{'  ' * depth + self.function:60} {self.file}{times}"]
        return found + [line for call in self.calls for line in call.lines(depth + 1)]


def walked(run: Callable[[], Any]) -> Call:
    """The calls that ``run`` makes on this thread."""
    root = Call("", "")
    stack: list[tuple[FrameType, Call]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in SKIPPED:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in DATA_FOLDERS:
                parent = stack[-1][1] if stack else root
                function = getattr(code, "co_qualname", code.co_name)  # qualified since Python 3.11
                stack.append((frame, parent.entered(path.relative_to(PACKAGE).as_posix(), function)))
        elif event == "return" and stack and stack[-1][0] is frame:
            stack.pop()

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the way of a batch through one fit.")
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    data = mg.Dataset(random.standard_normal((1024, 784), np.float32), random.integers(10, size=1024))
    network = mg.Network([mg.Dense(784, 128, activation="relu"), mg.Dense(128, 10)], seed=0)
    trainer = mg.Trainer(
        network, loss="softmax_cross_entropy", optimizer=mg.Momentum(0.1), backend=arguments.backend, batch_size=128
    )
    for title in ("first epoch", "an epoch more"):
        print(f"--- {title} ---")
        for call in walked(lambda: trainer.fit(data, epochs=1)).calls:
            print("\n".join(call.lines()))


if __name__ == "__main__":
    main()
