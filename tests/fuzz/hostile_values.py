"""Values that nobody should pass, or that somebody does without a thought: by name, each made anew for each call."""

from __future__ import annotations

import enum
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

ROWS, COLUMNS = 12, 5  # of the data in every call that nothing was replaced in


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Named(str, enum.Enum):
    RELU = "relu"


class Unconvertible:
    """As a tensor that requires gradients: it looks like an array, and refuses to become one."""

    requires_grad = True
    dtype, shape, ndim = np.dtype(np.float32), (ROWS, COLUMNS), 2

    def __len__(self) -> int:
        return ROWS

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")

    __array__ = __float__ = __int__ = __index__ = __getitem__ = __iter__ = _refuse


class NoNumber:
    """Says that it is a number, and is none."""

    def __float__(self) -> float:
        raise ArithmeticError("no number")

    def __index__(self) -> int:
        raise ArithmeticError("no number")


class NoArray:
    def __array__(self, *_: Any, **__: Any) -> Any:
        return "no array"


class NoLength:
    def __len__(self) -> int:
        return -1


class NoPath(os.PathLike):
    def __fspath__(self) -> Any:
        raise RuntimeError("no path")


class BytesPath(os.PathLike):
    def __fspath__(self) -> Any:
        return b"bytes.h5"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Subclass(np.ndarray):
    pass


def _generator() -> Iterator[int]:
    yield 1
    yield 2


def _refusing(*_: Any) -> Any:
    raise KeyError("a function that fails")


def _masked(dtype: str, is_masked: bool) -> np.ma.MaskedArray:
    values = np.ma.MaskedArray(np.ones((ROWS, COLUMNS), dtype), mask=False)
    if is_masked:
        values[2, 1] = np.ma.masked
    return values


def _read_only(shape: tuple[int, ...]) -> np.ndarray:
    values = np.ones(shape, np.float32)
    values.flags.writeable = False
    return values


PLAIN: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    **{f"int {number}": number for number in (-1, 0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1)},
    **{f"int 2**{n}": 2**n for n in (40, 63, 64, 70)},
    "int -2**63": -(2**63),
    "int 10**400": 10**400,
    **{
        f"float {number}": number
        for number in (0.0, -0.0, 0.5, 1.0, 3.0, 2.5, -1.5, math.nan, math.inf, -math.inf, 1e-50, 1e-320, 1e39, 1e308)
    },
    "complex": 1 + 2j,
    "Decimal": Decimal("0.5"),
    "Decimal NaN": Decimal("NaN"),
    "Decimal sNaN": Decimal("sNaN"),
    "Decimal 1e400": Decimal("1e400"),
    "Fraction": Fraction(1, 3),
    "Fraction 3": Fraction(3),
    "Enum": Colour.RED,
    "IntEnum": Level.HIGH,
    "str Enum": Named.RELU,
    **{
        f"str {text!r}": text
        for text in ("", " ", "no", "True", "3", "0.5", "a\0b", "\ud800", "café", "..", "/", "cuda:99999999999999")
    },
    **{f"str {text!r}": text for text in ("x/y.h5", "auto", "cpu", "cuda", "none.h5", "{}", "%s%n", "\n")},
    "str long": "x" * 100_000,
    "str long path": "y" * 300 + ".h5",
    "bytes": b"relu",
    "bytes empty": b"",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "Ellipsis": ...,
    "NotImplemented": NotImplemented,
    "object": object(),
    "class int": int,
    "class Exception": ValueError,
    "module": math,
    "slice": slice(1, 2),
    "range": range(3),
}

NESTED: dict[str, Callable[[], Any]] = {
    "list empty": list,
    "list of list": lambda: [[]],
    "list ragged": lambda: [[1, 2], [3]],
    "list nested": lambda: [[[[1]]]],
    "list of None": lambda: [None],
    "list of NaN": lambda: [math.nan] * ROWS,
    "list of numbers": lambda: [1.0, 2.0, 3.0],
    "list of huge int": lambda: [2**70] * ROWS,
    "list of text": lambda: ["a", "b"],
    "list of surrogate": lambda: ["\ud800", "b", "c"],
    "list of mixed": lambda: [1, "a", None],
    "list of object": lambda: [object()],
    "list deep": lambda: _deep(200),
    "list of itself": lambda: _itself(),
    "tuple empty": tuple,
    "tuple": lambda: (1, 2),
    "tuple of three": lambda: (None, None, None),
    "tuple of text": lambda: ("x", "y"),
    "set": lambda: {1, 2},
    "frozenset": frozenset,
    "dict empty": dict,
    "dict float key": lambda: {1.5: 2.0},
    "dict numpy keys": lambda: {np.int64(1): np.float32(2.0)},
    "dict True key": lambda: {True: 2.0},
    "dict None key": lambda: {None: 1.0},
    "dict tuple key": lambda: {(1, 2): 3.0},
    "dict NaN": lambda: {0: math.nan},
    "dict huge": lambda: {0: 1e39, 2**70: 1.0},
    "dict tiny": lambda: {0: 1e-50, 1: 1e-50, 2: 1e-50},
    "dict text": lambda: {"a": "b"},
    "dict surrogate": lambda: {"\ud800": 1.0},
    "dict of weights": lambda: {0: 2, 1: Fraction(1, 2), 2: np.float16(3)},
    "dict same twice": lambda: {1: 2.0, np.float64(2.0): 3.0, "1": 4.0},
    "dict of arrays": lambda: {"0.weight": np.full((COLUMNS, 4), 1e39), "0.bias": np.zeros(4)},
    "dict of masked": lambda: {"0.bias": np.ma.MaskedArray(np.zeros(4), mask=[0, 1, 0, 0])},
    "generator": _generator,
    "iterator": lambda: iter([1, 2, 3]),
    "map": lambda: map(str, [1, 2]),
    "file": io.StringIO,
    "lambda of none": lambda: lambda: 0.0,
    "lambda of one": lambda: lambda a: 0.0,
    "lambda of five": lambda: lambda a, b, c, d, e: 0.0,
    "lambda of any": lambda: lambda *a: None,
    "function that fails": lambda: _refusing,
    "builtin": lambda: len,
    "tensor that requires gradients": Unconvertible,
    "no number": NoNumber,
    "no array": NoArray,
    "no length": NoLength,
    "no path": NoPath,
    "path of bytes": BytesPath,
    "unprintable": Unprintable,
}

SCALARS = ("?", *"bBhHiIqQefdgFDO", "M8[s]", "m8[s]", "U3", "S3", "V3")


def _scalars() -> dict[str, Callable[[], Any]]:
    """NumPy's scalars of every type, arrays of no axis, and of one element."""
    found: dict[str, Callable[[], Any]] = {}
    for code in SCALARS:
        dtype = np.dtype(code)
        for value in (1, 3, 127) if dtype.kind in "biuf" else (1,):
            one = np.ones(1, dtype) if dtype.kind not in "biuf" else np.full(1, value, dtype)
            found[f"numpy {dtype} {value}"] = lambda one=one: one[0]
            found[f"numpy 0-d {dtype} {value}"] = lambda one=one: one.copy().reshape(())
        found[f"numpy 1-d {dtype}"] = one.copy
    for code in ("e", "f", "d"):
        for value in (math.nan, math.inf, -1.0, 0.5):
            found[f"numpy {code} {value}"] = lambda code=code, value=value: np.dtype(code).type(value)
    return found


ARRAYS: dict[str, Callable[[], Any]] = {
    "array empty": lambda: np.empty(0),
    "array no rows": lambda: np.empty((0, COLUMNS), np.float32),
    "array no columns": lambda: np.empty((ROWS, 0), np.float32),
    "array of objects": lambda: np.array([[1.0, None]] * ROWS, object),
    "array of numbers as objects": lambda: np.ones((ROWS, COLUMNS), object),
    "array of text": lambda: np.full((ROWS, COLUMNS), "a"),
    "array of surrogates": lambda: np.array(["\ud800", "b", "c"] * (ROWS // 3)),
    "array of labels": lambda: np.array(["a", "b", "c"] * (ROWS // 3), object),
    "array of masked": lambda: _masked("f4", True),
    "array of masked bytes": lambda: _masked("u1", True),
    "array of masked doubles": lambda: _masked("f8", True),
    "array of masked targets": lambda: _masked("f4", True)[:, :3],
    "array of masked labels": lambda: np.ma.MaskedArray([0, 1, 2] * (ROWS // 3), mask=[1] + [0] * (ROWS - 1)),
    "array of no mask": lambda: _masked("f4", False),
    "masked constant": lambda: np.ma.masked,
    "list of masked": lambda: list(_masked("f4", True)),
    "list of masked elements": lambda: [[1.0, np.ma.masked, 0.0, 1.0, 2.0]] * ROWS,
    "array read-only": lambda: _read_only((ROWS, COLUMNS)),
    "array read-only targets": lambda: _read_only((ROWS, 3)),
    "array read-only rows": lambda: _read_only((ROWS,)),
    **{
        f"array {kind} {value}": lambda shape=shape, value=value: np.full(shape, value)
        for kind, shape in (("x", (ROWS, COLUMNS)), ("y", (ROWS, 3)), ("rows", (ROWS,)))
        for value in (math.nan, math.inf, 1e39, -1e39, 1e-50, 1e300, -1.0, 0.0, 2**53 + 1, 2**63)
    },
    **{
        f"array x {code}": lambda code=code: np.ones((ROWS, COLUMNS), code)
        for code in ("?", "i1", "u1", "i8", "u8", "e", ">f4", ">i4", "f8", "g", "F", "M8[s]", "V4")
    },
    **{
        f"array rows {code}": lambda code=code: (np.arange(ROWS) % 3).astype(code)
        for code in ("?", "i1", "u1", "i8", "u8", "e", "f4", ">i8", "f8", "g", "F", "U2", "S2")
    },
    "array negative labels": lambda: np.arange(ROWS) - 1,
    "array fractional labels": lambda: np.arange(ROWS) / 2,
    "array structured": lambda: np.zeros(ROWS, [("a", "f4"), ("b", "i4")]),
    "array strided": lambda: np.ones((ROWS * 2, COLUMNS * 2), np.float32)[::2, ::2],
    "array reversed": lambda: np.ones((ROWS, COLUMNS), np.float32)[::-1],
    "array Fortran": lambda: np.ones((COLUMNS, ROWS), np.float32).T,
    "array broadcast": lambda: np.broadcast_to(np.float32(1), (ROWS, COLUMNS)),
    "array of three axes": lambda: np.ones((ROWS, COLUMNS, 1), np.float32),
    "array of other rows": lambda: np.ones((ROWS + 1, COLUMNS), np.float32),
    "array of other columns": lambda: np.ones((ROWS, COLUMNS + 1), np.float32),
    "array of one axis": lambda: np.ones(COLUMNS, np.float32),
    "array subclass": lambda: np.ones((ROWS, COLUMNS), np.float32).view(Subclass),
    "matrix": lambda: np.ones((ROWS, COLUMNS), np.float32).view(np.matrix),
    "array dtype object of arrays": lambda: np.array([np.ones(2), np.ones(3), None], object),
    "array of weights of parameters": lambda: np.full((COLUMNS, 4), 1e39),
    "array masked of parameters": lambda: np.ma.MaskedArray(np.ones((COLUMNS, 4)), mask=np.eye(COLUMNS, 4) > 0),
    "pair of arrays": lambda: (np.ones((ROWS, COLUMNS)), np.ones((ROWS, 3))),
    "pair with masked": lambda: (_masked("f8", True), np.ones((ROWS, 3))),
    "pair of huge": lambda: (np.ones((ROWS, COLUMNS)), np.full((ROWS, 3), 1e39)),
    "triple of tiny weights": lambda: (np.ones((ROWS, COLUMNS)), np.ones((ROWS, 3)), np.full(ROWS, 1e-50)),
    "triple of huge weights": lambda: (np.ones((ROWS, COLUMNS)), np.ones((ROWS, 3)), np.full(ROWS, 1e39)),
    "pair of rows": lambda: (np.ones((ROWS, COLUMNS)), np.arange(ROWS) % 3),
    "pair of None": lambda: (None, None),
}


def paths(folder: Path) -> dict[str, Callable[[], Any]]:
    """Paths below ``folder``: of folders, of nothing, of other files, of devices."""
    garbage = folder / "garbage.h5"
    garbage.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(range(256)))
    (folder / "folder.h5").mkdir(exist_ok=True)
    names: Mapping[str, Any] = {
        "path of a folder": folder,
        "path of a folder .h5": folder / "folder.h5",
        "path of a folder as text": str(folder),
        "path without a folder": folder / "nothing" / "file.h5",
        "path of garbage": garbage,
        "path of garbage as text": str(garbage),
        "path below a file": garbage / "file.h5",
        "path of a device": "/dev/null",
        "path as bytes": os.fsencode(folder / "bytes.h5"),
        "path with a NUL": str(folder / "a\0b.h5"),
        "path with a surrogate": str(folder / "a\ud800b.h5"),
        "path with a surrogate escape": str(folder / "a\udc80b.h5"),
        "path of a long name": str(folder / ("z" * 300 + ".h5")),
        "path of a long way": str(folder / "/".join(["w" * 200] * 30) / "a.h5"),
        "path of a picture": folder / "picture.png",
        "path of IDX": folder / "new.idx",
        "path of .": Path("."),
        "path empty": Path(),
        "descriptor": 0,
    }
    return {name: lambda path=path: path for name, path in names.items()}


def _deep(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def _itself() -> list[Any]:
    nested: list[Any] = [1]
    nested.append(nested)
    return nested


def hostile_values(folder: Path) -> dict[str, Callable[[], Any]]:
    """All of them by name; what a call writes goes to ``folder``."""
    plain = {name: lambda value=value: value for name, value in PLAIN.items()}
    return {**plain, **NESTED, **_scalars(), **ARRAYS, **paths(folder)}
