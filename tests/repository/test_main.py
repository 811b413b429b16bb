"""``python -m mlpgpu``: info and explain, and errors on one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu.__main__ import main
from mlpgpu.backends.cuda.runtime import compiler, machine
from mlpgpu.errors import BackendError
from mlpgpu.plan import on_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def network() -> mg.Network:
    return mg.Network([mg.Standardize(3), mg.Dense(3, 5, activation="gelu"), mg.Dropout(0.5), mg.Dense(5, 2)], seed=1)


@pytest.fixture
def run_file(network: mg.Network, tmp_path: Path) -> tuple[Path, mg.Trainer]:
    adam = mg.Adam(0.01, clip_norm=1.0)
    trainer = mg.Trainer(network, "softmax_cross_entropy", adam, batch_size=4, streams=2, backend="cpu")
    x = np.random.default_rng(1).normal(size=(10, 3))
    trainer.fit(mg.Dataset(x, x[:, 0] > 0), epochs=2, progress=False)
    trainer.save(tmp_path / "run.h5")
    return tmp_path / "run.h5", trainer


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """No card, whatever this machine has, and what every attempt to use one says."""

    def refuse() -> int:
        raise BackendError("CUDA", expected="an NVIDIA GPU", got="none", hint="CUDA_VISIBLE_DEVICES may hide it")

    monkeypatch.setattr(machine, "count_devices", refuse)
    return "CUDA: expected an NVIDIA GPU, got none (CUDA_VISIBLE_DEVICES may hide it)"


def test_info_names_versions_and_says_why_there_is_no_gpu(
    no_gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_search_nvcc", lambda: None)
    assert main(["info"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["mlpgpu"] == mg.__version__
    assert lines["NumPy"] == np.__version__
    assert lines["h5py"].startswith(h5py.__version__)
    assert lines["Python"].startswith(sys.version.split()[0])
    assert lines["backends"] == "cpu, cuda; auto means cpu"
    assert lines["GPU"] == no_gpu
    assert lines["nvcc"].startswith("nvcc: expected CUDA's compiler on the PATH")
    assert lines["kernel cache"] == str(tmp_path / "cubin")
    assert set(lines) == {
        *("mlpgpu", "Python", "NumPy", "h5py", "BLAS", "loops", "cores", "GPU", "nvcc", "kernel cache", "backends")
    }


def test_info_says_which_processor_blas_computes_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blas = {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "num_threads": 2}
    for found, variable, expected in (
        ({**blas, "architecture": "SkylakeX"}, "", "openblas 0.3 for SkylakeX, up to 2 threads"),
        (
            {**blas, "architecture": "Haswell"},
            "Haswell",
            "openblas 0.3 for Haswell by OPENBLAS_CORETYPE=Haswell, up to 2 threads",
        ),
        ({**blas, "architecture": None}, "Haswell", "openblas 0.3, up to 2 threads"),
    ):
        monkeypatch.setattr("mlpgpu.__main__.threadpool_info", lambda found=found: [found])
        monkeypatch.setenv("OPENBLAS_CORETYPE", variable)
        assert main(["info"]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("BLAS"))
        assert line.removeprefix("BLAS").strip() == expected


def test_info_says_which_nvcc(
    no_gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setattr(compiler, "_search_nvcc", lambda: nvcc)
    assert main(["info"]) == 0
    printed = capsys.readouterr()
    assert f"nvcc          13.0.88 in {tmp_path}\n" in printed.out
    assert printed.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"mlpgpu {mg.__version__}\n"


def test_explain_prints_the_plan_of_a_prediction(
    network: mg.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network.save(tmp_path / "network.h5")
    assert main(["explain", str(tmp_path / "network.h5"), "--batch-size", "7", "--backend", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert str(network) in printed
    assert str(network.lower(capacity=7)) in printed
    assert "here: backend cpu" in printed


def test_explain_prints_the_plan_of_a_step_on_a_loss(
    network: mg.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network.save(tmp_path / "network.h5")
    assert main(["explain", str(tmp_path / "network.h5"), "--loss", "huber", "--backend", "cpu"]) == 0
    assert str(network.lower(capacity=32, loss="huber", optimizer=mg.SGD(0.1))) in capsys.readouterr().out


def test_explain_falls_back_to_the_cpu(
    no_gpu: str, network: mg.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network.save(tmp_path / "network.h5")
    assert main(["explain", str(tmp_path / "network.h5")]) == 0
    assert "here: backend cpu" in capsys.readouterr().out


def test_explain_names_the_kernels_of_a_card_that_is_not_here(
    network: mg.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network.save(tmp_path / "network.h5")
    asked = ["explain", str(tmp_path / "network.h5"), "--card", "H200"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "on H200, paths of an evaluation" in printed
    assert "a prediction of 1 row: one launch for up to 32 rows" in printed
    assert main([*asked, "--loss", "huber"]) == 0
    printed = capsys.readouterr().out
    assert "on H200, trains inside one kernel" in printed and "paths of a training step" in printed
    assert "a prediction of 100,000 rows: " in printed


def test_explain_prints_the_plan_of_a_run(
    run_file: tuple[Path, mg.Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    path, trainer = run_file
    assert main(["explain", str(path)]) == 0
    printed = capsys.readouterr().out
    assert str(trainer.plan) in printed
    assert "norm" in str(trainer.plan) and "in 2 shards" in str(trainer.plan)
    assert "run: 2 epochs, 6 steps, loss softmax_cross_entropy, Adam(" in printed


def test_explain_tells_what_ranks_would_exchange(
    run_file: tuple[Path, mg.Trainer], network: mg.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, trainer = run_file
    assert main(["explain", str(path), "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert str(on_ranks(trainer.plan, 2)).partition("\n")[2] in printed
    assert "parallel='auto': rank 0 of 2 trains for all: by counts a step takes one " in printed
    assert "in 2 shards on 2 ranks" in printed and "gather partials" in printed and "hides behind" in printed
    network.save(tmp_path / "network.h5")
    asked = ["explain", str(tmp_path / "network.h5"), "--ranks", "3", "--backend", "cpu"]
    assert main([*asked, "--loss", "huber"]) == 0
    printed = capsys.readouterr().out
    plan = network.lower(capacity=32, loss="huber", optimizer=mg.SGD(0.1), shards=3, ranks=3)
    assert str(plan).partition("\n")[2] in printed
    assert "parallel='auto': rank 0 of 3 trains for all: " in printed
    assert main(asked) == 0  # a prediction exchanges nothing
    assert "hides behind" not in capsys.readouterr().out


def test_explain_tells_which_parts_ranks_would_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wide network, which they would split; and of a run in parts, which are as many as it has."""
    monkeypatch.setattr("mlpgpu.backends.cpu.backend.available_cores", lambda: 2)
    wide = mg.Network([mg.Dense(1024, 1024, "relu"), mg.Dense(1024, 1024, "relu"), mg.Dense(1024, 10)])
    wide.save(tmp_path / "wide.h5")
    asked = ["explain", "--backend", "cpu", "--ranks", "2"]
    assert main([*asked, str(tmp_path / "wide.h5"), "--loss", "softmax_cross_entropy", "--batch-size", "16"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks train together, each a part of the network: by counts" in printed and "sum parts" in printed
    trainer = mg.Trainer(wide, "softmax_cross_entropy", parallel="tensor", parts=4, backend="cpu")
    trainer.save(tmp_path / "run.h5")
    assert main([*asked, str(tmp_path / "run.h5")]) == 0
    assert "part 0 to 1 of 4 on rank 0 of 2" in capsys.readouterr().out
    assert main([*asked[:-1], "5", str(tmp_path / "run.h5")]) == 2
    assert "--ranks: expected at most 4, the number of parts, got 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.h5"], 1, "file missing.h5: expected a readable file, got No such file or directory"),
        (["text.h5"], 1, "file text.h5: expected an undamaged HDF5 file"),
        (["network.h5", "--batch-size", "0"], 2, "--batch-size: expected a whole number of at least 1, got 0"),
        (["network.h5", "--loss", "softmax"], 2, "did you mean 'softmax_cross_entropy'?"),
        (["run.h5", "--batch-size", "4"], 2, "expected no --batch-size and no --loss for a run"),
        (["network.h5", "--backend", "cud"], 2, "did you mean 'cuda'?"),
        (["network.h5", "--backend", "cuda"], 1, "CUDA: expected an NVIDIA GPU, got none"),
        (["run.h5", "--backend", "cuda:1"], 1, "CUDA: expected an NVIDIA GPU, got none"),
        (["network.h5", "--ranks", "0"], 2, "--ranks: expected a whole number of at least 1, got 0"),
        (["network.h5", "--timeline"], 2, "--timeline: expected the cuda backend, got cpu"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    arguments: list[str],
    code: int,
    message: str,
    no_gpu: str,
    run_file: tuple[Path, mg.Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file[1].network.save("network.h5")
    Path("text.h5").write_text("no HDF5\n", encoding="utf-8")
    assert main(["explain", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    *told, error = printed.err.splitlines()
    assert error.startswith("mlpgpu: ") and message in error
    assert all(line == f"mlpgpu: computing on the CPU; {no_gpu}" for line in told)


def test_a_command_is_needed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-m", "mlpgpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "{info,bench,explain,train,predict,evaluate,export,launch}" in done.stderr and "Traceback" not in done.stderr
