"""Sources in C++ and CUDA, where they lie, and the folder that keeps what is compiled of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

CACHE_VARIABLE = "MLPGPU_CACHE"

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the repository's folder `cuda` is the package `mlpgpu._cuda`.
_SOURCE_FOLDERS = (_PACKAGE / "_cuda", _PACKAGE.parent / "cuda")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def source_folder() -> Path:
    """The folder of the .cuh files, in a checkout or an installed package."""
    return next(folder for folder in _SOURCE_FOLDERS if folder.is_dir())


def native_folder() -> Path:
    """The folder of the C++ headers that several libraries for the host are made of."""
    return _PACKAGE / "backends" / "native"


def cache_folder(name: str) -> Path:
    """The folder ``name`` in ``$MLPGPU_CACHE``, or in mlpgpu's folder of the user's cache."""
    base = os.environ.get(CACHE_VARIABLE)
    if base:
        return Path(base) / name
    user = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    return Path(user or Path.home() / ".cache") / "mlpgpu" / name


def key_of(text: str, folders: Sequence[Path], command: Sequence[str]) -> str:
    """Hash of a unit's text, of all that it includes from ``folders``, and of the compiler's options."""
    digest = hashlib.sha256(json.dumps([text, list(command)]).encode())
    sources: dict[Path, bytes] = {}
    for name in _INCLUDE.findall(text):
        for folder in folders:
            _collect(folder / name, folders, sources)
    for path in sorted(sources):
        name = next(path.relative_to(folder).as_posix() for folder in folders if path.is_relative_to(folder))
        digest.update(json.dumps([name, len(sources[path])]).encode())
        digest.update(sources[path])
    return digest.hexdigest()[:32]


def _collect(path: Path, folders: Sequence[Path], sources: dict[Path, bytes]) -> None:
    # A missing file is left to the compiler, which also reports where it is included.
    if path in sources or not path.is_file():
        return
    sources[path] = path.read_bytes()
    for name in _INCLUDE.findall(sources[path].decode("utf-8")):
        for folder in (path.parent, *folders):
            _collect(folder / name, folders, sources)


def camel(name: str) -> str:
    """The struct of a row of a NumPy table: ``leaky_relu`` is ``LeakyRelu``."""
    return "".join(word.capitalize() for word in name.split("_"))
