"""The rungs of both ladders on the host, against NumPy and each other; and compiled for each generation of cards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gemm_ladder as gemm
import local_ladder as local
import numpy as np
import pytest
from helpers import EPS32, first_and_thorough
from ladder import kept
from shim_runner import Unwritten, run

from mlpgpu import Dataset
from mlpgpu.backends import Backend, get_backend
from mlpgpu.backends.cuda.kernels import HALF_PAIR, TILES, Entry, units
from mlpgpu.backends.cuda.profile.costs import speed_of
from mlpgpu.backends.cuda.profile.peak_rates import PeakRates
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.backends.cuda.runtime.compiler import compile_units
from mlpgpu.bench import json_lines
from mlpgpu.plan import Plan

pytestmark = pytest.mark.xdist_group("ladder")  # one process makes what its tests share

LADDERS = Path(gemm.__file__).parent

SIZES = ((1, 1, 1), (33, 31, 5), (129, 5, 17), (7, 130, 300), (12, 132, 36))
WINDOWS = (1, 4, 29)


def launch(entry: Entry, grid: tuple[int, int, int], args: Mapping[str, object]) -> dict[str, np.ndarray]:
    """On the host, in both orders; an entry of a ladder takes its header from there."""
    header = LADDERS / entry.header
    return run(replace(entry, header=str(header)) if header.exists() else entry, grid, entry.threads, args)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


# --- matrix products ---


@pytest.fixture(scope="module", params=SIZES, ids=str)
def products(request: pytest.FixtureRequest) -> tuple[object, dict[str, np.ndarray]]:
    """A problem, and its product by each rung and by the kernel of mlpgpu's own table."""
    m, n, k = request.param
    problem = gemm.Problem.random(m, n, k)
    found = {}
    for rung in gemm.RUNGS:
        b = gemm.panels(problem.b) if rung.in_panels else problem.b
        args = {"a": problem.a, "b": b, "c": Unwritten((m, n), np.float32), "m": m, "n": n, "k": k}
        found[rung.name] = launch(rung.entry, rung.grid(m, n), args)["c"]
    tile = TILES[-1]
    args = gemm.table_values(problem.a, problem.b, Unwritten((m, n), np.float32), gemm.step_of(m), n, k)
    found["table"] = launch(gemm.of_table(tile), tile.grid(m, n), args)["y"]
    return problem, found


def test_products_are_right(products: tuple[gemm.Problem, dict[str, np.ndarray]]) -> None:
    problem, found = products
    for name, c in found.items():
        assert problem.error_of(name, c) <= len(problem.b) * EPS32 / 2


def test_products_have_the_same_bits(products: tuple[gemm.Problem, dict[str, np.ndarray]]) -> None:
    _, found = products
    first = found["naive"]
    assert {name for name, c in found.items() if not same_bits(c, first)} <= gemm.OTHER_ORDER


def test_the_serial_loop(tmp_path: Path) -> None:
    problem = gemm.Problem.random(9, 6, 7)
    serial = gemm.Serial(tmp_path)
    assert problem.error_of("serial", serial.multiply(problem.a, problem.b)) <= 7 * EPS32
    assert serial.seconds(problem) > 0.0


def test_a_wrong_product_is_told() -> None:
    problem = gemm.Problem.random(9, 6, 70)
    right = (problem.a.astype(np.float64) @ problem.b).astype(np.float32)
    assert problem.error_of("right", right) < EPS32
    for wrong in (np.nan, right[8, 5] + 1e-3):
        changed = right.copy()
        changed[8, 5] = wrong
        with pytest.raises(SystemExit, match="wrong by up to"):
            problem.error_of("wrong", changed)


# --- locally connected layers ---


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n", first_and_thorough((300, 1, 255)))
def test_layers(window: int, n: int) -> None:
    stack = local.Stack.random(n + window - 1, 2, window)
    found = {}
    for rung in (*local.rungs(window), local.of_table()):
        w, y = stack.weights(rung.layout, 0), Unwritten((n,), np.float32)
        operands = local.Operands(stack.x, w, y, local.BIAS_ARRAY, local.STEP_OF_ONE, n, stack.pitch, window)
        found[rung.name] = launch(rung.entry, rung.grid(n), rung.values(operands))["y"]
        stack.check(rung.name, stack.x, found[rung.name], 0, weightless=rung.layout == "none")
    first = found["row-major"]
    assert {name for name, y in found.items() if not same_bits(y, first)} <= {"stencil"}


def test_a_layer_that_shrank_uses_its_first_columns() -> None:
    stack = local.Stack.random(310, 3, 5)
    n = stack.width(1)
    x = stack.layer(stack.x, 0).astype(np.float32)
    for rung in (*local.rungs(5)[1:], local.of_table()):
        w, y = stack.weights(rung.layout, 1), Unwritten((n,), np.float32)
        operands = local.Operands(x, w, y, local.BIAS_ARRAY, local.STEP_OF_ONE, n, stack.pitch, 5)
        stack.check(rung.name, x, launch(rung.entry, rung.grid(n), rung.values(operands))["y"], 1)


def test_a_wrong_layer_is_told() -> None:
    stack = local.Stack.random(40, 3, 4)
    right = stack.layer(stack.x, 1).astype(np.float32)
    stack.check("right", stack.x, right, 1)
    for wrong in (np.nan, right[3] + 1e-3):
        changed = right.copy()
        changed[3] = wrong
        with pytest.raises(SystemExit, match="wrong by up to"):
            stack.check("wrong", stack.x, changed, 1)


def test_the_serial_stack(tmp_path: Path) -> None:
    stack = local.Stack.random(50, 4, 5)
    y = stack.x.astype(np.float64)
    for layer in range(stack.layers):
        y = stack.layer(y, layer)
    np.testing.assert_allclose(local.Serial(tmp_path).run(stack), y, rtol=0, atol=1e-5)


def test_outputs_are_counted_as_published() -> None:
    assert local.outputs(300_000, 1000, 29) == 999 * (300_000 - 500 * 28)


# --- the climbs, on a workbench of the host's ---


class HostBench:
    """What the scripts ask of a workbench; memory is one array, and addresses are places in it."""

    device = SimpleNamespace(multiprocessors=4)

    def __init__(self) -> None:
        self.memory = np.full(1 << 20, 0xFF, np.uint8)
        self.ends: dict[int, int] = {}  # of allocations, by their begin
        self.launches: list[str] = []

    def empty(self, nbytes: int) -> int:
        begin = -(-max(self.ends.values(), default=512) // 512) * 512
        self.ends[begin] = begin + nbytes
        self.poison(begin, nbytes)
        return begin

    def poison(self, address: int, nbytes: int) -> None:
        self.memory[address : address + nbytes] = 0xFF

    def array(self, values: np.ndarray) -> int:
        address = self.empty(values.nbytes)
        self.upload(address, values)
        return address

    def upload(self, address: int, values: np.ndarray) -> None:
        self.memory[address : address + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.memory[destination : destination + nbytes] = self.memory[source : source + nbytes]

    def read(self, address: int, shape: tuple[int, ...]) -> np.ndarray:
        size = 4 * int(np.prod(shape))
        return self.memory[address : address + size].view(np.float32).reshape(shape).copy()

    def is_finite(self, address: int, count: int) -> bool:
        return bool(np.isfinite(self.read(address, (count,))).all())

    def clear(self) -> None:
        self.ends.clear()

    def put(self, entry: Entry, grid: tuple[int, int, int], values: Mapping[str, object]) -> None:
        self.launches.append(entry.name)
        args = dict(values)
        assert set(args) == {argument.name for argument in entry.arguments}
        for argument in entry.arguments:
            address = args[argument.name]
            if argument.is_pointer and isinstance(address, int):
                begin = max(begin for begin in self.ends if begin <= address)
                dtype = STEP if "Step" in argument.ctype else np.float32
                args[argument.name] = self.memory[address : self.ends[begin]].view(dtype)
        for name, result in launch(entry, grid, args).items():
            self.upload(int(values[name]), result)  # type: ignore[call-overload]  # a pointer's value: an address

    def seconds(self, put: Callable[[], object]) -> float:
        put()
        return 1e-3


class HostProbe:
    """What the scripts ask of a probe, by the CPU backend; what is put at the parameters' address lies on a bench."""

    timed: Sequence[SimpleNamespace] = ()

    def __init__(
        self, bench: HostBench, plan: Plan, _: None, start: Callable[[HostProbe], None], data: Dataset
    ) -> None:
        self.program = get_backend("cpu").compile(plan)
        self.load, self.draw = self.program.load, self.program.draw
        self._parameters = bench.empty(4 * plan.parameter_count)
        start(self)
        if not bench.ends:  # cleared after weights were put there
            values = bench.read(self._parameters, (1, plan.parameter_count))
            self.load(replace(self.program.read(), parameters=values))
        self.predicted = self.program.predict(data)

    def address(self, array: str) -> int:
        assert array == "parameters"
        return self._parameters

    def launches(self, _: PeakRates) -> Sequence[SimpleNamespace]:
        return self.timed

    def seconds(self) -> float:
        return 2e-3


RATES = PeakRates(copied=1e9, cached=1e9, computed=1e9, cache_bytes=1)


def host_backend() -> Backend:
    backend = get_backend("cpu")
    backend.device = nullcontext()  # type: ignore[attr-defined]  # a card's attribute, which the host's lacks
    return backend


def test_a_climb_of_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = SimpleNamespace(name="its_kernel", operand_format=HALF_PAIR)
    line = SimpleNamespace(flops=1, seconds=2e-3, launch=SimpleNamespace(entry=entry))
    bench = HostBench()
    monkeypatch.setattr(HostProbe, "timed", [line, SimpleNamespace(flops=0)])
    monkeypatch.setattr(gemm, "Probe", partial(HostProbe, bench))
    climb = gemm.Climb(host_backend(), bench, gemm.Serial(tmp_path), RATES, 1e-2)
    climb.check((35, 33, 9))
    climb.at((20, 33, 9))
    timed = {result.rung: result for result in climb.results if result.seconds}
    assert timed.keys() == {
        "serial loop",
        *(rung.name for rung in gemm.RUNGS),
        "mlpgpu, plain cores",
        "mlpgpu, float32",
    }
    assert timed["naive"].gflops == pytest.approx(1e-9 * 2 * 20 * 33 * 9 / 1e-3)
    assert timed["mlpgpu, float32"].kernel == "its_kernel" and timed["mlpgpu, float32"].seconds == 2e-3
    assert timed["mlpgpu, float32"].of_limit == pytest.approx(2 * 20 * 33 * 9 / 2e-3 / (1e9 * speed_of(line.launch)))
    left_out = {result.rung: result.left_out for result in climb.results if result.left_out}
    assert left_out.keys() == {"mlpgpu, tf32", "mlpgpu, bfloat16"} and "precision" in left_out["mlpgpu, tf32"]
    climb.at((40, 330, 9))  # twenty times as long on rungs that were allowed ten
    assert "naive                     left out: would take about 0 s" in capsys.readouterr().out


def test_a_rung_that_writes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HostBench()
    put = bench.put
    monkeypatch.setattr(bench, "put", lambda entry, *rest: entry.name == "gemm_panels_rung" or put(entry, *rest))
    with pytest.raises(SystemExit, match=r"panels, .*: wrong by up to"):
        gemm.Climb(get_backend("cpu"), bench, gemm.Serial(tmp_path), RATES).check((5, 6, 7))


def test_a_climb_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = HostBench()
    monkeypatch.setattr(local, "Probe", partial(HostProbe, bench))
    climb = local.Climb(host_backend(), bench, local.Serial(tmp_path), 1e9)
    for distinct in (True, False):
        climb.at(160, 6, distinct=distinct)
    names = {"serial loop", *(rung.name for rung in local.rungs(29)), "mlpgpu, a layer", "mlpgpu, a plan"}
    for weights in ("distinct", "reused"):
        assert {result.rung for result in climb.results if result.weights == weights and result.seconds} == names
    assert bench.launches.count("local_staged_29") == 2 * 11  # of each network one layer, and five of them twice
    assert "left out" not in capsys.readouterr().out


def test_outputs_that_are_not_finite_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HostBench()
    monkeypatch.setattr(bench, "copy", lambda *_: None)  # weights beyond the pool stay NaN
    with pytest.raises(SystemExit, match="row-major: the network's outputs are not finite"):
        local.Climb(get_backend("cpu"), bench, local.Serial(tmp_path), 1e9).at(200, 7, distinct=True)


# --- for cards ---


@pytest.mark.parametrize("arch", first_and_thorough(("sm_90a", "sm_75", "sm_80")))
@pytest.mark.parametrize("name", ("gemm_ladder", "local_ladder"))
def test_compiles_without_spills(name: str, arch: str) -> None:
    rungs = gemm.RUNGS if name == "gemm_ladder" else local.rungs(29)
    entries = [rung.entry for rung in rungs]
    (cubin,) = compile_units(units(entries), arch, sources=LADDERS).values()
    assert set(cubin.resources) == {entry.name for entry in entries}
    for entry in entries:
        took = cubin.resources[entry.name]
        assert took.spill_bytes == took.stack_bytes == took.shared_bytes == 0, entry.name


@pytest.mark.parametrize("name", ("gemm_ladder", "local_ladder"))
def test_without_a_card_the_script_says_so(name: str) -> None:
    command = [sys.executable, LADDERS / f"{name}.py", "--quick"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=LADDERS.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("CUDA: expected"), done.stderr


def test_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products = [gemm.Result(rung, n, n, n, "", 1e-3, 2e-6 * n**3) for rung in ("a", "b") for n in (10, 20)]
    left_out = gemm.Result("b", 30, 30, 30, left_out="would take too long")
    gemm.draw([*products, left_out, gemm.Result("a", 30, 30, 4, "", 1e-3, 7.2)], tmp_path / "gemm.png")
    layers = [local.Result("a", n, k, "distinct", "", 1e-3, 1e3 * n * k) for n, k in ((50, 3), (100, 3), (100, 2))]
    local.draw([*layers, local.Result("a", 100, 3, "reused", left_out="no room")], tmp_path / "local.png")
    for name in ("gemm", "local"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    lines, picture = tmp_path / "kept.jsonl", tmp_path / "again.png"
    lines.write_text(json_lines(layers, {"card": "Card"}))
    assert kept(lines, local.Result) == layers
    monkeypatch.setattr(sys, "argv", ["", "--only-draw", "--json", str(lines), "--picture", str(picture)])
    local.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
