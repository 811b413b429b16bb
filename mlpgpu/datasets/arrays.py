"""Arrays as a data set keeps them: what is converted, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ConfigurationError, DataError, DtypeError, EmptyDataError, ShapeError, check_number

CHUNK_BYTES = 1 << 20
KEPT_DTYPES = (np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float64))


def _as_array(what: str, value: ArrayLike, expected: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of unequal length
        raise ShapeError(what, expected=expected, got=error) from error


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


def check_finite(what: str, array: np.ndarray) -> None:
    """``array`` is (rows,) or (rows, columns) with at least one element."""
    if array.dtype.kind != "f":
        return
    for rows in chunks(len(array), array[:1].nbytes):
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


def check_inputs(x: ArrayLike) -> np.ndarray:
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
    check_finite("x", rows)
    return frozen(rows)


def check_scale(scale: float | None, dtype: np.dtype) -> float | None:
    if dtype == np.uint8:
        return 1 / 255 if scale is None else check_number("scale", scale, above=0)
    if scale is not None:
        raise ConfigurationError("scale", expected=f"none for inputs of {dtype}", got=scale, hint="it is for uint8")
    return None


def check_classes(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    names = () if isinstance(classes, str) else tuple(classes)
    if not names or not all(isinstance(name, str) for name in names):
        raise DtypeError("classes", expected="a sequence of names", got=repr(classes))
    if len(set(names)) < len(names):
        raise ConfigurationError("classes", expected="names that differ", got=", ".join(names))
    return tuple(str(name) for name in names)


def check_targets(
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
        return frozen(labels), names

    integral = array.dtype.kind in "biu"
    array = np.asarray(array, array.dtype.newbyteorder("=") if integral else kept)
    check_finite("y", array)
    if classes is not None:
        if not integral or array.ndim != 1:
            got = f"{array.dtype} {array.shape}"
            raise ConfigurationError("classes", expected=f"integer or string labels ({rows},) in y", got=got)
        check_label_range(array, len(classes))
    return frozen(array), classes


def _code_strings(y: np.ndarray, classes: tuple[str, ...] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels of the strings ``y``, (rows,) int64, and the names they stand for."""
    found, codes = np.unique(y, return_inverse=True)  # (distinct,), (rows,)
    if classes is None:
        return codes.astype(np.int64, copy=False), tuple(str(name) for name in found)
    positions = {name: position for position, name in enumerate(classes)}
    unknown = np.array([name not in positions for name in found])[codes]  # (rows,)
    if unknown.any():
        row = first_row(unknown)
        raise DataError("y", expected="one of the classes " + ", ".join(classes), got=f"{str(y[row])!r} at row {row}")
    return np.array([positions[name] for name in found], np.int64)[codes], classes


def check_label_range(labels: np.ndarray, n_classes: int) -> None:
    """``labels`` is (rows,), of whole numbers."""
    outside = (labels < 0) | (labels >= n_classes)
    if outside.any():
        row = first_row(outside)
        got = f"{labels[row]} at row {row}"
        raise DataError("class labels", expected=f"whole numbers from 0 to {n_classes - 1}", got=got)


def check_weight(weight: ArrayLike | None, rows: int) -> np.ndarray | None:
    if weight is None:
        return None
    expected = f"({rows},), as x has {rows} rows"
    array = _as_array("weight", weight, expected)
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
