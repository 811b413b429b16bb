"""Scripts that a test has several ranks run, which never outlive it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SECONDS = 60.0
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "MPI_LOCAL", "MLPGPU_RANK")  # begin their variables
SESSIONS = tempfile.TemporaryDirectory(prefix="sessions")  # it goes with this process


@dataclass(frozen=True)
class Done:
    """What became of a command: its exit code, what it printed on both streams, and how long it took."""

    code: int
    output: str
    errors: str
    seconds: float


def clean_environ(**variables: str) -> dict[str, str]:
    """This process's environment, without what a launcher has set, and with the package's sources in front.

    Open MPI keeps a session in a folder named by the number of mpirun's process.  One that was killed leaves it, and a
    later mpirun with the same number would not start: so each command has a folder for it of its own.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    session = {"PRTE_MCA_prte_tmpdir_base": tempfile.mkdtemp(dir=SESSIONS.name)}
    packages = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **session, **packages, **variables}


def mpirun() -> list[str]:
    """The mpirun of this environment, with what it needs to run here."""
    command = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "--bind-to", "none"]
    return command + ["--allow-run-as-root"] * (os.geteuid() == 0)


def our_lines(printed: str) -> list[str]:
    """The package's lines of what ranks printed, but for those that loops are compiled.

    Open MPI writes a line of its own in pieces, so that one of ours may begin in the middle of it.
    """
    return [line for line in re.findall("mlpgpu: .*", printed) if not line.startswith("mlpgpu: compiling ")]


def write_script(folder: Path, script: str) -> str:
    """The path of a script in ``folder``, whose lines are indented in the test."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    return str(path)


def run_ranks(folder: Path, ranks: int, script: str, *options: str, seconds: float = SECONDS, **variables: str) -> Done:
    """Have ``ranks`` ranks run a script under mpirun with ``options``; fails if they take longer than ``seconds``."""
    command = [*mpirun(), *options, "-n", str(ranks), sys.executable, write_script(folder, script)]
    return run(command, seconds=seconds, **variables)


def run(command: list[str], *, seconds: float = SECONDS, **variables: str) -> Done:
    """Run a command; one that takes longer is killed with all that it started, and the test fails.

    So it is if the test is terminated meanwhile, as by ``timeout``.
    """
    started, before = time.monotonic(), signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        env=clean_environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        output, errors = process.communicate()
        raise AssertionError(f"{command} took longer than {seconds} s and printed\n{output}\n{errors}") from None
    except BaseException:
        kill(process)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return Done(process.returncode, output, errors, time.monotonic() - started)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with its group and all that it started, which mpirun gives groups of their own."""
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for child in below:
        if child.is_running():
            child.kill()
