"""Rows to train on: inputs, and optionally targets and weights, each with the same number of rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    ShapeError,
    check_integer,
    check_number,
    check_truth,
    shown,
    warn_caller,
)
from ..random import Purpose, check_seed, order
from ..text import html, public_names
from .arrays import (
    EXACT_MOST,
    Inputs,
    check_classes,
    check_finite,
    check_inputs,
    check_label_range,
    check_scale,
    check_targets,
    check_weight,
    chunks,
    find_merged,
    find_outside,
    first_row,
    frozen,
    is_bytes,
    is_whole,
)


class Dataset:
    """Inputs ``x``, targets ``y`` and row weights ``weight``; immutable.

    Arrays are kept as they are wherever possible, not copied: whoever passes an array must not change
    it while the data set is in use.  Whatever is done to every row is done in chunks of about 1 MiB,
    so ``x`` may be a memory map larger than memory.

    Args:
        x: (rows, …); all axes but the first are flattened to one.  Integers, float32 and float64 are kept if
            C-contiguous; booleans and float16 are converted to float32 once.  A network in float32 rounds
            integers and float64 batch by batch, after a first ``Standardize`` layer has standardized them in
            float64.  A table (pandas, Polars, Arrow) may mix types of numbers; the names of its columns are kept.
            C-contiguous float32 or uint8 on a card (CuPy, PyTorch, JAX, Numba: whatever speaks DLPack or the CUDA array
            interface) stays there, is checked there, and is read where it lies by trainers on that card; what comes
            with it, ``y`` and ``weight``, is brought to the host.
        y: None; (rows,) integers, booleans or strings, which are class labels; or (rows,) or (rows, m)
            numbers.  Strings become int64 positions in ``classes``.
        weight: None or (rows,), at least 0, not all 0; float64 is kept, all else becomes float32.
        classes: the classes' names, in the order of their labels.  By default the sorted distinct
            strings of ``y``, and None where ``y`` is not strings.  With them whole numbers of ``y`` that come
            as floats are labels as well.
        scale: a byte of a uint8 ``x`` means byte * scale; 1/255 by default.  Of floats it says that they are
            bytes times scale already, so that they go with a network that was trained on bytes, and the reverse.

    Raises:
        ShapeError: ``x`` has no feature axis, or lengths differ.
        DtypeError: an array or a column is not of numbers, or ``classes`` are not strings.
        EmptyDataError: there are no rows.
        DataError: NaN, infinity, an unknown class, or a weight that is negative or always 0.
        ConfigurationError: ``scale`` or ``classes`` do not go with the data.
    """

    __slots__ = (
        *(
            "_classes",
            "_columns",
            "_crc",
            "_index",
            "_inputs",
            "_labels",
            "_merging",
            "_outside",
            "_storage_x",
            "_table",
            "_weight",
        ),
        "_y",
    )

    _storage_x: np.ndarray  # (storage rows, n_in)
    _index: np.ndarray | None  # (rows,) int64 into _storage_x; None: all of it, in order
    _y: np.ndarray | None  # (rows,) or (rows, m)
    _weight: np.ndarray | None  # (rows,)
    _labels: tuple[int, np.ndarray] | None  # the last number of classes asked for, and (rows,) intp
    _crc: tuple[int, str] | None  # the CRC, and the type of inputs that it was made of
    _table: Any  # what the inputs were made by, or None
    _outside: dict[np.dtype, np.ndarray]  # rows of _storage_x that a type cannot hold, by that type; splits share it
    _merging: dict[np.dtype, str]  # what merges values of the inputs, by the type they are rounded to; splits share it

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        classes: Sequence[str] | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        self._storage_x, self._columns = check_inputs(x)
        self._inputs = check_scale(scale, self._storage_x)
        self._y, self._classes = check_targets(y, len(self._storage_x), check_classes(classes))
        self._weight = check_weight(weight, len(self._storage_x))
        self._index = self._labels = self._crc = self._table = None
        self._merging, self._outside = {}, {}

    def _with(self, *, index: np.ndarray | None, y: np.ndarray | None, weight: np.ndarray | None) -> Dataset:
        """Other rows of the same inputs."""
        other = object.__new__(Dataset)
        for name in ("_storage_x", "_columns", "_inputs", "_classes", "_table", "_merging", "_outside"):
            setattr(other, name, getattr(self, name))
        other._index, other._y, other._weight = index, y, weight
        other._labels = other._crc = None
        return other

    def __setstate__(self, state: tuple[Any, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            # Copies and unpickled arrays could be written to.
            setattr(self, name, frozen(value) if isinstance(value, np.ndarray) else value)
        self._labels = None

    @staticmethod
    def has_bytes(x: Any) -> bool:
        """Whether an ``x``, an array or a table, would be kept as bytes."""
        return is_bytes(x)

    def __len__(self) -> int:
        return len(self._storage_x) if self._index is None else len(self._index)

    def __repr__(self) -> str:
        targets = "none" if self._y is None else f"{self._y.dtype} {self._y.shape}"
        parts = f"{len(self)} rows, {self.n_in} features, {self._storage_x.dtype}, y: {targets}"
        names = "" if self._classes is None else f", classes: {', '.join(self._classes)}"
        return f"Dataset({parts}{names})"

    def _repr_html_(self) -> str:
        inputs = f"{self.inputs}, {self.n_in} features" + ("" if self.columns is None else ", named")
        targets = "none" if self._y is None else f"{self._y.dtype} {self._y.shape}"
        rows = [("array", "holds"), ("x", inputs), ("y", targets)]
        if self._classes is not None:
            rows.append(("classes", ", ".join(self._classes)))
        if self._weight is not None:
            rows.append(("weight", f"{self._weight.dtype} {self._weight.shape}"))
        return html(rows, "<<", f"Dataset of {len(self):,} rows")

    def __dir__(self) -> list[str]:
        return public_names(
            self,
            (
                "check_range",
                "has_bytes",
                "identity",
                "warn_of_merging",
                "with_table",
                "storage_index",
                "storage_rows",
                "storage_x",
            ),
        )

    @property
    def n_in(self) -> int:
        """Number of features."""
        return self._storage_x.shape[1]

    @property
    def x(self) -> np.ndarray:
        """Inputs, (rows, n_in), as stored: bytes are not scaled.  A split gathers them at each access.

        Inputs on a card are copied to the host at each access.
        """
        if self.card is not None:
            return frozen(self._storage_x[:] if self._index is None else self._storage_x[self._index])
        return self._storage_x if self._index is None else frozen(self._storage_x[self._index])

    @property
    def card(self) -> int | None:
        """The number of the card that the inputs lie on, or None."""
        return getattr(self._storage_x, "card", None)

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
        return self._inputs.scale if self._inputs.kind == "bytes" else None

    @property
    def inputs(self) -> Inputs:
        """Whether ``x`` is bytes or floats, and its scale."""
        return self._inputs

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns of ``x``, or None if it came without."""
        return self._columns

    @property
    def table(self) -> Any:
        """The :class:`~mlpgpu.Table` that made the inputs of raw rows, or None."""
        return self._table

    @property
    def storage_x(self) -> np.ndarray:
        """The array that :meth:`storage_rows` points into, (storage rows, n_in), shared by all splits."""
        return self._storage_x

    @property
    def storage_index(self) -> np.ndarray | None:
        """Where all rows lie in :attr:`storage_x`, (rows,) int64; None: all of it, in order."""
        return self._index

    def storage_rows(self, rows: np.ndarray) -> np.ndarray:
        """Where ``rows`` of this data set, (n,) int64, lie in :attr:`storage_x`, (n,) int64."""
        return rows if self._index is None else self._index[rows]

    def labels(self, n_classes: int) -> np.ndarray:
        """Class labels, (rows,) intp, each in [0, n_classes).

        Raises:
            DtypeError, ConfigurationError: ``n_classes`` is no whole number of at least 1.
            ShapeError: there is not one label per row.
            DataError: there are no labels, or one is fractional or out of range.
        """
        n_classes = check_integer("n_classes", n_classes, least=1)
        if self._labels is None or self._labels[0] != n_classes:
            self._labels = n_classes, frozen(self._check_labels(n_classes))
        return self._labels[1]

    def _check_labels(self, n_classes: int) -> np.ndarray:
        if self._y is None:
            raise DataError("y", expected="a class label for each row", got="no y")
        if self._y.ndim != 1:
            raise ShapeError("y", expected=f"class labels ({len(self)},)", got=f"shape {self._y.shape}")
        if not is_whole(self._y):
            row = first_row(self._y != np.floor(self._y))
            raise DataError("class labels", expected="whole numbers", got=f"{self._y[row]} at row {row}")
        check_label_range(self._y, n_classes)
        return self._y.astype(np.intp)

    def targets(self, n_out: int, dtype: DTypeLike) -> np.ndarray:
        """Numeric targets, (rows, n_out) of ``dtype``; a ``y`` of shape (rows,) is one column.

        Raises:
            ShapeError: ``y`` does not have ``n_out`` columns.
            DtypeError: ``y`` holds labels of named classes, or ``dtype`` is neither float32 nor float64.
            DataError: there is no ``y``, or one of its values overflows ``dtype``.
        """
        n_out, kept = check_integer("n_out", n_out, least=1), _check_real(dtype)
        if self._y is None:
            raise DataError("y", expected=f"targets ({len(self)}, {n_out})", got="no y")
        if self._classes is not None:
            raise DtypeError("y", expected="numeric targets", got="labels of the classes " + ", ".join(self._classes))
        y = self._y[:, None] if self._y.ndim == 1 else self._y  # (rows, m)
        if y.shape[1] != n_out:
            hint = f"the last layer's n_out, {n_out}, is the number of targets of a row"
            if y.shape[1] == 1 and is_whole(y):
                hint = "labels of classes are (rows,): np.ravel(y)"
            raise ShapeError("y", expected=f"targets ({len(self)}, {n_out})", got=f"shape {self._y.shape}", hint=hint)
        with np.errstate(over="ignore"):
            targets = frozen(y.astype(kept, copy=False))
        check_finite(f"y as {targets.dtype}", targets)
        return targets

    def identity(self) -> dict[str, Any]:
        """What tells this data set from another: sizes, dtypes, scale, and a CRC-32 of all its bytes.

        The values are those that JSON keeps.  The CRC runs over ``x``, ``y`` and ``weight`` in this
        order, row by row; it is computed once.
        """
        if self._crc is None:
            self._crc = self._check_sum()
        return {
            "rows": len(self),
            "n_in": self.n_in,
            "x_dtype": self._crc[1],
            "scale": self.scale,
            "y_shape": None if self._y is None else list(self._y.shape),
            "y_dtype": None if self._y is None else self._y.dtype.name,
            "has_weight": self._weight is not None,
            "crc": self._crc[0],
        }

    def _check_sum(self) -> tuple[int, str]:
        """The CRC, and the type of the inputs that it is of.

        Integers that float32 holds count as float32, as older versions kept them: their runs go on.
        """
        dtype = self._storage_x.dtype
        may_be_float = dtype.kind in "iu" and dtype != np.uint8
        plain = as_float = 0
        on_card: Any = self._storage_x if self.card is not None else None
        if on_card is not None:
            plain = on_card.checksum(self._index)  # may_be_float is False: they are bytes or float32
        for rows in () if on_card is not None else chunks(len(self), self._storage_x[:1].nbytes):
            chunk = self._storage_x[rows if self._index is None else self._index[rows]]
            plain = zlib.crc32(chunk, plain)
            if may_be_float:
                rounded = chunk.astype(np.float32)
                may_be_float = bool((abs(rounded) <= EXACT_MOST).all())
                as_float = zlib.crc32(rounded, as_float)
        crc, name = (as_float, "float32") if may_be_float else (plain, dtype.name)
        for array in (self._y, self._weight):
            if array is not None:
                crc = zlib.crc32(np.ascontiguousarray(array), crc)
        return crc, name

    def check_range(self, dtype: np.dtype, *, inputs: bool = True) -> None:
        """Refuse weights, and ``inputs``, that are no numbers any more once rounded to ``dtype``.

        Raises:
            DataError: an input or the sum of the weights is beyond its range, or a weight above 0 under its smallest
                normal number.
        """
        if inputs:
            self._check_inputs_range(dtype)
        if self._weight is None:
            return
        limits, least = np.finfo(dtype), self._weight[self._weight > 0.0].min()
        hint = "weights count by their ratios: divide all by the largest"
        if least < limits.tiny:
            row = first_row(self._weight == least)
            expected = f"0, or at least {limits.tiny:.3g}, which is {dtype}'s smallest normal number"
            raise DataError("weight", expected=expected, got=f"{least} at row {row}", hint=hint)
        with np.errstate(over="ignore"):
            total = self._weight.sum(dtype=np.float64)
        if total > limits.max:
            expected = f"a sum of at most {limits.max:.3g}, {dtype}'s largest number"
            raise DataError("weight", expected=expected, got=total, hint=hint)

    def _check_inputs_range(self, dtype: np.dtype) -> None:
        if dtype not in self._outside:
            self._outside[dtype] = find_outside(self._storage_x, dtype)
        rows = self._outside[dtype]
        if self._index is not None and len(rows):
            rows = np.flatnonzero(np.isin(self._index, rows))
        if len(rows):
            row = int(rows[0])
            values = self._storage_x[row if self._index is None else self._index[row]]
            column = int(np.argmax(np.abs(values)))
            name = column if self._columns is None else repr(self._columns[column])
            hint = "a first Standardize layer takes float64; so does precision='float64'"
            got = f"{values[column]} at row {row}, column {name}"
            raise DataError("x", expected=f"numbers in the range of {dtype}", got=got, hint=hint)

    def warn_of_merging(self, dtype: np.dtype) -> None:
        """Warn, once for a data set and its splits, if inputs that differ are the same once rounded to ``dtype``."""
        if dtype not in self._merging:
            self._merging[dtype] = found = find_merged(self._storage_x, dtype, self._columns)
            if found:
                warn_caller(found)

    def with_weight(self, weight: ArrayLike | None) -> Dataset:
        """The same rows with other weights, checked as the constructor checks them."""
        return self._with(index=self._index, y=self._y, weight=check_weight(weight, len(self)))

    def with_table(self, table: Any, columns: Sequence[str]) -> Dataset:
        """The same rows as what ``table`` made of raw ones, with the names of their inputs, one for each."""
        other = self._with(index=self._index, y=self._y, weight=self._weight)
        other._table, other._columns = table, tuple(columns)
        return other

    def first(self, rows: int) -> Dataset:
        """The first so many rows, at least one and at most all of them; they share this data set's inputs.

        Raises:
            DtypeError, ConfigurationError: ``rows`` is no whole number of at least 1.
        """
        part = slice(min(check_integer("rows", rows, least=1), len(self)))
        index = frozen(np.arange(part.stop)) if self._index is None else self._index[part]
        y, weight = (None if array is None else array[part] for array in (self._y, self._weight))
        return self._with(index=index, y=y, weight=weight)

    def split(self, fraction: float, *, seed: int = 0, stratify: bool | None = None) -> tuple[Dataset, Dataset]:
        """Two shuffled parts, (rest, held_out); held_out has round(fraction * rows) rows.

        The parts share this data set's inputs: only the rows' numbers, targets and weights are copied.
        A stratified split gives each class its proportion of held_out by the method of largest remainders,
        ties to the lower label.

        Args:
            fraction: above 0 and below 1.
            seed: of the permutation, which depends on it and the number of rows alone.
            stratify: True or False; None stratifies if ``y`` holds class labels and no class has a
                single row.  With True whole numbers that are floats are labels as well.

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
        if stratify is not None and not check_truth("stratify", stratify):
            return False
        if (
            self._y is None
            or self._y.ndim != 1
            or not (self._y.dtype.kind in "biu" or (stratify and is_whole(self._y)))
        ):
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
        quotas, remainders = np.divmod(counts * held_rows, rows)  # (classes,)
        quotas[np.argsort(-remainders, kind="stable")[: held_rows - quotas.sum()]] += 1
        by_class = np.argsort(codes[permutation], kind="stable")  # (rows,)
        rank = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)  # (rows,) within its class
        held = np.empty(rows, bool)
        held[by_class] = rank < np.repeat(quotas, counts)
        return held

    def _part(self, name: str, rows: np.ndarray) -> Dataset:
        weight = None if self._weight is None else self._weight[rows]
        if weight is not None and not weight.any():
            raise DataError(f"weight of {name}", expected="a weight above 0", got=f"{len(rows)} times 0")
        return self._with(
            index=frozen(self.storage_rows(rows)),
            y=None if self._y is None else frozen(self._y[rows]),
            weight=None if weight is None else frozen(weight),
        )


def _check_real(dtype: DTypeLike) -> np.dtype:
    """``dtype``, if it is one that a network may have."""
    try:
        found = np.dtype(dtype)
    except Exception as error:  # of whatever is none
        raise DtypeError("dtype", expected="float32 or float64", got=shown(dtype)) from error
    if found not in (np.float32, np.float64):
        raise DtypeError("dtype", expected="float32 or float64", got=found)
    return found
