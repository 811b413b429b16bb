"""Arrays of other libraries that lie on a card: what they say of themselves, and how they are handed out.

Two protocols are read: DLPack (https://dmlc.github.io/dlpack/latest/python_spec.html), by which the library also orders
its work before what reads the array; and the CUDA array interface, versions 2 and 3
(https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).  CuPy, PyTorch, JAX and Numba speak one of them
or both.  Nothing here calls a driver: a backend puts in by :func:`set_reader` what can read a card.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigurationError, DataError, DtypeError, MlpgpuError, ShapeError

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # kinds of devices, as DLPack numbers them
ALIGNMENT = 16  # bytes that kernels load at a time
_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}  # of NumPy's dtypes, by DLPack's codes
_CAPSULE = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("axes", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


# Prototypes of our own, since other libraries may set those of ctypes.pythonapi.
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_dying_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of_dying = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True)
class CardView:
    """What an array on a card says of itself; rows follow each other without gaps.

    Attributes:
        card: the card's number, or None where the protocol does not say it.
        stream: the handle of the stream whose work must end before the array is read; 0 for all streams of the
            context, None where the library has seen to it.
        owner: what keeps the memory while it is held.
    """

    card: int | None
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    stream: int | None
    owner: Any

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class CardArray(Protocol):
    """An array on a card whose rows can be read like those of a memory map: each access copies them to the host."""

    card: int
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: Any

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any) -> np.ndarray: ...
    def reshape(self, *shape: int) -> CardArray: ...
    @property
    def is_finite(self) -> bool: ...
    def checksum(self, rows: np.ndarray | None) -> int: ...
    def side_by_side(self, columns: Sequence[Any]) -> Any:
        """Arrays (rows,) of this type on this card, this one the first of them, as a new array (rows, columns) there.

        It speaks DLPack and the CUDA array interface.

        Raises:
            BackendError: the card has not the memory.
        """


class Reader(Protocol):
    """What a backend puts in: opens an array on a card, whose kind and device were seen already."""

    def __call__(self, what: str, x: Any) -> CardArray: ...


_readers: list[Reader] = []


def set_reader(reader: Reader) -> None:
    """Arrays on cards are opened by ``reader`` from now on."""
    _readers[:] = [reader]


def is_on_card(x: Any) -> bool:
    """Whether ``x`` is an array that says it lies on a CUDA card, by either protocol."""
    if isinstance(x, (np.ndarray, np.generic, list, tuple, int, float, str)):
        return False
    kind = device_of(x)
    return kind in (CUDA, CUDA_MANAGED) if kind is not None else has_interface(x)


def device_of(x: Any) -> int | None:
    """The kind of device that an array lies on, as DLPack numbers them; None where it does not speak DLPack."""
    method = getattr(type(x), "__dlpack_device__", None)
    if method is None or not hasattr(type(x), "__dlpack__"):
        return None
    try:
        return int(method(x)[0])
    except Exception:  # whatever a library raises for an array that DLPack has no words for
        return None


def has_interface(x: Any) -> bool:
    """Whether an array has the CUDA array interface; that of a tensor that requires gradients raises."""
    try:
        return hasattr(x, "__cuda_array_interface__")
    except Exception:
        return True  # it is there, and says why it cannot be read when it is


def open_on_card(what: str, x: Any) -> CardArray:
    """The array ``x`` on its card; ``what`` is what errors call it.

    Raises:
        DtypeError, ShapeError, ConfigurationError, DataError: it is none that can be read where it lies.
        BackendError: its card cannot be used.
    """
    return _readers[0](what, x)


def is_card_frame(x: Any) -> bool:
    """Whether ``x`` is a table whose columns lie on a card, as a DataFrame of cuDF is."""
    return hasattr(x, "to_cupy") and hasattr(x, "columns")


def view_of(what: str, x: Any, stream: int) -> CardView:
    """What ``x`` says of itself; its library lets ``stream``, the handle of a stream of ours, wait for its work.

    Raises:
        as :func:`open_on_card` does.
    """
    try:
        view = _by_dlpack(what, x, stream) if device_of(x) is not None else _by_interface(what, x)
    except MlpgpuError:
        raise
    except Exception as error:  # a tensor that requires gradients, or whatever else a library refuses
        hint = f"{what}.detach()" if hasattr(x, "detach") else ""
        expected = "an array on a card that DLPack or the CUDA array interface can hand over"
        raise DtypeError(what, expected=expected, got=f"{type(x).__name__}: {error}", hint=hint) from error
    if view.nbytes and view.address % view.dtype.itemsize:
        expected = f"an address that is a multiple of {view.dtype.itemsize} bytes"
        raise ConfigurationError(what, expected=expected, got=f"{view.address:#x}", hint=f"{what}.copy()")
    return view


def _by_dlpack(what: str, x: Any, stream: int) -> CardView:
    _, index = x.__dlpack_device__()
    # A capsule that is never renamed frees its tensor when it goes: holding it holds the memory.
    capsule = x.__dlpack__(stream=stream)
    if not _is_capsule(capsule, _CAPSULE):
        raise DtypeError(what, expected="a DLPack capsule of an unversioned tensor", got=repr(capsule))
    tensor = ctypes.cast(_pointer_of(capsule, _CAPSULE), ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.axes))
    dtype = _numpy_dtype(what, tensor.dtype)
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * dtype.itemsize for axis in range(tensor.axes))
        _check_strides(what, shape, strides, dtype)
    address = (tensor.data or 0) + tensor.byte_offset
    return CardView(int(index), address, shape, dtype, None, (x, capsule))


def _numpy_dtype(what: str, dtype: _Dtype) -> np.dtype:
    kinds = {code: kind for kind, code in _KINDS.items()}
    if dtype.lanes != 1 or dtype.code not in kinds or dtype.bits not in (8, 16, 32, 64):
        got = "bfloat16" if dtype.code == 4 else f"DLPack's type {dtype.code} of {dtype.bits} bits"
        raise DtypeError(what, expected="real numbers of up to 64 bits", got=got, hint="convert it to float32")
    return np.dtype(f"{kinds[dtype.code]}{dtype.bits // 8}")


def _by_interface(what: str, x: Any) -> CardView:
    told = x.__cuda_array_interface__
    if told.get("version", 0) < 2:
        raise DtypeError(what, expected="the CUDA array interface from version 2 on", got=told.get("version"))
    if told.get("mask") is not None:
        raise DataError(what, expected="no masked values", got="a mask", hint="fill them, or leave these rows out")
    dtype, shape = np.dtype(told["typestr"]), tuple(map(int, told["shape"]))
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or not dtype.isnative:
        raise DtypeError(what, expected="real numbers of up to 64 bits", got=f"dtype {dtype}")
    if told.get("strides") is not None:
        _check_strides(what, shape, tuple(told["strides"]), dtype)
    # Version 2 says nothing of streams, so all of them must end; None of version 3 means that there is nothing to do.
    stream = told.get("stream") if told["version"] >= 3 else 0
    if told["version"] >= 3 and stream == 0:
        raise DtypeError(what, expected="a stream's handle, 1, 2 or None", got="stream 0, which the protocol excludes")
    return CardView(None, int(told["data"][0]), shape, dtype, stream, x)


def _check_strides(what: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse gaps, and another order of axes than C's; of an axis of one element any stride will do."""
    step = dtype.itemsize
    for length, stride in reversed(list(zip(shape, strides, strict=True))):
        if length > 1 and stride != step and all(shape):
            expected = "a C-contiguous array, since it is read where it lies"
            got = f"shape {shape} with strides of {strides} bytes"
            hint = f"{what}.contiguous() of PyTorch, cupy.ascontiguousarray({what})"
            raise ConfigurationError(what, expected=expected, got=got, hint=hint)
        step *= length


def check_shape(what: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of inputs of this shape, whose axes but the first are one.

    Raises:
        ShapeError: there are no rows, no features, or no axis of them.
    """
    if len(shape) < 2 or not all(shape):
        hint = "one feature is x.reshape(-1, 1), one row is x.reshape(1, -1)" if len(shape) < 2 else ""
        raise ShapeError(what, expected="(rows, features), at least one of each", got=f"shape {shape}", hint=hint)
    return shape[0], prod(shape[1:])


# --- handing out ---

_handed: dict[int, tuple[Any, ...]] = {}  # what keeps each tensor that was handed out, by the tensor's address


def _let_go(address: int, handed: dict[int, tuple[Any, ...]] = _handed) -> None:
    handed.pop(address, None)


def _destroy_capsule(
    capsule: int,
    is_capsule: Callable[..., int] = _is_dying_capsule,  # at Python's end this module has no names any more
    pointer_of: Callable[..., int] = _pointer_of_dying,
    let_go: Callable[[int], None] = _let_go,
    name: bytes = _CAPSULE,
) -> None:
    # Whoever takes the tensor renames the capsule, and calls the deleter.
    if is_capsule(capsule, name):
        let_go(pointer_of(capsule, name))


# What C calls must never be collected.
_deleter, _destructor = _Deleter(_let_go), _Destructor(_destroy_capsule)


def capsule_of(
    owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype, *, card: int, kind: int = CUDA
) -> Any:
    """A DLPack capsule of a C-contiguous array at ``address``, which holds ``owner`` until its taker lets go of it."""
    lengths = (ctypes.c_int64 * len(shape))(*shape)
    managed = _Managed()
    managed.tensor.data, managed.tensor.device = address, _Device(kind, card)
    managed.tensor.axes, managed.tensor.dtype = len(shape), _Dtype(_KINDS[dtype.kind], 8 * dtype.itemsize, 1)
    managed.tensor.shape = ctypes.cast(lengths, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _deleter
    where = ctypes.addressof(managed)
    _handed[where] = managed, lengths, owner
    return _new_capsule(where, _CAPSULE, _destructor)


def in_library_of(like: Any, result: Any) -> Any:
    """``result``, which speaks DLPack, as an array of the library that ``like`` is of; itself where that takes none."""
    take = _taker(like)
    return result if take is None else take(result)


def _taker(like: Any) -> Callable[[Any], Any] | None:
    """``from_dlpack`` of the array's library, by the array API standard or by the module that its class is of.

    cuDF's tables have columns one after another, so what has rows is an array of CuPy's, which cuDF is made with.
    """
    if hasattr(like, "to_cupy"):
        return getattr(sys.modules.get("cupy"), "from_dlpack", None)
    spaces = [like.__array_namespace__()] if hasattr(like, "__array_namespace__") else []
    spaces.append(sys.modules.get(type(like).__module__.partition(".")[0]))
    return next((space.from_dlpack for space in spaces if hasattr(space, "from_dlpack")), None)
