"""Prefix sums, sorting, counting."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from helpers import EPS, EPS32

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div
from mlpgpu.initializers import INITIALIZERS, initial_values
from mlpgpu.random import Purpose, words

from .case import SPECIAL, Case, Shifted, blank, expect, generator, magnitude, normal, wide


def prefix_sum(dtype: str, n: int, *, exclusive: bool, shift: bool = False, infinity: Sequence[float] = ()) -> Case:
    random = generator()
    x = (random.integers(-9, 99, n) if dtype == "int32" else random.normal(size=n)).astype(dtype)
    x[n // 2 : n // 2 + len(infinity)] = infinity
    with np.errstate(invalid="ignore"):
        sums = np.cumsum(wide(x).astype(np.longdouble))
    value = (sums - x if exclusive else sums).astype(np.float64)
    # Trees of a warp, a block and a group of tiles, four elements of a thread, and what joins them.
    eps = {"int32": 0.0, "float32": EPS32, "float64": EPS}[dtype]
    words = kernels.scan_words(dtype, n)
    bound = (2 * 9 + 5 + 4 + 8) * eps * np.cumsum(magnitude(wide(x)))
    return Case(
        f"{n}" + "-exclusive" * exclusive + "-shifted" * shift + "-infinite" * len(infinity),
        kernels.prefix_sum(dtype),
        kernels.scan_grid(dtype, n),
        {
            "x": Shifted(x) if shift else x, "y": np.full(n, -7, dtype), "n": n, "exclusive": int(exclusive),
            "tile_sums": np.zeros(words, np.uint64),
        },
        {"y": expect(value, bound), "tile_sums": expect(np.zeros(words), 0.0)},
    )  # fmt: skip


def _keys(dtype: str, n: int, shift: int) -> np.ndarray:
    """Random ones of few digits at ``shift``, so that many are equal there; all of one digit in the middle."""
    keys = generator().integers(np.iinfo(dtype).max, size=n, dtype=dtype, endpoint=True)
    keys &= ~np.array(0xE8 << shift, dtype)
    keys[n // 3 : n // 2] |= np.array(0xFF << shift, dtype)
    return keys


def sort_counts(dtype: str, n: int, shift: int) -> Case:
    keys, tile = _keys(dtype, n, shift), kernels.sort_tile(dtype)
    tiles = ceil_div(n, tile)
    digits = (keys >> np.array(shift, dtype)).astype(np.int64) & 0xFF
    value = np.zeros((kernels.SORT_DIGITS, tiles))
    np.add.at(value, (digits, np.arange(n) // tile), 1)
    return Case(
        f"{n}-shift{shift}", kernels.sort_counts(dtype), (tiles,),
        {"keys": keys, "n": n, "shift": shift, "counts": np.full(value.shape, -7, np.int32)},
        {"counts": expect(value, 0.0)},
    )  # fmt: skip


def sort_scatter(dtype: str, n: int, shift: int, *, of_places: bool = False) -> Case:
    """Values are any numbers; or ``of_places``, which nobody has to store."""
    keys, counts = _keys(dtype, n, shift), sort_counts(dtype, n, shift).outputs["counts"].value
    starts = (np.cumsum(counts) - counts.ravel()).astype(np.int32).reshape(counts.shape)
    order = np.argsort((keys >> np.array(shift, dtype)) & np.array(0xFF, dtype), kind="stable")
    values = (np.arange(n) if of_places else generator().integers(-(2**31), 2**31, n)).astype(np.int32)
    arrays = {"keys": keys, "values": None if of_places else values, "starts": starts}
    out = {"keys_out": np.zeros(n, dtype), "values_out": np.full(n, -7, np.int32)}
    return Case(
        f"{n}-shift{shift}" + "-places" * of_places, kernels.sort_scatter(dtype), (counts.shape[1],),
        {**arrays, **out, "n": n, "shift": shift},
        {"keys_out": expect(keys[order], 0.0), "values_out": expect(values[order], 0.0)},
    )  # fmt: skip


def histogram(n: int, bins: int, low: float, high: float) -> Case:
    edges = np.linspace(low, high, bins + 1)
    # Values on the edges themselves, beside them, outside, and none at all.
    x = np.concatenate([edges, np.nextafter(edges, -9), np.nextafter(edges, 9), [np.nan, np.inf, -np.inf]])
    x = np.concatenate([x, generator().normal(size=max(0, n - len(x)))])[:n].astype(np.float32)
    before = np.arange(bins, dtype=np.uint64)
    counted = np.histogram(x[np.isfinite(x)], edges)[0]
    return Case(
        f"{n}-bins{bins}-{low}to{high}", kernels.histogram(), (3,),
        {"x": x, "n": n, "edges": edges, "bins": bins, "counts": before},
        {"counts": expect(counted + before.astype(float), 0.0)},
    )  # fmt: skip


def extremes(x: np.ndarray, blocks: int) -> Case:
    """Blocks take 1,024 values in turn."""
    of_block = np.arange(x.size) // (4 * kernels.ROW_THREADS) % blocks
    seen = [x[(of_block == block) & np.isfinite(x)] for block in range(blocks)]
    partials = np.array([(part.min(initial=np.inf), part.max(initial=-np.inf)) for part in seen])
    return Case(
        f"{x.size}-{blocks}blocks", kernels.extremes(), (blocks,),
        {"x": x, "n": x.size, "partials": blank(blocks, 2)}, {"partials": expect(partials, 0.0)},
    )  # fmt: skip


def find_nonfinite(x: np.ndarray, *, shift: bool = False) -> Case:
    found = float(not np.isfinite(x).all())
    return Case(
        f"{x.size}-{found:.0f}" + "-shifted" * shift, kernels.find_nonfinite(), (2,),
        {"x": Shifted(x) if shift else x, "n": x.size, "found": np.zeros(1, np.uint32)},
        {"found": expect(np.array([found]), 0.0)},
    )  # fmt: skip


ADDRESS = {"seed": 2**64 - 3, "purpose": int(Purpose.EPOCH_ORDER)}


def random_words(n: int) -> Case:
    return Case(
        str(n), kernels.random_words(), (2,), {**ADDRESS, "step": 7, "n": n, "words": np.zeros(n, np.uint64)},
        {"words": expect(words(n, seed=ADDRESS["seed"], purpose=Purpose.EPOCH_ORDER, step=7), 0.0)},
    )  # fmt: skip


def initial_uniform(n: int, *, shift: bool = False) -> Case:
    """The very bits of the specification."""
    limit = INITIALIZERS["glorot_uniform"].limit((3, 7))
    value = initial_values("glorot_uniform", (n,), (3, 7), seed=5, layer=2).astype(np.float32)
    return Case(
        f"{n}" + "-shifted" * shift, kernels.initial_uniform(), (2,),
        {"seed": 5, "purpose": int(Purpose.INITIAL_VALUES), "layer": 2, "limit": limit, "n": n, "x": blank(n)},
        {"x": expect(value, 0.0)},
    )  # fmt: skip


def row_checksums(count: int, row_bytes: int, *, listed: bool = False) -> Case:
    x = generator().integers(0, 256, (2 * count, row_bytes)).astype(np.uint8)
    rows = generator().permutation(2 * count)[:count].astype(np.int32) if listed else None
    value = np.array([zlib.crc32(row) for row in (x[:count] if rows is None else x[rows])], np.float64)
    return Case(
        f"{count}x{row_bytes}" + "-listed" * listed,
        kernels.row_checksums(),
        (2,),
        {"x": x, "rows": rows, "count": count, "row_bytes": row_bytes, "checksums": np.full(count, 7, np.uint32)},
        {"checksums": expect(value, 0.0)},
    )


def take_rows(source: str, count: int, width: int) -> Case:
    """Of twice as many rows, some of them listed twice."""
    x = generator().integers(0, 256, (2 * count, width)).astype(source)
    rows = generator().integers(0, 2 * count, count).astype(np.int32)
    return Case(
        f"{count}x{width}",
        kernels.take_rows(source),
        (2,),
        {"x": x, "rows": rows, "count": count, "width": width, "y": np.full((count, width), 7, source)},
        {"y": expect(x[rows].astype(np.float64), 0.0)},
    )


def take_partition(row_bytes: int, *, batches: int = 3, of_batch: int = 5, begin: int = 0) -> Case:
    """Of the third of a data set that a partition has, from place ``begin`` on; what others have is left as it was."""
    batch_rows, first, count, of_partition = 2 * of_batch + 1, 4, batches * of_batch - 1, 2 * of_batch
    rows = generator().integers(0, 256, (count, row_bytes)).astype(np.uint8)
    partition = generator().integers(0, 256, (of_partition, row_bytes)).astype(np.uint8)
    places = generator().integers(0, 3 * of_partition, first + batches * batch_rows).astype(np.int32)
    row = np.arange(count)
    here = places[first + row // of_batch * batch_rows + row % of_batch] - begin
    is_here = (here >= 0) & (here < of_partition)
    value = np.where(is_here[:, np.newaxis], partition[np.where(is_here, here, 0)], rows).astype(np.float64)
    args = {
        "places": places, "first": first, "of_batch": of_batch, "batch_rows": batch_rows, "count": count,
        "begin": begin, "end": begin + of_partition, "partition": partition, "row_bytes": row_bytes, "rows": rows,
    }  # fmt: skip
    name = f"{count}x{row_bytes}-from{begin}"
    return Case(name, kernels.take_partition(row_bytes), (2,), args, {"rows": expect(value, 0.0)})


def send_messages(
    sizes: Sequence[int], *, apart: int = 16, to_itself: bool = False, blocks: int = kernels.MESSAGE_BLOCKS
) -> Case:
    """To one peer, which has said that it is ready and will have said that it is done; or from a card to itself.

    Memory is words, then what is sent, then where it goes.
    """
    words = kernels.MESSAGE_BLOCKS * kernels.MESSAGE_WORD_BYTES
    ready, done, told_ready, told_done = (place * words for place in range(4))
    if to_itself:
        told_ready, told_done = ready, done
    places = [4 * words + sum(sizes[:i]) + apart * i for i in range(len(sizes) + 1)]
    whole = places[-1] - places[0]
    memory = generator().integers(0, 256, places[0] + 2 * whole).astype(np.uint8)
    memory[: 4 * words] = 0
    of_words = memory[: 4 * words].view(np.uint32).reshape(4, kernels.MESSAGE_BLOCKS, -1)[..., 0]
    of_words[:2, :blocks] = not to_itself
    table = [1, 1, len(sizes), ready, told_done, done, told_ready]
    for place, size in zip(places, sizes, strict=False):
        table += [place, place + whole, size]
    value = memory.copy()
    value[: 4 * words] = 0
    if not to_itself:
        value[2 * words : 4 * words].view(np.uint32).reshape(2, kernels.MESSAGE_BLOCKS, -1)[:, :blocks, 0] = 1
    for place, size in zip(places, sizes, strict=False):
        value[place + whole : place + whole + size] = memory[place : place + size]
    args = {"table": np.array(table, np.int64), "aborted": np.zeros(1, np.uint32), "memory": memory}
    name = f"{'-'.join(map(str, sizes))}-apart{apart}{'-to-itself' if to_itself else ''}-{blocks}blocks"
    expected = {"memory": expect(value.astype(np.float64), 0.0)}
    return Case(name, kernels.send_messages(), (blocks,), args, expected)


def put_column(source: str, count: int, width: int, column: int) -> Case:
    x, y = generator().integers(0, 256, count).astype(source), np.full((count, width), 7, source)
    value = y.astype(np.float64)
    value[:, column] = x
    return Case(
        f"{count}x{width}-{column}",
        kernels.put_column(source),
        (2,),
        {"x": x, "count": count, "width": width, "column": column, "y": y},
        {"y": expect(value, 0.0)},
    )


def primitive_cases() -> Iterator[Case]:
    for source in kernels.SOURCES:
        for count, width in ((1, 1), (3, 33), (700, 4)):
            yield take_rows(source, count, width)
            yield put_column(source, count, width, width // 2)
    for row_bytes in (1, 3, 4, 12, 16, 33, 80, 784, 2064, 4095):
        yield take_partition(row_bytes, begin=10)
    yield take_partition(28, batches=200)
    yield take_partition(8, of_batch=1, batches=2, begin=2)
    yield take_partition(48, of_batch=64)
    for sizes, apart in (((46080,), 0), ((16, 4, 1, 300000), 16), ((64, 32), 4), ((7, 100, 16), 1)):
        yield send_messages(sizes, apart=apart)
    for blocks in (1, 5):
        yield send_messages((40_000, 20), blocks=blocks)
    yield send_messages((4096, 20), to_itself=True)
    for count, row_bytes in ((1, 1), (3, 33), (700, 4)):
        yield row_checksums(count, row_bytes)
        yield row_checksums(count, row_bytes, listed=True)
    for n in (1, 4, 1023, 5000):
        yield random_words(n)
        yield initial_uniform(n)
    for size in (1, 1024, 5001):
        for value in (0.0, np.inf, -np.inf, np.nan):
            yield find_nonfinite(np.append(normal(size), np.float32(value)))
    yield find_nonfinite(normal(3000), shift=True)
    for dtype, exclusive in product(kernels.SCANNED, (False, True)):
        for n in (1, 31, 33, 4095, 4096, 8192, 8193, 40000, 33 * 8192 + 5):
            yield prefix_sum(dtype, n, exclusive=exclusive)
    yield prefix_sum("float32", 9000, exclusive=False, shift=True)
    for infinity in ([np.inf], [np.inf, -np.inf]):
        yield prefix_sum("float64", 9000, exclusive=False, infinity=infinity)
    for dtype in kernels.KEYS:
        for n, shift in ((1, 0), (33, 8), (4096, 16), (9001, 24)):
            yield sort_counts(dtype, n, shift)
            yield sort_scatter(dtype, n, shift)
            yield sort_scatter(dtype, n, shift, of_places=True)
    yield sort_scatter("uint64", 5000, 56)
    for x, blocks in ((SPECIAL[0], 1), (SPECIAL[0, :3], 2), (normal(1), 1), (-abs(normal(3001)), 3)):
        yield extremes(x, blocks)
    for n, bins, low, high in (
        (1, 1, -1.0, 1.0),
        (3000, 10, -2.0, 2.0),
        (900, 257, 0.1, 0.7),
        (20000, 4096, -3.0, 3.0),
    ):
        yield histogram(n, bins, low, high)
