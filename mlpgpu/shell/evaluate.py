"""``python -m mlpgpu evaluate`` and ``export``."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from .. import storage
from ..losses import as_loss
from ..names import LossName
from ..network import Network, load
from ..network.formats import FORMATS, format_of
from ..text import table
from ..training import Trainer
from .data import add_data_options, of_network
from .output import DONE, Output, add_output_options

# The usual loss of an output function, for a file of a network alone.
LOSS_OF: dict[str, LossName] = {
    "softmax": "softmax_cross_entropy",
    "sigmoid": "binary_cross_entropy",
    "identity": "mean_squared_error",
    "exp": "poisson",
}
METRICS_OF = {
    "softmax": ("accuracy",),
    "sigmoid": ("hamming_loss",),
    "identity": ("r2", "mean_absolute_error"),
    "exp": ("r2", "mean_absolute_error"),
}


def add_evaluate(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("evaluate", help="evaluate a saved model on a file of rows with targets")
    parser.set_defaults(run=evaluate)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a file of train, Network.save or Trainer.save")
    parser.add_argument("data", type=Path, metavar="FILE", help="rows with the columns of training, or arrays")
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="(default: the run's, or those of the output)")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 or auto (the default)")
    add_data_options(parser)
    add_output_options(parser)


def evaluate(options: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code.

    Raises:
        MlpgpuError: an argument has no meaning, or the rows are not those that the model takes.
    """
    contents = storage.read(options.model)
    if "run" in contents.description:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is resumed here, whose bits could differ
            trainer = Trainer.resume(options.model, backend=None if options.backend == "auto" else options.backend)
    else:
        network = Network.from_contents(contents)
        trainer = Trainer(network, as_loss(LOSS_OF[network.output]), backend=options.backend)
    network = trainer.network
    metrics = options.metrics or trainer.metrics or METRICS_OF[network.output]
    dataset = of_network(options.data, network, options)
    results = trainer.evaluate(dataset, metrics=metrics)
    output.text(
        table([("rows", f"{len(dataset):,}"), *((name, _shown(value)) for name, value in results.items())], "<<")
    )
    output.result({"rows": len(dataset), **results})
    return DONE


def _shown(value: Any) -> str:
    return f"{value:.6g}" if np.ndim(value) == 0 else " ".join(np.array2string(np.asarray(value), precision=6).split())


def add_export(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("export", help="write a saved model in another format")
    parser.set_defaults(run=export)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a file of train, Network.save or Trainer.save")
    formats = "; ".join(f"{suffix}: {form.name}" for suffix, form in FORMATS.items())
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=formats)
    add_output_options(parser)


def export(options: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code; the file is written whole or not at all.

    Raises:
        MlpgpuError: there is no such format, or a file cannot be read or written.
    """
    path, form = format_of("exported file", options.out)
    load(options.model).export(path)
    output.text(f"wrote {path}: {form.name}")
    output.result({"model": str(options.model), "exported": str(options.out)})
    return DONE
