"""The data of a command: a table's rows, or arrays."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets import Dataset
from ..errors import ConfigurationError, DataError
from ..names import LossName
from ..network import Network
from ..tables import CSV, Table
from ..tables.sources import PARQUET_SUFFIXES, Kept, as_source
from .arrays import check_whole_targets, is_array_file, read_array, read_arrays, split_columns

MOST_CLASSES = 1000  # that whole numbers of an array are classes of


@dataclass(frozen=True)
class Data:
    """What a network is to be trained on.

    Attributes:
        n_out: how many outputs it needs.
        loss: the usual one.
        is_classification: whether its targets are classes.
        standardizes: whether its inputs are floats that nothing has scaled.
    """

    dataset: Dataset
    n_out: int
    loss: LossName
    is_classification: bool
    standardizes: bool


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """How files are written."""
    group = parser.add_argument_group("how files are written")
    group.add_argument("--labels", type=Path, metavar="FILE", help="targets of inputs in .npy or IDX")
    group.add_argument("--delimiter", metavar="C", help="between a CSV's cells (default: found out)")
    group.add_argument("--decimal", metavar="C", help="in a CSV's numbers, . or , (default: found out)")
    group.add_argument("--encoding", metavar="NAME", help="of a CSV (default: utf-8, or what the file's mark says)")


def source_of(path: Path, options: argparse.Namespace) -> Any:
    """A file of rows, read as the options say."""
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return as_source(path)
    delimiter = "\t" if options.delimiter in ("\\t", "tab") else options.delimiter
    return CSV(path, delimiter=delimiter, decimal=options.decimal, encoding=options.encoding)


def learn(path: Path, options: argparse.Namespace) -> Data:
    """The data to train on, and what was learnt of them.

    Raises:
        MlpgpuError: they cannot be read, or do not go with the options.
    """
    if is_array_file(path):
        return _of_arrays(path, options)
    if not options.target:
        raise ConfigurationError("--target", expected="the column to be predicted", got="none")
    source = Kept(source_of(path, options))
    table = Table(
        source,
        options.target,
        weight=options.weight,
        kinds=_kinds(options),
        task=options.task,
        scaling=options.scaling,
        most_categories=options.most_categories,
        missing=options.missing,
    )
    return Data(table.dataset(source), table.n_out, table.loss, table.classes is not None, standardizes=False)


def _kinds(options: argparse.Namespace) -> dict[str, str]:
    kinds = dict.fromkeys(options.ignore, "ignore")
    for pair in options.kind:
        name, equals, kind = pair.rpartition("=")
        if not equals:
            raise ConfigurationError("--kind", expected="COLUMN=KIND", got=repr(pair))
        kinds[name] = kind
    return kinds


def _of_arrays(path: Path, options: argparse.Namespace) -> Data:
    x, y, weight = _arrays(path, options.labels, options.target[0] if options.target else None)
    if y is None:
        hint = "--labels names a file of targets"
        raise DataError(f"file {path}", expected="inputs and targets", got="inputs alone", hint=hint)
    is_whole = y.dtype.kind in "iubU" and y.ndim == 1
    is_few = y.dtype.kind in "bU" or (is_whole and int(y.min()) >= 0 and int(y.max()) < MOST_CLASSES)
    is_classification = options.task == "classification" or (options.task is None and is_whole and is_few)
    if is_classification:
        y = check_whole_targets(y)
    dataset = Dataset(x, y if is_classification else y.astype(np.float64), weight)
    _check_varies(dataset)
    if is_classification:
        n_out = len(dataset.classes) if dataset.classes is not None else int(dataset.y.max()) + 1  # type: ignore[union-attr]
        return Data(dataset, n_out, "softmax_cross_entropy", True, dataset.scale is None)
    n_out = 1 if y.ndim == 1 else y.shape[1]
    return Data(dataset, n_out, "mean_squared_error", False, dataset.scale is None)


def _check_varies(dataset: Dataset) -> None:
    y = dataset.y
    if y is not None and (y == y[0]).all():
        got = f"{y[0]} in all {len(y)} rows"
        raise DataError("targets", expected="two different values or more", got=got)


def _arrays(path: Path, labels: Path | None, target: str | None) -> tuple[Any, np.ndarray | None, Any]:
    """Inputs, targets and weights of a file."""
    if path.suffix.lower() == ".npz":
        arrays = read_arrays(path, target)
        return arrays["x"], arrays.get("y"), arrays.get("weight")
    x = read_array(path)
    if labels is not None:
        return x, read_array(labels), None
    if path.suffix.lower() == ".npy":
        return *split_columns(f"file {path}", x, target), None
    return x, None, None


def validate_on(path: Path, data: Data, options: argparse.Namespace) -> Dataset:
    """The data set of another file, read as the one that is trained on.

    Raises:
        MlpgpuError: it cannot be read, is of another kind, or has no targets.
    """
    trained = data.dataset
    if trained.table is not None:
        dataset: Dataset = trained.table.dataset(source_of(path, options))
    else:
        target = options.target[0] if options.target else None
        x, y, weight = _arrays(path, options.validation_labels, target)
        y = check_whole_targets(y) if y is not None and data.is_classification else y
        dataset = Dataset(x, y, weight, trained.classes, scale=trained.scale if Dataset.has_bytes(x) else None)
    return _with_targets(path, dataset)


def of_network(path: Path, network: Network, options: argparse.Namespace) -> Dataset:
    """Data with targets for a trained network.

    Raises:
        MlpgpuError: they cannot be read, do not suit it, or have no targets.
    """
    if network.table is None or is_array_file(path):
        check_arrays(path, network)
        x, y, weight = _arrays(path, options.labels, None)
        if y is not None and network.output == "softmax" and y.ndim == 1:
            y = check_whole_targets(y)
        dataset = network.as_dataset((x, y, weight))
    else:
        dataset = network.table.dataset(source_of(path, options))
    return _with_targets(path, dataset)


def _with_targets(path: Path, dataset: Dataset) -> Dataset:
    if dataset.y is None:
        names = [repr(target.name) for target in dataset.table.targets] if dataset.table is not None else []
        expected = f"the targets {', '.join(names)}" if names else "inputs and targets"
        raise DataError(f"file {path}", expected=expected, got="none", hint="" if names else "--labels names a file")
    return dataset


def inputs_of(path: Path, network: Network) -> np.ndarray:
    """Inputs of a file of arrays; of a ``.npy`` that has one column more than the network takes, all but the last.

    Raises:
        MlpgpuError: they cannot be read.
    """
    check_arrays(path, network)
    if path.suffix.lower() == ".npz":
        return read_arrays(path)["x"]
    x = read_array(path)
    return x[:, :-1] if x.ndim == 2 and x.shape[1] == network.n_in + 1 else x


def check_arrays(path: Path, network: Network) -> None:
    """Refuse a table's file for a network that was trained on arrays."""
    if network.table is None and not is_array_file(path):
        hint = "the network was trained on arrays, so that it does not know what columns mean"
        raise ConfigurationError(f"file {path}", expected="a .npy, .npz or IDX file", got=path.suffix, hint=hint)
