"""From a CSV to a trained network: the shell's ``train`` beside pandas with scikit-learn, seconds of each part.

The file has 30 columns, drawn from a seed: 21 of numbers, 3 of them with missing values, five of categories, one of
truth values, two of dates, and the target.  Both train the same layers, with Adam, on nine tenths of the rows, in
batches of the same size, for as many epochs, and say how well they predict the rest; a process each, in turns, and the
best turn of each counts.  scikit-learn prepares the columns by a ColumnTransformer: medians with a missing indicator,
StandardScaler, OneHotEncoder with infrequent categories; dates are days, and sine and cosine of the year and the week.

    python benchmarks/tables.py [--rows N] [--epochs N] [--layers N …] [--rounds N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mlpgpu import text

TARGET = "price"
NUMBERS, WHOLE, CATEGORIES, DATES, WITH_MISSING = 18, 3, 5, 2, 3
HELD_OUT = 0.1
RATE = 0.001  # scikit-learn's and mlpgpu's default of Adam
BATCH = 512


def write_rows(path: Path, rows: int, seed: int = 0) -> int:
    """Write the CSV and return how many columns it has."""
    import pandas

    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {f"number {k}": random.normal(size=rows).round(5) for k in range(NUMBERS)}
    for k in range(WITH_MISSING):
        columns[f"number {k}"][random.random(rows) < 0.05] = np.nan
    columns |= {f"whole {k}": random.integers(0, 1000, rows) for k in range(WHOLE)}
    for k in range(CATEGORIES):
        names = np.array([f"name {j}" for j in range(5 * (k + 1))])
        columns[f"category {k}"] = names[random.integers(0, len(names), rows)]
    columns["truth"] = random.random(rows) < 0.5
    days = random.integers(0, 3000, (DATES, rows)).astype("timedelta64[D]")
    columns |= {f"date {k}": (np.datetime64("2015-01-01") + days[k]).astype(str) for k in range(DATES)}
    summer = np.cos(2 * np.pi * (days[0].astype(int) - 180) / 365.25)
    linear = 10 * columns["number 5"] + columns["whole 0"] / 100 + 3 * (columns["category 1"] == "name 3")
    columns[TARGET] = linear + 5 * np.sin(2 * columns["number 6"]) + 4 * summer * columns["truth"]
    columns[TARGET] = (columns[TARGET] + random.normal(size=rows)).round(4)
    pandas.DataFrame(columns).to_csv(path, index=False)
    return len(columns)


# --- pandas and scikit-learn, in a process of its own ---


def run_peer(path: Path, layers: list[int], epochs: int) -> dict[str, Any]:
    """Seconds of each part, inputs, and R² of the rows held out."""
    import warnings

    import pandas
    from sklearn.compose import make_column_transformer
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.impute import SimpleImputer
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def end(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[part], last = now - last, now

    dates = [f"date {k}" for k in range(DATES)]
    frame = pandas.read_csv(path, parse_dates=dates)
    end("read")
    numbers = [name for name in frame if name.startswith(("number", "whole"))]
    for name in dates:
        days = (frame[name] - pandas.Timestamp(0)).dt.total_seconds() / 86400.0
        frame[f"{name} days"] = days
        numbers.append(f"{name} days")
        for period in (365.2425, 7.0):
            frame[f"{name} sin {period}"] = np.sin(2 * np.pi * days / period)
            frame[f"{name} cos {period}"] = np.cos(2 * np.pi * days / period)
            numbers += [f"{name} sin {period}", f"{name} cos {period}"]
    numbers.append("truth")
    transformer = make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler()), numbers),
        (
            OneHotEncoder(max_categories=65, handle_unknown="infrequent_if_exist", sparse_output=False),
            [name for name in frame if name.startswith("category")],
        ),
    )
    y = frame.pop(TARGET).to_numpy()
    center, scale = y.mean(), y.std()
    train, test, y_train, y_test = train_test_split(frame, (y - center) / scale, test_size=HELD_OUT, random_state=0)
    x = transformer.fit_transform(train).astype(np.float32)
    end("prepare")
    model = MLPRegressor(hidden_layer_sizes=layers, batch_size=BATCH, max_iter=epochs, n_iter_no_change=epochs + 1)
    model.set_params(alpha=0.0, learning_rate_init=RATE, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y_train.astype(np.float32))
    end("train")
    r2 = model.score(transformer.transform(test).astype(np.float32), y_test)
    end("validate")
    return {"seconds": seconds, "inputs": x.shape[1], "r2": r2}


# --- turns ---


def run_ours(path: Path, layers: list[int], epochs: int, folder: Path) -> dict[str, Any]:
    """The same of ``python -m mlpgpu train``, whose training validates each epoch and saves the run."""
    widths = [str(width) for width in layers]
    options = ["--validation", str(HELD_OUT), "--batch-size", str(BATCH), "--metrics", "r2", "--epochs", str(epochs)]
    command = [sys.executable, "-m", "mlpgpu", "train", str(path), "--target", TARGET, "--layers", *widths, *options]
    found = _timed([*command, "--out", str(folder / "model.h5"), "--backend", "cpu", "--quiet", "--json"])
    return {**found, "r2": found["last"]["validation_r2"]}


def _timed(command: list[str]) -> dict[str, Any]:
    """The JSON that a command prints, and how long it took."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return {**json.loads(done.stdout.splitlines()[-1]), "wall": time.perf_counter() - begun}


def measure(rows: int, layers: list[int], epochs: int, rounds: int) -> list[dict[str, Any]]:
    """The best turn of either, as records."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rows.csv"
        columns = write_rows(path, rows)
        peer = [sys.executable, __file__, "--peer", str(path), "--epochs", str(epochs), "--layers", *map(str, layers)]
        turns: dict[str, list[dict[str, Any]]] = {"mlpgpu": [], "pandas + scikit-learn": []}
        for _ in range(rounds):
            turns["mlpgpu"].append(run_ours(path, layers, epochs, folder))
            turns["pandas + scikit-learn"].append(_timed(peer))
        about = {"rows": rows, "columns": columns, "bytes": path.stat().st_size, "layers": layers, "epochs": epochs}
    best = {library: min(found, key=lambda turn: turn["wall"]) for library, found in turns.items()}
    kept = ("wall", "seconds", "inputs", "r2")
    return [{"library": library, **about, **{key: turn[key] for key in kept}} for library, turn in best.items()]


def report(records: list[dict[str, Any]]) -> str:
    """The records as a table."""
    parts = list(dict.fromkeys(part for record in records for part in record["seconds"]))
    rows = [("seconds", *parts, "whole process", "inputs", "R² held out")]
    for record in records:
        times = [f"{record['seconds'][part]:.1f}" if part in record["seconds"] else "" for part in parts]
        rows.append((record["library"], *times, f"{record['wall']:.1f}", str(record["inputs"]), f"{record['r2']:.4f}"))
    return text.table(rows, "<" + ">" * (len(rows[0]) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="From a CSV to a trained network, beside pandas and scikit-learn.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", default=[128, 64], help="widths (default: 128 64)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each library there")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        print(json.dumps(run_peer(options.peer, options.layers, options.epochs)))
        return
    records = measure(options.rows, options.layers, options.epochs, options.rounds)
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(report(records))
    if options.json is not None:
        lines = "".join(json.dumps({**record, **about}) + "\n" for record in records)
        options.json.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
