"""PyCUDA built without a CUDA toolkit: what its setup is told, and what is said where it cannot be built."""

from __future__ import annotations

import ctypes
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mlpgpu.backends.cuda import build_pycuda
from mlpgpu.errors import BackendError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is built so on Linux")


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that has CUDA's headers, as far as a file of that name goes."""
    folder = tmp_path / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda.h"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return folder


def test_its_setup_is_told_of_the_headers_and_of_a_driver(
    headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: dict[str, Any] = {}

    def pip(command: str, *arguments: str) -> None:
        if command == "download":
            assert arguments[-1] == build_pycuda.requirement()
            sources = tmp_path / "pycuda-1.2"
            sources.mkdir()
            with tarfile.open(Path(arguments[arguments.index("--dest") + 1], "pycuda-1.2.tar.gz"), "w:gz") as archive:
                archive.add(sources, sources.name)
        else:
            (folder,) = arguments
            exec((Path(folder) / "siteconf.py").read_text(), told)
            (place,) = told["CUDADRV_LIB_DIR"]
            driver = Path(place, "libcuda.so")
            ctypes.CDLL(str(driver))
            assert b"libcuda.so.1\0" in driver.read_bytes()  # what the real one is found by

    monkeypatch.setattr(build_pycuda, "_pip", pip)
    build_pycuda.build()
    assert told["CUDA_ROOT"] == str(headers) and told["CUDA_INC_DIR"] == [str(headers / "include")]
    assert not told["CUDA_ENABLE_CURAND"] and told["CUDART_LIBNAME"] == [] and "-lcuda" in told["LDFLAGS"]
    assert not Path(told["CUDADRV_LIB_DIR"][0]).exists()  # nothing is left behind


def test_the_version_is_that_of_the_extra() -> None:
    text = (Path(__file__).parents[2] / "setup.cfg").read_text(encoding="utf-8")
    assert f"\n    {build_pycuda.requirement()}\n" in text


def test_a_compiler_is_needed(headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"apt install g\+\+"):
        build_pycuda.build()


def test_headers_of_python_are_needed(headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(BackendError, match="python3-dev"):
        build_pycuda.build()


def test_other_systems_are_told_of_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BackendError, match="CUDA toolkit"):
        build_pycuda.build()


def test_what_a_failing_build_says_is_shown(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_pycuda, "requirement", lambda: "pycuda @ file:///nowhere/pycuda.tar.gz")
    with pytest.raises(BackendError, match="nowhere"):
        build_pycuda.build()


def test_the_shell_shows_an_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="build_pycuda: PyCUDA"):
        build_pycuda.main()
