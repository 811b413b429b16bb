"""One contender of benchmarks/ranks.py: trains one network on some ranks, and prints its microseconds a step as JSON.

Started by ranks.py, never by hand: ``mpirun -n RANKS python ranks_contenders.py mlpgpu …``, ``python -m
torch.distributed.run --nproc-per-node RANKS ranks_contenders.py ddp …``, ``python ranks_contenders.py jax …``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np

RATE, MOMENTUM = 0.01, 0.9
GRAPH_STEPS = 16  # of an epoch, which is what ranks.py asks for


def data_of(widths: list[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    return draw.standard_normal((rows, widths[0]), np.float32), draw.integers(0, widths[-1], rows)


def timed(epoch: Callable[[], object], steps: int, seconds: float) -> float:
    """Microseconds a step: the median over epochs that take so many seconds in all, behind two that count for none."""
    epoch()
    times = [clock(epoch)]
    for _ in range(max(3, int(seconds / times[0]))):
        times.append(clock(epoch))
    return 1e6 * statistics.median(times[1:]) / steps


def clock(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Task:
    """What a contender is to train: widths, rows of a batch and of an epoch, and where and how exactly."""

    widths: list[int]
    batch: int
    rows: int
    ranks: int
    seconds: float
    backend: str
    precision: Literal["float32", "tf32", "bfloat16"]

    @property
    def is_on_cards(self) -> bool:
        return self.backend == "cuda"


def by_mlpgpu(task: Task) -> float | None:
    """Ours: the batch in as many shards as ranks, which is what a script without ``streams=`` gets."""
    import mlpgpu as mg

    widths, batch, rows, seconds = task.widths, task.batch, task.rows, task.seconds

    layers = [
        mg.Dense(n_in, n_out, activation="relu" if place < len(widths) - 2 else "identity")
        for place, (n_in, n_out) in enumerate(pairwise(widths))
    ]
    network = mg.Network(layers, seed=1)
    optimizer = mg.Momentum(RATE, momentum=MOMENTUM)
    trainer = mg.Trainer(
        network, "softmax_cross_entropy", optimizer, batch_size=batch, precision=task.precision, backend=task.backend,
        threads=1, parallel="data",
    )  # fmt: skip
    data = mg.Dataset(*data_of(widths, rows))
    # One fit has all epochs; the history's seconds are each epoch's.
    trainer.fit(data, 2, progress=False)
    count = max(3, int(seconds / trainer.history["seconds"][-1]))
    trainer.fit(data, count, progress=False)
    found = 1e6 * statistics.median(trainer.history["seconds"][2:]) / (rows // batch)
    return found if mg.rank() == 0 else None


@dataclass
class Torch:
    """A rank of PyTorch's: its module, its share of the rows, and where it computes."""

    model: Any
    x: Any
    y: Any
    rank: int
    device: Any

    @classmethod
    def of(cls, task: Task) -> Torch:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
        torch.backends.cuda.matmul.allow_tf32 = task.precision == "tf32"
        rank, device = int(os.environ.get("RANK", "0")), torch.device("cpu")
        if task.is_on_cards:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if task.ranks > 1:
            torch.distributed.init_process_group("nccl" if task.is_on_cards else "gloo")
        layers: list[torch.nn.Module] = []
        for n_in, n_out in pairwise(task.widths):
            layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
        x, y = (
            torch.from_numpy(array[rank :: task.ranks].copy()).to(device) for array in data_of(task.widths, task.rows)
        )
        return cls(torch.nn.Sequential(*layers[:-1]).to(device), x, y, rank, device)

    def loss(self, model: Any, chosen: Any, precision: str) -> Any:
        import torch

        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(self.x[chosen])
        return torch.nn.functional.cross_entropy(logits.float(), self.y[chosen])

    def time(self, epoch: Callable[[], object], task: Task) -> float | None:
        """Microseconds a step, on rank 0; all ranks do as many epochs."""
        import torch

        def whole() -> None:
            epoch()
            if task.is_on_cards:
                torch.cuda.synchronize()

        for _ in range(2):
            whole()
        count = torch.tensor(max(3, int(task.seconds / clock(whole))), device=self.device)
        if task.ranks > 1:
            torch.distributed.broadcast(count, 0)
        times = [clock(whole) for _ in range(int(count))]
        return 1e6 * statistics.median(times) / (task.rows // task.batch) if self.rank == 0 else None


def by_ddp(task: Task) -> float | None:
    """PyTorch's DistributedDataParallel, eager, by gloo or by NCCL; each rank has its share of the rows."""
    import torch

    own = Torch.of(task)
    model = own.model
    if task.ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, foreach=True)
    share = task.batch // task.ranks

    def epoch() -> None:
        order = torch.randperm(len(own.x), device=own.device)
        for first in range(0, len(own.x), share):
            optimizer.zero_grad(set_to_none=True)
            own.loss(model, order[first : first + share], task.precision).backward()
            optimizer.step()

    return own.time(epoch, task)


def by_captured(task: Task) -> float | None:
    """PyTorch with all gradients in one array, one all-reduce, and an epoch's steps captured as one CUDA graph."""
    import torch

    assert task.is_on_cards and task.rows == task.batch * GRAPH_STEPS
    own, share = Torch.of(task), task.batch // task.ranks
    parameters = list(own.model.parameters())
    flat, begin = torch.zeros(sum(p.numel() for p in parameters), device=own.device), 0
    for p in parameters:
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    optimizer = torch.optim.SGD(parameters, RATE, momentum=MOMENTUM, foreach=True)
    forward = torch.compile(lambda chosen: own.loss(own.model, chosen, task.precision))
    order = torch.randperm(len(own.x), device=own.device)

    def steps() -> None:
        for first in range(0, share * GRAPH_STEPS, share):
            flat.zero_()
            forward(order[first : first + share]).backward()
            if task.ranks > 1:
                torch.distributed.all_reduce(flat)
                flat.div_(task.ranks)
            optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # type: ignore[no-untyped-call,unused-ignore]
        for _ in range(3):
            steps()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()

    def epoch() -> None:
        order.copy_(torch.randperm(len(own.x), device=own.device))
        graph.replay()

    return own.time(epoch, task)


def by_jax(task: Task) -> float:
    """JAX: a device for each rank, each batch sharded over them, an epoch in one jit with its shuffle."""
    widths, batch, rows, ranks = task.widths, task.batch, task.rows, task.ranks
    if not task.is_on_cards:
        flags = f"--xla_force_host_platform_device_count={ranks} --xla_cpu_multi_thread_eigen=false"
        os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    # On a card float32 by three products of tf32 takes half as long as by multiply-adds.
    float32 = "TF32_TF32_F32_X3" if task.is_on_cards else "highest"
    names = {"float32": float32, "tf32": "tensorfloat32", "bfloat16": "default"}
    jax.config.update("jax_default_matmul_precision", names[task.precision])
    multiplied = jnp.bfloat16 if task.precision == "bfloat16" else jnp.float32
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("rows",))
    whole, dealt = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))
    x, y = (jax.device_put(array, whole) for array in data_of(widths, rows))
    draw = np.random.default_rng(2)
    weights = [
        (draw.uniform(-1, 1, (n_in, n_out)).astype(np.float32) / n_in**0.5, np.zeros(n_out, np.float32))
        for n_in, n_out in pairwise(widths)
    ]
    state = jax.device_put((weights, jax.tree.map(np.zeros_like, weights)), whole)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        x = x.astype(multiplied)
        for w, b in weights[:-1]:
            x = jax.nn.relu(x @ w.astype(multiplied) + b.astype(multiplied))
        logits = (x @ weights[-1][0].astype(multiplied)).astype(jnp.float32) + weights[-1][1]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    def epoch(state: Any, key: Any, x: Any, y: Any) -> Any:  # data it found outside would be constants to compile
        order = jax.random.permutation(key, rows)[: rows // batch * batch].reshape(-1, batch)

        def step(state: Any, chosen: Any) -> Any:
            weights, moved = state
            rows_of = jax.lax.with_sharding_constraint
            value, gradient = jax.value_and_grad(loss)(weights, rows_of(x[chosen], dealt), rows_of(y[chosen], dealt))
            moved = jax.tree.map(lambda m, g: MOMENTUM * m + RATE * g, moved, gradient)
            return (jax.tree.map(lambda w, m: w - m, weights, moved), moved), value

        return jax.lax.scan(step, state, order)

    compiled = jax.jit(epoch, donate_argnums=0)
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 10_000))

    def run() -> None:
        nonlocal state
        state, values = compiled(state, next(keys), x, y)
        jax.block_until_ready((state, values))

    return timed(run, rows // batch, task.seconds)


CONTENDERS: dict[str, Callable[[Task], float | None]] = {
    "mlpgpu": by_mlpgpu,
    "captured": by_captured,
    "ddp": by_ddp,
    "jax": by_jax,
}

if __name__ == "__main__":
    name, shape, batch_size, row_count, rank_count, limit, where, precision = sys.argv[1:]
    widths = [int(width) for width in shape.split("-")]
    numbers = int(batch_size), int(row_count), int(rank_count), float(limit)
    microseconds = CONTENDERS[name](Task(widths, *numbers, where, cast(Any, precision)))
    if microseconds is not None:
        print(json.dumps(microseconds), flush=True)
