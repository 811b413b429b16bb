"""The design's import rules, read from the sources: imports point downward, and CUDA stays behind one door."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import mlpgpu

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlpgpu"

# Bottom to top: a module imports from lines above its own only.  A package counts as one module.
LEVELS = (
    {"locks", "names", "text", "version"},
    {"errors"},
    {"ranks"},
    {"storage", "random", "activations", "metrics"},
    {"pictures"},
    {"losses", "schedules", "initializers"},
    {"optimizers"},
    {"plan"},
    {"layers"},
    {"datasets"},
    {"tables"},
    {"backends"},
    {"network", "history"},
    {"callbacks"},
    {"training"},
    {"bench", "shell", "sklearn"},
    {"__init__"},
    {"__main__"},
)
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}

# Inside a package the same holds of its files.
INNER_LEVELS = {
    "storage": ("files", "descriptions", "container", "__init__"),
    "ranks": ("launchers", "watch", "deadline", "communicator", "shared", "agreement", "ends", "world", "__init__"),
    "metrics": ("sums", "table", "__init__"),
    "plan": ("operations", "sharding", "links", "tensor_split", "plan", "costs", "tensor", "construction", "__init__"),
    "datasets": ("checksum", "interchange", "arrays", "dataset", "idx", "named", "__init__"),
    "tables": (
        *("frames", "values", "dates", "statistics", "columns", "targets", "learning", "csv_file", "sources", "room"),
        *("table", "__init__"),
    ),
    "network": (
        *("parameters", "statistics", "remembered", "saved", "stored", "formats", "predictor", "network", "exchange"),
        "__init__",
    ),
    "network/formats": (
        *("limits", "steps", "hints", "state_dict", "hdf5", "keras_layers", "keras_model", "keras_weights"),
        *(
            "plain_files",
            "keras_file",
            "onnx_file",
            "safetensors_file",
            "torch_modules",
            "torch_model",
            "torch_file",
            "estimator",
        ),
        *("table", "__init__"),
    ),
    "callbacks": (
        *("callback", "early_stopping", "checkpoint", "csv_logger", "histograms", "tensorboard", "pruning"),
        *("listeners", "__init__"),
    ),
    "training": (
        *("interrupt", "progress", "task", "team", "engine", "run_file", "copies", "fit", "trainer", "__init__"),
    ),
    "shell": ("output", "arrays", "data", "models", "train", "predict", "evaluate", "launch", "__init__"),
    "sklearn": (
        *("compat", "losses", "settings", "labels", "building", "course", "runs", "tasks", "base", "classifier"),
        *("regressor", "__init__"),
    ),
    "backends": (
        *(
            "base",
            "inputs",
            "evaluation",
            "parts",
            "sources",
            "constants",
            "cores",
            "host_library",
            "native",
            "row_copies",
        ),
        *("cpu", "cuda", "__init__"),
    ),
    "backends/native": ("rows", "__init__"),
    "backends/row_copies": ("copies", "__init__"),
    "backends/cpu": (
        *("blas", "pool", "loops", "threads", "products", "workspace", "between_parts", "compiled", "bindings"),
        *(
            "updates",
            "phases",
            "phased_steps",
            "program",
            "tensor_program",
            "copied_rows",
            "chain",
            "inference",
            "backend",
            "__init__",
        ),
    ),
    "backends/cpu/loops": ("library", "calls", "shared", "__init__"),
    "backends/cuda": (
        *(
            "kernels",
            "runtime",
            "exchange",
            "persistent",
            "select",
            "lower",
            "run",
            "tensor_program",
            "inference",
            "profile",
            "build_pycuda",
        ),
        "__init__",
    ),
    "backends/cuda/runtime": (
        *("bindings", "compiler", "device", "machine", "memory", "descriptors", "streams", "modules", "graphs"),
        *("messages", "message_kernel", "part_sums", "nccl", "links", "timing", "__init__"),
    ),
    "backends/cuda/persistent": (
        *("network", "tiles", "layout", "cost", "few_rows_tiles", "few_rows", "kernel", "__init__"),
    ),
    "backends/cuda/select": (
        *("thresholds", "setting", "counted", "tiles", "dense", "operands", "loss", "local_stack", "updates", "stages"),
        *("ranks", "data", "inference", "persistent", "row_step", "select", "network", "__init__"),
    ),
    "backends/cuda/lower": ("groups", "cut", "fuse", "emit", "overlap", "lowering", "__init__"),
    "backends/cuda/lower/emit": (
        *("shard", "operands", "rows", "whole_batch", "simt", "gemm", "parts", "fused", "row_step", "input_layer"),
        *("tensor_row_step", "update_layers", "local", "finish", "exchange", "emit", "pieces", "__init__"),
    ),
    "backends/cuda/run": (
        *(
            "primitives",
            "metrics",
            "arrays",
            "card_arrays",
            "maps",
            "trace",
            "data",
            "steps",
            "workspace",
            "binding",
        ),
        *("state", "graphs", "evaluation", "persistent", "training", "program", "__init__"),
    ),
    "backends/cuda/run/data": ("own_rows", "pieces", "partitions", "feed", "orders", "__init__"),
    "backends/cuda/inference": ("copies", "few_rows", "room", "tiers", "inference", "__init__"),
    "backends/cuda/profile": (
        *(
            "peak_rates",
            "costs",
            "predicted",
            "paths",
            "predicted_step",
            "predictions",
            "probe",
            "explain",
            "products",
            "workbench",
        ),
        "__init__",
    ),
    "backends/cuda/kernels": (
        *(
            "operand_format",
            "entry",
            "updates",
            "dense",
            "whole_batch",
            "split_operands",
            "losses",
            "row_step",
            "tensor",
            "local",
            "rows",
            "parts",
            "network",
            "primitives",
        ),
        *("metrics", "launches", "table", "__init__"),
    ),
}

# The same of kernels: a file includes from its own folder and from those before it.
CUDA = ROOT / "cuda"
CUDA_FOLDERS = (
    *("common", "arch", "math", "gemm", "dense", "whole_batch", "fused", "persistent", "local"),
    *("elementwise", "primitives", "bench"),
)
MOST_KERNEL_FILES = 13
MOST_PYTHON_FILES = 18

# The plan is all that a backend reads.
FORBIDDEN = {"backends": {"layers"}}

REQUIRED = {"h5py", "numpy", "psutil", "threadpoolctl", "tqdm"}

# Packages and files of ours that an extra is for, and what they alone import at the top.
OPTIONAL = {"sklearn/": {"sklearn"}, "network/formats/torch_modules.py": {"torch"}}

# (file, function) -> what it may import when it runs.
LAZY = {
    ("backends/__init__.py", "get_backend"): {"mlpgpu.backends.cpu", "mlpgpu.backends.cuda"},
    ("backends/__init__.py", "_open_on_card"): {"mlpgpu.backends.cuda"},
    ("datasets/named.py", "_download"): {"pooch"},
    ("callbacks/histograms.py", "plot"): {"matplotlib"},
    ("callbacks/pruning.py", "__init__"): {"optuna"},
    ("callbacks/tensorboard.py", "begin"): {"tensorboardX"},
    ("history.py", "plot"): {"matplotlib"},
    ("tables/frames.py", "load_pandas"): {"pandas"},
    ("tables/sources.py", "__init__"): {"pyarrow"},
    ("ranks/world.py", "_load_mpi"): {"mpi4py"},
    ("backends/cuda/runtime/bindings.py", "load_nccl"): {"nccl"},
    ("network/formats/onnx_file.py", "write_onnx"): {"onnx"},
    ("network/formats/torch_file.py", "read_torch"): {"torch"},
    ("network/formats/torch_model.py", "sequential_of"): {"torch", "mlpgpu.network.formats.torch_modules"},
    ("network/formats/safetensors_file.py", "read_safetensors"): {"safetensors"},
    ("network/formats/safetensors_file.py", "write_safetensors"): {"safetensors"},
}
CUDA_BINDINGS = "backends/cuda/runtime/bindings.py"

SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: its absolute name, and the function that imports it ('' at the top of the file)."""

    module: str
    function: str


@functools.cache
def imports_of(source: str) -> list[Import]:
    """All imports of a file of the package, each name of ``from . import a, b`` as a module of its own."""
    package = ["mlpgpu", *Path(source).parent.parts]
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        elif isinstance(node, ast.Import):
            found.extend(Import(alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [alias.name for alias in node.names] if is_package(base) else [""]
            found.extend(Import(".".join([*base, name]).rstrip("."), function) for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse((PACKAGE / source).read_text(encoding="utf-8")), "")
    return found


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_package(parts: list[str]) -> bool:
    return parts[:1] == ["mlpgpu"] and ROOT.joinpath(*parts).is_dir()


@functools.cache
def own_module(dotted: str) -> list[str]:
    """The path of one of our modules below ``mlpgpu``; a name that is no file stands for the package's __init__."""
    parts = dotted.split(".")[1:]
    while parts and not (PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    return parts or ["__init__"]


def own_imports(source: str) -> list[list[str]]:
    names = [found.module for found in imports_of(source)]
    return [own_module(name) for name in names if name.split(".")[0] == "mlpgpu"]


@pytest.mark.parametrize("source", SOURCES)
def test_imports_point_downward(source: str) -> None:
    module = Path(source).with_suffix("").parts[0]
    assert module in LEVEL, f"{source}: give it a line in LEVELS"
    for target in own_imports(source):
        name = target[0]
        assert name not in FORBIDDEN.get(module, ()), f"{source} imports {name}"
        assert LEVEL[name] < LEVEL[module] or (name == module and len(target) > 1), f"{source} imports {name} upward"


@pytest.mark.parametrize("source", [source for source in SOURCES if "/" in source])
def test_imports_inside_a_package_point_downward(source: str) -> None:
    path = Path(source).with_suffix("").parts
    for depth in range(1, len(path)):
        order, file = INNER_LEVELS["/".join(path[:depth])], path[depth]
        for target in own_imports(source):
            if tuple(target[:depth]) == path[:depth] and len(target) > depth and target[depth] != file:
                assert order.index(target[depth]) < order.index(file), f"{source} imports {'.'.join(target)} upward"


@pytest.mark.parametrize("source", SOURCES)
def test_functions_import_nothing_but_the_listed(source: str) -> None:
    for found in imports_of(source):
        if found.function:
            allowed = LAZY.get((source, found.function), set())
            assert any(is_within(found.module, name) for name in allowed), f"{found.function} imports {found.module}"


@pytest.mark.parametrize(("source", "function"), LAZY)
def test_listed_lazy_imports_are_still_there(source: str, function: str) -> None:
    present = [found.module for found in imports_of(source) if found.function == function]
    for name in LAZY[source, function]:
        assert any(is_within(module, name) for module in present), f"{function} no longer imports {name}"


@pytest.mark.parametrize("source", SOURCES)
def test_modules_import_only_required_packages(source: str) -> None:
    top = {found.module.split(".")[0] for found in imports_of(source) if not found.function}
    cuda = {"cuda", "pycuda"} if source == CUDA_BINDINGS else set()
    optional = {name for path, names in OPTIONAL.items() if source.startswith(path) for name in names}
    assert top <= sys.stdlib_module_names | REQUIRED | cuda | optional | {"mlpgpu"}


@pytest.mark.parametrize("header", sorted(path.relative_to(CUDA).as_posix() for path in CUDA.rglob("*.cuh")))
def test_kernels_include_downward(header: str) -> None:
    folder = header.split("/")[0]
    names = re.findall(r'^#include "(.+)"$', (CUDA / header).read_text(encoding="utf-8"), re.MULTILINE)
    for name in names:
        assert (CUDA / name).is_file(), f"{header} includes {name}, which is not there"
        above = CUDA_FOLDERS.index(name.split("/")[0])
        assert above <= CUDA_FOLDERS.index(folder), f"{header} includes {name} from a later folder"


@pytest.mark.parametrize("folder", CUDA_FOLDERS)
def test_a_folder_of_kernels_is_seen_at_a_glance(folder: str) -> None:
    assert 0 < len(list((CUDA / folder).iterdir())) <= MOST_KERNEL_FILES


@pytest.mark.parametrize("folder", ["mlpgpu", "tests"])
def test_a_folder_of_python_is_seen_at_a_glance(folder: str) -> None:
    files = [path.parent for path in (ROOT / folder).rglob("*.py")]
    assert [(str(path), count) for path, count in Counter(files).items() if count > MOST_PYTHON_FILES] == []


def test_import_is_light() -> None:
    unwanted = {
        "cuda",
        "keras",
        "matplotlib",
        "mlpgpu.backends.cpu",
        "mpi4py",
        "pandas",
        "pooch",
        "pycuda",
        "scipy",
        "sklearn",
    }
    unwanted |= {"polars", "pyarrow", "torch"}
    script = f"import sys, mlpgpu; print(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", ["cuda", "datasets"])
def test_data_folders_are_no_packages(folder: str) -> None:
    assert (ROOT / folder / "README.md").is_file()
    assert not list((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", sorted(mlpgpu.__all__))
def test_public_name_has_a_docstring(name: str) -> None:
    value = getattr(mlpgpu, name)
    if isinstance(value, str):  # __version__
        return
    assert written_docstring(value), f"{name} has no docstring"
    if inspect.isclass(value):
        members = [(key, member) for key, member in vars(value).items() if not key.startswith("_")]
        methods = [key for key, member in members if callable(member) or isinstance(member, (property, classmethod))]
        assert [key for key in methods if not inspect.getdoc(getattr(value, key))] == []


def written_docstring(value: object) -> bool:
    """Whether there is a docstring beyond the signature that a dataclass makes up."""
    text = inspect.getdoc(value) or ""
    return bool(text) and not text.startswith(f"{getattr(value, '__name__', '')}(")
