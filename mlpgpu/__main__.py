"""``python -m mlpgpu``: what is installed here, and how a saved network or run is computed."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Sequence

import h5py
import numpy as np
import psutil
from threadpoolctl import threadpool_info

from . import __version__, storage
from .backends import BACKENDS, get_backend
from .errors import ConfigurationError, MlpgpuError, check_integer, lookup
from .losses import LOSSES
from .network import Network
from .optimizers import SGD
from .trainer import Trainer

BATCH_SIZE = 32  # of a plan, unless the command says otherwise

GPU = "none: this version of mlpgpu has the NumPy backend only, so no GPU was looked for"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, ``sys.argv``'s by default, and return the exit code: 2 for an error of the user's."""
    options = _parser().parse_args(arguments)
    try:
        print(info() if options.command == "info" else explain(options.model, options.batch_size, options.loss))
    except MlpgpuError as error:
        print("mlpgpu:", *str(error).split(), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mlpgpu", description="Train multilayer perceptrons.")
    parser.add_argument("--version", action="version", version=f"mlpgpu {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, cores and backends")
    explained = commands.add_parser("explain", help="print a saved network, or a run, and its plan")
    explained.add_argument("model", metavar="MODEL", help="a file of Network.save, Trainer.save or Checkpoint")
    explained.add_argument(
        "--batch-size", type=int, metavar="N", help=f"of a network's plan (default: {BATCH_SIZE}); a run has its own"
    )
    explained.add_argument(
        "--loss", metavar="NAME", help="plan a step of SGD on this loss, not a prediction; a run has its own"
    )
    return parser


def info() -> str:
    """Versions, BLAS, cores and backends, a line each."""
    blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
    names = [f"{b['internal_api']} {b['version']}, up to {b['num_threads']} threads" for b in blas]
    logical = psutil.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    lines = {
        "mlpgpu": __version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "NumPy": np.__version__,
        "h5py": f"{h5py.__version__} with HDF5 {h5py.version.hdf5_version}",
        "BLAS": "; ".join(names) or "one whose threads cannot be set",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {logical} logical, {usable} usable",
        "backends": f"{', '.join(BACKENDS[1:])}; auto means {get_backend('auto').name}",
        "GPU": GPU,
    }
    return "\n".join(f"{name:<10}{value}" for name, value in lines.items())


def explain(path: str, batch_size: int | None = None, loss: str | None = None) -> str:
    """The network in a file, its plan, and what runs it.

    A run's plan is its trainer's.  A network's is that of a prediction, or of a step of SGD on ``loss``.

    Raises:
        StorageError, FileFormatError: the file cannot be read.
        ConfigurationError, UnknownNameError: ``batch_size`` or ``loss`` does not suit it.
    """
    contents = storage.read(path)
    if "run" in contents.description:
        if batch_size is not None or loss is not None:
            expected = "no --batch-size and no --loss for a run, which has its own"
            raise ConfigurationError("explain", expected=expected, got=f"--batch-size {batch_size}, --loss {loss}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other libraries give other bits: nothing is resumed here
            trainer = Trainer.resume(path)
        network, plan, backend, threads = trainer.network, trainer.plan, trainer.backend, trainer.threads
        progress = f"run: {trainer.epochs} epochs, {trainer.steps} steps, loss {trainer.loss}, {trainer.optimizer}"
    else:
        network, backend, threads = Network.from_contents(contents), get_backend("auto"), None
        capacity = BATCH_SIZE if batch_size is None else check_integer("--batch-size", batch_size, least=1)
        plan = network.lower(
            capacity=capacity,
            loss=None if loss is None else lookup("--loss", loss, LOSSES),
            optimizer=None if loss is None else SGD(0.0),
            output=network.output,
            precision=network.flat_parameters().dtype.name,
        )
        progress = ""
    made_by = ", ".join(f"{key} {value}" for key, value in backend.fingerprint(plan, threads=threads).items())
    parts = [str(network), progress, str(plan), f"here: {made_by}"]
    return "\n\n".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
