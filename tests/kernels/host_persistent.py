"""Runs the kernel inside which a plan trains on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from host_program import pitched
from kernel_cases.case import constants_of
from shim_runner import run

from mlpgpu import Dataset
from mlpgpu.backends import Sampling, State
from mlpgpu.backends.base import target_array
from mlpgpu.backends.cuda.kernels.launches import At, Launch
from mlpgpu.backends.cuda.persistent.kernel import PersistentKernel
from mlpgpu.backends.cuda.run.steps import STEP
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
