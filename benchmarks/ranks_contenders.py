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
from itertools import pairwise
from typing import Any

import numpy as np

RATE, MOMENTUM = 0.01, 0.9


def data_of(widths: list[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    return draw.standard_normal((rows, widths[0])).astype(np.float32), draw.integers(0, widths[-1], rows)


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


def by_mlpgpu(widths: list[int], batch: int, rows: int, ranks: int, seconds: float) -> float | None:
    """Ours: the batch in as many shards as ranks, which is what a script without ``streams=`` gets."""
    import mlpgpu as mg

    layers = [
        mg.Dense(n_in, n_out, activation="relu" if place < len(widths) - 2 else "identity")
        for place, (n_in, n_out) in enumerate(pairwise(widths))
    ]
    network = mg.Network(layers, seed=1)
    optimizer = mg.Momentum(RATE, momentum=MOMENTUM)
    trainer = mg.Trainer(network, "softmax_cross_entropy", optimizer, batch_size=batch, backend="cpu", threads=1)
    data = mg.Dataset(*data_of(widths, rows))
    # One fit has all epochs; the history's seconds are each epoch's.
    trainer.fit(data, 2, progress=False)
    count = max(3, int(seconds / trainer.history["seconds"][-1]))
    trainer.fit(data, count, progress=False)
    found = 1e6 * statistics.median(trainer.history["seconds"][2:]) / (rows // batch)
    return found if mg.rank() == 0 else None


def by_ddp(widths: list[int], batch: int, rows: int, ranks: int, seconds: float) -> float | None:
    """PyTorch's DistributedDataParallel by gloo, eager; each rank has its share of the rows."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
    model: torch.nn.Module = torch.nn.Sequential(*layers[:-1])
    rank = 0
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, foreach=True)
    x, y = (torch.from_numpy(array[rank::ranks].copy()) for array in data_of(widths, rows))
    loss_of, own = torch.nn.CrossEntropyLoss(), batch // ranks

    def epoch() -> None:
        order = torch.randperm(len(x))
        for first in range(0, len(x), own):
            chosen = order[first : first + own]
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(x[chosen]), y[chosen]).backward()
            optimizer.step()

    epoch()
    count = torch.tensor(max(3, int(seconds / clock(epoch))))
    if ranks > 1:  # all of them do as many
        torch.distributed.broadcast(count, 0)
    times = [clock(epoch) for _ in range(int(count))]
    return 1e6 * statistics.median(times) / (rows // batch) if rank == 0 else None


def by_jax(widths: list[int], batch: int, rows: int, ranks: int, seconds: float) -> float:
    """JAX: a device for each rank, each batch sharded over them, an epoch in one jit with its shuffle."""
    flags = f"--xla_force_host_platform_device_count={ranks} --xla_cpu_multi_thread_eigen=false"
    os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("rows",))
    whole, dealt = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))
    x, y = (jax.device_put(array, whole) for array in data_of(widths, rows))
    draw = np.random.default_rng(2)
    weights = [
        (draw.uniform(-1, 1, (n_in, n_out)).astype(np.float32) / n_in**0.5, np.zeros(n_out, np.float32))
        for n_in, n_out in pairwise(widths)
    ]
    state = jax.device_put((weights, jax.tree.map(np.zeros_like, weights)), whole)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w, b in weights[:-1]:
            x = jax.nn.relu(x @ w + b)
        logits = x @ weights[-1][0] + weights[-1][1]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    def epoch(state: Any, key: Any) -> Any:
        order = jax.random.permutation(key, rows)[: rows // batch * batch].reshape(-1, batch)

        def step(state: Any, chosen: Any) -> Any:
            weights, moved = state
            rows_of = jax.lax.with_sharding_constraint
            value, gradient = jax.value_and_grad(loss)(weights, rows_of(x[chosen], dealt), rows_of(y[chosen], dealt))
            moved = jax.tree.map(lambda m, g: MOMENTUM * m + RATE * g, moved, gradient)
            return (jax.tree.map(lambda w, m: w - m, weights, moved), moved), value

        return jax.lax.scan(step, state, order)

    compiled = jax.jit(epoch)
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 10_000))

    def run() -> None:
        nonlocal state
        state, values = compiled(state, next(keys))
        jax.block_until_ready((state, values))

    return timed(run, rows // batch, seconds)


CONTENDERS = {"mlpgpu": by_mlpgpu, "ddp": by_ddp, "jax": by_jax}

if __name__ == "__main__":
    name, shape, batch_size, row_count, rank_count, limit = sys.argv[1:]
    arguments = [int(width) for width in shape.split("-")], int(batch_size), int(row_count), int(rank_count)
    microseconds = CONTENDERS[name](*arguments, float(limit))
    if microseconds is not None:
        print(json.dumps(microseconds), flush=True)
