"""Sorts as a program chains them, here on the host: an epoch's order is that of the specification."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import dataset
from host_card import HostCard, take_over
from shim_runner import plant, run
from test_metric_kernels import HostArrays

from mlpgpu import Dense, Momentum, Network
from mlpgpu.backends import Sampling
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Value
from mlpgpu.backends.cuda.run.data.orders import KEYS, SORTED, order_launches
from mlpgpu.backends.cuda.run.primitives import Chain
from mlpgpu.backends.cuda.run.program import CudaProgram
from mlpgpu.backends.cuda.select import thresholds
from mlpgpu.random import Purpose, epoch_order, words


def arrays_of(sizes: dict[str, int], wide: tuple[str, ...]) -> dict[str, np.ndarray]:
    types = {name: np.uint64 for name in (*wide, "tile sums")}
    return {
        name: np.full(
            size // np.dtype(types.get(name, np.int32)).itemsize,
            0 if name == "tile sums" else 77,
            types.get(name, np.int32),
        )
        for name, size in sizes.items()
    }


def with_numbers(launch: Launch, numbers: dict[str, int]) -> Launch:
    """A launch with what a program binds by name besides arrays."""
    values: dict[str, Value] = {
        name: numbers.get(value.array, value) if isinstance(value, At) else value
        for name, value in launch.values.items()
    }
    return dataclasses.replace(launch, values=values)


@pytest.mark.parametrize("rows", [1, 2, 2048, 5001])
def test_an_epoch_s_order_is_the_specification_s(rows: int) -> None:
    sizes, launches = order_launches(rows)
    arrays = arrays_of(sizes, (KEYS, "sorted keys"))
    arrays["places"][:] = places = np.random.default_rng(1).permutation(rows)
    host = HostArrays(arrays)
    for number, launch in enumerate(launches):
        host.launch(with_numbers(launch, {"seed": 2**64 - 2, "epoch": 3}))
        if number == 0:
            np.testing.assert_array_equal(
                arrays[KEYS], words(rows, seed=2**64 - 2, purpose=Purpose.EPOCH_ORDER, step=3)
            )
    np.testing.assert_array_equal(arrays[SORTED], places[epoch_order(rows, seed=2**64 - 2, epoch=3)])


@pytest.mark.parametrize("changed", ["SORT_LEAST_ROWS", "SORT_COMPILED_SECONDS"])
def test_a_training_by_orders_of_the_card_ends_as_one_by_the_host_s(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the card makes them at once, and where it takes over after the host's first one."""
    take_over(monkeypatch)
    rows, batch, epochs = 21, 8, 4
    network = Network([Dense(6, 9, "relu"), Dense(9, 3)], seed=3)
    plan = network.lower(capacity=batch, loss="softmax_cross_entropy", optimizer=Momentum(0.1))
    data = dataset("softmax_cross_entropy", "index", rows=rows, n_in=6, n_out=3)

    def train() -> tuple[np.ndarray, bool]:
        card: Any = HostCard()
        program = CudaProgram(plan, card, 0.5, launches_because="a test asks for it")
        program.draw(3, np.zeros((1, plan.statistic_count)))
        program.attach(data, Sampling(rows, batch, seed=11))
        for epoch in range(epochs):
            program.run(3 * epoch, np.full(3, 0.05))
        sorts = kernels.sort_scatter("uint64") in program.workspace.auxiliary
        parameters = program.read().parameters.copy()
        program.close()
        return parameters, sorts

    expected, sorts = train()
    assert not sorts
    monkeypatch.setattr(thresholds, changed, 0)
    got, sorts = train()
    assert sorts
    np.testing.assert_array_equal(got, expected)


def small_tiles(dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[kernels.Entry, int]:
    """A prefix sum in tiles of 64 threads, two warps, whose blocks run side by side; and its elements of a tile."""
    plant("primitives/scan.cuh", "THREADS = 512, WARPS", "THREADS = 64, WARPS", folder, monkeypatch)
    entry = kernels.prefix_sum(dtype)
    scale = entry.threads // 64
    tile = kernels.SCAN_TILE_BYTES // scale // np.dtype(dtype).itemsize
    return dataclasses.replace(entry, threads=64, shared_bytes=entry.shared_bytes // scale + 4, cooperative=True), tile


@pytest.mark.parametrize("dtype", kernels.SCANNED)
@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_blocks_of_a_prefix_sum_wait_for_each_other(
    dtype: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side, as a cooperative launch runs here."""
    entry, tile = small_tiles(dtype, tmp_path, monkeypatch)
    tiles = 150
    n = tiles * tile - 5
    x = np.random.default_rng(3).integers(-9, 10, n).astype(dtype)  # whose sums are exact
    args = {
        "x": x, "y": np.full(n, 7, dtype), "n": n, "exclusive": 0, "tile_sums": np.zeros(1 + tiles, np.uint64),
    }  # fmt: skip
    np.testing.assert_array_equal(run(entry, blocks, entry.threads, args)["y"], np.cumsum(x, dtype=dtype))


def test_a_block_that_comes_late_adds_up_what_others_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups of tiles than it has warps, in one step."""
    entry, tile = small_tiles("int32", tmp_path, monkeypatch)
    tiles, done = 200, 187
    x = np.random.default_rng(4).integers(-9, 10, tiles * tile).astype(np.int32)
    of_tile = x.reshape(tiles, tile).sum(axis=1, dtype=np.int32).view(np.uint32)
    words = np.zeros(1 + tiles, np.uint64)
    words[0], words[1 : 1 + done] = done, of_tile[:done] | np.uint64(1 << 32)
    args = {"x": x, "y": np.full(x.size, 7, np.int32), "n": x.size, "exclusive": 0, "tile_sums": words}
    out = run(entry, 2, entry.threads, args)
    y = out["y"].reshape(tiles, tile)
    np.testing.assert_array_equal(y[done:], np.cumsum(x, dtype=np.int32).reshape(tiles, tile)[done:])
    assert (y[:done] == 7).all()
    assert not out["tile_sums"].any()


@pytest.mark.parametrize(("dtype", "rows"), [("uint32", 9000), ("uint64", 5000)])
def test_equal_keys_keep_their_places(dtype: str, rows: int) -> None:
    keys = np.random.default_rng(2).integers(5, size=rows).astype(dtype) << np.array(
        8 * np.dtype(dtype).itemsize - 3, dtype
    )
    chain = Chain()
    launches = list(
        chain.sort(dtype, rows, At("keys"), None, sorted_values=At("places"), spare=(At("spare keys"), At("spare")))
    )
    arrays = arrays_of(chain.bytes | {"places": 4 * rows, "spare": 4 * rows}, ())
    arrays |= {"keys": keys.copy(), "spare keys": np.full_like(keys, 7)}
    host = HostArrays(arrays)
    for launch in launches:
        host.launch(launch)
    order = np.argsort(keys, kind="stable")
    np.testing.assert_array_equal(arrays["places"], order)
    np.testing.assert_array_equal(arrays["keys"], keys[order])
