"""What runs once a step: reduce, the norm, and the optimizers' rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from helpers import EPS, EPS32

from mlpgpu.backends.constants import hyper_parameters
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.optimizers import OPTIMIZERS, Optimizer
from mlpgpu.plan import additions

from .case import ROUNDINGS, UNWRITTEN, Case, Output, blank, constants_of, expect, generator, normal, wide


def reduce(shards: int, uses: int, size: int) -> Case:
    """Sums in the order of the specification, each rounded once: the same bits."""
    gap = 3
    partials = np.full((shards, uses * size + gap), np.nan, np.float32)
    terms = normal(shards, uses, size)
    partials[:, : uses * size] = terms.reshape(shards, -1)
    sums = list(terms[:, 0])
    for use in range(1, uses):
        sums = [total + term for total, term in zip(sums, terms[:, use], strict=True)]
    for first, second in additions(range(shards), [range(shard, shard + 1) for shard in range(shards)]):
        sums[first] = sums[first] + sums[second]
    total = sums[0]
    sizes = {"pitch": partials.shape[1], "shards": shards, "uses": uses, "size": size}
    args = {"partials": partials, **sizes, "gradient": blank(size)}
    return Case(f"{shards}x{uses}x{size}", kernels.reduce(), (2,), args, {"gradient": expect(wide(total), 0.0)})


def squares(size: int, blocks: int) -> Case:
    gradient = normal(size) * np.float32(1e25)  # squares leave the range of float32
    sums, part = np.zeros(blocks), kernels.ceil_div(size, blocks)
    np.add.at(sums, np.arange(size) // part, wide(gradient) ** 2)
    args = {"gradient": gradient, "size": size, "part": part, "sums": blank(blocks, dtype=np.float64)}
    return Case(f"{size}-{blocks}blocks", kernels.squares(), (blocks,), args, {"sums": expect(sums, size * EPS * sums)})


def clip(count: int, weight: float, limit: float) -> Case:
    sums = generator().random(count)
    norm = math.sqrt(sums.sum()) / weight if weight else 0.0
    factor = np.array([limit / norm if norm > limit else 1.0])
    hyper = hyper_parameters(OPTIMIZERS["SGD"](0.1, clip_norm=limit))
    args = {"sums": sums, "count": count, "totals": np.array([3.0, weight]), "factor": blank(1)}
    # The limit is rounded to float32, the factor too.
    outputs = {"factor": expect(factor, 2 * EPS32 * factor)}
    return Case(f"{count}-weight{weight}-limit{limit}", kernels.clip(), (1,), args, outputs, {"hyper": hyper})


def _rule(
    optimizer: Optimizer, row: Sequence[float], w: np.ndarray, g: np.ndarray, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """w (P,) and slots (S, P) after a step, in float64."""
    w, slots = w.copy(), slots.copy()
    optimizer.update(w, g.copy(), list(slots), row, np.empty(w.shape))
    return w, slots


def after_step(
    optimizer: Optimizer, row: Sequence[float], w: np.ndarray, g: np.ndarray, g_error: np.ndarray, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parameters w (P,) and slots (S, P) after a step along g, which is off by up to ``g_error``; with bounds.

    What is computed in floating point is the exact step from numbers a few roundings away: so the bound is what
    the step changes by when each of them changes by that much.
    """
    relative = ROUNDINGS * EPS32
    wide_w, wide_slots = wide(w), wide(slots)
    g_error = g_error + 2 * EPS32 * (abs(g) + optimizer.l2 * abs(wide_w) + optimizer.l1) + relative * abs(g)
    new_w, new_slots = _rule(optimizer, row, wide_w, g, wide_slots)
    w_bound, slot_bound = relative * abs(new_w), relative * abs(new_slots)
    inputs = [(wide_w * (1 + relative), g, wide_slots)]
    inputs += [(wide_w, g + error, wide_slots) for error in (g_error, -g_error)]
    for slot in np.eye(len(slots)):
        inputs.append((wide_w, g, wide_slots * (1 + relative * slot[:, np.newaxis])))
    for moved in inputs:
        moved_w, moved_slots = _rule(optimizer, row, *moved)
        w_bound = w_bound + abs(moved_w - new_w)
        slot_bound = slot_bound + abs(moved_slots - new_slots)
    return new_w, w_bound, new_slots, slot_bound


def stepped(
    rule: str, gradients: Mapping[str, Output], size: int = 0
) -> tuple[dict[str, object], dict[str, Output], dict[str, np.ndarray]]:
    """Arguments, outputs and constants of a kernel that moves parameters along ``gradients``, by their names; ``size``
    elements lie from slot to slot, if not as few as there may be."""
    penalty = {"alpha": 0.7} if rule.endswith(kernels.WITH_ALPHA) else {}
    optimizer, weight = OPTIMIZERS[rule.removesuffix(kernels.WITH_ALPHA)](0.1, l1=0.02, l2=0.3, **penalty), 8.0
    size = size or sum(gradient.value.size for gradient in gradients.values()) + 3
    table = optimizer.table(5, np.array([0.1, 0.03, 0.05]))
    args: dict[str, object] = {"totals": np.array([3.0, weight]), "size": size}
    outputs = {}
    for place, (target, gradient) in enumerate(gradients.items()):
        shape = gradient.value.shape
        w = np.random.default_rng(place).normal(size=shape).astype(np.float32)
        slots = np.full((len(optimizer.slots), size), UNWRITTEN, np.float32)  # but for this parameter's elements
        slots[:, : w.size] = np.random.default_rng(place).uniform(0.01, 0.1, (len(slots), w.size))
        used = slots[:, : w.size]
        slope = (0.0 if target == "bias" else optimizer.alpha) * wide(w)
        g, g_error = gradient.value + slope, gradient.bound + 2 * EPS32 * (abs(gradient.value) + abs(slope))
        after = after_step(optimizer, table[2].tolist(), w.ravel(), g.ravel() / weight, g_error.ravel() / weight, used)
        new_slots, slot_bound, written = np.zeros(slots.shape), np.zeros(slots.shape), np.zeros(slots.shape, bool)
        new_slots[:, : w.size], slot_bound[:, : w.size], written[:, : w.size] = after[2], after[3], True
        args |= {target: w, f"{target}_slots": slots if len(slots) else None}
        outputs[target] = expect(after[0].reshape(shape), after[1].reshape(shape))
        if len(slots):
            outputs[f"{target}_slots"] = expect(new_slots, slot_bound, written)
    if "bias" not in gradients:
        args |= {"bias": None, "bias_slots": None}
    return args, outputs, constants_of(optimizer, table)


def update(name: str, run: int, *, shards: int = 1, size: int = 33, factor: bool = False, weight: float = 8.0,
           l1: float = 0.0, l2: float = 0.0, alpha: float = 0.0, frozen: int = 0) -> Case:  # fmt: skip
    """``run`` is the step's place in the run, and so the row of the table of rates; ``frozen`` ones come after them."""
    optimizer = OPTIMIZERS[name](0.1, l1=l1, l2=l2)
    table = optimizer.table(5, np.array([0.1, 0.03, 0.05]))
    random = generator()
    partials = random.normal(size=(shards, size + 3)).astype(np.float32)
    w = random.normal(size=size + frozen).astype(np.float32)
    w[::5] = 0.0
    slots = random.uniform(0.01, 0.1, (len(optimizer.slots), size + frozen)).astype(np.float32)
    written = np.arange(size + frozen) < size
    scale = (1.0 / weight if weight else 0.0) * (0.37 if factor else 1.0)

    terms = np.zeros((shards, size + frozen))
    terms[:, :size] = partials[:, :size]
    share = alpha / weight if weight else 0.0
    g_error = (shards + 2) * EPS32 * abs(terms).sum(axis=0) * scale + 6 * EPS32 * share * abs(w)
    new_w, w_bound, new_slots, slot_bound = after_step(
        optimizer, table[run].tolist(), w, terms.sum(axis=0) * scale + share * wide(w), g_error, slots
    )
    step = np.array([(5 + run, run, 0, 1, 1)], STEP)
    args = {
        "step": step, "totals": np.array([3.0, weight]), "factor": np.array([0.37], np.float32) if factor else None,
        "partials": partials, "pitch": partials.shape[1], "shards": shards, "parameters": w,
        "slots": slots if slots.size else None, "size": size, "slot_pitch": size + frozen, "alpha": alpha,
    }  # fmt: skip
    outputs = {"parameters": expect(new_w, w_bound, written)}
    if slots.size:
        outputs["slots"] = expect(new_slots, slot_bound, np.broadcast_to(written, slots.shape))
    constants = constants_of(optimizer, table)
    case = f"run{run}-{shards}x{size}-weight{weight}-l1={l1}-l2={l2}" + f"-alpha={alpha}" * bool(alpha)
    case += "-clipped" * factor + "-frozen" * bool(frozen)
    return Case(case, kernels.update(name), (2,), args, outputs, constants)


def bias_partials() -> tuple[dict[str, object], np.ndarray, np.ndarray, np.ndarray]:
    """Arguments that tell partial sums of biases' gradients of three lengths, with numbers of parts that differ, and
    where they lie; their sums, with bounds, where they lie, and which elements these are, among others."""
    gap, random = 7, generator()
    described, values, offset, begin = [], [], gap, 0
    for parts, pitch, n in ((1, 64, 5), (19, 320, 300), (4, 64, 64)):
        described += [begin, parts, pitch, n, offset, 0]
        values.append(random.normal(size=(parts, pitch)).astype(np.float32))
        begin, offset = begin + parts * pitch, offset + n + gap
    sums, reach, written = np.zeros(offset), np.zeros(offset), np.zeros(offset, bool)
    for part, (_, parts, _, n, first, _) in zip(values, zip(*[iter(described)] * 6, strict=True), strict=True):
        place = slice(first, first + n)
        sums[place], written[place] = wide(part[:, :n]).sum(axis=0), True
        reach[place] = (parts + 2) * EPS32 * abs(part[:, :n]).sum(axis=0)
    args = {
        "described": np.array(described, np.int32), "count": 3,
        "column_partials": np.concatenate([part.ravel() for part in values]), "columns": int(written.sum()),
    }  # fmt: skip
    return args, sums, reach, written


def sum_biases() -> Case:
    args, sums, reach, written = bias_partials()
    gradients = {"gradients": np.full(sums.size, np.float32(7.0))}
    outputs = {"gradients": expect(sums, reach, written)}
    return Case("three", kernels.sum_biases(), (2,), {**args, **gradients}, outputs)


def update_biases(name: str) -> Case:
    """Other parameters stay."""
    run, weight = 1, 8.0
    optimizer = OPTIMIZERS[name](0.1, l1=0.02, l2=0.3)
    table, random = optimizer.table(5, np.array([0.1, 0.03, 0.05])), generator()
    of_biases, sums, reach, written = bias_partials()
    w = random.normal(size=sums.size).astype(np.float32)
    slots = random.uniform(0.01, 0.1, (len(optimizer.slots), sums.size)).astype(np.float32)
    new_w, w_bound, new_slots, slot_bound = after_step(
        optimizer, table[run].tolist(), w, sums / weight, reach / weight, slots
    )
    args = {
        **of_biases, "step": np.array([(5 + run, run, 0, 1, 1)], STEP), "totals": np.array([3.0, weight]), "biases": w,
        "biases_slots": slots if slots.size else None, "size": sums.size,
    }  # fmt: skip
    outputs = {"biases": expect(new_w, w_bound, written)}
    if slots.size:
        outputs["biases_slots"] = expect(new_slots, slot_bound, np.broadcast_to(written, slots.shape))
    return Case("three", kernels.update_biases(name), (2,), args, outputs, constants_of(optimizer, table))


def step_cases() -> Iterator[Case]:
    for shards, uses, size in ((1, 1, 1), (1, 2, 33), (3, 1, 31), (3, 2, 1027), (7, 1, 33), (13, 2, 31), (1024, 1, 2)):
        yield reduce(shards, uses, size)
    for size, blocks in ((1, 1), (33, 3), (1027, 2)):
        yield squares(size, blocks)
    for count, weight, limit in ((1, 2.0, 0.1), (256, 2.0, 0.5), (256, 2.0, 1e3), (33, 0.0, 0.5)):
        yield clip(count, weight, limit)
    for name in OPTIMIZERS:
        for run in range(3):
            yield update(name, run)
        yield update(name, 1, shards=3, size=1027, factor=True, l1=0.02, l2=0.3)
        yield update(name, 1, shards=6, size=33)
        yield update(name, 1, l1=0.02)
        yield update(name, 1, l2=0.3)
        yield update(name, 1, weight=0.0)
        yield update(name, 1, l2=0.3, frozen=5)
        yield update(name, 1, alpha=0.7)
        yield update(name, 1, shards=2, factor=True, l2=0.3, alpha=0.7)
        yield update_biases(name)
    yield sum_biases()
