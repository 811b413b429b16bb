"""``mlpgpu.bench``: workloads, epochs, turns, results; the bench command; and the report of what peers.py measures."""

from __future__ import annotations

import itertools
import json
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.__main__ import main
from mlpgpu.backends.cpu import CpuBackend
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.profile.costs import flops
from mlpgpu.errors import ConfigurationError

REPORT = Path(__file__).parents[2] / "benchmarks" / "report.py"
SMALL = bench.Workload((5, 4, 3), batch_size=4, rows=10, rate=0.1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One workload that takes no time, and turns of one call."""
    monkeypatch.setattr(bench, "WORKLOADS", {"small": SMALL})
    monkeypatch.setattr(bench, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(bench, "CPU_PRODUCT_SIZE", 64)


def test_a_workload_counts_its_operations_and_bytes() -> None:
    assert SMALL.steps == 3
    # x W (2·4·5·4), y W (2·4·4·3), dz Wᵀ (2·4·3·4), and both weights' gradients
    assert SMALL.flops == 160 + 96 + 96 + 160 + 96
    assert SMALL.batch_bytes == 4 * 4 * (5 + 1)
    assert SMALL.state_bytes == 2 * 4 * (5 * 4 + 4 + 4 * 3 + 3)


def test_arrays_suit_the_network() -> None:
    for workload in (SMALL, bench.Workload((5, 4, 3), 4, 10, 0.1, loss="squared_error")):
        trainer = workload.trainer(backend="cpu")
        x, y = workload.arrays()
        assert trainer.fit(mg.Dataset(x, y), 1, progress=False)["loss"][-1] > 0.0


def test_epochs_train_as_a_trainer_does() -> None:
    schedule = mg.OneCycle(0.5, epochs=3)
    data = mg.Dataset(*SMALL.arrays())

    def make_trainer() -> mg.Trainer:
        return mg.Trainer(SMALL.network(), "softmax_cross_entropy", mg.Momentum(schedule), batch_size=4, backend="cpu")

    trainer = make_trainer()
    losses = trainer.fit(data, 3, progress=False)["loss"]
    run = bench.Epochs(make_trainer(), data)
    for _ in range(2):
        assert [run() for _ in range(3)] == pytest.approx(losses, rel=1e-6)
        assert np.array_equal(run.program.read().parameters[0], trainer.network.flat_parameters())
        assert run.accuracy(data) == trainer.evaluate(data, ["accuracy"])["accuracy"]
        run.reset()


def test_contenders_take_turns_for_about_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    calls: list[str] = []

    def work(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        calls.append(name)

    monkeypatch.setattr(bench, "TURN_SECONDS", 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    contenders = {"slow": lambda: work("slow", 1.0), "fast": lambda: work("fast", 0.125)}
    seconds = bench.take_turns(contenders, rounds=2)
    assert calls[:4] == ["slow", "slow", "fast", "fast"]  # not measured
    assert [(name, len(list(own))) for name, own in itertools.groupby(calls[4:])] == [("slow", 1), ("fast", 4)] * 2
    assert seconds == {"slow": [1.0, 1.0], "fast": [0.125, 0.125]}


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert bench.median_ratio([1.0, 2.0, 6.0], [1.0, 1.0, 2.0]) == 2.0


def test_the_error_of_a_product_is_relative_and_never_passes_nan() -> None:
    product = bench.Product.random(64)
    exact = product.a.astype(np.float64) @ product.b.astype(np.float64)
    assert product.error(exact) == 0.0
    assert product.error(1.25 * exact) == pytest.approx(0.25)
    assert np.isnan(product.error(np.full_like(exact, np.nan)))
    assert 0.0 < bench.forward_error(product, CpuBackend(), "float32") < 1e-6


def test_only_small_workloads_are_for_the_cpu() -> None:
    assert bench.suited_to(CpuBackend(), bench.WORKLOADS["large"]) is None
    tiny = bench.suited_to(CpuBackend(), bench.WORKLOADS["tiny"])
    assert tiny is not None and tiny.rows == bench.CPU_ROWS


def test_epochs_on_the_cpu_are_short() -> None:
    """A step of tall-1 moves hundreds of megabytes for few operations: 512 of them would take a minute."""
    for workload in filter(None, (bench.suited_to(CpuBackend(), found) for found in bench.WORKLOADS.values())):
        moved = bench.STATE_PASSES * workload.state_bytes / bench.CPU_BANDWIDTH
        seconds = workload.steps * (workload.flops / bench.CPU_RATE + moved)
        assert seconds <= bench.CPU_SECONDS or workload.steps == bench.CPU_STEPS
        assert seconds < 1.0


def test_bench_prints_a_table_and_writes_json(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    assert main(["bench", "--backend", "cpu", "--only", "small", "--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"mlpgpu {mg.__version__} on the CPU, ")
    assert "5-4-3" in printed.out.splitlines()[-1]
    assert printed.err == "small: 5-4-3, batch 4, float32\n"
    (line,) = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert line["workload"] == "small" and line["precision"] == "float32" and line["contender"] == "mlpgpu"
    assert 0.0 < line["fastest"] <= line["microseconds"] <= line["slowest"]
    assert line["rounds"] == bench.QUICK_ROUNDS
    assert 0.0 < line["error"] < 1e-6
    assert line["versions"]["mlpgpu"] == mg.__version__
    assert "card" not in line


def test_bench_says_what_it_leaves_out(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = bench.Workload((5, 4, 3), 4, 10, 0.1, precisions=("float32", "bfloat16"))
    monkeypatch.setattr(bench, "WORKLOADS", {"small": both, "large": bench.Workload((9000,) * 3, 4, 10_000, 0.1)})
    assert main(["bench", "--backend", "cpu", "--only", "small", "large"]) == 0
    told = capsys.readouterr().err
    assert (
        "left out: precision on the cpu backend: expected one of float32, float32-ieee, float64, got bfloat16" in told
    )
    assert "large left out: more than 1e+11 operations an epoch are for a GPU" in told


def test_bench_that_can_measure_nothing_is_refused(small: None) -> None:
    with pytest.raises(ConfigurationError, match="bench on the cpu backend: expected a workload and a precision"):
        bench.measure("cpu", precisions=["tf32"], names=["small"])


@pytest.mark.parametrize("arguments", [["--only", "tinny"], ["--precision", "float16"], ["--json"]])
def test_bench_refuses_what_it_does_not_know(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["bench", "--backend", "cpu", *arguments])
    assert "error: argument" in capsys.readouterr().err


def test_bench_tells_where_it_cannot_write(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "results.jsonl"
    assert main(["bench", "--backend", "cpu", "--only", "small", "--json", str(path)]) == 1
    assert "expected a place that can be written to" in capsys.readouterr().err


def test_every_product_of_a_step_has_a_form() -> None:
    workload = bench.WORKLOADS["large"]
    lowered = lower(workload.trainer(backend="cpu").plan, multiprocessors=132, source="float32")
    products = [launch for shard in lowered.shards for launch in shard if flops(launch, workload.batch_size)]
    forms = [bench.product_form(launch.entry.name) for launch in products]
    assert {operand_format: forms.count(operand_format) for operand_format in forms} == {
        "forward": 4,
        "backward_input": 3,
        "backward_weight": 4,
    }
    assert sum(flops(launch, workload.batch_size) for launch in products) == workload.flops
    assert bench.product_form("loss_squared_error_dense") is None


# --- the report ---


def line(contender: str, microseconds: float, precision: str = "float32", **others: Any) -> dict[str, Any]:
    """A result on an H200 as peers.py writes it."""
    seconds = [1e-6 * microseconds * SMALL.steps]
    result = bench.summarize("small", SMALL, precision, contender, seconds, loss=1.0, error=2e-7)
    about = {
        "card": "NVIDIA H200",
        "driver": "580",
        "versions": {"mlpgpu": "0.1", "torch": "2.11", "jax": None},
        "commit": "0123456789ab",
    }
    return {**json.loads(bench.json_lines([result], about)), **others}


KERNEL = {
    "workload": "large", "precision": "tf32", "operation": "1 Dense", "kernel": "dense_forward_x", "form": "forward",
    "gigaflop": 275.0, "microseconds": 440.0, "alone_microseconds": 400.0, "cublas_microseconds": 380.0,
}  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    return runpy.run_path(str(REPORT))


def test_the_report_compares_with_the_better_form_of_each_peer(report: dict[str, Any]) -> None:
    lines = [
        line("mlpgpu", 4.0),
        line("PyTorch, eager", 900.0),
        line("PyTorch, compiled graph", 120.0),
        line("JAX", 36.0),
        line("JAX bf16x6", 30.0),
        line("PyTorch, graph", 50.0, "tf32"),
    ]
    rows = report["steps_table"](lines).splitlines()[2:]
    floor = f"{1e6 * SMALL.batch_bytes / 4.3e12:.3g}"  # µs
    assert rows == [
        f"| 5-4-3, 4 | float32 | **4** | 120 compiled graph | 30 bf16x6 | × 7.50 | {floor} | 0 % |",
        f"| 5-4-3, 4 | tf32 | – | 50 graph | – | – | {floor} | – |",
    ]
    without = report["steps_table"](lines, floors=False).splitlines()[2:]
    assert without == [
        "| 5-4-3, 4 | float32 | **4** | 120 compiled graph | 30 bf16x6 | × 7.50 |",
        "| 5-4-3, 4 | tf32 | – | 50 graph | – | – |",
    ]


def test_floors_follow_from_operations_or_bytes(report: dict[str, Any]) -> None:
    work = {"flops": 790e6, "batch_bytes": 8.6e6, "state_bytes": 1e6}
    assert report["floor"](line("mlpgpu", 1.0, "bfloat16", **work)) == pytest.approx(2.0)
    assert report["floor"](line("mlpgpu", 1.0, **work)) == pytest.approx(3.0)
    assert report["floor"](line("mlpgpu", 1.0, **{**work, "state_bytes": 60e6})) == pytest.approx((8.6 + 120) / 4.3)
    assert report["floor"](line("mlpgpu", 1.0, card="another")) is None


def test_the_report_shows_errors_and_products(report: dict[str, Any]) -> None:
    lines = [line("mlpgpu", 4.0), line("JAX bf16x6", 30.0, error=4.4e-6), line("JAX", 9.0, "tf32", error=3e-4)]
    assert report["errors_table"](lines).splitlines()[2:] == [
        "| float32 | 2.0e-07 | 4.4e-06 | – |",
        "| tf32 | – | – | 3.0e-04 |",
    ]
    products = [KERNEL, {**KERNEL, "microseconds": 500.0}, {**KERNEL, "microseconds": 400.0}]
    assert report["products_table"](products).splitlines()[-1] == (
        "| tf32 | x W | 625 | 688 | 724 | × 0.95 (× 0.95) | × 0.86 (× 0.76) |"
    )
    assert "TFLOP/s" not in report["page_part"](lines)
    text = report["page_part"]([*lines, {**KERNEL, "commit": "fedcba98"}])
    assert "TFLOP/s" in text and "PyTorch 2.11" in text and "JAX 0" not in text
    assert "mlpgpu 0.1 at 0123456789 and fedcba98:" in text
    assert "mlpgpu 0.1:" in report["page_part"]([{**lines[0], "commit": None}])


def test_the_readme_shows_some_of_the_workloads(report: dict[str, Any]) -> None:
    key, precision = report["README_ROWS"][0]
    chosen = [line(name, us, precision, workload=key) for name, us in (("mlpgpu", 4.0), ("JAX", 8.0), ("PyTorch", 9.0))]
    others = [line("mlpgpu", 8.0, precision), line("PyTorch", 12.0, precision), line("mlpgpu", 1.0, "tf32")]
    part = report["readme_part"]([*chosen, *others, KERNEL])
    assert "In all 2 cases measured the better peer takes 1.50 to 2.00 times" in " ".join(part.split())
    rows = part.splitlines()
    assert [row.split(" | ")[2] for row in rows if row.startswith("| 5-4-3")] == ["**4**"]


def test_both_pages_tell_what_was_measured(report: dict[str, Any]) -> None:
    records = report["read"](report["RESULTS"])
    for path, part in ((report["README"], "readme_part"), (report["PAGE"], "page_part")):
        assert report["insert"](path, report[part](records)) == path.read_text(encoding="utf-8")
    predictions = report["predictions_part"](report["read"](report["PREDICTIONS"]))
    assert report["insert"](page := report["PAGE"], predictions, report["PREDICTIONS_MARKS"]) == page.read_text("utf-8")
    steps = {(record["workload"], record["precision"]) for record in records}
    assert len(report["README_ROWS"]) == 6 and steps.issuperset(report["README_ROWS"])


def test_the_report_replaces_the_part_between_the_marks_and_draws(report: dict[str, Any], tmp_path: Path) -> None:
    page, new = tmp_path / "page.md", f"before\n{report['BEGIN']}\n\nnew\n\n{report['END']}\nafter\n"
    for text in (f"before\n{report['BEGIN']}\nold\n{report['END']}\nafter\n", new):
        page.write_text(text, encoding="utf-8")
        assert report["insert"](page, "new") == new
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match="expected the marks"):
        report["insert"](page, "new")
    report["draw"]([line("mlpgpu", 4.0), line("JAX", 30.0), line("JAX", 20.0, "tf32")], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_have_the_marks_once(report: dict[str, Any]) -> None:
    for path in (report["README"], report["PAGE"]):
        text = path.read_text(encoding="utf-8")
        assert text.count(report["BEGIN"]) == text.count(report["END"]) == 1
