"""The estimators of mlpgpu.sklearn: what they cost over a Trainer, and how good and fast they are beside others.

    python benchmarks/estimators.py [--json benchmarks/results/estimators.json] [--backend cuda] [--large]

Two tables.  *Overhead*: a fit by the estimator and the same epochs by ``Trainer.fit``, in turns, medians.  *Sets*: on
ten sets, each in five folds, accuracy or R² of the rows held out and the seconds of a fit, beside scikit-learn's MLP
with the same settings, its gradient boosting, and, where these are installed, a plain PyTorch loop and skorch.  With
``--large`` also 60,000 rows of MNIST ($MLPGPU_DATA) and 1,000,000 synthetic ones, a few epochs each, which a card is
for.

Times are the process's CPU time where the backend is the CPU, so that other work of the machine hardly shows in them,
and the clock's on a card.  ``taskset -c 0`` before the command gives all of them one core.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.neural_network as theirs
from sklearn import datasets as bundled
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.multioutput import MultiOutputRegressor
from sklearn.preprocessing import StandardScaler

import mlpgpu as mg
import mlpgpu.sklearn as ours

try:
    from estimators_torch import HAS_SKORCH, SkorchMLP, TorchMLP
except ImportError:
    TorchMLP, HAS_SKORCH = None, False  # type: ignore[assignment, misc]  # PyTorch is optional

FOLDS = 5
TURNS = 7  # of either side, in the comparison with Trainer.fit
Arrays = tuple[np.ndarray, np.ndarray]


def _made(maker: Callable[..., Any], **options: Any) -> Callable[[], Arrays]:
    return functools.partial(maker, random_state=0, **options)


CLASSES: dict[str, Callable[[], Arrays]] = {
    "iris": functools.partial(bundled.load_iris, return_X_y=True),
    "wine": functools.partial(bundled.load_wine, return_X_y=True),
    "breast cancer": functools.partial(bundled.load_breast_cancer, return_X_y=True),
    "digits": functools.partial(bundled.load_digits, return_X_y=True),
    "moons": _made(bundled.make_moons, n_samples=1000, noise=0.25),
    "classification": _made(bundled.make_classification, n_samples=2000, n_informative=8, flip_y=0.05),
}
NUMBERS: dict[str, Callable[[], Arrays]] = {
    "diabetes": functools.partial(bundled.load_diabetes, return_X_y=True),
    "friedman1": _made(bundled.make_friedman1, n_samples=1000, noise=1.0),
    "friedman2": _made(bundled.make_friedman2, n_samples=1000, noise=50.0),
    "regression, 4 outputs": _made(bundled.make_regression, n_samples=1000, n_features=12, n_targets=4, noise=20.0),
}
# Rows, features, hidden units and epochs of the overhead's fits.
SHAPES = ((150, 4, 100, 100), (1800, 64, 100, 20), (10_000, 784, 128, 2))


def clock_of(backend: str) -> Callable[[], float]:
    """In seconds."""
    return time.process_time if backend == "cpu" else time.perf_counter


# --- overhead ---


def _pair(rows: int, features: int, hidden: int, epochs: int, backend: str) -> tuple[Callable[[], None], ...]:
    """A fit by the estimator, and the same by a Trainer: arrays in, a network out."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(rows, features)), random.integers(0, 10, rows)
    alpha, batch_rows = 1e-4, min(200, rows)

    def by_estimator() -> None:
        estimator = ours.MLPClassifier(
            hidden, alpha=alpha, max_iter=epochs, n_iter_no_change=float("inf"), random_state=0, backend=backend
        )
        estimator.fit(x, y)

    def by_trainer() -> None:
        network = mg.Network([mg.Dense(features, hidden, "relu"), mg.Dense(hidden, 10)], seed=0)
        optimizer = mg.Adam(0.001, alpha=alpha)
        trainer = mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=batch_rows, backend=backend)
        trainer.fit((x, y), epochs, progress=False)

    return by_estimator, by_trainer


def overheads(backend: str) -> Iterator[dict[str, Any]]:
    """Medians of either side, in milliseconds."""
    for rows, features, hidden, epochs in SHAPES:
        pair = _pair(rows, features, hidden, epochs, backend)
        times: tuple[list[float], list[float]] = [], []
        clock = clock_of(backend)
        for turn in range(TURNS + 1):
            for fit, found in zip(pair, times, strict=True):
                gc.collect()
                started = clock()
                fit()
                if turn:  # the first one warms up
                    found.append(clock() - started)
        estimator, trainer = (1e3 * statistics.median(found) for found in times)
        shape = f"{rows:,} × {features}, {hidden} units, {epochs} epochs"
        yield {"table": "overhead", "fit": shape, "estimator_ms": estimator, "trainer_ms": trainer}


# --- sets ---


def methods(is_classifier: bool, outputs: int, backend: str) -> dict[str, Callable[[], Any]]:
    """Makers of what is compared, by name."""
    kind = "MLPClassifier" if is_classifier else "MLPRegressor"
    of_trainer = {"batch_size": 32, "alpha": 0.0}
    boosting: Callable[[], Any] = HistGradientBoostingClassifier if is_classifier else HistGradientBoostingRegressor
    if outputs > 1:
        boosting = functools.partial(lambda maker: MultiOutputRegressor(maker()), boosting)
    mine = functools.partial(getattr(ours, kind), random_state=0, backend=backend)
    known = functools.partial(getattr(theirs, kind), random_state=0)
    found: dict[str, Callable[[], Any]] = {
        "mlpgpu": mine,
        "scikit-learn": known,
        "mlpgpu, batches of 32": functools.partial(mine, **of_trainer),
        "scikit-learn, batches of 32": functools.partial(known, **of_trainer),
        "boosting": boosting,
    }
    if TorchMLP is not None:
        found["PyTorch"] = functools.partial(TorchMLP, is_classifier)
    if HAS_SKORCH:
        found["skorch"] = functools.partial(SkorchMLP, is_classifier)
    return found


def folds(x: np.ndarray, y: np.ndarray, is_classifier: bool) -> Iterator[tuple[Arrays, Arrays]]:
    """Rows to train on and rows held out, inputs and values standardized by the former."""
    splitter = (StratifiedKFold if is_classifier else KFold)(FOLDS, shuffle=True, random_state=0)
    for train, test in splitter.split(x, y if is_classifier else None):
        inputs = StandardScaler().fit(x[train])
        if is_classifier:
            known, held = y[train], y[test]
        else:
            columns = y.reshape(len(y), -1)
            targets = StandardScaler().fit(columns[train])
            known, held = (targets.transform(columns[part]).squeeze() for part in (train, test))
        yield (inputs.transform(x[train]), known), (inputs.transform(x[test]), held)


def sets(backend: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Scores and seconds of each method on each set, over folds; methods take turns within a fold."""
    for name, maker in {**CLASSES, **NUMBERS}.items():
        if names and name not in names:
            continue
        is_classifier = name in CLASSES
        x, y = maker()
        score = accuracy_score if is_classifier else r2_score
        outputs = 1 if y.ndim == 1 else y.shape[1]
        found: dict[str, tuple[list[float], list[float]]] = {}
        clock = clock_of(backend)
        for train, test in folds(x, y, is_classifier):
            for method, make in methods(is_classifier, outputs, backend).items():
                estimator = make()
                gc.collect()
                started = clock()
                estimator.fit(*train)
                seconds = clock() - started
                scores, times = found.setdefault(method, ([], []))
                scores.append(float(score(test[1], estimator.predict(test[0]))))
                times.append(seconds)
        for method, (scores, times) in found.items():
            yield {
                "table": "sets",
                "set": name,
                "rows": len(x),
                "measure": "accuracy" if is_classifier else "R²",
                "method": method,
                "score": statistics.mean(scores),
                "spread": statistics.stdev(scores),
                "seconds": statistics.median(times),
            }


def large(backend: str) -> Iterator[dict[str, Any]]:
    """Seconds of a few epochs on sets that a card is for."""
    mnist, _ = mg.datasets.load("mnist")
    random = np.random.default_rng(0)
    synthetic = random.normal(size=(1_000_000, 30)).astype(np.float32)
    label = (synthetic[:, :10].sum(axis=1) + random.normal(size=len(synthetic)) > 0.0).astype(np.int64)
    assert mnist.y is not None
    pixels = mnist.x.astype(np.float32) / 255.0
    for name, x, y, epochs in (("MNIST", pixels, mnist.y, 10), ("synthetic", synthetic, label, 3)):
        options: dict[str, Any] = {"max_iter": epochs, "random_state": 0, "batch_size": 1024, "n_iter_no_change": 1000}
        for method, make in (
            ("mlpgpu", functools.partial(ours.MLPClassifier, backend=backend, **options)),
            ("mlpgpu, alpha=0", functools.partial(ours.MLPClassifier, backend=backend, alpha=0.0, **options)),
            ("scikit-learn", functools.partial(theirs.MLPClassifier, **options)),
        ):
            started = time.perf_counter()
            fit = make().fit(x, y)
            seconds = time.perf_counter() - started
            score = float(accuracy_score(y[:10_000], fit.predict(x[:10_000])))
            found: dict[str, Any] = {"table": "large", "set": name, "rows": len(x), "epochs": epochs, "method": method}
            yield {**found, "score": score, "seconds": seconds}


# --- tables ---


def tables(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    rows = ["| fit | estimator, ms | Trainer.fit, ms | ratio |", "|---|---|---|---|"]
    for found in results:
        if found["table"] == "overhead":
            mine, known = found["estimator_ms"], found["trainer_ms"]
            rows.append(f"| {found['fit']} | {mine:.1f} | {known:.1f} | {mine / known:.3f} |")
    of_sets = [found for found in results if found["table"] == "sets"]
    names = list(dict.fromkeys(found["method"] for found in of_sets))
    rows += ["", "| set | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for name in dict.fromkeys(found["set"] for found in of_sets):
        cells = {found["method"]: found for found in of_sets if found["set"] == name}
        first = next(iter(cells.values()))
        shown = (f"{cells[m]['score']:.3f}, {cells[m]['seconds']:.2f} s" if m in cells else "" for m in names)
        rows.append(f"| {name} ({first['rows']:,}, {first['measure']}) | " + " | ".join(shown) + " |")
    others = [found for found in results if found["table"] == "large"]
    if others:
        rows += ["", "| set | epochs | method | accuracy | seconds |", "|---|---|---|---|---|"]
    for found in others:
        last = f"{found['epochs']} | {found['method']} | {found['score']:.3f} | {found['seconds']:.2f}"
        rows.append(f"| {found['set']} ({found['rows']:,}) | {last} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--large", action="store_true", help="also MNIST and 1,000,000 rows")
    parser.add_argument("--sets", nargs="*", default=[], help="only these")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    results = [*overheads(arguments.backend), *sets(arguments.backend, arguments.sets)]
    if arguments.large:
        results += large(arguments.backend)
    print(tables(results))
    if arguments.json:
        cores = len(os.sched_getaffinity(0))
        machine = {"machine": platform.machine(), "cores": cores, "backend": arguments.backend}
        arguments.json.write_text(json.dumps({**machine, "results": results}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
