"""Network: layers in order, what they predict, and what a network remembers of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import storage
from ..backends import Program, State
from ..datasets import Dataset
from ..datasets.arrays import check_classes
from ..errors import (
    ConfigurationError,
    DivergenceError,
    DtypeError,
    FileFormatError,
    MlpgpuError,
    ShapeError,
    check_integer,
    check_truth,
    lookup,
    refuse_setting,
)
from ..layers import Layer, Standardize, check_layers, input_width, with_trainable
from ..losses import OUTPUTS, OutputName, class_count
from ..optimizers import Optimizer
from ..plan import Plan, Segment, lower
from ..random import check_seed
from ..storage.files import replace_file
from ..tables import Table
from ..text import html, public_names, table
from .formats import format_of
from .parameters import FlatParameters, Parameters
from .predictor import KeptPredictions, Predictor, check_classifies, labels_of
from .remembered import Remembered
from .saved import SavedNetwork
from .statistics import input_statistics, target_statistics
from .stored import StoredParameters

Data = Dataset | tuple[Any, ...]  # or arrays (x, y), (x, y, weight)

SAVED = ("output", "remembered", "adapted")  # of a network's training, by attribute
# What the package itself uses of a network; Tab does not show it.
INTERNAL = (
    *("as_dataset", "check", "check_adapted", "check_finite", "contents", "contents_but_parameters"),
    *("flat_parameters", "flat_statistics"),
    *(
        "from_contents",
        "from_file",
        "is_new",
        "lower",
        "parameter_count",
        "refuse_parameters",
        "remember",
        "remembered",
        "from_saved",
        "saved",
        "segments",
        "shaped",
        "start",
        "state",
        "to_export",
        "values",
    ),
)
SETTABLE = ("parameters", "classes", *SAVED)


@contextmanager
def _refusing_descriptions() -> Iterator[None]:
    """Say of a file's description what is wrong with it."""
    try:
        yield
    except FileFormatError:
        raise
    except (MlpgpuError, KeyError, TypeError, ValueError, IndexError) as error:
        what = "description of the network"
        raise FileFormatError(what, expected="one that mlpgpu wrote", got=str(error)) from error


class Network:
    """Layers from first to last, and the values of their parameters.

    Arguments:
        layers: at least one of them with parameters; each takes the columns that the one before gives.
        seed: of the initial values and of a trainer's shuffles and dropout; drawn if None.

    Attributes:
        layers, seed: as given; the same ones make the same network everywhere.
        n_in, n_out: columns of its inputs and of its logits.
        output: what ``predict`` makes of logits, ``"identity"``, ``"sigmoid"``, ``"softmax"`` or ``"exp"``;
            recorded when a trainer takes the network.
        remembered: of the data that it was trained on.
        adapted: whether ``Standardize`` layers, if there are any, have been fitted.
        values: all parameters as one array, and who has them.

    Raises:
        DtypeError, ConfigurationError, ShapeError: something is not a layer, or neighbours do not fit.
    """

    def __init__(self, layers: Sequence[Layer], seed: int | None = None) -> None:
        self.seed = check_seed(seed)
        self.layers = check_layers(layers)
        self.n_in = input_width(self.layers)
        self.output: OutputName = "identity"
        self.remembered = Remembered()
        self.adapted = not any(isinstance(layer, Standardize) for layer in self.layers)
        self._plan = self.lower(capacity=1)
        if not self._plan.parameters:
            raise ConfigurationError("layers", expected="at least one with parameters", got=list(self.layers))
        self.values = FlatParameters(self._plan.parameters, self.seed)
        self._statistics: np.ndarray | None = None  # (C,) float64; None: they change nothing
        self._kept = KeptPredictions()

    def lower(self, **options: Any) -> Plan:
        """A plan of this network; ``options`` are those of :func:`mlpgpu.plan.lower`."""
        return lower(self.layers, self.n_in, **options)

    @property
    def n_out(self) -> int:
        """Columns of the logits."""
        return self._plan.n_out

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes that it was trained on, or None; may be set, one name for each class."""
        return self.remembered.classes

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        checked = check_classes(names)
        count = class_count(self.output, self.n_out)
        if checked is not None and len(checked) != count:
            raise ConfigurationError("classes", expected=f"{count} names, one for each class", got=checked)
        self.remembered = replace(self.remembered, classes=checked)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns that it was trained on, or None."""
        return self.remembered.columns

    @property
    def table(self) -> Table | None:
        """What made the inputs that it was trained on of raw rows, and does so in predictions; or None."""
        return self.remembered.table

    @property
    def scale(self) -> float | None:
        """What a byte of its training inputs stood for, or None if they were not bytes."""
        return self.remembered.scale

    # --- parameters and statistics ---

    @property
    def parameters(self) -> Parameters:
        """The values by name, ``"0.weight"`` (n_in, n_out), ``"0.bias"`` (n_out,), …; always the current ones.

        The number is the layer's place.  Arrays that are read are copies; setting one replaces its values.
        """
        return Parameters(self.values)

    @parameters.setter
    def parameters(self, values: Mapping[str, ArrayLike]) -> None:
        self.values.set(values)

    @property
    def segments(self) -> Mapping[str, Segment]:
        """Where each parameter lies in the flat array, by name."""
        return self.values.segments

    def flat_parameters(self) -> np.ndarray:
        """All current parameters in the order of the plan, (P,), not to be written to."""
        return self.values.read()

    @property
    def parameter_count(self) -> int:
        """How many numbers its parameters are."""
        return self._plan.parameter_count

    @property
    def dtype(self) -> np.dtype:
        """The type of the parameters: float32, or float64 once a trainer in that precision took the network."""
        return self.values.dtype

    @property
    def is_new(self) -> bool:
        """Whether the parameters are the initial ones of ``seed``, and nobody has asked for them yet."""
        return self.values.is_new

    def flat_statistics(self) -> np.ndarray:
        """The statistics of all ``Standardize`` layers in the order of the plan, (C,), float64."""
        if self._statistics is None:
            neutral = [np.full(s.shape, float(s.name.endswith("scale"))) for s in self._plan.statistics]
            self._statistics = np.concatenate([np.empty(0), *neutral])
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

    def frozen(self, *places: int) -> Network:
        """A network of the same values whose layers at ``places`` are frozen and all others trainable.

        Layers cannot be changed, so this is how one freezes some of a network that was trained or loaded::

            upper = mlpgpu.load("digits.h5").frozen(0, 1)  # layers 0 and 1 stay as they are
            mlpgpu.Trainer(upper, "softmax_cross_entropy", mlpgpu.Adam(0.001)).fit(train, epochs=10)

        ``frozen()`` makes all layers trainable.  Layers without parameters stay as they are; of a layer that is used
        at several places, one of them is enough.  Values, statistics and what the network remembers are copied, so
        that training one network does not move the other.

        Raises:
            DtypeError, ConfigurationError: a place is no whole number, or there is no layer.
        """
        last = len(self.layers) - 1
        frozen = {id(self.layers[check_integer("place of a layer", place, least=0, most=last)]) for place in places}
        made: dict[int, Layer] = {}  # one for each layer, however often it is used
        for layer in self.layers:
            made.setdefault(id(layer), with_trainable(layer, id(layer) not in frozen))
        twin = Network([made[id(layer)] for layer in self.layers], self.seed)
        twin.output, twin.remembered, twin.adapted = self.output, self.remembered, self.adapted
        twin.__dict__["values"] = self.values.copy(twin._plan.parameters)
        twin._statistics = None if self._statistics is None else self._statistics.copy()
        return twin

    # --- data ---

    def check(self, data: Dataset, remembered: Remembered | None = None) -> Dataset:
        """Return ``data`` if its inputs suit the network and what it remembers, or ``remembered``.

        Raises:
            ShapeError: its rows are not n_in wide, or its columns have other names.
            ConfigurationError: its columns are in another order, or its inputs mean something else.
        """
        (remembered or self.remembered).check(data)
        if data.n_in != self.n_in:
            raise ShapeError("x", expected=f"(rows, {self.n_in})", got=f"({len(data)}, {data.n_in})")
        return data

    def check_adapted(self, hint: str) -> None:
        """Raise ConfigurationError with this hint if a ``Standardize`` layer was never fitted."""
        if not self.adapted:
            raise ConfigurationError("network", expected="fitted Standardize layers", got="unfitted ones", hint=hint)

    def adapt(self, data: Data | ArrayLike) -> None:
        """Fit ``Standardize`` layers: the first to the inputs' columns, the last to the targets'.

        ``data`` is a :class:`Dataset`, arrays ``(x, y)``, or ``x`` alone.  Means and standard deviations are taken
        in float64 over all rows alike, whatever their weights; a column that does not vary has scale 1.

        Raises:
            ShapeError, DtypeError, DataError: the data do not suit the network.
        """
        if not isinstance(data, (Dataset, tuple)):
            data = (data, None)  # inputs alone, which do where targets are not standardized
        dataset = self.check(self.as_dataset(data))
        statistics = self.flat_statistics().copy()
        segments = {segment.name: segment for segment in self._plan.statistics}
        for place, layer in enumerate(self.layers):
            if isinstance(layer, Standardize):
                fitted = input_statistics(dataset) if place == 0 else target_statistics(dataset, layer.n_in)
                for name, values in zip(("mean", "scale"), fitted, strict=True):
                    segment = segments[f"{place}.{name}"]
                    statistics[segment.offset : segment.end] = values
        # Nothing can fail from here on.  A program that owns the parameters has the old statistics and must load anew.
        self.values.take_back()
        self._statistics, self.adapted = statistics, True
        # Another kind of inputs would now be standardized by statistics of these.
        known = self.remembered.after(dataset)
        self.remembered = replace(self.remembered, inputs=known.inputs, columns=known.columns)

    def remember(self, dataset: Dataset) -> None:
        """Keep what predictions need to know of the data that the network is trained on.

        Unless they are fitted, ``Standardize`` layers are fitted to them.
        """
        if not self.adapted:
            self.adapt(dataset)
        self.remembered = self.remembered.after(dataset)

    # --- use ---

    def forward(self, x: ArrayLike | Dataset, *, backend: str = "auto", batch_size: int | None = None) -> np.ndarray:
        """Logits of ``x`` (rows, n_in): (rows, n_out), float32 or float64 as the parameters are.

        Raises as :meth:`predict` does.
        """
        return self._kept.get(self, backend, batch_size).predict(self, x, logits=True)

    def predict(self, x: ArrayLike | Dataset, *, backend: str = "auto", batch_size: int | None = None) -> np.ndarray:
        """Predictions for ``x`` (rows, n_in): (rows, n_out), float32 or float64 as the parameters are.

        A network of one output that was trained on targets (rows,) predicts (rows,).  They are probabilities for a
        classification and values for a regression, scaled back where its targets were standardized.  Bytes mean
        what they meant in training.

        Arguments:
            backend: where to compute, ``"auto"`` for the fastest there is.
            batch_size: rows at a time, which bounds the memory it takes; if None, as many as suit the backend.

        Returns:
            an array; of inputs on a card (``Dataset`` says which) one there, of their library.

        Raises:
            ShapeError, DtypeError, DataError: ``x`` does not suit the network.
            ConfigurationError: ``batch_size`` is under 1, a ``Standardize`` layer was never fitted, or ``x`` is
                bytes where the network was trained on floats, or the reverse, and nobody said what they mean.
            DivergenceError: a parameter is not finite, because a training diverged.
        """
        return self._kept.get(self, backend, batch_size).predict(self, x)

    def shaped(self, predictions: np.ndarray, dataset: Dataset | None = None) -> np.ndarray:
        """Predictions (rows, n_out) in the shape of the targets trained on, or of those of ``dataset``."""
        has_vector = self.remembered.has_vector_targets if dataset is None or dataset.y is None else dataset.y.ndim == 1
        return predictions[:, 0] if self.n_out == 1 and has_vector else predictions

    def predictor(self, backend: str = "auto", batch_size: int | None = None) -> Predictor:
        """The network compiled for many predictions, which any thread may ask for.

        Arguments:
            backend: where to compute, ``"auto"`` for the fastest there is.
            batch_size: the most rows that are computed at a time, which bounds the memory it takes; if None, as
                many as suit the backend.

        Raises:
            ConfigurationError: ``batch_size`` is under 1, or the backend cannot run the network.
            UnknownNameError, BackendError: there is no such backend, or it cannot be used here.
        """
        return Predictor(self, backend, batch_size)

    def check_finite(self) -> None:
        """Raise DivergenceError if a parameter is not finite; predictions would mean nothing."""
        if not self.values.is_finite():
            self.refuse_parameters()

    def refuse_parameters(self) -> None:
        """Raise DivergenceError, because a parameter is not finite."""
        hint = "the training diverged: train a new network at a lower rate, or load what was saved before"
        raise DivergenceError("parameters of the network", expected="finite numbers", got="NaN", hint=hint)

    def as_dataset(self, data: Data, remembered: Remembered | None = None, *, argument: str = "data") -> Dataset:
        """``data`` as a Dataset: one, or arrays ``(x, y)`` or ``(x, y, weight)``, which mean what they did in training.

        ``argument`` is what errors call it.

        Raises:
            DtypeError: it is neither.
            MlpgpuError: the arrays are none that a Dataset takes.
        """
        if isinstance(data, Dataset):
            return data
        if not isinstance(data, tuple) or not 2 <= len(data) <= 3:
            expected = "a mlpgpu.Dataset, or a tuple of arrays, (x, y) or (x, y, weight)"
            got = f"a tuple of {len(data)}" if isinstance(data, tuple) else type(data).__name__
            raise DtypeError(argument, expected=expected, got=got)
        return (remembered or self.remembered).dataset(*data)

    def labels(self, x: ArrayLike | Dataset, *, backend: str = "auto", batch_size: int | None = None) -> np.ndarray:
        """The class predicted for each row, (rows,): its name where classes had names, else its number.

        Raises:
            ConfigurationError: the network was not trained to classify.
            MlpgpuError: as :meth:`predict` does.
        """
        check_classifies(self)
        return labels_of(self, self.predict(x, backend=backend, batch_size=batch_size))

    def summary(self) -> None:
        """Print a table of the layers."""
        print(self)

    def __repr__(self) -> str:
        return f"Network({list(self.layers)!r}, seed={self.seed})"

    def __str__(self) -> str:
        return f"{table(self._rows(), '><>>')}\n{self._total}"

    def _repr_html_(self) -> str:
        return html(self._rows(), "><>>", f"Network: {self._total}")

    def __dir__(self) -> list[str]:
        return public_names(self, INTERNAL)

    @property
    def _total(self) -> str:
        frozen = sum(p.size for p in self._plan.parameters if not p.trainable)
        of_them = f", {frozen:,} of them frozen" if frozen else ""
        return f"{self._plan.parameter_count:,} parameters in {self.dtype}{of_them}, output {self.output}"

    def _rows(self) -> list[tuple[str, ...]]:
        """The cells of a table of the layers, heads first."""
        rows: list[tuple[str, ...]] = [("place", "layer", "output", "parameters")]
        width = self.n_in
        for place, layer in enumerate(self.layers):
            width = layer.output_width(width)
            count = sum(p.size for p in self._plan.parameters if p.layer == place)
            home = next(first for first, other in enumerate(self.layers) if other is layer)
            rows.append((str(place), repr(layer), str(width), f"{count:,}" if home == place else f"as {home}"))
        return rows

    def __setattr__(self, name: str, value: object) -> None:
        if "values" in self.__dict__ and type(self) is Network:
            refuse_setting(self, name, SETTABLE, "make a new Network([…])")
        if name == "output":
            value = lookup("output", value, OUTPUTS)
        elif name == "adapted":
            value = check_truth("adapted", value)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": self.values.copy(), "_kept": KeptPredictions()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The plan says how initial values are drawn.  That of an older version may say otherwise than a trainer's
        # would today; its values are drawn as it says.
        if self.is_new and self._plan.parameters != self.lower(capacity=1).parameters:
            self.flat_parameters()

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
        return self.saved().contents()

    def contents_but_parameters(self) -> storage.Contents:
        """As :meth:`contents`, without the parameters, which nobody may have room for."""
        return self._saved(np.empty(0, self.dtype)).contents_but_parameters()

    def saved(self) -> SavedNetwork:
        """Description and values as they are now, which no longer change."""
        return self._saved(self.values.read())

    def _saved(self, parameters: np.ndarray) -> SavedNetwork:
        described = {name: getattr(self, name) for name in ("layers", "seed", *SAVED)}
        return SavedNetwork(**described, parameters=parameters, statistics=self.flat_statistics())

    def export(self, path: str | PathLike[str], *, logits: bool = False) -> None:
        """Write the network as a file for another program, replacing it whole or not at all.

        The name's ending tells the format: ``.onnx`` (extra ``onnx``), ``.safetensors`` (extra ``safetensors``) or
        ``.keras``, which compute what :meth:`predict` does, (rows, n_out); ``.h5`` or ``.weights.h5``, as :meth:`save`;
        ``.npz``, arrays of parameters alone; ``.json``, the description alone.  ``docs/formats.md`` has what each
        format keeps.

        Arguments:
            logits: leave out the output's function and the scaling back of standardized targets, as :meth:`forward`.

        Raises:
            ConfigurationError: the name ends in something else, a ``Standardize`` layer was never fitted, or the format
                cannot say what the network is.
            DataError: a parameter is not finite.
            BackendError: a package is missing.
            StorageError: the file cannot be written.
        """
        target, form = format_of("path to export to", path)
        replace_file(f"file {target}", target, form.write(self.to_export(logits=logits)))

    def to_export(self, *, logits: bool = False) -> SavedNetwork:
        """As :meth:`saved`, or one that predicts its logits, if other programs can compute the same with it.

        Raises:
            DtypeError: ``logits`` is neither True nor False.
            ConfigurationError: a ``Standardize`` layer was never fitted.
            DataError: a parameter is not finite.
        """
        logits = check_truth("logits", logits)
        self.check_adapted("net.adapt(data), or train it")
        saved = self.saved()
        saved.check_finite()
        return saved.of_logits() if logits else saved

    @classmethod
    def from_contents(cls, contents: storage.Contents) -> Network:
        """The network that :meth:`contents` gave.

        Raises:
            FileFormatError: the description has no meaning, or arrays are missing or of other shapes.
        """
        with _refusing_descriptions():
            return cls.from_saved(SavedNetwork.parse(contents))

    @classmethod
    def from_file(cls, file: storage.OpenFile, contents: storage.Contents) -> tuple[Network, StoredParameters]:
        """A network whose parameters stay in a file until they are asked for; ``contents`` are its others.

        Raises:
            FileFormatError: as :meth:`from_contents` does.
        """
        with _refusing_descriptions():
            saved = SavedNetwork.parse_but_parameters(contents)
            stored = StoredParameters(file, saved.layers, saved.parameters.dtype)
            network = cls.from_saved(saved)
        network.values.give_to(stored, saved.parameters.dtype)
        return network, stored

    @classmethod
    def from_saved(cls, saved: SavedNetwork) -> Network:
        """The network that :meth:`saved` gave."""
        network = cls(saved.layers, saved.seed)
        for name in SAVED:
            setattr(network, name, getattr(saved, name))
        network.values.replace(saved.parameters)
        network._statistics = saved.statistics
        return network
