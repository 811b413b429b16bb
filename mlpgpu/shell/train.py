"""``python -m mlpgpu train``: from a file of rows to a trained network."""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..activations import ACTIVATIONS
from ..callbacks import Callback, Checkpoint, EarlyStopping
from ..errors import ConfigurationError, DataMismatchError, check_integer, check_number, lookup
from ..losses import LOSSES, as_loss
from ..optimizers import OPTIMIZERS, Optimizer, as_optimizer
from ..pictures import check_picture
from ..plan import PRECISIONS
from ..storage.files import check_path
from ..tables.learning import TASKS
from ..tables.table import MOST_CATEGORIES, SCALINGS
from ..training import Trainer
from .data import Data, add_data_options, learn, validate_on
from .models import batch_size_of, build
from .output import DONE, INTERRUPTED, Output, add_output_options

EPOCHS, VALIDATION, LAYERS = 20, "0.1", (128, 64)


def add_train(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("train", help="train a network on a file of rows, and save it")
    parser.set_defaults(run=train)
    parser.add_argument("data", type=Path, metavar="FILE", help="CSV, Parquet, .npy, .npz or IDX")
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL", help="the model's file, .h5")
    parser.add_argument("--target", nargs="+", default=[], metavar="COLUMN", help="what is to be predicted")
    columns = parser.add_argument_group("what columns mean")
    columns.add_argument("--weight", metavar="COLUMN", help="the rows' weights")
    columns.add_argument("--ignore", nargs="+", default=[], metavar="COLUMN", help="columns that are not used")
    kinds = "number, truth, category, date, or 'date FORMAT'"
    columns.add_argument("--kind", nargs="+", default=[], metavar="COLUMN=KIND", help=f"of a column: {kinds}")
    columns.add_argument("--missing", nargs="+", default=[], metavar="TEXT", help="texts that mean a missing value")
    columns.add_argument("--task", choices=TASKS, help="what the target asks for (default: found out)")
    columns.add_argument("--scaling", choices=SCALINGS, default="standard", help="of numbers (default: standard)")
    columns.add_argument("--most-categories", type=int, default=MOST_CATEGORIES, metavar="N", help="of a column")
    network = parser.add_argument_group("the network")
    network.add_argument("--layers", type=int, nargs="*", default=LAYERS, metavar="N", help="widths (default: 128 64)")
    network.add_argument("--activation", default="relu", metavar="NAME", help=f"{', '.join(ACTIVATIONS)}")
    network.add_argument("--dropout", type=float, default=0.0, metavar="SHARE", help="after each layer (default: 0)")
    network.add_argument("--seed", type=int, default=0, metavar="N", help="of initial values and shuffles (default: 0)")
    training = parser.add_argument_group("the training")
    training.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help=f"(default: {EPOCHS})")
    training.add_argument("--validation", default=VALIDATION, metavar="SHARE|FILE", help="(default: 0.1; 0 for none)")
    training.add_argument(
        "--validation-labels", type=Path, metavar="FILE", help="targets of a --validation in IDX, .npy"
    )
    training.add_argument("--patience", type=int, metavar="N", help="end after N epochs without a better one; keep it")
    training.add_argument("--loss", metavar="NAME", help=", ".join(LOSSES))
    training.add_argument("--metrics", nargs="+", metavar="NAME", help="of the validation")
    training.add_argument("--optimizer", default="adam", metavar="NAME", help=", ".join(OPTIMIZERS))
    training.add_argument("--rate", type=float, metavar="X", help="learning rate (default: the optimizer's)")
    training.add_argument("--l2", type=float, default=0.0, metavar="X", help="penalty on all parameters (default: 0)")
    training.add_argument("--batch-size", type=int, metavar="N", help="(default: by the rows, 32 to 512)")
    training.add_argument("--class-weight", choices=("balanced",), help="weights inverse to the classes' frequencies")
    training.add_argument("--backend", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 or auto (the default)")
    training.add_argument("--precision", default="float32", metavar="NAME", help=", ".join(PRECISIONS))
    training.add_argument("--threads", type=int, metavar="N", help="of the host (default: by plan and cores)")
    training.add_argument("--resume", action="store_true", help="go on with the run in MODEL, if it is there")
    parser.add_argument("--curve", type=Path, metavar="PICTURE", help="draw the training's curve, .png or .svg")
    add_data_options(parser)
    add_output_options(parser)


class Clock:
    """Seconds of each part of a command."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Count the time since the last part's end as that of ``part``."""
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


def train(options: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code.

    Raises:
        MlpgpuError: an argument has no meaning, the data cannot be read, or the training failed; a model that was
            there before stands until an epoch is finished.
    """
    clock = Clock()
    check_path("--out", options.out, (".h5", ".hdf5"))
    check_picture(options.curve)
    _check_folder("--out", options.out)
    _check_folder("--curve", options.curve)
    check_integer("--epochs", options.epochs, least=1)
    optimizer = _optimizer(options)
    loss = None if options.loss is None else as_loss(lookup("--loss", options.loss, LOSSES))
    share, held_out = _validation(options)

    data = learn(options.data, options)
    validation = share if held_out is None else validate_on(held_out, data, options)
    clock.end("read")
    chosen = loss or as_loss(data.loss)
    scales_targets = not data.is_classification and chosen.output == "identity"
    widths, dropout = list(options.layers), check_number("--dropout", options.dropout, least=0.0, below=1.0)
    network = build(data, widths, options.activation, dropout, options.seed, scales_targets=scales_targets)
    rows = len(data.dataset)
    trainer = Trainer(
        network,
        chosen,
        optimizer,
        batch_size=batch_size_of(rows) if options.batch_size is None else options.batch_size,
        backend=options.backend,
        precision=options.precision,
        threads=options.threads,
        metrics=_metrics(options, data, chosen.output),
        class_weight=options.class_weight,
    )
    if options.resume and options.out.exists():
        trainer = _resumed(trainer, data, options)
    table = data.dataset.table
    output.text(*(() if table is None else (str(table), "")), f"{rows:,} rows", "", str(network), "")
    clock.end("prepare")
    callbacks: list[Callback] = [EarlyStopping(patience=options.patience)] if options.patience is not None else []
    callbacks.append(Checkpoint(options.out))
    progress = not output.quiet
    history = trainer.fit(data.dataset, options.epochs, validation=validation, callbacks=callbacks, progress=progress)
    clock.end("train")
    if options.curve is not None and len(history):
        history.plot(options.curve)
        clock.end("curve")
    output.text(str(history), f"saved {options.out}")
    output.result(
        {
            "model": str(options.out),
            "rows": rows,
            "inputs": network.n_in,
            "outputs": network.n_out,
            "parameters": len(trainer.network.flat_parameters()),
            "epochs": trainer.epochs,
            "steps": trainer.steps,
            "interrupted": history.interrupted,
            "last": history.last if len(history) else None,
            "history": history.records,
            "seconds": clock.seconds,
        }
    )
    return INTERRUPTED if history.interrupted else DONE


def _optimizer(options: argparse.Namespace) -> Optimizer:
    optimizer = as_optimizer(options.optimizer)
    changes: dict[str, Any] = {"l2": options.l2} if options.l2 else {}
    if options.rate is not None:
        changes["rate"] = options.rate
    return replace(optimizer, **changes)


def _validation(options: argparse.Namespace) -> tuple[float | None, Path | None]:
    """The share of the rows to hold out, or the file to validate on."""
    try:
        share = float(options.validation)
    except ValueError:
        return None, Path(options.validation)
    if share == 0:
        if options.patience is not None:
            hint = "--patience watches the validation's loss"
            raise ConfigurationError("--validation", expected="a share above 0, or a file", got=0, hint=hint)
        return None, None
    return check_number("--validation", share, above=0.0, below=1.0), None


def _metrics(options: argparse.Namespace, data: Data, output: str) -> list[str]:
    if options.metrics is not None:
        return list(options.metrics)
    if data.is_classification:
        return ["accuracy"]
    return ["r2", "mean_absolute_error"] if output in ("identity", "exp") else ["hamming_loss"]


def _check_folder(what: str, path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigurationError(what, expected="a file in a folder that is there", got=str(path))


def _resumed(asked: Trainer, data: Data, options: argparse.Namespace) -> Trainer:
    """The trainer of the run in the model's file, if it is the one that is asked for.

    Raises:
        DataMismatchError: columns mean something else than in the run.
        ConfigurationError: an option differs from the run's.
        StorageError, FileFormatError: the file cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        trainer = Trainer.resume(options.out, backend=None if options.backend == "auto" else options.backend)
    hint = "the command of the run, with --resume, goes on with it; another --out begins anew"
    for name in ("loss", "optimizer", "batch_size", "metrics", "class_weight"):
        known, given = getattr(trainer, name), getattr(asked, name)
        if known != given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(option, expected=f"the run's, {known}", got=given, hint=hint)
    if trainer.network.layers != asked.network.layers or trainer.network.seed != asked.network.seed:
        known, given = (f"{list(t.network.layers)}, seed {t.network.seed}" for t in (trainer, asked))
        raise ConfigurationError("--layers", expected=f"the run's, {known}", got=given, hint=hint)
    table, learnt = trainer.network.table, data.dataset.table
    if (table and table.described()) != (learnt and learnt.described()):
        raise DataMismatchError("columns", expected="those of the run", got="columns that mean something else")
    return trainer
