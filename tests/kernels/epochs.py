"""Whole steps on the host against the CPU backend: a short epoch, and what the CPU makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from helpers import EPS32, dataset, numpy_alone

from mlpgpu import Dataset, Momentum, Network
from mlpgpu.backends import Sampling, State, get_backend
from mlpgpu.layers import Layer

BATCH_SIZE, LAST_BATCH = 8, 2


class Epoch:
    """A network and the data of an epoch, each step with a rate of its own; the last batch is smaller.

    Attributes:
        plan: in the precision asked for.
        state: what the epoch begins with.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        options: Mapping[str, Any],
        *,
        rates: Sequence[float] = (0.1, 0.02, 0.05),
        precision: str = "float32",
        as_bytes: bool = False,
    ) -> None:
        self._network = Network(layers, seed=3)
        self._options = {"loss": "squared_error", "optimizer": Momentum(0.1), "capacity": BATCH_SIZE, **options}
        self.plan = self._network.lower(**self._options, precision=precision)
        loss, kind = self.plan.loss, self.plan.target_kind
        assert loss is not None and kind is not None
        rows = BATCH_SIZE * (len(rates) - 1) + LAST_BATCH
        wide = dataset(loss, kind, rows=rows, n_in=self.plan.n_in, n_out=self.plan.n_out, weighted=not as_bytes)
        assert wide.y is not None
        x = (50.0 * wide.x + 128.0).clip(0.0, 255.0).astype(np.uint8) if as_bytes else wide.x.astype(np.float32)
        self.data = Dataset(x, wide.y if kind == "index" else wide.y.astype(np.float32), wide.weight)
        self._network.adapt(self.data)
        self.sampling, self.rates = Sampling(rows, BATCH_SIZE, seed=11), np.array(rates)
        self.state = self._network.state(self.plan.optimizer)

    def on_cpu(self, precision: str) -> tuple[State, np.ndarray, np.ndarray]:
        """What the CPU makes of it: the state, each step's loss and weight, then the first batch's predictions.

        In float64 by NumPy alone, since kernels are held to that.
        """
        with numpy_alone() if precision == "float64" else nullcontext():
            program = get_backend("cpu").compile(self._network.lower(**self._options, precision=precision), threads=1)
        program.load(self.state)
        program.attach(self.data, self.sampling)
        losses = program.run(0, self.rates)
        return program.read(), losses, program.predict(self.data)[:BATCH_SIZE]


def assert_as_exact(got: np.ndarray, cpu: np.ndarray, oracle: np.ndarray) -> None:
    """Both compute in float32, in sums as long: neither errs by much more than the other."""
    if got.size:
        error = max(abs(cpu - oracle).max(), EPS32 * abs(oracle).max())
        assert abs(got - oracle).max() <= 4 * error
