"""A plan's persistent kernel: its entry and its launches."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....random import least_kept
from ...sources import camel
from .. import kernels
from ..kernels import TARGET_STRUCTS, Entry, Product, TargetReader, arguments, reads_numbers
from ..kernels.launches import At, Launch, Lowered, Value
from .few_rows import FewRowsLayout
from .few_rows_tiles import FEW_ROWS_THREADS
from .layout import Layout
from .network import PersistentNetwork
from .tiles import COMPUTE_THREADS, PRODUCER_THREADS

_NUMBERS = "const Step* step[0], int steps, uint32_t sequence, const int* order[rows]"


@dataclass(frozen=True)
class PersistentKernel(ABC):
    """The kernel inside which a plan trains."""

    layout: Layout | FewRowsLayout

    @property
    def network(self) -> PersistentNetwork:
        return self.layout.network

    @property
    def words(self) -> Mapping[str, Sequence[int]]:
        """Whole numbers that the kernel reads, by the name of their array."""
        return {}

    @abstractmethod
    def train(self, source: str, *, textured: bool) -> Launch:
        """The launch that trains; ``steps`` and ``sequence`` change from one to the next."""

    def add_errors(self, steps: int) -> Launch:
        """The launch that follows so many steps."""
        values: dict[str, Value] = {
            "step": At("step"), "errors": At("row errors"), "capacity": self.network.rows, "losses": At("losses"),
        }  # fmt: skip
        return Launch(kernels.step_errors(), (steps, 1, 1), values)

    def entries(self, lowered: Lowered, source: str, *, textured: bool) -> list[Entry]:
        """The kernels of a program that trains inside this one: it, and those of evaluations."""
        training = [self.train(source, textured=textured), self.add_errors(1)]
        return Lowered(evaluation=[*lowered.evaluation_begin, *lowered.evaluation, *training]).entries()

    @property
    def _values(self) -> dict[str, Value]:
        """What every such kernel is given, by name."""
        mean, scale = self.network.scaled_inputs or (None, None)
        target_mean, target_scale = self.network.scaled_targets or (None, None)
        return {
            "step": At("step"), "steps": At("steps"), "sequence": At("sequence"), "order": At("order"),
            "inputs": At("data"), "scale": At("scale"), "mean": mean, "deviation": scale, "targets": At("targets"),
            "weights": At("weights"), "target_mean": target_mean, "target_scale": target_scale, "seed": At("seed"),
            "parameters": At("parameters"), "slots": At("slots") if self.network.slots else None,
            "messages": At("messages"), "errors": At("row errors"),
        }  # fmt: skip

    @property
    def _widths(self) -> tuple[int, ...]:
        return self.network.layers[0].n_in, *(dense.n_out for dense in self.network.layers)

    @property
    def _size(self) -> int:
        """Of all parameters."""
        return sum(dense.weight_rows * dense.n_out for dense in self.network.layers)

    def _signature(self, source: str, reader: TargetReader, others: str) -> str:
        """Arguments, of which ``others`` come before those that such kernels write; axes are those of one step."""
        n_in, n_out, slots = self._widths[0], self._widths[-1], self.network.slots
        return (
            f"const Step* step[0], int steps, uint32_t sequence, const int* order[rows], "
            f"const {kernels.SOURCES[source]}* inputs[rows,{n_in}], float scale, const float* mean[{n_in}], "
            f"const float* deviation[{n_in}], {reader.argument(str(n_out))}, const float* weights[rows], "
            f"const float* target_mean[{n_out}], const float* target_scale[{n_out}], uint64_t seed, "
            f"inout float* parameters[{self._size}], inout float* slots[{slots},{self._size}], "
            f"uint64_t* messages[0], {others}, float* errors[rows,2]"
        )

    @property
    def _products(self) -> tuple[Product, ...]:
        """Of one step."""
        products = [Product(("rows", *pair)) for pair in pairwise(self._widths)]  # of z; dW takes as many, and dx
        trained = [dense.is_trained for dense in self.network.layers]
        of_trained = [product for product, is_trained in zip(products, trained, strict=True) if is_trained]
        above_trained = products[trained.index(True) + 1 :]  # dx below them is made as well, and nobody needs it
        return (*products, *of_trained, *above_trained)


@dataclass(frozen=True)
class OwnedRowsKernel(PersistentKernel):
    """Each row of the batch belongs to a block; ``has_copy_engine`` says whether that brings inputs."""

    layout: Layout
    has_copy_engine: bool

    def train(self, source: str, *, textured: bool) -> Launch:
        values = {**self._values, "staged": At("staged inputs")}
        return Launch(self._entry(source, textured), (self.layout.blocks, 1, 1), values)

    @property
    def _needs(self) -> str:
        """The oldest architecture that has the kernel's instructions."""
        return "sm_90" if self.has_copy_engine else "sm_80" if self.layout.tf32_terms else "sm_75"

    def _entry(self, source: str, textured: bool) -> Entry:
        layout, network = self.layout, self.network
        ctype, reader = kernels.SOURCES[source], TargetReader(network.target_kind, textured)
        target = TARGET_STRUCTS[network.target_kind]
        flags = ", ".join(str(flag).lower() for flag in (self.has_copy_engine, network.scaled_inputs is not None))
        head = f"{network.rows}, {layout.blocks}, {layout.tf32_terms}, {flags}, {network.input_dropout or 'NotDropped'}"
        shape = f"PersistentNetwork<{head}, {', '.join(map(str, layout.layers))}>"
        function = (
            f"train_persistent<{shape}, {camel(network.loss)}, {target}, {reader.source}, {network.rule}Rule, "
            f"{ctype}, {layout.shared_bytes}, {layout.message_words}>"
        )
        name = f"persistent_{'_'.join(map(str, self._widths))}_{zlib.crc32(function.encode()):08x}"
        # Each of so many threads has 96 registers, and spills a few words around the loops.
        return Entry(
            name, "persistent/persistent.cuh", function,
            arguments(self._signature(source, reader, "void* staged[0]")), COMPUTE_THREADS + PRODUCER_THREADS,
            layout.shared_bytes, block=f"PersistentBlock<{layout.shared_bytes}>", cooperative=True, spill_bytes=264,
            constants=True, loss_numbers=reads_numbers(network.loss), needs=self._needs, products=self._products,
        )  # fmt: skip


@dataclass(frozen=True)
class FewRowsKernel(PersistentKernel):
    """Blocks have tiles of all weights and no rows of their own; one kernel serves networks of all widths."""

    layout: FewRowsLayout

    @property
    def words(self) -> Mapping[str, Sequence[int]]:
        return self.layout.words

    def train(self, source: str, *, textured: bool) -> Launch:
        layout, network = self.layout, self.network
        dropout = network.input_dropout
        values: dict[str, Value] = {
            **self._values, "slot_pitch": kernels.slot_pitch(self._size), "described": At("persistent layers"),
            "dropout": dropout.layer if dropout else 0, "least": least_kept(dropout.rate) if dropout else 0,
            "keep": 1.0 / (1.0 - dropout.rate) if dropout else 0.0, "layer_count": len(network.layers),
            "shared_floats": layout.all_floats, "capacity": network.rows,
        }  # fmt: skip
        return Launch(self._entry(source, textured), (layout.blocks, 1, 1), values)

    def _entry(self, source: str, textured: bool) -> Entry:
        layout, network = self.layout, self.network
        reader, ctype = TargetReader(network.target_kind, textured), kernels.SOURCES[source]
        activation = layout.activation
        name = (
            f"{activation or 'any'}_{network.loss}_{network.target_kind}{reader.suffix}_{network.rule}_{source}_"
            f"{layout.rows}"
        )
        of_layers = f"OneActivation<{camel(activation)}>" if activation else "AnyActivation"
        function = (
            f"train_few_rows<{of_layers}, {camel(network.loss)}, {TARGET_STRUCTS[network.target_kind]}, "
            f"{reader.source}, {network.rule}Rule, {ctype}, {layout.rows}>"
        )
        others = (
            "int64_t slot_pitch, int dropout, uint32_t least, float keep, "
            f"const FewRowsLayer* described[{len(network.layers)}], int layer_count, int shared_floats, int capacity"
        )
        return Entry(
            f"train_few_rows_{name}", "persistent/few_rows.cuh", function,
            arguments(self._signature(source, reader, others)), FEW_ROWS_THREADS, layout.shared_bytes,
            block=f"FewRowsShared<{layout.shared_bytes}>", cooperative=True, constants=True,
            loss_numbers=reads_numbers(network.loss), products=self._products,
        )  # fmt: skip
