"""JAX's ways to train the networks of mlpgpu.bench, and its product of two matrices.

Several epochs are one jitted call, a scan over epochs of a scan over batches, with the shuffles inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from mlpgpu import bench
from mlpgpu.activations import LEAKY_SLOPE
from mlpgpu.bench import Product, Workload, mean_loss
from mlpgpu.optimizers import Adam

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the card for itself
import jax
import jax.numpy as jnp

COMPILING_THREADS = 8
MOST_GRAPH_STEPS = 1000  # of one call, where XLA makes one graph of them all
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda z: z,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "leaky_relu": partial(jax.nn.leaky_relu, negative_slope=LEAKY_SLOPE),
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
RANDOM_BITS = 16  # of each element that may drop out: its rate is rounded to a multiple of 2⁻¹⁶


@dataclass(frozen=True)
class Algorithm:
    """How matrices are multiplied: operands of ``dtype``, by an algorithm or a precision of JAX's by name."""

    name: str
    dtype: str
    precision: str

    @property
    def kept(self) -> str:
        """The type of parameters, slots and losses."""
        return "float64" if self.dtype == "float64" else "float32"

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
    "float64": (Algorithm("JAX", "float64", "highest"),),
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


@lru_cache(maxsize=1)
def _initial(workload: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """The parameters that all contenders of a workload begin with, which take seconds where they are many."""
    return workload.initial()


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
        jax.config.update("jax_enable_x64", algorithm.dtype == "float64")  # of all contenders of the process
        self._trained = 0  # epochs
        self._compiled: Any = None
        self.ready: Future[None] = Future()  # when it is compiled

    @property
    def _is_regression(self) -> bool:
        return self.workload.loss == "squared_error"

    def _mean_loss(self, parameters: Any, h: Any, target: Any, key: Any) -> Any:
        algorithm, last = self.algorithm, len(parameters) - 1
        activation, masks = ACTIVATIONS[self.workload.activation], self._masks(len(h), key)
        for k, (w, b) in enumerate(parameters):
            z = algorithm.dot(h, w) + b.astype(algorithm.dtype)
            h = activation(z) if k < last else z.astype(algorithm.kept)
            if masks and k < last:
                h = jnp.where(masks[k], h / (1.0 - self.workload.dropout), 0.0).astype(h.dtype)
        if self._is_regression:
            return 0.5 / len(h) * jnp.sum((h - target) ** 2)
        # The labels' logits by a mask: their gradient, by an index, would be a scatter.
        of_label = jnp.sum(h * jax.nn.one_hot(target, h.shape[1]), axis=1)
        return jnp.mean(jax.nn.logsumexp(h, axis=1) - of_label)

    def _masks(self, rows: int, key: Any) -> list[Any]:
        """Which outputs of each hidden layer are kept; one draw has the bits of all of them."""
        widths = self.workload.widths[1:-1]
        if not self.workload.dropout:
            return []
        bits = jax.random.bits(key, (rows, sum(widths)), f"uint{RANDOM_BITS}")
        kept = bits >= round(self.workload.dropout * 2**RANDOM_BITS)
        return list(jnp.split(kept, np.cumsum(widths)[:-1], axis=1))

    def _step(self, state: Any, x: Any, y: Any, key: Any) -> Any:
        parameters, slots = state
        loss, gradients = jax.value_and_grad(self._mean_loss)(parameters, x, y, key)
        change, slots = self._adam(slots, gradients) if self._is_adam else self._momentum(slots, gradients)
        return (jax.tree.map(jnp.subtract, parameters, change), slots), loss

    @property
    def _is_adam(self) -> bool:
        return self.workload.optimizer == "adam"

    def _momentum(self, velocities: Any, gradients: Any) -> Any:
        velocities = jax.tree.map(lambda v, g: bench.MOMENTUM * v + self.workload.rate * g, velocities, gradients)
        return velocities, velocities

    def _adam(self, slots: Any, gradients: Any) -> Any:
        rule = Adam(self.workload.rate)
        means, squares, steps = slots
        steps = steps + 1
        means = jax.tree.map(lambda m, g: rule.beta1 * m + (1 - rule.beta1) * g, means, gradients)
        squares = jax.tree.map(lambda v, g: rule.beta2 * v + (1 - rule.beta2) * g * g, squares, gradients)
        of_means, of_squares = 1 - rule.beta1**steps, 1 - rule.beta2**steps

        def change(m: Any, v: Any) -> Any:
            return self.workload.rate * (m / of_means) / (jnp.sqrt(v / of_squares) + rule.epsilon)

        return jax.tree.map(change, means, squares), (means, squares, steps)

    def _slots(self, parameters: Any) -> Any:
        """The optimizer's slots before the first step."""
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return (
            (zeros, jax.tree.map(jnp.zeros_like, parameters), jnp.zeros((), self.algorithm.kept))
            if self._is_adam
            else zeros
        )

    def _epoch(self, state: Any, order: Any, key: Any, x: Any, y: Any) -> Any:
        """The state after an epoch, and its losses (steps,); ``key`` is of its dropouts."""
        size = self.workload.batch_size
        whole = self.workload.rows // size

        def step(state: Any, drawn: Any) -> Any:
            batch, key = drawn
            return self._step(state, x[batch], y[batch], key)

        batches = order[: whole * size].reshape(whole, size)
        keys = jax.random.split(key, self.workload.steps) if self.workload.dropout else None
        of_whole, of_last = (None, None) if keys is None else (keys[:whole], keys[-1])
        state, losses = jax.lax.scan(step, state, (batches, of_whole), unroll=min(self._form.unroll, whole))
        if whole < self.workload.steps:  # a shorter last batch
            state, last = step(state, (order[whole * size :], of_last))
            losses = jnp.append(losses, last)
        return state, losses

    def _train(self, state: Any, first_epoch: Any, given: Any, is_given: Any, x: Any, y: Any) -> Any:
        """The state after all epochs, and their losses (epochs, steps)."""

        def epoch(state: Any, number: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(0), first_epoch + number)
            # One sort; JAX's own permutation makes two.
            shuffled = jnp.argsort(jax.random.bits(key, (self.workload.rows,), "uint32")).astype("int32")
            # Its generator of hardware's kind takes a fraction of the default one's time.
            dropouts = jax.random.fold_in(jax.random.key(1, impl="unsafe_rbg"), first_epoch + number)
            return self._epoch(state, jnp.where(is_given & (number == 0), given, shuffled), dropouts, x, y)

        return jax.lax.scan(epoch, state, jnp.arange(self._scanned))

    def compile(self) -> None:
        """Compile it for the shapes of its workload; threads may compile side by side."""
        workload, shape = self.workload, jax.ShapeDtypeStruct
        state = self._shape_of_state()
        y = self._shape_of_targets(workload.rows)
        arguments = (
            state, shape((), "int32"), shape((workload.rows,), "int32"), shape((), "bool"),
            shape((workload.rows, workload.widths[0]), self.algorithm.dtype), y,
        )  # fmt: skip
        lowered = jax.jit(self._train, donate_argnums=0).lower(*arguments)
        self._compiled = lowered.compile(compiler_options=dict(self._form.options))

    def _shape_of_state(self) -> Any:
        shape, kept = jax.ShapeDtypeStruct, self.algorithm.kept
        parameters = [(shape(w, kept), shape(w[1:], kept)) for w in pairwise(self.workload.widths)]
        return parameters, (parameters, parameters, shape((), kept)) if self._is_adam else parameters

    def _shape_of_targets(self, rows: int) -> Any:
        n_out = self.workload.widths[-1]
        kept = self.algorithm.kept
        return jax.ShapeDtypeStruct(*(((rows, n_out), kept) if self._is_regression else ((rows,), "int32")))

    def compile_step(self) -> Any:
        """One step by itself, compiled: a function of state, inputs and targets of a batch."""
        rows, n_in = min(self.workload.batch_size, self.workload.rows), self.workload.widths[0]
        x = jax.ShapeDtypeStruct((rows, n_in), self.algorithm.dtype)
        step = partial(self._step, key=jax.random.key(1, impl="unsafe_rbg") if self.workload.dropout else None)
        return jax.jit(step).lower(self._shape_of_state(), x, self._shape_of_targets(rows)).compile()

    def first_step(self, order: np.ndarray) -> list[np.ndarray]:
        """The optimizer's first slot after one step from the initial parameters, on the first rows of ``order``.

        It is proportional to the gradient: each layer's weight (n_in, n_out) and bias (n_out,) in turn.
        """
        rows = jnp.asarray(order[: self.workload.batch_size], "int32")
        (_, slots), _ = self.compile_step()(self._initial_state(), self._x[rows], self._y[rows])
        return [np.asarray(value) for value in jax.tree.leaves(slots[0] if self._is_adam else slots)]

    @property
    def peak_bytes(self) -> int | None:
        """What the compiled call takes at most: arguments, results and what is between, as XLA states it."""
        stated = self._compiled.memory_analysis()
        if stated is None:
            return None
        total = stated.argument_size_in_bytes + stated.output_size_in_bytes + stated.temp_size_in_bytes
        return int(total - stated.alias_size_in_bytes)

    def _initial_state(self) -> Any:
        kept = self.algorithm.kept
        parameters = [(jnp.asarray(w, kept), jnp.asarray(b, kept)) for w, b in _initial(self.workload)]
        return parameters, self._slots(parameters)

    def start(self, x: Any, y: Any) -> Contender:
        """Put the initial parameters on the card, beside the data set from :func:`on_card`, once it is compiled."""
        self.ready.result()
        self._state = self._initial_state()
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


def on_card(arrays: tuple[np.ndarray, np.ndarray], dtype: str, scale: float | None = None) -> tuple[Any, Any]:
    """A data set for contenders whose algorithm takes inputs of this type, which bytes become here and now."""
    x, y = arrays
    kept = "float64" if dtype == "float64" else "float32"
    inputs = jnp.asarray(x, dtype) if scale is None else (jnp.asarray(x).astype(kept) * scale).astype(dtype)
    return inputs, jnp.asarray(y, kept if y.dtype == np.float32 else "int32")


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
