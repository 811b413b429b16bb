"""Where the persistent kernel keeps its arrays: each block's shared memory, and the messages between blocks.

``persistent/memory.cuh`` lays out the same; the kernel is instantiated with the sizes found here, and asserts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...sources import camel
from ..kernels import WARP, ceil_div
from ..kernels.launches import MOST_RUN_STEPS
from .network import DenseLayer, PersistentNetwork
from .tiles import BFLOAT16, COMPUTE_THREADS, COMPUTE_WARPS, TileProducts, Tiling, products_of, round_up

RATES_PER_STEP = 3  # as in math/optimizers.cuh
STAGED_BATCHES = 3  # StagedInputs of persistent/inputs.cuh


@dataclass(frozen=True)
class TiledLayer:
    """A dense layer and its tiles, which the blocks from ``first_block`` on hold, one each.

    ``is_replicated``: every block that has rows also holds a copy of all weights.
    """

    dense: DenseLayer
    tiling: Tiling
    is_replicated: bool
    first_block: int

    def __str__(self) -> str:
        dense, tiling = self.dense, self.tiling
        flags = [str(flag).lower() for flag in (dense.has_bias, dense.saves_z, self.is_replicated)]
        frozen = "" if dense.is_trained else ", true"
        return (
            f"PersistentDense<{dense.n_in}, {dense.n_out}, {flags[0]}, {camel(dense.activation)}, {flags[1]}, "
            f"{dense.dropout or 'NotDropped'}, {flags[2]}, {tiling.row_slices}, {tiling.column_slices}, "
            f"{self.first_block}{frozen}>"
        )


@dataclass(frozen=True)
class Layout:
    """A persistent kernel's blocks, tiles and memory.

    Attributes:
        blocks: of the grid, all of which run at once.
        tf32_terms: of an operand of a tile's products; 0 for multiply-adds, or BFLOAT16.
    """

    network: PersistentNetwork
    layers: tuple[TiledLayer, ...]
    blocks: int
    tf32_terms: int

    @property
    def rows_per_block(self) -> int:
        """The most rows of a batch that one block has."""
        return ceil_div(self.network.rows, self.blocks)

    @cached_property
    def products(self) -> tuple[TileProducts, ...]:
        """How each layer's products are made."""
        return tuple(
            products_of(layer.tiling, self.network.rows, self.tf32_terms, is_first=number == 0)
            for number, layer in enumerate(self.layers)
        )

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block: ``LayerMemory`` and ``BatchMemory`` of persistent/memory.cuh."""
        rows, most_rows, network = self.network.rows, self.rows_per_block, self.network
        floats = 0
        for products, layer in zip(self.products, self.layers, strict=True):
            tiling = layer.tiling
            floats += products.shared_floats(network.slots, layer is self.layers[0])
            floats += round_up(tiling.weight_rows * tiling.copy_pitch, 4) if layer.is_replicated else 0
            floats += 3 * round_up(most_rows * tiling.out_pitch, 4)
        floats += 4 + round_up(2 * rows, 4) + round_up(2 * most_rows * network.targets, 4)
        floats += 2 * (RATES_PER_STEP + 1)
        floats += (COMPUTE_WARPS + 2) * WARP // 2 if self.has_output_stage else 0
        partials = zip(self.products, self.layers, strict=True)
        return 4 * (floats + max(products.partial_floats(layer.is_replicated) for products, layer in partials))

    @property
    def received_words(self) -> int:
        """Words of messages that a block receives in a step for its rows."""
        words = 0
        for number, layer in enumerate(self.layers):
            if not layer.is_replicated:
                words += layer.tiling.row_slices * layer.dense.n_out
                words += layer.tiling.column_slices * layer.dense.n_in if number else 0
        return self.rows_per_block * words

    @property
    def has_output_stage(self) -> bool:
        """Whether a row goes from the last hidden layer's z to its dz in one stage: persistent/output_stage.cuh."""
        *below, last = self.layers
        return (
            bool(below)
            and self.rows_per_block == 1
            and last.is_replicated
            and last.dense.n_out <= WARP // 2
            and round_up(last.dense.n_in, 2) // 2 <= COMPUTE_THREADS
        )

    @property
    def staged_bytes(self) -> int:
        """Memory for the inputs of some batches, cut up for the tiles: ``StagedInputs`` of persistent/inputs.cuh."""
        products = self.products[0]
        row_bytes = products.input_pitch * products.input_bytes
        return STAGED_BATCHES * products.tiling.row_slices * self.network.rows * row_bytes

    @cached_property
    def message_words(self) -> int:
        """Words of messages between blocks: ``Messages`` of persistent/memory.cuh, for even and for odd steps."""
        rows, words = self.network.rows, 0
        for number, layer in enumerate(self.layers):
            tiling = layer.tiling
            if layer.is_replicated:
                words += tiling.weight_rows * tiling.out_pitch
            else:
                words += rows * tiling.row_slices * tiling.out_pitch
                words += rows * tiling.column_slices * round_up(layer.dense.n_in, 2) if number else 0
            has_pairs = self.tf32_terms == BFLOAT16 and number == 0  # of dZ, in one word
            words += rows * (round_up(tiling.out_pitch // 2, 2) if has_pairs else tiling.out_pitch)
            words += rows * tiling.out_pitch if number < len(self.layers) - 1 else 0
        return 2 * words + round_up(self.blocks, 2)

    @property
    def bytes(self) -> dict[str, int]:
        """The size of each array that the kernel takes beside those of the launches."""
        errors = 8 * self.network.rows * MOST_RUN_STEPS
        return {"messages": 8 * self.message_words, "staged inputs": self.staged_bytes, "row errors": errors}
