"""benchmarks/predict.py: what it holds for right, that it works without peers, and what is made of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import predict

    return predict


def task_of(predict: ModuleType, widths: tuple[int, ...], **changes: object) -> object:
    task = predict.Task(predict.Network(widths), "float32", 2000, "host", "cpu", 1)
    return replace(task, **changes)


def computed(task: object, bits: int | None = None) -> np.ndarray:
    """Probabilities in float32 arithmetic, or with operands rounded to so many bits."""

    def rounded(values: np.ndarray) -> np.ndarray:
        if bits is None:
            return values
        fraction, exponent = np.frexp(values)
        return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits).astype(np.float32)

    h = task.x.astype(np.float32)
    for place, (weight, bias) in enumerate(task.layers):
        h = rounded(h) @ rounded(weight) + bias
        if place < len(task.layers) - 1:
            h = np.maximum(h, 0) if task.network.activation == "relu" else np.tanh(h)
    exponentials = np.exp(h - h.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("widths", [(20, 2), (784, 128, 10), (300, 512, 512, 10)], ids=str)
def test_float32_is_right_and_eleven_bits_are_not(
    widths: tuple[int, ...], activation: str, dtype: str, predict: ModuleType
) -> None:
    task = task_of(predict, widths, network=predict.Network(widths, activation), dtype=dtype)
    reference = predict.Reference.of(task)
    assert 0 < reference.excess(task, computed(task)) < 0.5
    assert reference.excess(task, computed(task, bits=11)) > 1


def test_wrong_results_are_found(predict: ModuleType) -> None:
    task = task_of(predict, (20, 16, 3))
    reference, right = predict.Reference.of(task), computed(task)
    lacking, swapped = right.copy(), right.copy()
    lacking[-1, -1] = np.nan
    different = next(row for row in range(1, 2000) if task.index[row] != task.index[0])
    swapped[[0, different]] = right[[different, 0]]
    for wrong in (lacking, swapped):
        assert not reference.excess(task, wrong) <= 1
    assert reference.excess(task, right[:-1]) == np.inf


def test_evaluations_are_checked_too(predict: ModuleType) -> None:
    task = task_of(predict, (20, 16, 3), place="card")
    reference, p = predict.Reference.of(task), computed(task).astype(np.float64)
    loss = -np.log(p[np.arange(task.rows), task.labels]).mean()
    accuracy = (p.argmax(axis=1) == task.labels).mean()
    assert reference.excess(task, np.array([loss, accuracy])) < 1
    assert reference.excess(task, np.array([loss + 1e-4, accuracy])) > 1
    assert reference.excess(task, np.array([loss, accuracy + 1 / task.rows])) > 1
    assert not reference.excess(task, np.array([np.nan, accuracy])) <= 1


def test_inputs_are_rows_of_the_base_and_bytes_mean_the_same(predict: ModuleType) -> None:
    task = task_of(predict, (20, 16, 3), dtype="uint8")
    assert task.x.dtype == np.uint8 and task.x.shape == (2000, 20) and len(task.labels) == 2000
    np.testing.assert_array_equal(task.x, task.base[task.index])
    np.testing.assert_allclose(task.layers[0][0] * 255, task.network.layers[0][0], rtol=1e-6)
    assert len({row.tobytes() for row in task.x}) > 500


def test_networks_drawn_are_those_of_the_seed(predict: ModuleType) -> None:
    drawn = predict.random_tasks(6, 3, "cpu", 500)
    assert drawn == predict.random_tasks(6, 3, "cpu", 500) != predict.random_tasks(6, 4, "cpu", 500)
    assert len({task.network for task in drawn}) == 6 and max(task.rows for task in drawn) <= 500
    assert {task.place for task in predict.random_tasks(1, 0, "cuda", 500)} == {"host", "card"}
    grouped = predict.groups(drawn, 4)
    assert [len({task.network for task in group}) for group in grouped] == [4, 2]
    assert [task for group in grouped for task in group] == drawn


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / "predict.py"), *options], capture_output=True, text=True)


def test_it_runs_without_peers(tmp_path: Path) -> None:
    lines, picture = tmp_path / "predict.jsonl", tmp_path / "predict.png"
    sizes = ["--network", "5-4-3", "--rows", "1", "7", "--dtype", "uint8", "--only", "mlpgpu", "ONNX Runtime"]
    done = run(*sizes, "--quick", "--random", "1", "--seed", "2", "--json", str(lines), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    ours = [record for record in records if record["contender"] == "mlpgpu"]
    assert {(record["network"], record["rows"]) for record in ours} > {("5-4-3", 1), ("5-4-3", 7)}
    assert all(0 < record["fastest"] <= record["microseconds"] <= record["p99"] for record in records)
    assert all(record["excess"] <= 1 and "mlpgpu" in record["versions"] for record in records)
    assert "5-4-3" in done.stdout and picture.read_bytes().startswith(b"\x89PNG")
    if not any(record["contender"] == "ONNX Runtime" for record in records):
        assert "ONNX Runtime is left out: not installed" in done.stderr


@pytest.mark.parametrize(
    "options", [("--network", "5"), ("--network", "5-x"), ("--rows", "0"), ("--rounds", "0"), ("--random", "-1")]
)
def test_options_that_mean_nothing_are_refused(
    options: tuple[str, ...], predict: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["predict.py", *options])
    with pytest.raises(SystemExit, match="2"):
        predict.main()
    assert "expected" in capsys.readouterr().err


def record(contender: str, microseconds: float, **changes: object) -> dict[str, object]:
    about = {"backend": "cpu", "machine": "CPU", "cores": 2, "commit": "0123456789ab", "versions": {"mlpgpu": "0.1"}}
    what = {"network": "5-4-3", "dtype": "float32", "rows": 1, "place": "host", "form": "run", "threads": 2}
    return {**about, **what, "contender": contender, "microseconds": microseconds, "p99": 9.0, **changes}


def test_the_report_shows_each_contender_in_its_fastest_form(predict: ModuleType, tmp_path: Path) -> None:
    records = [
        record("mlpgpu", 4.0, form="predict"), record("mlpgpu", 2.0, form="predictor"),
        record("PyTorch", 8.0, form="eager"), record("PyTorch", 3.0, threads=1), record("JAX", 5.0),
        record("PyTorch", 8.0, rows=1000), record("mlpgpu", 16.0, dtype="uint8"), record("JAX", 8.0, dtype="uint8"),
    ]  # fmt: skip
    rows = predict.report.predictions_table(records).splitlines()
    assert rows[0] == "| network | inputs | rows | mlpgpu | PyTorch | JAX | best peer |"
    assert rows[2] == "| 5-4-3 | float32 | 1 | **2** (9) | 3 (9) run, 1 thread | 5 (9) run, 2 threads | × 1.50 |"
    assert rows[3] == "| 5-4-3 | float32 | 1,000 | – | 8 (9) run, 2 threads | – | – |"
    assert rows[4].endswith("| × 0.50 |")
    on_card = record("JAX", 7.0, backend="cuda", place="card", card="H", driver="1")
    part = predict.report.predictions_part([*records, on_card])
    assert "From host to host, on 2 cores of CPU, mlpgpu 0.1 at 0123456789:" in part
    assert "that lie on the card, on an H, driver 1" in " ".join(part.split())
    predict.report.draw_predictions([*records, on_card], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
