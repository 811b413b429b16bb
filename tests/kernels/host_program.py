"""A plan's launches, run on the host one after another by the kernels' own sources."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from kernel_cases.case import Mapped, constants_of, followed_by_components
from shim_runner import From, run

from mlpgpu import Dataset
from mlpgpu.backends import Sampling, State
from mlpgpu.backends.base import target_array
from mlpgpu.backends.constants import loss_numbers
from mlpgpu.backends.cuda import kernels
from mlpgpu.backends.cuda.kernels.launches import At, Launch, Lowered, Map
from mlpgpu.backends.cuda.lower.lowering import lower
from mlpgpu.backends.cuda.run.steps import STEP
from mlpgpu.plan import Plan

# What arrays hold that the host keeps as float32.
WORDS = {
    "int": np.int32, "uint16_t": np.uint16, "unsigned": np.uint32, "uint32_t": np.uint32,
    "uint64_t": np.uint64, "double": np.float64,
}  # fmt: skip
CLEARED = (".components", "arrived", ".launches")  # arrays that must begin with zeros, as a program's memory does


def pitched(slots: np.ndarray) -> np.ndarray:
    """Slots (slots, 1, count) as they lie on a card, NaN between them."""
    pitch = kernels.slot_pitch(slots.shape[2])
    return np.pad(slots[:, 0], ((0, 0), (0, pitch - slots.shape[2])), constant_values=np.nan).ravel()


def unpitched(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Slots of the shape of others, of an array as on a card."""
    pitch = kernels.slot_pitch(like.shape[2])
    return array[: len(like) * pitch].reshape(len(like), 1, pitch)[:, :, : like.shape[2]]


class HostProgram:
    """Runs a plan's launches one after another on the host, lowered for a card of few multiprocessors."""

    def __init__(
        self,
        plan: Plan,
        data: Dataset,
        sampling: Sampling,
        arch: str = "sm_80",
        multiprocessors: int = 2,
        **options: Any,
    ) -> None:
        self.plan, self.data, self.sampling = plan, data, sampling
        source = "float32" if data.scale is None else "uint8"
        self.low = lower(plan, multiprocessors=multiprocessors, source=source, arch=arch, **options)
        # NaN, so that what is read before it is written shows.
        doubles = {
            launch.values[argument.name].array
            for launch in self.low.launches()
            for argument in launch.entry.arguments
            if "double" in argument.ctype and isinstance(launch.values[argument.name], At)
        }
        self.arrays = {
            name: np.full(size // 8, np.nan) if name in doubles else np.full(size // 4, np.nan, np.float32)
            for name, size in self.low.bytes.items()
        }
        for name, array in self.arrays.items():
            if any(part in name for part in CLEARED):
                array[:] = 0.0
        self.arrays |= {name: np.array(words, np.int32) for name, words in self.low.words.items()}
        targets = target_array(data, plan, np.dtype(np.float32)).astype(np.float32)
        self.arrays |= {"targets": targets, "plain targets": targets}
        for name, columns in plan.input_columns().items():
            self.arrays[name] = np.ascontiguousarray(data.storage_x[:, columns])
        if data.weight is not None:
            self.arrays["weights"] = data.weight.astype(np.float32)
        self.numbers = {"scale": data.scale or 1.0, "seed": sampling.seed}

    def load(self, state: State) -> None:
        for name in ("parameters", "slots", "statistics"):
            array = getattr(state, name).astype(np.float32)
            array = pitched(array) if name == "slots" else array.ravel()
            # Memory is taken in larger pieces than 16 bytes, and the copy engine reads to the end of such.
            self.arrays[name] = np.pad(array, (0, -array.size % 4), constant_values=np.nan)

    def slots(self, like: np.ndarray) -> np.ndarray:
        """The slots, in the shape of a state's."""
        return unpitched(self.arrays["slots"], like)

    @property
    def parameters(self) -> np.ndarray:
        return self.arrays["parameters"][: self.plan.parameter_count]

    def run(self, rates: np.ndarray) -> np.ndarray:
        """Train from step 0 on, for at most one epoch."""
        constants = self.begin(rates)
        for _ in rates:
            for launch in itertools.chain(self.low.staged, self.low.begin, *self.low.shards, self.low.finish):
                self.launch(launch, constants)
            self.next_step()
        return self.losses(len(rates))

    def begin(self, rates: np.ndarray) -> dict[str, np.ndarray]:
        """Make ready for steps from 0 on; returns what constant variables hold."""
        assert self.plan.optimizer is not None
        rows = self.sampling.rows
        self.arrays["order"] = self.sampling.order(0).astype(np.int32)
        self.arrays["step"] = np.array([(0, 0, 0, self.sampling.batch_size, rows)], STEP)
        constants = constants_of(self.plan.optimizer, self.plan.optimizer.table(0, rates), self.plan.loss)
        for launch in (*self.low.run_begin, *self.low.prologue):
            self.launch(launch, constants)
        return constants

    def next_step(self) -> None:
        for name in ("number", "run", "batch"):
            self.arrays["step"][name] += 1

    def losses(self, steps: int) -> np.ndarray:
        """The loss and the weight of the first steps, (steps, 2)."""
        return self.arrays["losses"].reshape(-1, 2)[:steps]

    def evaluate(self, tier: Lowered | None = None) -> np.ndarray:
        """Predictions of the first batch, by the plan's own launches or by those for fewer rows."""
        constants, low = self.begin_evaluation(), tier or self.low
        for launch in (*low.evaluation_begin, *low.evaluation):
            self.launch(launch, constants)
        return self.predictions

    def begin_evaluation(self) -> dict[str, np.ndarray]:
        """Make ready for an evaluation of the first batch; returns what constant variables hold."""
        self.arrays["order"] = np.arange(len(self.data), dtype=np.int32)
        self.arrays["step"] = np.array([(0, 0, 0, self.plan.capacity, len(self.data))], STEP)
        assert self.plan.loss is not None
        return {"loss_numbers": loss_numbers(self.plan.loss)}

    @property
    def predictions(self) -> np.ndarray:
        """Those that an evaluation left."""
        return self.arrays[self.plan.output].reshape(-1, self.plan.n_out)

    def launch(self, launch: Launch, constants: dict[str, np.ndarray]) -> None:
        args: dict[str, object] = {}
        for argument in launch.entry.arguments:
            value = launch.values[argument.name]
            resolved = self._resolve(value.array) if isinstance(value, At) else value
            is_kept = isinstance(value, At) and value.array in self.low.bytes
            ctype = argument.ctype.removeprefix("const ").rstrip("*")
            dtype = WORDS.get(ctype)
            if is_kept and isinstance(resolved, np.ndarray) and dtype:
                resolved = resolved.view(dtype)
            if isinstance(value, Map):
                resolved = self._mapped(value)
            if isinstance(value, At) and isinstance(resolved, np.ndarray) and argument.is_pointer:
                resolved = From(resolved, value.offset * argument.item_bytes)
            args[argument.name] = resolved
        entry, constants = launch.entry, {name: constants[name] for name in launch.entry.constant_names}
        # How far atomic sums may differ from order to order is held in test_kernels.py.
        tolerance = {"dx": np.inf} if launch.entry == kernels.dense_backward_atomic() else None
        got = run(entry, launch.grid, entry.threads, args, constants=constants, tolerance=tolerance)
        for name, array in got.items():
            value = launch.values[name]
            assert isinstance(value, At)
            self.arrays[value.array] = array.view(self.arrays[value.array].dtype)

    def _mapped(self, value: Map) -> np.ndarray:
        """A map with the components that it is of, which kernels only read by it."""
        pitch, words = kernels.padded_columns(value.columns), value.nbytes // 2
        components = self.arrays[value.array].view(np.uint16)[value.place * words :][:words]
        shape = value.components, kernels.padded_rows(value.rows), pitch
        return followed_by_components(Mapped(components.reshape(shape), value.box))

    def _resolve(self, name: str) -> object:
        """A number, an array, or None for weights where there are none."""
        return self.numbers[name] if name in self.numbers else self.arrays.get(name)
