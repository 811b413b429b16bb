"""Steps by blocks of rows, on plain cores and on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from helpers import EPS32, LOSS_KINDS

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import ceil_div
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.losses import TargetKind
from mlpgpu.optimizers import OPTIMIZERS

from .case import (
    SEED,
    Batch,
    Case,
    Output,
    bfloat16_bits,
    bfloat16_values,
    blank,
    constants_of,
    expect,
    generator,
    normal,
    whole,
    wide,
)
from .losses import loss
from .updates import after_step


@dataclass(frozen=True)
class _TwoLayers:
    """Two layers, the second with a head's numbers: everything up to the logits is exact in float32.

    Of the first layer the inputs follow from its outputs, since the upper part of its weight is a permutation.

    Attributes:
        head: the case of the second layer with the loss.
        data: of which the batch's rows are ``inputs``.
        first: weight and bias of the first layer; ``second`` of the other.
    """

    head: Case
    data: np.ndarray
    inputs: np.ndarray
    first: tuple[np.ndarray, np.ndarray]
    second: tuple[np.ndarray, np.ndarray]

    @property
    def parameters(self) -> np.ndarray:
        return _flat(*self.first, *self.second).astype(np.float32)

    def given(self, *names: str) -> dict[str, object]:
        """Arguments that are the head's, and those of the inputs."""
        args = {key: self.head.args[key] for key in ("step", "shard", "shards", "order", "targets", "weights", *names)}
        return args | {
            "data": self.data, "bytes": None, "scale": 1.0, "mean": None, "deviation": None,
            "parameters": self.parameters, "target_mean": self.head.args["mean"],
            "target_scale": self.head.args["scale"], "seed": SEED,
        }  # fmt: skip


def _flat(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays])


def _two_layers(
    name: str, kind: TargetKind, batch: Batch, widths: tuple[int, int, int], *, textured: bool, mixed_rows: int | None
) -> _TwoLayers:
    """``mixed_rows`` is how many rows below the permutation are not 0, or None for all of them."""
    n_in, width, n = widths
    head = loss(name, kind, batch, n, width=width, activation="identity", total=True, textured=textured)
    h, w, b = (head.args[key] for key in ("x", "w", "b"))
    assert isinstance(h, np.ndarray) and isinstance(w, np.ndarray) and isinstance(b, np.ndarray)
    random, rows, part = generator(), batch.capacity, batch.part
    permutation = 2.0 * np.eye(width)[random.permutation(width)]
    lower = random.integers(-4, 5, (n_in - width, width)) / 4.0
    lower[mixed_rows:] = 0.0
    bias = random.integers(-8, 9, width) / 4.0
    rest = random.integers(-4, 5, (rows, n_in - width)) / 2.0
    inputs = np.hstack([(h - bias - rest @ lower) @ permutation.T / 4.0, rest])
    weight = np.vstack([permutation, lower])
    data = np.full((2 * batch.epoch_rows, n_in), np.nan, np.float32)
    data[batch.fetched] = inputs[part]
    np.testing.assert_array_equal(wide(data[batch.fetched]) @ weight + bias, h[part])
    return _TwoLayers(head, data, inputs, (weight, bias), (w, b))


def row_step(
    name: str,
    kind: TargetKind,
    batch: Batch,
    widths: tuple[int, int, int],
    *,
    textured: bool = True,
    stored: bool = False,
    lowest: int = 1,
) -> Case:
    """``stored`` is with inputs as an output; ``lowest`` is the first layer whose deltas are wanted."""
    n_in, width, n = widths
    made = _two_layers(name, kind, batch, widths, textured=textured, mixed_rows=None)
    head, rows, h, w = made.head, batch.capacity, made.head.args["x"], made.second[0]
    assert isinstance(h, np.ndarray)
    identity, none = kernels.activation_number("identity"), [-1, 0, 0]
    of_bias, of_second = made.first[0].size, made.first[0].size + width
    levels = [
        [n_in, -1, -1, identity, 0, *none],
        [width, 0, of_bias, identity, 0, *none],
        [n, of_second, of_second + w.size, identity, 0, *none],
    ]
    dx, delta = head.outputs["dx"], head.outputs["delta"]
    is_row = batch.written(rows, 1)
    of_rows = _flat(is_row & np.full((rows, width), lowest == 1), np.broadcast_to(is_row, (rows, n)))
    outputs = {
        **{key: head.outputs[key] for key in ("totals", "losses", "arrived", "sums")},
        "y": expect(np.where(is_row, wide(h), 0.0), 0.0, np.broadcast_to(is_row, h.shape)),
        "dz": expect(_flat(dx.value, delta.value), _flat(dx.bound, delta.bound), of_rows),
    }
    if stored:
        of_inputs = np.broadcast_to(is_row, (rows, n_in))
        outputs["x"] = expect(np.where(of_inputs, np.nan_to_num(made.inputs), 0.0), 0.0, of_inputs)
    args = made.given("arrived", "totals", "losses", "sums") | {
        "described": np.array(levels, np.int32), "layer_count": 2, "lowest": lowest, "widest": max(widths),
        "x": blank(rows, n_in) if stored else None, "y": blank(rows, width), "dz": blank(rows * (width + n)),
        "capacity": rows,
    }  # fmt: skip
    entry = kernels.row_step(name, kind, textured=textured)
    blocks = ceil_div(rows, kernels.ROW_STEP_ROWS)
    variant = "-stored" * stored + f"-lowest-{lowest}" * (lowest > 1)
    return Case(f"{batch}-{'-'.join(map(str, widths))}{variant}", entry, (blocks,), args, outputs, head.constants)


# What so many bfloat16 components of a number may be off by; three hold all 24 bits, but three of their products are
# left out.
_COMPONENT_ERRORS = {1: 2.0**-8, 2: 2.0**-16, 3: 2.0**-22}


def image_of(weight: np.ndarray, components: int) -> np.ndarray:
    """A weight (k, n) as fused/update_from_blocks.cuh leaves it: (components, k padded to 16, n padded to 16 and 8)."""
    (k, n), pad = weight.shape, kernels.tensor_row_step_columns
    rest, image = weight.astype(np.float32), np.zeros((components, pad(k), pad(n) + 8), np.uint16)
    for component in image:
        component[:k, :n] = bfloat16_bits(rest)
        rest = (wide(rest) - bfloat16_values(component[:k, :n])).astype(np.float32)
    return image


def tensor_row_step(
    name: str,
    kind: TargetKind,
    batch: Batch,
    widths: tuple[int, int, int],
    components: int = 3,
    *,
    textured: bool = True,
    activations: Sequence[str] = ("identity",),
    grid: int | None = None,
    input_parts: int = 0,
) -> Case:
    """Blocks of 16 rows; everything up to the logits is exact in one component as well.

    With ``input_parts`` the inputs are what a layer apart makes of as many sums over parts of its own inputs.
    """
    n_in, width, n = widths
    made = _two_layers(name, kind, batch, widths, textured=textured, mixed_rows=1)
    head, w, tile = made.head, made.second[0], kernels.TENSOR_ROW_STEP_STEP
    form = kernels.TensorRowStep(widths, components, tile, kernels.ROW_STEP_TABLE_BYTES)
    of_bias, of_second = made.first[0].size, made.first[0].size + width
    number, none = list(activations).index("identity"), [-1, 0, 0]
    place, image, partial, first = form.places, form.images, form.partials, form.biases
    levels = [
        [n_in, -1, number, 0, *none, -1, place[0], 0, -1, -1],
        [width, of_bias, number, 0, *none, -1, place[1], first[0], image[0], partial[0]],
        [n, of_second + w.size, -1, 0, *none, -1, place[2], first[1], image[1], partial[1]],
    ]
    rows, part = len(batch.fetched), batch.part
    h, delta, dx = head.args["x"], head.outputs["delta"], head.outputs["dx"]
    assert isinstance(h, np.ndarray)
    error = _COMPONENT_ERRORS[components]
    blocks = grid or ceil_div(batch.most_rows, tile)
    of_block = [np.arange(rows) // tile % blocks == block for block in range(blocks)]
    value, bound = np.zeros((blocks, partial[-1])), np.zeros((blocks, partial[-1]))
    dx_bound = dx.bound + 2 * error * (abs(delta.value) @ abs(w).T)
    layers = [
        (made.inputs[part], dx.value[part], dx_bound[part], n_in, width),
        (wide(h[part]), delta.value[part], delta.bound[part], width, n),
    ]
    for layer, (x, dz, dz_bound, k, columns) in enumerate(layers):
        with_ones = np.hstack([x, np.ones((rows, 1))])
        for block, own in enumerate(of_block):
            padded, room = np.zeros((k + 1, 8 * ceil_div(columns, 8))), np.zeros((k + 1, 8 * ceil_div(columns, 8)))
            padded[:, :columns] = with_ones[own].T @ dz[own]
            reach = abs(with_ones[own]).T
            room[:, :columns] = reach @ dz_bound[own] + (error + (own.sum() + 2) * EPS32) * (reach @ abs(dz[own]))
            begin, end = partial[layer : layer + 2]
            value[block, begin:end], bound[block, begin:end] = padded.ravel(), room.ravel()
    sums, sums_bound, of_head = np.zeros((blocks, 2)), np.zeros((blocks, 2)), head.outputs["sums"]
    whose = np.arange(len(of_head.value)) * kernels.WHOLE_HEAD.rows // tile % blocks
    np.add.at(sums, whose, of_head.value)
    np.add.at(sums_bound, whose, 2 * of_head.bound)
    outputs = {
        **{key: head.outputs[key] for key in ("totals", "losses", "arrived")},
        "sums": expect(sums, sums_bound), "partials": expect(value, bound),
    }  # fmt: skip
    args = made.given("arrived", "totals", "losses") | {
        "images": _flat(image_of(made.first[0], components), image_of(w, components)),
        "described": np.array(levels, np.int32), "layer_count": 2, "tile": tile, "room": form.room,
        "room_count": form.rooms, "bias_count": first[-1], "slopes": None, "slope_columns": 0,
        "partials": blank(blocks, partial[-1]), "pitch": partial[-1], "sums": blank(blocks, 2, dtype=np.float64),
    }  # fmt: skip
    if input_parts:
        for name_of_data in ("data", "bytes", "scale", "mean", "deviation"):
            del args[name_of_data]
        args |= _sums_of_parts(made, batch, input_parts) | {"parameters": np.append(made.parameters, BIASES[:n_in])}
        levels[0][1] = made.parameters.size
        args["described"] = np.array(levels, np.int32)
        deltas = dx.value[part] @ made.first[0].T
        room = dx_bound[part] @ abs(made.first[0]).T + (error + width * EPS32) * (
            abs(dx.value[part]) @ abs(made.first[0]).T
        )
        of_level = _deltas(deltas, room, batch, components)
        args |= {"deltas": np.full(of_level.value.shape, 0x7FC1, np.uint16), "delta_rows": of_level.value.shape[1]}
        outputs["deltas"] = of_level
    entry = kernels.tensor_row_step(name, kind, form, activations, textured=textured, behind=input_parts > 0)
    variant = f"-{components}" + f"-grid-{grid}" * (grid is not None) + f"-{input_parts}parts" * (input_parts > 0)
    return Case(f"{batch}-{'-'.join(map(str, widths))}{variant}", entry, (blocks,), args, outputs, head.constants)


BIASES = np.arange(-60, 61, dtype=np.float32) / 4  # of a layer apart


def _sums_of_parts(made: _TwoLayers, batch: Batch, parts: int) -> dict[str, object]:
    """Sums that make the inputs with such a layer's bias, both exactly."""
    rows, n_in = made.inputs[batch.part].shape
    sums = np.full((parts, batch.capacity, kernels.tensor_row_step_columns(n_in)), np.nan, np.float32)
    sums[:, :rows] = 0.0
    sums[0, :rows, :n_in] = made.inputs[batch.part] - BIASES[:n_in]
    for part in range(1, parts):
        moved = generator().integers(-8, 9, (rows, n_in)) / 2.0
        sums[part, :rows, :n_in], sums[0, :rows, :n_in] = moved, sums[0, :rows, :n_in] - moved
    return {"input_sums": sums, "input_parts": parts, "capacity": batch.capacity}


def _deltas(value: np.ndarray, bound: np.ndarray, batch: Batch, components: int) -> Output:
    """Deltas (rows, n) as components (components, batch's rows, n padded to 16 and 8), whose sum stands first."""
    rows, n = value.shape
    shape = components, batch.capacity + 3, kernels.tensor_row_step_columns(n) + 8

    def spread(numbers: np.ndarray) -> np.ndarray:
        made = np.zeros(shape)
        made[0, :rows, :n] = numbers
        return made

    def joined(words: np.ndarray) -> np.ndarray:
        return np.stack([bfloat16_values(words).sum(axis=0), *np.zeros((components - 1, *shape[1:]))])

    written = np.zeros(shape, bool)
    written[:, :rows] = True
    error = _COMPONENT_ERRORS[components]
    return replace(expect(spread(value), spread(bound + error * abs(value)), written), decode=joined)


def row_step_cases() -> Iterator[Case]:
    for name, kind in LOSS_KINDS:
        yield row_step(name, kind, whole(17), (41, 33, 7))
        yield row_step(name, kind, whole(2), (9, 9, 5), textured=False)
    for batch, widths in ((whole(1), (1, 1, 1)), (Batch(9, 20, 2), (70, 66, 10)), (whole(8), (20, 20, 68))):
        yield row_step("huber", "dense", batch, widths, stored=True)
        yield row_step("softmax_cross_entropy", "index", batch, widths, lowest=2)
    # A thread takes eight rows of a column, and columns in turns; vectors and odd pitches.
    yield row_step("huber", "dense", whole(11), (8, 8, 260))
    yield row_step("huber", "dense", whole(11), (34, 32, 129), stored=True)
    yield from tensor_row_step_cases()


@dataclass(frozen=True)
class _Images:
    """Where the weights of layers (k, n, has a bias) stand among parameters, and among their components."""

    layers: Sequence[tuple[int, int, bool]]
    components: int

    @property
    def form(self) -> kernels.TensorRowStep:
        widths = (*(k for k, _, _ in self.layers), self.layers[-1][1])
        return kernels.TensorRowStep(widths, self.components, kernels.TENSOR_ROW_STEP_STEP, 0)

    def described(self, blocks: int = 1, of_last: int = 1) -> np.ndarray:
        """Layers of which so many blocks have left gradients side by side, and the last one, whose lie behind them."""
        words, offset, first, partials = [], 0, 0, [partial // 4 for partial in self.form.partials]
        for number, (k, n, has_bias) in enumerate(self.layers):
            begin, is_last = partials[number], number + 1 == len(self.layers)
            places = [blocks * begin, partials[-1] - begin, of_last] if is_last else [begin, partials[-2], blocks]
            bias, runs = offset + k * n if has_bias else -1, kernels.sum_runs(places[-1])
            words.append([k, n, offset, bias, self.form.images[number], first, *places, runs])
            offset, first = offset + (k + has_bias) * n, first + kernels.blocks_of_sum(k, n, runs)
        return np.array(words, np.int32)

    def grid(self, blocks: int, of_last: int) -> tuple[int]:
        """Of what adds up what so many blocks left, with :meth:`described`'s arguments."""
        *_, (k, n, *_, first, _, _, _, runs) = self.described(blocks, of_last).tolist()
        return (first + kernels.blocks_of_sum(k, n, runs),)

    def spread(self, parameters: np.ndarray) -> np.ndarray:
        """Numbers of parameters where a weight's first component has them, and 0 where the others do."""
        spread = []
        for (k, n, _), (_, _, offset, *_) in zip(self.layers, self.described(), strict=True):
            image = np.zeros(image_of(np.zeros((k, n)), self.components).shape, parameters.dtype)
            image[0, :k, :n] = parameters[offset : offset + k * n].reshape(k, n)
            spread.append(image)
        return _flat(*spread)

    @property
    def are_weights(self) -> np.ndarray:
        """Which components are those of a weight, and no padding."""
        written = []
        for k, n, _ in self.layers:
            image = np.zeros(image_of(np.zeros((k, n)), self.components).shape, bool)
            image[:, :k, :n] = True
            written.append(image)
        return _flat(*written)

    def joined(self, words: np.ndarray) -> np.ndarray:
        """What words stand for, as :meth:`spread` has it."""
        values, joined = bfloat16_values(words), []
        for (k, n, _), begin, end in zip(self.layers, self.form.images, self.form.images[1:], strict=False):
            image = values[begin:end].reshape(image_of(np.zeros((k, n)), self.components).shape)
            joined.append(np.stack([image.sum(axis=0), *np.zeros(image[1:].shape)]))
        return _flat(*joined)

    def expected(self, value: np.ndarray, bound: np.ndarray, written: np.ndarray | bool) -> Output:
        values = self.spread(value)
        bounds = self.spread(bound + _COMPONENT_ERRORS[self.components] * abs(value))
        return replace(expect(values, bounds, written), decode=self.joined)


LAYERS_OF_BLOCKS = ((5, 11, True), (11, 9, False), (9, 3, True))


def update_from_blocks(rule: str, components: int, blocks: int, of_last: int) -> Case:
    """Two layers of so many blocks, and one of so many of its own."""
    images = _Images(LAYERS_OF_BLOCKS, components)
    penalty = {"alpha": 0.7} if rule.endswith(kernels.WITH_ALPHA) else {}
    optimizer, total = OPTIMIZERS[rule.removesuffix(kernels.WITH_ALPHA)](0.1, l1=0.02, l2=0.3, **penalty), 8.0
    table, random, form = optimizer.table(5, np.array([0.1, 0.03, 0.05])), generator(), images.form
    begin = form.partials[-2]
    parts = [random.normal(size=(blocks, begin)), random.normal(size=(of_last, form.partials[-1] - begin))]
    partials = _flat(*parts).astype(np.float32)
    beside, behind = partials[: parts[0].size].reshape(blocks, -1), partials[parts[0].size :].reshape(of_last, -1)
    terms, reach, is_weight = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for (k, n, has_bias), first, end in zip(images.layers, form.partials, form.partials[1:], strict=False):
        of_layer = behind if first == begin else beside[:, first:end]
        cut = wide(of_layer.reshape(len(of_layer), k + 1, -1)[:, : k + has_bias, :n])
        terms.append(cut.sum(axis=0).ravel())
        reach.append(abs(cut).sum(axis=0).ravel())
        is_weight.append(np.arange((k + has_bias) * n) < k * n)
    of_weights = np.concatenate(is_weight)
    w = random.normal(size=of_weights.size).astype(np.float32)
    slots = random.uniform(0.01, 0.1, (len(optimizer.slots), w.size)).astype(np.float32)
    slope = np.where(of_weights, optimizer.alpha * wide(w), 0.0)
    g, g_error = _flat(*terms) + slope, (max(blocks, of_last) + 4) * EPS32 * (_flat(*reach) + abs(slope))
    moved, moved_bound, new_slots, slot_bound = after_step(
        optimizer, table[2].tolist(), w, g / total, g_error / total, slots
    )
    args = {
        "step": np.array([(7, 2, 0, 1, 1)], STEP), "described": images.described(blocks, of_last),
        "layer_count": len(images.layers), "partials": partials,
        "totals": np.array([3.0, total]), "parameters": w, "slots": slots if slots.size else None, "size": w.size,
        "images": np.full(form.images[-1], 0x7FC1, np.uint16),
    }  # fmt: skip
    outputs = {
        "parameters": expect(moved, moved_bound),
        "images": images.expected(moved, moved_bound, images.are_weights),
    }
    if slots.size:
        outputs["slots"] = expect(new_slots, slot_bound)
    entry, grid = kernels.update_from_blocks(rule, components), images.grid(blocks, of_last)
    return Case(f"{blocks}-{of_last}blocks", entry, grid, args, outputs, constants_of(optimizer, table))


def images_of_weights(components: int) -> Case:
    images = _Images(LAYERS_OF_BLOCKS, components)
    parameters = normal(sum((k + has_bias) * n for k, n, has_bias in images.layers))
    args = {
        "described": images.described(), "parameters": parameters,
        "images": np.full(images.form.images[-1], 0x7FC1, np.uint16),
    }  # fmt: skip
    entry, outputs = (
        kernels.images_of_weights(components),
        {"images": images.expected(wide(parameters), np.zeros(parameters.size), True)},
    )
    return Case("layers", entry, (2, len(images.layers)), args, outputs)


def tensor_row_step_cases() -> Iterator[Case]:
    for name, kind in LOSS_KINDS:
        yield tensor_row_step(name, kind, whole(19), (41, 33, 7), 1)
        yield tensor_row_step(name, kind, whole(2), (9, 9, 5), 1, textured=False)
    name, kind = LOSS_KINDS[0]
    for components, activations in ((2, ("identity",)), (3, tuple(ACTIVATIONS))):
        for batch, widths, grid in (
            (whole(35), (41, 33, 7), None),
            (Batch(33, 68, 2), (20, 20, 68), None),  # blocks without rows
            (whole(70), (20, 17, 3), 2),  # blocks that have several tiles of rows
            (whole(17), (70, 60, 40), None),  # room for one weight, where there are three components
        ):
            yield tensor_row_step(name, kind, batch, widths, components, activations=activations, grid=grid)
        yield tensor_row_step(name, kind, whole(3), (9, 9, 5), components, activations=activations, textured=False)
    for components, activations in ((1, ("identity",)), (2, ("identity",)), (3, tuple(ACTIVATIONS))):
        for batch, widths, parts in ((whole(35), (41, 33, 7), 3), (Batch(33, 68, 2), (20, 20, 68), 1)):
            yield tensor_row_step(name, kind, batch, widths, components, activations=activations, input_parts=parts)
    for components in kernels.COMPONENTS_OF_PRECISION.values():
        for rule in kernels.RULES:
            yield update_from_blocks(rule, components, 20, 20)
        yield update_from_blocks("Adam", components, 3, 1)
        yield update_from_blocks("Adam", components, 2, 17)
        yield update_from_blocks("Momentum", components, 13, 7)
        yield images_of_weights(components)
