"""Predictions: a network compiled once for many calls, and the few compilations that a network keeps for itself."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from ..backends import MOST_ROWS, choose_backend, get_backend
from ..datasets import Dataset, Inputs
from ..datasets.arrays import USUAL_SCALE, as_array, check_finite, chunks
from ..datasets.interchange import CardArray, in_library_of
from ..errors import ConfigurationError, DataError, DtypeError, ShapeError, check_integer, shown
from ..locks import Mutex
from ..losses import OutputName, classes_of
from ..plan import Plan
from .parameters import FlatParameters
from .remembered import Remembered

KEPT_MOST = 4  # compilations of a network

# What arrays of numbers may hold; numbers in another byte order come by way of a Dataset.
_BYTES = np.dtype(np.uint8)
_NUMBERS = tuple(np.dtype(code) for code in "?bhilqHILQefd")


@runtime_checkable
class Predictable(Protocol):
    """What predictions ask of a network; :class:`~mlpgpu.Network` says what each is."""

    output: OutputName
    remembered: Remembered
    adapted: bool
    values: FlatParameters

    @property
    def n_in(self) -> int: ...
    @property
    def n_out(self) -> int: ...
    def flat_statistics(self) -> np.ndarray: ...
    def lower(self, **options: Any) -> Plan: ...
    def check(self, data: Dataset) -> Dataset: ...
    def check_adapted(self, hint: str) -> None: ...
    def refuse_parameters(self) -> None: ...


class Compiled:
    """A network compiled for predictions on one backend, and which of its values lie there.

    It holds no reference to the network, which may keep it.

    Arguments:
        batch_size: the most rows at a time; None for the usual number.

    Attributes:
        output, dtype: the network's output function and precision, which the plan has; with others it must be
            compiled anew.
    """

    def __init__(self, network: Predictable, backend: str, batch_size: int | None) -> None:
        self.output, self.dtype = network.output, network.values.dtype
        plan = network.lower(capacity=batch_size or 1, output=self.output, precision=self.dtype.name)
        chosen = choose_backend(backend, plan)
        if batch_size is None:
            plan = plan.with_capacity(chosen.prediction_rows)
        self.backend_name, self._backend = chosen.name, chosen
        self._n_in, self._n_out = plan.n_in, plan.n_out
        self._inference = chosen.infer(plan)
        self._lock = Mutex()
        # Which values were loaded last.
        self._version: int | None = None
        self._statistics: np.ndarray | None = None
        self._is_finite = True
        # What arrays mean, as of what the network remembers.
        self._remembered: Remembered | None = None
        self._scales: Mapping[np.dtype, float | None] = {}
        self._knows_inputs = False

    def suits(self, network: Predictable) -> bool:
        """Whether the network's output function and precision are still those that it was compiled for."""
        return self.output == network.output and self.dtype == network.values.dtype

    def predict(self, network: Predictable, x: Any, out: np.ndarray | None = None, *, logits: bool = False) -> Any:
        """Predictions or logits of ``x`` (rows, n_in) by the network's current values.

        Returns:
            ``out``, or a new array (rows, n_out), or (rows,) where one output is predicted so.
        """
        if not network.adapted:
            network.check_adapted("call adapt(dataset), or train")
        if network.remembered is not self._remembered:
            self._learn(network.remembered)
        rows: np.ndarray | None = None
        if (
            type(x) is np.ndarray
            and x.ndim == 2
            and x.shape[1] == self._n_in
            and len(x)
            and (x.dtype in self._scales or self._has_usual_bytes(x))
        ):
            scale = self._scales.get(x.dtype, USUAL_SCALE)
            count = len(x)
        else:
            given = x
            x, rows, count, scale = self._check_inputs(network, x)
            if not isinstance(x, np.ndarray):
                like = x.owner if isinstance(given, Dataset) else given
                return self._predict_on_card(network, x, like, out, rows=rows, count=count, scale=scale, logits=logits)
        is_vector = self._n_out == 1 and not logits and network.remembered.has_vector_targets
        if out is None:
            written = np.empty((count, self._n_out), self.dtype)
            out = written[:, 0] if is_vector else written
        else:
            self._check_out(out, (count,) if is_vector else (count, self._n_out), x)
            written = out.reshape(count, self._n_out)
        self._follow(network)
        if not self._inference.run(x, written, rows=rows, scale=scale, logits=logits):
            self._refuse_inputs(x if rows is None else x[rows])
        return out

    def _predict_on_card(
        self,
        network: Predictable,
        x: CardArray,
        like: Any,
        out: np.ndarray | None,
        *,
        rows: np.ndarray | None,
        count: int,
        scale: float | None,
        logits: bool,
    ) -> Any:
        """Predictions on the card that the inputs lie on, as an array of the library that ``like`` is of."""
        if out is not None:
            raise ConfigurationError("out", expected="none for inputs on a card", got=type(out).__name__)
        is_vector = self._n_out == 1 and not logits and network.remembered.has_vector_targets
        self._follow(network)
        shape = (count,) if is_vector else (count, self._n_out)
        return in_library_of(like, self._inference.run_on_card(x, shape, rows=rows, scale=scale, logits=logits))

    def close(self) -> None:
        """Free what the backend has, once the calls under way have ended."""
        self._inference.close()

    # --- values ---

    def _follow(self, network: Predictable) -> None:
        """Load the network's values if they are not those that were loaded last."""
        values, statistics = network.values, network.flat_statistics()
        if values.version is None or values.version != self._version or statistics is not self._statistics:
            with self._lock:
                self._version, self._is_finite = values.hand_to(self._inference, statistics)
                self._statistics = statistics
        if not self._is_finite:
            network.refuse_parameters()

    # --- inputs and outputs ---

    def _learn(self, remembered: Remembered) -> None:
        """Find out which arrays can be taken as they are, and what bytes are multiplied by."""
        scales: dict[np.dtype, float | None] = {}
        inputs = remembered.inputs
        if inputs is None or inputs.means_the_same(Inputs("floats", None)):
            scales |= dict.fromkeys(_NUMBERS)
        # Bytes of which nobody knows what they mean come by way of a Dataset, which may warn.
        if inputs is not None and inputs.scale is not None and inputs.means_the_same(Inputs("bytes", inputs.scale)):
            scales[_BYTES] = inputs.scale
        self._scales, self._remembered, self._knows_inputs = scales, remembered, inputs is not None

    def _has_usual_bytes(self, x: np.ndarray) -> bool:
        """Whether a Dataset would take an array (rows, n_in) as bytes of the usual scale, and warn of nothing."""
        # One number in the first row that is neither 0 nor 1 is enough; strip finds it at C's speed.
        return not self._knows_inputs and x.dtype == _BYTES and bool(x[0].tobytes().strip(b"\0\1"))

    def _check_inputs(self, network: Predictable, x: Any) -> tuple[np.ndarray, np.ndarray | None, int, float | None]:
        """An array of inputs, which rows of it, how many, and what bytes are multiplied by."""
        if type(x) in (np.ndarray, np.memmap) and x.dtype in self._scales and x.ndim >= 2 and x.size:
            shaped = x.reshape(len(x), -1)
            if shaped.shape[1] == self._n_in:
                return shaped, None, len(x), self._scales[x.dtype]
        dataset = network.check(x if isinstance(x, Dataset) else network.remembered.dataset(x))
        self._backend.check_place(dataset)
        return dataset.storage_x, dataset.storage_index, len(dataset), dataset.scale

    def _check_out(self, out: Any, shape: tuple[int, ...], x: np.ndarray) -> None:
        is_usual = type(out) is np.ndarray and out.dtype == self.dtype and out.shape == shape and out.flags.carray
        if is_usual and not np.may_share_memory(out, x):
            return
        expected = f"a C-contiguous {self.dtype} array {shape}"
        is_plain = isinstance(out, np.ndarray) and not isinstance(out, np.ma.MaskedArray)
        if not is_plain or out.dtype != self.dtype:
            got = f"dtype {out.dtype}" if is_plain else type(out).__name__
            raise DtypeError("out", expected=expected, got=got)
        if out.shape != shape:
            raise ShapeError("out", expected=expected, got=f"shape {out.shape}")
        if not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned):
            got = "one that is read-only" if not out.flags.writeable else f"strides {out.strides}"
            raise ConfigurationError("out", expected=expected, got=got)
        if np.may_share_memory(out, x):
            raise ConfigurationError("out", expected="memory apart from x", got="an array that overlaps it")

    def _refuse_inputs(self, x: np.ndarray) -> None:
        """Raise DataError for what is not finite in ``x`` (rows, n_in), or not in the network's precision."""
        check_finite("x", x)
        for rows in chunks(len(x), x[:1].nbytes):
            with np.errstate(over="ignore"):
                outside = ~np.isfinite(x[rows].astype(self.dtype))
            if outside.any():
                row, column = (int(place) for place in np.unravel_index(outside.argmax(), outside.shape))
                got = f"{x[rows][row, column]} at row {rows.start + row}, column {column}"
                raise DataError("x", expected=f"numbers in the range of {self.dtype}", got=got)


class Predictor:
    """A network compiled for predictions; :meth:`~mlpgpu.Network.predictor` makes it.

    A call computes what ``Network.predict`` does.  Any number of threads may call at once.  Each call uses the
    network's parameters as they are when it begins; while a trainer changes them, those of its last finished step.
    A predictor belongs to the process that made it and is not pickled.

    Attributes:
        backend: where it computes.
    """

    def __init__(self, network: Predictable, backend: str = "auto", batch_size: int | None = None) -> None:
        if not isinstance(network, Predictable):
            raise DtypeError("network", expected="a mlpgpu.Network", got=shown(network))
        self._network, self._backend = network, backend
        rows = None if batch_size is None else check_integer("batch_size", batch_size, least=1, limit=MOST_ROWS)
        self._batch_size = rows
        self._lock = Mutex()
        self._compiled: Compiled | None = Compiled(network, backend, self._batch_size)
        self.backend = self._compiled.backend_name

    def __call__(self, x: ArrayLike | Dataset, out: np.ndarray | None = None) -> np.ndarray:
        """Predictions for ``x`` (rows, n_in): (rows, n_out), or (rows,) where ``Network.predict`` gives that.

        Arguments:
            x: an array, memory map or data set; other values are made an array.  Numbers other than float32 are
                converted piece by piece.  Of an array on the predictor's card (float32 or uint8, C-contiguous)
                predictions stay there, as an array of the same library, complete when the call returns.
            out: where predictions are written, of their shape and dtype, C-contiguous, apart from ``x``; after an
                error its values mean nothing.

        Returns:
            ``out`` if it is given, else a new array.

        Raises:
            ShapeError, DtypeError, DataError: ``x`` or ``out`` does not suit the network.
            ConfigurationError: the predictor is closed, ``out`` is not contiguous, read-only or overlaps ``x``,
                a ``Standardize`` layer was never fitted, or ``x`` is bytes where the network was trained on floats,
                or the reverse, and nobody said what they mean.
            DivergenceError: a parameter is not finite, because a training diverged.
        """
        compiled = self._compiled
        if compiled is None or not compiled.suits(self._network):
            compiled = self._current()
        return compiled.predict(self._network, x, out)

    def logits(self, x: ArrayLike | Dataset, out: np.ndarray | None = None) -> np.ndarray:
        """Logits of ``x`` (rows, n_in): (rows, n_out).  Arguments and errors are those of a call."""
        return self._current().predict(self._network, x, out, logits=True)

    def labels(self, x: ArrayLike | Dataset) -> np.ndarray:
        """The class predicted for each row, (rows,): its name where classes had names, else its number.

        Raises:
            ConfigurationError: the network was not trained to classify.
            and as a call does.
        """
        check_classifies(self._network)
        return labels_of(self._network, self._current().predict(self._network, x))

    def close(self) -> None:
        """Free what it holds, once the calls under way have ended.  Closing twice does nothing."""
        with self._lock:
            compiled, self._compiled = self._compiled, None
        if compiled is not None:
            compiled.close()

    def _current(self) -> Compiled:
        """What is compiled for the network's output function and precision."""
        with self._lock:
            if self._compiled is None:
                hint = "network.predictor() makes another one"
                raise ConfigurationError("predictor", expected="an open one", got="a closed one", hint=hint)
            if not self._compiled.suits(self._network):  # a trainer took the network for another loss
                self._compiled = Compiled(self._network, self._backend, self._batch_size)
                self.backend = self._compiled.backend_name
            return self._compiled

    def __enter__(self) -> Predictor:
        self._current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        network = self._network
        what = f"{network.n_in} → {network.n_out}, output {network.output}, {network.values.dtype}"
        return f"Predictor({what}, backend={self.backend!r}{', closed' if self._compiled is None else ''})"

    def __reduce__(self) -> Any:
        hint = "pickle the network, and call its predictor() where it is unpickled"
        raise DtypeError("predictor", expected="something that can be copied", got="a compiled network", hint=hint)


class KeptPredictions:
    """What a network keeps compiled for its own predictions: the few settings used last; copies of it are empty."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[tuple[Any, ...], Compiled] = OrderedDict()
        self._lock = Mutex()

    def get(self, network: Predictable, backend: str, batch_size: int | None) -> Compiled:
        """What is compiled for this backend and number of rows at a time, and for the network as it is now."""
        values = network.values
        chosen = os.environ.get("MLPGPU_BACKEND") if isinstance(backend, str) and backend == "auto" else None
        if batch_size is not None:
            batch_size = check_integer("batch_size", batch_size, least=1, limit=MOST_ROWS)
        if not isinstance(backend, str):
            get_backend(backend)  # which refuses it
        key = (backend, chosen, batch_size, network.output, values.dtype)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
                return compiled
        compiled = Compiled(network, backend, batch_size)
        with self._lock:
            self._compiled[key] = compiled
            # One that goes is freed when the last call that uses it has ended.
            while len(self._compiled) > KEPT_MOST:
                self._compiled.popitem(last=False)
        return compiled

    def __reduce__(self) -> Any:
        return KeptPredictions, ()


def check_classifies(network: Predictable) -> None:
    """Raise ConfigurationError unless the network was trained to classify."""
    if network.output in ("identity", "exp") or (network.output == "sigmoid" and network.n_out > 1):
        raise ConfigurationError("labels", expected="a network trained to classify", got=f"output {network.output}")


def labels_of(network: Predictable, predictions: np.ndarray) -> np.ndarray:
    """The class of each row of predictions, (rows,): its name where classes have names, else its number."""
    on_host = as_array("predictions", predictions, "(rows, n_out)")  # also those of inputs on a card
    numbers = classes_of(network.output, on_host.reshape(-1, network.n_out))
    names = network.remembered.classes
    return numbers if names is None else np.asarray(names)[numbers]
