"""What becomes of the other ranks when one fails, is killed, leaves or hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import Done, run_ranks

pytestmark = pytest.mark.xdist_group("ranks")  # which would take each other's cores

MOST_SECONDS = 20.0  # 10 to end, and as many to start four interpreters on a loaded machine
# With this option mpirun leaves the other ranks alone when one ends, as srun does.
ALONE = "--enable-recovery"
BEGINNING = """
    import os, signal, sys, time
    import numpy as np
    from mlpgpu.ranks import communicator, rank, ranks

    def work(turns=10**9):
        sent, received = [np.ones(100)] * c.size, [np.ones(100) for _ in range(c.size)]
        for _ in range(turns):
            c.exchange(sent, received)

    c = communicator()  # MPI takes a second to begin on a loaded machine: time limits are set afterwards
    work(10)
"""


def run_begun(folder: Path, ranks: int, script: str, *options: str) -> Done:
    return run_ranks(folder, ranks, BEGINNING + script, *options)


def lines(done: Done, start: str) -> list[str]:
    return [line for line in done.errors.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("others", ["work()", pytest.param("time.sleep(60)", marks=pytest.mark.thorough)])
def test_an_exception_is_printed_with_its_rank_and_ends_all(others: str, tmp_path: Path) -> None:
    script = f"""
    if rank() == 2:
        raise ValueError("no such\\nthing")
    {others}
    """
    done = run_begun(tmp_path, 4, script)
    assert done.code == 1
    assert done.errors.count("Traceback") == 1, done.errors
    assert "mlpgpu: rank 2 of 4 failed:\nTraceback" in done.errors and "ValueError: no such\nthing\n" in done.errors
    for rank in (0, 1, 3):
        line = f"mlpgpu: rank {rank} of 4 ends: rank 2 failed: ValueError: no such thing"
        assert lines(done, f"mlpgpu: rank {rank} of 4") == [line], done.errors
    assert done.seconds < MOST_SECONDS


@pytest.mark.parametrize("options", [(), (ALONE,)], ids=["mpirun", "alone"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others(killed: int, options: tuple[str, ...], tmp_path: Path) -> None:
    script = f"""
    if rank() == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
    work()
    """
    done = run_begun(tmp_path, 2, script, *options)
    assert done.code != 0
    line = f"mlpgpu: rank {1 - killed} of 2 ends: rank {killed} was killed or crashed"
    assert lines(done, "mlpgpu: ") == [line], done.errors
    assert done.seconds < MOST_SECONDS


@pytest.mark.thorough
def test_without_the_launchers_help_ranks_that_fail_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    script = """
    c.barrier()
    if rank() < 2:
        raise ValueError(f"of rank {rank()}")
    time.sleep(60)
    """
    done = run_begun(tmp_path, 3, script, ALONE)
    assert done.code == 1
    assert lines(done, "mpirun") == []
    # Rank 2 sleeps on until its grace is over.
    assert done.seconds < MOST_SECONDS


def test_exit_codes_pass_and_others_that_wait_for_such_a_rank_end(tmp_path: Path) -> None:
    script = """
    if rank() == 1:
        sys.exit(3)
    work()
    """
    done = run_begun(tmp_path, 2, script)
    assert done.code == 3
    assert "expected all ranks, got rank 1 at its end with exit code 3" in done.errors
    assert lines(done, "mlpgpu: rank 1 of 2 ends: rank 0 failed: "), done.errors


@pytest.mark.thorough
def test_all_ranks_may_come_to_their_ends_in_any_order(tmp_path: Path) -> None:
    script = """
    import atexit
    atexit.register(lambda: print("ended", rank(), flush=True))
    c.barrier()
    time.sleep(0.5 * rank())
    """
    done = run_begun(tmp_path, 3, script)
    assert (done.code, done.errors) == (0, "")
    assert sorted(done.output.split()) == ["0", "1", "2", "ended", "ended", "ended"]


def test_a_rank_that_hangs_is_named_after_the_time_limit_and_all_end(tmp_path: Path) -> None:
    script = """
    c._seconds = 1.0
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    work()
    """
    done = run_begun(tmp_path, 3, script)
    assert done.code == 1
    assert "expected rank 1 within 1 s, got nothing" in done.errors
    assert "(MLPGPU_RANKS_TIMEOUT sets the limit, in seconds)" in done.errors


@pytest.mark.thorough
def test_a_rank_that_keeps_pythons_lock_ends_all_the_same(tmp_path: Path) -> None:
    """As in a call of a driver that waits for another rank's card: no thread of Python's can end it."""
    script = """
    import atexit, ctypes
    atexit.register(ctypes.PyDLL(None).sleep, 600)
    if rank() == 0:
        raise ValueError("no more")
    work()
    """
    done = run_begun(tmp_path, 2, script, ALONE)
    assert done.code == 1
    assert "ValueError: no more" in done.errors and done.seconds < MOST_SECONDS


@pytest.mark.thorough
def test_a_patient_broadcast_has_no_time_limit(tmp_path: Path) -> None:
    script = """
    c._seconds = 1.0
    if rank() == 0:
        time.sleep(3)
    print(c.broadcast(7, patient=True), flush=True)
    """
    done = run_begun(tmp_path, 2, script)
    assert (done.code, done.output, done.errors) == (0, "7\n7\n", "")


@pytest.mark.thorough
def test_a_rank_that_never_starts_mpi_is_waited_for_in_the_time_limit_alone(tmp_path: Path) -> None:
    script = """
    import time
    from mlpgpu.ranks import communicator, rank, world
    world.LEAST_START_SECONDS = 0.0
    if rank() == 1:
        time.sleep(60)
    communicator()
    """
    done = run_ranks(tmp_path, 2, script, MLPGPU_RANKS_TIMEOUT="2")
    assert done.code == 1
    assert "Timeout (0:00:02)!" in done.errors and "in _load_mpi" in done.errors


def test_ctrl_c_on_all_ranks_ends_them_quietly_once(tmp_path: Path) -> None:
    script = """
    c.barrier()
    if rank() != 2:  # the last one only hears of it
        signal.raise_signal(signal.SIGINT)
    work()
    """
    done = run_begun(tmp_path, 3, script)
    assert done.code == 130
    assert "Traceback" not in done.errors
    assert lines(done, "mlpgpu: ") == ["mlpgpu: interrupted"], done.errors


@pytest.mark.thorough
def test_a_caught_error_of_one_rank_is_its_own_business(tmp_path: Path) -> None:
    script = """
    try:
        sys.exit(1 + rank())
    except SystemExit:
        pass
    c.barrier()
    """
    done = run_begun(tmp_path, 2, script)
    assert (done.code, done.errors) == (0, "")


@pytest.mark.thorough
def test_a_call_after_one_that_was_broken_off_is_refused(tmp_path: Path) -> None:
    script = """
    from mlpgpu.errors import RankError
    c._seconds = 1.0
    if rank() == 0:
        for _ in range(2):
            try:
                c.barrier()
            except RankError as error:
                print(error, flush=True)
    time.sleep(3)
    """
    done = run_begun(tmp_path, 2, script)
    first, second = done.output.splitlines()
    assert "expected rank 1 within 1 s" in first
    assert second == "barrier of rank 0 of 2: expected calls before it that succeeded, got one that was broken off"
