"""Two checkouts of mlpgpu in turns on one card: whether one of them is slower, or computes other bits.

Each version has a process of its own, and the old one two, so that what it differs from itself shows how much a ratio
can be trusted.  They take turns, round by round, each round in another order.  A row is a workload of mlpgpu.bench at a
precision, by training steps, or by evaluations of the whole training set.  Its ratio is the median over rounds of new
over old; a row counts as slower if its ratio is above 1.02 and above what the old version differs from itself.

    python benchmarks/versions.py OLD [--only NAME ...] [--precision NAME ...] [--rounds N] [--backend NAME]
                                  [--json PATH]

OLD is the folder of the other checkout.  Both need the names WORKLOADS, suited_to, Epochs and surroundings in their
mlpgpu.bench.  The exit status is 1 if a row is slower, or has other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 11
TURN_SECONDS = 0.06  # about what a turn takes
ALLOWED = 1.02
WAYS = "training step", "evaluation"


@dataclass(frozen=True)
class Row:
    """A workload at a precision by both versions; times are medians of rounds.

    Attributes:
        ratio: new over old; ``repeat`` is the old version's second process over its first.
        same_bits: whether the loss and the parameters after an epoch, or the sums of an evaluation, are the same.
    """

    workload: str
    precision: str
    way: str
    new_microseconds: float
    old_microseconds: float
    ratio: float
    repeat: float
    same_bits: bool

    @property
    def is_slower(self) -> bool:
        return self.ratio > max(ALLOWED, 1 + abs(self.repeat - 1))

    def __str__(self) -> str:
        verdict = ", ".join(["SLOWER"] * self.is_slower + ["OTHER BITS"] * (not self.same_bits))
        return (
            f"{self.workload:8} {self.precision:9} {self.way:14} {self.new_microseconds:12,.2f} "
            f"{self.old_microseconds:12,.2f} {self.ratio:8.4f} {self.repeat:8.4f}  {verdict}"
        )


HEADS = f"{'workload':8} {'precision':9} {'way':14} {'new µs':>12} {'old µs':>12} {'new/old':>8} {'old/old':>8}"


# --- a version's process: it reads requests from its input, a line of JSON each, and answers in the same way ---


class Server:
    """Runs workloads by the mlpgpu that its process imports."""

    def __init__(self, backend: str) -> None:
        from mlpgpu import bench
        from mlpgpu.backends import get_backend

        self._bench, self._backend = bench, get_backend(backend)
        self._runs: dict[str, Any] = {}

    def about(self) -> Mapping[str, Any]:
        """What results hold for, and the folder of the package."""
        return {**self._bench.surroundings(self._backend), "folder": str(Path(self._bench.__file__).parents[1])}

    def make(self, workload: str, precision: str) -> Mapping[str, Any]:
        """Train for an epoch and evaluate: the bits of both, and how many steps an epoch has, 0 if it is left out."""
        from mlpgpu import Dataset
        from mlpgpu.errors import ConfigurationError

        self._runs.clear()
        suited = self._bench.suited_to(self._backend, self._bench.WORKLOADS[workload])
        if suited is None or precision not in suited.precisions:
            return {"steps": 0}
        data = Dataset(*suited.arrays())
        try:
            trainer = suited.trainer(backend=self._backend.name, precision=precision)
        except ConfigurationError:  # the backend has no such precision
            return {"steps": 0}
        run = self._bench.Epochs(trainer, data)
        self._runs = {WAYS[0]: run, WAYS[1]: lambda: run.program.evaluate(data, [])["loss"]}
        loss = run()
        bits = {WAYS[0]: [loss, zlib.crc32(run.program.read().parameters.tobytes())]}
        bits[WAYS[1]] = [float(value) for value in self._runs[WAYS[1]]()]
        return {"steps": suited.steps, "bits": bits}

    def count(self, way: str) -> Mapping[str, Any]:
        """How many calls a turn has."""
        self._runs[way]()
        return {"calls": max(1, round(TURN_SECONDS / self._seconds(way, 1)))}

    def turn(self, way: str, calls: int) -> Mapping[str, Any]:
        """The seconds of a call: an epoch, or an evaluation."""
        return {"seconds": self._seconds(way, calls)}

    def _seconds(self, way: str, calls: int) -> float:
        run = self._runs[way]
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - started) / calls


def serve(backend: str) -> None:
    server = Server(backend)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(server, name)(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


# --- the comparison ---


class Version:
    """The process of a checkout."""

    def __init__(self, folder: Path, backend: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--serve", "--backend", backend]
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._folder = folder
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, *request: object) -> None:
        """Send a request: the name of a method of Server, and its arguments."""
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The answer to a request that was sent; an error in the process ends this one."""
        assert self._process.stdout
        answer = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            sys.exit(f"{self._folder}: {answer['error']}")
        return answer

    def ask(self, *request: object) -> Any:
        """Send a request; returns the answer."""
        self.send(*request)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compare(versions: Sequence[Version], workload: str, precision: str, rounds: int) -> Iterator[Row]:
    """Rows of a workload by new, old, and old again."""
    for version in versions:
        version.send("make", workload, precision)
    made = [version.answer() for version in versions]
    if len({each["steps"] for each in made}) > 1:
        sys.exit(f"{workload} in {precision}: only one of the versions has it, or their epochs differ")
    if not made[0]["steps"]:
        return
    for way in WAYS:
        calls = versions[0].ask("count", way)["calls"]
        for version in versions[1:]:
            version.ask("count", way)
        seconds: list[list[float]] = [[] for _ in versions]
        for turn in range(rounds):
            for place in sorted(range(len(versions)), key=lambda place: (place + turn) % len(versions)):
                seconds[place].append(versions[place].ask("turn", way, calls)["seconds"])
        units = made[0]["steps"] if way == WAYS[0] else 1
        new, old, again = seconds
        yield Row(
            workload, precision, way, 1e6 * statistics.median(new) / units, 1e6 * statistics.median(old) / units,
            ratio=statistics.median(a / b for a, b in zip(new, old, strict=True)),
            repeat=statistics.median(a / b for a, b in zip(again, old, strict=True)),
            same_bits=made[0]["bits"][way] == made[1]["bits"][way],
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure two checkouts of mlpgpu in turns on one card.")
    parser.add_argument("old", type=Path, metavar="OLD", help="the folder of the other checkout")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these workloads alone")
    parser.add_argument("--precision", nargs="+", metavar="NAME", help="these precisions alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each row there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.backend)
        return
    sys.path.insert(0, str(ROOT))
    from mlpgpu import bench

    folders = ROOT, arguments.old.resolve(), arguments.old.resolve()
    versions = [Version(folder, arguments.backend) for folder in folders]
    about = [version.ask("about") for version in versions]
    for folder, found in zip(folders, about, strict=True):
        if found["folder"] != str(folder):
            sys.exit(f"{folder}: expected its own mlpgpu, got that of {found['folder']}")
    shared = {name: value for name, value in about[0].items() if name != "folder"}
    shared["old_commit"] = about[1]["commit"]
    print(*(f"{name}: {value}" for name, value in shared.items()), HEADS, sep="\n", flush=True)
    rows: list[Row] = []
    for workload in arguments.only or bench.WORKLOADS:
        for precision in arguments.precision or bench.PRECISIONS:
            for row in compare(versions, workload, precision, arguments.rounds):
                rows.append(row)
                print(row, flush=True)
                if arguments.json:
                    lines = [json.dumps({**asdict(row), **shared}) for row in rows]
                    arguments.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for version in versions:
        version.close()
    wrong = [row for row in rows if row.is_slower or not row.same_bits]
    print(f"{len(rows)} rows, {len(wrong)} of them slower or of other bits")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
