"""Network: layers in order, and the values of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import storage
from .backends import Program, State, choose_backend, get_backend
from .datasets import Dataset
from .descriptions import describe, rebuild
from .errors import (
    ConfigurationError,
    DataError,
    DtypeError,
    FileFormatError,
    MlpgpuError,
    ShapeError,
    check_integer,
    check_number,
    lookup,
)
from .initializers import initial_values
from .layers import LAYERS, Layer, Standardize
from .losses import OUTPUTS, OutputName, class_count, classes_of
from .optimizers import Optimizer
from .plan import Parameter, Plan, Segment, lower
from .random import SEED_LIMIT, check_seed

PREDICTION_ROWS = 1024  # rows at a time, unless predict is told otherwise
STATISTICS_ROWS = 4096  # rows at a time while a data set's mean and deviation are taken


class Network:
    """Layers from first to last, and the values of their parameters.

    Arguments:
        layers: at least one of them with parameters; each takes the columns that the one before gives.
        seed: of the initial values and of a trainer's shuffles and dropout; drawn if None.

    Attributes:
        layers, seed: as given; the same ones make the same network everywhere.
        n_in, n_out: columns of its inputs and of its logits.
        output: what ``predict`` makes of logits, ``"identity"``, ``"sigmoid"`` or ``"softmax"``;
            recorded when a trainer takes the network.
        classes: names of the classes that it was trained on, or None.
        scale: what a byte of its training inputs stood for, or None if they were not bytes.
        adapted: whether ``Standardize`` layers, if there are any, have been fitted.

    Raises:
        DtypeError, ConfigurationError, ShapeError: something is not a layer, or neighbours do not fit.
    """

    def __init__(self, layers: Sequence[Layer], seed: int | None = None) -> None:
        self._describe(layers, check_seed(seed))
        neutral = [np.full(s.shape, float(s.name.endswith("scale"))) for s in self._plan.statistics]
        self._statistics = np.concatenate([np.empty(0), *neutral])

    def _describe(self, layers: Sequence[Layer], seed: int) -> None:
        """Set everything but the values; nothing is allocated yet."""
        self.layers = _check_layers(layers)
        self.n_in = _check_widths(self.layers)
        self.seed = seed
        self.output: OutputName = "identity"
        self.classes: tuple[str, ...] | None = None
        self.scale: float | None = None
        self.adapted = not any(isinstance(layer, Standardize) for layer in self.layers)
        self._plan = self.lower(capacity=1)
        if not self._plan.parameters:
            raise ConfigurationError("layers", expected="at least one with parameters", got=list(self.layers))
        self._dtype = np.dtype(np.float32)
        # None until somebody asks: a card can draw the initial values of networks that the host has no room for.
        self._parameters: np.ndarray | None = None
        self._holder: Callable[[], np.ndarray] | None = None

    def lower(self, **options: Any) -> Plan:
        """A plan of this network; ``options`` are those of :func:`mlpgpu.plan.lower`."""
        return lower(self.layers, self.n_in, **options)

    @property
    def n_out(self) -> int:
        """Columns of the logits."""
        return self._plan.n_out

    @property
    def segments(self) -> dict[str, Segment]:
        """Where each parameter lies in the flat array, by name."""
        return {p.name: p for p in self._plan.parameters}

    # --- parameters, and who holds them ---

    @property
    def parameters(self) -> Parameters:
        """The values by name, ``"0.weight"`` (n_in, n_out), ``"0.bias"`` (n_out,), …; always the current ones.

        The number is the layer's place.  Arrays that are read are copies; setting one replaces its values.
        """
        return Parameters(self)

    @parameters.setter
    def parameters(self, values: Mapping[str, ArrayLike]) -> None:
        self._set(values)

    def flat_parameters(self) -> np.ndarray:
        """All current parameters in the order of the plan, (P,), not to be written to."""
        if self._holder is not None:
            return self._holder()
        if self._parameters is None:
            drawn = (
                initial_values(p.initializer, p.shape, p.fans, seed=self.seed, layer=p.layer)
                for p in self._plan.parameters
            )
            self._parameters = np.concatenate([values.ravel().astype(np.float32) for values in drawn])
        return self._parameters

    @property
    def dtype(self) -> np.dtype:
        """The type of the parameters: float32, or float64 once a trainer in that precision took the network."""
        return self._dtype

    @property
    def is_new(self) -> bool:
        """Whether the parameters are the initial ones of ``seed``, and nobody has asked for them yet."""
        return self._parameters is None and self._holder is None

    def flat_statistics(self) -> np.ndarray:
        """The statistics of all ``Standardize`` layers in the order of the plan, (C,), float64."""
        return self._statistics

    def state(self, optimizer: Optimizer | None = None) -> State:
        """What a program begins with: the parameters, the statistics, and the optimizer's slots, all of them 0."""
        parameters = self.flat_parameters()[np.newaxis]
        slots = np.zeros((len(optimizer.slots) if optimizer else 0, *parameters.shape), parameters.dtype)
        return State(parameters, slots, self.flat_statistics()[np.newaxis])

    def start(self, program: Program, optimizer: Optimizer | None = None) -> None:
        """Have a program of this network begin with its :meth:`state`; the program draws initial values by itself."""
        if self.is_new:
            program.draw(self.seed, self.flat_statistics()[np.newaxis])
        else:
            program.load(self.state(optimizer))

    def hand_over(self, holder: Callable[[], np.ndarray], dtype: np.dtype) -> None:
        """From now on parameters are what ``holder()`` returns, (P,), until somebody else takes or sets them."""
        self._parameters, self._holder = None, holder  # no second copy of what the holder has
        self._dtype = dtype

    def is_held_by(self, holder: Callable[[], np.ndarray]) -> bool:
        """Whether nobody took or set the parameters since they were handed over to ``holder``."""
        return self._holder is holder

    def _set(self, values: Mapping[str, ArrayLike]) -> None:
        segments = self.segments
        flat = self.flat_parameters().copy()
        checked = {name: _check_values(name, value, segments, flat.dtype) for name, value in values.items()}
        for name, array in checked.items():
            flat[segments[name].offset : segments[name].end] = array.ravel()
        self._parameters, self._holder = flat, None

    # --- use ---

    def forward(self, x: ArrayLike | Dataset, *, backend: str = "auto", batch_size: int | None = None) -> np.ndarray:
        """Logits of ``x`` (rows, n_in): (rows, n_out), float32 or float64 as the parameters are.

        Raises as :meth:`predict` does.
        """
        return self._run(x, backend, batch_size, logits=True)

    def predict(self, x: ArrayLike | Dataset, *, backend: str = "auto", batch_size: int | None = None) -> np.ndarray:
        """Predictions for ``x`` (rows, n_in): (rows, n_out), float32 or float64 as the parameters are.

        They are probabilities for a classification and values for a regression, scaled back where its
        targets were standardized.  Bytes mean what they meant in training.

        Arguments:
            backend: where to compute, ``"auto"`` for the fastest there is.
            batch_size: rows at a time, which bounds the memory it takes; 1,024 if None.

        Raises:
            ShapeError, DtypeError, DataError: ``x`` does not suit the network.
            ConfigurationError: ``batch_size`` is under 1, or a ``Standardize`` layer was never fitted.
        """
        return self._run(x, backend, batch_size, logits=False)

    def _run(self, x: ArrayLike | Dataset, backend: str, batch_size: int | None, *, logits: bool) -> np.ndarray:
        rows = PREDICTION_ROWS if batch_size is None else check_integer("batch_size", batch_size, least=1)
        get_backend(backend)  # a wrong name is told before anything is looked at
        dataset = self.check(x if isinstance(x, Dataset) else self._inputs(x))
        if not self.adapted:
            hint = "call adapt(dataset), or train"
            raise ConfigurationError("network", expected="fitted Standardize layers", got="unfitted ones", hint=hint)
        plan = self.lower(capacity=min(rows, len(dataset)), output=self.output, precision=self.dtype.name)
        program = choose_backend(backend, plan).compile(plan)
        self.start(program)
        return program.predict(dataset, logits=logits)

    def _inputs(self, x: ArrayLike) -> Dataset:
        is_bytes = getattr(x, "dtype", None) == np.uint8
        return Dataset(x, scale=self.scale if is_bytes else None)

    def check(self, dataset: Dataset) -> Dataset:
        """Return ``dataset`` if its inputs suit the network.

        Raises:
            DtypeError: it is not a Dataset.
            ShapeError: its rows are not n_in wide.
            ConfigurationError: its bytes mean something else than those that the network was trained on.
        """
        if not isinstance(dataset, Dataset):
            raise DtypeError("data", expected="a mlpgpu.Dataset", got=type(dataset).__name__)
        if dataset.n_in != self.n_in:
            raise ShapeError("x", expected=f"(rows, {self.n_in})", got=f"({len(dataset)}, {dataset.n_in})")
        if None not in (self.scale, dataset.scale) and self.scale != dataset.scale:
            raise ConfigurationError("scale of byte inputs", expected=f"{self.scale:g}", got=f"{dataset.scale:g}")
        return dataset

    def labels(self, x: ArrayLike | Dataset, *, backend: str = "auto", batch_size: int | None = None) -> np.ndarray:
        """The class predicted for each row, (rows,): its name where classes had names, else its number.

        Raises:
            ConfigurationError: the network was not trained to classify.
            and as :meth:`predict` does.
        """
        if self.output == "identity" or (self.output == "sigmoid" and self.n_out > 1):
            raise ConfigurationError("labels", expected="a network trained to classify", got=f"output {self.output}")
        numbers = classes_of(self.output, self.predict(x, backend=backend, batch_size=batch_size))
        return numbers if self.classes is None else np.asarray(self.classes)[numbers]

    def adapt(self, dataset: Dataset) -> None:
        """Fit ``Standardize`` layers: the first to the inputs' columns, the last to the targets'.

        Means and standard deviations are taken in float64 over all rows alike, whatever their weights;
        a column that does not vary has scale 1.

        Raises:
            ShapeError, DtypeError, DataError: the data do not suit the network.
        """
        self.check(dataset)
        flat = self._statistics.copy()
        for place, layer in enumerate(self.layers):
            if isinstance(layer, Standardize):
                mean, scale = _moments(dataset) if place == 0 else _deviation(dataset.targets(layer.n_in, np.float64))
                for name, values in (("mean", mean), ("scale", scale)):
                    segment = next(s for s in self._plan.statistics if s.name == f"{place}.{name}")
                    flat[segment.offset : segment.end] = values
        # Only now, when nothing can fail; and whoever holds the network must take it anew.
        if self._holder is not None:
            self._parameters, self._holder = self.flat_parameters(), None
        self._statistics, self.adapted = flat, True

    def summary(self) -> None:
        """Print a table of the layers."""
        print(self)

    def __repr__(self) -> str:
        return f"Network({list(self.layers)!r}, seed={self.seed})"

    def __str__(self) -> str:
        rows = [("place", "layer", "output", "parameters")]
        width = self.n_in
        for place, layer in enumerate(self.layers):
            width = layer.output_width(width)
            count = sum(p.size for p in self._plan.parameters if p.layer == place)
            home = next(first for first, other in enumerate(self.layers) if other is layer)
            rows.append((str(place), repr(layer), str(width), f"{count:,}" if home == place else f"as {home}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{p:>{widths[0]}}  {name:<{widths[1]}}  {out:>{widths[2]}}  {n:>{widths[3]}}" for p, name, out, n in rows
        ]
        total = f"{self._plan.parameter_count:,} parameters in {self.dtype}, output {self.output}"
        return "\n".join([*lines, total])

    def __getstate__(self) -> dict[str, Any]:
        # A copy holds values of its own, and no trainer.
        parameters = None if self.is_new else self.flat_parameters().copy()
        return {**self.__dict__, "_parameters": parameters, "_holder": None}

    # --- files ---

    def save(self, path: str | PathLike[str]) -> None:
        """Write the network to an HDF5 file, replacing it whole or not at all.

        A name that ends in ``.weights.h5`` is one that Keras 3 loads as well.

        Raises:
            DataError: a parameter is not finite.
            StorageError: the file cannot be written.
        """
        storage.write(path, self.contents())

    def contents(self) -> storage.Contents:
        """The network as a file holds it; ``docs/file-format.md`` tells where.

        Raises:
            DataError: a parameter is not finite; such a file would not be read back.
        """
        flat = self.flat_parameters()
        if not np.isfinite(flat).all():
            raise DataError("parameters to save", expected="finite values", got="NaN or infinity")
        arrays = {
            path: flat[p.offset : p.end].reshape(p.shape) for p, path in _parameter_paths(self._plan, self.layers)
        }
        arrays |= {
            f"/mlpgpu/statistics/{s.name}": self._statistics[s.offset : s.end].reshape(s.shape)
            for s in self._plan.statistics
        }
        first = {id(layer): place for place, layer in reversed(list(enumerate(self.layers)))}
        layers = [
            describe(layer) if first[id(layer)] == place else {"kind": "same", "place": first[id(layer)]}
            for place, layer in enumerate(self.layers)
        ]
        network = {
            "layers": layers,
            "seed": self.seed,
            "output": self.output,
            "classes": None if self.classes is None else list(self.classes),
            "scale": self.scale,
            "adapted": self.adapted,
            "precision": flat.dtype.name,
        }
        groups = tuple(f"{group}/vars" for group in layer_groups(self.layers).values())
        return storage.Contents({"network": network}, arrays, groups)

    @classmethod
    def from_contents(cls, contents: storage.Contents) -> Network:
        """The network that :meth:`contents` gave.

        Raises:
            FileFormatError: the description has no meaning, or arrays are missing or of other shapes.
        """
        try:
            return cls._from(contents)
        except FileFormatError:
            raise
        except (MlpgpuError, KeyError, TypeError, ValueError, IndexError) as error:
            what = "description of the network"
            raise FileFormatError(what, expected="one that mlpgpu wrote", got=str(error)) from error

    @classmethod
    def _from(cls, contents: storage.Contents) -> Network:
        network = contents.description["network"]
        layers: list[Layer] = []
        for place, description in enumerate(network["layers"]):
            if description["kind"] == "same":
                layers.append(layers[check_integer("place", description["place"], least=0, most=place - 1)])
            else:
                layers.append(rebuild("layer", description, LAYERS))
        self = cls.__new__(cls)
        self._describe(layers, check_integer("seed", network["seed"], least=0, most=SEED_LIMIT - 1))
        dtype = np.dtype(lookup("precision", network["precision"], ("float32", "float64")))
        # Widths come from the file: arrays are checked against them before anything of their size is made.
        parameters = [_expect(contents, path, p.shape, dtype) for p, path in _parameter_paths(self._plan, self.layers)]
        statistics = [
            _expect(contents, f"/mlpgpu/statistics/{s.name}", s.shape, np.dtype(np.float64))
            for s in self._plan.statistics
        ]
        self._parameters, self._dtype = np.concatenate([array.ravel() for array in parameters]), dtype
        self._statistics = np.concatenate([np.empty(0), *statistics])
        self.output = lookup("output", network["output"], OUTPUTS)
        self.classes = _check_classes(network["classes"], class_count(self.output, self.n_out))
        self.scale = None if network["scale"] is None else check_number("scale", network["scale"], above=0.0)
        self.adapted = network["adapted"] is True
        return self


class Parameters(MutableMapping[str, np.ndarray]):
    """A network's parameters by name.  Reading gives a copy of what is current, writing replaces values.

    Raises:
        UnknownNameError: there is no parameter of that name.
        DtypeError, ShapeError, DataError: values set are not finite real numbers of the parameter's shape.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getitem__(self, name: str) -> np.ndarray:
        segments = self._network.segments
        segment = segments[lookup("parameter", name, segments)]
        values = self._network.flat_parameters()[segment.offset : segment.end].reshape(segment.shape).copy()
        values.flags.writeable = False  # writing to a copy would change nothing
        return values

    def __setitem__(self, name: str, values: ArrayLike) -> None:
        self._network.parameters = {name: values}

    def __delitem__(self, name: str) -> None:
        raise ConfigurationError("parameters", expected="to be read or set", got=f"del {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._network.segments)

    def __len__(self) -> int:
        return len(self._network.segments)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {self[name].dtype} {self[name].shape}" for name in self)


def _check_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    if isinstance(layers, Layer) or not isinstance(layers, Sequence):
        raise DtypeError("layers", expected="a list of layers", got=type(layers).__name__)
    for place, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise DtypeError(f"layers[{place}]", expected="a layer", got=f"{type(layer).__name__} {layer!r}")
    return tuple(layers)


def _check_widths(layers: Sequence[Layer]) -> int:
    """Follow the widths from layer to layer and return the first one."""
    n_in = next((layer.n_in for layer in layers if layer.n_in is not None), None)
    if n_in is None:
        raise ConfigurationError("layers", expected="at least one with parameters", got=list(layers))
    width = n_in
    for place, layer in enumerate(layers):
        try:
            width = layer.output_width(width)
        except ShapeError as error:
            before = f"layers[{place - 1}] {layers[place - 1]!r}"
            what = f"layers[{place}] {layer!r} after {before}"
            raise ShapeError(what, expected=error.expected, got=error.got) from None
    return n_in


def _check_values(name: str, values: ArrayLike, segments: Mapping[str, Segment], dtype: np.dtype) -> np.ndarray:
    segment = segments[lookup("parameter", name, segments)]
    try:
        array = np.asarray(values)
        real = array.dtype.kind in "fiub"
    except ValueError:
        real = False
    if not real:
        raise DtypeError(name, expected="real numbers", got=type(values).__name__)
    if array.shape != segment.shape:
        raise ShapeError(name, expected=segment.shape, got=array.shape)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not np.isfinite(cast).all():
        raise DataError(name, expected="finite values", got="NaN or infinity")
    return cast


def _moments(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column of the inputs, (n_in,), in two passes over blocks of rows."""
    factor = 1.0 if dataset.scale is None else dataset.scale

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(dataset), STATISTICS_ROWS):
            rows = dataset.storage_rows(np.arange(start, min(start + STATISTICS_ROWS, len(dataset))))
            yield dataset.storage_x[rows].astype(np.float64) * factor

    mean = np.sum([block.sum(axis=0) for block in blocks()], axis=0) / len(dataset)
    variance = np.sum([np.square(block - mean).sum(axis=0) for block in blocks()], axis=0) / len(dataset)
    return mean, _scale(mean, variance)


def _deviation(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = targets.mean(axis=0)
    return mean, _scale(mean, targets.var(axis=0))


def _scale(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Standard deviations, with 1 for a column that varies by no more than the rounding of its mean."""
    deviation = np.sqrt(variance)
    constant = deviation <= 10.0 * np.finfo(np.float64).eps * np.abs(mean)
    return np.where(constant, 1.0, deviation)


def _parameter_paths(plan: Plan, layers: Sequence[Layer]) -> list[tuple[Parameter, str]]:
    """Where each parameter lies in a file: as in Keras 3, by class and its number, then by number in the layer."""
    groups = layer_groups(layers)
    placed: list[tuple[Parameter, str]] = []
    for parameter in plan.parameters:
        number = sum(other.layer == parameter.layer for other, _ in placed)
        placed.append((parameter, f"{groups[parameter.layer]}/vars/{number}"))
    return placed


def layer_groups(layers: Sequence[Layer]) -> dict[int, str]:
    """The HDF5 group of each layer that Keras knows, by its first place: ``/layers/dense``, ``/layers/dense_1``, …"""
    groups: dict[int, str] = {}
    seen: set[int] = set()
    counts: dict[str, int] = {}
    for place, layer in enumerate(layers):
        if id(layer) in seen or isinstance(layer, Standardize):
            continue
        seen.add(id(layer))
        name = type(layer).__name__.lower()
        count = counts.get(name, 0)
        counts[name] = count + 1
        groups[place] = f"/layers/{name}" + (f"_{count}" if count else "")
    return groups


def _check_classes(names: Any, count: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) != count:
        raise ConfigurationError("classes", expected=f"a list of {count} names", got=names)
    return tuple(names)


def _expect(contents: storage.Contents, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = contents.arrays.get(path)
    if array is None or array.shape != shape or array.dtype != dtype:
        got = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise FileFormatError(path, expected=f"{dtype} {shape}", got=got)
    if not np.isfinite(array).all():
        raise FileFormatError(path, expected="finite values", got="NaN or infinity")
    return array


def load(path: str | PathLike[str]) -> Network:
    """The network in a file that ``Network.save`` or ``Trainer.save`` wrote.

    Raises:
        StorageError: the file cannot be read.
        FileFormatError: it is damaged, or not one of ours, or from a newer version.
    """
    return Network.from_contents(storage.read(path))
