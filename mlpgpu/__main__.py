"""``python -m mlpgpu``: what is installed here, how fast it is, how a saved network or run is computed; and the
commands of :mod:`mlpgpu.shell`, which train and use models."""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
from threadpoolctl import threadpool_info

from . import __version__, bench, shell, storage
from .backends import BACKENDS, MOST_SHARDS, Backend, get_backend
from .backends.cpu.loops import loops_name, why_not
from .backends.cuda import CudaBackend, check_plan
from .backends.cuda.profile.explain import profile
from .backends.cuda.profile.paths import CARDS, describe_on
from .backends.cuda.profile.predicted_step import step_seconds
from .backends.cuda.profile.predictions import describe_predictions
from .backends.cuda.runtime import describe_machine
from .backends.cuda.runtime.compiler import cubin_folder, find_nvcc, nvcc_version
from .errors import BackendError, ConfigurationError, MlpgpuError, check_integer, lookup
from .losses import LOSSES
from .network import Network
from .optimizers import SGD
from .plan import Parts, Plan, on_ranks, split_plan
from .plan.costs import choice_of
from .storage.files import replace_file
from .training import Trainer

CHOICE_OF_KERNELS = "OPENBLAS_CORETYPE"  # of the environment: which processor OpenBLAS computes for
BATCH_SIZE = 32  # of a plan, unless the command says otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, ``sys.argv``'s by default, and return the exit code.

    It is 2 for arguments without meaning, 1 for a failure, 130 for Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "info":
            print(info())
        elif options.command == "bench":
            measure(options.backend, options.only, options.precision, quick=options.quick, path=options.json)
        elif options.command == "explain":
            chosen = options.model, options.batch_size, options.loss, options.backend
            print(explain(*chosen, timeline=options.timeline, card=options.card, ranks=options.ranks))
        else:
            return shell.run(options)
    except (MlpgpuError, KeyboardInterrupt, BrokenPipeError) as error:
        return shell.tell_error(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mlpgpu", description="Train multilayer perceptrons.")
    parser.add_argument("--version", action="version", version=f"mlpgpu {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, cores, GPUs and backends")
    measured = commands.add_parser("bench", help="measure steps of some networks, on random data")
    names, precisions = tuple(bench.WORKLOADS), bench.PRECISIONS
    measured.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    measured.add_argument(
        "--precision", nargs="+", choices=precisions, default=precisions, metavar="NAME", help=", ".join(precisions)
    )
    measured.add_argument("--backend", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 or auto (the default)")
    measured.add_argument("--quick", action="store_true", help=f"{bench.QUICK_ROUNDS} rounds, not {bench.ROUNDS}")
    measured.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each result there")
    explained = commands.add_parser("explain", help="print a saved network, or a run, and its plan")
    explained.add_argument("model", metavar="MODEL", help="a file of Network.save, Trainer.save or Checkpoint")
    explained.add_argument(
        "--batch-size", type=int, metavar="N", help=f"of a network's plan (default: {BATCH_SIZE}); a run has its own"
    )
    explained.add_argument(
        "--loss", metavar="NAME", help="plan a step of SGD on this loss, not a prediction; a run has its own"
    )
    explained.add_argument(
        "--backend",
        metavar="NAME",
        help="cpu, cuda, cuda:1 or auto, which is a network's; on a GPU the launches are measured (a run has its own)",
    )
    explained.add_argument(
        "--card", choices=CARDS, metavar="NAME", help=f"say which kernels would run on {', '.join(CARDS)}, and why"
    )
    explained.add_argument(
        "--ranks", type=int, metavar="N", help="plan a step of N processes together, with what they exchange"
    )
    explained.add_argument("--timeline", action="store_true", help="show when each launch of a step runs, on a GPU")
    shell.add_commands(commands)
    return parser


def info() -> str:
    """Versions, BLAS, cores, GPUs, what compiles for them, and backends, a line each."""
    blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
    names = [f"{b['internal_api']} {b['version']}{_kind(b)}, up to {b['num_threads']} threads" for b in blas]
    logical = psutil.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    loops = np.dtype(np.float32)
    lines = {
        "mlpgpu": __version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "NumPy": np.__version__,
        "h5py": f"{h5py.__version__} with HDF5 {h5py.version.hdf5_version}",
        "BLAS": "; ".join(names) or "one whose threads cannot be set",
        "loops": f"by {loops_name(loops)}{f': {why_not(loops)}' if why_not(loops) else ''}",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {logical} logical, {usable} usable",
        **describe_machine(),
        "nvcc": _nvcc(),
        "kernel cache": str(cubin_folder()),
        "backends": f"{', '.join(BACKENDS[1:])}; auto means {_auto()}",
    }
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name:<{width}}{' '.join(value.split())}" for name, value in lines.items())


def _kind(blas: dict[str, Any]) -> str:
    """The processors that a BLAS computes for, and who says so, where it is not the BLAS itself."""
    if not blas.get("architecture"):
        return ""
    chosen = os.environ.get(CHOICE_OF_KERNELS) if blas["internal_api"] == "openblas" else None
    return f" for {blas['architecture']}{f' by {CHOICE_OF_KERNELS}={chosen}' if chosen else ''}"


def _nvcc() -> str:
    try:
        nvcc = find_nvcc()
        return f"{nvcc_version(nvcc)} in {nvcc.parent}"
    except BackendError as error:
        return str(error)


def _auto() -> str:
    try:
        return CudaBackend().name
    except BackendError:
        return "cpu"


def measure(
    backend: str = "auto",
    names: Sequence[str] = tuple(bench.WORKLOADS),
    precisions: Sequence[str] = bench.PRECISIONS,
    *,
    quick: bool = False,
    path: Path | None = None,
) -> None:
    """Print what steps of the workloads ``names`` take here, and write it to ``path``.

    Raises:
        BackendError: the GPU that is asked for cannot be used.
        StorageError: ``path`` cannot be written.
    """
    about = bench.surroundings(get_backend(backend))
    rounds = bench.QUICK_ROUNDS if quick else bench.ROUNDS
    results = bench.measure(backend, names, precisions, rounds=rounds, tell=lambda told: print(told, file=sys.stderr))
    where = about.get("card") or f"the CPU, {about['machine']}, {about['cores']} cores"
    print(f"mlpgpu {__version__} on {where}")
    print(bench.table(results))
    if path is not None:
        replace_file(f"results {path}", path, bench.json_lines(results, about).encode())


def explain(
    path: str,
    batch_size: int | None = None,
    loss: str | None = None,
    backend: str | None = None,
    *,
    timeline: bool = False,
    card: str | None = None,
    ranks: int | None = None,
) -> str:
    """The network in a file, its plan, what runs it, and on a GPU what each launch takes and how predictions run.

    A run's plan and backend are its trainer's, but for another ``backend``.  A network's plan is that of a
    prediction, or of a step of SGD on ``loss``.  With a ``card`` nothing runs: the kernels of that card are named, with
    the reasons for them.  With ``ranks`` the plan is that of so many processes of one host, and says which way
    ``parallel="auto"`` would have them train; a network's has as many shards, or parts where these would be chosen.

    Raises:
        StorageError, FileFormatError: the file cannot be read.
        ConfigurationError, UnknownNameError: ``batch_size``, ``loss`` or ``backend`` does not suit it.
        BackendError: the GPU that is asked for cannot be used.
    """
    if backend is not None:
        get_backend(backend)  # raises before anything is read
    if ranks is not None:
        check_integer("--ranks", ranks, least=1, limit=MOST_SHARDS)
    contents = storage.read(path)
    if "run" in contents.description:
        if batch_size is not None or loss is not None:
            expected = "no --batch-size and no --loss for a run, which has its own"
            raise ConfigurationError("explain", expected=expected, got=f"--batch-size {batch_size}, --loss {loss}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other libraries give other bits: nothing is resumed here
            trainer = Trainer.resume(path, backend=backend)
        network, plan, chosen, threads = trainer.network, trainer.plan, trainer.backend, trainer.threads
        if ranks is not None:
            plan = _run_on_ranks(trainer, ranks, _counted(chosen, threads, card))
        progress = f"run: {trainer.epochs} epochs, {trainer.steps} steps, loss {trainer.loss}, {trainer.optimizer}"
    else:
        network, chosen, threads = Network.from_contents(contents), get_backend(backend or "auto"), None
        capacity = BATCH_SIZE if batch_size is None else check_integer("--batch-size", batch_size, least=1)
        lower = functools.partial(
            network.lower,
            capacity=capacity,
            loss=None if loss is None else lookup("--loss", loss, LOSSES),
            optimizer=None if loss is None else SGD(0.0),
            output=network.output,
            precision=network.flat_parameters().dtype.name,
            shards=ranks or 1,
        )
        if ranks in (None, 1) or loss is None:
            plan = lower()
        else:
            plan = _chosen_plan(lower, ranks, _counted(chosen, threads, card))
        progress = ""
    if card is not None:
        named = CARDS[card]
        check_plan(plan, card, named.compute_capability)
        paths = describe_on(plan, named, _source(network))
        predictions = _predictions(network, named.multiprocessors, named.arch)
        return "\n\n".join(filter(None, (str(network), progress, str(plan), f"on {card}, {paths}", predictions)))
    made_by = ", ".join(f"{key} {value}" for key, value in chosen.fingerprint(plan, threads=threads).items())
    parts = [str(network), progress, str(plan), f"here: {made_by}"]
    if isinstance(chosen, CudaBackend):
        parts.append(_measured(network, plan, chosen, timeline))
        parts.append(_predictions(network, chosen.device.multiprocessors, chosen.device.arch))
    elif timeline:
        raise ConfigurationError("--timeline", expected="the cuda backend", got=chosen.name)
    return "\n\n".join(part for part in parts if part)


def _counted(backend: Backend, threads: int | None, card: str | None) -> Callable[[Plan], float | None]:
    """What counts the seconds of a step: the backend, or the model of a card that is named."""
    if card is None:
        return functools.partial(backend.step_seconds, threads=threads)
    arch = CARDS[card].arch
    return lambda plan: step_seconds(plan, arch)


def _chosen_plan(lower: Callable[..., Plan], ranks: int, seconds: Callable[[Plan], float | None]) -> Plan:
    """The plan of a network that so many ranks would train under ``parallel="auto"``, and why it is that."""
    choice = choice_of(ranks, lower, seconds, may_split=True)
    if choice.way == "tensor":
        return lower(shards=1, parts=Parts(ranks, 0, ranks), choice=choice)
    return lower(ranks=ranks, choice=choice)


def _run_on_ranks(trainer: Trainer, ranks: int, seconds: Callable[[Plan], float | None]) -> Plan:
    """The plan of a run on so many ranks: of its shards, or of its parts.

    Raises:
        ConfigurationError: there are fewer parts than ranks.
    """
    plan = trainer.plan
    if plan.tensor is not None:
        count = plan.tensor.parts.count
        if ranks > count:
            raise ConfigurationError("--ranks", expected=f"at most {count}, the number of parts", got=ranks)
        return split_plan(plan.tensor.whole, Parts(count, 0, ranks), plan.tensor.splits)
    lower = functools.partial(on_ranks, plan, is_fast=trainer.reduction == "fast")
    is_open = trainer.parallel == "auto" and ranks > 1
    return replace(lower(ranks), choice=choice_of(ranks, lower, seconds, may_split=False) if is_open else None)


def _source(network: Network) -> str:
    """The type of a network's inputs on a card."""
    return "float32" if network.scale is None else "uint8"


def _predictions(network: Network, multiprocessors: int, arch: str) -> str:
    """The launches of predictions on such a card."""
    plan = network.lower(capacity=1, output=network.output, precision=network.flat_parameters().dtype.name)
    return describe_predictions(plan, multiprocessors, arch, _source(network))


def _measured(network: Network, plan: Plan, backend: CudaBackend, timeline: bool) -> str:
    backend.check(plan)
    state = network.state(plan.optimizer)
    return str(profile(plan, backend.device, state, scale=network.scale, timeline=timeline))


if __name__ == "__main__":
    sys.exit(main())
