"""Which rank this process is, and its communicator."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigurationError, MissingPackageError, RankError
from ..locks import at_fork
from .communicator import Communicator, name_ranks
from .ends import Ends
from .launchers import ALONE, INTERRUPT, INTERRUPT_VARIABLE, find_placement
from .watch import Watch, tell

INSTALL = 'pip install "mlpgpu[mpi]", or mpi4py for an MPI that is there'
# Open MPI ends a process that looks for messages once the system has closed another's connection, whatever handler of
# errors is set.  The watch, whose connection the system closes at the same moment, then has a second to say why.
ABORT_DELAY = "OMPI_MCA_opal_abort_delay", "1"
LEAST_START_SECONDS = 30.0  # that ranks have to come to MPI, however short the time limit: interpreters start meanwhile

_placement = find_placement()
_communicator: Communicator | None = None
_is_ours = False  # whether MPI was initialized here, and not by whoever imported mpi4py before


def rank() -> int:
    """This process's number among those that train together: 0 up to :func:`ranks`, and 0 where there is one."""
    return _placement.rank


def ranks() -> int:
    """How many processes train together: those that ``mpirun``, ``srun`` or ``python -m mlpgpu launch`` started."""
    return _placement.size


def local_rank() -> int:
    """This process's number among those of its host, from 0: which of the host's cards is its own.

    Raises:
        ConfigurationError: the launcher does not say.
    """
    if _placement.local is None and _placement.launcher is not None:
        expected = f"one of {', '.join(_placement.launcher.local)} in the environment"
        raise ConfigurationError(f"rank {rank()}'s number on its host", expected=expected, got="none of them")
    return _placement.local or 0


def on_one_host() -> bool:
    """Whether all ranks are known to run on one host; every rank gets the same answer."""
    return _placement.together == ranks()


def communicator() -> Communicator | None:
    """The one communicator of this process, made by its first call, which is collective; None where there is one rank.

    Raises:
        MissingPackageError: mpi4py, or an MPI library that it could load, is not installed.
        RankError: MPI knows another number of ranks than the launcher.
    """
    global _communicator
    if _placement.launcher is None:
        return None
    if _communicator is None:
        seconds = timeout()
        mpi = _load_mpi(max(seconds, LEAST_START_SECONDS))
        world = mpi.COMM_WORLD
        if (world.rank, world.size) != (rank(), ranks()):
            expected = f"rank {rank()} of {ranks()}, as {_placement.launcher.name} says"
            got = f"rank {world.rank} of {world.size}"
            raise RankError("MPI", expected=expected, got=got, hint=_placement.launcher.hint)
        _communicator = _connect(mpi, _duplicate(world, seconds), seconds)
    return _communicator


def _duplicate(world: Any, seconds: float) -> Any:
    """A communicator of our own, so that no message of the script's is taken for one of ours."""
    comm, request = world.Idup()
    end = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > end:
            what, expected = f"the first call of rank {rank()} of {ranks()}", f"all other ranks within {seconds:g} s"
            hint = "MLPGPU_RANKS_TIMEOUT sets the limit, in seconds"
            raise RankError(what, expected=expected, got="not all of them", hint=hint)
        time.sleep(0.001)
    return comm


def _connect(mpi: Any, comm: Any, seconds: float) -> Communicator:
    """The communicator, with a watch over the ranks and what is done at their ends."""
    watch = Watch(rank(), ranks())
    made = Communicator(mpi, comm, seconds, watch)
    told = made.gather((platform.node(), seconds))
    # mpirun hands a variable to other hosts only if it is told to: all take the limit of rank 0.
    seconds = told[0][1]
    made.limit(seconds)
    # The launcher's number tells of hosts that all have one name, such as localhost.
    elsewhere = len({host for host, _ in told}) > 1 or (_placement.together or ranks()) < ranks()
    meeting = made.broadcast(watch.listen(elsewhere=elsewhere) if rank() == 0 else None)
    watch.accept(meeting) if rank() == 0 else watch.connect(meeting)
    apart = [number for number, is_connected in enumerate(made.gather(watch.is_connected)) if not is_connected]
    if not apart:
        watch.begin(seconds)
    else:
        watch.close()
        if rank() == 0:
            names = name_ranks([number for number in apart if number != 0] or list(range(1, ranks())))
            tell(f"{names} cannot reach rank 0: that a rank was killed is seen after {seconds:g} s alone")
    Ends(watch, comm.Iprobe, _finalize, comm.Abort).install()
    at_fork(after_in_child=watch.close)
    return made


def timeout() -> float:
    """Seconds that a rank waits for the others, ``MLPGPU_RANKS_TIMEOUT`` or 300.

    Raises:
        ConfigurationError: the variable has no positive number.
    """
    text = os.environ.get("MLPGPU_RANKS_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise ConfigurationError("MLPGPU_RANKS_TIMEOUT", expected="seconds, more than 0", got=repr(text))
    return seconds


def _load_mpi(seconds: float) -> Any:
    """``mpi4py.MPI``, initialized, which waits for the other ranks."""
    global _is_ours
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:  # a forked child is not to finalize MPI, as mpi4py would
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # also where mpi4py finds no library of MPI
        what, expected = f"rank {rank()} of {ranks()}", "mpi4py and an MPI library"
        raise MissingPackageError(what, expected=expected, got=str(error), hint=INSTALL) from error
    if not MPI.Is_initialized():
        os.environ.setdefault(*ABORT_DELAY)
        with _ended_after(seconds):
            MPI.Init_thread()  # which waits for the other ranks
        _is_ours = True
    return MPI


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """While MPI begins, which lets neither Python's threads run nor its handlers of signals.

    Where other ranks do not come within the time limit, the process ends with a traceback of where it waited; with
    Ctrl-C it ends at once.
    """
    is_main = threading.current_thread() is threading.main_thread()
    signals = [number for number in (signal.SIGINT, INTERRUPT) if number is not None and is_main]
    before = {number: handler for number in signals if callable(handler := signal.getsignal(number))}
    # To the descriptor, as sys.stderr may be no file.
    faulthandler.dump_traceback_later(min(seconds, threading.TIMEOUT_MAX), exit=True, file=2)
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        faulthandler.cancel_dump_traceback_later()


def _finalize() -> None:
    if _is_ours:
        sys.modules["mpi4py.MPI"].Finalize()


def _forget() -> None:
    """In a forked child, which is no rank: MPI does not survive a fork."""
    global _placement, _communicator
    if _communicator is not None:
        _communicator.forbid()
    _placement, _communicator = ALONE, None


at_fork(after_in_child=_forget)
if _placement.launcher is not None and INTERRUPT is not None and os.environ.get(INTERRUPT_VARIABLE) == INTERRUPT.name:
    with contextlib.suppress(ValueError):  # not in the main thread, which alone receives signals
        signal.signal(INTERRUPT, lambda number, frame: signal.raise_signal(signal.SIGINT))
