"""Arrays that lie on a card, by stand-ins that speak the protocols: their memory is the host's, read as a card's is."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import sys
import weakref
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlpgpu as mg
from mlpgpu.backends.cuda.run.card_arrays import is_run
from mlpgpu.datasets import interchange
from mlpgpu.datasets.checksum import joined_checksum
from mlpgpu.datasets.interchange import CPU, CUDA, CardView, capsule_of, in_library_of, is_on_card, view_of
from mlpgpu.errors import BackendError, ConfigurationError, DataError, DtypeError, EmptyDataError, ShapeError

STREAM = 77  # of the reader
RANDOM = np.random.default_rng(4)
X, Y = RANDOM.normal(size=(50, 6)).astype(np.float32), RANDOM.integers(3, size=50)
WEIGHT = RANDOM.uniform(0.5, 2.0, 50).astype(np.float32)


class ByDlpack:
    """An array on card 1 that speaks DLPack alone."""

    def __init__(self, array: np.ndarray, *, device: tuple[int, int] = (CUDA, 1)) -> None:
        self.array, self.device, self.streams = array, device, []
        self.dtype, self.shape, self.ndim = array.dtype, array.shape, array.ndim

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        kind, card = self.device
        return capsule_of(self, self.array.ctypes.data, self.array.shape, self.array.dtype, card=card, kind=kind)


class ByInterface:
    """An array that speaks the CUDA array interface alone."""

    def __init__(self, array: np.ndarray, **changed: Any) -> None:
        self.array, self.changed = array, changed
        self.dtype, self.shape, self.ndim = array.dtype, array.shape, array.ndim

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self.array
        told = {"shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, True), "version": 3}
        return {**told, "strides": None if array.flags.c_contiguous else array.strides, "stream": None, **self.changed}


class OnCard:
    """What a reader gives: an array on a card, whose memory here is the host's."""

    def __init__(self, view: CardView, shape: tuple[int, ...], owner: Any) -> None:
        self.view, self.shape, self.owner = view, shape, owner
        self.card, self.address, self.dtype = 1 if view.card is None else view.card, view.address, view.dtype
        self.reads: list[int] = []

    @property
    def _all(self) -> np.ndarray:
        block = (ctypes.c_char * self.view.nbytes).from_address(self.address)
        return np.frombuffer(block, self.dtype).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        assert not isinstance(rows, tuple), "an array on a card gives rows, not elements"
        found = self._all[rows].copy()
        self.reads.append(found.size)
        return found

    def __reduce__(self) -> Any:
        return np.array, (self[:],)

    def reshape(self, *shape: int) -> OnCard:
        return OnCard(self.view, shape, self.owner)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self._all).all())

    def side_by_side(self, columns: Any) -> ByDlpack:
        return ByDlpack(np.stack([column[:] for column in columns], axis=1))

    def checksum(self, rows: np.ndarray | None) -> int:
        return zlib.crc32(self._all if rows is None else self._all[rows])


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    kept = interchange._readers[0]
    interchange.set_reader(lambda what, x: (lambda view: OnCard(view, view.shape, x))(view_of(what, x, STREAM)))
    yield
    interchange.set_reader(kept)


EACH = pytest.mark.parametrize("kind", [ByDlpack, ByInterface])


# --- the protocols ---


def test_what_lies_on_a_card() -> None:
    assert is_on_card(ByDlpack(X)) and is_on_card(ByInterface(X))
    assert is_on_card(ByDlpack(X, device=(interchange.CUDA_MANAGED, 0)))
    for other in (X, [1.0], 3.0, None, "text", ByDlpack(X, device=(CPU, 0)), SimpleNamespace()):
        assert not is_on_card(other)


@EACH
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "u1", "i8", "i4", "?"])
def test_a_view_is_of_the_same_memory(kind: Any, dtype: str) -> None:
    array = X.astype(dtype)
    view = view_of("x", kind(array), STREAM)
    assert (view.address, view.shape, view.dtype, view.nbytes) == (
        array.ctypes.data,
        X.shape,
        array.dtype,
        array.nbytes,
    )
    assert view.card == (1 if kind is ByDlpack else None)


def test_the_library_is_told_which_stream_reads() -> None:
    array = ByDlpack(X)
    assert view_of("x", array, STREAM).stream is None and array.streams == [STREAM]
    assert view_of("x", ByInterface(X), STREAM).stream is None  # nothing to wait for
    assert view_of("x", ByInterface(X, stream=2), STREAM).stream == 2
    assert view_of("x", ByInterface(X, version=2), STREAM).stream == 0  # of which nothing is said: all of them
    with pytest.raises(DtypeError, match="stream 0"):
        view_of("x", ByInterface(X, stream=0), STREAM)


@EACH
def test_a_view_holds_the_array(kind: Any) -> None:
    array = kind(X.copy())
    view, seen = view_of("x", array, STREAM), weakref.ref(array)
    del array
    gc.collect()
    assert seen() is not None
    del view
    gc.collect()
    assert seen() is None


class Raising(ByInterface):
    """As a tensor that requires gradients is."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("call detach first")

    def detach(self) -> ByInterface:
        return ByInterface(self.array)


@pytest.mark.parametrize(
    ("array", "error", "match"),
    [
        (ByInterface(np.asfortranarray(X)), ConfigurationError, "C-contiguous.*strides.*contiguous"),
        (ByInterface(X[:, ::2]), ConfigurationError, "C-contiguous"),
        (ByInterface(X[::-1]), ConfigurationError, "C-contiguous"),
        (ByInterface(X, data=(X.ctypes.data + 2, False)), ConfigurationError, "multiple of 4 bytes"),
        (ByInterface(X, data=(X.ctypes.data + 4, False)), ConfigurationError, "multiple of 16 bytes.*clone"),
        (ByInterface(X, mask=ByInterface(X > 0)), DataError, "mask"),
        (ByInterface(X, version=1), DtypeError, "version 2"),
        (ByInterface(X, typestr=">f4"), DtypeError, "dtype >f4"),
        (ByInterface(X, typestr="<c8"), DtypeError, "complex64"),
        (ByInterface(X.astype("f8")), DtypeError, "float32 or uint8.*float64.*astype"),
        (ByDlpack(X.astype("i8")), DtypeError, "float32 or uint8.*int64"),
        (Raising(X), DtypeError, "call detach first.*x.detach"),
        (ByDlpack(X[0]), ShapeError, r"\(rows, features\).*reshape"),
        (ByDlpack(np.empty((0, 6), np.float32)), (ShapeError, EmptyDataError), r"shape \(0, 6\)"),
        (ByInterface(X[:, 0].copy()), ShapeError, r"\(rows, features\).*reshape"),  # as a Series of cuDF is
    ],
)
def test_what_cannot_be_read_where_it_lies(array: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        mg.Dataset(array)


def test_bfloat16_says_its_name() -> None:
    array = ByDlpack(X.astype("f2"))
    capsules = [array.__dlpack__()]
    pointer = interchange._pointer_of(capsules[0], b"dltensor")
    managed = ctypes.cast(pointer, ctypes.POINTER(interchange._Managed)).contents
    managed.tensor.dtype.code = 4
    array.__dlpack__ = lambda stream: capsules[0]  # type: ignore[method-assign]
    with pytest.raises(DtypeError, match=r"bfloat16.*float32"):
        view_of("x", array, STREAM)
    capsules.clear()  # each of which holds the array


# --- handing out ---


class Result:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        return capsule_of(self, self.array.ctypes.data, self.array.shape, self.array.dtype, card=0, kind=CPU)


@pytest.mark.parametrize("shape", [(50, 6), (300,), (1, 300)])
def test_what_is_handed_out_is_the_same_memory_and_is_let_go(shape: tuple[int, ...]) -> None:
    """NumPy is a library that takes DLPack's capsules too."""
    result = Result(X.reshape(shape).copy())
    taken, seen = np.from_dlpack(result), weakref.ref(result)
    np.testing.assert_array_equal(taken, X.reshape(shape), strict=True)
    assert taken.ctypes.data == result.array.ctypes.data
    del result
    gc.collect()
    assert seen() is not None
    del taken
    gc.collect()
    assert seen() is None and not interchange._handed


def test_a_capsule_that_nobody_takes_is_let_go() -> None:
    capsule = Result(X).__dlpack__()
    assert len(interchange._handed) == 1
    del capsule
    gc.collect()
    assert not interchange._handed


def test_results_are_of_the_library_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = SimpleNamespace(from_dlpack=lambda result: ("standard", result))
    standard = SimpleNamespace(__array_namespace__=lambda: taken)
    assert in_library_of(standard, 5) == ("standard", 5)

    class Tensor:
        pass

    Tensor.__module__ = "library_on_card.tensors"
    assert in_library_of(Tensor(), 5) == 5  # which takes none: as it is
    module = SimpleNamespace(from_dlpack=lambda result: ("module", result))
    monkeypatch.setitem(__import__("sys").modules, "library_on_card", module)  # type: ignore[arg-type]  # any object serves as a module
    assert in_library_of(Tensor(), 5) == ("module", 5)


@given(st.integers(0, 70), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_checksums_of_pieces_make_that_of_all(count: int, nbytes: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, (count, nbytes)).astype(np.uint8)
    pieces = np.array([zlib.crc32(piece) for piece in data], np.uint32)
    assert joined_checksum(pieces, nbytes) == zlib.crc32(data)


# --- data sets ---


@EACH
def test_a_data_set_stays_on_its_card(kind: Any) -> None:
    data, host = mg.Dataset(kind(X), kind(Y), kind(WEIGHT)), mg.Dataset(X, Y, WEIGHT)
    assert (data.card, host.card) == (1, None)
    assert (len(data), data.n_in, data.scale) == (50, 6, None)
    storage: Any = data.storage_x
    assert storage.address == X.ctypes.data and not storage.reads  # checked there, and read by nobody
    for name in ("x", "y", "weight"):
        np.testing.assert_array_equal(getattr(data, name), getattr(host, name), strict=True)
    assert repr(data) == repr(host)
    assert data.identity() == host.identity()


def test_bytes_and_images_stay_too() -> None:
    images = (X[:48] * 20 + 128).astype(np.uint8).reshape(8, 6, 6)
    data = mg.Dataset(ByDlpack(images))
    assert data.n_in == 36 and data.scale == 1 / 255
    np.testing.assert_array_equal(data.x, images.reshape(8, 36), strict=True)


def test_splits_share_the_array_and_are_those_of_the_host() -> None:
    kept = X.copy()
    data, host = mg.Dataset(ByDlpack(X), Y, WEIGHT), mg.Dataset(X, Y, WEIGHT)
    for part, expected in zip(data.split(0.3, seed=2), host.split(0.3, seed=2), strict=True):
        assert part.card == 1 and part.storage_x is data.storage_x
        np.testing.assert_array_equal(part.x, expected.x, strict=True)
        np.testing.assert_array_equal(part.weight, expected.weight, strict=True)
        assert part.identity() == expected.identity()
        np.testing.assert_array_equal(part.first(5).x, expected.first(5).x)
    np.testing.assert_array_equal(X, kept)


def test_a_number_that_is_not_finite_is_named() -> None:
    wrong = X.copy()
    wrong[17, 4] = np.inf
    with pytest.raises(DataError, match="inf at row 17, column 4"):
        mg.Dataset(ByDlpack(wrong))


def test_labels_and_weights_on_a_card_are_checked() -> None:
    with pytest.raises(DataError, match="weight"):
        mg.Dataset(ByDlpack(X), Y, ByDlpack(-WEIGHT))
    with pytest.raises(ShapeError, match="y"):
        mg.Dataset(ByDlpack(X), ByInterface(Y[:7]))
    with pytest.raises(DataError, match="class labels"):
        mg.Dataset(ByDlpack(X), ByInterface(Y + 5)).labels(3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_a_copy_is_on_the_host(copied: Any) -> None:
    data = copied(mg.Dataset(ByDlpack(X), Y))
    assert data.card is None and isinstance(data.storage_x, np.ndarray)
    np.testing.assert_array_equal(data.x, X, strict=True)
    assert data.identity() == mg.Dataset(X, Y).identity()


# --- trainers and predictions elsewhere ---


def new_network() -> mg.Network:
    return mg.Network([mg.Dense(6, 5, "tanh"), mg.Dense(5, 3)], seed=2)


def test_a_trainer_on_the_cpu_says_how_to_copy() -> None:
    network = new_network()
    trainer = mg.Trainer(network, "softmax_cross_entropy", backend="cpu")
    data = mg.Dataset(ByDlpack(X), Y)
    before = network.flat_parameters()
    for attempt in (
        lambda: trainer.fit(data, 1, progress=False),
        lambda: trainer.fit((X, Y), 1, validation=data, progress=False),
        lambda: trainer.evaluate(data),
        lambda: trainer.step(ByDlpack(X[:8]), Y[:8]),
    ):
        with pytest.raises(ConfigurationError, match=r"inputs on the host.*GPU 1.*Dataset\(data.x, data.y"):
            attempt()
    np.testing.assert_array_equal(network.flat_parameters(), before)
    assert trainer.steps == 0 and network.remembered.inputs is None
    trainer.fit(mg.Dataset(data.x, data.y, data.weight), 1, progress=False)


def test_a_network_on_the_cpu_predicts_no_array_on_a_card() -> None:
    network = new_network()
    for x in (ByDlpack(X), ByInterface(X), mg.Dataset(ByDlpack(X))):
        with pytest.raises(ConfigurationError, match="inputs on the host"):
            network.predict(x, backend="cpu")


def test_another_card_is_refused() -> None:
    backend: Any = SimpleNamespace(card=0, name="cuda")
    with pytest.raises(ConfigurationError, match=r"inputs on GPU 0 or on the host.*GPU 1.*cuda:1"):
        mg.backends.Backend.check_place(backend, mg.Dataset(ByDlpack(X)))
    mg.backends.Backend.check_place(backend, mg.Dataset(X))
    mg.backends.Backend.check_place(backend, mg.Dataset(ByDlpack(X, device=(CUDA, 0))))


@EACH
def test_statistics_are_those_of_the_host(kind: Any) -> None:
    networks = [mg.Network([mg.Standardize(6), mg.Dense(6, 3)], seed=1) for _ in range(2)]
    networks[0].adapt(mg.Dataset(kind(X)))
    networks[1].adapt(X)
    np.testing.assert_array_equal(*(network.flat_statistics() for network in networks))


def test_without_a_card_the_driver_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader that a backend puts in, on a machine that has no card."""
    from mlpgpu.backends import _open_on_card
    from mlpgpu.backends.cuda.run import card_arrays

    def no_card(index: int = 0) -> Any:
        raise BackendError("CUDA", expected="an NVIDIA GPU", got="none")

    monkeypatch.setattr(card_arrays, "find_device", no_card)
    with pytest.raises(BackendError, match="an NVIDIA GPU"):
        _open_on_card("x", ByDlpack(X))


def test_neighbours_are_read_together() -> None:
    assert is_run(np.array([4, 5, 6])) and is_run(np.array([7]))
    assert not is_run(np.array([4, 5, 5])) and not is_run(np.array([6, 5])) and not is_run(np.array([], int))


# --- tables of columns on a card ---


class Frame:
    """A table as cuDF has it: columns on the card, which no array of NumPy is made of."""

    def __init__(self, **columns: np.ndarray) -> None:
        self._columns = {name: ByInterface(values) for name, values in columns.items()}

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, name: str) -> ByInterface:
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())).array)

    def to_cupy(self) -> Any:
        raise AssertionError("nobody has to ask for a copy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a host NumPy array via __array__ is not allowed")


def frame_of(x: np.ndarray) -> Frame:
    return Frame(**{f"column {k}": np.ascontiguousarray(x[:, k]) for k in range(x.shape[1])})


def test_a_frame_on_a_card_is_an_array_there() -> None:
    data = mg.Dataset(frame_of(X), ByInterface(Y), ByInterface(WEIGHT))
    assert data.card == 1 and isinstance(data.storage_x, OnCard)
    assert data.columns == tuple(f"column {k}" for k in range(6))
    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)
    assert data.identity()["crc"] == mg.Dataset(X, Y, WEIGHT).identity()["crc"]
    values = frame_of(X.astype("f8")[:, :2])
    np.testing.assert_array_equal(mg.Dataset(X, values).y, X[:, :2])  # targets come to the host


def test_bytes_of_a_frame_are_bytes() -> None:
    x = (50 * X + 128).clip(0, 255).astype(np.uint8)
    assert mg.Dataset.has_bytes(frame_of(x)) and not mg.Dataset.has_bytes(frame_of(X))
    data = mg.Dataset(frame_of(x))
    assert data.scale == 1 / 255
    np.testing.assert_array_equal(data.x, x)


@pytest.mark.parametrize(
    ("frame", "error", "match"),
    [
        (frame_of(X.astype("f8")), DtypeError, r"one type, float32 or uint8.*'column 0' of float64.*astype"),
        (Frame(a=X[:, 0].copy(), b=Y), DtypeError, "'a' of float32, 'b' of int64"),
        (Frame(a=X[:, 0].copy(), b=Y.astype("u1")), DtypeError, "'a' of float32, 'b' of uint8"),
        (Frame(a=X[:0, 0].copy()), EmptyDataError, "at least one row"),
        (SimpleNamespace(to_cupy=None, columns=[]), ShapeError, "at least one feature"),
    ],
)
def test_frames_that_cannot_be_joined(frame: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        mg.Dataset(frame)


def test_missing_values_of_a_frame_are_refused() -> None:
    frame = frame_of(X)
    frame._columns["column 3"] = ByInterface(X[:, 3].copy(), mask=ByInterface(X[:, 3] > 0))
    with pytest.raises(DataError, match=r"column 'column 3' of x.*mask"):
        mg.Dataset(frame)


def test_predictions_for_a_frame_are_cupy_s(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ByDlpack(X)
    assert in_library_of(frame_of(X), result) is result  # where there is no CuPy
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(from_dlpack=lambda array: ("of CuPy", array)))
    assert in_library_of(frame_of(X), result) == ("of CuPy", result)
