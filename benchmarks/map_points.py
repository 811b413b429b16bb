"""The networks that benchmarks/map.py measures: drawn at random from a seed, and a grid.

A point is drawn by a generator of its own, from the seed's name and its number, so that it is the same however many are
drawn.  Widths and batches are log-uniform.  Half the networks have hidden layers of one width, and in the others each
hidden width is drawn apart, up to a factor of 4 off; half the networks have hidden widths of the form 2ᵏ or 3·2ᵏ, which
people choose, and the others whatever was drawn, odd or even.  Three of four batches are powers of two.  The number of
hidden layers and the precision are uniform; half train by Adam; a quarter each have dropout and bytes as inputs; half
have ReLU, and the others one of the other activations.  One output, and a quarter of the rest, is a regression.  What
exceeds the bounds is drawn again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.bench import Workload

DROPOUTS = (0.1, 0.2, 0.5)
MOST_LAYERS = 6  # hidden ones
UNEVEN = 4.0
RATE = 0.01  # times the inverse of the widest layer, so that no network diverges
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Bounds:
    """What a backend's points keep to.

    Attributes:
        inputs, hidden, outputs, batch: least and most.
        flops: the most operations of a step's products.
        weights: the most of a network.
        activations: the most numbers of a batch in any one layer, inputs included.
        data_bytes: the most of a data set in float32.
        precisions: of which one is drawn.
        rate, least_step: operations a second and seconds, by which an epoch's steps are chosen.
        moved: weights that memory moves in a second, with their slots, which bound steps of few rows.
        epoch_seconds, epoch_steps: about how long an epoch is, and its fewest and most steps.
    """

    inputs: tuple[int, int]
    hidden: tuple[int, int]
    outputs: tuple[int, int]
    batch: tuple[int, int]
    flops: float
    weights: float
    activations: float
    data_bytes: float
    precisions: tuple[str, ...]
    rate: dict[str, float]
    least_step: float
    moved: float
    epoch_seconds: float
    epoch_steps: tuple[int, int]


BOUNDS = {
    "cuda": Bounds(
        inputs=(4, 8192), hidden=(16, 8192), outputs=(1, 1000), batch=(1, 16_384),
        flops=2e12, weights=2**28, activations=2**27, data_bytes=2**29, precisions=("float32", "tf32", "bfloat16"),
        rate={"float32": 3e13, "tf32": 2e14, "bfloat16": 4e14}, least_step=2e-5, moved=2e11,
        epoch_seconds=0.02, epoch_steps=(2, 512),
    ),
    "cpu": Bounds(
        inputs=(4, 2048), hidden=(16, 2048), outputs=(1, 1000), batch=(1, 4096),
        flops=4e9, weights=2**22, activations=2**22, data_bytes=2**26, precisions=("float32",),
        rate={"float32": 5e10, "float64": 2.5e10}, least_step=1e-4, moved=1e9, epoch_seconds=0.05, epoch_steps=(2, 256),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One network at one precision, and its place in a draw or a grid."""

    seed: str
    number: int
    precision: str
    workload: Workload

    @property
    def name(self) -> str:
        return f"{self.seed} {self.number}"

    def __str__(self) -> str:
        w = self.workload
        parts = [w.network_name, f"batch {w.batch_size:,}", self.precision, w.optimizer, w.activation]
        parts += [f"dropout {w.dropout}"] if w.dropout else []
        parts += ["bytes"] if w.source == "uint8" else []
        return ", ".join([*parts, *(["squared error"] if w.loss == "squared_error" else [])])

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        values = dataclasses.asdict(self.workload)
        del values["precisions"]
        return {"seed": self.seed, "number": self.number, "precision": self.precision, **values}


def draw(seed: str, number: int, bounds: Bounds) -> Point:
    """Point ``number`` of those of ``seed``."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest[:16], "little"))
    for _ in range(MOST_DRAWS):
        precision = str(random.choice(bounds.precisions))
        workload = _draw_workload(random, bounds, precision)
        if fits(workload, bounds):
            return Point(seed, number, precision, workload)
    raise AssertionError(f"{MOST_DRAWS} networks drawn, and none within the bounds")


def grid(bounds: Bounds) -> Iterator[Point]:
    """784-w-w-10 over widths and batches, by momentum and ReLU, at each precision."""
    widths = [2**k for k in range(4, 14) if bounds.hidden[0] <= 2**k <= bounds.hidden[1]]
    batches = [4**k for k in range(8) if bounds.batch[0] <= 4**k <= bounds.batch[1]]
    number = 0
    for precision in bounds.precisions:
        for width in widths:
            for batch in batches:
                layers = (784, width, width, 10)
                workload = with_rows(Workload(layers, batch, batch, RATE / max(layers)), bounds, precision)
                if fits(workload, bounds):
                    yield Point("grid", number, precision, workload)
                number += 1


def _draw_workload(random: np.random.Generator, bounds: Bounds, precision: str) -> Workload:
    n_in, n_out = _log_uniform(random, *bounds.inputs), _log_uniform(random, *bounds.outputs)
    count, base = int(random.integers(1, MOST_LAYERS + 1)), _log_uniform(random, *bounds.hidden)
    hidden = [base] * count
    if random.random() < 0.5:
        low, high = max(bounds.hidden[0], base / UNEVEN), min(bounds.hidden[1], base * UNEVEN)
        hidden = [_log_uniform(random, low, high) for _ in range(count)]
    if random.random() < 0.5:
        hidden = [_rounded(width, *bounds.hidden) for width in hidden]
    batch = _log_uniform(random, *bounds.batch)
    if random.random() < 0.75:
        batch = 2 ** round(math.log2(batch))
    is_adam, has_dropout, has_bytes, is_relu, is_regression = (
        random.random() < share for share in (0.5, 0.25, 0.25, 0.5, 0.25)
    )
    others = sorted(set(ACTIVATIONS) - {"relu", "identity"})
    dropout, activation = float(random.choice(DROPOUTS)), str(random.choice(others))
    is_regression = is_regression or n_out == 1
    widest = max(n_in, n_out, *hidden)
    workload = Workload(
        (n_in, *hidden, n_out), batch, batch, RATE / (widest * n_out if is_regression else widest),
        loss="squared_error" if is_regression else "softmax_cross_entropy",
        activation="relu" if is_relu else activation,  # type: ignore[arg-type]
        optimizer="adam" if is_adam else "momentum",
        dropout=dropout if has_dropout else 0.0,
        source="uint8" if has_bytes else "float32",
    )  # fmt: skip
    return with_rows(workload, bounds, precision)


def with_rows(workload: Workload, bounds: Bounds, precision: str) -> Workload:
    """A workload of as many whole batches as an epoch of about the bounds' seconds has, and its data may."""
    step = max(bounds.least_step, workload.flops / bounds.rate[precision])
    least, most = bounds.epoch_steps
    steps = min(most, int(bounds.epoch_seconds / step), int(bounds.data_bytes / workload.batch_bytes))
    return dataclasses.replace(workload, rows=max(least, steps) * workload.batch_size)


def weights_of(workload: Workload) -> int:
    return sum(n_in * n_out for n_in, n_out in pairwise(workload.widths))


def fits(workload: Workload, bounds: Bounds) -> bool:
    """Whether a workload keeps to what a point may take."""
    weights = weights_of(workload)
    data = workload.batch_bytes * workload.steps
    return (
        workload.flops <= bounds.flops
        and weights <= bounds.weights
        and workload.batch_size * max(workload.widths) <= bounds.activations
        and data <= bounds.data_bytes
    )


def _log_uniform(random: np.random.Generator, low: float, high: float) -> int:
    return int(min(max(round(math.exp(random.uniform(math.log(low), math.log(high)))), math.ceil(low)), high))


def _rounded(width: int, low: int, high: int) -> int:
    """The nearest number of the form 2ᵏ or 3·2ᵏ, by ratio."""
    forms = [factor << k for factor in (1, 3) for k in range(14) if low <= factor << k <= high]
    return min(forms, key=lambda form: abs(math.log(form / width)))
