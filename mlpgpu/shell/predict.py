"""``python -m mlpgpu predict``: predictions for the rows of a file."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import ConfigurationError
from ..network import Network, Predictor, load
from ..storage.files import check_path, replacing
from .arrays import is_array_file
from .data import add_data_options, check_arrays, inputs_of, source_of
from .output import DONE, Output, add_output_options

SUFFIXES = (".csv", ".tsv", ".npy")
ARRAY_ROWS = 1 << 16  # that are predicted at a time


def add_predict(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("predict", help="predict the rows of a file with a saved model")
    parser.set_defaults(run=predict)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a file of train, Network.save or Trainer.save")
    parser.add_argument("data", type=Path, metavar="FILE", help="rows with the columns of training, or arrays")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".csv, .tsv or .npy (default: CSV, printed)")
    parser.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help="columns to repeat beside predictions")
    parser.add_argument("--probabilities", action="store_true", help="of each class, beside the likeliest one")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 or auto (the default)")
    add_data_options(parser)
    add_output_options(parser)


def predict(options: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code; the file is written whole or not at all.

    Raises:
        MlpgpuError: an argument has no meaning, or the rows are not those that the model takes.
    """
    if options.out is not None:
        check_path("--out", options.out, SUFFIXES)
    if options.out is None and (options.json or options.quiet):
        raise ConfigurationError("--out", expected="a file, with --json and --quiet", got="none")
    network = load(options.model)
    if options.probabilities and network.output not in ("softmax", "sigmoid"):
        raise ConfigurationError("--probabilities", expected="a model that classifies", got="a regression")
    predictor = network.predictor(options.backend)
    pieces = _pieces(network, predictor, options)
    rows = 0
    if options.out is not None and options.out.suffix.lower() == ".npy":
        if options.keep:
            raise ConfigurationError("--keep", expected="none with .npy", got=options.keep)
        found = np.concatenate([prediction for prediction, _ in pieces])
        image = io.BytesIO()
        np.save(image, found, allow_pickle=False)
        with replacing(f"file {options.out}", options.out) as file:
            file.write(image.getbuffer())
        rows = len(found)
    else:
        with _sink(options.out) as file:
            rows = _write(network, pieces, file, options)
    if options.out is not None:
        output.text(f"{rows:,} predictions in {options.out}")
    output.result({"rows": rows, "predictions": str(options.out)})
    return DONE


@contextlib.contextmanager
def _sink(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with replacing(f"file {path}", path) as file:
            yield file


def _pieces(network: Network, predictor: Predictor, options: argparse.Namespace) -> Iterator[tuple[np.ndarray, Any]]:
    """Predictions (rows, n_out) or (rows,), piece by piece, with a frame of the columns to keep or None."""
    if network.table is None or is_array_file(options.data):
        check_arrays(options.data, network)
        if options.keep:
            raise ConfigurationError("--keep", expected="none with arrays", got=options.keep)
        x = inputs_of(options.data, network)
        for start in range(0, max(len(x), 1), ARRAY_ROWS):
            yield predictor(x[start : start + ARRAY_ROWS]), None
    else:
        for inputs, kept in network.table.pieces(source_of(options.data, options), options.keep):
            yield predictor(inputs), kept


def _write(
    network: Network, pieces: Iterator[tuple[np.ndarray, Any]], file: BinaryIO, options: argparse.Namespace
) -> int:
    """Write a row of names and a row for each prediction, and return how many there are."""
    is_tabbed = options.out is not None and options.out.suffix.lower() == ".tsv"
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, delimiter="\t" if is_tabbed else ",", lineterminator="\n")
    names, rows = prediction_names(network, options.probabilities), 0
    try:
        for predictions, kept in pieces:
            if not rows:
                writer.writerow([*(list(kept.columns) if kept is not None else ()), *names])
            columns = prediction_columns(network, predictions, options.probabilities)
            if kept is not None:
                columns = [*(_cells(kept[name]) for name in kept.columns), *columns]
            writer.writerows(zip(*columns, strict=True))
            rows += len(predictions)
    finally:
        text.detach()
    return rows


def _cells(series: Any) -> list[Any]:
    """Cells of a column to be repeated, where missing ones are empty."""
    return series.astype(object).where(series.notna(), "").tolist()


def prediction_names(network: Network, with_probabilities: bool) -> list[str]:
    """Of the columns of predictions: the targets', and those of probabilities."""
    table = network.table
    targets = [target.name for target in table.targets] if table is not None else []
    if network.output == "softmax":
        classes = network.classes or tuple(map(str, range(network.n_out)))
        named = [f"probability of {name}" for name in classes] if with_probabilities else []
        return [targets[0] if targets else "class", *named]
    if len(targets) != network.n_out:
        targets = ["prediction"] if network.n_out == 1 else [f"prediction {place}" for place in range(network.n_out)]
    return targets + [f"probability of {name}" for name in targets] * (
        network.output == "sigmoid" and with_probabilities
    )


def prediction_columns(network: Network, predictions: np.ndarray, with_probabilities: bool) -> list[Sequence[Any]]:
    """The columns of predictions (rows, n_out) or (rows,): classes by name, words of labels, or numbers."""
    numbers = predictions.reshape(len(predictions), -1)
    of_outputs: list[Sequence[Any]] = [_shortest(column) for column in numbers.T]
    if network.output == "softmax":
        places = numbers.argmax(axis=1)
        labels = [network.classes[place] for place in places] if network.classes is not None else places.tolist()
        return [labels, *of_outputs] if with_probabilities else [labels]
    if network.output == "sigmoid":
        words = [getattr(target, "words", ("0", "1")) for target in network.table.targets] if network.table else []
        words = words if len(words) == numbers.shape[1] else [("0", "1")] * numbers.shape[1]
        labels_of: list[Sequence[Any]] = [
            np.array(pair, object)[(column > 0.5).astype(int)].tolist()
            for pair, column in zip(words, numbers.T, strict=True)
        ]
        return labels_of + of_outputs * with_probabilities
    return of_outputs


def _shortest(column: np.ndarray) -> list[str]:
    """Numbers as the shortest text that reads back as the same one, of their own precision."""
    return [str(number) for number in column]
