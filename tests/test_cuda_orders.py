"""Sorts as a program chains them, here on the host: an epoch's order is that of the specification."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from shim_runner import plant, run
from test_metric_kernels import HostArrays

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.launches import At, Launch, Value
from mlpgpu.backends.cuda.orders import KEYS, SORTED, order_launches
from mlpgpu.backends.cuda.sorting import Chain
from mlpgpu.random import Purpose, epoch_order, words


def arrays_of(sizes: dict[str, int], wide: tuple[str, ...]) -> dict[str, np.ndarray]:
    types = {name: np.uint64 for name in (*wide, "nodes")}
    return {
        name: np.full(
            size // np.dtype(types.get(name, np.int32)).itemsize,
            0 if name == "nodes" else 77,
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


@pytest.mark.parametrize("dtype", kernels.SCANNED)
def test_blocks_of_a_prefix_sum_wait_for_each_other(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side, as a cooperative launch runs here; and on a tree of four children a node, which 70 tiles fill."""
    levels, wait = 5, dataclasses.replace(kernels.prefix_sum(dtype), cooperative=True)
    plant("scan.cuh", "LEVELS = 3, LEVEL_BITS = 10;", f"LEVELS = {levels}, LEVEL_BITS = 2;", tmp_path, monkeypatch)
    itemsize = np.dtype(dtype).itemsize
    n = 70 * kernels.SCAN_TILE_BYTES // itemsize - 5
    tiles = kernels.scan_tiles(dtype, n)
    x = np.random.default_rng(3).integers(-9, 10, n).astype(dtype)  # whose sums are exact
    args = {
        "x": x, "y": np.full(n, 7, dtype), "n": n, "exclusive": 0, "ticket": np.zeros(1, np.uint32),
        "nodes": np.zeros(levels * tiles, np.uint64),
    }  # fmt: skip
    shared = itemsize * (1 + levels) * kernels.WARPS_PER_BLOCK
    np.testing.assert_array_equal(
        run(wait, tiles, wait.threads, args, shared_bytes=shared)["y"], np.cumsum(x, dtype=dtype)
    )


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
