"""The kernel inside which a plan trains: run on the host, and compiled for cards."""

from __future__ import annotations

from typing import Any

import numpy as np
from epochs import Epoch, assert_as_exact
from host_program import pitched, unpitched
from kernel_cases.case import constants_of
from shim_runner import run

from mlpgpu import Dataset
from mlpgpu.backends import Sampling, State
from mlpgpu.backends.base import target_array
from mlpgpu.backends.cuda.kernels import Entry, units
from mlpgpu.backends.cuda.kernels.launches import At, Launch
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.backends.cuda.runtime.compiler import compile_units
from mlpgpu.plan import Plan


class HostKernel:
    """Runs a plan's persistent kernel on the host."""

    def __init__(self, plan: Plan, kernel: PersistentKernel, data: Dataset, sampling: Sampling, state: State) -> None:
        self.plan, self.kernel, self.data, self.sampling = plan, kernel, data, sampling
        targets = target_array(data, plan, np.dtype(np.float32)).astype(np.float32)
        self.values: dict[str, Any] = {
            "data": data.storage_x, "targets": targets, "scale": data.scale or 1.0, "seed": sampling.seed,
            "weights": None if data.weight is None else data.weight.astype(np.float32),
            "order": sampling.order(0).astype(np.int32), "messages": np.zeros(kernel.layout.message_words, np.uint64),
            "sequence": 1,
        }  # fmt: skip
        if "staged inputs" in kernel.layout.bytes:
            self.values["staged inputs"] = np.full(kernel.layout.bytes["staged inputs"], 255, np.uint8)
        self.values |= {name: np.array(words, np.int32) for name, words in kernel.words.items()}
        for name in ("parameters", "slots", "statistics"):
            array = getattr(state, name).astype(np.float32)
            self.values[name] = pitched(array) if name == "slots" else array.ravel()

    def run(self, first: int, rates: np.ndarray) -> np.ndarray:
        """Train from step ``first`` of the epoch on; returns losses and weights."""
        assert self.plan.optimizer is not None
        constants = constants_of(self.plan.optimizer, self.plan.optimizer.table(first, rates), self.plan.loss)
        sampling = self.sampling
        self.values |= {
            "step": np.array([(first, 0, first, sampling.batch_size, sampling.rows)], STEP),
            "steps": len(rates),
            "row errors": np.zeros((len(rates), self.plan.capacity, 2), np.float32),
            "losses": np.zeros((len(rates), 2)),
        }
        source = "float32" if self.data.scale is None else "uint8"
        self._launch(self.kernel.train(source, textured=True), constants)
        self._launch(self.kernel.add_errors(len(rates)), constants)
        self.values["sequence"] += len(rates)
        return self.values["losses"]

    def _launch(self, launch: Launch, constants: dict[str, np.ndarray]) -> None:
        def resolve(value: object) -> object:
            if not isinstance(value, At):
                return value
            found = self.values[value.array]
            return found[value.offset :] if value.offset else found

        args = {name: resolve(value) for name, value in launch.values.items()}
        read = {name: constants[name] for name in launch.entry.constant_names}
        got = run(launch.entry, launch.grid, launch.entry.threads, args, constants=read)
        for name, array in got.items():
            value = launch.values[name]
            assert isinstance(value, At)
            self.values[value.array] = array


def check_against_cpu(epoch: Epoch, kernel: PersistentKernel) -> None:
    """An epoch in one launch is as exact as the CPU's, and has the same bits in two; frozen layers stay as they are."""
    whole, pieces = (HostKernel(epoch.plan, kernel, epoch.data, epoch.sampling, epoch.state) for _ in range(2))
    losses = whole.run(0, epoch.rates)
    (cpu, cpu_losses, _), (exact, exact_losses, _) = epoch.on_cpu("float32"), epoch.on_cpu("float64")
    assert_as_exact(whole.values["parameters"], cpu.parameters[0], exact.parameters[0])
    assert_as_exact(slots := unpitched(whole.values["slots"], cpu.slots), cpu.slots, exact.slots)
    assert_as_exact(losses, cpu_losses, exact_losses)

    parts = [pieces.run(0, epoch.rates[:1]), pieces.run(1, epoch.rates[1:])]
    np.testing.assert_array_equal(np.concatenate(parts), losses)
    for name in ("parameters", "slots"):
        np.testing.assert_array_equal(pieces.values[name], whole.values[name])
    for parameter in epoch.plan.parameters:
        part = slice(parameter.offset, parameter.offset + parameter.size)
        moved = whole.values["parameters"][part] != epoch.state.parameters[0][part].astype(np.float32)
        assert moved.any() == parameter.trainable
        assert parameter.trainable or not slots[:, 0, part].any()


def check_machine_code(entry: Entry, arch: str) -> None:
    """Warnings are errors; a block's registers fit, and what a thread spills is no more than the entry says."""
    (cubin,) = compile_units(units([entry]), arch).values()
    resources = cubin.resources[entry.name]
    assert max(resources.spill_bytes, resources.stack_bytes) <= entry.spill_bytes
    assert resources.registers * entry.threads <= 65536 and resources.shared_bytes == 0
