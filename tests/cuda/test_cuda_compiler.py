"""nvcc and its cache: what is compiled, what is not, and what is said when it cannot be."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import machine_code
import pytest
from drawn import generator

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry, arguments, units
from mlpgpu.backends.cuda.runtime import compiler
from mlpgpu.backends.cuda.runtime.compiler import (
    Resources,
    compile_entries,
    compile_units,
    find_nvcc,
    nvcc_version,
    split_jobs,
    toolkit_folder,
)
from mlpgpu.backends.sources import source_folder
from mlpgpu.errors import BackendError, ConfigurationError, StorageError

ROOT = Path(__file__).parents[2]

needs_nvcc = pytest.mark.skipif(compiler._search_nvcc() is None, reason="no nvcc")

SCALE = Entry("scale", "scale.cuh", "scale", arguments("float* x, float a, int n"), 64, block=None)

SHIFT, TURN = (replace(SCALE, name=name) for name in ("shift", "turn"))

# Stands in for nvcc: notes that it ran, and puts the unit, its header and the version into the "cubin".
FAKE_NVCC = """#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    print("release {release}, V{release}.1")
    sys.exit()
time.sleep({seconds})
output, unit = pathlib.Path(sys.argv[-2]), pathlib.Path(sys.argv[-1])
with open({log!r}, "a") as log:
    log.write(unit.name + "\\n")
output.write_text("{release} " + unit.read_text())
print("ptxas info    : Compiling entry function 'scale' for 'sm_75'")
print("ptxas info    : Function properties for scale")
print("    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads")
print("ptxas info    : Used 8 registers, used 1 barriers, 96 bytes smem, 360 bytes cmem[0]")
"""


class Workshop:
    """A cache, a folder of sources, and a stand-in for nvcc that counts its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sources, self.log = folder, folder / "sources", folder / "log"
        self.cache = folder / "home" / "cubin"
        self.sources.mkdir()
        self.write("scale.cuh", '#include "inner.cuh"\n')
        self.write("inner.cuh", "// one\n")
        self.write("other.cuh", "// nobody includes it\n")
        self.install()

    def write(self, name: str, text: str) -> None:
        (self.sources / name).write_text(text)

    def install(self, release: str = "13.0", seconds: float = 0) -> None:
        script = FAKE_NVCC.format(python=sys.executable, release=release, seconds=seconds, log=str(self.log))
        executable(self.folder / "bin" / "nvcc", script)

    def compile(self, *options: str, arch: str = "sm_75") -> compiler.Cubin:
        return compile_units(units([SCALE]), arch, options, sources=self.sources)["scale.cuh"]

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nowhere is an nvcc, and the cache is empty; returns a folder for files."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def workshop(bare: Path) -> Workshop:
    return Workshop(bare)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of sources, for the real nvcc."""
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path / "home"))
    (tmp_path / "sources").mkdir()
    return tmp_path / "sources"


# ---- with nvcc


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_compiles_to_machine_code(sources: Path, arch: str) -> None:
    (sources / "scale.cuh").write_text(
        "namespace mlpgpu {\n"
        "__device__ __forceinline__ void scale(float* x, float a, int n) {\n"
        "    __shared__ float copy[64];\n"
        "    copy[threadIdx.x] = x[threadIdx.x];\n"
        "    __syncthreads();\n"
        "    x[threadIdx.x] = a * copy[n - threadIdx.x];\n"
        "}\n"
        "}\n"
    )
    cubin = compile_units(units([SCALE]), arch, sources=sources)["scale.cuh"]
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.nvcc == nvcc_version(find_nvcc())
    took = cubin.resources["scale"]
    assert took.registers > 0
    assert took == Resources(took.registers, stack_bytes=0, spill_bytes=0, shared_bytes=256)


@needs_nvcc
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x[0] = scalee(a);", 'identifier "scalee" is undefined'),
        ("int unused = n;", "was declared but never referenced"),
    ],
)
def test_an_error_shows_the_lines_of_nvcc(sources: Path, body: str, said: str) -> None:
    template = f"namespace mlpgpu {{ __device__ void scale(float* x, float a, int n) {{\n    {body}\n}} }}\n"
    (sources / "scale.cuh").write_text(template)
    with pytest.raises(BackendError) as caught:
        compile_units(units([SCALE]), "sm_75", sources=sources)
    for part in ("compiling scale.cuh", "scale.cuh(2): error", body, said):
        assert part in str(caught.value)
    assert list((sources.parent / "home" / "cubin").iterdir()) == []


# ---- the cache


def test_a_first_run_says_so_and_a_second_one_runs_nothing(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    first = workshop.compile()
    line = f"mlpgpu: compiling scale.cuh for sm_75 (kept in {workshop.cache})\n"
    assert capsys.readouterr() == ("", line)
    assert workshop.compile() == first
    assert capsys.readouterr() == ("", "")
    assert workshop.runs == 1
    assert first.resources == {"scale": Resources(registers=8, stack_bytes=16, spill_bytes=12, shared_bytes=96)}


def test_a_hit_needs_no_nvcc(workshop: Workshop) -> None:
    first = workshop.compile()
    (workshop.folder / "bin" / "nvcc").unlink()
    assert workshop.compile() == first
    with pytest.raises(BackendError, match="nvidia-cuda-nvcc"):
        workshop.compile("-O1")


def test_without_nvcc_the_newest_entry_serves(workshop: Workshop) -> None:
    workshop.install("13.1")
    newest = workshop.compile()
    workshop.install("13.0")
    older = workshop.compile()
    assert (newest.nvcc, older.nvcc, workshop.runs) == ("13.1.1", "13.0.1", 2)
    for note in workshop.cache.glob("*-13.0.1.json"):
        os.utime(note, (time.time() - 60,) * 2)
    (workshop.folder / "bin" / "nvcc").unlink()
    assert workshop.compile() == newest


def test_what_a_unit_includes_is_part_of_it(workshop: Workshop) -> None:
    workshop.compile()
    workshop.write("other.cuh", "// changed\n")
    workshop.compile()
    assert workshop.runs == 1
    workshop.write("inner.cuh", "// two\n")
    workshop.compile()
    assert workshop.runs == 2
    workshop.write("inner.cuh", "// one\n")
    workshop.compile()
    assert workshop.runs == 2


def test_options_and_architecture_are_part_of_it(workshop: Workshop) -> None:
    workshop.compile()
    workshop.compile("-DWIDTH=3")
    workshop.compile(arch="sm_80")
    workshop.compile("-DWIDTH=3", arch="sm_80")
    assert workshop.runs == 4


@pytest.mark.parametrize("pattern", ["*.cubin", "*.json"])
@pytest.mark.parametrize("damage", [b"", b"{}", b'{"sha256": 1}'])
def test_a_damaged_entry_is_made_again(workshop: Workshop, pattern: str, damage: bytes) -> None:
    first = workshop.compile()
    (path,) = workshop.cache.glob(pattern)
    path.write_bytes(damage)
    assert workshop.compile() == first
    assert workshop.compile() == first
    assert workshop.runs == 2


def test_processes_share_a_cache(workshop: Workshop) -> None:
    workshop.install(seconds=0.3)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pathlib\n"
        "from mlpgpu.backends.cuda.runtime.compiler import compile_units\n"
        "from mlpgpu.backends.cuda.kernels import Entry, arguments, units\n"
        "scale = Entry('scale', 'scale.cuh', 'scale', arguments('float* x, float a, int n'), 64, block=None)\n"
        "made = compile_units(units([scale]), 'sm_75', sources=pathlib.Path(sys.argv[2]))\n"
        "sys.stdout.write(made['scale.cuh'].image.decode())\n"
    )
    command = [sys.executable, "-c", script, str(ROOT), str(workshop.sources)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(3)]
    images = {racer.communicate(timeout=60)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    ran = workshop.runs
    assert images == {workshop.compile().image}
    assert workshop.runs == ran
    assert sorted(path.suffix for path in workshop.cache.iterdir()) == [".cubin", ".json"]


def test_a_cache_that_cannot_be_written(workshop: Workshop) -> None:
    (workshop.folder / "home").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="MLPGPU_CACHE"):
        workshop.compile()


@pytest.mark.parametrize("arch", ["75", "sm_", "compute_75", "sm_75 -o /tmp/x"])
def test_an_architecture_has_a_name(workshop: Workshop, arch: str) -> None:
    with pytest.raises(ConfigurationError, match="sm_90a"):
        workshop.compile(arch=arch)
    assert workshop.runs == 0


# ---- kernels one by one


def test_a_kernel_is_compiled_once_in_whatever_company(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    together = compile_entries([SCALE, SHIFT], "sm_75", sources=workshop.sources)
    assert list(together) == [SCALE, SHIFT] and together[SCALE] == together[SHIFT]
    assert b"\nscale(" in together[SCALE].image and b"\nshift(" in together[SCALE].image
    assert compile_entries([SHIFT], "sm_75", sources=workshop.sources) == {SHIFT: together[SHIFT]}
    assert workshop.runs == 1
    more = compile_entries([TURN, SHIFT], "sm_75", sources=workshop.sources)
    assert workshop.runs == 2
    assert more[SHIFT] == together[SHIFT] != more[TURN]
    assert b"\nshift(" not in more[TURN].image
    workshop.write("inner.cuh", "// two\n")
    compile_entries([TURN, SHIFT], "sm_75", sources=workshop.sources)
    assert workshop.runs == 3


def test_every_core_compiles(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    made = compile_entries([SCALE, SHIFT, TURN], "sm_75", sources=workshop.sources)
    assert workshop.runs == 2
    assert made[SCALE].image == made[SHIFT].image != made[TURN].image


@pytest.mark.parametrize(
    ("sizes", "cores", "expected"),
    [
        ((), 4, []),
        ((1, 5, 2), 1, [5, 2, 1]),
        ((1, 5, 2), 4, [3, 2, 2, 1]),
        ((1, 5, 2), 6, [2, 2, 1, 1, 1, 1]),
        ((1, 5, 2), 100, [1] * 8),
    ],
)
def test_the_largest_jobs_are_halved_first(sizes: tuple[int, ...], cores: int, expected: list[int]) -> None:
    entries = [
        replace(SCALE, name=f"{unit}_{i}", header=f"{unit}.cuh") for unit, n in enumerate(sizes) for i in range(n)
    ]
    jobs = split_jobs(entries, cores)
    assert [len(job) for job in jobs] == expected
    assert all(len(units(job)) == 1 for job in jobs)
    assert sorted(e.name for job in jobs for e in job) == sorted(e.name for e in entries)


@pytest.mark.thorough
@needs_nvcc
def test_a_kernel_computes_the_same_in_any_company() -> None:
    """Of the products whose files have most constants and most templates in common.  Where constants lie, and now and
    then the order of two instructions that compute addresses, follow from the others of a module."""
    unit = units(kernels.all_entries())["gemm/gemm_sm90.cuh"]
    drawn = generator("company").sample([entry for entry in unit if not entry.loss_numbers], 2)
    drawn.append(next(entry for entry in unit if entry.loss_numbers))
    (together,) = compile_units({"together": drawn}, "sm_90a").values()
    apart = compile_units({entry.name: [entry] for entry in drawn}, "sm_90a")
    codes = machine_code.code_of(together.image)
    for entry in drawn:
        (alone,) = machine_code.code_of(apart[entry.name].image).values()
        computed = machine_code.arithmetic("sm_90a", alone)
        assert computed == machine_code.arithmetic("sm_90a", codes[entry.name]) and "HGMMA" in computed
        assert apart[entry.name].resources[entry.name] == together.resources[entry.name]


# ---- where nvcc is


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_is_found_in_three_places(bare: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with pytest.raises(BackendError) as caught:
        find_nvcc()
    for place in ("PATH", "CUDA_HOME", "nvidia-cuda-nvcc"):
        assert place in str(caught.value)
    package = executable(bare / "site-packages" / "nvidia" / "cu13" / "bin" / "nvcc", "")
    assert find_nvcc() == package
    home = executable(bare / "toolkit" / "bin" / "nvcc", "")
    monkeypatch.setenv(variable, str(bare / "toolkit"))
    assert find_nvcc() == home
    path = executable(bare / "bin" / "nvcc", "")
    assert find_nvcc() == path


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine has g++ and PyPI's packages."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    for name in ("g++", "gcc"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("MLPGPU_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(compiler, "_SYSTEM_FOLDERS", ())


@needs_nvcc
@pytest.mark.usefixtures("no_toolkit")
def test_packages_of_pypi_compile_where_there_is_no_toolkit() -> None:
    try:
        version = importlib.metadata.version("nvidia-cuda-nvcc")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the extra cuda-toolkit is not installed")
    nvcc = find_nvcc()
    assert nvcc.parts[-4:-2] == ("nvidia", "cu13") and nvcc_version(nvcc) == version
    assert toolkit_folder() == nvcc.parents[1]
    entry = kernels.squares()
    cubin = compile_units(units([entry]), "sm_90a")[entry.unit]
    assert set(cubin.resources) == {entry.name} and cubin.nvcc == version


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_headers_are_found(bare: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    def header(*folder: str) -> Path:
        return executable(bare.joinpath(*folder, "include", "cuda.h"), "").parents[1]

    monkeypatch.setattr(compiler, "_SYSTEM_FOLDERS", (bare / "usr",))
    with pytest.raises(BackendError, match="cuda-toolkit"):
        toolkit_folder()
    system = header("usr")
    assert toolkit_folder() == system
    executable(bare / "compilers" / "bin" / "nvcc", "")
    (bare / "bin").mkdir()
    (bare / "bin" / "nvcc").symlink_to(bare / "compilers" / "bin" / "nvcc")
    assert toolkit_folder() == system  # there are no headers beside that nvcc
    beside = header("compilers")
    assert toolkit_folder() == beside
    monkeypatch.setenv(variable, str(bare / "toolkit"))
    assert toolkit_folder() == beside
    home = header("toolkit")
    assert toolkit_folder() == home
    package = header("site-packages", "nvidia", "cu13")
    (package / "bin").mkdir()
    assert toolkit_folder() == package


@pytest.mark.parametrize(
    ("script", "said"), [("#!/bin/sh\necho hello\n", "hello"), ("#!/bin/sh\nexit 3\n", "status 3")]
)
def test_something_else_called_nvcc(workshop: Workshop, script: str, said: str) -> None:
    executable(workshop.folder / "bin" / "nvcc", script)
    with pytest.raises(BackendError, match=said):
        workshop.compile()


def test_sources_are_found() -> None:
    assert (source_folder() / "common/portable.cuh").is_file()
