"""How weights are cut into tiles for training by few rows inside one kernel, and where a block keeps them.

``persistent/few_rows.cuh`` says what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ....activations import ACTIVATIONS
from ....random import least_kept
from ..kernels.launches import MOST_RUN_STEPS
from .few_rows_tiles import FEW_ROWS, FEW_ROWS_THREADS, FewRowsTiling, few_rows, tile_clocks, tilings_of
from .network import DenseLayer, PersistentNetwork
from .tiles import round_up

# Of FewRowsLayer, FewRowsTile and FewRowsStage in persistent/few_rows_stages.cuh.  Each of 3 L + 1 stages is described
# by a thread.
FEW_ROWS_LAYER_WORDS, FEW_ROWS_TILE_WORDS, FEW_ROWS_STAGE_WORDS = 21, 9, 31
FEW_ROWS_MOST_LAYERS = (FEW_ROWS_THREADS - 1) // 3

# Tiles are chosen for speed, then, where they do not fit together, among those that take at most so many times the
# least memory.
MEMORY_SLACKS = (100.0, 1.2, 1.1, 1.05, 1.0)


@dataclass(frozen=True)
class FewRowsLayout:
    """The tiles of all layers, and the memory of a block; ``most_bytes`` is what it may have."""

    network: PersistentNetwork
    tilings: tuple[FewRowsTiling, ...]
    most_bytes: int

    @property
    def rows(self) -> int:
        """The most rows that the kernel is made for."""
        return few_rows(self.network.rows)

    @property
    def blocks(self) -> int:
        return max(tiling.tiles for tiling in self.tilings)

    @property
    def shared_bytes(self) -> int:
        """Of a block: all that it may have, so that one kernel serves all networks."""
        return self.most_bytes

    @property
    def _common_floats(self) -> int:
        """Before the layers: descriptions of them and of stages, partial sums, logits, and targets of two batches."""
        n, targets = self.tilings[-1].dense.n_out, self.network.targets
        layers = len(self.tilings)
        described = (FEW_ROWS_LAYER_WORDS + FEW_ROWS_TILE_WORDS) * layers + FEW_ROWS_STAGE_WORDS * (3 * layers + 1)
        of_rows = 2 * (self.rows * (targets + 2) + 1)
        return round_up(described, 4) + (FEW_ROWS_THREADS + round_up(n, 4)) * self.rows + round_up(of_rows, 4)

    @cached_property
    def floats(self) -> int:
        """Of a block's shared memory, without slots."""
        floats = self._common_floats
        for number, tiling in enumerate(self.tilings):
            floats += tiling.all_floats(self.rows, is_first=number == 0)
        return floats

    @cached_property
    def has_slots(self) -> tuple[bool, ...]:
        """Whether a layer's slots lie in shared memory too, as far as there is room; the others stay where they are."""
        left, found = self.most_bytes // 4 - self.floats, []
        for tiling in self.tilings:
            floats = self.network.slots * tiling.floats
            found.append(0 < floats <= left and tiling.dense.is_trained)
            left -= floats if found[-1] else 0
        return tuple(found)

    @property
    def slot_floats(self) -> int:
        """Of all slots."""
        return self.network.slots * sum(tiling.floats for tiling in self.tilings if tiling.dense.is_trained)

    @property
    def all_floats(self) -> int:
        """Of a block's shared memory that the network takes, with the slots that have room."""
        of_slots = (self.network.slots * tiling.floats for tiling in self.tilings)
        return self.floats + sum(floats for floats, is_there in zip(of_slots, self.has_slots, strict=True) if is_there)

    @cached_property
    def message_words(self) -> int:
        """Of all layers, for even and for odd steps."""
        return sum(
            2 * self.rows * (t.row_slices * t.dense.n_out + t.column_slices * t.dense.n_in) for t in self.tilings
        )

    @property
    def bytes(self) -> dict[str, int]:
        """The size of each array that the kernel takes beside those of the launches."""
        return {
            "messages": 8 * self.message_words, "persistent layers": 4 * FEW_ROWS_LAYER_WORDS * len(self.tilings),
            "row errors": 8 * self.network.rows * MOST_RUN_STEPS,
        }  # fmt: skip

    @property
    def words(self) -> Mapping[str, tuple[int, ...]]:
        """What the kernel is told of the layers, ``FewRowsLayer`` each."""
        return {"persistent layers": tuple(word for layer in self._described() for word in layer)}

    @cached_property
    def activation(self) -> str | None:
        """Of all layers but those with the identity; None if there are several."""
        found = {tiling.dense.activation for tiling in self.tilings} - {"identity"}
        return None if len(found) > 1 else next(iter(found), "identity")

    def activation_number(self, dense: DenseLayer) -> int:
        """By which the kernel knows a layer's activation."""
        if self.activation is not None:
            return int(dense.activation != "identity")
        return list(ACTIVATIONS).index(dense.activation)

    def _described(self) -> Iterator[tuple[int, ...]]:
        parameters, messages, floats = 0, 0, self._common_floats
        for number, (tiling, has_slots) in enumerate(zip(self.tilings, self.has_slots, strict=True)):
            dense = tiling.dense
            inputs, dz = tiling.operand_floats(self.rows, is_first=number == 0)
            of_z, of_dx = (2 * self.rows * count for count in (
                tiling.row_slices * dense.n_out, tiling.column_slices * dense.n_in,
            ))  # fmt: skip
            at_inputs = floats
            at_dz = at_inputs + inputs
            weights = at_dz + 2 * dz
            slots = weights + tiling.floats
            floats = slots + (self.network.slots * tiling.floats if has_slots else 0)
            dropout = dense.dropout
            keep = np.float32(1.0 / (1.0 - dropout.rate) if dropout else 0.0)
            yield (
                dense.n_in, dense.weight_rows, dense.n_out, parameters, self.activation_number(dense),
                int(dense.saves_z), int(dense.is_trained), tiling.row_slices, tiling.column_slices,
                messages, messages + of_z, weights, tiling.pitch, slots if has_slots else -1, tiling.floats,
                at_inputs, at_dz, at_dz + dz, dropout.layer if dropout else 0,
                least_kept(dropout.rate) if dropout else 0, int(keep.view(np.int32)),
            )  # fmt: skip
            parameters += dense.weight_rows * dense.n_out
            messages += of_z + of_dx


def layout_of(network: PersistentNetwork, blocks: int, shared_bytes: int) -> FewRowsLayout | str:
    """The tiles of a network of few rows that are counted to take least, on so many blocks, or why there are none.

    Those that leave room for all slots come before those that do not.
    """
    if network.rows > FEW_ROWS[-1]:
        return f"{network.rows} rows > {FEW_ROWS[-1]}"
    if len(network.layers) > FEW_ROWS_MOST_LAYERS:
        return f"{len(network.layers)} layers > {FEW_ROWS_MOST_LAYERS}"
    rows, last = few_rows(network.rows), len(network.layers) - 1
    counted = [
        _counted(dense, rows, network.slots, blocks, is_first=number == 0, is_last=number == last)
        for number, dense in enumerate(network.layers)
    ]
    layouts = [FewRowsLayout(network, _fastest(counted, slack), shared_bytes) for slack in MEMORY_SLACKS]
    for layout in layouts:
        if 4 * (layout.floats + layout.slot_floats) <= shared_bytes:
            return layout
    for layout in layouts:
        if 4 * layout.floats <= shared_bytes:
            return layout
    return f"a block's tiles take {4 * layouts[-1].floats:,} bytes, and it has {shared_bytes:,}"


@lru_cache(64)  # layers of one shape are counted once
def _counted(
    dense: DenseLayer, rows: int, slots: int, blocks: int, *, is_first: bool, is_last: bool
) -> list[tuple[float, int, FewRowsTiling]]:
    """The clocks and the floats of all of a layer's tilings."""
    return [
        (
            tile_clocks(each, rows, slots, is_first=is_first, is_last=is_last, blocks=blocks),
            each.all_floats(rows, is_first=is_first),
            each,
        )
        for each in tilings_of(dense, blocks)
    ]


def _fastest(counted: list[list[tuple[float, int, FewRowsTiling]]], slack: float) -> tuple[FewRowsTiling, ...]:
    """Each layer's tiling of the fewest clocks, among those that take at most ``slack`` times the least memory."""
    found = []
    for tilings in counted:
        most = slack * min(floats for _, floats, _ in tilings)
        found.append(min((each for each in tilings if each[1] <= most), key=lambda each: each[0])[2])
    return tuple(found)
