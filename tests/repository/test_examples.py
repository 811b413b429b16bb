"""Every example, and the README's script, on small sizes; and the accuracy that the digits example must reach."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mlpgpu as mg

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# name -> arguments and what the output must hold
RUNS = {
    "train_digits": (["--epochs", "3"], r"test accuracy: 0\.[89]\d\d\d\nweights: runs/digits.h5"),
    "train_mnist": (["--name", "digits", "--epochs", "5"], r"test accuracy: 0\.[89]\d\d\d, trained in \d"),
    "mnist_98": (
        ["--name", "digits"],
        r" 6 epochs, peak  0\.3: validation accuracy 0\.[89]\d+\n.*ms\n.*\n(.*0\.[89]\d\d\d\n){6}",
    ),
    "regression": (["--rows", "1000", "--epochs", "30"], r"test R²: 0\.[89]"),
    "resume": (
        ["--epochs", "3", "--step", "40"],
        "resumed after step 40 of 87\nbit for bit the same: True",
    ),
    "custom_loop": (["--steps", "200"], r"step  200: mean loss [\d.]+\ntest accuracy: 0\.[89]"),
    "xor": ([], r"0 xor 0 = 0 .*\n0 xor 1 = 1 .*\n1 xor 0 = 1 .*\n1 xor 1 = 0 "),
}


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_digits_say_in_a_line_what_a_card_lacks(empty_folder: Path) -> None:
    """As ``make train-gpu`` has them where there is no driver, or no card that it shows."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLPGPU_BACKEND": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / "train_digits.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.fullmatch(r"mlpgpu: .*: expected .*, got .*\n", ended.stderr)
    assert list(empty_folder.iterdir()) == []


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_example(
    name: str, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = RUNS[name]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(expected, capsys.readouterr().out)


@pytest.mark.parametrize("name", RUNS)
def test_example_is_short_and_waits_to_be_called(name: str, empty_folder: Path) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 70
    assert callable(runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"])
    assert list(empty_folder.iterdir()) == []


def test_digits_example_leaves_weights_and_a_picture(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--epochs", "2", "--folder", "results"])
    runpy.run_path(str(EXAMPLES / "train_digits.py"), run_name="__main__")
    _, test = mg.datasets.load("digits")
    accuracy = (mg.load("results/digits.h5").labels(test) == test.y).mean()
    assert f"test accuracy: {accuracy:.4f}" in capsys.readouterr().out
    assert Path("results/digits.png").read_bytes().startswith(b"\x89PNG")


def test_digits_example_reaches_97_percent_over_five_stratified_splits() -> None:
    make_trainer = runpy.run_path(str(EXAMPLES / "train_digits.py"))["make_trainer"]
    parts = mg.datasets.load("digits")
    x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
    digits = mg.Dataset(x, y, scale=parts[0].scale)
    accuracies = []
    for seed in range(5):
        train, test = digits.split(0.2, seed=seed, stratify=True)
        trainer = make_trainer(seed, epochs=30)
        trainer.fit(train.split(0.1, seed=seed)[0], epochs=30, progress=False)
        accuracies.append(trainer.evaluate(test)["accuracy"])
    assert np.mean(accuracies) >= 0.97, accuracies


def test_readme_script(empty_folder: Path) -> None:
    scripts = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(scripts) == 1
    names: dict[str, object] = {}
    exec(compile(scripts[0], "README.md", "exec"), names)
    net, test = names["net"], names["test"]
    assert isinstance(net, mg.Network) and isinstance(test, mg.Dataset)
    assert (net.labels(test) == test.y).mean() > 0.9
