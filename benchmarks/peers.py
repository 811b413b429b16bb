"""Training steps on a card: mlpgpu beside PyTorch and JAX, whichever of them are installed, on the same work.

All train on the same random rows, which lie on the card, for whole epochs, shuffles included, with momentum.  They take
turns, round by round, in one process on one card, so that the card is as warm for each; figures are medians.  Each peer
stands in several forms (peers_torch.py, peers_jax.py), and the results name the form.  Forms that compile wait for the
host only after several epochs.  "float32" means what each computes there in float32: JAX also by its algorithms of
several tensor-core products.  "bfloat16" keeps float32 parameters and multiplies in bfloat16.

Each contender's error is that of its product of two 4096 by 4096 matrices, against float64.  The products of the
largest network stand beside cuBLAS's of the very numbers that they multiply (peers_products.py).

    python benchmarks/peers.py [--only NAME ...] [--precision NAME ...] [--forms NAME ...] [--thorough] [--quick]
                               [--json PATH] [--commit NAME]

writes a line of JSON for each result; benchmarks/report.py makes tables and the chart of them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mlpgpu as mg
from mlpgpu import bench
from mlpgpu.backends import Sampling
from mlpgpu.backends.cuda import CudaBackend
from mlpgpu.bench import Epochs, Product, Result, Workload
from mlpgpu.errors import MlpgpuError

try:
    import peers_products
    import peers_torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    peers_torch = None  # type: ignore[assignment]
try:
    import peers_jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    peers_jax = None  # type: ignore[assignment]

LOSS_TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 3e-2}  # relative, of a first epoch's mean loss
CALL_SECONDS = 0.1  # about what a call takes that trains for several epochs before the host waits
LEAST_STEP, RATES = 2e-5, {"float32": 3e13, "tf32": 2e14, "bfloat16": 4e14}  # by which a step's seconds are guessed

# The forms that the tables are made of; --thorough tries all that there are.
FORMS = {"eager", "compiled graph", "compiled step", "autotuned step", "plain scan", "unrolled by 4"}
QUICK_FORMS = {"graph", "unrolled by 4"}
EAGER_PRECISIONS = {"float32"}
MOST_TUNED_FLOPS = 1e11  # of a step: tuning takes minutes for larger products, which cuBLAS makes as fast

Contender = Callable[..., float]
Case = tuple[str, str]  # a workload by name, and a precision


def progress(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {message}", file=sys.stderr, flush=True)


STARTED = time.perf_counter()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def epochs_of(workload: Workload, precision: str) -> int:
    """How many epochs take about CALL_SECONDS."""
    step = max(LEAST_STEP, workload.flops / RATES[precision])
    return max(1, round(CALL_SECONDS / (step * workload.steps)))


class Ours(Epochs):
    """A workload by mlpgpu, whose first epoch has the order that the others are given for theirs."""

    epochs = 1

    def __call__(self, order: np.ndarray | None = None) -> float:
        return super().__call__()


class Errors:
    """The error of each contender's product of the same two matrices, computed once."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._product = Product.random(bench.PRODUCT_SIZE)
        self._found: dict[tuple[str, str], float] = {}

    def of(self, contender: str, precision: str) -> float:
        """Of a contender by name; its forms all multiply alike."""
        key = contender.partition(",")[0], precision
        if key not in self._found:
            self._found[key] = self._measure(*key)
        return self._found[key]

    def _measure(self, contender: str, precision: str) -> float:
        if contender == "mlpgpu":
            return bench.forward_error(self._product, self._backend, precision)
        if contender == "PyTorch":
            return peers_torch.product_error(self._product, precision)
        named = {algorithm.name: algorithm for algorithm in peers_jax.ALGORITHMS[precision]}
        return peers_jax.product_error(self._product, named[contender])


# --- contenders ---


def torch_forms(workload: Workload, precision: str, forms: Iterable[str]) -> Iterator[Any]:
    """Those of the forms that are worth their time for this workload."""
    for form in (form for form in peers_torch.FORMS if form.name in forms):
        is_slow = form.mode == peers_torch.AUTOTUNED and workload.flops > MOST_TUNED_FLOPS
        if not is_slow and (form.captured or precision in EAGER_PRECISIONS):
            yield form


def jax_contenders(cases: Iterable[Case], forms: Iterable[str], *, quick: bool) -> dict[Case, dict[str, Any]]:
    """JAX's contenders of each case, by name; none of them is compiled yet."""
    found: dict[Case, dict[str, Any]] = {}
    for key, precision in cases:
        workload = bench.WORKLOADS[key]
        found[key, precision] = {
            f"{algorithm.name}, {form.name}": peers_jax.Contender(
                workload, algorithm, form, epochs=epochs_of(workload, precision)
            )
            for algorithm in peers_jax.ALGORITHMS[precision][: 1 if quick else None]
            for form in peers_jax.FORMS
            if form.name in forms
        }
    return found


def makers(case: Case, forms: Iterable[str], of_jax: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """The contenders of a case: names, and functions that make them."""
    key, precision = case
    workload, arrays = bench.WORKLOADS[key], arrays_of(key)
    yield "mlpgpu", lambda: Ours(workload.trainer(backend="cuda", precision=precision), mg.Dataset(*arrays))
    if peers_torch:
        x, y = peers_torch.on_device(arrays)
        for form in torch_forms(workload, precision, forms):
            epochs = epochs_of(workload, precision) if form.captured else 1
            make = partial(peers_torch.Contender, workload, form, precision, x, y, epochs=epochs)
            yield f"PyTorch, {form.name}", make
    if of_jax:
        xs, ys = peers_jax.on_card(arrays, next(iter(of_jax.values())).algorithm.dtype)
        for name, contender in of_jax.items():
            yield name, partial(contender.start, xs, ys)


@functools.lru_cache(maxsize=1)
def arrays_of(key: str) -> tuple[np.ndarray, np.ndarray]:
    """A workload's inputs and targets."""
    return bench.WORKLOADS[key].arrays()


def steps(
    case: Case, contenders: Iterable[tuple[str, Callable[[], Contender]]], errors: Errors, rounds: int
) -> list[Result]:
    """Everyone's steps of a workload at a precision; who fails is named and left out."""
    key, precision = case
    workload = bench.WORKLOADS[key]
    order = Sampling(workload.rows, workload.batch_size, seed=0).order(0)
    running: dict[str, Any] = {}
    losses: dict[str, float] = {}
    for name, make in contenders:
        started = time.perf_counter()
        try:
            contender = make()
            losses[name] = contender(order)
        except Exception as error:
            traceback.print_exc()
            progress(f"  {name} failed: {first_line(error)}")
            continue
        running[name] = contender
        progress(f"  {name} made in {time.perf_counter() - started:.1f} s")
        first = next(iter(losses))
        if not abs(losses[name] / losses[first] - 1) <= LOSS_TOLERANCES[precision]:
            progress(f"  {name} trained to another loss: {losses[name]:.6g}; {first} {losses[first]:.6g}")
    seconds = bench.take_turns(running, rounds)
    found = []
    for name, turns in seconds.items():
        of_epoch = [each / running[name].epochs for each in turns]
        result = bench.summarize(
            key, workload, precision, name, of_epoch, loss=losses[name], error=errors.of(name, precision)
        )
        progress(f"  {name}: {result.microseconds:.2f} µs")
        found.append(result)
    return found


# --- all of it ---


def main() -> None:
    everything = {form.name for module in (peers_torch, peers_jax) if module for form in module.FORMS}
    parser = argparse.ArgumentParser(description="Measure training steps beside PyTorch and JAX on a GPU.")
    parser.add_argument("--only", nargs="+", choices=[*bench.WORKLOADS, "products"], help="these workloads alone")
    parser.add_argument("--precision", nargs="+", choices=bench.PRECISIONS, default=bench.PRECISIONS)
    parser.add_argument("--forms", nargs="+", choices=sorted(everything), help="the peers in these forms alone")
    parser.add_argument("--thorough", action="store_true", help="the peers in all forms, also those that never won")
    parser.add_argument("--quick", action="store_true", help="three rounds, nothing compiled by PyTorch, one JAX")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a line of JSON for each result there")
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    arguments = parser.parse_args()
    try:
        backend = CudaBackend()
    except MlpgpuError as error:
        sys.exit(str(error))
    about = bench.surroundings(backend, ("torch", "jax"))
    about["commit"] = arguments.commit or about["commit"]
    for name, module in {"PyTorch": peers_torch, "JAX": peers_jax}.items():
        if module is None:
            progress(f"{name} is not installed, and left out")

    wanted = arguments.only or [*bench.WORKLOADS, "products"]
    forms = set(arguments.forms or (everything if arguments.thorough else QUICK_FORMS if arguments.quick else FORMS))
    rounds = bench.QUICK_ROUNDS if arguments.quick else bench.ROUNDS
    cases = [
        (key, precision)
        for key in wanted
        if key != "products"
        for precision in bench.WORKLOADS[key].precisions
        if precision in arguments.precision
    ]
    of_jax = jax_contenders(cases, forms, quick=arguments.quick) if peers_jax else {}
    start_compilers(of_jax)
    errors = Errors(backend)
    results: list[Result] = []
    products: list[Any] = []
    failed: list[str] = []

    def attempt(into: list[Any], what: str, run: Callable[[], Sequence[Any]]) -> None:
        progress(what)
        try:
            into += run()
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{what} failed: {first_line(error)}")
        gc.collect()
        for module in filter(None, (peers_torch, peers_jax)):
            module.forget()
        if arguments.json:
            arguments.json.write_text(bench.json_lines([*results, *products], about), encoding="utf-8")

    for case in cases:
        contenders = makers(case, forms, of_jax.pop(case, {}))
        attempt(results, " in ".join(case), partial(steps, case, contenders, errors, rounds))
    if "products" in wanted and peers_torch:
        for precision in arguments.precision:
            run = partial(peers_products.kernels, "large", precision, backend, rounds)
            attempt(products, f"products of large in {precision}", run)

    print(f"{about['card']}, driver {about['driver']}, {about['versions']}, commit {about['commit']}")
    print(bench.table(results))
    print(*products, *failed, sep="\n")


def start_compilers(of_jax: dict[Case, dict[str, Any]]) -> None:
    """Compile all that JAX runs, before anything is measured, and have PyTorch's compiler start."""
    if of_jax:
        contenders = [contender for by_name in of_jax.values() for contender in by_name.values()]
        peers_jax.compile_all(contenders)
        progress(f"JAX compiled {len(contenders)} contenders")
    if peers_torch:
        with suppress(Exception):  # forms that cannot be compiled are named when their turn comes
            peers_torch.start_compiler()


if __name__ == "__main__":
    main()
