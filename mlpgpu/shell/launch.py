"""``python -m mlpgpu launch``: a script run by several ranks on this machine, by the mpirun that is there."""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..errors import BackendError, ConfigurationError, MissingPackageError, check_integer
from ..ranks.launchers import INTERRUPT, INTERRUPT_VARIABLE
from ..ranks.world import INSTALL
from .output import Output

NAMES = ("mpirun", "mpiexec")
VERSION_SECONDS = 30.0
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
MOST_PRESSES = 2  # of Ctrl-C that go to the ranks; one more has mpirun end them
SESSIONS_VARIABLE = "PRTE_MCA_prte_tmpdir_base"  # where Open MPI 5 keeps files of a run
REMOTE_SHELLS = ("ssh", "rsh")
REMOTE_SHELL_VARIABLE = "OMPI_MCA_plm_rsh_agent"  # what Open MPI 4 starts other hosts' ranks by


def add_launch(commands: Any) -> None:
    """The command's arguments."""
    about = "run a script by several processes of this machine, which train one network"
    parser = commands.add_parser("launch", help=about, usage="%(prog)s [-h] -n N (SCRIPT | -m MODULE) [ARGUMENT ...]")
    parser.set_defaults(run=launch, quiet=False, json=False)
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many: one for each card")
    parser.add_argument(
        "-m", "--module", action="store_true", help="what follows is a module's name, as with python -m"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a file of Python, or the module's name")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the script's own")


def launch(options: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code, which is mpirun's: that of the first rank that failed.

    Raises:
        ConfigurationError: there is no such script or module, or no rank is asked for.
        MissingPackageError: there is no mpirun, or no mpi4py.
        BackendError: mpirun does not run.
    """
    ranks = check_integer("launch -n", options.ranks, least=1)
    if options.module:
        if importlib.util.find_spec(options.script.partition(".")[0]) is None:
            expected = "a module that Python finds"
            raise ConfigurationError("launch -m", expected=expected, got=repr(options.script))
        command = [sys.executable, "-m", options.script]
    else:
        if not Path(options.script).is_file():
            raise ConfigurationError("launch", expected="a script's file", got=repr(options.script))
        command = [sys.executable, options.script]
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingPackageError("launch", expected="mpi4py", got="none", hint=INSTALL)
    mpirun = find_mpirun()
    return run([mpirun, *options_of(mpirun, ranks), "-n", str(ranks), *command, *options.arguments])


def find_mpirun() -> str:
    """The path of an mpirun: that of a wheel beside the interpreter, whose library mpi4py finds first, else in PATH.

    Raises:
        MissingPackageError: there is none.
    """
    folders = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    if site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / "bin")
    for path in (os.pathsep.join(map(str, folders)), None):
        for name in NAMES:
            found = shutil.which(name, path=path)
            if found is not None:
                return found
    expected = f"{' or '.join(NAMES)} beside {sys.executable} or in PATH"
    raise MissingPackageError("launch", expected=expected, got="none", hint=INSTALL)


def options_of(mpirun: str, ranks: int) -> list[str]:
    """What an mpirun has to be told to start so many ranks here.

    Raises:
        BackendError: it does not run.
    """
    try:
        asked = [mpirun, "--version"]
        done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(mpirun, expected="to say its version", got=str(error)) from error
    if done.returncode != 0:
        raise BackendError(mpirun, expected="to say its version", got=f"{done.stdout} {done.stderr}")
    if "Open MPI" not in done.stdout and "OpenRTE" not in done.stdout:
        return []  # MPICH's and Intel's neither bind ranks to cores, nor refuse root or more ranks than cores
    options = ["--bind-to", "none"]  # a rank's threads would share one core
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if ranks > (psutil.cpu_count(logical=False) or 1):
        options.append("--oversubscribe")
    return options


def run(command: Sequence[str]) -> int:
    """Run mpirun and return its exit code; Ctrl-C goes to the ranks, as their own Ctrl-C, which may end a fit well.

    mpirun itself would kill them.  So it has a session of its own, where a terminal's Ctrl-C does not reach it.  Where
    this process is killed, the system terminates mpirun, which ends the ranks.

    Open MPI names the folder of a run by mpirun's process.  One that was killed leaves it, and a later mpirun with the
    same number would not start: so each has a place of its own for it.  And Open MPI 4 does not start without a remote
    shell, as in most containers, unless it is told that it has none; ranks of one machine need none.

    Raises:
        BackendError: it does not run, or there is no place for its files.
    """
    if INTERRUPT is None:
        return subprocess.run(command).returncode
    try:
        place = tempfile.TemporaryDirectory(prefix="mlpgpu-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        expected, hint = "a folder for temporary files that can be written", "TMPDIR names one"
        raise BackendError("launch", expected=expected, got=str(error), hint=hint) from error
    with place as sessions:
        ours = {SESSIONS_VARIABLE: sessions}
        if not any(map(shutil.which, REMOTE_SHELLS)):
            ours[REMOTE_SHELL_VARIABLE] = ""
        return _run(command, {**ours, **os.environ, INTERRUPT_VARIABLE: INTERRUPT.name})


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    assert INTERRUPT is not None
    try:
        started = subprocess.Popen(command, start_new_session=True, env=environ, preexec_fn=_termination_at_our_end())
    except OSError as error:
        raise BackendError(command[0], expected="a program that runs", got=str(error)) from error
    presses = 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += number == signal.SIGINT
        is_gentle = number == signal.SIGINT and presses <= MOST_PRESSES
        started.send_signal(INTERRUPT if is_gentle else signal.SIGTERM)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        code = started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _termination_at_our_end() -> Callable[[], object] | None:
    """What a process that this one starts calls at its beginning, to be terminated when this one ends, even if killed.

    None where the system cannot do so.
    """
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(signal.SIGTERM))
