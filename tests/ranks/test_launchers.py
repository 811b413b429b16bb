"""Which processes are ranks, by the variables of their launchers, and which merely inherit these."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from launched import clean_environ, run, run_ranks, write_script

from mlpgpu.errors import ConfigurationError
from mlpgpu.ranks.launchers import ALONE, placement_of

pytestmark = pytest.mark.xdist_group("ranks")  # which would take each other's cores

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environ", [OPEN_MPI, HYDRA, STEP, TORCHRUN, {**STEP, **TORCHRUN}, {**STEP, **OPEN_MPI}], ids=str
)
def test_variables_of_each_launcher_are_understood(environ: dict[str, str]) -> None:
    placement = placement_of(environ)
    assert (placement.rank, placement.size, placement.local) == (5, 8, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        JOB,  # the shell of salloc
        {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "123"},  # the script of sbatch
        # The shell that salloc starts as an interactive step.
        {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**HYDRA, "PMI_FD": "999"},  # closed, as in a child of a rank
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2"},  # a script's own
    ],
    ids=str,
)
def test_others_are_alone(environ: dict[str, str]) -> None:
    assert placement_of(environ) == ALONE


def test_a_rank_of_hydra_has_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert placement_of({**HYDRA, "PMI_FD": str(ours.fileno())}).rank == 5


def test_torchrun_inside_another_launcher_is_what_counts() -> None:
    nodes = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    placement = placement_of({**nodes, **TORCHRUN})
    assert placement.launcher is not None and placement.launcher.name == "torchrun"
    assert (placement.rank, placement.size) == (5, 8)


def test_variables_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE.*got 8 and 8"):
        placement_of({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "8"})
    with pytest.raises(ConfigurationError, match="PMI_RANK: expected a whole number, as launchers set it, got 'x'"):
        placement_of({**HYDRA, "PMI_RANK": "x"})


# One write, so that lines of children that tell at once stay whole.
WHO = "import os; from mlpgpu.ranks import rank, ranks; os.write(1, b'child %d %d\\n' % (rank(), ranks()))"


@pytest.mark.parametrize(
    "start",
    ["subprocess", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("shell", "spawn", "fork", "loky"))],
)
def test_children_of_a_rank_are_no_ranks(start: str, tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(f"def tell(_=0):\n    {WHO}\n", encoding="utf-8")
    starts = {
        "subprocess": f"subprocess.run([sys.executable, '-c', {WHO!r}], check=True)",
        "shell": f"os.system(sys.executable + ' -c \"' + {WHO!r} + '\"')",
        "spawn": "p = multiprocessing.get_context('spawn').Process(target=who.tell); p.start(); p.join()",
        "fork": "p = multiprocessing.get_context('fork').Process(target=who.tell); p.start(); p.join()",
        "loky": "joblib.Parallel(n_jobs=2)([joblib.delayed(who.tell)()] * 2)",
    }
    script = f"""
    import multiprocessing, os, subprocess, sys
    import joblib
    import who
    from mlpgpu.ranks import communicator, rank, ranks

    if __name__ == "__main__":
        c = communicator()
        assert ranks() == 2
        {starts[start]}
        c.barrier()
        assert (rank(), ranks()) == (c.rank, 2)
    """
    done = run_ranks(tmp_path, 2, script)
    assert (done.code, done.errors) == (0, "")
    assert set(done.output.split("\n")) == {"child 0 1", ""}


def test_a_forked_child_has_no_mpi_and_leaves_its_parents_alone(tmp_path: Path) -> None:
    script = """
    import os, sys
    from mlpgpu.errors import RankError
    from mlpgpu.ranks import communicator, rank

    c = communicator()
    child = os.fork()
    if child == 0:
        assert communicator() is None
        try:
            c.barrier()
        except RankError as error:
            print(error, flush=True)
        sys.exit(5)  # as a script ends: not by os._exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    c.barrier()
    """
    done = run_ranks(tmp_path, 2, script)
    assert (done.code, done.errors) == (0, "")
    expected = "barrier in a forked child of rank {}: expected the rank itself, got a child, in which MPI does not work"
    assert sorted(done.output.splitlines()) == [expected.format(0), expected.format(1)]


@pytest.mark.thorough
def test_a_child_of_a_process_that_has_mpi_is_none_and_one_of_a_wrapper_is(tmp_path: Path) -> None:
    script = f"""
    import subprocess, sys
    from mpi4py import MPI
    subprocess.run([sys.executable, "-c", {WHO!r}], check=True)
    """
    done = run_ranks(tmp_path, 2, script)
    assert done.output.splitlines() == ["child 0 1"] * 2, done.errors
    wrapper = f"""
    import subprocess, sys
    subprocess.run([sys.executable, "-c", {WHO!r}], check=True)
    """
    done = run_ranks(tmp_path, 2, wrapper)
    assert sorted(done.output.splitlines()) == ["child 0 2", "child 1 2"], done.errors


def test_a_script_may_use_mpi_itself_and_have_a_standard_error_that_is_no_file(tmp_path: Path) -> None:
    script = """
    import io, sys
    if "{first}":
        from mpi4py import MPI
    sys.stderr = io.StringIO()
    from mlpgpu.ranks import communicator
    c = communicator()
    from mpi4py import MPI
    total = MPI.COMM_WORLD.allreduce(c.rank + 1)
    received = MPI.COMM_WORLD.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)  # takes no message of ours
    assert c.gather(total) == [3, 3]
    MPI.COMM_WORLD.send("own", 1 - c.rank)
    print(received.wait(), flush=True)
    """
    for first in ("mpi4py", ""):
        done = run_ranks(tmp_path, 2, script.replace("{first}", first))
        assert (done.code, done.output, done.errors) == (0, "own\nown\n", "")


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        (STEP, "srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH"),
        (TORCHRUN, "torchrun starts no MPI: type python -m mlpgpu launch -n N script.py"),
    ],
    ids=["srun", "torchrun"],
)
def test_ranks_that_mpi_does_not_know_are_told_what_to_type(environ: dict[str, str], hint: str, tmp_path: Path) -> None:
    script = """
    from mlpgpu.errors import RankError
    from mlpgpu.ranks import communicator, local_rank, rank, ranks
    assert (rank(), ranks(), local_rank()) == (5, 8, 1)
    try:
        communicator()
    except RankError as error:
        print(error)
    """
    done = run([sys.executable, write_script(tmp_path, script)], **environ)
    assert (done.code, done.errors) == (0, "")
    assert "MPI: expected rank 5 of 8, as " in done.output and "got rank 0 of 1 (" in done.output
    assert hint in done.output


def test_nothing_of_mpi_is_imported_by_one_rank(tmp_path: Path) -> None:
    script = """
    import sys
    import mlpgpu
    from mlpgpu.ranks import communicator, local_rank
    assert (mlpgpu.rank(), mlpgpu.ranks(), local_rank(), communicator()) == (0, 1, 0, None)
    assert not any(name.startswith("mpi4py") for name in sys.modules)
    """
    assert os.environ.keys() >= {"PATH"} and "MLPGPU_RANK_PROCESS" not in clean_environ()
    done = run([sys.executable, write_script(tmp_path, script)])
    assert (done.code, done.errors) == (0, "")
    done = run_ranks(tmp_path, 1, script)
    assert (done.code, done.errors) == (0, "")
