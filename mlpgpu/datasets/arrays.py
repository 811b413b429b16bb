"""Arrays as a data set keeps them: what is converted, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ..errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    EmptyDataError,
    ShapeError,
    as_list,
    check_number,
    check_text,
    shown,
    warn_caller,
)
from .interchange import ALIGNMENT, check_shape, is_card_frame, is_on_card, open_on_card

CHUNK_BYTES = 1 << 20
KEPT_DTYPES = (np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float64))
INPUT_DTYPES: tuple[np.dtype, ...] = (*KEPT_DTYPES, *map(np.dtype, ("i1", "i2", "i4", "i8", "u2", "u4", "u8")))
USUAL_SCALE = 1 / 255  # of bytes of which nobody said what they mean
LEAST_SCALE, MOST_SCALE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / 255
EXACT_MOST = 1 << 24  # whole numbers up to here are float32's own
FEW_STEPS = 1 << 18  # of rounded numbers between the least and the greatest of a column
MERGED_ROWS = 1 << 20  # that are looked at for values that merge
MOST_AXES = 64  # of a NumPy array
NAMED_MOST = 5  # of a table's columns, in a message


@dataclass(frozen=True)
class Inputs:
    """How inputs are given, and what they mean.

    Attributes:
        kind: ``"bytes"`` for uint8, ``"floats"`` for all else.
        scale: what bytes are multiplied by; what floats were multiplied by already, or None if nobody said.
        is_told: whether somebody gave the scale, or it is the usual one.
    """

    kind: Literal["bytes", "floats"]
    scale: float | None
    is_told: bool = True

    def __str__(self) -> str:
        if self.kind == "bytes":
            return f"bytes (uint8) times {factor(self.scale)}"
        return "floats" if self.scale is None else f"floats that are bytes times {factor(self.scale)}"

    def means_the_same(self, other: Inputs) -> bool:
        """Whether a network that was trained on these inputs takes ``other``: not where one would be rescaled."""
        if self.kind == other.kind:
            return None in (self.scale, other.scale) or self.scale == other.scale
        if self.kind == "floats" and self.scale is None:
            return other.is_told
        return self.scale == other.scale


def factor(scale: float | None) -> str:
    """A scale for people: 1/255, not 0.00392157."""
    if scale is None:
        return "1"
    whole = round(1 / scale) if scale else 0
    return f"1/{whole}" if whole > 1 and 1 / whole == scale else f"{scale:g}"


def refuse_masked(what: str, value: object) -> None:
    """Refuse an array with masked values, which NumPy would take as if they were there; in lists of any depth too.

    Raises:
        DataError: some values are masked.
    """
    if isinstance(value, np.ma.MaskedArray):
        if masked := int(np.ma.getmaskarray(value).sum()):
            got, hint = f"{masked} of {value.size} masked", f"{what}.filled(…), or leave these rows out"
            raise DataError(what, expected="no masked values", got=got, hint=hint)
    elif isinstance(value, (list, tuple)):
        for element in _inside(value):
            refuse_masked(what, element)


def _inside(nested: Sequence[Any]) -> Iterator[Any]:
    """What lists and tuples hold that are no deeper in each other than an array has axes."""
    level: list[Any] = [nested]
    for _ in range(MOST_AXES):
        level = [element for listed in level for element in listed]
        yield from (element for element in level if isinstance(element, np.ma.MaskedArray))
        level = [element for element in level if isinstance(element, (list, tuple))]


def as_array(what: str, value: Any, expected: str) -> np.ndarray:
    """``value`` as an array of NumPy's plainest kind.

    Raises:
        DataError: some values are masked.
        ShapeError: lists are of unequal length.
        DtypeError: it does not become an array.
    """
    refuse_masked(what, value)
    if is_on_card(value):  # what is checked on the host comes there, such as labels
        array = open_on_card(what, value)
        return array.reshape(prod(array.shape))[:].reshape(array.shape)
    if is_card_frame(value):
        return np.stack([as_array(f"column {name!r} of {what}", value[name], "(rows,)") for name in value.columns], 1)
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of unequal length
        raise ShapeError(what, expected=expected, got=error) from error
    except Exception as error:  # a tensor that requires gradients, or whoever wrote its __array__, may raise any
        hint = f"{what}.detach().cpu().numpy()" if hasattr(value, "detach") else ""
        raise DtypeError(
            what, expected=f"an array {expected}", got=f"{type(value).__name__}: {error}", hint=hint
        ) from error


def frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def first_row(mask: np.ndarray) -> int:
    """The first row at which ``mask``, (rows,) bool, is true."""
    return int(np.argmax(mask))


def chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of about CHUNK_BYTES that cover ``rows``."""
    step = max(1, CHUNK_BYTES // row_bytes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def check_finite(what: str, array: np.ndarray, columns: Sequence[str] | None = None) -> None:
    """``array`` is (rows,) or (rows, columns) with at least one element; ``columns`` are names, where there are."""
    if array.dtype.kind != "f":
        return
    for rows in chunks(len(array), array[:1].nbytes):
        part = array[rows]
        finite = np.isfinite(part)
        if not finite.all():
            row, *column = (int(place) for place in np.unravel_index(finite.argmin(), finite.shape))
            names = [f"column {columns[k]!r}" if columns else f"column {k}" for k in column]
            where = ", ".join([f"row {rows.start + row}", *names])
            raise DataError(what, expected="finite numbers", got=f"{part[(row, *column)]} at {where}")


def _real_dtype(what: str, array: np.ndarray, expected: str, kept: Sequence[np.dtype] = KEPT_DTYPES) -> np.dtype:
    """The dtype to keep ``array`` in: its own if that is one of ``kept``, otherwise float32."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        hint = f"if they are numbers: {what}.astype('float32')" if array.dtype.kind in "OUSTg" else ""
        raise DtypeError(what, expected=expected, got=f"dtype {array.dtype}", hint=hint)
    native = array.dtype.newbyteorder("=")
    return native if native in kept else np.dtype(np.float32)


def find_merged(x: np.ndarray, dtype: np.dtype, columns: Sequence[str] | None) -> str:
    """What a warning says of the first column of ``x`` (rows, n_in) with values that ``dtype`` merges, if there is one.

    Whole numbers count wherever two become one.  Of others it is common that two in a million do: they count where
    their column has fewer than FEW_STEPS steps of ``dtype`` between its least and its greatest, because these are
    close to each other beside how far they are from 0.
    """
    if x.dtype.kind not in "iuf" or x.dtype.itemsize <= (4 if x.dtype.kind == "f" else 2) or x.dtype == dtype:
        return ""
    least, most = x[0].copy(), x[0].copy()  # (n_in,)
    for rows in chunks(len(x), x[:1].nbytes):
        np.minimum(least, x[rows].min(axis=0), out=least)
        np.maximum(most, x[rows].max(axis=0), out=most)
    is_one = least == most
    least, most = least.astype(np.float64), most.astype(np.float64)
    largest = np.maximum(abs(least), abs(most))
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.spacing(largest.astype(dtype)).astype(np.float64)
        is_close = most - least < FEW_STEPS * step
    bits = np.finfo(dtype).nmant + 1
    is_close &= x.dtype.kind == "f"  # smaller integers are exact
    for place in map(int, np.flatnonzero(~is_one & (is_close | (largest > 2.0**bits)))):
        values = np.unique(x[:MERGED_ROWS, place])
        if not is_close[place] and not is_whole(values):
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # infinities, which are refused as such
            same = np.flatnonzero(np.diff(values.astype(dtype)) == 0)
        if len(same):
            one, other = (_digits(value) for value in values[same[0] : same[0] + 2])
            name = place if columns is None else repr(columns[place])
            way = "subtract a number near them beforehand"
            if dtype == np.float32:
                way = "a first Standardize layer subtracts their mean in float64, before it rounds them"
            return f"x, column {name}: {dtype} merges values that differ, such as {one} and {other}; {way}"
    return ""


def find_outside(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows of ``x`` (rows, n_in), finite numbers, with one that ``dtype`` rounds to infinity, (n,) int64."""
    if x.dtype.kind != "f" or x.dtype.itemsize <= dtype.itemsize:
        return np.empty(0, np.int64)
    found = []
    for rows in chunks(len(x), x[:1].nbytes):
        with np.errstate(over="ignore"):
            is_outside = ~np.isfinite(x[rows].astype(dtype)).all(axis=1)
        found.append(rows.start + np.flatnonzero(is_outside))
    return np.concatenate(found)


def _digits(value: Any) -> str:
    """All digits of a number."""
    return str(int(value)) if value == np.floor(value) else repr(float(value))


def is_bytes(x: Any) -> bool:
    """Whether ``x``, an array or a table, is of uint8."""
    if isinstance(x, np.ndarray):
        return x.dtype == np.uint8
    if getattr(x, "dtype", None) is not None:
        return str(x.dtype).rpartition(".")[2] == "uint8"  # NumPy's, or torch.uint8
    if is_card_frame(x):
        return all(x[name].dtype == np.uint8 for name in x.columns)
    names = _column_names(x)
    return names is not None and len(names) > 0 and _table_array(x, names).dtype == np.uint8


def _column_names(x: Any) -> list[Any] | None:
    """The names of the columns of a table (pandas, Polars, Arrow), or None if ``x`` is none."""
    names = getattr(x, "column_names", None)
    names = getattr(x, "columns", None) if names is None else names
    return None if names is None or callable(names) else list(names)


def _table_array(x: Any, names: Sequence[Any]) -> np.ndarray:
    """The columns of a table side by side, (rows, columns)."""
    with contextlib.suppress(TypeError, ValueError):  # columns that no array holds together
        whole = np.asarray(x)
        if whole.dtype.kind in "biuf" and whole.ndim == 2:
            return whole
    # Columns of several types, which are of numbers one by one.
    columns, refused = [], {}
    for place, name in enumerate(names):
        column = x.iloc[:, place] if hasattr(x, "iloc") else x[name]
        values = np.asarray(column)
        if values.dtype.kind == "O" and not any(isinstance(value, (str, bytes)) for value in values):
            with contextlib.suppress(TypeError, ValueError):  # which is said below
                values = values.astype(np.float64)
        if values.dtype.kind not in "biuf":
            refused[repr(name)] = f"{getattr(column, 'dtype', values.dtype)}, such as {values[0]!r}"
        columns.append(values)
    if refused:
        got = "; ".join(f"column {name} of {kind}" for name, kind in list(refused.items())[:NAMED_MOST])
        hint = "leave them out, or make numbers of them, as pandas.get_dummies does"
        raise DtypeError("x", expected="columns of numbers", got=got, hint=hint)
    return np.stack(columns, axis=1)


def check_inputs(x: ArrayLike) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The inputs to keep, (rows, n_in), and the names of their columns where a table has names.

    Those on a card stay there; what is returned then reads like an array.
    """
    expected = "(rows, features)"
    if is_card_frame(x):
        return _joined_columns(x)
    if is_on_card(x):
        return _check_card_inputs(x), None
    if hasattr(x, "toarray"):  # of SciPy
        raise DtypeError("x", expected=f"an array {expected}", got=f"a {type(x).__name__}", hint="x.toarray()")
    names = _column_names(x)
    array = as_array("x", x, expected) if names is None or not len(names) else _table_array(x, names)
    dtype = _real_dtype("x", array, "real numbers of up to 64 bits", INPUT_DTYPES)
    if array.ndim < 2:
        hint = "one feature is x.reshape(-1, 1), one row is x.reshape(1, -1)"
        raise ShapeError("x", expected=expected, got=f"shape {array.shape}", hint=hint)
    if len(array) == 0:
        raise EmptyDataError("x", expected="at least one row", got=f"shape {array.shape}")
    if array.size == 0:
        raise ShapeError("x", expected="at least one feature", got=f"shape {array.shape}")
    rows = np.ascontiguousarray(array, dtype).reshape(len(array), -1)  # (rows, n_in)
    # As scikit-learn counts it, names are strings; numbers that count columns are none.
    is_named = bool(names) and all(isinstance(name, str) for name in names or ())
    columns = tuple(check_text("column of x", name) for name in names or ()) if is_named else None
    check_finite("x", rows, columns)
    return frozen(rows), columns


def _joined_columns(x: Any) -> tuple[Any, tuple[str, ...] | None]:
    """The columns of a table on a card in one array there, which is the data set's own, and their names."""
    names = list(x.columns)
    columns = [open_on_card(f"column {name!r} of x", x[name]) for name in names]
    if not columns:
        raise ShapeError("x", expected="at least one feature", got="no columns")
    types = {column.dtype.name for column in columns}
    if len(types) > 1 or not types <= {"float32", "uint8"}:
        kinds = ", ".join(f"{name!r} of {column.dtype}" for name, column in zip(names, columns, strict=True))
        expected, hint = "columns of one type, float32 or uint8", "x.astype('float32') converts them there"
        raise DtypeError("x on a card", expected=expected, got=kinds, hint=hint)
    cards = {column.card for column in columns}
    if len(cards) > 1:
        raise ConfigurationError("x", expected="columns on one card", got=f"on the cards {sorted(cards)}")
    rows = {column.shape for column in columns}
    if len(rows) > 1 or len(columns[0].shape) != 1 or not len(columns[0]):
        kind = EmptyDataError if rows == {(0,)} else ShapeError
        raise kind("x", expected="columns (rows,), at least one row", got=f"shapes {sorted(rows)}")
    is_named = all(isinstance(name, str) for name in names)
    return _check_card_inputs(columns[0].side_by_side(columns)), tuple(names) if is_named else None


def _check_card_inputs(x: Any) -> Any:
    """Inputs on a card, (rows, n_in), to be read where they lie."""
    array = open_on_card("x", x)
    rows, n_in = check_shape("x", array.shape)
    if array.dtype not in (np.float32, np.uint8):
        hint = "x.float() of PyTorch, x.astype('float32') of others; what is converted stays on the card"
        raise DtypeError("x on a card", expected="float32 or uint8", got=f"dtype {array.dtype}", hint=hint)
    if array.address % ALIGNMENT:
        hint = "a copy is aligned: x.clone() of PyTorch, x.copy() of others"
        expected = f"an address that is a multiple of {ALIGNMENT} bytes"
        raise ConfigurationError("x on a card", expected=expected, got=f"{array.address:#x}", hint=hint)
    flat: Any = array.reshape(rows, n_in)
    if not flat.is_finite:
        check_finite("x", flat)  # which finds the place
    return flat


def check_scale(scale: float | None, x: np.ndarray) -> Inputs:
    """What the rows ``x`` mean, which were given with this scale."""
    told = None if scale is None else check_number("scale", scale, above=0)
    if told is not None and not LEAST_SCALE <= told <= MOST_SCALE:
        expected = f"from {LEAST_SCALE:.3g} to {MOST_SCALE:.3g}, so that float32 holds each byte times it"
        raise ConfigurationError("scale", expected=expected, got=told)
    if x.dtype != np.uint8:
        return Inputs("floats", told)
    if told is None and _is_binary(x):
        message = "x: bytes that are only 0 and 1 are multiplied by 1/255; scale=1 keeps them, scale=1/255 is as now"
        warn_caller(message)
    return Inputs("bytes", USUAL_SCALE if told is None else told, told is not None)


def _is_binary(x: np.ndarray) -> bool:
    """Whether bytes (rows, n_in) are 0 and 1, with a 1 among them; looks no further than the first other one."""
    found = False
    for rows in chunks(len(x), x[:1].nbytes):
        most = x[rows].max()
        if most > 1:
            return False
        found = found or most == 1
    return found


def check_classes(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    expected = "a sequence of names"
    names = () if isinstance(classes, str) else as_list("classes", classes, expected)
    if not names or not all(isinstance(name, str) for name in names):
        raise DtypeError("classes", expected=expected, got=shown(classes, typed=False))
    if len(set(names)) < len(names):
        raise ConfigurationError("classes", expected="names that differ", got=", ".join(names))
    return tuple(check_text("name in classes", name) for name in names)


def check_targets(
    y: ArrayLike | None, rows: int, classes: tuple[str, ...] | None
) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """The targets to keep, (rows,) or (rows, m), and the names of their classes."""
    if y is None:
        if classes is not None:
            raise ConfigurationError("classes", expected="none without y", got=", ".join(classes))
        return None, None
    expected = f"({rows},) or ({rows}, outputs), as x has {rows} rows"
    array = as_array("y", y, expected)
    # NumPy 2's variable-length strings are of kind T.
    strings = array.dtype.kind in "UT" or (
        array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat)
    )
    if not strings:
        kept = _real_dtype("y", array, "integers, booleans, strings or real numbers of up to 64 bits")
    if array.ndim not in (1, 2) or len(array) != rows or array.size == 0 or (strings and array.ndim == 2):
        hint = "np.ravel(y)" if array.ndim == 2 and array.shape == (rows, 1) else ""
        raise ShapeError("y", expected=f"({rows},)" if strings else expected, got=f"shape {array.shape}", hint=hint)
    if strings:
        labels, names = _code_strings(array, classes)
        return frozen(labels), names

    integral = array.dtype.kind in "biu"
    array = np.asarray(array, array.dtype.newbyteorder("=") if integral else kept)
    check_finite("y", array)
    if classes is not None:
        if array.ndim != 1 or not (integral or is_whole(array)):
            got = f"{array.dtype} {array.shape}"
            raise ConfigurationError("classes", expected=f"integer or string labels ({rows},) in y", got=got)
        check_label_range(array, len(classes))
        array = array if integral else array.astype(np.int64)
    return frozen(array), classes


def _code_strings(y: np.ndarray, classes: tuple[str, ...] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels of the strings ``y``, (rows,) int64, and the names they stand for."""
    found, codes = np.unique(y, return_inverse=True)  # (distinct,), (rows,)
    if classes is None:
        return codes.astype(np.int64, copy=False), tuple(check_text("class in y", name) for name in found)
    positions = {name: position for position, name in enumerate(classes)}
    unknown = np.array([name not in positions for name in found])[codes]  # (rows,)
    if unknown.any():
        row = first_row(unknown)
        raise DataError("y", expected="one of the classes " + ", ".join(classes), got=f"{str(y[row])!r} at row {row}")
    return np.array([positions[name] for name in found], np.int64)[codes], classes


def is_whole(array: np.ndarray) -> bool:
    """Whether all numbers, finite ones, are whole."""
    return array.dtype.kind in "biu" or bool((array == np.floor(array)).all())


def check_label_range(labels: np.ndarray, n_classes: int) -> None:
    """``labels`` is (rows,), of whole numbers."""
    outside = (labels < 0) | (labels >= n_classes)
    if outside.any():
        row, least, most = first_row(outside), labels.min(), labels.max()
        if (least, most) == (1, n_classes):
            hint = f"labels that count from 1 to {n_classes} are y - 1"
        elif least >= 0:
            hint = f"labels up to {most} are for a last layer of n_out={int(most) + 1}"
        else:
            hint = "labels of -1 and 1 are (y > 0)" if n_classes == 2 and most == 1 else ""
        got = f"{labels[row]} at row {row}"
        raise DataError("class labels", expected=f"whole numbers from 0 to {n_classes - 1}", got=got, hint=hint)


def check_weight(weight: ArrayLike | None, rows: int) -> np.ndarray | None:
    if weight is None:
        return None
    expected = f"({rows},), as x has {rows} rows"
    array = as_array("weight", weight, expected)
    dtype = _real_dtype("weight", array, "real numbers of up to 64 bits")
    if array.shape != (rows,):
        raise ShapeError("weight", expected=expected, got=f"shape {array.shape}")
    array = np.asarray(array, np.float32 if dtype == np.uint8 else dtype)
    check_finite("weight", array)
    negative = array < 0
    if negative.any():
        row = first_row(negative)
        raise DataError("weight", expected="numbers of at least 0", got=f"{array[row]} at row {row}")
    if not array.any():
        raise DataError("weight", expected="a weight above 0", got=f"{rows} times 0")
    return frozen(array)
