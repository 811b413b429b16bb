"""benchmarks/map.py: what is drawn, what a point's line holds, what is measured again, and the report."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mlpgpu import bench
from mlpgpu.activations import ACTIVATIONS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = bench.Workload((6, 7, 5, 3), batch_size=4, rows=12, rate=0.01)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/map.py; its neighbours are imported by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import map as script

    yield script
    for name in set(sys.modules) - before:
        if name == "map" or name.startswith("map_"):
            del sys.modules[name]


def options(script: ModuleType, *libraries: str) -> Any:
    return script.Options("cpu", ("mlpgpu", *libraries), None, rounds=3, profiles=True)


# --- the draw ---


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_seed_and_a_number_make_a_point(backend: str, script: ModuleType) -> None:
    bounds = script.BOUNDS[backend]
    points = [script.draw("one", number, bounds) for number in range(20)]
    assert [script.draw("one", number, bounds) for number in reversed(range(20))] == points[::-1]
    assert script.draw("two", 0, bounds) != points[0]
    assert len({point.workload for point in points}) == 20


def test_the_draw_stays_as_it_is(script: ModuleType) -> None:
    """Maps of two versions have the same points only as long as this holds."""
    assert [str(script.draw("try", number, script.BOUNDS["cuda"])) for number in (1, 9)] == [
        "407-2048-192-384-1024-2048-1536-2, batch 256, tf32, adam, relu, dropout 0.2",
        "104-2058-806-1943-817-1559-104, batch 512, float32, momentum, sigmoid, dropout 0.5",
    ]


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_points_keep_to_the_bounds_and_reach_all_kinds(backend: str, script: ModuleType) -> None:
    bounds = script.BOUNDS[backend]
    points = [script.draw("bounds", number, bounds) for number in range(400)]
    for point in [*points, *script.grid(bounds)]:
        workload = point.workload
        n_in, *hidden, n_out = workload.widths
        for (low, high), values in (
            (bounds.inputs, [n_in]), (bounds.hidden, hidden), (bounds.outputs, [n_out]),
            (bounds.batch, [workload.batch_size]), (bounds.epoch_steps, [workload.steps]), ((1, 6), [len(hidden)]),
        ):  # fmt: skip
            assert all(low <= value <= high for value in values)
        assert workload.flops <= bounds.flops and workload.rows % workload.batch_size == 0
        assert workload.rows * 4 * (n_in + 1) <= bounds.data_bytes
        assert n_out > 1 or workload.loss == "squared_error"
    workloads = [point.workload for point in points]
    assert {point.precision for point in points} == set(bounds.precisions)
    assert {len(workload.widths) - 2 for workload in workloads} == set(range(1, 7))
    assert {workload.activation for workload in workloads} == set(ACTIVATIONS) - {"identity"}
    assert {workload.optimizer for workload in workloads} == {"momentum", "adam"}
    assert {workload.source for workload in workloads} == {"float32", "uint8"}
    assert {workload.dropout > 0 for workload in workloads} == {True, False}
    for share in (
        np.mean([len(set(workload.widths[1:-1])) > 1 for workload in workloads]),
        np.mean([any(width % 2 for width in workload.widths[1:-1]) for workload in workloads]),
        np.mean([workload.batch_size < 16 for workload in workloads]),
        np.mean([max(workload.widths[1:-1]) > bounds.hidden[1] / 8 for workload in workloads]),
    ):
        assert 0.15 < share < 0.7


def test_all_points_of_a_grid_differ(script: ModuleType) -> None:
    points = list(script.grid(script.BOUNDS["cuda"]))
    assert len({point.number for point in points}) == len({(p.precision, p.workload) for p in points}) == len(points)
    assert len(points) > 150


# --- a point ---


def small_point(script: ModuleType, **changes: Any) -> Any:
    return script.Point("small", 0, "float32", dataclasses.replace(SMALL, **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "adam", "source": "uint8"}, {"dropout": 0.5}, {"loss": "squared_error", "activation": "gelu"}],
    ids=str,
)
def test_a_line_has_figures_of_each_contender(
    changes: dict[str, Any], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import map_measure

    monkeypatch.setattr(bench, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(map_measure, "PAUSES", {"cpu": 0.0})
    asked = options(script, "scikit-learn")
    point = small_point(script, **changes)
    line = map_measure.measure(point, asked, map_measure.load(asked))
    json.dumps(line)
    ours = line["contenders"]["mlpgpu"]
    assert 0.0 < ours["fastest"] <= ours["microseconds"] <= ours["slowest"]
    assert 0.0 < ours["error"] < 1e-5
    assert line["costliest"]["launches"] >= 9 and 0.0 < line["costliest"]["share"] <= 1.0
    if "dropout" in changes or "activation" in changes:
        assert "left_out" in line["contenders"]["scikit-learn"] and line["ratio"] is None
    else:
        assert line["ratios"] == {"scikit-learn": line["ratio"]} and line["ratio"] > 0.0
    assert map_measure.other_losses(line, point) == []
    assert not script.has_failed(line)


def test_an_error_of_one_contender_is_recorded(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import map_contenders
    import map_measure

    def fail(*arguments: Any, **named: Any) -> None:
        raise MemoryError("out of it")

    monkeypatch.setattr(bench, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(map_measure, "PAUSES", {"cpu": 0.0})
    monkeypatch.setattr(map_contenders, "ScikitLearn", fail)
    asked = options(script, "scikit-learn")
    line = map_measure.measure(small_point(script), asked, map_measure.load(asked))
    assert line["contenders"]["scikit-learn"] == {"failed": "MemoryError: out of it"}
    assert line["contenders"]["mlpgpu"]["microseconds"] > 0.0 and script.has_failed(line)


def test_the_error_of_a_step_is_relative_and_never_passes_nan(script: ModuleType) -> None:
    import map_contenders

    expected = [np.array([[3.0, 4.0]]), np.array([12.0])]
    assert map_contenders.error_of(expected, expected) == 0.0
    assert map_contenders.error_of([1.5 * each for each in expected], expected) == pytest.approx(0.5)
    assert np.isnan(map_contenders.error_of([expected[0], np.array([np.nan])], expected))


def test_a_reference_that_was_made_ahead_is_read_once(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import map_contenders
    import map_measure

    point = dataclasses.replace(script.draw("first", 3, script.BOUNDS["cpu"]), workload=SMALL)
    map_measure.keep_reference(point)
    assert map_measure.kept_reference(point) is None  # nobody named a folder
    monkeypatch.setenv(map_measure.REFERENCES, str(tmp_path))
    map_measure.keep_reference(point)
    assert len(list(tmp_path.iterdir())) == 1
    order = map_measure.Sampling(point.workload.rows, point.workload.batch_size, seed=0).order(0)
    expected = map_contenders.reference(point, point.workload.arrays(), order)
    found = map_measure.kept_reference(point)
    assert found is not None and all(map(np.array_equal, found, expected)) and len(found) == len(expected)
    assert map_measure.kept_reference(point) is None and not list(tmp_path.iterdir())


def test_a_ratio_is_of_the_fastest_contender_of_a_library(script: ModuleType) -> None:
    import map_measure

    found = map_measure.ratios(
        {"mlpgpu": [1.0, 2.0, 4.0], "JAX, a": [9.0] * 3, "JAX bf16x6, b": [2.0, 6.0, 8.0], "PyTorch, c": [4.0] * 3}
    )
    assert found["ratios"] == {"PyTorch": 2.0, "JAX": 2.0} and found["fastest"]["JAX"] == "JAX bf16x6, b"
    assert map_measure.ratios({"JAX, a": [1.0]}) == {}


def test_ways_of_mlpgpu_are_no_peers(script: ModuleType) -> None:
    from map_measure import ratios
    from map_report import report

    found = ratios({"mlpgpu": [2.0], "mlpgpu, plain cores": [1.5], "mlpgpu, one": [4.0], "JAX, plain scan": [3.0]})
    assert found["ratio"] == 1.5 and found["ways"] == {"plain cores": 0.75, "one": 2.0}
    point = {"seed": "s", "widths": [2, 3], "batch_size": 4, "precision": "tf32", "optimizer": "adam"}
    point |= {"activation": "relu", "dropout": 0.0, "source": "float32", "backend": "cuda", "contenders": {}}
    lines = [{**point, "number": number, "ways": ways} for number, ways in enumerate((found["ways"], {"one": 0.95}))]
    text = report(lines)
    assert "of 2 points with other ways the chosen one takes at most 1.1 times the fastest: 1" in text
    assert [line.split()[-3:] for line in text.splitlines()[-2:]] == [
        ["plain", "cores", "0.75"],
        ["relu", "one", "0.95"],
    ]


def test_thresholds_of_ways_are_put_back(script: ModuleType) -> None:
    from counted import thresholds_of
    from map_contenders import WAYS

    from mlpgpu.backends.cuda.select import thresholds

    before = dict(vars(thresholds))
    for changed in WAYS.values():
        with pytest.raises(ZeroDivisionError), thresholds_of(changed):
            assert set(changed) <= set(before)
            raise ZeroDivisionError
    assert vars(thresholds) == before


@pytest.mark.parametrize("rows", [16, 2000])
def test_kernels_are_known_without_a_card(rows: int, script: ModuleType) -> None:
    """Those of the persistent kernel where the plan trains in it, else of its launches."""
    import ahead

    point = small_point(script, widths=(784, 128, 10), batch_size=rows, rows=2 * rows)
    entries = ahead.entries_of(point, {}, ahead.CARDS["H200"])
    assert any(entry.header.startswith("persistent/") for entry in entries) == (rows == 16)
    launches = ahead.entries_of(point, ahead.WAYS["launch by launch"], ahead.CARDS["H200"])
    assert not any(entry.header.startswith("persistent/") for entry in launches)


# --- processes ---


def answer_or_end(connection: Connection) -> None:
    """A process that answers twice the request, ends at 0, and is silent at None."""
    while True:
        request = connection.recv()
        if request == 0:
            sys.exit(3)
        if request is not None:
            connection.send(2 * request)


def test_a_process_that_ends_or_is_silent_is_noticed(script: ModuleType) -> None:
    import map_measure

    process = map_measure.Process(answer_or_end)
    assert process.ask(3, 60.0) == 6
    with pytest.raises(map_measure.ProcessLost, match="ended with status 3"):
        process.ask(0, 60.0)
    silent = map_measure.Process(answer_or_end)
    assert silent.ask(1, 60.0) == 2
    with pytest.raises(map_measure.ProcessLost, match="no answer after"):
        silent.ask(None, 0.1)
    assert not silent._process.is_alive()


# --- a run ---


class FakeMeasurer:
    """Gives each point a line, and ends the time after two of them."""

    surroundings: dict[str, Any] = {"versions": {}, "machine": "M", "commit": "c"}  # noqa: RUF012 (no test changes it)
    measured: list[int] = []  # noqa: RUF012 (of all instances, as the test counts)

    def __init__(self, *arguments: Any) -> None:
        pass

    def about(self) -> dict[str, Any]:
        return self.surroundings

    def measure(self, point: Any) -> dict[str, Any]:
        self.measured.append(point.number)
        return {"contenders": {"mlpgpu": {"failed": "it"} if point.number == 1 else {"microseconds": 1.0}}}

    def close(self) -> None:
        pass


class FakeCompilers(FakeMeasurer):
    def compile(self, points: Any, deadline: float) -> None:
        assert deadline > time.perf_counter()


def test_a_run_goes_on_where_one_stopped(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "Measurer", FakeMeasurer)
    monkeypatch.setattr(script, "Compilers", FakeCompilers)
    monkeypatch.setattr(FakeMeasurer, "measured", [])
    path = tmp_path / "folder" / "map.jsonl"

    def run(*arguments: str) -> list[int]:
        FakeMeasurer.measured.clear()
        monkeypatch.setattr(sys, "argv", ["map.py", "--backend", "cpu", "--json", str(path), *arguments])
        script.main()
        return list(FakeMeasurer.measured)

    assert run("--points", "3", "--only", "mlpgpu") == [0, 1, 2]
    assert run("--points", "5", "--only", "mlpgpu") == [3, 4]
    assert run("--points", "5", "--only", "mlpgpu", "--retry") == [1]
    assert run("--points", "2", "--only", "mlpgpu", "--seed", "other") == [0, 1]
    assert run("--points", "2", "--only", "JAX") == [0, 1]
    assert run("--points", "2", "--only", "mlpgpu", "JAX") == []
    assert run("--points", "2", "--first", "5", "--most-seconds", "0") == []
    assert run("--numbers", "1-2", "7", "7", "--only", "mlpgpu", "--seed", "other") == [2, 7]
    lines = script.read(path)
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4, 1, 0, 1, 0, 1, 2, 7]
    assert lines[0]["commit"] == "c" and lines[0]["widths"] and lines[0]["libraries"] == ["mlpgpu"]
    path.write_text(path.read_text()[:-20])
    assert run("--numbers", "7", "--only", "mlpgpu", "--seed", "other") == [7]
    assert [line["number"] for line in script.read(path)][-2:] == [2, 7]


@pytest.mark.parametrize("text", ["9-8", "3-", "x", ""])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "map.py"), "--numbers", text], capture_output=True, text=True
    )
    assert done.returncode == 2 and f"range such as 10-19, got '{text}'" in done.stderr


@pytest.mark.parametrize("name", ["map.py", "ahead.py"])
def test_a_kept_file_that_is_not_there_is_said(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / name), "--again", str(tmp_path / "none.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "none.jsonl, which is none" in done.stderr
    assert not list(tmp_path.iterdir())


def test_kept_points_run_again_beside_their_peers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "Measurer", FakeMeasurer)
    monkeypatch.setattr(script, "Compilers", FakeCompilers)
    monkeypatch.setattr(FakeMeasurer, "measured", [])
    drawn = [script.draw("s", number, script.BOUNDS["cpu"]) for number in range(5)]
    times = [
        {"mlpgpu": 2.0, "JAX, plain scan": 3.0},
        {"mlpgpu": 2.0, "JAX, plain scan": 1.0},  # fails again
        {"mlpgpu": 2.0, "JAX, plain scan": 9.0},  # not below 2
        {"mlpgpu": 2.0, "JAX, plain scan": 2.0, "JAX, unrolled": 1.8, "PyTorch, eager": 3.0, "mlpgpu, other": 1.0},
        {"mlpgpu": 2.0},
    ]
    lines = [{**made_up(n, each, backend="cpu"), **drawn[n].plain()} for n, each in enumerate(times)]
    later = made_up(0, {"mlpgpu": 4.0, "JAX, plain scan": 2.5}, backend="cpu", commit="later")
    lines += [{**later, **drawn[0].plain()}]
    lines += [made_up(2, {"mlpgpu": 9.0, "JAX, plain scan": 1.0})]  # of a card
    known, path = tmp_path / "kept.jsonl", tmp_path / "map.jsonl"
    known.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--backend", "cpu", "--json", str(path), "--again", str(known), "--below", "2"]
    monkeypatch.setattr(sys, "argv", ["map.py", *arguments])
    script.main()
    assert FakeMeasurer.measured == [1, 0, 3]
    failed, first, other = script.read(path)
    assert "ratio" not in failed and set(failed["contenders"]) == {"mlpgpu", "JAX, plain scan"}
    assert first["ratios"] == {"JAX": 2.5} and first["peers_commit"] == "later" and first["libraries"] == ["mlpgpu"]
    assert other["ratios"] == {"JAX": 1.8, "PyTorch": 3.0} and other["ratio"] == 1.8
    assert other["fastest"] == {"JAX": "JAX, unrolled", "PyTorch": "PyTorch, eager"}
    assert all(first[name] == value for name, value in json.loads(json.dumps(drawn[0].plain())).items())


# --- the report ---


def made_up(number: int, times: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A line of a point on a card, whose peers have a form each."""
    contenders = {name: {"microseconds": value, "loss": 1.0} for name, value in times.items()}
    if "mlpgpu" in contenders:
        contenders["mlpgpu"] |= {"error": 1e-7 * (number + 1), "peak_bytes": 4_000_000}
    ours = times.get("mlpgpu")
    found = {name.split(",")[0]: value / ours for name, value in times.items() if name != "mlpgpu"} if ours else {}
    line = {
        "backend": "cuda", "seed": "s", "number": number, "precision": "float32", "widths": [9, 16 << number, 2],
        "batch_size": 4 << number, "optimizer": "adam", "activation": "relu", "dropout": 0.0, "source": "float32",
        "contenders": contenders, "ratios": found, "fastest": {name.split(",")[0]: name for name in times},
        "costliest": {"launch": f"launch {number}", "share": 0.25, "launches": 9}, "card": "H", "driver": "5",
        "versions": {"jax": "1"}, "commit": "abc", "machine": "M", "libraries": ["mlpgpu", "JAX"],
    }  # fmt: skip
    return {**line, **changes}


def test_the_report_of_a_file(script: ModuleType, tmp_path: Path) -> None:
    import map_report

    lines = [
        made_up(0, {"mlpgpu": 10.0, "JAX, plain scan": 20.0}),
        made_up(1, {"mlpgpu": 10.0, "JAX, plain scan": 8.0}, precision="tf32", dropout=0.5),
        made_up(2, {"mlpgpu": 10.0, "JAX, plain scan": 50.0}),
        made_up(2, {"mlpgpu": 10.0, "PyTorch, graph": 9.5}),  # another run's
        made_up(3, {}, failed="its process ended"),
        made_up(4, {"mlpgpu": 10.0}, other_losses=["JAX, plain scan"]),
    ]
    found = map_report.report(lines, tmp_path / "map.png")
    rows = [" ".join(row.split()) for row in found.splitlines()]
    assert rows[0] == "5 points, 3 of them beside a peer"
    assert "H, driver 5; jax 1; commit abc" in rows
    assert "all 3 0.80 0.95 2.00 1 2 2 3.0e-07" in rows
    assert "tf32 1 0.80 0.80 0.80 1 1 1 2.0e-07" in rows and "dropout 1 0.80 0.80 0.80 1 1 1 2.0e-07" in rows
    assert "beside JAX 3 0.80 2.00 5.00 1 1 1" in rows and "beside PyTorch 1 0.95 0.95 0.95 0 1 1" in rows
    worst = next(place for place, row in enumerate(rows) if row.startswith("the worst 3")) + 2
    expected = "s 1: 9-32-2, 8, tf32, adam relu dropout 0.5 10.0 8.0 JAX 0.80 launch 1 25% 9 2.0e-07 / – 4 / –"
    assert rows[worst] == expected and rows[worst + 1].startswith("s 2:") and "9.5 PyTorch 0.95" in rows[worst + 1]
    assert any(row.startswith("0.9 to 1 1 █") for row in rows)
    assert any(row.startswith("s 3:") and row.endswith("FAILED: its process ended") for row in rows)
    assert rows[-1].startswith("s 4:") and rows[-1].endswith(": JAX, plain scan")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "0 of them" in map_report.report(lines[4:5])
