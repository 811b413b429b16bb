"""Which of several ranks this process was started as, by the variables that launchers set.

A process inherits its parent's environment, so the variables alone do not make a rank:

- Slurm sets the variables of a *step* only where ``srun`` started the process; ``SLURM_NTASKS`` is also in the shell of
  ``salloc`` and in the script of ``sbatch``.
- MPICH's Hydra opens a socket to each rank and names it in ``PMI_FD``; in most children of a rank it is closed.
- Otherwise the first process that asks is the rank.  It writes down in its own environment which process it is
  (``MLPGPU_RANK_PROCESS``), so that its children, which inherit that too, know that they are none.  Likewise a process
  is none if one between it and the launcher has loaded MPI, or if multiprocessing started it.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigurationError

# ``python -m mlpgpu launch`` passes Ctrl-C on as this signal, which every mpirun hands to the ranks: for Ctrl-C itself
# that of Open MPI would kill them.
INTERRUPT: signal.Signals | None = getattr(signal, "SIGUSR1", None)
INTERRUPT_VARIABLE = "MLPGPU_INTERRUPT_SIGNAL"
MARK = "MLPGPU_RANK_PROCESS"
DAEMONS = ("prterun", "prted", "mpirun", "mpiexec", "orted", "hydra", "slurmstepd", "torchrun")  # begin their names
MOST_ANCESTORS = 64


class Launcher(NamedTuple):
    """The variables of one kind of launcher.

    Attributes:
        name: of it, for messages.
        rank, size: the variables of a process's number, from 0, and of how many there are.
        local: those of its number among the ones of its host, the first that is set.
        identity: those that together differ from job to job and from rank to rank.
        hint: what starts ranks with MPI, where this launcher may do so without it.
        together: the variable of how many there are on its host; None where it has none.
    """

    name: str
    rank: str
    size: str
    local: tuple[str, ...]
    identity: tuple[str, ...]
    hint: str
    together: str | None = None


OPEN_MPI = Launcher(
    "Open MPI's mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK"),
    "is mpi4py's library that of another MPI? python -m mlpgpu launch finds the mpirun that belongs to it",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = Launcher(
    "MPICH's mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMI_JOBID", "PALS_APID", "SLURM_STEP_ID"),
    OPEN_MPI.hint,
    "MPI_LOCALNRANKS",
)
SLURM = Launcher(
    "Slurm's srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    ("SLURM_LOCALID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    "srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH; srun --mpi=list says which it has",
)
TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    ("LOCAL_RANK",),
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "RANK"),
    "torchrun starts no MPI: type python -m mlpgpu launch -n N script.py, or mpirun -n N python script.py",
    "LOCAL_WORLD_SIZE",
)


class Placement(NamedTuple):
    """Which of several ranks a process is.

    Attributes:
        rank, size: its number, from 0, and how many there are.
        local: its number among those of its host, or None where the launcher does not say.
        launcher: what started it, or None for a process that is alone.
        together: how many there are on its host, or None where the launcher does not say.
    """

    rank: int = 0
    size: int = 1
    local: int | None = 0
    launcher: Launcher | None = None
    together: int | None = None


ALONE = Placement()


def find_placement() -> Placement:
    """That of this process; a rank writes its mark into ``os.environ``.

    Raises:
        ConfigurationError: a launcher's variables contradict each other.
    """
    found = placement_of(os.environ)
    if found.launcher is None or _is_multiprocessing_child():
        return ALONE
    identity = "|".join(os.environ.get(name, "") for name in found.launcher.identity) + _socket_of_hydra(os.environ)
    mark = os.environ.get(MARK, "")
    process, _, job = mark.partition(" ")
    if job == identity and process != str(os.getpid()):
        return ALONE
    if job != identity and _an_ancestor_has_mpi():
        return ALONE
    os.environ[MARK] = f"{os.getpid()} {identity}"
    return found


def placement_of(environ: Mapping[str, str]) -> Placement:
    """What the launchers' variables say; several ranks started by torchrun inside another launcher's are torchrun's.

    Raises:
        ConfigurationError: they contradict each other.
    """
    found = [placement for launcher in (OPEN_MPI, HYDRA, SLURM) if (placement := _read(environ, launcher)) is not None]
    by_torchrun = _read(environ, TORCHRUN) if "MASTER_ADDR" in environ else None
    if by_torchrun is not None and all(placement.size != by_torchrun.size for placement in found):
        found = [by_torchrun]
    return found[0] if found and found[0].size > 1 else ALONE


def _read(environ: Mapping[str, str], launcher: Launcher) -> Placement | None:
    if launcher.rank not in environ or launcher.size not in environ:
        return None
    if launcher is SLURM and "SLURM_STEP_ID" not in environ:  # the shell of salloc, or the script of sbatch
        return None
    if launcher is HYDRA and "PMI_FD" in environ and not _is_socket(environ["PMI_FD"]):
        return None
    rank, size = (_whole(environ, name) for name in (launcher.rank, launcher.size))
    if not 0 <= rank < size:
        what = f"{launcher.rank} and {launcher.size} of {launcher.name}"
        raise ConfigurationError(what, expected="a number from 0 below the number of ranks", got=f"{rank} and {size}")
    local = next((_whole(environ, name) for name in launcher.local if name in environ), None)
    has_count = launcher.together is not None and launcher.together in environ
    together = _whole(environ, launcher.together) if has_count and launcher.together else None
    return Placement(rank, size, local, launcher, together)


def _whole(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            name, expected="a whole number, as launchers set it", got=repr(environ[name])
        ) from None


def _is_socket(descriptor: str) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except (OSError, ValueError, OverflowError):
        return False


def _socket_of_hydra(environ: Mapping[str, str]) -> str:
    """What tells the socket of one job from that of another, which may have the same number."""
    descriptor = environ.get("PMI_FD", "")
    return f"|{os.fstat(int(descriptor)).st_ino}" if _is_socket(descriptor) else ""


def _is_multiprocessing_child() -> bool:
    multiprocessing = sys.modules.get("multiprocessing.process")  # which a child of it has imported
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _an_ancestor_has_mpi() -> bool:
    """Whether a process between this one and the launcher's daemon has loaded an MPI library, where Linux tells."""
    process = os.getppid()
    for _ in range(MOST_ANCESTORS):
        try:
            folder = Path("/proc") / str(process)
            name = (folder / "comm").read_text()
            if name.startswith(DAEMONS):
                return False
            if "/libmpi" in (folder / "maps").read_text(errors="replace"):
                return True
            # The name, in brackets, may hold anything; the parent comes second after it.
            process = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
        if process <= 1:
            return False
    return False
