"""Losses, outputs and the head."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from helpers import EPS, EPS32, LOSS_KINDS, LOSS_OF

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.constants import loss_numbers
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import Entry, HeadForm, Team, ceil_div, filled_rows, padded_columns, padded_rows
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.losses import OUTPUTS, OutputName, TargetKind, apply_output

from .case import (
    BFLOAT_ERRORS,
    ROUNDINGS,
    STEP_NUMBER,
    Batch,
    Case,
    Output,
    batches,
    blank,
    chained,
    expect,
    generator,
    magnitude,
    normal,
    saved_of,
    together,
    whole,
    wide,
)
from .dropouts import differentiated, kept_arguments


def _targets(loss: str, kind: TargetKind, rows: int, n: int) -> np.ndarray:
    """Targets of a data set, as a texture holds them."""
    random, function = generator(), LOSS_OF[loss].output
    if kind == "index":
        return random.integers(n, size=rows).astype(np.float32)
    if function == "exp":
        return random.poisson(2.0, (rows, n)).astype(np.float32)
    if function == "softmax":
        return random.dirichlet(np.ones(n), size=rows).astype(np.float32)
    return (random.random((rows, n)) if function == "sigmoid" else random.normal(size=(rows, n))).astype(np.float32)


def loss(
    name: str,
    kind: TargetKind,
    batch: Batch,
    n: int,
    *,
    weighted: bool = True,
    delta: bool = True,
    scaled: bool = False,
    special: float | None = None,
    textured: bool = True,
    total: bool = False,
    width: int | None = None,
    bias: bool = True,
    activation: str | None = None,
    of_x: bool = False,
    team: Team = kernels.WARP_TEAM,
    components: int = 0,
    form: HeadForm = kernels.WHOLE_HEAD,
    parts: int = 1,
    rate: float = 0.0,
) -> Case:
    """``scaled`` is with standardized targets; ``special`` is what one logit is; ``total`` with the batch's sum.

    With a ``width`` it is the head: x of so many columns and the last layer give the logits.  With an
    ``activation`` below that, too, dx is wanted; ``of_x`` where the activation saved x itself, and ``components`` as so
    many components of bfloat16 as well; of a ``form``, whose blocks of the same rows have so many ``parts`` of dx;
    ``rate`` of a dropout above the activation.
    """
    targets = _targets(name, kind, 2 * batch.epoch_rows, n)
    weights = generator().uniform(0.5, 2.0, len(targets)).astype(np.float32) if weighted else None
    logits = batch.rows_of(3 * np.random.default_rng(8).normal(size=(batch.capacity, n)))
    if special is not None:
        logits[0, 1] = special
    mean, scale = (normal(n) / 2, abs(normal(n)) + np.float32(0.5)) if scaled else (None, None)
    part, rows = batch.part, len(batch.fetched)
    random = np.random.default_rng(10)
    if width is not None:  # multiples of 2⁻⁸ that float32 holds, in whatever order they are added up
        x = batch.rows_of(random.integers(-4, 5, (batch.capacity, width)) / 4)
        w_layer, b_layer = random.integers(-16, 17, (width, n)) / 64, random.integers(-64, 65, n) / 32
        b_layer = b_layer if bias else np.zeros(n)
        logits = batch.rows_of(x @ w_layer + b_layer)

    target = targets[batch.fetched]
    target_error = np.zeros((rows, n))
    if kind == "index":
        target = target.astype(np.int64)
    else:
        target = wide(target)
        if scale is not None:
            target = (target - mean) / scale
            target_error = 2 * EPS32 * abs(target)
    z = wide(logits[part])
    row_values, deltas = np.empty(rows), np.empty((rows, n))
    with np.errstate(all="ignore"):
        LOSS_OF[name].evaluate(z, target, row_values, deltas, np.empty((rows, n)))

    # A lane adds up every 32nd term or fewer, a team five or ten times; terms are no larger than the value itself, or
    # in a cross entropy than differences of logits.  An error of a target passes on by the delta, and to
    # the delta with a factor of 2 at most.
    w = np.ones(rows) if weights is None else wide(weights[batch.fetched])
    relative = (n / 32 + 10 + ROUNDINGS) * EPS32
    is_cross_entropy = LOSS_OF[name].output in ("sigmoid", "softmax")
    spread = 2 * magnitude(z).max(axis=1) if is_cross_entropy else np.zeros(rows)
    reach = np.full((rows, n), float(is_cross_entropy))  # of the terms of a delta, beside itself
    if "focal" in name:  # an error of a probability passes on by γ and γ², as those of (1 - p)^γ do
        spread, reach = spread * 9.0, reach * 9.0 * (1.0 + spread[:, np.newaxis])
    if name == "poisson":
        with np.errstate(all="ignore"):
            reach = magnitude(np.exp(z))
        spread = 2 * (reach + magnitude(target * z)).max(axis=1)
    value_bound = w * (relative * (abs(row_values) + spread) + (magnitude(deltas) * target_error).sum(axis=1))
    delta_bound = w[:, np.newaxis] * (relative * (abs(deltas) + reach) + 2 * target_error)

    block_rows = team.block_rows if width is None else form.rows
    blocks = ceil_div(batch.most_rows, block_rows)
    sums, sums_bound = np.zeros((blocks, 2)), np.zeros((blocks, 2))
    block = np.arange(rows) // block_rows
    np.add.at(sums, block, np.stack([w * row_values, w], axis=1))
    np.add.at(sums_bound, block, np.stack([value_bound, w * EPS * rows], axis=1))
    outputs = {"sums": expect(sums, sums_bound)}
    if delta:
        full, full_bound = np.zeros(logits.shape), np.zeros(logits.shape)
        full[part], full_bound[part] = w[:, np.newaxis] * deltas, delta_bound
        outputs["delta"] = expect(full, full_bound, batch.written(*logits.shape))
    data = {"order": batch.order, "logits": logits, "targets": targets, "weights": weights}
    written = {"delta": blank(*logits.shape) if delta else None, "sums": blank(blocks, 2, dtype=np.float64)}
    written |= {"arrived": None, "totals": None, "losses": None}
    if total:
        whole_sum, whole_bound = sums.sum(axis=0), sums_bound.sum(axis=0) + blocks * EPS * abs(sums).sum(axis=0)
        written |= {"arrived": np.zeros(1, np.uint32)}
        written |= {"totals": blank(2, dtype=np.float64), "losses": blank(4, 2, dtype=np.float64)}
        of_run = np.arange(4)[:, np.newaxis] == 2  # the step's place in the run
        outputs["totals"] = expect(whole_sum, whole_bound)
        outputs["losses"] = expect(*(np.broadcast_to(a, (4, 2)) for a in (whole_sum, whole_bound, of_run)))
        outputs["arrived"] = expect(np.zeros(1), 0.0)
    variant = "-weighted" * weighted + "-delta" * delta + "-scaled" * scaled + f"-{special}" * (special is not None)
    variant += "-total" * total
    args = {**batch.args, **data, "mean": mean, "scale": scale, **written, "n": n}
    if width is None:
        args |= {"components": None, "component_stride": 0, "component_count": components}
        if components:
            of_row = w[:, np.newaxis]
            args |= _components_of(components, batch, n, deltas * of_row, delta_bound, outputs, "", block_rows)
            blocks, variant = len(args["sums"]), variant + f"-components-{components}"
        entry = kernels.loss(name, kind, textured=textured, team=team)
        return Case(f"{batch}-{n}{variant}", entry, (blocks,), args, outputs, _numbers_of(entry, name))

    del args["logits"]
    args |= {"x": x, "w": w_layer.astype(np.float32), "b": b_layer.astype(np.float32) if bias else None, "k": width}
    args |= {"saved": None, "activation": 0, "dx": None, "dx_components": None, "dx_row_scales": None}
    args |= {"dx_stride": 0, "dx_component_count": components, "restore": np.float32(1)}
    args |= kept_arguments(batch, width, 0.0)
    if activation is not None:
        saved = x if of_x else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, width)))
        product_, chain = chained(full, w_layer.T)
        product_bound = chain + full_bound @ abs(w_layer.T)
        outputs["dx"], through = differentiated(activation, batch, product_, product_bound, saved, rate)
        dx, dx_bound = (np.where(batch.written(*x.shape), a, 0.0) for a in (outputs["dx"].value, outputs["dx"].bound))
        number = kernels.activation_number(activation)
        args |= {"saved": saved, "activation": number, **through, "dx": blank(*x.shape)}
        variant += f"-{activation}" + f"-rate{rate}" * (rate > 0)
        variant += "-of-x" * of_x
        if components:
            made, vectors = (dx[part], dx_bound[part]), 4 * ceil_div(width, 4)
            args |= _components_of(components, batch, width, *made, outputs, "dx_", block_rows, vectors)
            blocks = len(args["sums"])
            variant += f"-components-{components}"
        elif parts * form.split == 1:
            scales = np.full(batch.most_rows, -77, np.int32)
            args["dx_row_scales"], outputs["dx_row_scales"] = scales, _row_scales_of(dx[part], scales)
    variant += f"-{parts}parts" * (parts > 1)
    entry = kernels.head(name, kind, textured=textured, form=form, drops=rate > 0)
    grid = form.split * blocks, parts
    return Case(f"{batch}-{width}x{n}{variant}", entry, grid, args, outputs, _numbers_of(entry, name))


def _numbers_of(entry: Entry, name: str) -> dict[str, np.ndarray]:
    """The loss's numbers, where the entry reads them."""
    return dict.fromkeys(entry.constant_names, loss_numbers(LOSS_OF[name]))


def _row_scales_of(dx: np.ndarray, into: np.ndarray) -> Output:
    """The row scales of dx (gemm/operand_formats.cuh), from their largest elements; these are no powers of two."""
    _, exponents = np.frexp(abs(dx).max(axis=1, initial=0.0))
    is_used = (dx != 0.0).any(axis=1)
    value = np.zeros(len(into), np.int64)
    value[: len(dx)] = 8 * (np.where(is_used, exponents - 1, 0) - 14) + np.where(is_used, 4, 0)
    return expect(value, 0.0, np.arange(len(into)) < len(dx))


def _components_of(
    components: int,
    batch: Batch,
    n: int,
    value: np.ndarray,
    bound: np.ndarray,
    outputs: dict[str, Output],
    prefix: str,
    block_rows: int,
    written: int | None = None,
) -> dict[str, np.ndarray]:
    """Components that a kernel leaves as well, in ``outputs`` under their name; its blocks take padding too.

    ``written`` is how many columns are, with 0 beyond those that there are.
    """
    padded, rows = (components, padded_rows(batch.most_rows), padded_columns(n)), len(value)
    full, full_bound, is_written = np.zeros(padded), np.zeros(padded), np.zeros(padded, bool)
    full[0, :rows, :n], full_bound[0, :rows, :n] = value, bound + BFLOAT_ERRORS[components] * (abs(value) + bound)
    is_written[:, : filled_rows(rows), : written or n] = True
    outputs[f"{prefix}components"] = Output(full, full_bound, is_written, together)
    del outputs["sums"]  # of other blocks
    words, sums = np.full(padded, 0x5A5A, np.uint16), blank(padded[1] // block_rows, 2, dtype=np.float64)
    return {f"{prefix}components": words, f"{prefix or 'component_'}stride": words[0].size, "sums": sums}


def tail(
    name: str, kind: TargetKind, batch: Batch, n: int, width: int, *, textured: bool = True,
    cards: int = 1, own: int = 0, count: int = 3,
) -> Case:  # fmt: skip
    """As the head, behind a first layer of ``width`` columns, whose z comes in ``count`` partial sums.

    With several ``cards`` each has a part of the layer, whose sums are alike.  What the card with part ``own`` sends to
    another one comes to its own inbox, in that one's place.
    """
    head = loss(name, kind, batch, n, width=width, activation="identity", total=True, textured=textured)
    args, (x, w, b) = dict(head.args), (head.args[name] for name in ("x", "w", "b"))
    assert isinstance(x, np.ndarray) and isinstance(w, np.ndarray) and isinstance(b, np.ndarray)
    random, rows = np.random.default_rng(11), batch.capacity
    parts = random.integers(-8, 9, (count, *x.shape)) / 4.0
    first_bias = random.integers(-8, 9, width) / 4.0
    parts[-1] = (x - first_bias) / cards - parts[:-1].sum(axis=0)
    identity, is_row = kernels.activation_number("identity"), batch.written(rows, width + n)[:, 0]
    layers = [[width, -1, w.size + n, identity, 0], [n, 0, w.size, identity, 0]]

    def flat(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([array.ravel() for array in arrays])

    dx, delta = head.outputs["dx"], head.outputs["delta"]
    logits = wide(x) @ wide(w) + b  # exact, as x is
    of_rows = flat(*(np.broadcast_to(is_row[:, np.newaxis], (rows, count)) for count in (width, n)))
    outputs = {
        **{key: head.outputs[key] for key in ("totals", "losses", "arrived")},
        "y": expect(np.where(of_rows, flat(wide(x), logits), 0.0), 0.0, of_rows),
        "dz": expect(flat(dx.value, delta.value), flat(dx.bound, delta.bound), of_rows),
    }
    for key in ("x", "w", "b", "k", "saved", "activation", "dx", "delta"):
        del args[key]
    for key in ("kept", "keep", "restore", "dx_components", "dx_stride", "dx_component_count", "dx_row_scales"):
        del args[key]
    args |= {
        "partials": parts.astype(np.float32), "parameters": flat(w, b, first_bias).astype(np.float32),
        "described": np.array(layers, np.int32), "layer_count": 2, "y": blank(rows * (width + n)),
        "dz": blank(rows * (width + n)), "sums": blank(rows, 2, dtype=np.float64), "count": count, "capacity": rows,
        "n": width, "exchange": None, "aborted": None, "memory": None,
    }  # fmt: skip
    entry = kernels.tail(name, kind, textured=textured)
    if cards > 1:
        given, left = _exchanged(parts.sum(axis=0), batch, cards, own)
        args |= given
        outputs["memory"] = expect(left.astype(np.float64), 0.0)
    exchanged = f"-part{own}of{cards}" if cards > 1 else ""
    return Case(f"{batch}-{width}x{n}{exchanged}", entry, (rows,), args, outputs, _numbers_of(entry, name))


def _exchanged(sums: np.ndarray, batch: Batch, cards: int, own: int) -> tuple[dict[str, object], np.ndarray]:
    """What a tail is given that exchanges sums (rows, columns) with cards that have the same, and the memory it leaves.

    Memory is a word that ends waits and the counts of the rows' messages, then this card's inbox.
    """
    sent, rows = 6, len(sums)  # messages of each row so far
    places = batch.part.stop - batch.part.start
    head = 8 * ceil_div(1 + rows, 2)
    memory = np.zeros(head + 16 * cards * sums.size, np.uint8)
    memory[4 : 4 * (1 + rows)].view(np.uint32)[:] = sent
    memory[head:].view(np.uint64)[:] = np.uint64((sent - 1) << 32)  # of the messages before
    left = memory.copy()
    left[4 : 4 * (1 + rows)].view(np.uint32)[:places] = sent + 1
    words = left[head:].view(np.uint64).reshape(2, cards, *sums.shape)[(sent + 1) % 2]
    for part in set(range(cards)) - {own}:
        bits = sums[batch.part].astype(np.float32).view(np.uint32).astype(np.uint64)
        words[part, batch.part] = np.uint64((sent + 1) << 32) | bits
    table = [cards, own, 0, *(head + 8 * (part - own) * sums.size for part in range(cards))]
    table[3 + own] = head
    return {"exchange": np.array(table, np.int64), "aborted": np.zeros(1, np.uint32), "memory": memory}, left


def total_error(count: int) -> Case:
    sums = generator().random((count, 2))
    total = sums.sum(axis=0)
    bound = count * EPS * total
    losses, written = np.zeros((5, 2)), np.zeros((5, 2), bool)
    losses[2], written[2] = total, True
    args = {"step": whole(1).args["step"], "sums": sums, "count": count}
    double = {"totals": blank(2, dtype=np.float64), "losses": blank(5, 2, dtype=np.float64)}
    outputs = {"totals": expect(total, bound), "losses": expect(losses, bound, written)}
    return Case(f"{count}", kernels.total_error(), (1,), {**args, **double}, outputs)


def step_errors(capacity: int, epoch_rows: int, steps: int) -> Case:
    """The last ``steps`` steps of an epoch, in a run whose first two came before."""
    first = -(-epoch_rows // capacity) - steps
    errors = generator().random((2 + steps, capacity, 2)).astype(np.float32)
    rows = [min(capacity, epoch_rows - (first + step) * capacity) for step in range(steps)]
    losses, written = np.zeros((5 + steps, 2)), np.zeros((5 + steps, 2), bool)
    for step, count in enumerate(rows):
        losses[2 + step], written[2 + step] = errors[2 + step, :count].sum(axis=0, dtype=np.float64), True
        errors[2 + step, count:] = np.nan  # of an earlier run
    step = np.array([(STEP_NUMBER, 2, first, capacity, epoch_rows)], STEP)
    args = {"step": step, "errors": errors, "capacity": capacity, "losses": blank(5 + steps, 2, dtype=np.float64)}
    outputs = {"losses": expect(losses, capacity * EPS * losses, written)}
    return Case(f"{steps}x{capacity}of{epoch_rows}", kernels.step_errors(), (steps,), args, outputs)


def output(
    function: OutputName,
    batch: Batch,
    n: int,
    *,
    scaled: bool = False,
    special: float | None = None,
    team: Team = kernels.WARP_TEAM,
) -> Case:
    """``scaled`` and ``special`` as for a loss."""
    logits = batch.rows_of(5 * normal(batch.capacity, n))
    if special is not None:
        logits[0, 1] = special
    y = wide(logits)
    with np.errstate(all="ignore"):
        apply_output(function, y)
    # As in a loss; a probability's error is that of exp(z), whose exponent is off by a rounding of z.
    bound = (n / 32 + 10 + ROUNDINGS + 2 * magnitude(logits).max()) * EPS32 * abs(y)
    mean, scale = (normal(n), abs(normal(n)) + np.float32(0.5)) if scaled else (None, None)
    if mean is not None and scale is not None:
        y, bound = y * scale + mean, bound * scale + 2 * EPS32 * (abs(y * scale) + abs(mean))
    blocks = ceil_div(batch.most_rows, team.block_rows)
    args = {**batch.args, "logits": logits, "mean": mean, "scale": scale, "y": blank(*logits.shape), "n": n}
    outputs = {"y": expect(y, bound, batch.written(*logits.shape))}
    variant = "-scaled" * scaled + f"-{special}" * (special is not None)
    return Case(f"{batch}-{n}{variant}", kernels.output(function, team=team), (blocks,), args, outputs)


def row_head_cases() -> Iterator[Case]:
    """Heads whose warps have two rows at a time, 512 of k at once, in blocks of 32 rows."""
    form = kernels.ROW_HEAD
    for name, kind in LOSS_KINDS:
        yield loss(name, kind, whole(35), 8, width=33, activation="tanh", total=True, form=form)
        yield loss(name, kind, whole(17), 7, width=70, activation="relu", weighted=False, textured=False, form=form)
    for rows, k, n in (
        (1, 1, 1),
        (3, 4, 8),
        (33, 999, 3),
        (64, 1024, 8),
        (63, 513, 5),
        (2, 4100, 2),
        (31, 9100, 1),
        (66, 512, 2),
    ):
        yield loss("huber", "dense", whole(rows), n, width=k, activation="tanh", total=True, form=form)
        yield loss("squared_error", "dense", whole(rows), n, width=k, activation="tanh", of_x=True, form=form)
    yield loss("squared_error", "dense", whole(9), 3, width=40, scaled=True, form=form)
    for activation in ACTIVATIONS:
        yield loss("squared_error", "dense", whole(9), 5, width=33, activation=activation, form=form)
    for batch in batches(70):
        yield loss("softmax_cross_entropy", "index", batch, 7, width=40, activation="silu", form=form)
        yield loss("softmax_cross_entropy", "index", batch, 7, width=39, activation="silu", form=form, rate=0.25)
    for batch, components in product(batches(130), BFLOAT_ERRORS):
        for width, of_x in ((70, False), (530, True)):
            yield loss(
                "squared_error", "dense", batch, 5, width=width, activation="tanh", components=components, form=form,
                of_x=of_x, rate=0.25 * (components - 1),
            )  # fmt: skip


def column_head_cases() -> Iterator[Case]:
    """Heads whose threads have a column of W each.  W of 32 columns comes to shared memory in parts of 352 rows."""
    for form, (name, kind), textured in product(kernels.HEADS, LOSS_KINDS, (True, False)):
        yield loss(name, kind, whole(9), 5, width=39, activation="tanh", textured=textured, form=form, rate=0.25)
    for form, (name, kind) in product(kernels.COLUMN_HEADS, LOSS_KINDS):
        yield loss(name, kind, whole(31), 10, width=33, activation="tanh", total=True, form=form)
        yield loss(name, kind, whole(17), 32, width=70, activation="relu", weighted=False, textured=False, form=form)
    for form in kernels.COLUMN_HEADS:
        for rows, k, n in ((1, 1, 1), (3, 1, 32), (5, 999, 3), (9, 1000, 32), (2, 2048, 11), (3, 1111, 1), (11, 2, 31)):
            yield loss("huber", "dense", whole(rows), n, width=k, activation="tanh", total=True, form=form)
        yield loss("huber", "dense", whole(3), 2, width=7000, activation="relu", form=form)  # x comes in two parts
        for k, n in ((4100, 10), (8193, 16)):  # of such k layers are split along it, where they have no head
            yield loss("softmax_cross_entropy", "index", whole(9), n, width=k, activation="tanh", of_x=True, form=form)
        parts = 5 if form.split == 1 else 1
        yield loss(
            "squared_error", "dense", whole(5), 4, width=6144, activation="relu", components=1, form=form, parts=parts
        )
        yield loss("squared_error", "dense", whole(9), 3, width=40, scaled=True, form=form)
        yield loss("squared_error", "dense", whole(9), 5, width=1100, activation="tanh", of_x=True, form=form)
        for activation in ACTIVATIONS:
            yield loss("squared_error", "dense", whole(9), 5, width=33, activation=activation, form=form)
        for batch in batches(31):
            yield loss("softmax_cross_entropy", "index", batch, 7, width=40, activation="silu", form=form)
            yield loss("softmax_cross_entropy", "index", batch, 7, width=39, activation="silu", form=form, rate=0.25)
        for parts, k, n in ((2, 33, 5), (3, 900, 32), (8, 2048, 11), (5, 130, 1), (2, 1500, 32)):
            parts = parts if form.split == 1 else 1
            yield loss("huber", "dense", whole(9), n, width=k, activation="tanh", total=True, form=form, parts=parts)
        for batch, components in product(batches(130), BFLOAT_ERRORS):
            yield loss(
                "squared_error", "dense", batch, 5, width=70, activation="tanh", components=components, form=form,
                parts=components if form.split == 1 else 1, rate=0.25 * (components - 1),
            )  # fmt: skip


def loss_cases() -> Iterator[Case]:
    for name, kind in LOSS_KINDS:
        for rows, n in ((1, 1), (31, 10), (9, 32), (33, 33), (8, 257)):
            yield loss(name, kind, whole(rows), n)
        for weighted, delta in ((False, True), (True, False)):
            yield loss(name, kind, whole(17), 5, weighted=weighted, delta=delta)
        yield loss(name, kind, whole(17), 5, textured=False)
        for n, textured in ((2100, True), (70, False)):
            yield loss(name, kind, batches(7)[-1], n, textured=textured, team=kernels.WIDE_TEAM)
        yield loss(name, kind, whole(3), 40, total=True, team=kernels.WIDE_TEAM)
        if kind == "dense" and LOSS_OF[name].output == "identity":
            yield loss(name, kind, whole(17), 33, scaled=True)
            yield loss(name, kind, whole(17), 31, scaled=True, width=9, activation="identity")
        yield loss(name, kind, whole(31), 7, total=True)
        for rows, k, n in ((1, 1, 1), (31, 33, 10), (9, 1100, 7), (17, 70, 32)):
            yield loss(name, kind, whole(rows), n, width=k, activation="tanh", total=True)
        yield loss(name, kind, whole(17), 5, width=40, weighted=False)
        yield loss(name, kind, whole(17), 5, width=40, textured=False)
        for batch in batches(31):
            yield loss(name, kind, batch, 7, width=40, activation="silu")
            yield loss(name, kind, batch, 7, width=40, activation="relu")
        for batch in batches(31):
            yield loss(name, kind, batch, 7)
        for special in (np.nan, np.inf, -np.inf):
            yield loss(name, kind, whole(1), 5, special=special)
        for batch, n, width in ((whole(1), 10, 90), (Batch(4, 10, 2), 7, 33), (whole(3), 1, 600)):
            yield tail(name, kind, batch, n, width)
        yield tail(name, kind, whole(2), 5, 9, textured=False)
    for batch, width, cards, own, count in (
        (whole(5), 90, 2, 0, 118), (Batch(6, 10, 1), 33, 2, 1, 17), (whole(3), 128, 8, 5, 5), (whole(2), 1, 4, 3, 8),
    ):  # fmt: skip
        yield tail("softmax_cross_entropy", "index", batch, 7, width, cards=cards, own=own, count=count)
    for name, kind in LOSS_KINDS:
        if LOSS_OF[name].output == "softmax":  # whose threads hold a row in registers, unless it is too long
            for n, team in ((512, kernels.WARP_TEAM), (530, kernels.WARP_TEAM), (4200, kernels.WIDE_TEAM)):
                yield loss(name, kind, whole(2), n, team=team)
    yield from column_head_cases()
    yield from row_head_cases()
    for activation in ACTIVATIONS:
        yield loss("squared_error", "dense", whole(9), 5, width=33, activation=activation)
    for batch in batches(130):
        for components in BFLOAT_ERRORS:
            yield loss("squared_error", "dense", batch, 5, width=70, activation="tanh", components=components)
            yield loss("squared_error", "dense", batch, 5, width=70, activation="gelu", components=components, rate=0.5)
            yield loss("huber", "dense", batch, 70, components=components)
    for width in (33, 1100):
        yield loss("squared_error", "dense", whole(9), 5, width=width, activation="tanh", of_x=True)
        yield loss("squared_error", "dense", whole(9), 5, width=width, activation="tanh", of_x=True, rate=0.25)
    for function in OUTPUTS:
        for batch, n in [*((batch, 7) for batch in batches(31)), (whole(1), 1), (whole(9), 33), (whole(3), 257)]:
            yield output(function, batch, n)
        yield output(function, whole(17), 33, scaled=True)
        yield output(function, batches(7)[-1], 2100, team=kernels.WIDE_TEAM)
        yield output(function, whole(3), 40, scaled=True, team=kernels.WIDE_TEAM)
        for special in (np.nan, np.inf, -np.inf):
            yield output(function, whole(1), 5, special=special)
    for count in (1, 33, 257, 1000):
        yield total_error(count)
    for capacity, epoch_rows, steps in ((1, 3, 3), (33, 100, 2), (300, 601, 3)):
        yield step_errors(capacity, epoch_rows, steps)
