"""``python -m mlpgpu train``, ``predict``, ``evaluate`` and ``export``: files in, files out, exit codes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnxruntime
import pandas as pd
import pytest

import mlpgpu as mg
from mlpgpu.__main__ import main
from mlpgpu.errors import FileFormatError
from mlpgpu.network.formats import FORMATS
from mlpgpu.tables import csv_file, sources

ROOT = Path(__file__).parents[2]
ROWS = 300


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    random = np.random.default_rng(3)
    rows = pd.DataFrame({"id": [f"{row:04}" for row in range(ROWS)], "x": random.normal(size=ROWS)})
    rows["city"] = random.choice(["Berlin", "Oslo", "Paris"], ROWS)
    rows["day"] = (pd.Timestamp("2021-01-01") + pd.to_timedelta(random.integers(0, 700, ROWS), unit="D")).astype(str)
    rows["price"] = 100 + 5 * rows["x"] + 20 * (rows["city"] == "Paris") + random.normal(0, 0.1, ROWS)
    rows["kind"] = np.where(rows["x"] + (rows["city"] == "Oslo") > 0.3, "large", "small")
    rows.loc[::10, "x"] = np.nan
    return rows


TRAIN = ["train", "data.csv", "--out", "model.h5", "--layers", "16", "--rate", "0.01", "--batch-size", "16"]
PRICE = [*TRAIN, "--target", "price", "--ignore", "kind"]


def write(frame: pd.DataFrame, name: str = "data.csv") -> None:
    frame.to_csv(name, index=False)


def test_from_a_csv_to_predictions(frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    write(frame)
    assert main([*PRICE, "--epochs", "15", "--curve", "curve.png"]) == 0
    printed = capsys.readouterr().out
    assert "city    categories" in printed and "History of 15 epochs" in printed and "saved model.h5" in printed
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    network = mg.load("model.h5")
    assert mg.Trainer.resume("model.h5").history.last["validation_r2"] > 0.9

    assert main(["predict", "model.h5", "data.csv", "--out", "predictions.csv", "--keep", "id", "price"]) == 0
    with open("predictions.csv", encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
    assert names == ["id", "price", "price"]
    assert [row[0] for row in rows] == frame["id"].tolist()  # as they were written, zeros in front
    predicted = network.predict(frame.drop(columns=["price", "kind"]))
    np.testing.assert_array_equal(np.array([row[2] for row in rows]).astype(np.float32), predicted)
    capsys.readouterr()

    assert main(["evaluate", "model.h5", "data.csv", "--json", "--metrics", "r2"]) == 0
    found = json.loads(capsys.readouterr().out)
    error = frame["price"].to_numpy() - predicted
    assert found["rows"] == ROWS
    assert found["r2"] == pytest.approx(1 - np.mean(error**2) / frame["price"].var(ddof=0), rel=1e-5)


def test_predictions_in_pieces_are_the_same(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    write(frame)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    predict = ["predict", "model.h5", "data.csv", "--quiet", "--out"]
    assert main([*predict, "whole.csv"]) == 0
    assert main([*predict, "whole.npy"]) == 0
    monkeypatch.setattr(csv_file, "CHUNK_ROWS", 64)
    assert main([*predict, "pieces.csv"]) == 0
    whole, pieces = pd.read_csv("whole.csv"), pd.read_csv("pieces.csv")
    assert list(whole) == list(pieces)
    # BLAS may round a row's sums otherwise beside other rows.
    np.testing.assert_allclose(whole.to_numpy(), pieces.to_numpy(), rtol=1e-5)
    np.testing.assert_array_equal(np.load("whole.npy"), pd.read_csv("whole.csv", dtype="float32")["price"])


def test_a_classifier(frame: pd.DataFrame, capfdbinary: Any) -> None:
    write(frame)
    frame.drop(columns="price").to_parquet("data.parquet")
    arguments = ["--target", "kind", "--ignore", "price", "--epochs", "15", "--class-weight", "balanced", "--quiet"]
    assert main([*TRAIN, *arguments]) == 0
    assert (
        main([*TRAIN[:1], "data.parquet", *TRAIN[2:], *[a for a in arguments if a not in ("--ignore", "price")]]) == 0
    )
    capfdbinary.readouterr()
    assert main(["predict", "model.h5", "data.parquet", "--probabilities"]) == 0
    names, *rows = csv.reader(capfdbinary.readouterr().out.decode().splitlines())
    assert names == ["kind", "probability of large", "probability of small"]
    assert [row[0] for row in rows] == mg.load("model.h5").labels(frame.drop(columns=["price", "kind"])).tolist()
    assert np.mean(np.array([row[0] for row in rows]) == frame["kind"]) > 0.9


def test_labels_are_words(frame: pd.DataFrame) -> None:
    write(frame.assign(warm=np.where(frame["x"] > 0, "yes", "no"), big=frame["price"] > 100))
    assert main([*TRAIN, "--target", "warm", "big", "--epochs", "2", "--quiet"]) == 0
    assert main(["predict", "model.h5", "data.csv", "--out", "p.tsv", "--probabilities", "--quiet"]) == 0
    found = pd.read_csv("p.tsv", sep="\t", dtype=str)
    assert list(found.columns) == ["warm", "big", "probability of warm", "probability of big"]
    np.testing.assert_array_equal(found["warm"] == "yes", found["probability of warm"].astype(float) > 0.5)
    assert set(found["big"]) <= {"false", "true"}


@pytest.mark.parametrize("form", ["npz", "npy", "labels", "idx"])
def test_files_of_arrays(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(4)
    x, y = random.integers(0, 255, (200, 5)).astype(np.uint8), random.integers(0, 3, 200).astype(np.uint8)
    x[:, 0] = 80 * y
    arguments, data = [], f"data.{form}"
    if form == "npz":
        np.savez(data, x=x, y=y)
    elif form == "npy":
        np.save(data, np.column_stack([x, y]))
        x = x.astype(np.float64)
    elif form == "labels":
        data, arguments = "x.npy", ["--labels", "y.npy"]
        np.save("x.npy", x.astype(np.float32)), np.save("y.npy", y)
    else:
        data, arguments = "x.idx2-ubyte.gz", ["--labels", "y.idx1-ubyte"]
        mg.datasets.write_idx(data, x)
        mg.datasets.write_idx("y.idx1-ubyte", y)
    train = ["train", data, *arguments, "--out", "m.h5", "--epochs", "15", "--rate", "0.01", "--task", "classification"]
    assert main([*train, "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last"]["validation_accuracy"] > 0.8
    assert main(["evaluate", "m.h5", data, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["predict", "m.h5", data, "--out", "p.csv", "--quiet"]) == 0
    assert np.mean(pd.read_csv("p.csv")["class"] == y) == pytest.approx(found["accuracy"])


def test_a_run_that_is_resumed_ends_with_the_same_bits(frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    write(frame)
    assert main([*PRICE, "--epochs", "4", "--quiet"]) == 0
    whole = mg.load("model.h5").flat_parameters()
    Path("model.h5").unlink()
    assert main([*PRICE, "--epochs", "2", "--quiet", "--resume"]) == 0  # nothing is there: it begins
    assert main([*PRICE, "--epochs", "4", "--quiet", "--resume"]) == 0
    np.testing.assert_array_equal(mg.load("model.h5").flat_parameters(), whole)
    before = Path("model.h5").read_bytes()
    for change in (["--layers", "17"], ["--rate", "0.02"], ["--batch-size", "17"], ["--seed", "3"]):
        assert main([*PRICE, "--epochs", "4", "--resume", *change]) == 2
        assert "expected the run's" in capsys.readouterr().err
    write(frame.assign(x=frame["x"] * 2))
    assert main([*PRICE, "--epochs", "5", "--resume"]) == 1
    assert "columns: expected those of the run" in capsys.readouterr().err
    assert Path("model.h5").read_bytes() == before


@pytest.mark.thorough
def test_ctrl_c_saves_and_exits_with_130(frame: pd.DataFrame) -> None:
    write(frame)
    command = [sys.executable, "-m", "mlpgpu", *PRICE, "--epochs", "1000000", "--validation", "0"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not Path("model.h5").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after step" in told and "Traceback" not in told
    trainer = mg.Trainer.resume("model.h5")
    assert 0 < trainer.epochs < 1000000


def test_early_stopping_and_a_file_to_validate_on(frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    write(frame[:200])
    write(frame[200:], "validation.csv")
    assert (
        main([*PRICE, "--epochs", "400", "--validation", "validation.csv", "--patience", "2", "--quiet", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    losses = [record["validation_loss"] for record in found["history"]]
    assert found["epochs"] < 400 and int(np.argmin(losses)) == len(losses) - 3
    assert main(["evaluate", "model.h5", "validation.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize("suffix", FORMATS)
def test_exports(suffix: str, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    write(frame)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    assert main(["export", "model.h5", "--out", f"other{suffix}"]) == 0
    network = mg.load("model.h5")
    if suffix.endswith(".h5"):
        assert "run" not in h5py.File(f"other{suffix}")["mlpgpu"]
        np.testing.assert_array_equal(mg.load(f"other{suffix}").predict(frame), network.predict(frame))
        assert main(["evaluate", f"other{suffix}", "data.csv"]) == 0
    elif suffix == ".npz":
        with np.load(f"other{suffix}") as arrays:
            assert set(arrays.files) == {*network.parameters, "2.mean", "2.scale"}
            np.testing.assert_array_equal(arrays["0.weight"], network.parameters["0.weight"])
        with pytest.raises(FileFormatError, match="arrays of NumPy without its layers"):
            mg.load(f"other{suffix}")
    elif suffix == ".json":
        assert json.loads(Path(f"other{suffix}").read_text("utf-8"))["table"]["targets"][0]["name"] == "price"
    elif suffix == ".onnx":
        session = onnxruntime.InferenceSession(f"other{suffix}")
        encoded = network.remembered.dataset(frame).x
        found = session.run(None, {"input": encoded.astype(np.float32)})[0][:, 0]
        np.testing.assert_allclose(found, network.predict(frame), rtol=1e-5)
    else:
        np.testing.assert_array_equal(mg.load(f"other{suffix}").predict(frame), network.predict(frame))


def test_an_npz_holds_parameters_alone_with_any_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    network, kept = mg.Network([mg.Dense(2, 1)]), {}

    def savez(_: Any, /, **arrays: Any) -> None:
        """As before NumPy 2.2: every keyword is an array."""
        kept.update(arrays)

    monkeypatch.setattr(np, "savez", savez)
    network.export("net.npz")
    assert set(kept) == set(network.parameters)


def test_an_export_to_an_unknown_format_writes_nothing(frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    write(frame)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    assert main(["export", "model.h5", "--out", "other.pt"]) == 2
    assert "exported file: expected a file name that ends in .onnx" in capsys.readouterr().err
    assert not Path("other.pt").exists()


def test_quiet_is_quiet_and_json_is_one_object(frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    write(frame.assign(new=np.arange(ROWS)))
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    write(frame.assign(newer=1.0))
    assert main(["predict", "model.h5", "data.csv", "--out", "p.csv", "--quiet"]) == 1  # a column is missing
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    write(frame)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    write(frame.assign(newer=1.0))
    assert main(["predict", "model.h5", "data.csv", "--out", "p.csv", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"rows": ROWS, "predictions": "p.csv"}
    assert "mlpgpu: file data.csv: the table it was learnt from had no 'newer', which is not used" in printed.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([*TRAIN], 2, "--target: expected the column to be predicted"),
        ([*TRAIN, "--target", "Price"], 2, "did you mean 'price'"),
        ([*TRAIN, "--target", "price", "--layers", "0"], 2, "--layers: expected widths of at least 1"),
        ([*TRAIN, "--target", "price", "--loss", "mean_squared"], 2, "did you mean 'mean_squared_error'"),
        ([*TRAIN, "--target", "price", "--optimizer", "adma"], 2, "did you mean 'adam'"),
        ([*TRAIN, "--target", "price", "--activation", "rleu"], 2, "did you mean 'relu'"),
        ([*TRAIN, "--target", "price", "--rate", "-1"], 2, "rate"),
        ([*TRAIN, "--target", "price", "--epochs", "0"], 2, "--epochs"),
        ([*TRAIN, "--target", "price", "--validation", "1.5"], 2, "--validation"),
        ([*TRAIN, "--target", "price", "--validation", "0", "--patience", "3"], 2, "--validation"),
        ([*TRAIN, "--target", "price", "--kind", "x"], 2, "--kind: expected COLUMN=KIND"),
        ([*TRAIN, "--target", "price", "--kind", "x=colour"], 2, "kinds, of 'x'"),
        ([*TRAIN, "--target", "price", "--metrics", "accuracy"], 2, "metric accuracy"),
        ([*TRAIN, "--target", "price", "--curve", "curve.pdf"], 2, "picture"),
        ([*TRAIN, "--target", "price", "--curve", "nowhere/curve.png"], 2, "--curve: expected a file in a folder"),
        ([*TRAIN, "--target", "price", "--out", "model.txt"], 2, "--out: expected a file name that ends in .h5"),
        ([*TRAIN, "--target", "price", "--out", "nowhere/model.h5"], 2, "--out: expected a file in a folder"),
        ([*TRAIN, "--target", "price", "--backend", "cud"], 2, "did you mean 'cuda'"),
        ([*TRAIN, "--target", "kind", "--task", "regression"], 1, "target 'kind': expected numbers"),
        ([*TRAIN, "--target", "price", "--validation", "other.csv"], 1, "No such file"),
        ([*TRAIN, "--target", "price", "--rate", "1e30"], 1, "expected a finite value"),
        (["train", "data.xlsx", "--out", "m.h5", "--target", "y"], 2, "table: expected a file name that ends in"),
        (["train", "empty.csv", "--out", "m.h5", "--target", "y"], 1, "file empty.csv: expected a row of names"),
        (["train", "none.csv", "--out", "m.h5", "--target", "y"], 1, "No such file"),
        (["train", "objects.npy", "--out", "m.h5"], 1, "file objects.npy: expected an array of numbers or text"),
        (["train", "no.npz", "--out", "m.h5"], 1, "file no.npz: expected arrays of numbers or text"),
        (["train", "vector.npy", "--out", "m.h5"], 1, "file vector.npy: expected (rows, columns)"),
        (["predict", "none.h5", "data.csv"], 1, "file none.h5: expected a readable file"),
        (["predict", "empty.csv", "data.csv"], 1, "file empty.csv: expected an undamaged HDF5 file"),
        (["predict", "arrays.h5", "data.csv"], 2, "expected a .npy, .npz or IDX file"),
        (["predict", "arrays.h5", "vector.npy", "--out", "p.xlsx"], 2, "--out"),
        (["predict", "arrays.h5", "vector.npy", "--json"], 2, "--out: expected a file, with --json"),
        (["predict", "arrays.h5", "vector.npy", "--probabilities"], 2, "--probabilities"),
        (["evaluate", "arrays.h5", "data.csv"], 2, "expected a .npy, .npz or IDX file"),
        (["export", "arrays.h5", "--out", "model.onnxx"], 2, "exported file: expected a file name that ends in .onnx"),
    ],
)
def test_failures_have_a_code_and_leave_no_file(
    arguments: list[str], code: int, message: str, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    write(frame)
    Path("empty.csv").touch()
    Path("no.npz").write_bytes(b"PK no archive")
    np.save("objects.npy", np.array([{}, []], object), allow_pickle=True)
    np.save("vector.npy", np.arange(5.0))
    mg.Network([mg.Dense(1, 1)], seed=1).save("arrays.h5")
    before = set(os.listdir())
    assert main(arguments) == code
    printed = capsys.readouterr()
    *_, error = printed.err.splitlines()
    assert error.startswith("mlpgpu: ") and message in error
    assert set(os.listdir()) == before


def test_predictions_replace_a_file_only_when_they_are_whole(
    frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(frame)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    Path("p.csv").write_text("before", encoding="utf-8")
    monkeypatch.setattr(csv_file, "CHUNK_ROWS", 64)
    write(frame.assign(day=[*frame["day"][:-1], "2021-02-30"]))
    assert main(["predict", "model.h5", "data.csv", "--out", "p.csv"]) == 1
    assert Path("p.csv").read_text("utf-8") == "before"
    assert sorted(os.listdir()) == ["data.csv", "model.h5", "p.csv"]


def test_a_file_is_parsed_once_where_it_fits(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    write(frame)
    opened: list[Any] = []
    chunks = csv_file.CSV.chunks

    def counted(self: Any, *arguments: Any) -> Any:
        opened.append(arguments)
        return chunks(self, *arguments)

    monkeypatch.setattr(csv_file.CSV, "chunks", counted)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    parameters = mg.load("model.h5").flat_parameters()
    assert len(opened) == 1
    monkeypatch.setattr(sources, "KEPT_SHARE", 0.0)
    assert main([*PRICE, "--epochs", "1", "--quiet"]) == 0
    assert len(opened) == 3
    np.testing.assert_array_equal(mg.load("model.h5").flat_parameters(), parameters)
