"""Microseconds of a training step, on the networks that this project measures itself by.

``python -m mlpgpu bench`` measures mlpgpu alone; ``benchmarks/peers.py`` takes workloads, turns and results from here
and measures others beside it.  A turn trains for whole epochs, shuffles included, on random rows that are already where
the backend keeps them, and ends when the last step is done.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import text
from .backends import Backend, Sampling, get_backend
from .backends.cpu import available_cores, blas_name
from .backends.cuda import CudaBackend
from .datasets import Dataset
from .errors import ConfigurationError, MlpgpuError
from .layers import Dense, Dropout, Layer
from .names import ActivationName, LossName
from .network import Network
from .optimizers import Adam, Momentum, Optimizer
from .plan import Plan
from .schedules import Clock, as_schedule
from .training import Trainer
from .version import __version__

MOMENTUM = 0.9
TURN_SECONDS = 0.06  # about what a turn takes, unless one call takes longer
ROUNDS, QUICK_ROUNDS = 5, 3
PRECISIONS = ("float32", "tf32", "bfloat16")
CPU_ROWS = 10_240  # of an epoch on the CPU, at most
CPU_FLOPS = 1e11  # of an epoch on the CPU; networks with more are left out
CPU_SECONDS, CPU_STEPS = 0.5, 4  # of an epoch on the CPU: about so long, but at least so many steps
CPU_RATE, CPU_BANDWIDTH = 5e10, 5e9  # what that is counted by: operations and bytes a second
STATE_PASSES = 4  # over parameters and momentum in a step: forward, backward, reduce, update
PRODUCT_SIZE, CPU_PRODUCT_SIZE = 4096, 512  # of the matrices whose product shows a precision
CHECKED_ROWS = 256  # of that product, computed in float64
PACKAGE = Path(__file__).parent


# --- what is trained ---


@dataclass(frozen=True)
class Workload:
    """A network, the rows it is trained on, and how.

    Attributes:
        last: the activation of the last layer; ``activation`` is the others'.
        dropout: the rate of a dropout after each hidden layer, or 0 for none.
        source: what inputs are stored as; bytes stand for numbers from 0 to 1.
    """

    widths: tuple[int, ...]
    batch_size: int
    rows: int
    rate: float
    loss: LossName = "softmax_cross_entropy"
    activation: ActivationName = "relu"
    last: ActivationName = "identity"
    precisions: tuple[str, ...] = ("float32",)
    optimizer: Literal["momentum", "adam"] = "momentum"
    dropout: float = 0.0
    source: Literal["float32", "uint8"] = "float32"

    @property
    def network_name(self) -> str:
        """The widths, joined."""
        return "-".join(map(str, self.widths))

    @property
    def name(self) -> str:
        return f"{self.network_name}, batch {self.batch_size:,}"

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.rows // self.batch_size)

    @property
    def flops(self) -> int:
        """Multiplications and additions of a whole batch's products; the first layer has no gradient by its inputs."""
        weights = [n_in * n_out for n_in, n_out in pairwise(self.widths)]
        return 2 * self.batch_size * (3 * sum(weights) - weights[0])

    @property
    def batch_bytes(self) -> int:
        """Of a whole batch's inputs and targets, in float32."""
        targets = self.widths[-1] if self.loss == "squared_error" else 1
        return 4 * self.batch_size * (self.widths[0] + targets)

    @property
    def state_bytes(self) -> int:
        """Of parameters and the optimizer's slots."""
        arrays = {"momentum": 2, "adam": 3}[self.optimizer]
        return 4 * arrays * sum((n_in + 1) * n_out for n_in, n_out in pairwise(self.widths))

    def network(self) -> Network:
        *hidden, (n_in, n_out) = pairwise(self.widths)
        layers: list[Layer] = []
        for widths in hidden:
            layers.append(Dense(*widths, activation=self.activation))
            layers += [Dropout(self.dropout)] if self.dropout else []
        return Network([*layers, Dense(n_in, n_out, activation=self.last)], seed=0)

    def initial(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The parameters that training begins with: each layer's weight (n_in, n_out) and bias (n_out,)."""
        values = list(self.network().parameters.values())
        return list(zip(values[::2], values[1::2], strict=True))

    def trainer(self, **options: Any) -> Trainer:
        """A trainer of the network; ``options`` are those of :class:`Trainer`."""
        return Trainer(self.network(), self.loss, self._optimizer(), batch_size=self.batch_size, **options)

    def plan(self, precision: str) -> Plan:
        """What a trainer of one shard computes, for any backend."""
        return self.network().lower(
            capacity=self.batch_size, loss=self.loss, optimizer=self._optimizer(), precision=precision
        )

    def _optimizer(self) -> Optimizer:
        return Adam(self.rate) if self.optimizer == "adam" else Momentum(self.rate, momentum=MOMENTUM)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (rows, n_in), float32 or uint8, and labels (rows,) or for a squared error targets (rows, n_out)."""
        rng = np.random.default_rng(0)
        n_out = self.widths[-1]
        shape = self.rows, self.widths[0]
        is_bytes = self.source == "uint8"
        x = rng.integers(256, size=shape, dtype=np.uint8) if is_bytes else rng.random(shape, dtype=np.float32)
        if self.loss == "squared_error":
            return x, rng.random((self.rows, n_out), dtype=np.float32)
        return x, rng.integers(n_out, size=self.rows)

    @property
    def scale(self) -> float | None:
        """What bytes are multiplied by."""
        return 1 / 255 if self.source == "uint8" else None

    def dataset(self, arrays: tuple[np.ndarray, np.ndarray]) -> Dataset:
        """The data set of inputs and targets from :meth:`arrays`, or of some of their rows."""
        return Dataset(*arrays, scale=self.scale)


WORKLOADS: dict[str, Workload] = {
    "tiny": Workload((784, 128, 10), 128, 60_000, 1e-3, precisions=PRECISIONS),
    "narrow": Workload((783, 30, 10), 32, 20_000, 1e-3),
    "medium": Workload((784, 1024, 1024, 10), 1024, 61_440, 1e-3, precisions=PRECISIONS),
    "large": Workload((4096,) * 5, 8192, 16_384, 1e-7, loss="squared_error", precisions=PRECISIONS),
    "tall": Workload((90_000, 90, 90, 10), 128, 6_400, 1e-5),
    "tall-1": Workload((90_000, 90, 90, 10), 1, 512, 1e-5),
}


def suited_to(backend: Backend, workload: Workload) -> Workload | None:
    """The workload that is measured on a backend: as it is on a card, with fewer rows on the CPU, or None."""
    if isinstance(backend, CudaBackend):
        return workload
    shorter = dataclasses.replace(workload, rows=min(workload.rows, CPU_ROWS))
    if shorter.flops * shorter.steps > CPU_FLOPS:
        return None
    step_seconds = workload.flops / CPU_RATE + STATE_PASSES * workload.state_bytes / CPU_BANDWIDTH
    steps = max(CPU_STEPS, int(CPU_SECONDS / step_seconds))
    return dataclasses.replace(shorter, rows=min(shorter.rows, steps * workload.batch_size))


class Epochs:
    """A trainer's plan on a data set, an epoch a call, or several, without a history, callbacks or progress.

    The first call brings the data to where the backend keeps them; :meth:`reset` then goes back to the network's
    initial parameters, so that later calls repeat the training without that.

    Attributes:
        epochs: how many a call trains for, as a fit does where nothing comes between short epochs.
    """

    def __init__(self, trainer: Trainer, data: Dataset, *, shuffle: bool = True) -> None:
        network, plan = trainer.network, trainer.plan
        self.epochs = 1
        network.adapt(data)
        assert plan.optimizer is not None
        self._initial = network.state(plan.optimizer)
        self._sampling = Sampling(len(data), trainer.batch_size, seed=network.seed, shuffle=shuffle)
        self._schedule = as_schedule(plan.optimizer.rate)
        self.plan = plan
        self.program = trainer.backend.compile(plan, threads=trainer.threads, memory_share=trainer.memory_share)
        self.program.attach(data, self._sampling)
        self.reset()

    def reset(self) -> None:
        """Begin again, with epoch 0."""
        self.step = 0
        self.program.load(self._initial)

    def __call__(self) -> float:
        """Train for the epochs of a call; returns the mean loss of the last of them."""
        steps = self._sampling.steps_per_epoch
        number = self.step + np.arange(self.epochs * steps)
        rates = self._schedule.rates(Clock(step=number, epoch=number / steps, epochs_per_step=1 / steps))
        loss, weight = self.program.run(self.step, rates)[-steps:].sum(axis=0)
        self.step += len(rates)
        return float(loss / weight)

    def accuracy(self, data: Dataset) -> float:
        """The fraction of a data set's rows whose class is the predicted one."""
        right, rows = self.program.evaluate(data, ["accuracy"])["accuracy"]
        return float(right / rows)


def mean_loss(workload: Workload, losses: np.ndarray) -> float:
    """The mean over an epoch's rows, of the mean losses (steps,) of its batches, of which the last may be smaller."""
    starts = np.arange(0, workload.rows, workload.batch_size)
    return float(np.average(losses, weights=np.minimum(workload.batch_size, workload.rows - starts)))


# --- turns ---


def take_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, *, pause: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of one call of each contender, round by round; each ends when its work is done.

    ``pause`` is how many seconds lie before each turn, in which threads of the turn before stop to spin.
    """
    calls = {}
    for name, run in contenders.items():
        run()  # compiles, captures, fills caches
        started = time.perf_counter()
        run()
        calls[name] = max(1, round(TURN_SECONDS / (time.perf_counter() - started)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            if pause:
                time.sleep(pause)
            started = time.perf_counter()
            for _ in range(calls[name]):
                run()
            seconds[name].append((time.perf_counter() - started) / calls[name])
    return seconds


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


# --- what a precision is worth ---


@dataclass(frozen=True)
class Product:
    """Two matrices of normal values, (n, n) float32, and the first rows of their product in float64."""

    a: np.ndarray
    b: np.ndarray
    reference: np.ndarray  # (checked rows, n)

    @classmethod
    def random(cls, n: int) -> Product:
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        return cls(a, b, a[:CHECKED_ROWS].astype(np.float64) @ b.astype(np.float64))

    def error(self, c: np.ndarray) -> float:
        """The relative error, by Frobenius norms, of a product (n, n); NaN where it holds one."""
        difference = c[:CHECKED_ROWS].astype(np.float64) - self.reference
        return float(np.linalg.norm(difference) / np.linalg.norm(self.reference))


def forward_error(product: Product, backend: Backend, precision: str) -> float:
    """The error of a dense layer's product in a plan of that precision."""
    n = len(product.a)
    network = Network([Dense(n, n, bias=False)], seed=0)
    network.parameters["0.weight"] = product.b
    program = backend.compile(network.lower(capacity=n, precision=precision))
    program.load(network.state())
    return product.error(program.predict(Dataset(product.a), logits=True))


def product_form(kernel: str) -> str | None:
    """Which product of a dense layer a kernel makes, by its name; that of a weight's gradient may update the weight."""
    if "forward" in kernel:
        return "forward"
    if "backward" in kernel:
        return "backward_input" if "input" in kernel else "backward_weight"
    return None


# --- results ---


@dataclass(frozen=True)
class Result:
    """A contender on a workload; with the surroundings it is a line of JSON.

    Attributes:
        microseconds: of a step, the median of the rounds; ``fastest`` and ``slowest`` are the range.
        loss: the mean of a first epoch, from the same parameters and in the same order for all contenders.
        error: of a product of two matrices of ``PRODUCT_SIZE`` rows and columns at this precision, against float64.
        flops, batch_bytes, state_bytes: of the workload; a floor follows from them.
    """

    workload: str
    network: str
    batch_size: int
    rows: int
    precision: str
    contender: str
    microseconds: float
    fastest: float
    slowest: float
    rounds: int
    loss: float
    error: float | None
    flops: int
    batch_bytes: int
    state_bytes: int


def summarize(
    key: str,
    workload: Workload,
    precision: str,
    contender: str,
    seconds: Sequence[float],
    *,
    loss: float,
    error: float | None,
) -> Result:
    """The result of a contender's turns; ``seconds`` are of an epoch in each of them."""
    micro = [1e6 * value / workload.steps for value in seconds]
    return Result(
        workload=key,
        network=workload.network_name,
        batch_size=workload.batch_size,
        rows=workload.rows,
        precision=precision,
        contender=contender,
        microseconds=statistics.median(micro),
        fastest=min(micro),
        slowest=max(micro),
        rounds=len(micro),
        loss=loss,
        error=error,
        flops=workload.flops,
        batch_bytes=workload.batch_bytes,
        state_bytes=workload.state_bytes,
    )


def measure(
    backend: str,
    names: Iterable[str] = tuple(WORKLOADS),
    precisions: Iterable[str] = PRECISIONS,
    *,
    rounds: int = ROUNDS,
    tell: Callable[[str], object] = lambda message: None,
) -> list[Result]:
    """Measure mlpgpu alone; ``tell`` is called with what is under way, and with what is left out and why.

    Raises:
        BackendError, UnknownNameError: there is no such backend here.
        ConfigurationError: it can measure nothing of what is asked for.
    """
    chosen, names, precisions = get_backend(backend), list(names), list(precisions)
    size = PRODUCT_SIZE if isinstance(chosen, CudaBackend) else CPU_PRODUCT_SIZE
    results: list[Result] = []
    errors: dict[str, float] = {}
    for key in names:
        workload = suited_to(chosen, WORKLOADS[key])
        if workload is None:
            tell(f"{key} left out: more than {CPU_FLOPS:g} operations an epoch are for a GPU")
            continue
        data = Dataset(*workload.arrays())
        for precision in (name for name in workload.precisions if name in precisions):
            tell(f"{key}: {workload.name}, {precision}")
            try:
                trainer = workload.trainer(backend=chosen.name, precision=precision)
            except MlpgpuError as refused:
                tell(f"left out: {refused}")
                continue
            if precision not in errors:
                errors[precision] = forward_error(Product.random(size), chosen, precision)
            run = Epochs(trainer, data)
            loss = run()
            seconds = take_turns({"mlpgpu": run}, rounds)["mlpgpu"]
            result = summarize(key, workload, precision, "mlpgpu", seconds, loss=loss, error=errors[precision])
            results.append(result)
    if not results:
        expected = "a workload and a precision that can be measured on it"
        raise ConfigurationError(f"bench on the {chosen.name} backend", expected=expected, got=f"{names}, {precisions}")
    return results


def table(results: Sequence[Result]) -> str:
    """The results as text, one to a line."""
    heads = ("workload", "network", "batch", "precision", "", "µs/step", "fastest", "TFLOP/s", "error")
    cells = [heads] + [
        (
            result.workload,
            result.network,
            f"{result.batch_size:,}",
            result.precision,
            result.contender,
            f"{result.microseconds:,.1f}",
            f"{result.fastest:,.1f}",
            f"{1e-6 * result.flops / result.microseconds:,.2f}",
            "" if result.error is None else f"{result.error:.1e}",
        )
        for result in results
    ]
    return text.table(cells, ">" * len(heads))


def surroundings(backend: Backend | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What results hold for: machine, card, versions, NumPy's BLAS, and the commit if the package is in a clone."""
    versions: dict[str, str | None] = {"mlpgpu": __version__}
    for package in ("numpy", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "machine": models[0] if models else platform.processor() or platform.machine(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "blas": blas_name(),
        "commit": _commit(),
    }
    if isinstance(backend, CudaBackend):
        found |= {"card": backend.device.name, "driver": _driver_version()}
    return found


def _commit() -> str | None:
    if not (PACKAGE.parent / ".git").exists():
        return None
    return _first_line(["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def _driver_version() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _first_line(command: Sequence[str]) -> str | None:
    """The first line that a command prints, or None if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None


def json_lines(results: Iterable[Any], about: Mapping[str, Any]) -> str:
    """A line of JSON for each result, which is a dataclass, with the surroundings ``about``."""
    lines = [json.dumps({**dataclasses.asdict(result), **about}, ensure_ascii=False) for result in results]
    return "".join(line + "\n" for line in lines)
