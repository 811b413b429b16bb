"""Builds PyCUDA into this environment where there is no CUDA toolkit.

    pip install "mlpgpu[cuda-toolkit]"
    python -m mlpgpu.backends.cuda.build_pycuda
    pip install "mlpgpu[cuda]"

PyPI has PyCUDA's sources alone, whose setup takes a CUDA toolkit from the PATH.  Of a toolkit they need headers, which
PyPI's packages bring too.  They are linked with an empty library of the driver's name: the driver itself is found when
PyCUDA is imported, so that this also runs on a machine that has none.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from ...errors import BackendError
from .runtime.compiler import toolkit_folder

# What PyCUDA's setup reads: the C++ parts of Boost that it brings, and of CUDA the driver alone.
_SETTINGS = """\
USE_SHIPPED_BOOST = True
CUDA_TRACE = False
CUDA_ROOT = {toolkit!r}
CUDA_INC_DIR = [{toolkit!r} + "/include"]
CUDA_ENABLE_GL = False
CUDA_ENABLE_CURAND = False
CUDADRV_LIB_DIR = [{libraries!r}]
CUDADRV_LIBNAME = ["cuda"]
CUDART_LIB_DIR = []
CUDART_LIBNAME = []
CURAND_LIB_DIR = []
CURAND_LIBNAME = []
CXXFLAGS = ["-w"]
LDFLAGS = ["-Wl,--no-as-needed", "-L" + {libraries!r}, "-lcuda"]
"""


def requirement() -> str:
    """PyCUDA and its versions, as the extra ``cuda`` names them."""
    needed = importlib.metadata.requires("mlpgpu") or []
    return next(name.partition(";")[0].strip() for name in needed if re.match(r"pycuda\b", name))


def build() -> None:
    """Install PyCUDA, built with the headers of :func:`toolkit_folder`.

    Raises:
        BackendError: the system is not Linux; there is no g++, no header of Python or of CUDA; or the build fails.
    """
    if sys.platform != "linux":
        hint = "install the CUDA toolkit, then: pip install pycuda"
        raise BackendError("PyCUDA", expected="Linux, to be built without a toolkit", got=sys.platform, hint=hint)
    compiler = shutil.which("g++")
    if compiler is None:
        hint = "on Debian and Ubuntu: apt install g++"
        raise BackendError("PyCUDA", expected="g++ on the PATH, to be built with", got="none", hint=hint)
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        hint = "on Debian and Ubuntu: apt install python3-dev"
        got = f"none in {sysconfig.get_path('include')}"
        raise BackendError("PyCUDA", expected="Python.h, to be built with", got=got, hint=hint)
    toolkit = toolkit_folder()
    with tempfile.TemporaryDirectory(prefix="mlpgpu-pycuda-") as name:
        folder = Path(name)
        libraries = folder / "libraries"
        libraries.mkdir()
        empty = ["-shared", "-x", "c++", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(libraries / "libcuda.so")]
        _run(compiler, *empty)
        _pip("download", "--no-deps", "--no-binary", "pycuda", "--dest", str(folder), requirement())
        (archive,) = folder.glob("pycuda-*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(folder, filter="data")
        tree = folder / archive.name.removesuffix(".tar.gz")
        (tree / "siteconf.py").write_text(_SETTINGS.format(toolkit=str(toolkit), libraries=str(libraries)))
        _pip("install", str(tree))


def _pip(*arguments: str) -> None:
    _run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        got = f"status {done.returncode} of {' '.join(command)}:\n{done.stdout}"
        raise BackendError("PyCUDA", expected="a build that succeeds", got=got)


def main() -> None:
    try:
        build()
    except BackendError as error:
        sys.exit(f"{Path(__file__).stem}: {error}")
    print(f"PyCUDA {importlib.metadata.version('pycuda')} is installed")


if __name__ == "__main__":
    main()
