"""What a file holds of a network; ``docs/file-format.md`` tells where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .. import storage
from ..errors import ConfigurationError, DataError, FileFormatError, ShapeError, check_integer, lookup
from ..layers import LAYERS, MOST_LAYERS, Layer, Standardize, check_layers, input_width
from ..losses import OUTPUTS, OutputName, class_count
from ..plan import Parameter, Segment, lower
from ..random import SEED_LIMIT
from ..storage.descriptions import describe, rebuild
from .remembered import Remembered


@dataclass(frozen=True, eq=False)
class SavedNetwork:
    """A network's description and values, as they stand in a file; the attributes are those of a network.

    Attributes:
        parameters: (P,) float32 or float64.
        statistics: (C,) float64, those of ``Standardize`` layers.
    """

    layers: tuple[Layer, ...]
    seed: int
    output: OutputName
    remembered: Remembered
    adapted: bool
    parameters: np.ndarray
    statistics: np.ndarray

    def contents(self) -> storage.Contents:
        """The contents of a file; refused with a DataError if a parameter is not finite."""
        self.check_finite()
        rest = self.contents_but_parameters()
        arrays = {path: self.parameters[p.offset : p.end].reshape(p.shape) for p, path in parameter_paths(self.layers)}
        return storage.Contents(rest.description, {**arrays, **rest.arrays}, rest.groups)

    def contents_but_parameters(self) -> storage.Contents:
        """The contents of a file without its largest arrays, of which ``parameters`` need have the dtype alone."""
        plan = lower(self.layers, input_width(self.layers), capacity=1)
        arrays: dict[str, np.ndarray] = {}
        statistics = {s.name: self.statistics[s.offset : s.end].reshape(s.shape) for s in plan.statistics}
        arrays |= {_statistic_path(name): values for name, values in statistics.items()}
        groups = _layer_groups(self.layers)
        for place, layer in enumerate(self.layers):
            if isinstance(layer, Standardize):  # as Keras' Normalization has them; we read the statistics above
                mean, scale = statistics[f"{place}.mean"], statistics[f"{place}.scale"]
                for number, values in enumerate((mean, np.square(scale), np.array(0))):  # the last one counts rows
                    arrays[f"{groups[place]}/vars/{number}"] = values
        return storage.Contents(
            {"network": self.described()}, arrays, tuple(f"{group}/vars" for group in groups.values())
        )

    def check_finite(self) -> None:
        """Raise DataError if a parameter is not finite: no file is to have such."""
        if not np.isfinite(self.parameters).all():
            raise DataError("parameters to save", expected="finite values", got="NaN or infinity")

    def described(self) -> dict[str, Any]:
        """All but parameters and statistics, as plain JSON data."""
        first = {id(layer): place for place, layer in reversed(list(enumerate(self.layers)))}
        return {
            "layers": [
                describe(layer) if first[id(layer)] == place else {"kind": "same", "place": first[id(layer)]}
                for place, layer in enumerate(self.layers)
            ],
            "seed": self.seed,
            "output": self.output,
            **self.remembered.described(),
            "adapted": self.adapted,
            "precision": self.parameters.dtype.name,
        }

    def named(self) -> dict[str, np.ndarray]:
        """Parameters and statistics by name: ``"0.weight"``, ``"0.bias"``, ``"0.mean"``, ``"0.scale"``, …"""
        plan = lower(self.layers, input_width(self.layers), capacity=1)
        flat = (plan.parameters, self.parameters), (plan.statistics, self.statistics)
        return {s.name: values[s.offset : s.end].reshape(s.shape) for segments, values in flat for s in segments}

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        named: Mapping[str, np.ndarray],
        *,
        seed: int = 0,
        output: OutputName = "identity",
        remembered: Remembered | None = None,
        adapted: bool = True,
    ) -> SavedNetwork:
        """A network of what :meth:`named` gives; parameters are float32 unless one of them is float64.

        Raises:
            MlpgpuError: layers do not fit each other, or arrays are missing, of other shapes, or not finite.
        """
        plan = lower(check_layers(layers), input_width(layers), capacity=1)
        is_double = any(named[p.name].dtype == np.float64 for p in plan.parameters if p.name in named)
        dtype = np.dtype(np.float64 if is_double else np.float32)

        def flat(segments: Sequence[Segment], dtype: np.dtype) -> np.ndarray:
            found = [_check_array(s.name, named.get(s.name), s.shape).astype(dtype).ravel() for s in segments]
            return np.concatenate([np.empty(0, dtype), *found])

        return cls(
            layers=tuple(layers),
            seed=seed,
            output=output,
            remembered=remembered or Remembered(),
            adapted=adapted,
            parameters=flat(plan.parameters, dtype),
            statistics=flat(plan.statistics, np.dtype(np.float64)),
        )

    def of_logits(self) -> SavedNetwork:
        """A network whose predictions are this one's logits; classes, which these do not tell, are forgotten."""
        scales_back = len(self.layers) > 1 and isinstance(self.layers[-1], Standardize)
        return SavedNetwork.of(
            self.layers[: len(self.layers) - scales_back],
            self.named(),
            seed=self.seed,
            remembered=replace(self.remembered, classes=None, table=None),
            adapted=self.adapted,
        )

    @classmethod
    def parse(cls, contents: storage.Contents) -> SavedNetwork:
        """What :meth:`contents` gave.

        Raises:
            FileFormatError: arrays are missing or of other shapes.
            MlpgpuError, KeyError, TypeError, ValueError, IndexError: the description has no meaning.
        """
        rest = cls.parse_but_parameters(contents)
        dtype = rest.parameters.dtype
        parameters = [_expect(contents, path, p.shape, dtype) for p, path in parameter_paths(rest.layers)]
        return replace(rest, parameters=np.concatenate([rest.parameters, *(array.ravel() for array in parameters)]))

    @classmethod
    def parse_but_parameters(cls, contents: storage.Contents) -> SavedNetwork:
        """As :meth:`parse`, with no parameters of the dtype that they have."""
        about = parse_description(contents.description["network"])
        plan = lower(about.layers, input_width(about.layers), capacity=1)
        double = np.dtype(np.float64)
        statistics = [_expect(contents, _statistic_path(s.name), s.shape, double) for s in plan.statistics]
        return cls(
            **about.attributes(),
            parameters=np.empty(0, about.dtype),
            statistics=np.concatenate([np.empty(0), *statistics]),
        )


@dataclass(frozen=True)
class Description:
    """A network without its values, as :meth:`SavedNetwork.described` has it; ``dtype`` is that of its parameters."""

    layers: tuple[Layer, ...]
    seed: int
    output: OutputName
    remembered: Remembered
    adapted: bool
    dtype: np.dtype

    def attributes(self) -> dict[str, Any]:
        """Those of a :class:`SavedNetwork`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "dtype"}


def parse_description(network: Mapping[str, Any]) -> Description:
    """What :meth:`SavedNetwork.described` gave.

    Raises:
        MlpgpuError, KeyError, TypeError, ValueError, IndexError: the description has no meaning.
    """
    seed = check_integer("seed", network["seed"], least=0, most=SEED_LIMIT - 1)
    if len(network["layers"]) > MOST_LAYERS:
        raise ConfigurationError("layers", expected=f"at most {MOST_LAYERS} of them", got=len(network["layers"]))
    layers: list[Layer] = []
    for place, description in enumerate(network["layers"]):
        if description["kind"] == "same":
            layers.append(layers[check_integer("place", description["place"], least=0, most=place - 1)])
        else:
            layers.append(rebuild("layer", description, LAYERS))
    # Widths come from the file: arrays are checked against them before anything of their size is made.
    plan = lower(check_layers(layers), input_width(layers), capacity=1)
    output = lookup("output", network["output"], OUTPUTS)
    return Description(
        layers=tuple(layers),
        seed=seed,
        output=output,
        remembered=Remembered.parse(network, class_count(output, plan.n_out), plan.n_in),
        adapted=network["adapted"] is True,
        dtype=np.dtype(lookup("precision", network["precision"], ("float32", "float64"))),
    )


def _statistic_path(name: str) -> str:
    return f"/mlpgpu/statistics/{name}"


def parameter_paths(layers: Sequence[Layer]) -> list[tuple[Parameter, str]]:
    """Where each parameter lies in a file: as in Keras 3, by class and its number, then by number in the layer."""
    plan = lower(layers, input_width(layers), capacity=1)
    groups = _layer_groups(layers)
    count: Counter[int] = Counter()
    placed: list[tuple[Parameter, str]] = []
    for parameter in plan.parameters:
        placed.append((parameter, f"{groups[parameter.layer]}/vars/{count[parameter.layer]}"))
        count[parameter.layer] += 1
    return placed


def _layer_groups(layers: Sequence[Layer]) -> dict[int, str]:
    """The HDF5 group of each layer that Keras knows, by its first place: ``/layers/dense``, ``/layers/dense_1``, …"""
    groups: dict[int, str] = {}
    seen: set[int] = set()
    counts: dict[str, int] = {}
    for place, layer in enumerate(layers):
        is_standardize = isinstance(layer, Standardize)  # with statistics of its own at each place
        if id(layer) in seen and not is_standardize:
            continue
        seen.add(id(layer))
        name = "normalization" if is_standardize else type(layer).__name__.lower()
        count = counts.get(name, 0)
        counts[name] = count + 1
        groups[place] = f"/layers/{name}" + (f"_{count}" if count else "")
    return groups


def _check_array(what: str, array: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if array is None or array.shape != shape:
        raise ShapeError(what, expected=shape, got="nothing" if array is None else array.shape)
    if not np.isfinite(array).all():
        raise DataError(what, expected="finite values", got="NaN or infinity")
    return array


def _expect(contents: storage.Contents, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = contents.arrays.get(path)
    if array is None or array.shape != shape or array.dtype != dtype:
        got = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise FileFormatError(path, expected=f"{dtype} {shape}", got=got)
    if not np.isfinite(array).all():
        raise FileFormatError(path, expected="finite values", got="NaN or infinity")
    return array
