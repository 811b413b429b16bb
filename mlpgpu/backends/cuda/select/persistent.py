"""Whether a plan trains inside one persistent kernel, and how the network is cut up for that.

The choice follows the plan, the card's multiprocessors and its shared memory alone.
"""

from __future__ import annotations

import math

from ....plan import Plan
from ..kernels import architecture, ceil_div
from ..persistent.cost import layer_clocks
from ..persistent.few_rows import layout_of
from ..persistent.kernel import FewRowsKernel, OwnedRowsKernel, PersistentKernel
from ..persistent.layout import Layout, TiledLayer
from ..persistent.network import DenseLayer, PersistentNetwork, read_network
from ..persistent.tiles import BFLOAT16, COMPUTE_THREADS, Tiling, most_columns, products_of
from . import thresholds

TF32_TERMS = {"float32-ieee": 0, "float32": 2, "tf32": 1, "bfloat16": BFLOAT16}  # of a product's operand


def choose_kernel(plan: Plan, *, multiprocessors: int, shared_bytes: int, arch: str) -> PersistentKernel | str:
    """The persistent kernel of a plan, or why it has none.

    Args:
        shared_bytes: the most that a block may have.
    """
    if not thresholds.PERSISTENT_IS_USED:
        return "persistent kernels are switched off"
    network = read_network(plan)
    if isinstance(network, str):
        return network
    owned = _owned_rows(plan, network, multiprocessors, shared_bytes, arch)
    if isinstance(owned, OwnedRowsKernel) and owned.layout.received_words < thresholds.FEW_ROWS_LEAST_WORDS:
        return owned
    few_rows = _few_rows(network, multiprocessors, shared_bytes)
    if isinstance(few_rows, FewRowsKernel):
        return few_rows
    if isinstance(owned, OwnedRowsKernel) or network.rows > thresholds.PERSISTENT_FEW_ROWS:
        return owned
    return f"{owned}; {few_rows}"


def _owned_rows(
    plan: Plan, network: PersistentNetwork, multiprocessors: int, shared_bytes: int, arch: str
) -> OwnedRowsKernel | str:
    """The kernel whose blocks own rows of the batch, or why it does not train the network."""
    if plan.capacity > thresholds.PERSISTENT_MOST_ROWS:
        return f"a batch of {plan.capacity} rows is larger than {thresholds.PERSISTENT_MOST_ROWS}"
    tf32_terms = TF32_TERMS[plan.precision] if architecture(arch) >= architecture("sm_80") else 0
    has_copy_engine = architecture(arch) >= architecture("sm_90")
    if ceil_div(network.widest, most_columns(tf32_terms)) > multiprocessors:
        return f"a layer of {network.widest} units is too wide for {multiprocessors} multiprocessors"
    # Tiles are chosen for speed, then, where they do not fit together, each among those of less and less memory.
    room = f"{shared_bytes:,} bytes of shared memory"
    why = f"a tile of its weights, with {plan.capacity} rows of inputs, takes more than {room}"
    for sixteenths in thresholds.MEMORY_SHARES:
        layout = _fastest(network, multiprocessors, shared_bytes * sixteenths // 16, tf32_terms)
        if layout is None:
            break
        if layout.shared_bytes <= shared_bytes:
            return OwnedRowsKernel(layout, has_copy_engine)
        why = f"a block would need {layout.shared_bytes:,} bytes of shared memory, and has {shared_bytes:,}"
    return why


def _few_rows(network: PersistentNetwork, multiprocessors: int, shared_bytes: int) -> FewRowsKernel | str:
    """The kernel for few rows, or why it does not train the network."""
    if not thresholds.FEW_ROWS_ARE_PERSISTENT:
        return "kernels for few rows are switched off"
    if network.rows > thresholds.PERSISTENT_FEW_ROWS:
        return f"{network.rows} rows > {thresholds.PERSISTENT_FEW_ROWS}"
    layout = layout_of(network, multiprocessors, shared_bytes)
    return layout if isinstance(layout, str) else FewRowsKernel(layout)


def _fastest(network: PersistentNetwork, blocks: int, most_bytes: int, tf32_terms: int) -> Layout | None:
    """The layout whose layers are the fastest of those that take at most so many bytes each, if there is one."""
    replicated = _replicated(network)
    # Tiles of replicated layers come last: on blocks without others they cost no time, for rows wait for tiled layers.
    others = blocks - ceil_div(network.widest, most_columns(tf32_terms))
    trained = [dense.is_trained for dense in network.layers]
    moves_copies = any(map(all, zip(replicated, trained, strict=True)))
    kept = min(thresholds.REPLICATED_BLOCKS, blocks // 8, others) if moves_copies else 0
    tilings: dict[int, Tiling] = {}
    first_blocks: dict[int, int] = {}
    taken, busy = 0, 0.0
    for number in sorted(range(len(replicated)), key=replicated.__getitem__):
        dense, is_replicated, is_first = network.layers[number], replicated[number], number == 0
        best = math.inf
        for tiling in _tilings(dense, blocks if is_replicated else blocks - kept, most_columns(tf32_terms)):
            products = products_of(tiling, network.rows, tf32_terms, is_first=is_first)
            floats = products.shared_floats(network.slots, is_first) + products.partial_floats(is_replicated)
            if 4 * floats > most_bytes:
                continue
            clocks = layer_clocks(dense, products, blocks, is_first=is_first, is_replicated=is_replicated)
            clocks += busy if is_replicated and taken + tiling.tiles > blocks else 0.0
            if clocks < best:
                best, tilings[number] = clocks, tiling
        if number not in tilings:
            return None
        first_blocks[number] = taken
        if trained[number] or not is_replicated:  # else there are copies of it and no tiles
            taken += tilings[number].tiles
        busy = max(busy, best)
    blocks = min(blocks, max(network.rows, taken))
    layers = (
        TiledLayer(dense, tilings[number], replicated[number], first_blocks[number] % blocks)
        for number, dense in enumerate(network.layers)
    )
    return Layout(network, tuple(layers), blocks, tf32_terms)


def _replicated(network: PersistentNetwork) -> list[bool]:
    """Whether each block holds a copy of all weights, for each layer: inner ones, as far as they are small."""
    replicated, copied = [False], 0
    for dense in network.layers[1:]:
        size = dense.weight_rows * dense.n_out
        replicated.append(size <= thresholds.MOST_REPLICATED and copied + size <= thresholds.MOST_REPLICATED_IN_ALL)
        copied += size if replicated[-1] else 0
    return replicated


def _tilings(dense: DenseLayer, blocks: int, most_columns: int) -> list[Tiling]:
    """All into at most so many tiles, fewer tiles first."""
    row_quads, column_quads = ceil_div(dense.weight_rows, 4), ceil_div(dense.n_out, 4)
    tilings = [
        Tiling(dense.weight_rows, dense.n_out, row_slices, column_slices)
        for column_slices in range(ceil_div(dense.n_out, most_columns), min(column_quads, blocks) + 1)
        for row_slices in range(1, min(row_quads, blocks // column_slices) + 1)
    ]
    return sorted((t for t in tilings if t.quads <= COMPUTE_THREADS // 2), key=lambda tiling: tiling.tiles)
