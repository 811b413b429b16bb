"""What each kernel is held to: launches, the NumPy specification's results in float64, and bounds.

A case is plain data.  Whoever can launch a kernel runs it: on the host (test_kernels.py) or on a card.
Each entry of the table has at least one; activations, losses and optimizers are enumerated from the
tables of the specification, so a new row brings its own.

Rows of inputs that belong to another share hold NaN, and outputs hold before the launch what no kernel
computes: what is read, written or left out by mistake shows.  Every bound is derived from the number of
roundings, at most EPS32 each, by which a result is made, and from the magnitudes that are rounded; none
depends on what a kernel returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from helpers import EPS, EPS32, LOSS_KINDS

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels import SPLIT, TILES, Entry, SplitTile, Tile
from mlpgpu.backends.cuda.program import STEP, TABLE_COLUMNS, hyper_parameters
from mlpgpu.initializers import INITIALIZERS, initial_values
from mlpgpu.losses import LOSSES, OUTPUTS, OutputName, TargetKind, apply_output, class_count, classes_of
from mlpgpu.metrics import METRICS
from mlpgpu.optimizers import OPTIMIZERS, Optimizer
from mlpgpu.random import Purpose, uniforms, words

# Roundings of a formula beside its sums: no more than eight operations, each within two units in the last
# place, which is what CUDA and glibc grant expf, expm1f, log1pf, logf, tanhf and erff.
ROUNDINGS = 16

SEED = 0x9E3779B97F4A7C15  # has its highest bit set
STEP_NUMBER = 2**33 + 5  # does not fit in 32 bits
LAYER = 3
UNWRITTEN = -1.5e33
SPECIAL = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 2.5, -2.5]], np.float32)


@dataclass(frozen=True)
class Shifted:
    """An array whose first element lies one element past an aligned address."""

    array: np.ndarray


@dataclass(frozen=True)
class Mapped:
    """Planes (planes, rows, columns) given as the copy engine's map of them, for boxes of so many rows."""

    array: np.ndarray
    box_rows: int


@dataclass(frozen=True)
class Output:
    """What a launch leaves in one array: within ``bound`` of ``value`` where ``written``, elsewhere what was there.

    ``decode`` gives the numbers that the array's words stand for.
    """

    value: np.ndarray
    bound: np.ndarray
    written: np.ndarray
    decode: Callable[[np.ndarray], np.ndarray] = lambda array: array


@dataclass(frozen=True)
class Case:
    """One launch of ``entry`` with blocks of ``entry.threads``.

    Attributes:
        args: by name.  Pointers and textures take an array, a `Shifted` or `Mapped` array or None; scalars a number.
        outputs: by the name of the argument that is written to.
        constants: the first bytes of constant variables, by name.
        atomic: whether the order of sums may vary from run to run.
    """

    name: str
    entry: Entry
    grid: tuple[int, ...]
    args: Mapping[str, object]
    outputs: Mapping[str, Output]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    atomic: bool = False

    def check(self, got: Mapping[str, np.ndarray]) -> None:
        """Compare what the launch returned, by name: NaN and infinity must stand where they are expected."""
        assert set(got) >= set(self.outputs)
        for name, output in self.outputs.items():
            before, after = self.args[name], got[name]
            assert isinstance(before, np.ndarray) and np.isfinite(output.bound).all()
            kept = _bits(after) == _bits(before)
            after = output.decode(after)
            with np.errstate(invalid="ignore"):
                close = abs(after - output.value) <= output.bound
            same = (after == output.value) | (np.isnan(after) & np.isnan(output.value))
            right = np.where(output.written, close | same, kept)
            if not right.all():
                at = tuple(int(i) for i in np.argwhere(~right)[0])
                expected = f"{output.value[at]} ± {output.bound[at]:.3g}" if output.written[at] else "what was there"
                raise AssertionError(
                    f"{self.entry.name}: {name}{list(at)} is {after[at]}, expected {expected} "
                    f"({np.count_nonzero(~right)} of {right.size} elements are wrong)"
                )


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.itemsize}"))


def blank(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """An output before the launch."""
    return np.full(shape, UNWRITTEN, dtype)


def expect(value: np.ndarray, bound: np.ndarray | float, written: np.ndarray | bool = True) -> Output:
    """An output; what is not finite must be met exactly."""
    bound = np.where(np.isfinite(value), np.broadcast_to(bound, value.shape), 0.0)
    return Output(value, bound, np.broadcast_to(written, value.shape))


@dataclass(frozen=True)
class Batch:
    """One share of one batch; the capacity is that of a full batch."""

    capacity: int
    epoch_rows: int
    place: int = 0  # of the batch in the epoch
    share: int = 0
    shares: int = 1

    @property
    def part(self) -> slice:
        """The share's rows of the batch."""
        rows = min(self.capacity, self.epoch_rows - self.place * self.capacity)
        return slice(rows * self.share // self.shares, rows * (self.share + 1) // self.shares)

    @property
    def args(self) -> dict[str, object]:
        step = np.array([(STEP_NUMBER, 2, self.place, self.capacity, self.epoch_rows)], STEP)
        return {"step": step, "share": self.share, "shares": self.shares}

    @property
    def most_rows(self) -> int:
        """The rows that a grid is made for."""
        return -(-self.capacity // self.shares)

    @property
    def order(self) -> np.ndarray:
        """Rows of a data set twice as large, (epoch_rows,) int32."""
        return _random().permutation(2 * self.epoch_rows)[: self.epoch_rows].astype(np.int32)

    @property
    def fetched(self) -> np.ndarray:
        """The data set's rows that this share is made of."""
        start = self.place * self.capacity
        return self.order[start : start + self.capacity][self.part]

    def rows_of(self, array: np.ndarray) -> np.ndarray:
        """``array`` (B, …) with NaN in rows of other shares, in float32."""
        result = np.full(array.shape, np.nan, np.float32)
        result[self.part] = array[self.part]
        return result

    def written(self, *shape: int) -> np.ndarray:
        """Whether an element of an output (B, …) belongs to this share's rows."""
        mask = np.zeros(shape, bool)
        mask[self.part] = True
        return mask

    def __str__(self) -> str:
        share = f"-share{self.share}of{self.shares}" if self.shares > 1 else ""
        return f"{self.part.stop - self.part.start}rows{share}" + "-last" * (self.place > 0)


def whole(rows: int) -> Batch:
    """A batch in one share."""
    return Batch(rows, rows)


def batches(rows: int) -> list[Batch]:
    """A batch whole and in three shares; and the epoch's last one, two rows, of which one share gets none."""
    shares = range(3)
    thirds = [Batch(rows, rows, share=share, shares=3) for share in shares]
    last = [Batch(rows, 2 * rows + 2, 2, share, 3) for share in shares]
    return [whole(rows), *thirds, *last]


def _random() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return _random().normal(size=shape).astype(np.float32)


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _finite(array: np.ndarray) -> np.ndarray:
    """Magnitudes, 0 for what is not finite."""
    return np.nan_to_num(abs(array), nan=0.0, posinf=0.0)


# --- activations ---


def forward(name: str, z: np.ndarray) -> np.ndarray:
    """f(z) in float64."""
    y = np.empty(z.shape)
    with np.errstate(all="ignore"):
        ACTIVATIONS[name].forward(wide(z), y, np.empty(z.shape))
    return y


def derivative(name: str, saved: np.ndarray) -> np.ndarray:
    """f′ in float64, of what the activation saves."""
    dz = np.empty(saved.shape)
    with np.errstate(all="ignore"):
        ACTIVATIONS[name].backward(wide(saved), np.ones(saved.shape), dz, np.empty(saved.shape))
    return dz


def saved_of(name: str, z: np.ndarray) -> np.ndarray:
    """What the activation saves of z, in float32."""
    return z.astype(np.float32) if ACTIVATIONS[name].saves == "z" else forward(name, z).astype(np.float32)


def activation_bound(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of y = f(z): intermediate results are no larger than 1, |y|, or |z| before f saturates."""
    with np.errstate(invalid="ignore"):
        return ROUNDINGS * EPS32 * (1.0 + np.fmin(abs(z), 10.0) + abs(y))


# --- dense layers ---


def _product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A · B in float64, and the bound of a chain in float32: (k + 2) · eps · |A| · |B|."""
    a, b = wide(a), wide(b)
    with np.errstate(invalid="ignore"):
        return a @ b, (a.shape[1] + 2) * EPS32 * (abs(a) @ abs(b))


def _blocks(length: int, tile: int) -> int:
    return -(-length // tile)


def finish(
    activation: str, total: np.ndarray, bound: np.ndarray, b: np.ndarray | None, batch: Batch, *, with_z: bool
) -> dict[str, Output]:
    """Outputs of y = f(z), z = total + b, ``total (B, n)`` being within ``bound``."""
    z = total + (0.0 if b is None else wide(b))
    bound = bound + (0.0 if b is None else 2 * EPS32 * (abs(z) + abs(b)))
    bound = np.where(np.isfinite(z), bound, 0.0)
    y = forward(activation, z)
    # Between its ends an interval of z holds an extremum of f at most, and there f varies by bound² only.
    with np.errstate(invalid="ignore"):
        reach = np.maximum(*(abs(forward(activation, end) - y) for end in (z - bound, z + bound)))
    written = batch.written(*z.shape)
    outputs = {"y": expect(y, reach + activation_bound(z, y), written)}
    return {**outputs, "z": expect(z, bound, written)} if with_z else outputs


def _input(batch: Batch, k: int, *, fetched: bool = False, shift: bool = False) -> tuple[np.ndarray, dict[str, object]]:
    """The rows of an input, and the arguments that give them; ``fetched`` is from a data set by the order."""
    if not fetched:
        x = batch.rows_of(normal(batch.capacity, k))
        return x, {"x": Shifted(x) if shift else x, "order": None}
    data = np.full((2 * batch.epoch_rows, k), np.nan, np.float32)
    data[batch.fetched] = normal(2 * batch.epoch_rows, k)[batch.fetched]
    x = np.full((batch.capacity, k), np.nan, np.float32)
    x[batch.part] = data[batch.fetched]
    return x, {"x": Shifted(data) if shift else data, "order": batch.order}


def dense_forward(
    activation: str,
    tile: Tile,
    batch: Batch,
    x: np.ndarray | int,
    w: np.ndarray,
    *,
    plain: bool = False,
    shift: bool = False,
    fetched: bool = False,
) -> Case:
    """``x`` may be its width; ``plain`` is without a bias and without z, ``fetched`` with x from a data set."""
    if isinstance(x, int):
        x, given = _input(batch, x, fetched=fetched, shift=shift)
    else:
        x = batch.rows_of(x)
        given = {"x": Shifted(x) if shift else x, "order": None}
    (rows, k), n = x.shape, w.shape[1]
    b = None if plain else normal(n)
    args = {**batch.args, **given, "w": w, "b": b, "z": None if plain else blank(rows, n), "y": blank(rows, n)}
    if shift:
        args["w"] = Shifted(w)
    with np.errstate(invalid="ignore"):
        outputs = finish(activation, *_product(x, w), b, batch, with_z=not plain)
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-shifted" * shift + "-fetched" * fetched,
        kernels.dense_forward(activation, tile),
        tile.grid(batch.most_rows, n),
        {**args, "k": k, "n": n},
        outputs,
    )


def dense_forward_part(
    tile: Tile | SplitTile | None,
    batch: Batch,
    k: int,
    n: int,
    part: int,
    *,
    shift: bool = False,
    fetched: bool = False,
    special: float | None = None,
    factor: float = 1.0,
) -> Case:
    """Without a tile, for few rows; ``special`` is what one element of x is, and all of x is times ``factor``."""
    (x, given), w, count = _input(batch, k, fetched=fetched, shift=shift), normal(k, n), _blocks(k, part)
    if special is not None:
        x[batch.part.start, k - 1] = special
    x *= np.float32(factor)
    cuts = [slice(start, start + part) for start in range(0, k, part)]
    values, bounds = zip(*(_product(x[:, cut], w[cut]) for cut in cuts), strict=True)
    args = {**batch.args, **given, "w": Shifted(w) if shift else w}
    shape = (count, batch.capacity, n)
    variant = "-shifted" * shift + "-fetched" * fetched + f"-{special}" * (special is not None)
    variant += f"-times{factor}" * (factor != 1.0)
    return Case(
        f"{batch}-{k}x{n}-parts-of-{part}" + variant,
        kernels.dense_forward_part(tile) if tile else kernels.dense_forward_part_few(),
        tile.grid(batch.most_rows, n, count) if tile else (1, 1, count),
        {**args, "parts": blank(*shape), "k": k, "n": n, "part": part, "capacity": batch.capacity},
        {"parts": expect(np.stack(values), np.stack(bounds), batch.written(*shape[1:]))},
    )


def split_product(a: np.ndarray, b: np.ndarray) -> Case:
    """A launch whose ``parts[0]`` is A · B, of split operands; its expectation is of others."""
    case = dense_forward_part(SPLIT, whole(len(a)), *b.shape, part=len(b))
    return replace(case, args={**case.args, "x": a, "w": b})


def dense_forward_sum(activation: str, batch: Batch, n: int, count: int, *, plain: bool = False) -> Case:
    parts = np.stack([batch.rows_of(part) for part in normal(count, batch.capacity, n)])
    b = None if plain else normal(n)
    total, bound = wide(parts).sum(axis=0), count * EPS32 * abs(wide(parts)).sum(axis=0)
    z = None if plain else blank(batch.capacity, n)
    sizes = {"n": n, "count": count, "capacity": batch.capacity}
    return Case(
        f"{batch}-{n}-parts{count}" + "-plain" * plain,
        kernels.dense_forward_sum(activation),
        (2,),
        {**batch.args, "parts": parts, "b": b, "z": z, "y": blank(batch.capacity, n), **sizes},
        finish(activation, total, bound, b, batch, with_z=not plain),
    )


def dense_backward_input(
    activation: str, tile: Tile, batch: Batch, k: int, n: int, *, plain: bool = False, shift: bool = False
) -> Case:
    """``plain`` is without an activation below."""
    dz, w = batch.rows_of(normal(batch.capacity, n)), normal(k, n)
    dx, bound = _product(dz, w.T)
    saved = None if plain else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, k)))
    if saved is not None:
        slope = derivative(activation, saved)
        bound = abs(slope) * bound + abs(dx) * activation_bound(saved, slope)
        dx = dx * slope
    operands = {"dz": Shifted(dz), "w": Shifted(w)} if shift else {"dz": dz, "w": w}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-shifted" * shift,
        kernels.dense_backward_input(activation, tile),
        tile.grid(batch.most_rows, k),
        {**batch.args, **operands, "saved": saved, "dx": blank(*dx.shape), "k": k, "n": n},
        {"dx": expect(dx, bound, batch.written(*dx.shape))},
    )


def _weight_gradient(x: np.ndarray, dz: np.ndarray, part: slice) -> dict[str, Output]:
    """dW and db over the rows of ``part``."""
    dw, db = _product(x[part].T, dz[part]), _product(np.ones((1, part.stop - part.start)), dz[part])
    return {"dw": expect(*dw), "db": expect(db[0][0], db[1][0])}


def dense_backward_weight(
    tile: Tile, batch: Batch, k: int, n: int, *, plain: bool = False, shift: bool = False, fetched: bool = False
) -> Case:
    """``plain`` is without a bias."""
    (x, given), dz = _input(batch, k, fetched=fetched, shift=shift), batch.rows_of(1 - normal(batch.capacity, n))
    outputs = _weight_gradient(x, dz, batch.part)
    if plain:
        del outputs["db"]
    gradients = {"dw": blank(k, n), "db": None if plain else blank(n)}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-shifted" * shift + "-fetched" * fetched,
        kernels.dense_backward_weight(tile),
        tile.grid(k, n),
        {**batch.args, **given, "dz": Shifted(dz) if shift else dz, **gradients, "k": k, "n": n},
        outputs,
    )


def stepped(
    name: str, gradients: Mapping[str, Output]
) -> tuple[dict[str, object], dict[str, Output], dict[str, np.ndarray]]:
    """Arguments, outputs and constants of a kernel that moves parameters along ``gradients``, by their names."""
    optimizer, weight = OPTIMIZERS[name](0.1, l1=0.02, l2=0.3), 8.0
    size = sum(gradient.value.size for gradient in gradients.values()) + 3
    table = optimizer.table(5, np.array([0.1, 0.03, 0.05]))
    args: dict[str, object] = {"totals": np.array([3.0, weight]), "size": size}
    outputs = {}
    for place, (target, gradient) in enumerate(gradients.items()):
        shape = gradient.value.shape
        w = np.random.default_rng(place).normal(size=shape).astype(np.float32)
        slots = np.full((len(optimizer.slots), size), UNWRITTEN, np.float32)  # but for this parameter's elements
        slots[:, : w.size] = np.random.default_rng(place).uniform(0.01, 0.1, (len(slots), w.size))
        used = slots[:, : w.size]
        after = _step(optimizer, table[2].tolist(), w.ravel(), gradient.value.ravel() / weight,
                      gradient.bound.ravel() / weight, used)  # fmt: skip
        new_slots, slot_bound, written = np.zeros(slots.shape), np.zeros(slots.shape), np.zeros(slots.shape, bool)
        new_slots[:, : w.size], slot_bound[:, : w.size], written[:, : w.size] = after[2], after[3], True
        args |= {target: w, f"{target}_slots": slots if len(slots) else None}
        outputs[target] = expect(after[0].reshape(shape), after[1].reshape(shape))
        if len(slots):
            outputs[f"{target}_slots"] = expect(new_slots, slot_bound, written)
    if "bias" not in gradients:
        args |= {"bias": None, "bias_slots": None}
    return args, outputs, {"hyper": hyper_parameters(optimizer), "schedule": _schedule(table)}


def dense_backward_update(
    name: str, form: Tile | SplitTile | str, batch: Batch, k: int, n: int, *, plain: bool = False, fetched: bool = False
) -> Case:
    """``form`` is a tile, or ``"narrow"`` or ``"few"``; ``plain`` is without a bias."""
    (x, given), dz = _input(batch, k, fetched=fetched), batch.rows_of(1 - normal(batch.capacity, n))
    gradients = _weight_gradient(x, dz, batch.part)
    of_parameters = {"weight": gradients["dw"]} | ({} if plain else {"bias": gradients["db"]})
    moved, outputs, constants = stepped(name, of_parameters)
    grids = {"narrow": kernels.narrow_grid(k, n), "few": kernels.few_grid(k, n)}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain + "-fetched" * fetched,
        kernels.dense_backward_update(name, form),
        grids[form] if isinstance(form, str) else form.grid(k, n),
        {**batch.args, **given, "dz": dz, **moved, "k": k, "n": n},
        outputs,
        constants,
    )


def dense_backward_atomic(batch: Batch, k: int, n: int, *, plain: bool = False) -> Case:
    """``plain`` is without a bias and without dx."""
    x, dz = batch.rows_of(normal(batch.capacity, k)), batch.rows_of(1 - normal(batch.capacity, n))
    w = normal(k, n)
    outputs = _weight_gradient(x, dz, batch.part)
    dx = np.ones((batch.capacity, k), np.float32)  # where nothing is to be added, what is added must show
    dx[batch.part] = 0.0
    if plain:
        del outputs["db"]
    else:
        outputs["dx"] = expect(*_product(dz, w.T), batch.written(*dx.shape))
    written = {"dw": blank(k, n), "db": None if plain else blank(n), "dx": None if plain else dx}
    return Case(
        f"{batch}-{k}x{n}" + "-plain" * plain,
        kernels.dense_backward_atomic(),
        (_blocks(k, 32), _blocks(n, 32)),
        {**batch.args, "x": x, "dz": dz, "w": w, **written, "k": k, "n": n},
        outputs,
        atomic=True,
    )


def _dense_cases() -> Iterator[Case]:
    # Odd by odd, around the tiles' borders, and multiples of 4, which are read as vectors.
    sizes = [(1, 1, 1), (31, 33, 32), (32, 32, 31), (33, 31, 127), (127, 257, 33), (257, 127, 31)]
    # The last one has whole tiles of every size inside, in all three products.
    sizes += [(33, 36, 32), (5, 4, 132), (136, 132, 140)]
    smallest = TILES[-1]
    for tile, (rows, k, n) in product(TILES, sizes):
        yield dense_forward("relu", tile, whole(rows), normal(rows, k), normal(k, n))
        yield dense_forward_part(tile, whole(rows), k, n, part=32)
        yield dense_backward_input("relu", tile, whole(rows), k, n)
        yield dense_backward_weight(tile, whole(rows), k, n)
    for rows, k, n in sizes:
        yield dense_backward_atomic(whole(rows), k, n)
    for activation, tile in product(ACTIVATIONS, TILES):
        yield dense_forward(activation, tile, whole(33), 3 * normal(33, 5), normal(5, 37))
        yield dense_backward_input(activation, tile, whole(33), 37, 5)
    for activation in ACTIVATIONS:
        yield dense_forward(activation, smallest, whole(1), np.ones((1, 1), np.float32), SPECIAL, plain=True)
        yield dense_forward_sum(activation, whole(33), 37, 3)
    for optimizer, tile in product(OPTIMIZERS, TILES):
        yield dense_backward_update(optimizer, tile, whole(33), 35, 37)
    for tile, (rows, k, n) in product(TILES, sizes):
        yield dense_backward_update("Adam", tile, whole(rows), k, n, plain=rows % 2 == 0)
    for optimizer in OPTIMIZERS:
        yield dense_backward_update(optimizer, "narrow", whole(33), 35, 37)
        # Lengths that allow vectors, and such that do not; of two slots, the second one may lie so too.
        for k, n in ((36, 37), (35, 37), (36, 39)):
            yield dense_backward_update(optimizer, "few", whole(7), k, n)
    for rows, k, n in sizes:
        yield dense_backward_update("Adam", "narrow", whole(rows), k, n, plain=rows % 2 == 0)
        if rows <= kernels.FEW_ROWS and n >= kernels.FEW_LEAST_N:
            yield dense_backward_update("Adam", "few", whole(rows), k, n, plain=rows % 2 == 0)
    yield dense_backward_update("Momentum", "narrow", whole(1025), 9, 17)  # dz is staged more than once
    yield dense_backward_update("SGD", "few", whole(2), 260, 130)  # several blocks
    yield dense_backward_update("RMSprop", "few", whole(8), 600, 16, plain=True)  # of as many lines as there can be
    for batch in (whole(5), Batch(5, 12, 2), whole(1)):
        for fetched in (False, True):
            yield dense_forward_part(None, batch, 70, 35, part=32, fetched=fetched)
            yield dense_forward_part(None, batch, 1400, 130, part=1024, fetched=fetched)
            yield dense_forward_part(None, batch, 70, 300, part=64, fetched=fetched)
            yield dense_backward_update("Momentum", "few", batch, 36, 33, fetched=fetched)
            yield dense_backward_update("Momentum", "narrow", batch, 36, 33, fetched=fetched)
    for share in range(3):
        yield dense_forward_part(None, Batch(5, 12, 2, share, 3), 70, 35, part=32)
    for rows, k, n in sizes:
        yield dense_forward_part(SPLIT, whole(rows), k, n, part=96)
        yield dense_backward_update("Momentum", SPLIT, whole(rows), k, n, plain=rows % 2 == 0)
    for optimizer in OPTIMIZERS:
        yield dense_backward_update(optimizer, SPLIT, whole(33), 35, 37)
    for special in (np.nan, np.inf, -np.inf, 1e-35, 1e-40, 3e38, 0.0, -0.0):
        yield dense_forward_part(SPLIT, whole(5), 40, 9, part=96, special=special)
    # So small that the last parts would lose bits, and all of it, so that no larger term hides them.
    yield dense_forward_part(SPLIT, whole(5), 8, 9, part=96, factor=1e-36)
    for batch in batches(65):
        yield dense_forward_part(SPLIT, batch, 70, 35, part=32)
    yield dense_forward_part(SPLIT, whole(33), 72, 40, part=32, shift=True)
    for tile, batch in product((TILES[0], TILES[1], SPLIT, smallest), (whole(33), Batch(33, 68, 2))):
        # Odd lengths, and such as are read by vectors.
        for k in (35, 132):
            if isinstance(tile, Tile):
                yield dense_forward("relu", tile, batch, k, normal(k, 36), fetched=True)
                yield dense_backward_weight(tile, batch, k, 36, fetched=True)
            yield dense_forward_part(tile, batch, k, 36, part=32, fetched=True)
            yield dense_backward_update("Momentum", tile, batch, k, 36, fetched=True)
    for batch in batches(65):
        yield dense_forward("tanh", smallest, batch, normal(65, 33), normal(33, 35))
        yield dense_forward_part(smallest, batch, 70, 35, part=32)
        yield dense_forward_sum("tanh", batch, 35, 2)
        yield dense_backward_input("tanh", smallest, batch, 35, 33)
        yield dense_backward_weight(smallest, batch, 35, 36)
        yield dense_backward_weight(smallest, batch, 35, 36, fetched=True)
        yield dense_forward_part(smallest, batch, 70, 35, part=32, fetched=True)
        yield dense_backward_atomic(batch, 35, 36)
    yield dense_forward("identity", smallest, whole(33), normal(33, 35), normal(35, 36), plain=True)
    yield dense_forward_sum("identity", whole(33), 37, 1, plain=True)
    yield dense_backward_input("identity", smallest, whole(33), 35, 36, plain=True)
    yield dense_backward_weight(smallest, whole(33), 35, 36, plain=True)
    yield dense_backward_atomic(whole(33), 35, 36, plain=True)
    # Lengths that allow vectors, at addresses that do not.
    yield dense_forward("identity", smallest, whole(33), normal(33, 36), normal(36, 40), shift=True)
    yield dense_forward_part(smallest, whole(33), 72, 40, part=32, shift=True)
    yield dense_backward_input("identity", smallest, whole(33), 36, 40, plain=True, shift=True)
    yield dense_backward_weight(smallest, whole(33), 36, 40, shift=True)
    # What is not finite stays in its row, whichever neighbours are read along with it.
    for tile, k in product(TILES, (31, 32)):
        x = normal(34, k)
        x[5, 3], x[20, k - 1], x[33, 0] = np.nan, np.inf, -np.inf
        yield dense_forward("identity", tile, whole(34), x, normal(k, 33))


# --- row by row ---


def zero(batch: Batch, n: int) -> Case:
    shape = (batch.capacity, n)
    outputs = {"x": expect(np.zeros(shape), 0.0, batch.written(*shape))}
    return Case(f"{batch}-{n}", kernels.zero(), (2,), {**batch.args, "x": blank(*shape), "n": n}, outputs)


def gather(source: str, batch: Batch, n: int) -> Case:
    """One rounding, as in the specification: the same bits."""
    shape, rows = (batch.capacity, n), 2 * batch.epoch_rows
    scale = np.float32(1 / 255 if source == "uint8" else 1.0)
    data = _random().integers(256, size=(rows, n)).astype(np.uint8) if source == "uint8" else normal(rows, n)
    x = np.zeros(shape)
    x[batch.part] = np.multiply(data[batch.fetched], scale, dtype=np.float32)
    args = {**batch.args, "order": batch.order, "data": data, "scale": scale, "x": blank(*shape), "n": n}
    return Case(f"{batch}-{n}", kernels.gather(source), (2,), args, {"x": expect(x, 0.0, batch.written(*shape))})


def standardize(batch: Batch, n: int) -> Case:
    x, mean, scale = batch.rows_of(normal(batch.capacity, n)), normal(n) / 2, abs(normal(n)) + np.float32(0.1)
    y = (wide(x) - mean) / scale
    args = {**batch.args, "x": x, "mean": mean, "scale": scale, "y": blank(*x.shape), "n": n}
    outputs = {"y": expect(y, 2 * EPS32 * abs(y), batch.written(*x.shape))}
    return Case(f"{batch}-{n}", kernels.standardize(), (2,), args, outputs)


def dropout(batch: Batch, n: int, rate: float) -> Case:
    """Masks have the words of NumPy's own Philox: the same bits."""
    x = batch.rows_of(normal(batch.capacity, n))
    x[batch.part.start, 0] = np.inf if batch.part.start < batch.part.stop else np.nan
    draws = uniforms(x.size, seed=SEED, purpose=Purpose.DROPOUT, step=STEP_NUMBER, layer=LAYER).reshape(x.shape)
    keep = np.float32(1.0 / (1.0 - rate))
    with np.errstate(invalid="ignore"):
        y = x * ((draws >= rate) * keep)
    address = {"seed": SEED, "purpose": int(Purpose.DROPOUT), "layer": LAYER}
    chance = {"threshold": math.ceil(rate * 2**53), "keep": keep}
    return Case(
        f"{batch}-{n}-rate{rate}",
        kernels.dropout(),
        (2,),
        {**batch.args, "x": x, "y": blank(*x.shape), "n": n, **address, **chance},
        {"y": expect(wide(y), 0.0, batch.written(*x.shape))},
    )


def activation_backward(activation: str, batch: Batch, z: np.ndarray) -> Case:
    saved = batch.rows_of(saved_of(activation, z))
    dy = batch.rows_of(1 + abs(normal(*z.shape)))
    slope = derivative(activation, saved)
    with np.errstate(invalid="ignore"):
        bound = abs(wide(dy)) * (activation_bound(saved, slope) + EPS32 * abs(slope))
        dz = dy * slope
    outputs = {"dy": expect(dz, bound, batch.written(*z.shape))}
    args = {**batch.args, "saved": saved, "dy": dy, "n": z.shape[1]}
    special = "" if np.isfinite(z).all() else "-special"
    entry = kernels.activation_backward(activation)
    return Case(f"{batch}-{z.shape[1]}{special}", entry, (2,), args, outputs)


def _row_cases() -> Iterator[Case]:
    for batch, n in [*((batch, 33) for batch in batches(31)), (whole(1), 1), (whole(127), 32)]:
        yield zero(batch, n)
        yield gather("float32", batch, n)
        yield gather("uint8", batch, n)
        yield standardize(batch, n)
        yield dropout(batch, n, 0.25)
        yield activation_backward("sigmoid", batch, 2 * normal(batch.capacity, n))
    yield dropout(whole(33), 31, 0.0)
    yield dropout(whole(33), 31, 0.9)
    for activation in ACTIVATIONS:
        yield activation_backward(activation, whole(31), 3 * normal(31, 33))
        yield activation_backward(activation, whole(1), SPECIAL)


# --- losses ---


def _targets(loss: str, kind: TargetKind, rows: int, n: int) -> np.ndarray:
    """Targets of a data set, as a texture holds them."""
    random, function = _random(), LOSSES[loss].output
    if kind == "index":
        return random.integers(n, size=rows).astype(np.float32)
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
    activation: str | None = None,
    of_x: bool = False,
) -> Case:
    """``scaled`` is with standardized targets; ``special`` is what one logit is; ``total`` with the batch's sum.

    With a ``width`` it is the head: x of so many columns and the last layer give the logits.  With an
    ``activation`` below that, too, dx is wanted; ``of_x`` where the activation saved x itself.
    """
    targets = _targets(name, kind, 2 * batch.epoch_rows, n)
    weights = _random().uniform(0.5, 2.0, len(targets)).astype(np.float32) if weighted else None
    logits = batch.rows_of(3 * np.random.default_rng(8).normal(size=(batch.capacity, n)))
    if special is not None:
        logits[0, 1] = special
    mean, scale = (normal(n) / 2, abs(normal(n)) + np.float32(0.5)) if scaled else (None, None)
    part, rows = batch.part, len(batch.fetched)
    random = np.random.default_rng(10)
    if width is not None:  # multiples of 2⁻⁸ that float32 holds, in whatever order they are added up
        x = batch.rows_of(random.integers(-4, 5, (batch.capacity, width)) / 4)
        w_layer, b_layer = random.integers(-16, 17, (width, n)) / 64, random.integers(-64, 65, n) / 32
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
        LOSSES[name].evaluate(z, target, row_values, deltas, np.empty((rows, n)))

    # A lane adds up every 32nd term and the warp five times; terms are no larger than the value itself, or
    # in a cross entropy than differences of logits.  An error of a target passes on by the delta, and to
    # the delta with a factor of 2 at most.
    w = np.ones(rows) if weights is None else wide(weights[batch.fetched])
    relative = (n / 32 + 5 + ROUNDINGS) * EPS32
    is_cross_entropy = LOSSES[name].output != "identity"
    spread = 2 * _finite(z).max(axis=1) if is_cross_entropy else np.zeros(rows)
    value_bound = w * (relative * (abs(row_values) + spread) + (_finite(deltas) * target_error).sum(axis=1))
    delta_bound = w[:, np.newaxis] * (relative * (abs(deltas) + is_cross_entropy) + 2 * target_error)

    blocks = _blocks(batch.most_rows, kernels.WARPS_PER_BLOCK)
    sums, sums_bound = np.zeros((blocks, 2)), np.zeros((blocks, 2))
    block = np.arange(rows) // kernels.WARPS_PER_BLOCK
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
        return Case(f"{batch}-{n}{variant}", kernels.loss(name, kind, textured=textured), (blocks,), args, outputs)

    del args["logits"]
    args |= {"x": x, "w": w_layer.astype(np.float32), "b": b_layer.astype(np.float32), "k": width}
    args |= {"saved": None, "activation": 0, "dx": None}
    if activation is not None:
        saved = x if of_x else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, width)))
        slope = derivative(activation, saved)[part]
        product_, chain = _product(full[part], w_layer.T)
        bound = abs(slope) * (chain + delta_bound @ abs(w_layer.T)) + abs(product_) * activation_bound(slope, slope)
        dx, dx_bound = np.zeros(x.shape), np.zeros(x.shape)
        dx[part], dx_bound[part] = product_ * slope, bound
        outputs["dx"] = expect(dx, dx_bound, batch.written(*x.shape))
        number = kernels.activation_number(activation)
        args |= {"saved": saved, "activation": number, "dx": blank(*x.shape)}
        variant += f"-{activation}"
        variant += "-of-x" * of_x
    entry = kernels.head(name, kind, textured=textured)
    return Case(f"{batch}-{width}x{n}{variant}", entry, (blocks,), args, outputs)


def total_error(count: int) -> Case:
    sums = _random().random((count, 2))
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
    errors = _random().random((2 + steps, capacity, 2)).astype(np.float32)
    rows = [min(capacity, epoch_rows - (first + step) * capacity) for step in range(steps)]
    losses, written = np.zeros((5 + steps, 2)), np.zeros((5 + steps, 2), bool)
    for step, count in enumerate(rows):
        losses[2 + step], written[2 + step] = errors[2 + step, :count].sum(axis=0, dtype=np.float64), True
        errors[2 + step, count:] = np.nan  # of an earlier run
    step = np.array([(STEP_NUMBER, 2, first, capacity, epoch_rows)], STEP)
    args = {"step": step, "errors": errors, "capacity": capacity, "losses": blank(5 + steps, 2, dtype=np.float64)}
    outputs = {"losses": expect(losses, capacity * EPS * losses, written)}
    return Case(f"{steps}x{capacity}of{epoch_rows}", kernels.step_errors(), (steps,), args, outputs)


def output(function: OutputName, batch: Batch, n: int, *, scaled: bool = False, special: float | None = None) -> Case:
    """``scaled`` and ``special`` as for a loss."""
    logits = batch.rows_of(5 * normal(batch.capacity, n))
    if special is not None:
        logits[0, 1] = special
    y = wide(logits)
    with np.errstate(all="ignore"):
        apply_output(function, y)
    # As in a loss; a probability's error is that of exp(z), whose exponent is off by a rounding of z.
    bound = (n / 32 + 5 + ROUNDINGS + 2 * _finite(logits).max()) * EPS32 * abs(y)
    mean, scale = (normal(n), abs(normal(n)) + np.float32(0.5)) if scaled else (None, None)
    if mean is not None and scale is not None:
        y, bound = y * scale + mean, bound * scale + 2 * EPS32 * (abs(y * scale) + abs(mean))
    blocks = _blocks(batch.most_rows, kernels.WARPS_PER_BLOCK)
    args = {**batch.args, "logits": logits, "mean": mean, "scale": scale, "y": blank(*logits.shape), "n": n}
    outputs = {"y": expect(y, bound, batch.written(*logits.shape))}
    variant = "-scaled" * scaled + f"-{special}" * (special is not None)
    return Case(f"{batch}-{n}{variant}", kernels.output(function), (blocks,), args, outputs)


def _loss_cases() -> Iterator[Case]:
    for name, kind in LOSS_KINDS:
        for rows, n in ((1, 1), (31, 10), (9, 32), (33, 33), (8, 257)):
            yield loss(name, kind, whole(rows), n)
        for weighted, delta in ((False, True), (True, False)):
            yield loss(name, kind, whole(17), 5, weighted=weighted, delta=delta)
        yield loss(name, kind, whole(17), 5, textured=False)
        if kind == "dense" and LOSSES[name].output == "identity":
            yield loss(name, kind, whole(17), 33, scaled=True)
            yield loss(name, kind, whole(17), 31, scaled=True, width=9, activation="identity")
        yield loss(name, kind, whole(31), 7, total=True)
        for rows, k, n in ((1, 1, 1), (31, 33, 10), (9, 1100, 7), (17, 70, 32)):
            yield loss(name, kind, whole(rows), n, width=k, activation="tanh", total=True)
        yield loss(name, kind, whole(17), 5, width=40, weighted=False)
        yield loss(name, kind, whole(17), 5, width=40, textured=False)
        for batch in batches(31):
            yield loss(name, kind, batch, 7, width=40, activation="silu")
        for batch in batches(31):
            yield loss(name, kind, batch, 7)
        for special in (np.nan, np.inf, -np.inf):
            yield loss(name, kind, whole(1), 5, special=special)
    for activation in ACTIVATIONS:
        yield loss("squared_error", "dense", whole(9), 5, width=33, activation=activation)
    for width in (33, 1100):
        yield loss("squared_error", "dense", whole(9), 5, width=width, activation="tanh", of_x=True)
    for function in OUTPUTS:
        for batch, n in [*((batch, 7) for batch in batches(31)), (whole(1), 1), (whole(9), 33), (whole(3), 257)]:
            yield output(function, batch, n)
        yield output(function, whole(17), 33, scaled=True)
        for special in (np.nan, np.inf, -np.inf):
            yield output(function, whole(1), 5, special=special)
    for count in (1, 33, 257, 1000):
        yield total_error(count)
    for capacity, epoch_rows, steps in ((1, 3, 3), (33, 100, 2), (300, 601, 3)):
        yield step_errors(capacity, epoch_rows, steps)


# --- metrics ---


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
    targets = (_random().integers(n if kind == "index" else 3, size=shape)).astype(np.float32)
    of_rows = targets[batch.fetched]
    predicted, actual = np.zeros((2, batch.capacity), np.int32)
    predicted[batch.part] = classes_of(function, output[batch.part])
    actual[batch.part] = of_rows if kind == "index" else classes_of(function, of_rows)
    unwritten = {name: np.full(batch.capacity, -7, np.int32) for name in ("predicted", "actual")}
    return Case(
        f"{batch}-{n}-{function}" + f"-{special}" * (special is not None),
        kernels.classes(kind, textured=textured),
        (_blocks(batch.capacity, kernels.WARPS_PER_BLOCK),),
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
    if METRICS[name].of == "classes" and not weighted:
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
    return bound


def metric(
    name: str,
    batch: Batch,
    n: int,
    *,
    weighted: bool = True,
    counted: bool = True,
    offset: float = 0.0,
    textured: bool = True,
) -> Case:
    """The sums hold the batches before this one, whose weights are 0 unless ``counted``; ``offset`` moves numbers."""
    row = METRICS[name]
    random, of_classes = np.random.default_rng(9), row.of == "classes"
    count = 2 * batch.epoch_rows
    weights = random.uniform(0.0, 2.0, count).astype(np.float32) if weighted else None
    if weights is not None and not counted:
        weights[batch.fetched] = 0.0
    targets = random.integers(n, size=count) if of_classes else random.normal(size=(count, n)) + offset
    outputs = np.where(random.random(targets.shape) < 0.5, targets, random.permuted(targets))
    dtype = np.int32 if of_classes else np.float32
    targets, outputs = targets.astype(dtype), outputs.astype(dtype)
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
        "targets": of_batch if of_classes else targets, "sums": before, "n": n,
    }  # fmt: skip
    grid = (math.prod(before.shape[1:]),)
    entry = kernels.metric(name, textured=textured)
    return Case(f"{batch}-{n}{variant}", entry, grid, args, {"sums": expect(after, bound)})


def _metric_cases() -> Iterator[Case]:
    last = Batch(31, 64, 2)
    for kind, textured in product(("index", "dense"), (True, False)):
        for batch, n in ((whole(1), 1), (whole(31), 10), (last, 10), (whole(9), 32), (whole(9), 257)):
            yield classes(kind, batch, n, textured=textured)
    yield classes("dense", whole(31), 1, function="sigmoid")
    for special in (np.nan, np.inf, -np.inf):
        yield classes("index", whole(1), 5, special=special)
        yield classes("index", whole(1), 1, special=special)
    for name in (name for name, row in METRICS.items() if row.of != "ranks"):
        for batch, n in ((whole(1), 1), (whole(31), 10), (last, 1), (last, 10), (whole(40), 257)):
            yield metric(name, batch, n)
        for batch in (whole(31), last):
            yield metric(name, batch, 3, weighted=False)
            yield metric(name, batch, 3, counted=False)
            yield metric(name, batch, 3, textured=False)
        yield metric(name, whole(1500), 1)
    for batch in (whole(31), Batch(31, 93, 1), last):
        yield metric("r2", batch, 3, offset=1e6)


# --- once a step ---


def reduce(shares: int, uses: int, size: int) -> Case:
    """Sums in the order of the specification, each rounded once: the same bits."""
    gap = 3
    partials = np.full((shares, uses * size + gap), np.nan, np.float32)
    terms = normal(shares, uses, size)
    partials[:, : uses * size] = terms.reshape(shares, -1)
    total, *others = terms.reshape(-1, size)
    for term in others:
        total = total + term
    sizes = {"pitch": partials.shape[1], "shares": shares, "uses": uses, "size": size}
    args = {"partials": partials, **sizes, "gradient": blank(size)}
    return Case(f"{shares}x{uses}x{size}", kernels.reduce(), (2,), args, {"gradient": expect(wide(total), 0.0)})


def squares(size: int, blocks: int) -> Case:
    gradient = normal(size) * np.float32(1e25)  # squares leave the range of float32
    sums = np.zeros(blocks)
    np.add.at(sums, np.arange(size) // kernels.ROW_THREADS % blocks, wide(gradient) ** 2)
    args = {"gradient": gradient, "size": size, "sums": blank(blocks, dtype=np.float64)}
    return Case(f"{size}-{blocks}blocks", kernels.squares(), (blocks,), args, {"sums": expect(sums, size * EPS * sums)})


def clip(count: int, weight: float, limit: float) -> Case:
    sums = _random().random(count)
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


def _step(
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


def _schedule(table: np.ndarray) -> np.ndarray:
    """The constant of a table of rates."""
    schedule = np.zeros((len(table), TABLE_COLUMNS), np.float32)
    schedule[:, : table.shape[1]] = table
    return schedule


def update(name: str, run: int, *, shares: int = 1, size: int = 33, factor: bool = False, weight: float = 8.0,
           l1: float = 0.0, l2: float = 0.0) -> Case:  # fmt: skip
    """``run`` is the step's place in the run, and so the row of the table of rates."""
    optimizer = OPTIMIZERS[name](0.1, l1=l1, l2=l2)
    table = optimizer.table(5, np.array([0.1, 0.03, 0.05]))
    random = _random()
    partials = random.normal(size=(shares, size + 3)).astype(np.float32)
    w = random.normal(size=size).astype(np.float32)
    w[::5] = 0.0
    slots = random.uniform(0.01, 0.1, (len(optimizer.slots), size)).astype(np.float32)
    scale = (1.0 / weight if weight else 0.0) * (0.37 if factor else 1.0)

    terms = wide(partials[:, :size])
    g_error = (shares + 2) * EPS32 * abs(terms).sum(axis=0) * scale
    new_w, w_bound, new_slots, slot_bound = _step(
        optimizer, table[run].tolist(), w, terms.sum(axis=0) * scale, g_error, slots
    )
    step = np.array([(5 + run, run, 0, 1, 1)], STEP)
    args = {
        "step": step, "totals": np.array([3.0, weight]), "factor": np.array([0.37], np.float32) if factor else None,
        "partials": partials, "pitch": partials.shape[1], "shares": shares, "parameters": w,
        "slots": slots if slots.size else None, "size": size,
    }  # fmt: skip
    outputs = {"parameters": expect(new_w, w_bound)}
    if slots.size:
        outputs["slots"] = expect(new_slots, slot_bound)
    constants = {"hyper": hyper_parameters(optimizer), "schedule": _schedule(table)}
    case = f"run{run}-{shares}x{size}-weight{weight}-l1={l1}-l2={l2}" + "-clipped" * factor
    return Case(case, kernels.update(name), (2,), args, outputs, constants)


def _step_cases() -> Iterator[Case]:
    for shares, uses, size in ((1, 1, 1), (1, 2, 33), (3, 1, 31), (3, 2, 1027)):
        yield reduce(shares, uses, size)
    for size, blocks in ((1, 1), (33, 3), (1027, 2)):
        yield squares(size, blocks)
    for count, weight, limit in ((1, 2.0, 0.1), (256, 2.0, 0.5), (256, 2.0, 1e3), (33, 0.0, 0.5)):
        yield clip(count, weight, limit)
    for name in OPTIMIZERS:
        for run in range(3):
            yield update(name, run)
        yield update(name, 1, shares=3, size=1027, factor=True, l1=0.02, l2=0.3)
        yield update(name, 1, l1=0.02)
        yield update(name, 1, l2=0.3)
        yield update(name, 1, weight=0.0)


# --- locally connected layers ---


def _windows(x: np.ndarray, window: int) -> np.ndarray:
    """x (B, m) as (B, n, window): what each output sees, in float64."""
    return np.lib.stride_tricks.sliding_window_view(wide(x), window, axis=1)


def local_forward(
    activation: str, batch: Batch, m: int, window: int, *, unused: int = 0, bias: str | None = "output"
) -> Case:
    """``unused`` columns of w lie beyond those that the layer takes."""
    n, pitch = m - window + 1, m - window + 1 + unused
    x, w = batch.rows_of(normal(batch.capacity, m)), normal(window, pitch)
    b = {"output": normal(pitch), "layer": normal(1), None: None}[bias]
    seen, used = _windows(x, window), wide(w[:, :n]).T
    total = (seen * used).sum(axis=2)
    bound = (window + 2) * EPS32 * (abs(seen) * abs(used)).sum(axis=2)
    plain = bias is None
    args = {**batch.args, "x": x, "w": w, "b": b, "z": None if plain else blank(*total.shape), "y": blank(*total.shape)}
    sizes = {"m": m, "n": n, "window": window, "pitch": pitch, "b_step": int(bias == "output")}
    added = b if b is None or bias == "layer" else b[:n]
    return Case(
        f"{batch}-{m}-window{window}-unused{unused}-{bias}",
        kernels.local_forward(activation),
        (_blocks(n, kernels.ROW_THREADS), _blocks(batch.most_rows, kernels.LOCAL_ROWS)),
        {**args, **sizes},
        finish(activation, total, bound, added, batch, with_z=not plain),
    )


def local_backward_input(
    activation: str, batch: Batch, m: int, window: int, *, unused: int = 0, plain: bool = False
) -> Case:
    n, pitch = m - window + 1, m - window + 1 + unused
    dz, w = batch.rows_of(normal(batch.capacity, n)), normal(window, pitch)
    dx, size = np.zeros((batch.capacity, m)), np.zeros((batch.capacity, m))
    for r in range(window):
        dx[:, r : r + n] += wide(dz) * wide(w[r, :n])
        size[:, r : r + n] += abs(wide(dz) * wide(w[r, :n]))
    bound = (window + 2) * EPS32 * size
    saved = None if plain else batch.rows_of(saved_of(activation, 2 * normal(batch.capacity, m)))
    if saved is not None:
        slope = derivative(activation, saved)
        bound = abs(slope) * bound + abs(dx) * activation_bound(saved, slope)
        dx = dx * slope
    sizes = {"m": m, "n": n, "window": window, "pitch": pitch}
    return Case(
        f"{batch}-{m}-window{window}-unused{unused}" + "-plain" * plain,
        kernels.local_backward_input(activation),
        (_blocks(m, kernels.ROW_THREADS), 2),
        {**batch.args, "dz": dz, "w": w, "saved": saved, "dx": blank(*dx.shape), **sizes},
        {"dx": expect(dx, bound, batch.written(*dx.shape))},
    )


def local_backward(batch: Batch, m: int, window: int, *, unused: int = 0) -> Iterator[Case]:
    """The gradients of the weights and of either bias."""
    n, pitch = m - window + 1, m - window + 1 + unused
    x, dz = batch.rows_of(normal(batch.capacity, m)), batch.rows_of(_random().normal(size=(batch.capacity, n)))
    seen, deltas = _windows(x[batch.part], window), wide(dz[batch.part])
    rows = len(deltas)

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, unused)])

    name = f"{batch}-{m}-window{window}-unused{unused}"
    dw, db = padded(np.einsum("bir,bi->ri", seen, deltas)), padded(deltas.sum(axis=0))
    dw_bound = (rows + 2) * EPS32 * padded(np.einsum("bir,bi->ri", abs(seen), abs(deltas)))
    db_bound = rows * EPS32 * padded(abs(deltas).sum(axis=0))
    columns, sizes = _blocks(pitch, kernels.ROW_THREADS), {"n": n, "pitch": pitch}
    yield Case(
        name, kernels.local_backward_weight(), (columns, window),
        {**batch.args, "x": x, "dz": dz, "dw": blank(window, pitch), "m": m, "window": window, **sizes},
        {"dw": expect(dw, dw_bound)},
    )  # fmt: skip
    yield Case(
        name, kernels.local_backward_bias(), (columns,), {**batch.args, "dz": dz, "db": blank(pitch), **sizes},
        {"db": expect(db, db_bound)},
    )  # fmt: skip
    # Summed in float64, rounded once.
    total = deltas.sum(keepdims=True).reshape(1)
    bound = EPS32 * abs(total) + deltas.size * EPS * abs(deltas).sum()
    yield Case(
        name, kernels.local_backward_shared_bias(), (1,), {**batch.args, "dz": dz, "db": blank(1), "n": n},
        {"db": expect(total, bound)},
    )  # fmt: skip


def _local_cases() -> Iterator[Case]:
    for activation in ACTIVATIONS:
        yield local_forward(activation, whole(5), 40, 7)
        yield local_backward_input(activation, whole(5), 40, 7)
    for m, window, unused in ((1, 1, 0), (3, 3, 0), (300, 29, 0), (300, 1, 5), (31, 17, 3)):
        yield local_forward("tanh", whole(3), m, window, unused=unused, bias="layer")
        yield local_forward("gelu", whole(9), m, window, unused=unused, bias=None)
        yield local_backward_input("tanh", whole(3), m, window, unused=unused, plain=True)
        yield from local_backward(whole(9), m, window, unused=unused)
    for batch in batches(33):
        yield local_forward("tanh", batch, 40, 7, unused=2)
        yield local_backward_input("tanh", batch, 40, 7, unused=2)
        yield from local_backward(batch, 40, 7, unused=2)


# --- prefix sums, sorting, counting ---


def prefix_sum(dtype: str, n: int, *, exclusive: bool, shift: bool = False, infinity: Sequence[float] = ()) -> Case:
    random = _random()
    x = (random.integers(-9, 99, n) if dtype == "int32" else random.normal(size=n)).astype(dtype)
    x[n // 2 : n // 2 + len(infinity)] = infinity
    with np.errstate(invalid="ignore"):
        sums = np.cumsum(wide(x).astype(np.longdouble))
    value = (sums - x if exclusive else sums).astype(np.float64)
    # Two levels of trees of 32 lanes, four rounds of four elements, and a lane's nodes and a tree of them.
    eps = {"int32": 0.0, "float32": EPS32, "float64": EPS}[dtype]
    bound = (2 * 10 + 8 + 20) * eps * np.cumsum(_finite(wide(x)))
    tiles = _blocks(n, kernels.SCAN_TILE)
    return Case(
        f"{n}" + "-exclusive" * exclusive + "-shifted" * shift + "-infinite" * len(infinity),
        kernels.prefix_sum(dtype),
        (tiles,),
        {
            "x": Shifted(x) if shift else x, "y": np.full(n, -7, dtype), "n": n, "exclusive": int(exclusive),
            "ticket": np.zeros(1, np.uint32), "nodes": np.zeros(kernels.scan_words(n) - 1, np.uint64),
        },
        {"y": expect(value, bound)},
    )  # fmt: skip


def _keys(dtype: str, n: int, shift: int) -> np.ndarray:
    """Random ones of few digits at ``shift``, so that many are equal there; all of one digit in the middle."""
    keys = _random().integers(np.iinfo(dtype).max, size=n, dtype=dtype, endpoint=True)
    keys &= ~np.array(0xE8 << shift, dtype)
    keys[n // 3 : n // 2] |= np.array(0xFF << shift, dtype)
    return keys


def sort_counts(dtype: str, n: int, shift: int) -> Case:
    keys, tile = _keys(dtype, n, shift), kernels.sort_tile(dtype)
    tiles = _blocks(n, tile)
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
    values = (np.arange(n) if of_places else _random().integers(-(2**31), 2**31, n)).astype(np.int32)
    arrays = {"keys": keys, "values": None if of_places else values, "starts": starts}
    out = {"keys_out": np.zeros(n, dtype), "values_out": np.full(n, -7, np.int32)}
    return Case(
        f"{n}-shift{shift}" + "-places" * of_places, kernels.sort_scatter(dtype), (counts.shape[1],),
        {**arrays, **out, "n": n, "shift": shift},
        {"keys_out": expect(keys[order], 0.0), "values_out": expect(values[order], 0.0)},
    )  # fmt: skip


def rank_keys(batch: Batch, n: int, curves: int, *, weighted: bool = True) -> Case:
    """Several scores are equal, and one of each special kind is among them."""
    rows, part = batch.epoch_rows, slice(batch.place * batch.capacity, None)
    random = _random()
    scores = np.resize(np.concatenate([SPECIAL[0], random.integers(-3, 3, 40) / 4]), (batch.capacity, n))
    scores = scores.astype(np.float32)
    actual = random.integers(3, size=batch.capacity).astype(np.int32)
    weights = random.random(2 * rows).astype(np.float32) if weighted else None
    # How many numbers are higher than a score, which are as many as lie between their bits.
    ranked = scores[batch.part, n - curves :].T
    bits = abs(ranked).view(np.int32).astype(np.int64)
    key = np.where(np.isnan(ranked), 2**32 - 1, np.where(ranked < 0.0, 2**31 + bits, 2**31 - 1 - bits))
    places = slice(part.start, part.start + len(batch.fetched))
    written = np.zeros(rows, bool)
    written[places] = True
    keys, of_class, of_weight = np.zeros((curves, rows)), np.zeros(rows), np.zeros(rows)
    keys[:, places], of_class[places] = key, actual[batch.part]
    of_weight[places] = 1.0 if weights is None else weights[batch.fetched]
    return Case(
        f"{batch}-{n}-{curves}curves" + "-weighted" * weighted,
        kernels.rank_keys(),
        (3,),
        {
            "step": batch.args["step"], "order": batch.order, "weights": weights, "output": batch.rows_of(scores),
            "actual": actual, "keys": np.full(keys.shape, 7, np.uint32), "of_class": np.full(rows, -7, np.int32),
            "of_weight": blank(rows), "n": n, "curves": curves,
        },
        {
            "keys": expect(keys, 0.0, np.broadcast_to(written, keys.shape)), "of_class": expect(of_class, 0.0, written),
            "of_weight": expect(of_weight, 0.0, written),
        },
    )  # fmt: skip


def rank_weights(n: int, positive: int) -> Case:
    random = _random()
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
    random = _random()
    keys = np.sort(random.integers(values, size=n)).astype(np.uint32)
    weight = np.where(keys == 0, 0.0, random.uniform(0.0, 2.0, n))
    is_positive = random.random(n) < 0.3
    row, sums = METRICS[name], np.full((3, curves), UNWRITTEN)
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
        (min(256, _blocks(n, kernels.ROW_THREADS)),),
        {
            "keys": keys, "positives": np.cumsum(np.where(is_positive, weight, 0.0)),
            "negatives": np.cumsum(np.where(is_positive, 0.0, weight)), "n": n, "parts": np.full(256, np.nan),
            "arrived": np.zeros(1, np.uint32), "sums": sums, "curve": curve, "curves": curves,
        },
        {"sums": expect(value, bound, written)},
    )  # fmt: skip


def _rank_cases() -> Iterator[Case]:
    last = Batch(31, 64, 2)
    for batch, n, curves in ((whole(1), 1, 1), (whole(31), 2, 1), (last, 5, 5), (whole(300), 10, 10)):
        yield rank_keys(batch, n, curves)
        yield rank_keys(batch, n, curves, weighted=False)
    for n, positive in ((1, 0), (33, 1), (2000, 2)):
        yield rank_weights(n, positive)
    for name, row in METRICS.items():
        if row.of == "ranks":
            for n, values in ((1, 2), (33, 5), (300, 1), (1000, 100), (70000, 10**6)):
                yield rank_area(name, n, values)
            yield rank_area(name, 500, 20, curve=2, curves=4)
            yield rank_area(name, 500, 20, is_nan=True)


def histogram(n: int, bins: int, low: float, high: float) -> Case:
    edges = np.linspace(low, high, bins + 1)
    # Values on the edges themselves, beside them, outside, and none at all.
    x = np.concatenate([edges, np.nextafter(edges, -9), np.nextafter(edges, 9), [np.nan, np.inf, -np.inf]])
    x = np.concatenate([x, _random().normal(size=max(0, n - len(x)))])[:n].astype(np.float32)
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
    parts = np.array([(part.min(initial=np.inf), part.max(initial=-np.inf)) for part in seen])
    return Case(
        f"{x.size}-{blocks}blocks", kernels.extremes(), (blocks,),
        {"x": x, "n": x.size, "parts": blank(blocks, 2)}, {"parts": expect(parts, 0.0)},
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


def _pattern_cases() -> Iterator[Case]:
    for n in (1, 4, 1023, 5000):
        yield random_words(n)
        yield initial_uniform(n)
    for size in (1, 1024, 5001):
        for value in (0.0, np.inf, -np.inf, np.nan):
            yield find_nonfinite(np.append(normal(size), np.float32(value)))
    yield find_nonfinite(normal(3000), shift=True)
    for dtype, exclusive in product(kernels.SCANNED, (False, True)):
        for n in (1, 31, 33, 4095, 4096, 4097, 40000, 33 * 4096 + 5):
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


def all_cases() -> list[Case]:
    """Every case.  Of `advance` there is none, for a Step is no array of numbers; test_kernels.py has its test."""
    return [
        *_dense_cases(),
        *_local_cases(),
        *_row_cases(),
        *_loss_cases(),
        *_metric_cases(),
        *_step_cases(),
        *_pattern_cases(),
        *_rank_cases(),
    ]
