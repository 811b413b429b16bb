"""The wheel carries everything and works from an empty folder, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # one process makes what its tests share

ROOT = Path(__file__).parents[2]
FOLDERS = {"mlpgpu": "mlpgpu", "cuda": "mlpgpu/_cuda", "datasets": "mlpgpu/_datasets"}  # in the checkout, in the wheel

SCRIPT = """
import sys
import mlpgpu as mg

assert mg.__file__.startswith(sys.argv[1]), mg.__file__
train, test = mg.datasets.load("digits")
net = mg.Network([mg.Dense(64, 16, activation="relu"), mg.Dense(16, 10)], seed=1)
trainer = mg.Trainer(net, loss="softmax_cross_entropy", optimizer=mg.Momentum(0.1), batch_size=64)
trainer.fit(train, epochs=1, progress=False)
net.save("digits.h5")
predicted = net.predict(test.x)
assert predicted.shape == (len(test), 10)
assert (mg.load("digits.h5").predict(test.x) == predicted).all()
"""


def pip(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("mlpgpu-*-py3-none-any.whl")
    return built


@pytest.mark.parametrize("folder", FOLDERS)
def test_wheel_holds_every_file_of(folder: str, wheel: Path) -> None:
    paths = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {f"{FOLDERS[folder]}/{path.relative_to(ROOT / folder).as_posix()}" for path in paths}
    assert expected
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip("install", "--no-deps", "--target", str(target), str(wheel), cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(target)],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
