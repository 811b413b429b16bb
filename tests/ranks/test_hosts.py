"""Ranks on several hosts, which are namespaces of this machine: what they train, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hosts import Host, Switch, in_place_of_ssh
from launched import Done, clean_environ, kill, mpirun, our_lines, run, run_ranks, write_script

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ranks")]  # which would take each other's cores

BEGINNING = 60.0  # within which ranks have begun
SECONDS = 10.0  # within which they end
MOST_SECONDS = 60.0  # and begin before, on a loaded machine
LIMIT = 6  # seconds of MLPGPU_RANKS_TIMEOUT
# What mpirun hands on to other hosts, so that no rank compiles loops while others wait for it, and all have one BLAS.
HANDED_ON = "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "MLPGPU_CACHE"
# What Open MPI 5.0 says where it fails to start a job, now and then on a machine that has more to do than cores.
NOT_STARTED, TRIES = "PRTE ERROR", 3
# As srun: mpirun leaves the other ranks alone when one ends, so that they are seen to end by themselves.
ALONE = "--enable-recovery"

TRAINING = """
    import os, time, zlib
    import numpy as np
    import mlpgpu as mg

    me, n = mg.rank(), mg.ranks()
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((60, 6)), draw.integers(0, 3, 60)
    def trainer(parallel, **options):
        network = mg.Network([mg.Dense(6, 130, "tanh"), mg.Dense(130, 130, "relu"), mg.Dense(130, 3)], seed=2)
        options = {"backend": "cpu", "batch_size": 16, "parallel": parallel, **options}
        return mg.Trainer(network, "softmax_cross_entropy", mg.Adam(0.01), **options)
    def fit(t, epochs, *callbacks):
        t.fit((x, y), epochs, validation=0.2, callbacks=[mg.Checkpoint("run.h5"), *callbacks], progress=False)
"""
# For a fit that lasts.  Each rank writes down its process, and what it says to a file: mpirun cannot tell it of a host
# that it does not reach.
LASTING = """
    from mlpgpu.ranks import communicator
    communicator()
    os.dup2(os.open(f"said{me}", os.O_WRONLY | os.O_CREAT), 2)
    with open(f"pid{me}", "w") as stream:
        stream.write(str(os.getpid()))
    class Slowly(mg.Callback):
        every_steps = 1
        def step_end(self, trainer):
            time.sleep(0.01)
        def epoch_end(self, trainer, record):
            if record["epoch"] == 2:  # so that a checkpoint has been written
                open("begun", "w").close()
"""


@contextmanager
def joined(*names: str) -> Iterator[tuple[list[Host], Switch]]:
    """Hosts of these names, and the switch that joins them."""
    if not sys.platform.startswith("linux"):
        pytest.skip("hosts are namespaces of Linux")
    with ExitStack() as opened:
        try:
            switch = opened.enter_context(closing(Switch()))
            hosts = [opened.enter_context(closing(Host(name))) for name in names]
            for number, host in enumerate(hosts):
                host.connect("eth0", f"10.77.0.{number + 1}", switch)
        except OSError as error:
            pytest.skip(f"this system, or this user, makes no hosts of namespaces: {error}")
        yield hosts, switch


def command(hosts: list[Host], folder: Path, script: str, *options: str, ranks: tuple[int, ...] = ()) -> list[str]:
    """A script's ranks, one on each host or as many as said, whose mpirun is typed on the first host."""
    counts = ranks or (1,) * len(hosts)
    slots = ",".join(f"{host.name}:{count}" for host, count in zip(hosts, counts, strict=True))
    variables = [word for name in HANDED_ON if name in clean_environ() for word in ("-x", name)]
    start = [*mpirun(), "--prtemca", "plm_ssh_agent", in_place_of_ssh(*hosts), *variables, *options]
    script = f"import os; os.chdir({str(folder)!r})\n{dedent(script)}"
    return hosts[0].command(
        *start, "--host", slots, "-n", str(sum(counts)), sys.executable, write_script(folder, script)
    )


def run_on(
    hosts: list[Host], folder: Path, script: str, *options: str, ranks: tuple[int, ...] = (), **env: str
) -> Done:
    """Run a script's ranks on hosts to their end."""
    for _ in range(TRIES):
        done = run(command(hosts, folder, script, *options, ranks=ranks), **env)
        if NOT_STARTED not in done.errors:
            break
    return done


@contextmanager
def lasting(
    hosts: list[Host], folder: Path, fits: str, *options: str, limit: int = LIMIT
) -> Iterator[tuple[list[int], subprocess.Popen[str]]]:
    """Ranks in the middle of a fit that lasts: the process of each, and of mpirun."""
    words = command(hosts, folder, dedent(TRAINING + LASTING) + dedent(fits), *options)
    environ = clean_environ(MLPGPU_RANKS_TIMEOUT=str(limit))

    def start() -> subprocess.Popen[str]:
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(words, env=environ, start_new_session=True, **streams)

    process, tries = start(), 1
    assert process.stdout is not None
    try:
        started = time.monotonic()
        while not (folder / "begun").exists():
            if process.poll() is not None:
                printed = process.stdout.read()
                assert NOT_STARTED in printed and tries < TRIES, f"mpirun ended with {process.returncode}: {printed}"
                process.stdout.close()
                process, tries = start(), tries + 1
                assert process.stdout is not None
            assert time.monotonic() - started < BEGINNING, "no rank began to train"
            time.sleep(0.01)
        yield [int((folder / f"pid{rank}").read_text()) for rank in range(len(hosts))], process
    finally:
        if process.poll() is None:
            kill(process)
        process.wait()
        process.stdout.close()


def said(folder: Path, ranks: int) -> list[str]:
    """Our lines of each rank."""
    return ["\n".join(our_lines((folder / f"said{rank}").read_text())) for rank in range(ranks)]


def wait_for_ends(pids: list[int], seconds: float) -> float:
    """Wait until none of the processes is there; the seconds that it took."""
    started = time.monotonic()
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() - started < seconds, f"ranks that go on: {left}"
        time.sleep(0.02)
    return time.monotonic() - started


def test_several_hosts_end_with_the_bits_of_one_rank(tmp_path: Path) -> None:
    """By shards, by parts, and as ``"auto"`` chooses, which has all ranks train where there are several hosts."""
    script = """
    from mlpgpu.ranks import local_rank, on_one_host
    import platform
    print(f"{me} of {n} is {local_rank()} on {platform.node()}, one host: {on_one_host()}", flush=True)
    for parallel, options in (("data", {"streams": 2}), ("auto", {"streams": 2}), ("tensor", {"parts": 3})):
        t = trainer(parallel, **options)
        fit(t, 2)
        if parallel == "auto" and n > 1:
            assert (t.plan.choice.way == "data") == (not on_one_host()), t.plan.choice
        told = [t.history[name] for name in ("loss", "validation_loss")]
        print(parallel, zlib.crc32(t.network.flat_parameters()), told, flush=True)
    """
    script = dedent(TRAINING + script)
    ends = []
    with joined("alpha", "beta") as (hosts, _):
        for number, ranks in enumerate([1, 2, (1, 1), (2, 1)]):
            folder = tmp_path / str(number)
            folder.mkdir()
            if isinstance(ranks, int):
                done = run_ranks(folder, ranks, f"import os; os.chdir({str(folder)!r})\n{script}")
            else:
                done = run_on(hosts, folder, script, ranks=ranks)
            assert done.code == 0, done.errors
            places, lines = (
                sorted(line for line in done.output.splitlines() if (" is " in line) == is_place)
                for is_place in (True, False)
            )
            ends.append(set(lines))
    assert places == [
        f"{rank} of 3 is {local} on {host}, one host: False"
        for rank, local, host in ((0, 0, "alpha"), (1, 1, "alpha"), (2, 0, "beta"))
    ]
    assert len(ends[0]) == 3 and ends == ends[:1] * 4


def test_hosts_of_one_name_and_addresses_that_both_have(tmp_path: Path) -> None:
    """As of clusters whose machines are all called localhost, with the same bridge to containers on each.

    The limit is rank 0's, whose variable mpirun does not hand on.
    """
    script = """
    from mlpgpu.ranks import communicator
    import platform
    c = communicator()
    c.barrier()
    print(platform.node(), c._watch._is_on, c._seconds, "MLPGPU_RANKS_TIMEOUT" in os.environ, flush=True)
    """
    with joined("node", "node") as (hosts, _), closing(Switch()) as one, closing(Switch()) as other:
        for number, (host, containers) in enumerate(zip(hosts, (one, other), strict=True)):
            host.connect("bridge0", "10.78.0.1", containers)
            host.name = f"10.77.0.{number + 1}"  # to mpirun
        # Open MPI itself would wait for the other host at the bridge's address.
        network = "--mca", "btl_tcp_if_include", "10.77.0.0/24"
        done = run_on(hosts, tmp_path, script, *network, MLPGPU_RANKS_TIMEOUT="77")
    assert done.code == 0, done.errors
    assert sorted(done.output.splitlines()) == ["node True 77.0 False", "node True 77.0 True"]
    assert our_lines(done.errors) == []


def test_ranks_that_cannot_reach_rank_0_are_named(tmp_path: Path) -> None:
    script = """
    import os
    from mlpgpu.ranks import communicator, rank, watch
    watch.psutil.net_if_addrs, watch.CONNECT_SECONDS = dict, 1.0
    communicator().barrier()
    """
    with joined("alpha", "beta") as (hosts, _):
        done = run_on(hosts, tmp_path, script, MLPGPU_RANKS_TIMEOUT="77")
    assert done.code == 0, done.errors
    line = "mlpgpu: rank 1 cannot reach rank 0: that a rank was killed is seen after 77 s alone"
    assert our_lines(done.errors) == [line]


@pytest.mark.parametrize("late", [0.0, 0.5], ids=["", "seen by MPI first"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_those_on_other_hosts_and_its_checkpoint_stands(
    killed: int, late: float, tmp_path: Path
) -> None:
    fits = f"""
    from mlpgpu.ranks.watch import Watch
    lose = Watch._lose
    Watch._lose = lambda *lost: (time.sleep({late}), lose(*lost))
    fit(trainer("auto"), 10**6, Slowly())
    """
    with joined("alpha", "beta") as (hosts, _), lasting(hosts, tmp_path, fits, ALONE) as (pids, mpirun):
        os.kill(pids[killed], signal.SIGKILL)
        wait_for_ends(pids, SECONDS)
        mpirun.wait(SECONDS)
    line = f"mlpgpu: rank {1 - killed} of 2 ends: rank {killed} was killed or crashed"
    assert said(tmp_path, 2)[1 - killed] == line
    goes_on = 't = mg.Trainer.resume("run.h5"); fit(t, t.epochs + 1); print(t.streams)'
    done = run_ranks(tmp_path, 1, f"import os; os.chdir({str(tmp_path)!r})\n{dedent(TRAINING)}{goes_on}")
    assert (done.code, done.output) == (0, "2\n"), done.errors


@pytest.mark.parametrize("is_long", [False, True], ids=["in steps", "in a callback"])
def test_a_host_that_falls_silent_ends_the_ranks_on_all_hosts(is_long: bool, tmp_path: Path) -> None:
    """Also while rank 0 runs a callback, for which the others wait without a time limit."""
    fits = f"""
    class Long(mg.Callback):
        def epoch_end(self, trainer, record):
            time.sleep(60 if {is_long} and record["epoch"] == 2 else 0)
    fit(trainer("data"), 10**6, Slowly(), Long())
    """
    with joined("alpha", "beta", "gamma") as (hosts, switch), lasting(hosts, tmp_path, fits) as (pids, _):
        switch.unplug(hosts[1])
        wait_for_ends(pids, LIMIT + SECONDS)
    silent = "mlpgpu: rank {} of 3 ends: rank {} cannot be reached any longer"
    lines = said(tmp_path, 3)
    assert lines[1] == silent.format(1, 0)
    late = f"mlpgpu.errors.RankError: .*: expected rank 1 within {LIMIT} s, got nothing of them"
    if is_long or not re.search(late, lines[0]):  # in steps the time limit may be over first
        assert lines[::2] == [silent.format(0, 1), silent.format(2, 1)]
    assert (tmp_path / "run.h5").exists()


def test_a_short_silence_changes_nothing(tmp_path: Path) -> None:
    fits = """
    t = trainer("data")
    fit(t, 90, Slowly())
    with open(f"end{me}", "w") as stream:
        print(t.epochs, file=stream)
    """
    with joined("alpha", "beta") as (hosts, switch), lasting(hosts, tmp_path, fits, limit=20) as (_, mpirun):
        switch.unplug(hosts[1])
        time.sleep(1.0)
        assert not (tmp_path / "end0").exists()
        switch.plug(hosts[1])
        assert mpirun.wait(30) == 0
    assert [(tmp_path / f"end{rank}").read_text() for rank in range(2)] == ["90\n"] * 2


def test_a_file_on_a_disk_that_rank_0_alone_sees_is_an_error_that_says_so(tmp_path: Path) -> None:
    script = """
    fit(trainer("data"), 2)
    print(me, os.path.exists("run.h5"), flush=True)
    mg.Trainer.resume("run.h5")
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    script = dedent(TRAINING + script).replace("run.h5", f"{disk}/run.h5")
    with joined("alpha", "beta") as (hosts, _):
        hosts[0].mount(disk)
        done = run_on(hosts, tmp_path, script)
    assert done.code == 1
    assert sorted(done.output.splitlines()) == ["0 True", "1 False"]
    message = f"file {disk}/run.h5 on rank 1 of 2, host beta: expected a readable file, got No such file or directory"
    assert message in done.errors
    assert done.seconds < MOST_SECONDS


def test_a_host_ends_with_all_that_runs_in_it() -> None:
    with joined("alpha") as (hosts, _):
        started = subprocess.Popen(hosts[0].command("sleep", "60"))
        time.sleep(0.3)  # it goes in
        assert started.poll() is None
        hosts[0].close()
        assert started.wait(SECONDS) == -signal.SIGKILL
