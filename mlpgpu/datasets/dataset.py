"""Rows to train on: inputs, and optionally targets and weights, each with the same number of rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..errors import ConfigurationError, DataError, DtypeError, EmptyDataError, ShapeError, check_number
from ..random import Purpose, check_seed, order

CHUNK_BYTES = 1 << 20
KEPT_DTYPES = (np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float64))


class Dataset:
    """Inputs ``x``, targets ``y`` and row weights ``weight``; immutable.

    Arrays are kept as they are wherever possible, not copied: whoever passes an array must not change
    it while the data set is in use.  Whatever is done to every row is done in chunks of about 1 MiB,
    so ``x`` may be a memory map larger than memory.

    Args:
        x: (rows, …); all axes but the first are flattened to one.  uint8, float32 and float64 are kept
            if C-contiguous; other real numbers are converted to float32 once.
        y: None; (rows,) integers, booleans or strings, which are class labels; or (rows,) or (rows, m)
            numbers.  Strings become int64 positions in ``classes``.
        weight: None or (rows,), at least 0, not all 0; float64 is kept, all else becomes float32.
        classes: the classes' names, in the order of their labels.  By default the sorted distinct
            strings of ``y``, and None where ``y`` is not strings.
        scale: a byte of a uint8 ``x`` means byte * scale; 1/255 by default.

    Raises:
        ShapeError: ``x`` has no feature axis, or lengths differ.
        DtypeError: an array is not of numbers, or ``classes`` are not strings.
        EmptyDataError: there are no rows.
        DataError: NaN, infinity, an unknown class, or a weight that is negative or always 0.
        ConfigurationError: ``scale`` or ``classes`` do not go with the data.
    """

    __slots__ = ("_classes", "_crc", "_index", "_labels", "_scale", "_storage_x", "_weight", "_y")

    _storage_x: np.ndarray  # (storage rows, n_in)
    _index: np.ndarray | None  # (rows,) int64 into _storage_x; None: all of it, in order
    _y: np.ndarray | None  # (rows,) or (rows, m)
    _weight: np.ndarray | None  # (rows,)
    _labels: tuple[int, np.ndarray] | None  # the last number of classes asked for, and (rows,) intp
    _crc: int | None

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        classes: Sequence[str] | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        self._storage_x = _check_inputs(x)
        self._scale = _check_scale(scale, self._storage_x.dtype)
        self._y, self._classes = _check_targets(y, len(self._storage_x), _check_classes(classes))
        self._weight = _check_weight(weight, len(self._storage_x))
        self._index = self._labels = self._crc = None

    def _with(self, *, index: np.ndarray | None, y: np.ndarray | None, weight: np.ndarray | None) -> Dataset:
        """Other rows of the same inputs."""
        other = object.__new__(Dataset)
        other._storage_x, other._scale, other._classes = self._storage_x, self._scale, self._classes
        other._index, other._y, other._weight = index, y, weight
        other._labels = other._crc = None
        return other

    def __len__(self) -> int:
        return len(self._storage_x) if self._index is None else len(self._index)

    def __repr__(self) -> str:
        targets = "none" if self._y is None else f"{self._y.dtype} {self._y.shape}"
        parts = f"{len(self)} rows, {self.n_in} features, {self._storage_x.dtype}, y: {targets}"
        names = "" if self._classes is None else f", classes: {', '.join(self._classes)}"
        return f"Dataset({parts}{names})"

    @property
    def n_in(self) -> int:
        """Number of features."""
        return self._storage_x.shape[1]

    @property
    def x(self) -> np.ndarray:
        """Inputs, (rows, n_in), as stored: bytes are not scaled.  A split gathers them at each access."""
        return self._storage_x if self._index is None else _frozen(self._storage_x[self._index])

    @property
    def y(self) -> np.ndarray | None:
        """Targets, (rows,) or (rows, m), or None."""
        return self._y

    @property
    def weight(self) -> np.ndarray | None:
        """Row weights, (rows,) float32 or float64, or None."""
        return self._weight

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes by label, or None."""
        return self._classes

    @property
    def scale(self) -> float | None:
        """What a byte of ``x`` is multiplied by; None unless ``x`` is uint8."""
        return self._scale

    @property
    def storage_x(self) -> np.ndarray:
        """The array that :meth:`storage_rows` points into, (storage rows, n_in), shared by all splits."""
        return self._storage_x

    def storage_rows(self, rows: np.ndarray) -> np.ndarray:
        """Where ``rows`` of this data set, (n,) int64, lie in :attr:`storage_x`, (n,) int64."""
        return rows if self._index is None else self._index[rows]

    def labels(self, n_classes: int) -> np.ndarray:
        """Class labels, (rows,) intp, each in [0, n_classes).

        Raises:
            ShapeError: there is not one label per row.
            DataError: there are no labels, or one is fractional or out of range.
        """
        if self._labels is None or self._labels[0] != n_classes:
            self._labels = n_classes, _frozen(self._check_labels(n_classes))
        return self._labels[1]

    def _check_labels(self, n_classes: int) -> np.ndarray:
        if self._y is None:
            raise DataError("y", expected="a class label for each row", got="no y")
        if self._y.ndim != 1:
            raise ShapeError("y", expected=f"class labels ({len(self)},)", got=f"shape {self._y.shape}")
        fractional = self._y != np.floor(self._y) if self._y.dtype.kind == "f" else np.zeros(0, bool)
        if fractional.any():
            row = _first(fractional)
            raise DataError("class labels", expected="whole numbers", got=f"{self._y[row]} at row {row}")
        _check_label_range(self._y, n_classes)
        return self._y.astype(np.intp)

    def targets(self, n_out: int, dtype: DTypeLike) -> np.ndarray:
        """Numeric targets, (rows, n_out) of ``dtype``; a ``y`` of shape (rows,) is one column.

        Raises:
            ShapeError: ``y`` does not have ``n_out`` columns.
            DtypeError: ``y`` holds labels of named classes.
            DataError: there is no ``y``, or one of its values overflows ``dtype``.
        """
        if self._y is None:
            raise DataError("y", expected=f"targets ({len(self)}, {n_out})", got="no y")
        if self._classes is not None:
            raise DtypeError("y", expected="numeric targets", got="labels of the classes " + ", ".join(self._classes))
        y = self._y[:, None] if self._y.ndim == 1 else self._y  # (rows, m)
        if y.shape[1] != n_out:
            raise ShapeError("y", expected=f"targets ({len(self)}, {n_out})", got=f"shape {self._y.shape}")
        with np.errstate(over="ignore"):
            targets = _frozen(y.astype(dtype, copy=False))
        _check_finite(f"y as {targets.dtype}", targets)
        return targets

    def identity(self) -> dict[str, Any]:
        """What tells this data set from another: sizes, dtypes, scale, and a CRC-32 of all its bytes.

        The values are those that JSON keeps.  The CRC runs over ``x``, ``y`` and ``weight`` in this
        order, row by row; it is computed once.
        """
        if self._crc is None:
            self._crc = 0
            for rows in _chunks(len(self), self._storage_x[:1].nbytes):
                chunk = self._storage_x[rows if self._index is None else self._index[rows]]
                self._crc = zlib.crc32(chunk, self._crc)
            for array in (self._y, self._weight):
                if array is not None:
                    self._crc = zlib.crc32(np.ascontiguousarray(array), self._crc)
        return {
            "rows": len(self),
            "n_in": self.n_in,
            "x_dtype": self._storage_x.dtype.name,
            "scale": self._scale,
            "y_shape": None if self._y is None else list(self._y.shape),
            "y_dtype": None if self._y is None else self._y.dtype.name,
            "has_weight": self._weight is not None,
            "crc": self._crc,
        }

    def with_weight(self, weight: ArrayLike | None) -> Dataset:
        """The same rows with other weights, checked as the constructor checks them."""
        return self._with(index=self._index, y=self._y, weight=_check_weight(weight, len(self)))

    def first(self, rows: int) -> Dataset:
        """The first so many rows, at most all of them; they share this data set's inputs."""
        part = slice(min(rows, len(self)))
        index = np.arange(part.stop) if self._index is None else self._index[part]
        y, weight = (None if array is None else array[part] for array in (self._y, self._weight))
        return self._with(index=index, y=y, weight=weight)

    def split(self, fraction: float, *, seed: int = 0, stratify: bool | None = None) -> tuple[Dataset, Dataset]:
        """Two shuffled parts, (rest, held_out); held_out has round(fraction * rows) rows.

        The parts share this data set's inputs: only the rows' numbers, targets and weights are copied.
        A stratified split gives each class its share of held_out by the method of largest remainders,
        ties to the lower label.

        Args:
            fraction: above 0 and below 1.
            seed: of the permutation, which depends on it and the number of rows alone.
            stratify: True or False; None stratifies if ``y`` holds class labels and no class has a
                single row.

        Raises:
            ConfigurationError: ``fraction`` or ``seed`` is out of range, or leaves one part without rows.
            DataError: ``stratify=True`` without class labels or with a class of one row; or a part's
                weights are all 0.
        """
        rows = len(self)
        held_rows = round(check_number("fraction", fraction, above=0, below=1) * rows)
        if not 0 < held_rows < rows:
            got = f"{fraction} of {rows}, which is {held_rows}"
            raise ConfigurationError("fraction", expected="at least one row in each part", got=got)
        permutation = order(rows, seed=check_seed(seed), purpose=Purpose.SPLIT)
        if self._check_stratify(stratify):
            held = self._stratified(permutation, held_rows)
        else:
            held = np.arange(rows) < held_rows
        return self._part("rest", permutation[~held]), self._part("held_out", permutation[held])

    def _check_stratify(self, stratify: bool | None) -> bool:
        if stratify is False:
            return False
        if self._y is None or self._y.ndim != 1 or self._y.dtype.kind not in "biu":
            problem = "no class labels"
        else:
            classes, counts = np.unique(self._y, return_counts=True)
            if counts.min() > 1:
                return True
            problem = f"a single row of class {classes[counts.argmin()]}"
        if stratify:
            raise DataError("stratify=True", expected="class labels, at least 2 rows of each class", got=problem)
        return False

    def _stratified(self, permutation: np.ndarray, held_rows: int) -> np.ndarray:
        """Which places of ``permutation`` are held out, (rows,) bool: the first of each class."""
        assert self._y is not None
        rows = len(self)
        _, codes, counts = np.unique(self._y, return_inverse=True, return_counts=True)  # (rows,), (classes,)
        shares, remainders = np.divmod(counts * held_rows, rows)  # (classes,)
        shares[np.argsort(-remainders, kind="stable")[: held_rows - shares.sum()]] += 1
        by_class = np.argsort(codes[permutation], kind="stable")  # (rows,)
        rank = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)  # (rows,) within its class
        held = np.empty(rows, bool)
        held[by_class] = rank < np.repeat(shares, counts)
        return held

    def _part(self, name: str, rows: np.ndarray) -> Dataset:
        weight = None if self._weight is None else self._weight[rows]
        if weight is not None and not weight.any():
            raise DataError(f"weight of {name}", expected="a weight above 0", got=f"{len(rows)} times 0")
        return self._with(
            index=_frozen(self.storage_rows(rows)),
            y=None if self._y is None else _frozen(self._y[rows]),
            weight=None if weight is None else _frozen(weight),
        )


def _as_array(what: str, value: ArrayLike, expected: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of unequal length
        raise ShapeError(what, expected=expected, got=error) from error


def _frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _first(mask: np.ndarray) -> int:
    """The first row at which ``mask``, (rows,) bool, is true."""
    return int(np.argmax(mask))


def _chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of about CHUNK_BYTES that cover ``rows``."""
    step = max(1, CHUNK_BYTES // row_bytes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _check_finite(what: str, array: np.ndarray) -> None:
    """``array`` is (rows,) or (rows, columns) with at least one element."""
    if array.dtype.kind != "f":
        return
    for rows in _chunks(len(array), array[:1].nbytes):
        finite = np.isfinite(array[rows])
        if not finite.all():
            row, *column = (int(place) for place in np.unravel_index(finite.argmin(), finite.shape))
            row += rows.start
            where = ", ".join([f"row {row}", *(f"column {place}" for place in column)])
            raise DataError(what, expected="finite numbers", got=f"{array[(row, *column)]} at {where}")


def _real_dtype(what: str, array: np.ndarray, expected: str) -> np.dtype:
    """The dtype to keep ``array`` in, if that is one of KEPT_DTYPES: its own, otherwise float32."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DtypeError(what, expected=expected, got=f"dtype {array.dtype}")
    native = array.dtype.newbyteorder("=")
    return native if native in KEPT_DTYPES else np.dtype(np.float32)


def _check_inputs(x: ArrayLike) -> np.ndarray:
    expected = "(rows, features)"
    array = _as_array("x", x, expected)
    dtype = _real_dtype("x", array, "real numbers of up to 64 bits")
    if array.ndim < 2:
        hint = "one feature is x.reshape(-1, 1), one row is x.reshape(1, -1)"
        raise ShapeError("x", expected=expected, got=f"shape {array.shape}", hint=hint)
    if len(array) == 0:
        raise EmptyDataError("x", expected="at least one row", got=f"shape {array.shape}")
    if array.size == 0:
        raise ShapeError("x", expected="at least one feature", got=f"shape {array.shape}")
    rows = np.ascontiguousarray(array, dtype).reshape(len(array), -1)  # (rows, n_in)
    _check_finite("x", rows)
    return _frozen(rows)


def _check_scale(scale: float | None, dtype: np.dtype) -> float | None:
    if dtype == np.uint8:
        return 1 / 255 if scale is None else check_number("scale", scale, above=0)
    if scale is not None:
        raise ConfigurationError("scale", expected=f"none for inputs of {dtype}", got=scale, hint="it is for uint8")
    return None


def _check_classes(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    names = () if isinstance(classes, str) else tuple(classes)
    if not names or not all(isinstance(name, str) for name in names):
        raise DtypeError("classes", expected="a sequence of names", got=repr(classes))
    if len(set(names)) < len(names):
        raise ConfigurationError("classes", expected="names that differ", got=", ".join(names))
    return tuple(str(name) for name in names)


def _check_targets(
    y: ArrayLike | None, rows: int, classes: tuple[str, ...] | None
) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """The targets to keep, (rows,) or (rows, m), and the names of their classes."""
    if y is None:
        if classes is not None:
            raise ConfigurationError("classes", expected="none without y", got=", ".join(classes))
        return None, None
    expected = f"({rows},) or ({rows}, outputs), as x has {rows} rows"
    array = _as_array("y", y, expected)
    # NumPy 2's variable-length strings are of kind T.
    strings = array.dtype.kind in "UT" or (
        array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat)
    )
    if not strings:
        kept = _real_dtype("y", array, "integers, booleans, strings or real numbers of up to 64 bits")
    if array.ndim not in (1, 2) or len(array) != rows or array.size == 0 or (strings and array.ndim == 2):
        raise ShapeError("y", expected=f"({rows},)" if strings else expected, got=f"shape {array.shape}")
    if strings:
        labels, names = _code_strings(array, classes)
        return _frozen(labels), names

    integral = array.dtype.kind in "biu"
    array = np.asarray(array, array.dtype.newbyteorder("=") if integral else kept)
    _check_finite("y", array)
    if classes is not None:
        if not integral or array.ndim != 1:
            got = f"{array.dtype} {array.shape}"
            raise ConfigurationError("classes", expected=f"integer or string labels ({rows},) in y", got=got)
        _check_label_range(array, len(classes))
    return _frozen(array), classes


def _code_strings(y: np.ndarray, classes: tuple[str, ...] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels of the strings ``y``, (rows,) int64, and the names they stand for."""
    found, codes = np.unique(y, return_inverse=True)  # (distinct,), (rows,)
    if classes is None:
        return codes.astype(np.int64, copy=False), tuple(str(name) for name in found)
    positions = {name: position for position, name in enumerate(classes)}
    unknown = np.array([name not in positions for name in found])[codes]  # (rows,)
    if unknown.any():
        row = _first(unknown)
        raise DataError("y", expected="one of the classes " + ", ".join(classes), got=f"{str(y[row])!r} at row {row}")
    return np.array([positions[name] for name in found], np.int64)[codes], classes


def _check_label_range(labels: np.ndarray, n_classes: int) -> None:
    """``labels`` is (rows,), of whole numbers."""
    outside = (labels < 0) | (labels >= n_classes)
    if outside.any():
        row = _first(outside)
        got = f"{labels[row]} at row {row}"
        raise DataError("class labels", expected=f"whole numbers from 0 to {n_classes - 1}", got=got)


def _check_weight(weight: ArrayLike | None, rows: int) -> np.ndarray | None:
    if weight is None:
        return None
    expected = f"({rows},), as x has {rows} rows"
    array = _as_array("weight", weight, expected)
    dtype = _real_dtype("weight", array, "real numbers of up to 64 bits")
    if array.shape != (rows,):
        raise ShapeError("weight", expected=expected, got=f"shape {array.shape}")
    array = np.asarray(array, np.float32 if dtype == np.uint8 else dtype)
    _check_finite("weight", array)
    negative = array < 0
    if negative.any():
        row = _first(negative)
        raise DataError("weight", expected="numbers of at least 0", got=f"{array[row]} at row {row}")
    if not array.any():
        raise DataError("weight", expected="a weight above 0", got=f"{rows} times 0")
    return _frozen(array)
