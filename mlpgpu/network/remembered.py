"""What a network remembers of the data that it was trained on, and which other data go with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..datasets import Dataset, Inputs
from ..datasets.arrays import NAMED_MOST, factor
from ..errors import ConfigurationError, ShapeError, check_number, lookup
from ..tables import Table


@dataclass(frozen=True)
class Remembered:
    """What predictions need to know of the training data; None where nothing is known yet.

    Attributes:
        classes: their names.
        columns: the names of the inputs' columns.
        inputs: bytes or floats, and their scale.
        has_vector_targets: whether ``y`` was (rows,); one output is then predicted as (rows,) too.
        table: what made inputs of raw rows.
    """

    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    inputs: Inputs | None = None
    has_vector_targets: bool = False
    table: Table | None = None

    @property
    def scale(self) -> float | None:
        """What a byte stood for, or None if the inputs were not bytes."""
        return self.inputs.scale if self.inputs is not None and self.inputs.kind == "bytes" else None

    def after(self, dataset: Dataset) -> Remembered:
        """What is remembered once ``dataset``, with targets, was trained on."""
        inputs = dataset.inputs
        if inputs.scale is None and self.inputs is not None:
            inputs = self.inputs  # floats of which nobody said what they are now are what they were
        vector = self.has_vector_targets if dataset.y is None else dataset.y.ndim == 1
        classes, columns = dataset.classes or self.classes, dataset.columns or self.columns
        return Remembered(classes, columns, inputs, vector, dataset.table or self.table)

    def dataset(self, x: Any, y: Any = None, weight: Any = None) -> Dataset:
        """A data set of these arrays, or raw rows: bytes, labels and columns mean what they meant in training."""
        if self.table is not None and Table.is_table(x):
            x = self.table.encode(x)
        scale = self.inputs.scale if self.inputs is not None and Dataset.has_bytes(x) else None
        has_labels = y is not None and self.classes is not None and np.ndim(y) == 1
        return Dataset(x, y, weight, self.classes if has_labels else None, scale=scale)

    def check(self, dataset: Dataset) -> None:
        """Refuse inputs that mean something else than those trained on.

        Raises:
            ShapeError: named columns are missing, or there are others.
            ConfigurationError: named columns are in another order, or bytes came for floats or the reverse.
        """
        if None not in (self.columns, dataset.columns) and self.columns != dataset.columns:
            self._refuse_columns(self.columns or (), dataset.columns or ())
        known, given = self.inputs, dataset.inputs
        if known is None or known.means_the_same(given):
            return
        if known.kind == given.kind:
            raise ConfigurationError(
                f"scale of {'byte' if known.kind == 'bytes' else 'float'} inputs",
                expected=factor(known.scale),
                got=factor(given.scale),
                hint=f"Dataset(x, y, scale={factor(known.scale)})",
            )
        if known.kind == "bytes":
            usual = f"Dataset(x, scale={factor(known.scale)}) says that they are bytes times {factor(known.scale)}"
            hint = f"{usual} already; whole numbers from 0 to 255 are x.astype('uint8')"
        elif known.scale is None:
            hint = "Dataset(x, scale=1/255), or another scale, says what a byte stands for; values as they are: scale=1"
        else:
            hint = f"Dataset(x, scale={factor(known.scale)})"
        raise ConfigurationError("inputs", expected=f"{known}, as in training", got=str(given), hint=hint)

    def _refuse_columns(self, known: Sequence[str], given: Sequence[str]) -> None:
        missing = [name for name in known if name not in given]
        others = [name for name in given if name not in known]
        if missing or others:
            parts = [f"no {_names(missing)}"] * bool(missing) + [f"{_names(others)} as well"] * bool(others)
            got = ", and ".join(parts)
            raise ShapeError("columns of x", expected=f"those of training, {_names(known)}", got=got)
        place = next(k for k, (a, b) in enumerate(zip(known, given, strict=False)) if a != b)
        expected, got = f"{known[place]!r} at place {place}, as in training", repr(given[place])
        raise ConfigurationError("columns of x", expected=expected, got=got, hint="x[list(network.columns)]")

    # --- files ---

    def described(self) -> dict[str, Any]:
        """As a file's JSON holds it."""
        inputs = None if self.inputs is None else {"kind": self.inputs.kind, "scale": self.inputs.scale}
        return {
            "classes": None if self.classes is None else list(self.classes),
            "scale": self.scale,
            "columns": None if self.columns is None else list(self.columns),
            "inputs": inputs,
            "has_vector_targets": self.has_vector_targets,
            "table": None if self.table is None else self.table.described(),
        }

    @classmethod
    def parse(cls, described: Mapping[str, Any], class_count: int, n_in: int) -> Remembered:
        """What :meth:`described` gave; what older files lack is unknown.

        Raises:
            MlpgpuError, KeyError, TypeError: it has no meaning.
        """
        inputs, scale = described.get("inputs"), described["scale"]
        if inputs is not None:
            kind = lookup("kind of inputs", inputs["kind"], ("bytes", "floats"))
            found: Inputs | None = Inputs(kind, _check_scale(inputs["scale"]))  # type: ignore[arg-type]
        else:
            found = None if scale is None else Inputs("bytes", _check_scale(scale))
        _check_scale(scale)
        table = None if described.get("table") is None else Table.parse(described["table"])
        if table is not None and table.n_in != n_in:
            raise ConfigurationError("table", expected=f"{n_in} inputs", got=table.n_in)
        return cls(
            classes=_check_names("classes", described["classes"], class_count),
            columns=_check_names("columns", described.get("columns"), n_in),
            inputs=found,
            has_vector_targets=described.get("has_vector_targets") is True,
            table=table,
        )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMED_MOST]))
    return f"{shown} and {len(names) - NAMED_MOST} more" if len(names) > NAMED_MOST else shown


def _check_scale(scale: Any) -> float | None:
    return None if scale is None else check_number("scale", scale, above=0.0)


def _check_names(what: str, names: Any, count: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) != count:
        raise ConfigurationError(what, expected=f"a list of {count} names", got=names)
    return tuple(names)
