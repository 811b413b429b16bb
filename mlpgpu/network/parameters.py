"""The values of a network's parameters: who has them, and how they are read and set by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..backends import Inference, Program, State, square_sum
from ..datasets.arrays import as_array
from ..errors import ConfigurationError, DataError, DtypeError, ShapeError, lookup, room_for, shown
from ..initializers import initial_values
from ..locks import GroupLock
from ..plan import Parameter, Segment


class Owner(Protocol):
    """What may have the parameters: a program, or a file."""

    @property
    def is_readable_while_running(self) -> bool:
        """As a program has it."""

    def read_parameters(self) -> np.ndarray:
        """All of them, (P,)."""

    def is_finite(self) -> bool:
        """Whether each of them is a finite number."""

    def square_sum(self, parts: Sequence[slice]) -> float:
        """The sum of the squares of these parts of them, (P,)."""


class FlatParameters:
    """All parameters of a network as one flat array, (P,), which one owner has at a time.

    - At first nobody has them: they are the initial values of the network's seed, drawn when somebody asks.
      So a card can draw those of a network that the host has no room for.
    - A program that trains the network owns them from :meth:`give_to` on.  It is asked for them when they
      are read, and what it answered is kept here until it goes on :meth:`changing` them.
    - Otherwise the network has them, as an array.  Setting them takes them from a program.

    This class alone decides who is asked, and each method leaves owner and values in agreement, whichever threads
    call at once: a lock is held while one is under way.  While a program changes them, others read those of its last
    finished step if it can be read meanwhile, and otherwise wait until it ends.

    Attributes:
        segments: where each parameter lies, by name.
        dtype: float32, or float64 once a program in that precision had them.
        version: a number that they had never before, or None while a program changes them.
    """

    def __init__(self, parameters: tuple[Parameter, ...], seed: int) -> None:
        self.segments: Mapping[str, Segment] = {parameter.name: parameter for parameter in parameters}
        self.dtype = np.dtype(np.float32)
        self.version: int | None = 0
        self._parameters, self._seed = parameters, seed
        self._values: np.ndarray | None = None  # (P,)
        self._owner: Owner | None = None
        self._lock = GroupLock()
        self._versions = itertools.count(1)

    @property
    def is_new(self) -> bool:
        """Whether they are the initial values, and nobody has asked for them yet."""
        return self._values is None and self._owner is None

    def is_owned_by(self, owner: Owner) -> bool:
        """Whether nobody took or set them since they were given to ``owner``."""
        return self._owner is owner

    def read(self) -> np.ndarray:
        """The current values, (P,), not to be written to."""
        with self._lock.held():
            return self._read()

    def _read(self) -> np.ndarray:
        if self._values is not None:
            return self._values
        values = _frozen(self._draw() if self._owner is None else self._owner.read_parameters())
        if self.version is not None:  # else the next step makes others of them
            self._values = values
        return values

    def _draw(self) -> np.ndarray:
        with room_for("the layers' parameters", "narrower layers have fewer"):
            return self._drawn()

    def _drawn(self) -> np.ndarray:
        drawn = (
            initial_values(p.initializer, p.shape, p.fans, seed=self._seed, layer=p.layer, purpose=p.purpose)
            for p in self._parameters
        )
        return np.concatenate([values.ravel().astype(np.float32) for values in drawn])

    def is_finite(self) -> bool:
        """Whether each of them is a finite number; a program finds out where they lie."""
        with self._lock.held():
            return self._is_finite()

    def _is_finite(self) -> bool:
        if self._owner is not None:
            return self._owner.is_finite()
        return self.is_new or bool(np.isfinite(self._read()).all())

    def square_sum(self, parts: Sequence[slice]) -> float:
        """The sum of the squares of these parts of them, made where they lie."""
        with self._lock.held():
            if self._values is None and self._owner is not None:
                return self._owner.square_sum(parts)
            return square_sum(self._read(), parts)

    def hand_to(self, inference: Inference, statistics: np.ndarray) -> tuple[int | None, bool]:
        """Load them and ``statistics`` (C,) to ``inference``, by the shortest way there is.

        Returns:
            their version, and whether each of them is finite.
        """
        with self._lock.held():
            version, is_finite = self.version, self._is_finite()
            if self.is_new:
                inference.draw(self._seed, statistics[np.newaxis])
            elif not isinstance(self._owner, Program) or not inference.load_from(self._owner):
                parameters = self._read()[np.newaxis]
                inference.load(State(parameters, np.empty((0, *parameters.shape)), statistics[np.newaxis]))
            return version, is_finite

    def set(self, values: Mapping[str, ArrayLike]) -> None:
        """Set some of them by name, all or none, as :class:`Parameters` does; from then on the network has them."""
        if not isinstance(values, Mapping):
            raise DtypeError("parameters", expected="a mapping of names to arrays", got=shown(values))
        with self._lock.held():
            flat = self._read().copy()
            for name, value in values.items():
                segment = self.segments[lookup("parameter", name, self.segments)]
                flat[segment.offset : segment.end] = _check_values(value, segment, flat.dtype).ravel()
            self._replace(flat)

    def replace(self, values: np.ndarray) -> None:
        """Set all of them to ``values`` (P,), which the network has from then on."""
        with self._lock.held():
            self._replace(values)

    def _replace(self, values: np.ndarray) -> None:
        # No call stands between the assignments, so Ctrl-C does not come there; likewise in give_to.
        values, version = _frozen(values), next(self._versions)
        self._values, self._owner, self.dtype, self.version = values, None, values.dtype, version

    def take_back(self) -> None:
        """Take them from the program that owns them, if one does."""
        with self._lock.held():
            if self._owner is not None:
                self._replace(self._read())

    def give_to(self, owner: Owner, dtype: np.dtype) -> None:
        """Make ``owner``, which has loaded or drawn them as ``dtype``, or a file that has them, their owner."""
        with self._lock.held():
            version = next(self._versions)
            self._values, self._owner, self.dtype, self.version = None, owner, dtype, version

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While the program that owns them changes them."""
        self._lock.acquire()
        is_held = True
        try:
            if self._owner is not None:
                self._values = self.version = None
                if self._owner.is_readable_while_running:
                    self._lock.release()
                    is_held = False
            yield
        finally:
            if not is_held:
                self._lock.acquire()
            if self.version is None:  # nobody took them meanwhile
                self._values, self.version = None, next(self._versions)
            self._lock.release()

    def copy(self, parameters: tuple[Parameter, ...] | None = None) -> FlatParameters:
        """The same values without an owner; initial values that nobody has asked for stay undrawn.

        ``parameters`` are those that the copy describes, of the same names and shapes; this one's if None.
        """
        twin = FlatParameters(parameters or self._parameters, self._seed)
        with self._lock.held():
            if not self.is_new:
                twin.replace(self._read().copy())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        held = self if self._owner is None else self.copy()  # a program stays where it is
        return {name: value for name, value in vars(held).items() if name not in ("_lock", "_versions")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.version, self._lock, self._versions = 0, GroupLock(), itertools.count(1)


class Parameters(MutableMapping[str, np.ndarray]):
    """A network's parameters by name.  Reading gives a copy of what is current, writing replaces values.

    Raises:
        UnknownNameError: there is no parameter of that name.
        DtypeError, ShapeError, DataError: values set are not finite real numbers of the parameter's shape.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat

    def __getitem__(self, name: str) -> np.ndarray:
        segment = self._flat.segments[lookup("parameter", name, self._flat.segments)]
        values = self._flat.read()[segment.offset : segment.end].reshape(segment.shape)
        return _frozen(values.copy())  # writing to a copy would change nothing

    def __setitem__(self, name: str, values: ArrayLike) -> None:
        self._flat.set({lookup("parameter", name, self._flat.segments): values})

    def update(self, values: Mapping[str, ArrayLike]) -> None:  # type: ignore[override]
        """Set some of them by name, all or none."""
        self._flat.set(values)

    def __delitem__(self, name: str) -> None:
        raise ConfigurationError("parameters", expected="to be read or set", got=f"del {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat.segments)

    def __len__(self) -> int:
        return len(self._flat.segments)

    def __reduce__(self) -> Any:
        return Parameters, (self._flat.copy(),)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {self[name].dtype} {self[name].shape}" for name in self)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _check_values(values: ArrayLike, segment: Segment, dtype: np.dtype) -> np.ndarray:
    """``values`` as an array of the segment's shape and of ``dtype``."""
    array = as_array(segment.name, values, f"{segment.shape}")
    if array.dtype.kind not in "fiub":
        got = type(values).__name__ if not isinstance(values, np.ndarray) else f"dtype {array.dtype}"
        raise DtypeError(segment.name, expected="real numbers", got=got)
    if array.shape != segment.shape:
        raise ShapeError(segment.name, expected=segment.shape, got=array.shape)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not np.isfinite(cast).all():
        raise DataError(segment.name, expected="finite values", got="NaN or infinity")
    return cast
