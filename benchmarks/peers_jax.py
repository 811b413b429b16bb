"""JAX's ways to train the networks of mlpgpu.bench, and its product of two matrices.

Several epochs are one jitted call, a scan over epochs of a scan over batches, with the shuffles inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from mlpgpu import bench
from mlpgpu.bench import Product, Workload, mean_loss

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the card for itself
import jax
import jax.numpy as jnp

COMPILING_THREADS = 8
MOST_GRAPH_STEPS = 1000  # of one call, where XLA makes one graph of them all


@dataclass(frozen=True)
class Algorithm:
    """How matrices are multiplied: operands of ``dtype``, by an algorithm or a precision of JAX's by name."""

    name: str
    dtype: str
    precision: str

    def dot(self, a: Any, b: Any) -> Any:
        presets = jax.lax.DotAlgorithmPreset
        chosen = getattr(presets, self.precision) if self.precision in presets.__members__ else self.precision
        return jnp.dot(a.astype(self.dtype), b.astype(self.dtype), precision=chosen)


ALGORITHMS = {
    "float32": (
        Algorithm("JAX", "float32", "highest"),
        Algorithm("JAX bf16x6", "float32", "BF16_BF16_F32_X6"),
        Algorithm("JAX tf32x3", "float32", "TF32_TF32_F32_X3"),
    ),
    "tf32": (Algorithm("JAX", "float32", "TF32_TF32_F32"),),
    "bfloat16": (Algorithm("JAX", "bfloat16", "default"),),
}


@dataclass(frozen=True)
class Form:
    """A way to run the scan over batches: so many of them in its body, and compiled with these options of XLA's."""

    name: str
    unroll: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


# The parts of a program that XLA makes CUDA graphs of, its defaults and loops.
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
FORMS = (
    Form("plain scan"),
    Form("unrolled by 4", unroll=4),
    Form("unrolled by 8", unroll=8),
    Form("scan as a graph's loop", options={"xla_gpu_enable_command_buffer": _GRAPHS}),
    Form(
        "scan as one graph",
        options={"xla_gpu_enable_command_buffer": _GRAPHS, "xla_gpu_command_buffer_unroll_loops": True},
    ),
    Form("plain scan, cuBLASLt", options={"xla_gpu_enable_cublaslt": True}),
    Form("unrolled by 4, all tilings", unroll=4, options={"xla_gpu_exhaustive_tiling_search": True}),
)


class Contender:
    """A workload by JAX, from the parameters that mlpgpu starts with.

    Called, it trains for ``epochs`` epochs, each in an order of its own, and waits for the last; given an order, the
    first of them is in that order.  It returns the mean loss of the last epoch, or of the one in the order given.
    """

    def __init__(self, workload: Workload, algorithm: Algorithm, form: Form, *, epochs: int = 1) -> None:
        self._scanned = epochs  # by one jitted call; the host waits for the last of several calls
        if form.options.get("xla_gpu_command_buffer_unroll_loops"):
            self._scanned = max(1, min(epochs, MOST_GRAPH_STEPS // workload.steps))
        self._calls = -(-epochs // self._scanned)
        self.workload, self.epochs = workload, self._scanned * self._calls
        self.algorithm, self._form = algorithm, form
        self._trained = 0  # epochs
        self._compiled: Any = None
        self.ready: Future[None] = Future()  # when it is compiled

    @property
    def _is_regression(self) -> bool:
        return self.workload.loss == "squared_error"

    def _mean_loss(self, parameters: Any, h: Any, target: Any) -> Any:
        algorithm, last = self.algorithm, len(parameters) - 1
        for k, (w, b) in enumerate(parameters):
            z = algorithm.dot(h, w) + b.astype(algorithm.dtype)
            h = jax.nn.relu(z) if k < last else z.astype("float32")
        if self._is_regression:
            return 0.5 / len(h) * jnp.sum((h - target) ** 2)
        # The labels' logits by a mask: their gradient, by an index, would be a scatter.
        of_label = jnp.sum(h * jax.nn.one_hot(target, h.shape[1]), axis=1)
        return jnp.mean(jax.nn.logsumexp(h, axis=1) - of_label)

    def _step(self, state: Any, x: Any, y: Any) -> Any:
        parameters, velocities = state
        loss, gradients = jax.value_and_grad(self._mean_loss)(parameters, x, y)
        velocities = jax.tree.map(lambda v, g: bench.MOMENTUM * v + self.workload.rate * g, velocities, gradients)
        return (jax.tree.map(jnp.subtract, parameters, velocities), velocities), loss

    def _epoch(self, state: Any, order: Any, x: Any, y: Any) -> Any:
        """The state after an epoch, and its losses (steps,)."""
        size = self.workload.batch_size
        whole = self.workload.rows // size

        def step(state: Any, batch: Any) -> Any:
            return self._step(state, x[batch], y[batch])

        batches = order[: whole * size].reshape(whole, size)
        state, losses = jax.lax.scan(step, state, batches, unroll=min(self._form.unroll, whole))
        if whole < self.workload.steps:  # a shorter last batch
            state, last = step(state, order[whole * size :])
            losses = jnp.append(losses, last)
        return state, losses

    def _train(self, state: Any, first_epoch: Any, given: Any, is_given: Any, x: Any, y: Any) -> Any:
        """The state after all epochs, and their losses (epochs, steps)."""

        def epoch(state: Any, number: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(0), first_epoch + number)
            # One sort; JAX's own permutation makes two.
            shuffled = jnp.argsort(jax.random.bits(key, (self.workload.rows,)))
            return self._epoch(state, jnp.where(is_given & (number == 0), given, shuffled), x, y)

        return jax.lax.scan(epoch, state, jnp.arange(self._scanned))

    def compile(self) -> None:
        """Compile it for the shapes of its workload; threads may compile side by side."""
        workload, shape = self.workload, jax.ShapeDtypeStruct
        parameters = [(shape(w, "float32"), shape(w[1:], "float32")) for w in pairwise(workload.widths)]
        n_in, n_out = workload.widths[0], workload.widths[-1]
        y = shape((workload.rows, n_out), "float32") if self._is_regression else shape((workload.rows,), "int32")
        arguments = (
            (parameters, parameters), shape((), "int32"), shape((workload.rows,), "int32"), shape((), "bool"),
            shape((workload.rows, n_in), self.algorithm.dtype), y,
        )  # fmt: skip
        lowered = jax.jit(self._train, donate_argnums=0).lower(*arguments)
        self._compiled = lowered.compile(compiler_options=dict(self._form.options))

    def start(self, x: Any, y: Any) -> Contender:
        """Put the initial parameters on the card, beside the data set from :func:`on_card`, once it is compiled."""
        self.ready.result()
        initial = self.workload.network().parameters
        layers = range(len(self.workload.widths) - 1)
        parameters = [(jnp.asarray(initial[f"{k}.weight"]), jnp.asarray(initial[f"{k}.bias"])) for k in layers]
        self._state = parameters, jax.tree.map(jnp.zeros_like, parameters)
        self._none, self._x, self._y = jnp.zeros(self.workload.rows, "int32"), x, y
        return self

    def __call__(self, order: np.ndarray | None = None) -> float:
        given = self._none if order is None else jnp.asarray(order, "int32")
        for _ in range(self._calls if order is None else 1):
            self._state, losses = self._compiled(
                self._state, jnp.int32(self._trained), given, jnp.bool_(order is not None), self._x, self._y
            )
            self._trained += self._scanned
        of_epoch = np.asarray(losses)[-1 if order is None else 0]  # waits for them
        return mean_loss(self.workload, of_epoch)


def on_card(arrays: tuple[np.ndarray, np.ndarray], dtype: str) -> tuple[Any, Any]:
    """A data set for contenders whose algorithm takes inputs of this type."""
    x, y = arrays
    return jnp.asarray(x, dtype), jnp.asarray(y, "float32" if y.dtype == np.float32 else "int32")


def compile_all(contenders: Iterable[Contender]) -> None:
    """Compile contenders side by side, and wait for it; one that cannot be compiled says so when it starts.

    XLA measures kernels on the card while it compiles.  It locks the card for that, so threads do not disturb each
    other's measurements.
    """
    with ThreadPoolExecutor(COMPILING_THREADS) as pool:
        for contender in contenders:
            contender.ready = pool.submit(contender.compile)


def product_error(product: Product, algorithm: Algorithm) -> float:
    """The error of JAX's product."""
    c = jax.jit(algorithm.dot)(jnp.asarray(product.a), jnp.asarray(product.b))
    return product.error(np.asarray(c.astype("float32")))


def forget() -> None:
    """Forget what was traced, which holds the contenders that it is of."""
    jax.clear_caches()
