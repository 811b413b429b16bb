"""Kernels to machine code: nvcc, run only on what the cache does not hold.

The cache is a folder of two kinds of files.  ``<sha256>.cubin`` is machine code, named by its hash.
``<name>-<arch>-<key>-<nvcc version>.json`` is a note that names a cubin, with what ptxas said of its kernels; the key
is the hash of everything that the named kernels are made of.  Kernels that were compiled together have a cubin in
common and a note each, so that a plan takes from the cache whatever another one left there of its kernels.  Notes are
written after their cubin, and each file is moved into place whole, so processes may share the folder, and a process
that is killed leaves no wrong entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ....errors import BackendError, ConfigurationError, StorageError
from ...sources import CACHE_VARIABLE, cache_folder, key_of, source_folder
from ..kernels import Entry, unit_source, units

SOURCE_PLACES = "-lineinfo"
OPTIONS = ("-std=c++17", "-O3", SOURCE_PLACES, "-Werror", "all-warnings", "-Xptxas", "-v")

_SYSTEM_FOLDERS = (
    Path("/usr/local/cuda"),
    Path("/usr"),
)  # of NVIDIA's installer and Debian's
_TOOLKIT_HINT = 'install the CUDA toolkit, or run: pip install "mlpgpu[cuda-toolkit]"'
_ARCHITECTURE = re.compile(r"sm_(\d+[af]?)")
_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel as ptxas states them: of a thread, and static shared memory of a block."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """The machine code of kernels compiled together, the version of the nvcc that made it, and they by name."""

    image: bytes
    nvcc: str
    resources: dict[str, Resources]


def cubin_folder() -> Path:
    """The folder of the cache."""
    return cache_folder("cubin")


def find_nvcc() -> Path:
    """The nvcc on the PATH, else under ``CUDA_HOME`` or ``CUDA_PATH``, else from PyPI's ``nvidia-cuda-nvcc``.

    Raises:
        BackendError: there is none.
    """
    nvcc = _search_nvcc()
    if nvcc is None:
        raise BackendError(
            "nvcc",
            expected="CUDA's compiler on the PATH, in CUDA_HOME/bin, or from PyPI's package nvidia-cuda-nvcc",
            got="none of them",
            hint=_TOOLKIT_HINT,
        )
    return nvcc


def toolkit_folder() -> Path:
    """The folder whose ``include`` has CUDA's headers: of PyPI's packages, of a toolkit, or of the system.

    Raises:
        BackendError: there is none.
    """
    nvcc = shutil.which("nvcc")
    beside = [Path(nvcc).resolve().parents[1]] if nvcc else []
    folders = [*(folder.parent for folder in _wheel_folders()), *_toolkit_homes(), *beside]
    folders += _SYSTEM_FOLDERS
    for folder in folders:
        if (folder / "include" / "cuda.h").is_file():
            return folder
    raise BackendError(
        "CUDA's headers",
        expected="cuda.h from PyPI's package nvidia-cuda-runtime, or of a CUDA toolkit",
        got=f"none in {', '.join(map(str, folders))}",
        hint=_TOOLKIT_HINT,
    )


def _search_nvcc() -> Path | None:
    folders = [
        os.environ.get("PATH", ""),
        *(str(home / "bin") for home in _toolkit_homes()),
        *map(str, _wheel_folders()),
    ]
    found = shutil.which("nvcc", path=os.pathsep.join(filter(None, folders)))
    return Path(found) if found else None


def _toolkit_homes() -> list[Path]:
    return [Path(os.environ[variable]) for variable in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(variable)]


def _wheel_folders() -> list[Path]:
    """Where PyPI's packages have programs: those of CUDA 13 in nvidia/cu13, those of CUDA 12 in nvidia/cuda_nvcc."""
    return [folder for place in sys.path if place for folder in sorted(Path(place).glob("nvidia/cu*/bin"))]


def nvcc_version(nvcc: Path) -> str:
    """The version of an nvcc, such as ``13.0.88``.

    Raises:
        BackendError: it does not run, or is no nvcc.
    """
    text = _run([str(nvcc), "--version"], what=str(nvcc))
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if match is None:
        raise BackendError(str(nvcc), expected="a version such as V13.0.88", got=repr(text.strip()))
    return match[1]


def compile_units(
    units: Mapping[str, Sequence[Entry]],
    arch: str,
    options: Sequence[str] = (),
    *,
    sources: Path | None = None,
    source_places: bool = True,
) -> dict[str, Cubin]:
    """Compile units of kernels, each as a whole, in parallel, or take them from the cache.

    nvcc is needed only for a unit that the cache does not hold.  Where there is no nvcc, code that any version of it
    made of the same sources is taken, the newest first.

    Args:
        units: the entries of each unit, as :func:`kernels.units` gives them.
        arch: what to compile for, such as ``sm_90a``.
        options: of nvcc, beside :data:`OPTIONS`.
        sources: a folder where headers are looked for before :func:`source_folder`.
        source_places: whether tools find the place of an instruction in the sources; instructions are the same without.

    Raises:
        ConfigurationError: ``arch`` is no architecture's name.
        BackendError: nvcc is needed and not there, or refuses a unit; what it prints is in the message.
        StorageError: the cache cannot be written.
    """
    compilation = _Compilation(arch, options, sources, source_places)
    stems = {name: compilation.stem(name, entries) for name, entries in units.items()}
    cubins = {name: compilation.load(stem) for name, stem in stems.items()}
    missing = [name for name, cubin in cubins.items() if cubin is None]
    made = compilation.compile([_Job(name, units[name], [stems[name]]) for name in missing])
    cubins |= dict(zip(missing, made, strict=True))
    return {name: cubin for name, cubin in cubins.items() if cubin is not None}


def compile_entries(entries: Iterable[Entry], arch: str, *, sources: Path | None = None) -> dict[Entry, Cubin]:
    """Compile kernels in parallel, or take each from the cache, whichever others it was compiled with.

    Kernels of one unit are compiled together as long as every core has something to compile, since nvcc then reads
    their headers once; :func:`split_jobs`.  A kernel computes the same in any company.

    Args:
        entries: the kernels.
        arch: what to compile for, such as ``sm_90a``.
        sources: a folder where headers are looked for before :func:`source_folder`.

    Returns:
        The machine code of each kernel; kernels that were compiled together have the same image.

    Raises:
        ConfigurationError: ``arch`` is no architecture's name.
        BackendError: nvcc is needed and not there, or refuses a kernel; what it prints is in the message.
        StorageError: the cache cannot be written.
    """
    compilation = _Compilation(arch, (), sources, source_places=True)
    stems = {entry: compilation.stem(entry.name, [entry]) for entry in entries}
    cubins = {entry: compilation.load(stem) for entry, stem in stems.items()}
    jobs = split_jobs([entry for entry, cubin in cubins.items() if cubin is None], os.cpu_count() or 1)
    made = compilation.compile([_Job(job[0].unit, job, [stems[entry] for entry in job]) for job in jobs])
    cubins |= {entry: cubin for job, cubin in zip(jobs, made, strict=True) for entry in job}
    return {entry: cubin for entry, cubin in cubins.items() if cubin is not None}


def are_compiled(entries: Iterable[Entry], arch: str, *, sources: Path | None = None) -> bool:
    """Whether the cache has the machine code of these kernels, so that :func:`compile_entries` runs no compiler."""
    compilation = _Compilation(arch, (), sources, source_places=True)
    return all(compilation.load(compilation.stem(entry.name, [entry])) for entry in entries)


def split_jobs(entries: Iterable[Entry], cores: int) -> list[list[Entry]]:
    """What to compile together: units, of which the largest is halved until there is work for every core.

    The largest come first, so that a core that ends early finds small ones left.
    """
    jobs = list(units(entries).values())
    while len(jobs) < cores and (largest := max(jobs, key=len, default=[])) and len(largest) > 1:
        jobs.remove(largest)
        half = (len(largest) + 1) // 2
        jobs += [largest[:half], largest[half:]]
    return sorted(jobs, key=len, reverse=True)


@dataclass(frozen=True)
class _Job:
    """Entries that one run of nvcc compiles, what to call them, and the names of the notes that are to be written."""

    name: str
    entries: Sequence[Entry]
    stems: Sequence[str]


class _Compilation:
    """The cache and the compiler, for one architecture and one list of options."""

    def __init__(self, arch: str, options: Sequence[str], sources: Path | None, source_places: bool) -> None:
        if not _ARCHITECTURE.fullmatch(arch):
            raise ConfigurationError("architecture", expected="a name such as sm_75 or sm_90a", got=repr(arch))
        self._arch = arch
        self._cache, self._folders = cubin_folder(), [*([sources] if sources else []), source_folder()]
        self._command = [*(each for each in OPTIONS if source_places or each != SOURCE_PLACES), *options]
        self._command.append(f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}")
        nvcc = _search_nvcc()
        self._version = nvcc_version(nvcc) if nvcc else "*"

    def stem(self, name: str, entries: Sequence[Entry]) -> str:
        """The name of the note on these entries, without nvcc's version."""
        return f"{Path(name).stem}-{self._arch}-{key_of(unit_source(entries), self._folders, self._command)}"

    def load(self, stem: str) -> Cubin | None:
        return _load(self._cache, stem, self._version)

    def compile(self, jobs: Sequence[_Job]) -> list[Cubin]:
        """What each job is compiled to, in parallel; nvcc is looked for only if there is any."""
        if not jobs:
            return []
        command = [str(find_nvcc()), *self._command, *(f"-I{folder}" for folder in self._folders)]
        names = ", ".join(dict.fromkeys(job.name for job in jobs))
        print(f"mlpgpu: compiling {names} for {self._arch} (kept in {self._cache})", file=sys.stderr)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            running = [pool.submit(_compile, job, command, self._cache, self._version) for job in jobs]
            try:
                return [each.result() for each in running]
            finally:
                pool.shutdown(cancel_futures=True)


def _load(cache: Path, stem: str, version: str) -> Cubin | None:
    """The newest whole entry of the cache for a unit, or None."""
    notes = sorted(cache.glob(f"{stem}-{version}.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in notes:
        try:
            note = json.loads(path.read_bytes())
            image = (cache / f"{note['sha256']}.cubin").read_bytes()
            resources = {name: Resources(**values) for name, values in note["resources"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: compiled again
        if hashlib.sha256(image).hexdigest() == note["sha256"]:
            return Cubin(image, note["nvcc"], resources)
    return None


def _compile(job: _Job, command: Sequence[str], cache: Path, version: str) -> Cubin:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as folder:
            unit = Path(folder, job.name).with_suffix(".cu")
            output, note = unit.with_suffix(".cubin"), unit.with_suffix(".json")
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(unit_source(job.entries), encoding="utf-8")
            log = _run([*command, "--cubin", "-o", str(output), str(unit)], what=f"compiling {job.name}")
            image = output.read_bytes()
            digest = hashlib.sha256(image).hexdigest()
            cubin = Cubin(image, version, _resources(log))
            resources = {name: asdict(values) for name, values in cubin.resources.items()}
            text = json.dumps({"sha256": digest, "nvcc": cubin.nvcc, "resources": resources})
            os.replace(output, cache / f"{digest}.cubin")
            for stem in job.stems:
                note.write_text(text)
                os.replace(note, cache / f"{stem}-{version}.json")
    except OSError as error:
        hint = f"{CACHE_VARIABLE} names another folder"
        raise StorageError(f"cache {cache}", expected="a folder to write to", got=error, hint=hint) from error
    return cubin


def _resources(log: str) -> dict[str, Resources]:
    """The resources of each kernel, from what ``ptxas -v`` prints."""
    resources = {}
    for match in _PTXAS.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        resources[match["name"]] = Resources(
            registers=int(match["registers"]),
            stack_bytes=int(match["stack"]),
            spill_bytes=int(match["stores"]) + int(match["loads"]),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return resources


def _run(command: Sequence[str], *, what: str) -> str:
    """Run a command that must succeed; returns what it prints, messages included."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
        )
    except OSError as error:
        raise BackendError(what, expected="a compiler that runs", got=f"{command[0]}: {error}") from error
    if done.returncode:
        said = "\n".join(text for text in done.stdout.splitlines() if not text.startswith("ptxas info"))
        raise BackendError(what, expected="success", got=f"status {done.returncode} of {command[0]}:\n{said}")
    return done.stdout
