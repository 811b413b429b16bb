"""Metrics added up by batches, and those of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
from helpers import EPS

from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div
from mlpgpu.losses import OutputName, TargetKind, class_count, classes_of
from mlpgpu.metrics import SUMS, true_class_ranks

from .case import SPECIAL, UNWRITTEN, Batch, Case, blank, expect, generator, whole, wide


def classes(
    kind: TargetKind,
    batch: Batch,
    n: int,
    *,
    function: OutputName = "softmax",
    special: float | None = None,
    textured: bool = True,
) -> Case:
    """Outputs and dense targets hold few values, so that several are the largest; ``special`` is what one output is."""
    output = np.random.default_rng(8).integers(-2, 3, (batch.capacity, n)).astype(np.float32) / 4 + 0.25
    if special is not None:
        output[0, n // 2] = special
    shape = (2 * batch.epoch_rows,) if kind == "index" else (2 * batch.epoch_rows, n)
    targets = (generator().integers(n if kind == "index" else 3, size=shape)).astype(np.float32)
    of_rows = targets[batch.fetched]
    predicted, actual = np.zeros((2, batch.capacity), np.int32)
    predicted[batch.part] = classes_of(function, output[batch.part])
    actual[batch.part] = of_rows if kind == "index" else classes_of(function, of_rows)
    unwritten = {name: np.full(batch.capacity, -7, np.int32) for name in ("predicted", "actual")}
    return Case(
        f"{batch}-{n}-{function}" + f"-{special}" * (special is not None),
        kernels.classes(kind, textured=textured),
        (ceil_div(batch.capacity, kernels.WARPS_PER_BLOCK),),
        {
            "step": batch.args["step"], "order": batch.order, "output": batch.rows_of(output), "targets": targets,
            **unwritten, "n": n, "classes": class_count(function, n),
        },
        {
            "predicted": expect(predicted, 0.0, batch.written(batch.capacity)),
            "actual": expect(actual, 0.0, batch.written(batch.capacity)),
        },
    )  # fmt: skip


def metric_bound(name: str, sums: np.ndarray, target: np.ndarray, *, weighted: bool, merges: int) -> np.ndarray:
    """How far two float64 sums may lie apart that compared ``target``, (rows,) classes or (rows, n) numbers.

    Terms have the same bits, or two roundings more; both sides err by one rounding for each addition.
    """
    if SUMS[name].of in ("classes", "ranks") and not weighted:
        return np.zeros(sums.shape)  # counts
    bound = 2 * EPS * (target.size + 8) * abs(sums)
    if name == "r2":
        # A mean errs by δ.  Around it squares sum up to W δ² more; a shift of at most the range R errs by 2 δ, and
        # its square, which counts for less than W rows, by 4 R δ + 4 δ².
        total, _, _, spread = sums
        delta, reach = EPS * (len(target) + 8) * abs(target).max(axis=0), np.ptp(target, axis=0)
        bound[2] = 2 * delta
        bound[3] = 2 * EPS * (len(target) + 8 + 3 * merges) * spread
        bound[3] += 2 * total * (delta**2 + merges * (4 * reach * delta + 4 * delta**2))
    if SUMS[name].of == "probabilities":  # logarithms of two libraries
        bound *= 2
    return bound


def true_ranks(batch: Batch, n: int, *, special: float | None = None) -> Case:
    """Outputs hold few values, so that several are equal; ``special`` is what two outputs of the first row are."""
    output = np.random.default_rng(8).integers(0, 5, (batch.capacity, n)).astype(np.float32) / 4
    if special is not None:
        output[0, n // 2 :] = special
    actual = generator().integers(max(n, 2), size=batch.capacity).astype(np.int32)
    ranks = np.zeros(batch.capacity, np.int32)
    ranks[batch.part] = true_class_ranks(output[batch.part], actual[batch.part])
    return Case(
        f"{batch}-{n}" + f"-{special}" * (special is not None), kernels.true_class_ranks(),
        (ceil_div(batch.capacity, kernels.WARPS_PER_BLOCK),),
        {
            "step": batch.args["step"], "output": batch.rows_of(output), "actual": actual,
            "ranks": np.full(batch.capacity, -7, np.int32), "n": n,
        },
        {"ranks": expect(ranks, 0.0, batch.written(batch.capacity))},
    )  # fmt: skip


def metric(
    name: str,
    batch: Batch,
    n: int,
    *,
    weighted: bool = True,
    counted: bool = True,
    offset: float = 0.0,
    textured: bool = True,
    kind: TargetKind = "dense",
) -> Case:
    """The sums hold the batches before this one, whose weights are 0 unless ``counted``; ``offset`` moves numbers."""
    row = SUMS[name]
    random, of_classes = np.random.default_rng(9), row.of in ("classes", "ranks")
    of_index = row.of == "probabilities" and kind == "index"
    count = 2 * batch.epoch_rows
    weights = random.uniform(0.0, 2.0, count).astype(np.float32) if weighted else None
    if weights is not None and not counted:
        weights[batch.fetched] = 0.0
    targets = random.integers(n, size=count) if of_classes else random.normal(size=(count, n)) + offset
    outputs = np.where(random.random(targets.shape) < 0.5, targets, random.permuted(targets))
    if row.of == "probabilities" or name in ("binary_log_loss", "label_counts", "exact_matches"):
        targets, outputs = np.clip(0.5 + targets, 0.0, 1.0), np.clip(0.5 + outputs, 0.0, 1.0)
    if of_index:
        targets = random.integers(n, size=count)
    dtype = np.int32 if of_classes else np.float32
    targets, outputs = targets.astype(np.int32 if of_index else dtype), outputs.astype(dtype)
    before = after = np.zeros(row.shape(n))
    for place in range(batch.place + 1):
        before = after.copy()
        rows = Batch(batch.capacity, batch.epoch_rows, place).fetched
        row.accumulate(outputs[rows], targets[rows], None if weights is None else wide(weights[rows]), after)

    output = np.full((batch.capacity, *outputs.shape[1:]), -1, dtype)
    output[batch.part] = outputs[batch.fetched]
    of_batch = np.full(batch.capacity, -1, dtype)
    if of_classes:  # those of the batch, in its order; numbers are looked up in the data set
        of_batch[batch.part] = targets[batch.fetched]
    seen = wide(targets[batch.order[: batch.place * batch.capacity + len(batch.fetched)]])
    bound = metric_bound(name, after, seen, weighted=weighted, merges=batch.place + 1)
    variant = "-weighted" * weighted + "-uncounted" * (not counted) + f"-at{offset:g}" * (offset != 0.0)
    args = {
        "step": batch.args["step"], "order": batch.order, "weights": weights, "output": output,
        "targets": of_batch if of_classes else targets.astype(dtype), "sums": before, "n": n,
    }  # fmt: skip
    grid = (math.prod(before.shape[1:]),)
    entry = kernels.metric(name, kind, textured=textured)
    return Case(f"{batch}-{n}{variant}", entry, grid, args, {"sums": expect(after, bound)})


def metric_cases() -> Iterator[Case]:
    last = Batch(31, 64, 2)
    for kind, textured in product(("index", "dense"), (True, False)):
        for batch, n in ((whole(1), 1), (whole(31), 10), (last, 10), (whole(9), 32), (whole(9), 257)):
            yield classes(kind, batch, n, textured=textured)
    yield classes("dense", whole(31), 1, function="sigmoid")
    for special in (np.nan, np.inf, -np.inf):
        yield classes("index", whole(1), 5, special=special)
        yield classes("index", whole(1), 1, special=special)
    for batch, n in ((whole(31), 10), (whole(1), 1), (last, 1), (last, 3), (whole(9), 257)):
        yield true_ranks(batch, n)
    for special in (np.nan, np.inf, -np.inf):
        yield true_ranks(whole(31), 5, special=special)
    for batch, n in ((whole(31), 10), (whole(1), 2), (last, 3)):
        for textured in (True, False):
            yield metric("log_loss", batch, n, kind="index", textured=textured)
    for name in (name for name, row in SUMS.items() if row.of != "rankings"):
        for batch, n in ((whole(1), 1), (whole(31), 10), (last, 1), (last, 10), (whole(40), 257)):
            yield metric(name, batch, n)
        for batch in (whole(31), last):
            yield metric(name, batch, 3, weighted=False)
            yield metric(name, batch, 3, counted=False)
            yield metric(name, batch, 3, textured=False)
        yield metric(name, whole(1500), 1)
    for batch in (whole(31), Batch(31, 93, 1), last):
        yield metric("r2", batch, 3, offset=1e6)


def rank_keys(batch: Batch, n: int, curves: int, *, weighted: bool = True, of_labels: bool = False) -> Case:
    """Several scores are equal, and one of each special kind is among them."""
    rows, part = batch.epoch_rows, slice(batch.place * batch.capacity, None)
    random = generator()
    scores = np.resize(np.concatenate([SPECIAL[0], random.integers(-3, 3, 40) / 4]), (batch.capacity, n))
    scores = scores.astype(np.float32)
    actual = None if of_labels else random.integers(3, size=batch.capacity).astype(np.int32)
    weights = random.random(2 * rows).astype(np.float32) if weighted else None
    # How many numbers are higher than a score, which are as many as lie between their bits.
    ranked = scores[batch.part, n - curves :].T
    bits = abs(ranked).view(np.int32).astype(np.int64)
    key = np.where(np.isnan(ranked), 2**32 - 1, np.where(ranked < 0.0, 2**31 + bits, 2**31 - 1 - bits))
    places = slice(part.start, part.start + len(batch.fetched))
    written = np.zeros(rows, bool)
    written[places] = True
    keys, of_class, of_weight = np.zeros((curves, rows)), np.zeros(rows), np.zeros(rows)
    keys[:, places] = key
    if actual is not None:
        of_class[places] = actual[batch.part]
    of_weight[places] = 1.0 if weights is None else weights[batch.fetched]
    return Case(
        f"{batch}-{n}-{curves}curves" + "-weighted" * weighted + "-labels" * of_labels,
        kernels.rank_keys(),
        (3,),
        {
            "step": batch.args["step"], "order": batch.order, "weights": weights, "output": batch.rows_of(scores),
            "actual": actual, "keys": np.full(keys.shape, 7, np.uint32), "of_class": np.full(rows, -7, np.int32),
            "of_weight": blank(rows), "n": n, "curves": curves,
        },
        {
            "keys": expect(keys, 0.0, np.broadcast_to(written, keys.shape)),
            "of_class": expect(of_class, 0.0, written & (not of_labels)),
            "of_weight": expect(of_weight, 0.0, written),
        },
    )  # fmt: skip


def rank_labels(batch: Batch, n: int, *, textured: bool = True) -> Case:
    """Several targets are ½, which is no label yet."""
    rows = batch.epoch_rows
    targets = generator().integers(0, 3, (2 * rows, n)).astype(np.float32) / 2
    places = slice(batch.place * batch.capacity, batch.place * batch.capacity + len(batch.fetched))
    written, of_class = np.zeros((n, rows), bool), np.zeros((n, rows))
    written[:, places], of_class[:, places] = True, (targets[batch.fetched] > 0.5).T
    return Case(
        f"{batch}-{n}", kernels.rank_labels(textured=textured), (3,),
        {
            "step": batch.args["step"], "order": batch.order, "targets": targets,
            "of_class": np.full((n, rows), -7, np.int32), "n": n,
        },
        {"of_class": expect(of_class, 0.0, written)},
    )  # fmt: skip


def rank_weights(n: int, positive: int) -> Case:
    random = generator()
    rows, of_class = random.permutation(n).astype(np.int32), random.integers(3, size=n).astype(np.int32)
    of_weight = random.random(n).astype(np.float32)
    weight, is_positive = wide(of_weight[rows]), of_class[rows] == positive
    return Case(
        f"{n}-class{positive}", kernels.rank_weights(), (2,),
        {
            "rows": rows, "of_class": of_class, "of_weight": of_weight, "n": n, "positive": positive,
            "positives": blank(n, dtype=np.float64), "negatives": blank(n, dtype=np.float64),
        },
        {
            "positives": expect(np.where(is_positive, weight, 0.0), 0.0),
            "negatives": expect(np.where(is_positive, 0.0, weight), 0.0),
        },
    )  # fmt: skip


def rank_area(name: str, n: int, values: int, *, curve: int = 0, curves: int = 1, is_nan: bool = False) -> Case:
    """A curve of so many rows and different scores; rows of the first score weigh nothing."""
    random = generator()
    keys = np.sort(random.integers(values, size=n)).astype(np.uint32)
    weight = np.where(keys == 0, 0.0, random.uniform(0.0, 2.0, n))
    is_positive = random.random(n) < 0.3
    row, sums = SUMS[name], np.full((3, curves), UNWRITTEN)
    of_curve = np.zeros((3, 1))
    row.accumulate(-wide(keys)[:, np.newaxis], is_positive[:, np.newaxis], weight, of_curve)
    written = np.zeros(sums.shape, bool)
    written[:, curve] = True
    value = np.where(written, of_curve, 0.0)
    # Sums up to a place err by a rounding for each addition, and so does the sum of areas, whose terms rise.
    bound = 4 * EPS * (n + 8) * abs(value)
    if is_nan:
        keys[-1], value[0, curve] = 0xFFFFFFFF, np.nan
    return Case(
        f"{n}-{values}values-curve{curve}of{curves}" + "-nan" * is_nan,
        kernels.rank_area(name),
        (min(256, ceil_div(n, kernels.ROW_THREADS)),),
        {
            "keys": keys, "positives": np.cumsum(np.where(is_positive, weight, 0.0)),
            "negatives": np.cumsum(np.where(is_positive, 0.0, weight)), "n": n, "partials": np.full(256, np.nan),
            "arrived": np.zeros(1, np.uint32), "sums": sums, "curve": curve, "curves": curves,
        },
        {"sums": expect(value, bound, written)},
    )  # fmt: skip


def rank_cases() -> Iterator[Case]:
    last = Batch(31, 64, 2)
    for batch, n, curves in ((whole(1), 1, 1), (whole(31), 2, 1), (last, 5, 5), (whole(300), 10, 10)):
        yield rank_keys(batch, n, curves)
        yield rank_keys(batch, n, curves, weighted=False)
        yield rank_labels(batch, n)
        yield rank_labels(batch, n, textured=False)
    yield rank_keys(last, 5, 5, of_labels=True)
    for n, positive in ((1, 0), (33, 1), (2000, 2)):
        yield rank_weights(n, positive)
    for name, row in SUMS.items():
        if row.of == "rankings":
            for n, values in ((1, 2), (33, 5), (300, 1), (1000, 100), (70000, 10**6)):
                yield rank_area(name, n, values)
            yield rank_area(name, 500, 20, curve=2, curves=4)
            yield rank_area(name, 500, 20, is_nan=True)
