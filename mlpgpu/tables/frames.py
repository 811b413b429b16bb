"""Tables in memory: frames of pandas, Polars and Arrow, and mappings of columns; all of them as a frame of pandas."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import BackendError, DtypeError, ShapeError


def load_pandas() -> ModuleType:
    """pandas, which only tables need.

    Raises:
        BackendError: it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        hint = "pip install 'mlpgpu[tables]'"
        raise BackendError("mlpgpu.Table", expected="the package pandas", got=error, hint=hint) from error
    return pandas


def is_frame(x: object) -> bool:
    """Whether ``x`` has named columns: a frame of any library, or a mapping of names to columns."""
    if isinstance(x, Mapping):
        return True
    has_names = hasattr(type(x), "columns") or hasattr(type(x), "column_names")  # asked of the class: none is computed
    return has_names and (hasattr(x, "__arrow_c_stream__") or hasattr(x, "__dataframe__") or hasattr(x, "iloc"))


def as_frame(x: Any) -> Any:
    """``x`` as a ``pandas.DataFrame``, whose columns have different names.

    Raises:
        DtypeError: it is no table, or a name is no string.
        ShapeError: columns differ in length, or two have one name.
        BackendError: pandas is not installed.
    """
    pandas = load_pandas()
    if hasattr(x, "collect") and not is_frame(x):  # a lazy frame
        raise DtypeError("table", expected="rows", got=f"a {type(x).__name__}", hint="collect() makes rows of it")
    if not is_frame(x):
        expected = "a frame (pandas, Polars, Arrow), a mapping of columns, or the path of a file"
        raise DtypeError("table", expected=expected, got=type(x).__name__)
    frame = x if isinstance(x, pandas.DataFrame) else _converted(pandas, x)
    names = list(frame.columns)
    odd = [name for name in names if not isinstance(name, str)]
    if odd:
        hint = "frame.columns = map(str, frame.columns)"
        raise DtypeError("names of columns", expected="strings", got=repr(odd[0]), hint=hint)
    check_names(names)
    return frame


def check_names(names: list[str]) -> None:
    """Refuse a table two of whose columns have the same name."""
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ShapeError("names of columns", expected="different ones", got=f"{twice[0]!r} more than once")


def _converted(pandas: Any, x: Any) -> Any:
    if isinstance(x, Mapping):
        try:
            return pandas.DataFrame(dict(x))
        except (TypeError, ValueError) as error:
            hint = "columns of one row are lists of one value"
            raise ShapeError("table", expected="columns of one length", got=error, hint=hint) from error
    if hasattr(x, "__arrow_c_stream__") and hasattr(pandas.DataFrame, "from_arrow"):
        with contextlib.suppress(ImportError):  # without pyarrow the columns are converted below
            return pandas.DataFrame.from_arrow(x)
    names = x.column_names if hasattr(type(x), "column_names") else list(x.columns)
    return pandas.DataFrame({name: np.asarray(x[name]) for name in names})
