"""The data sets that defaults are chosen on, and those that they are confirmed on.

They are scikit-learn's bundled sets and generators, and parts of MNIST and Fashion-MNIST.  Which half a set belongs to
is drawn from a seed, for classification and regression apart; nobody looks at the second half while choosing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sklearn import datasets as bundled
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from mlpgpu.datasets.idx import read_idx

Kind = Literal["accuracy", "R²"]

DRAW = 13  # the seed of the halves, of generated sets, and of all cells
HELD_OUT = 0.25
IMAGES = 2_000  # of MNIST's and Fashion-MNIST's 10,000 test images


@dataclass(frozen=True)
class Split:
    """A set in two parts for one seed, standardized by the first one's columns.

    Attributes:
        x, y: (rows, n_in) float32; classes (rows,) int64, or values (rows, n_out) float32.
        test_x, test_y: likewise of the part held out.
        n_out: the classes, or columns of values.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    n_out: int


def _images(folder: str) -> tuple[np.ndarray, np.ndarray]:
    root = Path(os.environ["MLPGPU_DATA"]) / folder
    x = read_idx(root / "t10k-images-idx3-ubyte.gz")
    y = read_idx(root / "t10k-labels-idx1-ubyte.gz")
    return x[:IMAGES].reshape(IMAGES, -1), y[:IMAGES]


def _columns(maker: Callable[..., Any], **options: Any) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    return functools.partial(maker, random_state=DRAW, **options)


SETS: dict[Kind, dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]]] = {
    "accuracy": {
        "iris": functools.partial(bundled.load_iris, return_X_y=True),
        "wine": functools.partial(bundled.load_wine, return_X_y=True),
        "breast_cancer": functools.partial(bundled.load_breast_cancer, return_X_y=True),
        "digits": functools.partial(bundled.load_digits, return_X_y=True),
        "mnist": functools.partial(_images, "mnist"),
        "fashion-mnist": functools.partial(_images, "fashion-mnist"),
        "classification": _columns(bundled.make_classification, n_samples=1000, n_informative=8, flip_y=0.05),
        "classification_wide": _columns(
            bundled.make_classification, n_samples=800, n_features=204, n_informative=20, n_classes=3
        ),
        "moons": _columns(bundled.make_moons, n_samples=600, noise=0.25),
        "circles": _columns(bundled.make_circles, n_samples=600, noise=0.15, factor=0.6),
        "gaussian_quantiles": _columns(bundled.make_gaussian_quantiles, n_samples=1000, n_features=6, n_classes=4),
        "hastie": _columns(bundled.make_hastie_10_2, n_samples=1000),
        "blobs": _columns(bundled.make_blobs, n_samples=800, n_features=5, centers=12, cluster_std=3.0),
    },
    "R²": {
        "diabetes": functools.partial(bundled.load_diabetes, return_X_y=True),
        "linnerud": functools.partial(bundled.load_linnerud, return_X_y=True),
        "friedman1": _columns(bundled.make_friedman1, n_samples=800, noise=1.0),
        "friedman2": _columns(bundled.make_friedman2, n_samples=800, noise=50.0),
        "friedman3": _columns(bundled.make_friedman3, n_samples=800, noise=0.1),
        "regression": _columns(bundled.make_regression, n_samples=600, n_features=20, noise=10.0),
        "regression_wide": _columns(bundled.make_regression, n_samples=400, n_features=100, noise=5.0),
        "regression_outputs": _columns(bundled.make_regression, n_samples=600, n_features=12, n_targets=4, noise=20.0),
        "sparse_uncorrelated": _columns(bundled.make_sparse_uncorrelated, n_samples=600),
        "swiss_roll": _columns(bundled.make_swiss_roll, n_samples=800, noise=0.3),
        "s_curve": _columns(bundled.make_s_curve, n_samples=800, noise=0.1),
    },
}
KINDS: dict[str, Kind] = {name: kind for kind, makers in SETS.items() for name in makers}


def halves() -> dict[str, list[str]]:
    """The names of the sets of either half, "choose" and "confirm"."""
    random = np.random.default_rng(DRAW)
    found: dict[str, list[str]] = {"choose": [], "confirm": []}
    for makers in SETS.values():
        names = [str(name) for name in random.permutation(list(makers))]
        count = len(names) // 2
        found["choose"] += names[:count]
        found["confirm"] += names[count:]
    return found


@functools.lru_cache(maxsize=4)
def split(name: str, seed: int) -> Split:
    """A set's rows in two parts, which ``seed`` draws, both standardized by the first one's."""
    kind = KINDS[name]
    x, y = SETS[kind][name]()
    y = np.unique(y, return_inverse=True)[1] if kind == "accuracy" else np.asarray(y, np.float64).reshape(len(x), -1)
    parts = train_test_split(
        np.asarray(x, np.float64), y, test_size=HELD_OUT, random_state=seed, stratify=y if kind == "accuracy" else None
    )
    inputs = StandardScaler().fit(parts[0])
    x, test_x = (inputs.transform(part).astype(np.float32) for part in parts[:2])
    if kind == "accuracy":
        return Split(x, parts[2].astype(np.int64), test_x, parts[3].astype(np.int64), int(y.max()) + 1)
    targets = StandardScaler().fit(parts[2])
    y, test_y = (targets.transform(part).astype(np.float32) for part in parts[2:])
    return Split(x, y, test_x, test_y, y.shape[1])
