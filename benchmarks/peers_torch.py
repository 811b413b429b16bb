"""PyTorch's ways to train the networks of mlpgpu.bench, and its product of two matrices.

All of them keep parameters and velocities in float32, or in float64 where that is the precision.  "tf32" is the flag by
which PyTorch computes float32 products; "bfloat16" multiplies in bfloat16, by autocast or by the same casts, and then
the inputs lie on the card in bfloat16, which is what the first product would make of them anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mlpgpu import bench
from mlpgpu.activations import LEAKY_SLOPE
from mlpgpu.bench import Product, Workload, mean_loss
from mlpgpu.optimizers import Adam

# A batch's inputs of up to so many bytes are gathered for a whole epoch at once, which spares a launch a step; larger
# ones step by step, so that products find them in the cache.
MOST_GATHERED_BYTES = 4 << 20


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": partial(torch.nn.functional.leaky_relu, negative_slope=LEAKY_SLOPE),
    "elu": torch.nn.functional.elu,
    "softplus": torch.nn.functional.softplus,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


class _Activation(torch.nn.Module):  # type: ignore[misc]
    """One of :data:`ACTIVATIONS` as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, z: Any) -> Any:
        return self._function(z)


@dataclass(frozen=True)
class Form:
    """A way to train.

    Attributes:
        whole: a step is one function, with its gradients by torch.func and its update; otherwise modules are
            differentiated by autograd, and a fused optimizer updates them.
        mode: torch.compile's; or None, and nothing is compiled.
        captured: an epoch's steps are captured as one CUDA graph.
    """

    name: str
    whole: bool
    mode: str | None
    captured: bool = True


AUTOTUNED = "max-autotune-no-cudagraphs"  # no graphs, as all steps of an epoch are captured by hand
FORMS = (
    Form("eager", whole=False, mode=None, captured=False),
    Form("graph", whole=False, mode=None),
    Form("compiled graph", whole=False, mode="default"),
    Form("compiled step", whole=True, mode="default"),
    Form("autotuned graph", whole=False, mode=AUTOTUNED),
    Form("autotuned step", whole=True, mode=AUTOTUNED),
)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Inside the block PyTorch computes float32 products in tf32, where that is the precision."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Contender:
    """A workload by PyTorch, from the parameters that mlpgpu starts with.

    Called, it trains for ``epochs`` epochs, each in an order of its own, and waits for the last; given an order, for
    one epoch in that order.  Either way it returns the mean loss of the last epoch.

    Arguments:
        x, y: the data set, (rows, n_in) and labels (rows,) or targets (rows, n_out), on the device to train on.
    """

    def __init__(self, workload: Workload, form: Form, precision: str, x: Any, y: Any, *, epochs: int = 1) -> None:
        self.workload, self.epochs = workload, epochs
        self._precision, self._device = precision, x.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._bytes_before = torch.cuda.memory_allocated()
        self._dtype = kept_type(precision)
        self._x = x.bfloat16() if precision == "bfloat16" else x.to(self._dtype)
        self._y = y.to(self._dtype) if y.is_floating_point() else y
        self._order = torch.arange(workload.rows, device=self._device)
        self._initial = [
            torch.tensor(value.T, dtype=self._dtype, device=self._device).contiguous()
            for layer in workload.initial()
            for value in layer
        ]
        make = self._whole_step if form.whole else self._module_step
        self._first_slots: Callable[[], list[Any]]
        self._step = make(None if form.mode is None else dict(mode=form.mode, dynamic=False))
        self._gathered = workload.batch_bytes <= MOST_GATHERED_BYTES
        if self._gathered:
            self._epoch_x, self._epoch_y = torch.empty_like(self._x), torch.empty_like(self._y)
        self._losses = torch.zeros(workload.steps, dtype=self._dtype, device=self._device)
        self._graph: Any = None
        if form.captured:
            self._capture()

    def _loss(self, z: Any, target: Any) -> Any:
        if self.workload.loss == "squared_error":
            return 0.5 / len(z) * torch.nn.functional.mse_loss(z.to(self._dtype), target, reduction="sum")
        return torch.nn.functional.cross_entropy(z.to(self._dtype), target)

    def _module_step(self, options: dict[str, Any] | None) -> Callable[[Any, Any], Any]:
        """A step by modules, autograd and an optimizer."""
        modules: list[Any] = []
        for k, (n_in, n_out) in enumerate(pairwise(self.workload.widths)):
            linear = torch.nn.Linear(n_in, n_out, dtype=self._dtype, device=self._device)
            with torch.no_grad():
                linear.weight.copy_(self._initial[2 * k])
                linear.bias.copy_(self._initial[2 * k + 1])
            modules.append(linear)
            if k < len(self.workload.widths) - 2:
                modules.append(_Activation(ACTIVATIONS[self.workload.activation]))
                modules += [torch.nn.Dropout(self.workload.dropout)] if self.workload.dropout else []
        model = torch.nn.Sequential(*modules)
        self._parameters = list(model.parameters())
        optimizer: Any
        slots: tuple[str, ...]
        if self._is_adam:
            rule, is_on_card = Adam(self.workload.rate), self._device.type == "cuda"
            optimizer = torch.optim.Adam(
                self._parameters, lr=self.workload.rate, betas=(rule.beta1, rule.beta2), eps=rule.epsilon, fused=True,
                capturable=is_on_card,
            )  # fmt: skip
            slots, factor = ("exp_avg", "exp_avg_sq", "step"), 1.0
        else:
            optimizer = torch.optim.SGD(self._parameters, lr=self.workload.rate, momentum=bench.MOMENTUM, fused=True)
            slots, factor = ("momentum_buffer",), self.workload.rate

        def forward(x: Any, target: Any) -> Any:
            return self._loss(model(x), target)

        if options is not None:
            forward = torch.compile(forward, **options)
        is_cast = self._precision == "bfloat16"

        def step(x: Any, target: Any) -> Any:
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_cast):
                loss = forward(x, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def forget() -> None:
            for parameter in self._parameters:
                for slot in slots:
                    optimizer.state[parameter][slot].zero_()

        self._forget = forget
        self._first_slots = lambda: [factor * optimizer.state[each][slots[0]] for each in self._parameters]
        return step

    def _whole_step(self, options: dict[str, Any] | None) -> Callable[[Any, Any], Any]:
        """A step as one function on tensors: its gradients by torch.func, its update for all parameters at once."""
        self._parameters = [value.clone() for value in self._initial]
        slots = [[torch.zeros_like(value) for value in self._parameters] for _ in range(2 if self._is_adam else 1)]
        counter = torch.zeros((), dtype=self._dtype, device=self._device)
        dtype = torch.bfloat16 if self._precision == "bfloat16" else self._dtype
        last, dropout = len(self._parameters) - 2, self.workload.dropout
        activation = ACTIVATIONS[self.workload.activation]

        def loss_of(parameters: list[Any], h: Any, target: Any) -> Any:
            for k in range(0, len(parameters), 2):
                h = torch.nn.functional.linear(h, parameters[k].to(dtype), parameters[k + 1].to(dtype))
                if k < last:
                    h = activation(h)
                    h = torch.nn.functional.dropout(h, dropout) if dropout else h
            return self._loss(h, target)

        move = self._adam if self._is_adam else self._momentum

        def step(parameters: list[Any], slots: list[list[Any]], counter: Any, x: Any, target: Any) -> Any:
            gradients, loss = torch.func.grad_and_value(loss_of)(parameters, x, target)
            move(parameters, slots, counter, gradients)
            return loss

        if options is not None:
            step = torch.compile(step, fullgraph=True, **options)

        def forget() -> None:
            for slot in slots:
                torch._foreach_zero_(slot)
            counter.zero_()

        self._forget = forget
        self._first_slots = lambda: [value.clone() for value in slots[0]]
        return lambda x, target: step(self._parameters, slots, counter, x, target)

    @property
    def _is_adam(self) -> bool:
        return self.workload.optimizer == "adam"

    def _momentum(self, parameters: list[Any], slots: list[list[Any]], counter: Any, gradients: list[Any]) -> None:
        (velocities,) = slots
        torch._foreach_mul_(velocities, bench.MOMENTUM)
        torch._foreach_add_(velocities, gradients, alpha=self.workload.rate)
        torch._foreach_sub_(parameters, velocities)

    def _adam(self, parameters: list[Any], slots: list[list[Any]], counter: Any, gradients: list[Any]) -> None:
        rule, (means, squares) = Adam(self.workload.rate), slots
        counter.add_(1.0)
        torch._foreach_lerp_(means, gradients, 1 - rule.beta1)
        torch._foreach_mul_(squares, rule.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - rule.beta2)
        step_size = self.workload.rate / (1 - rule.beta1**counter)
        scale = (1 - rule.beta2**counter).sqrt()
        divisors = torch._foreach_div(torch._foreach_sqrt(squares), scale)
        torch._foreach_add_(divisors, rule.epsilon)
        changes = torch._foreach_mul(torch._foreach_div(means, divisors), step_size)
        torch._foreach_sub_(parameters, changes)

    @property
    def peak_bytes(self) -> int | None:
        """The most memory of the card that it and its data took, as long as no other contender was made since."""
        if self._device.type != "cuda":
            return None
        data = sum(each.numel() * each.element_size() for each in (self._x, self._y))
        return int(data + torch.cuda.max_memory_allocated() - self._bytes_before)

    def first_step(self, order: np.ndarray) -> list[np.ndarray]:
        """The optimizer's first slot after one step from the initial parameters, on the first rows of ``order``.

        It is proportional to the gradient: each layer's weight (n_in, n_out) and bias (n_out,) in turn.  Afterwards the
        contender is as it was made.
        """
        rows = torch.tensor(order[: self.workload.batch_size], device=self._device)
        self._begin_again()
        with products_in(self._precision):
            self._step(self._x.index_select(0, rows), self._y.index_select(0, rows))
        found: list[np.ndarray] = [value.to(self._dtype).cpu().numpy().T for value in self._first_slots()]
        self._begin_again()
        return found

    def _begin_again(self) -> None:
        """Go back to the initial parameters, and to slots of 0 if there are any yet."""
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._initial)
        with suppress(KeyError):  # an optimizer that has not stepped has no slots
            self._forget()

    def _run_epoch(self) -> None:
        """The steps of an epoch in the order that is set."""
        x, y, size = self._x, self._y, self.workload.batch_size
        if self._gathered:
            torch.index_select(x, 0, self._order, out=self._epoch_x)
            torch.index_select(y, 0, self._order, out=self._epoch_y)
        losses = []
        with products_in(self._precision):
            for start in range(0, self.workload.rows, size):
                if self._gathered:
                    batch_x, batch_y = self._epoch_x[start : start + size], self._epoch_y[start : start + size]
                else:
                    rows = self._order[start : start + size]
                    batch_x, batch_y = x.index_select(0, rows), y.index_select(0, rows)
                losses.append(self._step(batch_x, batch_y))
        torch.stack(losses, out=self._losses)

    def _capture(self) -> None:
        """Make one graph of an epoch's steps, and go back to the initial parameters."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run_epoch()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # The collector might free memory of the card meanwhile, which ends a capture.
        gc.collect()
        gc.disable()
        try:
            # In this mode a capture ignores what other threads do, such as those of JAX.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._run_epoch()
        finally:
            gc.enable()
        self._begin_again()

    def __call__(self, order: np.ndarray | None = None) -> float:
        for _ in range(self.epochs if order is None else 1):
            if order is None:
                torch.randperm(self.workload.rows, out=self._order)
            else:
                self._order.copy_(torch.tensor(order))
            if self._graph is None:
                self._run_epoch()
            else:
                self._graph.replay()
        losses: np.ndarray = self._losses.cpu().numpy()  # waits for them
        return mean_loss(self.workload, losses)


def on_device(
    arrays: tuple[np.ndarray, np.ndarray], scale: float | None = None, device: str = "cuda", precision: str = "float32"
) -> Any:
    """A data set for contenders, inputs and targets; bytes become numbers here and now."""
    x, y = (torch.from_numpy(array).to(device) for array in arrays)
    return (x if scale is None else x.to(kept_type(precision)) * scale), y


def kept_type(precision: str) -> Any:
    """The type of what a step keeps, and of losses."""
    return torch.float64 if precision == "float64" else torch.float32


def product_error(product: Product, precision: str) -> float:
    """The error of PyTorch's product; its forms all call one library for it."""
    a, b = (torch.from_numpy(each).cuda() for each in (product.a, product.b))
    if precision == "bfloat16":
        a, b = a.bfloat16(), b.bfloat16()
    with products_in(precision):
        c = a @ b
    return product.error(c.float().cpu().numpy())


def start_compiler() -> None:
    """Have the compiler start, which takes seconds."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    torch.compile(lambda x: torch.relu(x).sum())(x).backward()


def forget() -> None:
    """Forget what was compiled, and give unused memory back to the card.

    The forms share their code among networks and precisions.  PyTorch compiles code a few times only, and then runs it
    eagerly, unless it forgets.
    """
    torch.compiler.reset()
    torch.cuda.empty_cache()
