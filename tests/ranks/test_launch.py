"""``python -m mlpgpu launch``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import SECONDS, clean_environ, kill, run, write_script

from mlpgpu.__main__ import main

pytestmark = pytest.mark.xdist_group("ranks")  # which would take each other's cores

LAUNCH = [sys.executable, "-m", "mlpgpu", "launch"]
SCRIPT = """
    import sys
    from mlpgpu.ranks import communicator, rank
    print(communicator().gather((rank(), sys.argv[1:])), flush=True)
    sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize(("ranks", "code"), [(2, 0), (3, 7), (1, 4)])
def test_a_scripts_arguments_and_exit_code_pass(ranks: int, code: int, tmp_path: Path) -> None:
    script = SCRIPT.replace("communicator().gather((rank(), sys.argv[1:]))", "sys.argv[1:]") if ranks == 1 else SCRIPT
    arguments = ["-n", "--of=the script", str(code)]
    done = run([*LAUNCH, "-n", str(ranks), write_script(tmp_path, script), *arguments])
    assert done.code == code, done.errors
    expected = arguments if ranks == 1 else [(rank, arguments) for rank in range(ranks)]
    assert done.output.splitlines() == [str(expected)] * ranks


def test_nothing_is_left_of_a_run_whose_mpirun_was_killed(tmp_path: Path) -> None:
    """Its folder would keep a later mpirun from starting, as soon as that has its number."""
    script = "import pathlib, time; from mlpgpu.ranks import communicator; communicator(); "
    script += f"pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)"
    (tmp_path / "files").mkdir()
    given = {name: value for name, value in clean_environ(TMPDIR=str(tmp_path / "files")).items() if "PRTE" not in name}
    process = subprocess.Popen(
        [*LAUNCH, "-n", "2", write_script(tmp_path, script)],
        env=given,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        started = time.monotonic()
        while not (tmp_path / "begun").exists():
            assert process.poll() is None and time.monotonic() - started < SECONDS
            time.sleep(0.01)
        assert list((tmp_path / "files").rglob("*"))
        (mpirun,) = psutil.Process(process.pid).children()
        mpirun.kill()
        assert process.wait(SECONDS) != 0
        assert list((tmp_path / "files").iterdir()) == []
    finally:
        if process.poll() is None:
            kill(process)
        process.wait()


def test_no_place_for_temporary_files_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert main(["launch", "-n", "2", write_script(tmp_path, SCRIPT)]) != 0
    told = capsys.readouterr().err
    assert told.startswith("mlpgpu: launch: expected a folder for temporary files that can be written, got ")
    assert "TMPDIR" in told


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    done = run([*LAUNCH, "-n", "2", "-m", "script", "0"], PYTHONPATH=f"{clean_environ()['PYTHONPATH']}:{tmp_path}")
    assert (done.code, done.output) == (0, "[(0, ['0']), (1, ['0'])]\n" * 2), done.errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", __file__], "launch -n: expected a whole number of at least 1, got 0"),
        (["-n", "2", "no_such.py"], "launch: expected a script's file, got 'no_such.py'"),
        (["-n", "2", "-m", "no_such.module"], "launch -m: expected a module that Python finds, got 'no_such.module'"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err == f"mlpgpu: {message}\n"


def test_without_an_mpirun_the_message_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    monkeypatch.setattr("site.USER_BASE", str(tmp_path))
    assert main(["launch", "-n", "2", __file__]) == 1
    message = capsys.readouterr().err
    assert "expected mpirun or mpiexec beside" in message and 'pip install "mlpgpu[mpi]"' in message


# Tells what it was told of a remote shell.
MPIRUN = """#!/bin/sh
if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; exit; fi
echo "${OMPI_MCA_plm_rsh_agent-unset}" > "$0.told"
"""


@pytest.mark.parametrize(
    ("shell", "asked", "told"),
    [(None, None, ""), ("ssh", None, "unset"), ("rsh", None, "unset"), (None, "/opt/other", "/opt/other")],
)
def test_ranks_of_one_machine_need_no_remote_shell(
    shell: str | None, asked: str | None, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Open MPI 4 does not start in a container that has neither ssh nor rsh."""
    for name, text in {"mpirun": MPIRUN, **({shell: "#!/bin/sh\n"} if shell else {})}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OMPI_MCA_plm_rsh_agent", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", asked)
    assert main(["launch", "-n", "2", __file__]) == 0
    assert (tmp_path / "mpirun.told").read_text() == f"{told}\n"


@pytest.mark.parametrize("handled", [True, False])
def test_ctrl_c_comes_to_the_ranks_as_their_own(handled: bool, tmp_path: Path) -> None:
    script = f"""
    import signal, time
    from mlpgpu.ranks import communicator, rank
    c, ended = communicator(), []
    if {handled}:
        signal.signal(signal.SIGINT, lambda number, frame: ended.append(number))
    c.barrier()
    if rank() == 0:
        print("begun", flush=True)
    while not ended:
        time.sleep(0.01)
    c.barrier()
    print("ended well", flush=True)
    """
    process = subprocess.Popen(
        [*LAUNCH, "-n", "2", write_script(tmp_path, script)],
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            kill(process)
    if handled:
        assert (process.returncode, output, errors) == (0, "ended well\n" * 2, "")
    else:
        assert (process.returncode, output) == (130, "")
        told = [line for line in errors.splitlines() if line.startswith(("mlpgpu: ", "Traceback"))]
        assert told == ["mlpgpu: interrupted"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_ranks_end_with_the_launch_that_is_killed(tmp_path: Path) -> None:
    script = """
    import os, signal, time
    from mlpgpu.ranks import communicator, rank
    print(communicator().gather(os.getpid()), flush=True)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # in which it does not hear of SIGTERM
    time.sleep(600)
    """
    process = subprocess.Popen(
        [*LAUNCH, "-n", "2", write_script(tmp_path, script)],
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        started = [psutil.Process(pid) for pid in eval(process.stdout.readline())]
        process.kill()
        _, alive = psutil.wait_procs(started, timeout=SECONDS)
        assert not alive
    finally:
        if process.poll() is None:
            kill(process)
        for each in started:
            if each.is_running():
                each.kill()
        process.communicate()
