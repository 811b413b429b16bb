"""A plan's persistent kernel: its entry and its launches."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise

from ...sources import camel
from .. import kernels
from ..kernels import TARGET_STRUCTS, Entry, Product, TargetReader, arguments, reads_numbers
from ..kernels.launches import At, Launch, Lowered, Value
from .layout import Layout
from .tiles import COMPUTE_THREADS, PRODUCER_THREADS


@dataclass(frozen=True)
class PersistentKernel:
    """The kernel inside which a plan trains; ``has_copy_engine`` says whether that brings inputs."""

    layout: Layout
    has_copy_engine: bool

    def train(self, source: str, *, textured: bool) -> Launch:
        """The launch that trains; ``steps`` and ``sequence`` change from one to the next."""
        layout, network = self.layout, self.layout.network
        mean, scale = network.scaled_inputs or (None, None)
        target_mean, target_scale = network.scaled_targets or (None, None)
        values: dict[str, Value] = {
            "step": At("step"), "steps": At("steps"), "sequence": At("sequence"), "order": At("order"),
            "inputs": At("data"), "scale": At("scale"), "mean": mean, "deviation": scale, "targets": At("targets"),
            "weights": At("weights"), "target_mean": target_mean, "target_scale": target_scale, "seed": At("seed"),
            "parameters": At("parameters"),
            "slots": At("slots") if network.slots else None, "messages": At("messages"), "staged": At("staged inputs"),
            "errors": At("row errors"),
        }  # fmt: skip
        return Launch(self._entry(source, textured), (layout.blocks, 1, 1), values)

    def add_errors(self, steps: int) -> Launch:
        """The launch that follows so many steps."""
        values: dict[str, Value] = {
            "step": At("step"), "errors": At("row errors"), "capacity": self.layout.network.rows,
            "losses": At("losses"),
        }  # fmt: skip
        return Launch(kernels.step_errors(), (steps, 1, 1), values)

    def entries(self, lowered: Lowered, source: str, *, textured: bool) -> list[Entry]:
        """The kernels of a program that trains inside this one: it, and those of evaluations."""
        training = [self.train(source, textured=textured), self.add_errors(1)]
        return Lowered(evaluation=[*lowered.evaluation_begin, *lowered.evaluation, *training]).entries()

    @property
    def _needs(self) -> str:
        """The oldest architecture that has the kernel's instructions."""
        return "sm_90" if self.has_copy_engine else "sm_80" if self.layout.tf32_terms else "sm_75"

    def _entry(self, source: str, textured: bool) -> Entry:
        """The kernel's entry; axes and products are those of one step."""
        layout, network = self.layout, self.layout.network
        ctype, reader = kernels.SOURCES[source], TargetReader(network.target_kind, textured)
        target = TARGET_STRUCTS[network.target_kind]
        flags = ", ".join(str(flag).lower() for flag in (self.has_copy_engine, network.scaled_inputs is not None))
        head = f"{network.rows}, {layout.blocks}, {layout.tf32_terms}, {flags}, {network.input_dropout or 'NotDropped'}"
        shape = f"PersistentNetwork<{head}, {', '.join(map(str, layout.layers))}>"
        function = (
            f"train_persistent<{shape}, {camel(network.loss)}, {target}, {reader.source}, {network.rule}Rule, "
            f"{ctype}, {layout.shared_bytes}, {layout.message_words}>"
        )
        widths = (network.layers[0].n_in, *(dense.n_out for dense in network.layers))
        size = sum(dense.weight_rows * dense.n_out for dense in network.layers)
        signature = (
            f"const Step* step[0], int steps, uint32_t sequence, const int* order[rows], "
            f"const {ctype}* inputs[rows,{widths[0]}], float scale, const float* mean[{widths[0]}], "
            f"const float* deviation[{widths[0]}], {reader.argument(str(widths[-1]))}, const float* weights[rows], "
            f"const float* target_mean[{widths[-1]}], const float* target_scale[{widths[-1]}], uint64_t seed, "
            f"inout float* parameters[{size}], inout float* slots[{network.slots},{size}], "
            "uint64_t* messages[0], void* staged[0], float* errors[rows,2]"
        )
        products = [Product(("rows", *pair)) for pair in pairwise(widths)]  # of z; dW takes as many, and dx
        trained = [dense.is_trained for dense in network.layers]
        of_trained = [product for product, is_trained in zip(products, trained, strict=True) if is_trained]
        above_trained = products[trained.index(True) + 1 :]  # dx below them is made as well, and nobody needs it
        name = f"persistent_{'_'.join(map(str, widths))}_{zlib.crc32(function.encode()):08x}"
        # Each of so many threads has 96 registers, and spills a few words around the loops.
        return Entry(
            name, "persistent/persistent.cuh", function, arguments(signature), COMPUTE_THREADS + PRODUCER_THREADS,
            layout.shared_bytes, block=f"PersistentBlock<{layout.shared_bytes}>", cooperative=True, spill_bytes=264,
            constants=True, loss_numbers=reads_numbers(network.loss), needs=self._needs,
            products=(*products, *of_trained, *above_trained),
        )  # fmt: skip
