"""What several tests of the mathematics share: data for any loss, and single steps of the float64 oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mlpgpu import SGD, Dataset, Network
from mlpgpu.backends import Program, Sampling, State, get_backend
from mlpgpu.backends.cpu.loops import library
from mlpgpu.losses import FORMS, LOSSES, Loss, TargetKind, as_loss

EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# A central difference with step h errs by h² f‴ / 6 and by the rounding of f, eps |f| / h.  Where f and
# its derivatives are of order one, this step makes both of the order of its square.
STEP = EPS ** (1 / 3)

# A loss of each form, by its name.
LOSS_OF: dict[str, Loss] = {name: loss() for name, loss in LOSSES.items()}
LOSS_OF |= {"huber": LOSSES["huber"](delta=0.75), "quantile": LOSSES["quantile"](level=0.8)}
LOSS_OF |= {"smoothed_softmax_cross_entropy": LOSSES["softmax_cross_entropy"](label_smoothing=0.2)}
LOSS_KINDS: list[tuple[str, TargetKind]] = [(name, kind) for name, loss in FORMS.items() for kind in loss.targets]


def dataset(
    loss: str | Loss, kind: TargetKind, *, rows: int, n_in: int, n_out: int, weighted: bool = False, seed: int = 0
) -> Dataset:
    """Random rows that ``loss`` can train on, in float64."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, n_in))
    output = (LOSS_OF.get(loss) or as_loss(loss) if isinstance(loss, str) else loss).output
    if kind == "index":
        y = random.integers(n_out, size=rows)
    elif output == "softmax":
        y = random.dirichlet(np.ones(n_out), size=rows)
    elif output == "sigmoid":
        y = random.random((rows, n_out))
    elif output == "exp":
        y = random.poisson(2.0, size=(rows, n_out)).astype(float)
    else:
        y = random.normal(size=(rows, n_out))
    return Dataset(x, y, random.uniform(0.5, 2.0, rows) if weighted else None)


def first_and_thorough(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first runs always, the others with the thorough tests."""
    first, *others = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*first), *(pytest.param(*value, marks=pytest.mark.thorough) for value in others)]


@contextmanager
def numpy_alone() -> Iterator[None]:
    """What the CPU backend is asked for meanwhile it leaves to NumPy.

    Compiled loops and kernels are made of the same structs, so the one cannot be held to the other.
    """
    with mock.patch.object(sys.modules[library.__module__], "_found", lambda dtype: "a test asks for NumPy"):
        yield


class Oracle:
    """One batch, all rows of ``data``, on the CPU backend in float64: its loss and gradient at any parameters.

    By NumPy alone, unless it may use compiled ``loops``.
    """

    def __init__(
        self,
        network: Network,
        data: Dataset,
        loss: str | Loss,
        kind: TargetKind | None = None,
        *,
        shards: int = 1,
        loops: bool = False,
    ) -> None:
        rows = len(data)
        self.plan = network.lower(
            capacity=rows,
            loss=LOSS_OF.get(loss, loss),
            target_kind=kind,
            optimizer=SGD(1.0),
            precision="float64",
            shards=shards,
        )
        self._statistics = network.flat_statistics()[np.newaxis]
        with nullcontext() if loops else numpy_alone():
            self._program: Program = get_backend("cpu").compile(self.plan, threads=1)
        self._program.attach(data, Sampling(rows, rows, seed=network.seed, shuffle=False))

    def _run(self, parameters: np.ndarray, rate: float) -> float:
        self._program.load(State(parameters[np.newaxis], np.empty((0, 1, len(parameters))), self._statistics))
        loss, weight = self._program.run(0, np.array([rate]))[0]  # always step 0, so dropout's masks stand still
        return float(loss / weight)

    def loss(self, parameters: np.ndarray) -> float:
        """The mean loss at ``parameters`` (P,)."""
        return self._run(parameters, 0.0)

    def gradient(self, parameters: np.ndarray) -> np.ndarray:
        """The gradient (P,): what a step of plain descent at rate 1 subtracts."""
        self._run(parameters, 1.0)
        return parameters - self._program.read().parameters[0]
