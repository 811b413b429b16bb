"""Attacks whatever reads files: good ones, changed by structure, with right checksums.

A file is judged by what reading it, and using what was read, came to:

=======  ================================================================================================
refused  an error of ours
taken    it was read; what was read predicts, is saved and read again, or goes on training
foreign  an exception that is none of ours
hang     no answer within SECONDS of the process's time on a processor, or STILL_SECONDS of the clock
memory   more than MEMORY bytes beyond what the process has
crash    the process died by itself; how is told
=======  ================================================================================================

    python tests/fuzz/attack_files.py --files 50000 [--seed 7] [--processes 2] [--only run] [--file 123]

File ``index`` of a seed is always the same; ``--file`` reads one and shows its traceback, and leaves it at ``--keep``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import resource
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MLPGPU_BACKEND", "cpu")

import numpy as np
import psutil
from hostile_files import Base, bases, hostile_file

import mlpgpu as mg
from mlpgpu.datasets import read_idx
from mlpgpu.shell.arrays import read_array, read_arrays

SECONDS = 10.0  # on a processor, since on a busy machine the clock says nothing of the file
STILL_SECONDS = 300.0  # for what waits and computes nothing, such as a FIFO
MEMORY = 1 << 30
BATCH = 250  # files of one process
BAD = ("foreign", "hang", "memory", "crash")


def read(path: Path, suffix: str) -> None:
    """Read a file by all that reads such files, and use what was read."""
    if suffix == ".idx":
        read_idx(path)
    elif suffix == ".npy":
        np.asarray(read_array(path)).tobytes()
    elif suffix == ".npz":
        read_arrays(path)
    elif suffix == ".run.h5":
        _use_trainer(mg.Trainer.resume(path, backend="cpu"), path)
    elif suffix == ".h5":
        _use_network(mg.load(path), path)
    else:
        _use_network(_load_foreign(path), path)


def _load_foreign(path: Path) -> mg.Network:
    try:
        return mg.load(path)
    except mg.MlpgpuError:
        return mg.load(path, activation="relu", output="softmax")


def _use_network(network: mg.Network, path: Path) -> None:
    x = np.ones((2, network.n_in), np.float32) / 2
    with contextlib.suppress(mg.MlpgpuError):  # statistics that were never fitted, bytes expected, too large parameters
        assert len(network.predict(x)) == 2, "as many predictions as rows"
    repr(network), str(network), network.classes, network.columns
    again = path.with_suffix(".again.h5")
    network.save(again)
    same = mg.load(again)
    assert same.flat_parameters().tobytes() == network.flat_parameters().tobytes(), "what is saved is read again"


def _use_trainer(trainer: mg.Trainer, path: Path) -> None:
    repr(trainer), str(trainer.plan), trainer.history.columns, list(trainer.history), trainer._repr_html_()
    again = path.with_suffix(".again.h5")
    trainer.save(again)
    mg.Trainer.resume(again, backend="cpu")
    n_in, n_out = trainer.network.n_in, trainer.network.n_out
    for y in (np.zeros(2, int), np.zeros((2, n_out), np.float32)):
        with contextlib.suppress(mg.MlpgpuError):  # other targets, a rate that is too high
            trainer.step(np.ones((2, n_in), np.float32), y)


def judge(path: Path, suffix: str) -> tuple[str, str]:
    """What reading a file came to, and where."""
    try:
        read(path, suffix)
    except mg.MlpgpuError:
        return "refused", ""
    except MemoryError:
        return "memory", _place()
    except Exception:
        return "foreign", _place()
    return "taken", ""


def _place() -> str:
    """The last exception with the innermost place in the package."""
    kind, error, trace = sys.exc_info()
    frames = [frame for frame in traceback.extract_tb(trace) if "/mlpgpu/" in frame.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "outside the package"
    return f"{kind.__name__ if kind else ''} in {at}: {str(error)[:100]}"


def file_of(seed: int, index: int, found: dict[str, Base]) -> tuple[str, bytes]:
    """The name of the base and the bytes of file ``index``."""
    draw = Random(f"{seed} {index}")
    name = draw.choice(sorted(found))
    return name, hostile_file(draw, found[name])


def _serve(writing: int, seed: int, indices: range, found: dict[str, Base], folder: Path) -> None:
    """Read files in a process of its own, and tell of each before and after."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=folder))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for index in indices:
            name, image = file_of(seed, index, found)
            path = folder / f"file{found[name].suffix}"
            path.write_bytes(image)
            os.write(writing, f"{index}\t{name}\n".encode())
            verdict, place = judge(path, found[name].suffix)
            os.write(writing, f"{verdict}\t{place}".encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")


class Worker:
    """A process that reads a batch of files, one after the other."""

    def __init__(self, seed: int, indices: range, found: dict[str, Base], folder: Path) -> None:
        self.reading, writing = os.pipe()
        self.indices, self.name, self.told = indices, "", b""
        self.index: int | None = None
        self.done = indices.start
        self.child = os.fork()
        if self.child == 0:
            status = 1
            try:
                os.close(self.reading)
                _serve(writing, seed, indices, found, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        self._process = psutil.Process(self.child)
        self.begin()

    def begin(self) -> None:
        """From now on the time of a file counts."""
        self._clock, self._seconds = time.monotonic(), self._on_processor()

    def _on_processor(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    @property
    def is_late(self) -> bool:
        """Whether the file has had all the time that one may take."""
        waited = time.monotonic() - self._clock
        return waited > STILL_SECONDS or (waited > SECONDS and self._on_processor() - self._seconds > SECONDS)

    def close(self) -> str:
        """End the process, if it has not ended by itself; returns how it ended."""
        os.kill(self.child, signal.SIGKILL)
        os.close(self.reading)
        status = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        return f"exit status {status}" if status >= 0 else f"signal {-status}"


def attack(files: int, seed: int, processes: int, only: str = "", first: int = 0) -> list[tuple[int, str, str, str]]:
    """Read so many hostile files; returns index, base, verdict and place of each."""
    found = {name: base for name, base in bases().items() if only in name}
    folder = Path(tempfile.mkdtemp(prefix="files", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    results: list[tuple[int, str, str, str]] = []
    pending = [range(start, min(start + BATCH, first + files)) for start in range(first, first + files, BATCH)][::-1]
    workers: list[Worker] = []
    try:
        while pending or workers:
            while pending and len(workers) < processes:
                workers.append(Worker(seed, pending.pop(), found, folder))
            ready, _, _ = select.select([worker.reading for worker in workers], [], [], 0.5)
            for worker in list(workers):
                ended = False
                if worker.reading in ready:
                    data = os.read(worker.reading, 1 << 16)
                    ended = not data
                    *lines, worker.told = (worker.told + data).split(b"\n")
                    for told in lines:
                        left, _, right = told.decode("utf-8", "replace").partition("\t")
                        worker.begin()
                        if left.isdigit():
                            worker.index, worker.name = int(left), right
                        elif worker.index is not None:
                            results.append((worker.index, worker.name, left, right))
                            worker.done, worker.index = worker.index + 1, None
                is_late = not ended and worker.index is not None and worker.is_late
                if not (ended or is_late):
                    continue
                workers.remove(worker)
                end = worker.close()
                if worker.index is not None:
                    verdict, place = ("hang", "") if is_late else ("crash", f"{end}, of {worker.name}")
                    results.append((worker.index, worker.name, verdict, place))
                    worker.done = worker.index + 1
                elif worker.done < worker.indices.stop:  # it failed to make a file
                    results.append((worker.done, "", "crash", f"{end}, before the file was made"))
                    worker.done += 1
                if worker.done < worker.indices.stop:
                    pending.append(range(worker.done, worker.indices.stop))
    finally:
        for worker in workers:
            worker.close()
        shutil.rmtree(folder, ignore_errors=True)
    return results


def table(results: list[tuple[int, str, str, str]]) -> str:
    """Counts by base and verdict."""
    verdicts = ("refused", "taken", *BAD)
    counts = collections.Counter((name, verdict) for _, name, verdict, _ in results)
    names = sorted({name for _, name, _, _ in results})
    rows = [("base", *verdicts)]
    rows += [(name, *(str(counts[name, verdict]) for verdict in verdicts)) for name in names]
    rows.append(("all", *(str(sum(counts[name, verdict] for name in names)) for verdict in verdicts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def failures(results: list[tuple[int, str, str, str]]) -> list[str]:
    """What was bad: each kind once, with how often and the first file."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for index, name, verdict, place in sorted(results):
        if verdict in BAD:
            kinds.setdefault((verdict, place or name), []).append(index)
    return [
        f"{verdict} {place}: {len(indices)} times, first file {indices[0]}"
        for (verdict, place), indices in kinds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="part of a base's name")
    parser.add_argument("--file", type=int, default=None, help="read one, in this process")
    parser.add_argument("--keep", type=Path, default=None, help="where to leave that one")
    given = parser.parse_args()
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    if given.file is not None:
        found = {name: base for name, base in bases().items() if given.only in name}
        name, image = file_of(seed, given.file, found)
        path = given.keep or Path(tempfile.mkdtemp()) / f"file{found[name].suffix}"
        path.write_bytes(image)
        print(name, path)
        read(path, found[name].suffix)
        return
    began = time.monotonic()
    results = attack(given.files, seed, given.processes, given.only)
    print(f"{len(results):,} files of seed {seed} in {time.monotonic() - began:.0f} s")
    print(table(results))
    print(*failures(results), sep="\n")
    sys.exit(any(verdict in BAD for _, _, verdict, _ in results))


if __name__ == "__main__":
    main()
