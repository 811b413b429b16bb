"""Runs the kernels of ``cuda/`` on the host: compiles them with g++ and tests/kernels/shim, and launches them.

    prepare(entries)                                   # compiles what is not yet compiled, in parallel
    out = run(entry, grid=4, block=128, args={"y": Unwritten((n,), np.float32), "x": x, "n": n})
    out["y"]

The kernels run in a process of their own, under the address and undefined-behaviour sanitizers.  Every
launch runs twice, with threads and blocks in ascending and in descending order, and must write the same
bits; what it does not initialise holds 0xFF bytes (NaN) the first time and 0x7F bytes the second.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from drawn import share_of
from kernel_cases.case import Case, Mapped, Shifted, followed_by_components
from kernel_cases.tensor import is_sampled
from numpy.typing import ArrayLike, DTypeLike

from mlpgpu.backends.cuda.kernels import Argument, Entry, all_entries, included, unit_source, units

SHIM = Path(__file__).parent / "shim"
KERNELS = Path(__file__).parents[2] / "cuda"
FLAGS = (
    *("-std=c++17", "-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # Only where a kernel says fma is there one, as in the NumPy specification.
    "-ffp-contract=off",
    # nvcc's pragmas (unroll) are not g++'s; the other warning errs under sanitizers.
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
)
# Of a file that no sanitizer checks, and which may all the same be linked with those that they do.
UNCHECKED = (
    "-fno-sanitize=undefined",
    *(f"--param=asan-{what}=0" for what in ("instrument-reads", "instrument-writes", "stack", "globals", "memintrin")),
)
TESTED = 1 / 3  # of the entries of a file
ENTRIES_PER_PROGRAM = 16  # so that one header's many instantiations compile in parallel
MOST_RUNNING = 32  # processes of programs at once, for each that runs tests

ASCENDING, DESCENDING = 0, 1
POISON = {ASCENDING: 0xFF, DESCENDING: 0x7F}

# Argument types whose NumPy type is known; others are taken by their bytes.
DTYPES = {
    "float": np.float32,
    "double": np.float64,
    "int": np.int32,
    "unsigned": np.uint32,
    "int8_t": np.int8,
    "uint8_t": np.uint8,
    "int32_t": np.int32,
    "uint32_t": np.uint32,
    "int64_t": np.int64,
    "uint64_t": np.uint64,
    "unsigned char": np.uint8,
    "unsigned int": np.uint32,
    "unsigned long long": np.uint64,
}

Size = int | Sequence[int]


class KernelFault(AssertionError):
    """A kernel that broke a rule: the message is the sanitizer's or the shim's report."""


@dataclass(frozen=True)
class Unwritten:
    """An array that a kernel is to fill; whatever it leaves out differs between the two orders."""

    shape: tuple[int, ...]
    dtype: DTypeLike


@dataclass(frozen=True, eq=False)
class From:
    """An array that a kernel gets a pointer into, so many bytes after its start."""

    array: np.ndarray
    byte: int


def planted(header: str, right: str, wrong: str) -> str:
    """A header's text with ``wrong`` in place of ``right``, which occurs there once."""
    text = (KERNELS / header).read_text()
    assert text.count(right) == 1, f"{header} has changed: plant the fault anew, which is {right!r} no more"
    return text.replace(right, wrong)


def plant(header: str, right: str, wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on kernels come from a copy of the sources, with ``wrong`` in place of ``right``, which occurs once."""
    sources = folder / "cuda"
    shutil.copytree(KERNELS, sources)
    text = planted(header, right, wrong)
    # Programs without the header stay, and of the others no entry is compiled that is not asked for.
    faulty = KERNELS / header
    kept = {entry: program for entry, program in _programs.items() if faulty not in _headers(entry)}
    groups = {entry: group for entry, group in _groups().items() if faulty not in _headers(entry)}
    (sources / header).write_text(text)
    monkeypatch.setattr(f"{__name__}.KERNELS", sources)
    monkeypatch.setattr(f"{__name__}._programs", kept)
    monkeypatch.setattr(f"{__name__}._groups", lambda: groups)


def program_name(entry: Entry) -> str:
    """Of the program that an entry of the table is part of: tests that need one are best run by one process."""
    return f"{entry.unit} {_groups()[entry][0].name}"


def prepare(entries: Iterable[Entry]) -> None:
    """Compile the entries that are not compiled yet.

    Raises:
        RuntimeError: g++ is missing, or refuses the source; the message holds its own lines.
    """
    missing = [entry for entry in dict.fromkeys(entries) if entry not in _programs]
    if not missing:
        return
    for entry in missing:
        if entry.host_excluded:
            raise ValueError(f"{entry.name} does not run on the host: {entry.host_excluded}")
    of_table, others = _groups(), [entry for entry in missing if entry not in _groups()]
    parts = [*dict.fromkeys(of_table[entry] for entry in missing if entry in of_table), *_pieces(others)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        host = [
            pool.submit(_build, f"{path.stem}.o", [*flags, *_sources(path).values()], [*flags, "-c", path])
            for path, flags in ((SHIM / "host.cpp", (*UNCHECKED, "-O2")), (SHIM / "products.cpp", ("-O2",)))
        ]
        for part, path in zip(parts, pool.map(functools.partial(_build_program, host), parts), strict=True):
            _programs.update(dict.fromkeys(part, _Program(path)))


def run(
    entry: Entry,
    grid: Size,
    block: Size,
    args: Mapping[str, object],
    shared_bytes: int | None = None,
    *,
    constants: Mapping[str, np.ndarray] | None = None,
    tolerance: Mapping[str, ArrayLike] | None = None,
    seconds: int = 60,
) -> dict[str, np.ndarray]:
    """Launch a kernel in both orders and return what it wrote, by the names of its non-const pointers.

    Args:
        grid, block: blocks, and threads of a block: a number, or up to three, x first.
        args: by name.  A pointer or a ``Texture`` takes an array (copied, never written to), a pointer
            into the middle of an array a `From`, a pointer that the kernel fills an `Unwritten`; one array
            under two names is one buffer.
        shared_bytes: of a block; the entry's own number if left out.
        constants: values of the kernel's ``__constant__`` variables by name, from their first byte on;
            the rest of a variable is poisoned.
        tolerance: by output, how far the two orders may lie apart where a kernel adds atomically;
            outputs not named must have the same bits.
        seconds: of processor time until a launch counts as endless.

    Raises:
        KernelFault: a sanitizer or the shim found a fault, or the two orders differ.
        ValueError: the launch does not fit the entry.
    """
    sizes = [_dim3("grid", grid), _dim3("block", block)]
    if np.prod(sizes[1]) > entry.threads:
        raise ValueError(f"{entry.name}: expected a block of at most {entry.threads} threads, got {sizes[1]}")
    if set(args) != {argument.name for argument in entry.arguments}:
        raise ValueError(f"{entry.name}: expected {[a.name for a in entry.arguments]}, got {list(args)}")
    shared = entry.shared_bytes if shared_bytes is None else shared_bytes
    prepare([entry])

    def launch(order: int) -> dict[str, np.ndarray]:
        head = (*sizes[0], *sizes[1], shared, order, POISON[order], seconds, entry.prefetched is not None)
        buffers = _Buffers(POISON[order], _late(entry, args))
        arguments = [buffers.pack(argument, args[argument.name]) for argument in entry.arguments]
        parts = [_text(entry.name), _numbers(*head), _numbers(len(constants or {}))]
        for name, value in (constants or {}).items():
            parts += [_text(name), _numbers(value.nbytes), value.tobytes()]
        parts += [*buffers.request(), _numbers(len(arguments)), *arguments]
        return buffers.outputs(_programs[entry].ask(b"".join(parts), buffers.returned_bytes()))

    ascending, descending = launch(ASCENDING), launch(DESCENDING)
    for name, value in ascending.items():
        _compare(f"{entry.name}: {name}", value, descending[name], (tolerance or {}).get(name))
    return ascending


def as_passed(value: object) -> object:
    """An argument of a case as the shim takes it."""
    if isinstance(value, Shifted):
        return From(np.insert(value.array.ravel(), 0, np.nan), value.array.itemsize)
    return followed_by_components(value) if isinstance(value, Mapped) else value


def run_case(case: Case) -> dict[str, np.ndarray]:
    """Launch a case's kernel as :func:`run` does."""
    # Both orders are within the bound of the same number.
    tolerance = {name: 2 * output.bound for name, output in case.outputs.items()} if case.atomic else None
    args = {name: as_passed(value) for name, value in case.args.items()}
    return run(case.entry, case.grid, case.entry.threads, args, constants=case.constants, tolerance=tolerance)


def _compare(what: str, ascending: np.ndarray, descending: np.ndarray, tolerance: ArrayLike | None) -> None:
    """Raise KernelFault unless both orders gave the same bits, or numbers within the tolerance."""
    if tolerance is None:
        bits = (value.reshape(-1, 1).view(np.uint8) for value in (ascending, descending))
        same = np.equal(*bits).all(axis=1).reshape(ascending.shape)
    else:
        same = abs(ascending.astype(np.float64) - descending) <= tolerance
    if not same.all():
        first = tuple(int(i) for i in np.argwhere(~same)[0])
        raise KernelFault(
            f"{what}{list(first)} is {ascending[first]} in ascending and {descending[first]} in descending order "
            f"({np.count_nonzero(~same)} of {same.size} elements differ): a barrier is missing, or memory is "
            "read or returned that nothing wrote"
        )


def _dim3(what: str, size: Size) -> tuple[int, int, int]:
    axes = (size,) if isinstance(size, int) else tuple(size)
    if not 1 <= len(axes) <= 3 or min(axes) < 1:
        raise ValueError(f"{what}: expected one to three numbers of at least 1, got {size}")
    return (*axes, 1, 1)[:3]  # type: ignore[return-value]


def _numbers(*values: int) -> bytes:
    return struct.pack(f"={len(values)}q", *values)


def _text(text: str) -> bytes:
    return _numbers(len(text)) + text.encode()


def _late(entry: Entry, args: Mapping[str, object]) -> set[int]:
    """Ids of the arrays that a launch which overlaps finds only when the launch before it is complete."""
    if entry.prefetched is None:
        return set()
    mask = args.get("prefetch", 0)
    prefetched = {"step", *(name for name, bit in entry.prefetched if not bit or mask & bit)}
    pointers = {argument.name for argument in entry.arguments if argument.is_pointer}
    arrays = {name: id(value.array if isinstance(value, From) else value) for name, value in args.items()}
    return {arrays[name] for name in pointers} - {arrays[name] for name in prefetched & args.keys()}


class _Buffers:
    """The arrays of one launch, each once, in the order in which arguments first name them."""

    def __init__(self, poison: int, late: Collection[int]) -> None:
        self.poison = poison
        self.late = late  # ids of arguments
        self.arrays: list[np.ndarray] = []
        self.places: dict[int, int] = {}  # by id of the argument
        self.returned: dict[str, int] = {}

    def pack(self, argument: Argument, value: object) -> bytes:
        """The argument's part of the request; an array becomes a buffer."""
        if not argument.is_pointer and argument.ctype != "Texture":
            dtype = DTYPES.get(argument.ctype.removeprefix("const "))
            raw = np.asarray(value, dtype).tobytes()
            return _numbers(ord("v"), len(raw)) + raw
        if value is None:
            return _numbers(ord("v"), 8, 0)
        value, byte = (value.array, value.byte) if isinstance(value, From) else (value, 0)
        if id(value) not in self.places:
            self.places[id(value)] = len(self.arrays)
            self.arrays.append(self._array(argument, value))
        place = self.places[id(value)]
        if argument.is_pointer and not argument.ctype.startswith("const "):
            self.returned[argument.name] = place
        return _numbers(*((ord("p"), place, byte) if argument.is_pointer else (ord("t"), place)))

    def _array(self, argument: Argument, value: object) -> np.ndarray:
        if isinstance(value, Unwritten):
            array = np.empty(value.shape, value.dtype)
            array.reshape(-1).view(np.uint8)[:] = self.poison
        elif isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
        else:
            raise ValueError(f"{argument.name}: expected an array, Unwritten or None, got {type(value).__name__}")
        ctype = "float" if argument.ctype == "Texture" else argument.ctype.removeprefix("const ").rstrip(" *")
        dtype = DTYPES.get(ctype, array.dtype)
        if array.dtype != dtype:
            raise ValueError(f"{argument.name}: expected an array of {np.dtype(dtype)}, got {array.dtype}")
        return array

    def _is_returned(self, place: int) -> bool:
        return place in self.returned.values()

    def request(self) -> list[bytes]:
        parts = [_numbers(len(self.arrays))]
        late = {place for known, place in self.places.items() if known in self.late}
        for place, array in enumerate(self.arrays):
            parts += [_numbers(self._is_returned(place), place in late, array.nbytes), array.tobytes()]
        return parts

    def returned_bytes(self) -> int:
        return sum(array.nbytes for place, array in enumerate(self.arrays) if self._is_returned(place))

    def outputs(self, reply: bytes) -> dict[str, np.ndarray]:
        """What came back, by the arguments' names; names of one buffer share their array."""
        arrays: dict[int, np.ndarray] = {}
        offset = 0
        for place, array in enumerate(self.arrays):
            if self._is_returned(place):
                flat = np.frombuffer(reply, array.dtype, array.size, offset)
                arrays[place] = flat.reshape(array.shape).copy()
                offset += array.nbytes
        return {name: arrays[place] for name, place in self.returned.items()}


class _Program:
    """A compiled program and its process, which starts with the first launch, and again after a fault, or where many
    others have run since: each holds up to some hundred megabytes, mostly what the sanitizer keeps of freed memory."""

    running: ClassVar[dict[_Program, None]] = {}  # the one that was asked last comes last

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115 (its standard error, open as long as it is)
        atexit.register(self.close)

    def ask(self, request: bytes, reply_bytes: int) -> bytes:
        """Send one launch and return the buffers' bytes; what the kernel printed goes to our standard error.

        Raises:
            KernelFault: the process ended instead.
        """
        if self.process is None:
            while len(self.running) >= MOST_RUNNING:
                next(iter(self.running))._stop()
            self.process = subprocess.Popen(
                [self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages
            )
        self.running.pop(self, None)
        self.running[self] = None
        assert self.process.stdin and self.process.stdout
        self.messages.seek(0)
        self.messages.truncate()
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except BrokenPipeError:
            reply = b""  # it ended before it had read everything: its messages tell why
        else:
            reply = self.process.stdout.read(reply_bytes + 1)  # and a dot, for launches that return nothing
        failed = len(reply) != reply_bytes + 1
        if failed:
            self._stop()
        self.messages.seek(0)
        text = self.messages.read().decode(errors="replace")
        if failed:
            raise KernelFault(text)
        sys.stderr.write(text)
        return reply[:-1]

    def _stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin and self.process.stdout
            self.process.kill()
            with contextlib.suppress(BrokenPipeError):  # of what could not be sent
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None
            del self.running[self]

    def close(self) -> None:
        self._stop()
        self.messages.close()


_programs: dict[Entry, _Program] = {}


def _pieces(entries: Iterable[Entry]) -> list[tuple[Entry, ...]]:
    """Entries as programs hold them."""
    return [
        tuple(group[i : i + ENTRIES_PER_PROGRAM])
        for group in units(entries).values()
        for i in range(0, len(group), ENTRIES_PER_PROGRAM)
    ]


@functools.cache
def drawn_entries() -> frozenset[Entry]:
    """Those of the table that run beside NumPy: of each file a share, drawn by what it and its includes hold."""
    found: set[Entry] = set()
    for unit, entries in units(e for e in all_entries() if not e.host_excluded and is_sampled(e)).items():
        found.update(share_of(entries, TESTED, "entries", unit) or entries[:1])
    return frozenset(found)


@functools.cache
def _groups() -> Mapping[Entry, tuple[Entry, ...]]:
    """The entries that are tested, each with those that are compiled with it, whichever test comes first."""
    entries = [entry for entry in all_entries() if entry in drawn_entries()]
    return {entry: piece for piece in _pieces(entries) for entry in piece}


@functools.cache
def _headers_of(names: tuple[str, ...], folder: Path) -> frozenset[Path]:
    return frozenset(path for name in names for path in _sources(folder / name))


def _headers(entry: Entry) -> frozenset[Path]:
    """All that is included for an entry's kernel."""
    return _headers_of(tuple(included([entry])), KERNELS)


def _folder() -> Path:
    """Where objects and programs are kept."""
    folder = Path(os.environ["MLPGPU_CACHE"]) / "shim"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _compiler() -> str:
    """g++'s own description of itself.

    Raises:
        RuntimeError: there is no g++.
    """
    path = shutil.which("g++")
    if path is None:
        raise RuntimeError(
            "the tests of the kernels compile them with g++, which is not on the PATH; install it "
            "(on Debian and Ubuntu: apt install g++)"
        )
    return path + subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout


def _sources(path: Path, found: dict[Path, str] | None = None) -> dict[Path, str]:
    """The file's text and that of every file it includes by a name in quotes."""
    found = {} if found is None else found
    if path not in found and path.exists():
        found[path] = path.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s+"(.+)"', found[path], re.MULTILINE):
            sibling = path.parent / name
            _sources(sibling if sibling.exists() else KERNELS / name, found)
    return found


def _build_program(host: Sequence[Future[Path]], entries: Sequence[Entry]) -> Path:
    """The program of these entries, all of one unit, with the object of host.cpp."""
    side_by_side = {e: 0 if e.cooperative else e.cluster for e in entries}
    kernels = (
        f'    shim::Entry<mlpgpu::entries::{e.name}>::kernel("{e.name}", {together}),'
        for e, together in side_by_side.items()
    )
    table = [
        "const shim::Kernel shim::kernels[] = {",
        *kernels,
        "};",
        f"const size_t shim::kernel_count = {len(entries)};",
    ]
    source = "\n".join([unit_source(entries), "", *table, ""])
    texts = _sources(SHIM / "cuda.h")
    for header in included(entries):
        texts |= _sources(KERNELS / header)
    unit = _build(
        f"{Path(entries[0].unit).stem}.o",
        [source, *texts.values()],
        ["-include", SHIM / "cuda.h", "-I", KERNELS, "-c", "-x", "c++", "-"],
        source,
    )
    # A global name can be found at run time with -rdynamic: constants are set by theirs.
    objects = [unit, *(part.result() for part in host)]
    return _build("program", [path.name for path in objects], [*objects, "-rdynamic", "-ldl"])


def _build(name: str, contents: Iterable[str], command: Sequence[str | Path], source: str = "") -> Path:
    """What g++ makes by this command of these contents, from the cache if it holds it."""
    key = hashlib.sha256()
    for text in (_compiler(), *FLAGS, *contents):
        key.update(text.encode() + b"\0")
    result = _folder() / f"{key.hexdigest()[:32]}-{name}"
    if not result.exists():
        with _lock(result), tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            if result.exists():
                return result
            built = Path(scratch) / name
            done = subprocess.run(["g++", *FLAGS, *command, "-o", built], input=source, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"g++ does not compile {name} for the host:\n{done.stderr}")
            built.replace(result)
    result.touch()  # what is used is kept (kept_builds.py)
    return result


@contextlib.contextmanager
def _lock(result: Path) -> Iterator[None]:
    """While one process makes a file, others that want it wait; that two make the same one would do no harm."""
    path = result.with_suffix(".lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)
