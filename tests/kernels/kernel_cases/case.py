"""What a case is, the shard of a batch that it runs on, and what activations and products are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from typing import Any

import numpy as np
from helpers import EPS32

from mlpgpu.activations import ACTIVATIONS
from mlpgpu.backends.constants import hyper_parameters, loss_numbers
from mlpgpu.backends.cuda.kernels import Entry
from mlpgpu.backends.cuda.run.steps import STEP, TABLE_COLUMNS
from mlpgpu.losses import Loss
from mlpgpu.optimizers import Optimizer

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
    """Components (components, rows, columns) given as the copy engine's map of them, for boxes of (rows, columns)."""

    array: np.ndarray
    box: tuple[int, int]


def followed_by_components(value: Mapped) -> np.ndarray:
    """A map as shim/hopper.h reads it: components, rows, columns, pitch, rows and columns of boxes; then the
    components themselves."""
    components, rows, columns = value.array.shape
    words = np.zeros(16, np.uint64)
    words[:6] = components, rows, columns, columns, *value.box
    return np.concatenate([words.view(np.uint16), value.array.ravel()])


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


class Deferred(Mapping):
    """A mapping that is made when somebody first looks into it."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def deferred(make: Callable[..., Iterator[Any]]) -> Callable[..., Case]:
    """A maker of cases that yields name, entry and grid, by which tests are collected; and then, when the case is run,
    its arguments, outputs and constants."""

    @wraps(make)
    def case(*args: Any, **kwargs: Any) -> Case:
        steps = make(*args, **kwargs)
        name, entry, grid = next(steps)
        contents = cache(lambda: next(steps))
        parts = (Deferred(lambda part=part: contents()[part]) for part in range(3))
        return Case(name, entry, grid, *parts)

    return case


def blank(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """An output before the launch."""
    return np.full(shape, UNWRITTEN, dtype)


def expect(value: np.ndarray, bound: np.ndarray | float, written: np.ndarray | bool = True) -> Output:
    """An output; what is not finite must be met exactly."""
    bound = np.where(np.isfinite(value), np.broadcast_to(bound, value.shape), 0.0)
    return Output(value, bound, np.broadcast_to(written, value.shape))


@dataclass(frozen=True)
class Batch:
    """One shard of one batch; the capacity is that of a full batch."""

    capacity: int
    epoch_rows: int
    place: int = 0  # of the batch in the epoch
    shard: int = 0
    shards: int = 1

    @property
    def part(self) -> slice:
        """The shard's rows of the batch."""
        rows = min(self.capacity, self.epoch_rows - self.place * self.capacity)
        return slice(rows * self.shard // self.shards, rows * (self.shard + 1) // self.shards)

    @property
    def args(self) -> dict[str, object]:
        step = np.array([(STEP_NUMBER, 2, self.place, self.capacity, self.epoch_rows)], STEP)
        return {"step": step, "shard": self.shard, "shards": self.shards}

    @property
    def most_rows(self) -> int:
        """The rows that a grid is made for."""
        return -(-self.capacity // self.shards)

    @property
    def order(self) -> np.ndarray:
        """Rows of a data set twice as large, (epoch_rows,) int32."""
        return generator().permutation(2 * self.epoch_rows)[: self.epoch_rows].astype(np.int32)

    @property
    def fetched(self) -> np.ndarray:
        """The data set's rows that this shard is made of."""
        start = self.place * self.capacity
        return self.order[start : start + self.capacity][self.part]

    def rows_of(self, array: np.ndarray) -> np.ndarray:
        """``array`` (B, …) with NaN in rows of other shards, in float32."""
        result = np.full(array.shape, np.nan, np.float32)
        result[self.part] = array[self.part]
        return result

    def written(self, *shape: int) -> np.ndarray:
        """Whether an element of an output (B, …) belongs to this shard's rows."""
        mask = np.zeros(shape, bool)
        mask[self.part] = True
        return mask

    def __str__(self) -> str:
        shard = f"-shard{self.shard}of{self.shards}" if self.shards > 1 else ""
        return f"{self.part.stop - self.part.start}rows{shard}" + "-last" * (self.place > 0)


def whole(rows: int) -> Batch:
    """A batch in one shard."""
    return Batch(rows, rows)


def batches(rows: int) -> list[Batch]:
    """A batch whole and in three shards; and the epoch's last one, two rows, of which one shard gets none."""
    shards = range(3)
    thirds = [Batch(rows, rows, shard=shard, shards=3) for shard in shards]
    last = [Batch(rows, 2 * rows + 2, 2, shard, 3) for shard in shards]
    return [whole(rows), *thirds, *last]


# By the number of components of bfloat16: by how many binades each component's numbers are larger than what they stand
# for beside those of the component before; and what all may be off by of a number.
BFLOAT16_SHIFTS = {1: 0, 2: 7, 3: 0}
BFLOAT_ERRORS = {1: 2.0**-8, 2: 2.0**-17, 3: 2.0**-24}


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def bfloat16_words(x: np.ndarray, components: int) -> np.ndarray:
    """The words (P, …) of so many components of bfloat16."""
    words, rest = [], np.ascontiguousarray(x, np.float32)
    for _ in range(components - 1):
        word = bfloat16_bits(rest)
        word = np.where(np.isfinite(rest) & (word & 0x7FFF == 0x7F80), rest.view(np.uint32) >> 16, word)
        words.append(word.astype(np.uint16))
        with np.errstate(invalid="ignore"):
            left = (wide(rest) - bfloat16_values(words[-1])) * 2.0 ** BFLOAT16_SHIFTS[components]
        rest = np.where(np.isfinite(rest), left, 0.0).astype(np.float32)
    return np.stack([*words, bfloat16_bits(rest)])


def joined(words: np.ndarray) -> np.ndarray:
    """What the words (P, …) of components of bfloat16 stand for."""
    shift = BFLOAT16_SHIFTS[len(words)]
    return sum(bfloat16_values(component) * 2.0 ** (-shift * p) for p, component in enumerate(words))


def together(words: np.ndarray) -> np.ndarray:
    """What words (P, …) stand for, in the place of the first component, and 0 in those of the others."""
    return np.stack([joined(words), *np.zeros(words[1:].shape)])


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return generator().normal(size=shape).astype(np.float32)


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def magnitude(array: np.ndarray) -> np.ndarray:
    """Magnitudes, 0 for what is not finite."""
    return np.nan_to_num(abs(array), nan=0.0, posinf=0.0)


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


def chained(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A · B in float64, and the bound of a chain in float32: (k + 2) · eps · |A| · |B|."""
    a, b = wide(a), wide(b)
    with np.errstate(invalid="ignore"):
        return a @ b, (a.shape[1] + 2) * EPS32 * (abs(a) @ abs(b))


def constants_of(optimizer: Optimizer, table: np.ndarray, loss: Loss | None = None) -> dict[str, np.ndarray]:
    """The constant variables of math/optimizers.cuh, for a table of rates, and with a loss that of math/losses.cuh."""
    schedule = np.zeros((len(table), TABLE_COLUMNS), np.float32)
    schedule[:, : table.shape[1]] = table
    numbers = {} if loss is None else {"loss_numbers": loss_numbers(loss)}
    return {"hyper": hyper_parameters(optimizer), "schedule": schedule, **numbers}
