"""Dense layers of small batches, whose blocks keep all rows: ``whole_batch/``, on plain cores and on tensor cores."""

from __future__ import annotations

from dataclasses import replace

from .dense import FORMAT_OF_COMPONENTS, INPUT_SIGNATURE, gradient_signature, update_signature
from .entry import DENSE_PRODUCT, DROPOUT, ROW_THREADS, ROWS, WARP, Entry, arguments, ceil_div
from .updates import RULES, slot_count

WHOLE_BATCHES = (4, 8, 16, 32)  # the most rows of WholeBatchForward and WholeBatchBackward
WHOLE_BATCH_SPLITS = (1, 2, 4, 8)  # blocks of a cluster that share the slices of the forward pass
WHOLE_BATCH_WARPS, WHOLE_BATCH_COLUMNS = 8, 64  # of a block of the backward pass; of W, that a warp moves at a time
_LANE_ROWS = 2  # of W, that such a warp moves at a time

# Of OuterProducts: the most rows; as many elements as a thread moves, which a weight has columns at least; threads.
OUTER_PRODUCTS, OUTER_PRODUCTS_LEAST_COLUMNS, _OUTER_PRODUCTS_THREADS = (1, 2, 4), 4, 256

# Rows and columns of a fragment of the batch (whole_batch/fragments.cuh).
FRAGMENT = 16

# Of TensorWholeBatchForward and TensorWholeBatchBackward: the most rows by components, and a forward block's columns.
TENSOR_WHOLE_BATCHES = {1: (32,), 2: (32, 64), 3: (32, 64)}
TENSOR_WHOLE_BATCH_COLUMNS, _SLICE_ROWS = 64, 64  # of a forward block; of a slice of W
_MOST_BLOCKS_OF_COLUMNS = 32  # of a backward pass, that share rows of W
_TENSOR_WARPS, _TENSOR_ROOM = 8, 112 << 10  # bytes of one of two blocks of a multiprocessor of sm_90a

_OUTPUTS = "const float* b[n], float* z[rows,n], float* y[rows,n], float* dropped[rows,n]"
_INPUT_GRADIENT = "const float* saved[rows,k], float* dx[rows,k]"
_SIZES = "int k, int n, int activation"


def whole_batch(rows: int) -> int:
    """Of WHOLE_BATCHES, the one that so many rows are given to."""
    return next(most for most in WHOLE_BATCHES if rows <= most)


def _forward_warps(rows: int) -> int:
    """Of a block of the forward pass, whose warps take slices in turn."""
    return 8 if rows > 16 else 16


def whole_batch_forward_columns(rows: int) -> tuple[int, ...]:
    """The columns that blocks of the forward pass of so many rows may have, the fewest first."""
    return (16, 32) if rows > 16 else (16, 32, 64)  # of 64 and 32 rows the warps' sums take too much shared memory


def _forward_stages(rows: int, columns: int) -> int:
    """Of the ring of a warp of the forward pass."""
    return 3 if rows == 16 and columns < 64 else 4


def _forward_k(columns: int) -> int:
    """Rows of W of a slice of the forward pass."""
    return 256 // columns


def dense_forward_whole_batch(rows: int, columns: int = 16, split: int = 1) -> Entry:
    """A layer's outputs for at most so many rows, one of WHOLE_BATCHES, as fast as W is read.

    ``split``, one of WHOLE_BATCH_SPLITS, blocks have the same ``columns``, of :func:`whole_batch_forward_columns`,
    each of them a part of k.
    """
    name, block = "dense_forward_whole_batch", f"WholeBatchForward<{rows}, {columns}>"
    signature = f"{ROWS}, {INPUT_SIGNATURE}, const float* w[k,n], {_OUTPUTS}, {_SIZES}, {DROPOUT}"
    warps, stages = _forward_warps(rows), _forward_stages(rows, columns)
    pitch = columns + 4 * (columns > 16)
    return Entry(
        f"{name}_{rows}x{columns}" + f"_by_{split}" * (split > 1), "whole_batch/forward.cuh",
        f"{name}<{block}, {split}>", arguments(signature), warps * WARP,
        4 * warps * stages * _forward_k(columns) * (pitch + rows),
        blocks=2 if rows <= 8 else 16 // warps, needs="sm_90a" if split > 1 else "sm_80", cluster=split, spill_bytes=64,
        prefetched=(("w", 0),), products=(DENSE_PRODUCT,), block=block,
    )  # fmt: skip


def whole_batch_forward_grid(n: int, columns: int = 16, split: int = 1) -> tuple[int, int, int]:
    """Blocks for n columns."""
    return split * ceil_div(n, columns), 1, 1


def whole_batch_split(k: int, n: int, rows: int, columns: int, multiprocessors: int) -> int:
    """Of WHOLE_BATCH_SPLITS the largest that leaves at most one block for a multiprocessor and each warp two slices."""
    most = min(multiprocessors // ceil_div(n, columns), whole_batch_slices(k, rows, columns) // 2)
    return max(split for split in WHOLE_BATCH_SPLITS if split <= max(1, most))


def whole_batch_slices(k: int, rows: int, columns: int) -> int:
    """Of W, that each warp of the forward pass has in turn at least, where blocks do not share k."""
    return ceil_div(k, _forward_k(columns)) // _forward_warps(rows)


def dense_backward_whole_batch(rule: str, rows: int) -> Entry:
    """dx, and the step of ``rule`` along the gradient, for at most so many rows, one of WHOLE_BATCHES."""
    signature = f"{ROWS}, {update_signature(rule)}, {_INPUT_GRADIENT}, {_SIZES}, int column_warps, {DROPOUT}"
    name, block = "dense_backward_whole_batch", f"WholeBatchBackward<{rows}>"
    deltas = rows * (_most_column_warps(rows) * WHOLE_BATCH_COLUMNS + 4)
    weights = WHOLE_BATCH_WARPS * 3 * _LANE_ROWS * (WHOLE_BATCH_COLUMNS + 4)
    stages = 3 if rows > 16 else 4
    return Entry(
        f"{name}_{rule}_{rows}", "whole_batch/backward.cuh", f"{name}<{rule}Rule, {block}>", arguments(signature),
        WHOLE_BATCH_WARPS * WARP, 4 * (stages * (deltas + weights) + rows * WHOLE_BATCH_WARPS * _LANE_ROWS),
        blocks=_backward_blocks(rows), needs="sm_80", constants=True,
        prefetched=(("weight", 0), ("weight_slots", 0)), spill_bytes=24,
        products=(DENSE_PRODUCT, replace(DENSE_PRODUCT, when=("dx",))), block=block,
    )  # fmt: skip


def _backward_blocks(rows: int) -> int:
    """Of the backward pass, on a multiprocessor at once."""
    return 3 if rows < 8 else 2


def _most_column_warps(rows: int) -> int:
    """How many warps of a block of the backward pass share rows of W at most."""
    return 2 if rows > 8 else 4


def whole_batch_backward_grid(
    k: int, n: int, rows: int, multiprocessors: int, *, has_dx: bool
) -> tuple[tuple[int, int, int], int]:
    """Blocks of the backward pass of a weight (k, n), and how many warps of each share rows of W, as end first.

    Without dx other blocks may have other columns.
    """
    chunks, warps = ceil_div(n, WHOLE_BATCH_COLUMNS), 1
    ways = []
    while warps <= _most_column_warps(rows):
        across, most = ceil_div(k, _LANE_ROWS * WHOLE_BATCH_WARPS // warps), ceil_div(chunks, warps)
        downs = (1,) if has_dx else range(1, min(most, _MOST_BLOCKS_OF_COLUMNS) + 1)
        ways += [((across, down, 1), warps) for down in downs]
        warps *= 2
    room, once = _backward_blocks(rows) * multiprocessors, 1 if rows <= 8 else 3
    # Fewer at once, whose copies are shorter rows, take longer, but for whole vectors of no dx: of 6144 by 6144 with
    # Adam at 4 rows one, two and four took 275.7, 268.1 and 260.8 µs on an H200, of 4096 by 3072 without dx 59.2, 61.1
    # and 64.2.
    longer = {1: 1.09, 2: 1.045, 4: 1.0} if has_dx or n % 4 else {1: 1.0, 2: 1.0, 4: 1.0}
    return min(ways, key=lambda way: longer[way[1]] * _turns(way[0], chunks, way[1], once, room))


def _turns(grid: tuple[int, int, int], chunks: int, at_once: int, once: int, room: int) -> int:
    """Chunks that blocks have in turn, ``at_once`` of them at a time, where a card has room for so many blocks.

    What a block does once takes as long as ``once`` chunks.
    """
    across, down, _ = grid
    return ceil_div(across * down, room) * (ceil_div(chunks, at_once * down) + once)


def dense_update_outer_products(rule: str, rows: int) -> Entry:
    """The step of ``rule`` along the gradient of a weight whose dx nobody reads, for at most so many rows, one of
    OUTER_PRODUCTS, and OUTER_PRODUCTS_LEAST_COLUMNS at least."""
    name, block = "dense_update_outer_products", f"OuterProducts<{rows}>"
    return Entry(
        f"{name}_{rule}_{rows}", "whole_batch/outer_products.cuh", f"{name}<{rule}Rule, {block}>",
        arguments(f"{ROWS}, {update_signature(rule)}, int k, int n"), _OUTER_PRODUCTS_THREADS,
        blocks=4, constants=True, prefetched=(("weight", 0), ("weight_slots", 0)),
        products=(DENSE_PRODUCT,), block=block,
    )  # fmt: skip


def outer_products(rows: int) -> int | None:
    """Of OUTER_PRODUCTS, the one that so many rows are given to, if there is one."""
    return next((most for most in OUTER_PRODUCTS if rows <= most), None)


def outer_products_grid(k: int, n: int) -> tuple[int, int, int]:
    """Blocks for a weight (k, n) and its bias."""
    of_weight = ceil_div(k * n, OUTER_PRODUCTS_LEAST_COLUMNS * _OUTER_PRODUCTS_THREADS)
    return of_weight + ceil_div(n, _OUTER_PRODUCTS_THREADS), 1, 1


def tensor_whole_batch(rows: int, components: int) -> int:
    """Of TENSOR_WHOLE_BATCHES, the one that so many rows are given to."""
    return next(most for most in TENSOR_WHOLE_BATCHES[components] if rows <= most)


def batch_fragments(components: int) -> Entry:
    """The batch's rows as fragments of so many components."""
    name = "batch_fragments"
    x, made = "const float* x[rows,n], const int* order[rows]", f"fragments[{components},row_tiles,{FRAGMENT},n]"
    return Entry(
        f"{name}_{components}", "whole_batch/fragments.cuh", f"{name}<{components}>",
        arguments(f"{ROWS}, {x}, uint16_t* {made}, int row_tiles, int n"), ROW_THREADS, 0,
        needs="sm_90a", prefetched=(), block="BatchFragments",
    )  # fmt: skip


def batch_fragments_grid(n: int, rows: int) -> tuple[int, int, int]:
    """Blocks for n columns of so many rows."""
    return ceil_div(n, FRAGMENT), ceil_div(rows, 2 * ROW_THREADS // FRAGMENT), 1


def _fragment_bytes(rows: int, components: int) -> int:
    """Of 16 columns of so many rows."""
    return 2 * components * FRAGMENT * rows


def _tensor_forward_bytes(rows: int, components: int) -> int:
    """Shared memory of a block of the forward pass: three slices of W, and two of x."""
    weights, inputs = 4 * _SLICE_ROWS * (TENSOR_WHOLE_BATCH_COLUMNS + 4), _fragment_bytes(rows, components)
    return 3 * weights + 2 * _SLICE_ROWS // FRAGMENT * inputs


def _tensor_backward_bytes(rule: str, rows: int, components: int) -> int:
    """Shared memory of a block of the backward pass: x, and up to four chunks of W, its slots and dz."""
    weights = 4 * (1 + slot_count(rule)) * FRAGMENT * (FRAGMENT * _TENSOR_WARPS + 16)
    deltas = _fragment_bytes(rows, components)
    wanted = [stages * weights + (stages * _TENSOR_WARPS + 1) * deltas for stages in (4, 3, 2)]
    least = 2 * weights + (_TENSOR_WARPS + 1) * deltas
    chosen = next((each for each in wanted if each <= _TENSOR_ROOM), least)
    return max(chosen, 4 * _TENSOR_WARPS * rows * (FRAGMENT + 4))  # in the end for sums


def dense_forward_tensor_whole_batch(rows: int, components: int, split: int = 1) -> Entry:
    """The outputs of :func:`dense_forward_whole_batch` by so many ``components`` on tensor cores, from fragments."""
    name, block = "dense_forward_tensor_whole_batch", f"TensorWholeBatchForward<{rows}, {components}>"
    tiles, shared_bytes = f"{components},row_tiles,{FRAGMENT}", _tensor_forward_bytes(rows, components)
    signature = (
        f"{ROWS}, const uint16_t* x_fragments[{tiles},k], const float* w[k,n], {_OUTPUTS}, "
        f"uint16_t* fragments[{tiles},n], int row_tiles, {_SIZES}, {DROPOUT}"
    )
    return Entry(
        f"{name}_{rows}_{components}" + f"_by_{split}" * (split > 1), "whole_batch/tensor_forward.cuh",
        f"{name}<{block}, {split}>", arguments(signature), _TENSOR_WARPS * WARP, shared_bytes,
        blocks=2 if shared_bytes <= _TENSOR_ROOM else 1, needs="sm_90a", cluster=split,
        prefetched=(("w", 0),), products=(DENSE_PRODUCT,), spill_bytes=32,
        block=block, operand_format=FORMAT_OF_COMPONENTS[components],
    )  # fmt: skip


def tensor_whole_batch_split(k: int, n: int, multiprocessors: int) -> int:
    """Of WHOLE_BATCH_SPLITS the largest that leaves at most two blocks for a multiprocessor, and each two slices."""
    most = min(2 * multiprocessors // ceil_div(n, TENSOR_WHOLE_BATCH_COLUMNS), tensor_whole_batch_slices(k) // 2)
    return max(split for split in WHOLE_BATCH_SPLITS if split <= max(1, most))


def tensor_whole_batch_slices(k: int) -> int:
    """Slices of W's rows, of which the blocks of a cluster have every so many-th in the forward pass."""
    return ceil_div(k, _SLICE_ROWS)


def tensor_whole_batch_chunks(n: int) -> int:
    """Chunks of W's columns, of which blocks of the same rows have every so many-th in the backward pass."""
    return ceil_div(n, FRAGMENT * _TENSOR_WARPS)


def dense_backward_tensor_whole_batch(rule: str, rows: int, components: int) -> Entry:
    """What :func:`dense_backward_whole_batch` makes, by so many ``components`` on tensor cores, from fragments."""
    name, block = (
        "dense_backward_tensor_whole_batch",
        f"TensorWholeBatchBackward<{rows}, {components}, {slot_count(rule)}>",
    )
    tiles, shared_bytes = f"{components},row_tiles,{FRAGMENT}", _tensor_backward_bytes(rule, rows, components)
    signature = (
        f"{ROWS}, const uint16_t* x_fragments[{tiles},k], const uint16_t* dz_fragments[{tiles},n], "
        f"{gradient_signature(rule)}, {_INPUT_GRADIENT}, uint16_t* fragments[{tiles},k], "
        f"float* partials[0], unsigned* arrived[0], int row_tiles, {_SIZES}, {DROPOUT}"
    )
    return Entry(
        f"{name}_{rule}_{rows}_{components}", "whole_batch/tensor_backward.cuh", f"{name}<{rule}Rule, {block}>",
        arguments(signature), _TENSOR_WARPS * WARP, shared_bytes,
        blocks=2 if shared_bytes <= _TENSOR_ROOM else 1, needs="sm_90a", constants=True,
        prefetched=(("weight", 0), ("weight_slots", 0)), products=(DENSE_PRODUCT, replace(DENSE_PRODUCT, when=("dx",))),
        block=block, operand_format=FORMAT_OF_COMPONENTS[components], spill_bytes=256,
    )  # fmt: skip


def tensor_whole_batch_backward_grid(k: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
    """Blocks of the backward pass of a weight (k, n): of its rows, and so many for the columns of each as end first."""
    across, chunks = ceil_div(k, FRAGMENT), tensor_whole_batch_chunks(n)
    grids = [(across, down, 1) for down in range(1, min(chunks, _MOST_BLOCKS_OF_COLUMNS) + 1)]
    return min(grids, key=lambda grid: _turns(grid, chunks, 1, 2, 2 * multiprocessors))


def tensor_whole_batch_partials(grid: tuple[int, int, int], rows: int) -> int:
    """Floats of the sums of dx that blocks leave which share rows of W."""
    return grid[0] * grid[1] * rows * FRAGMENT if grid[1] > 1 else 0


def whole_batch_entries() -> list[Entry]:
    """The entries of layers whose blocks keep the whole batch."""
    plain, tensor = WHOLE_BATCHES, [(rows, c) for c, most in TENSOR_WHOLE_BATCHES.items() for rows in most]
    splits = WHOLE_BATCH_SPLITS
    columns = [(rows, columns) for rows in plain for columns in whole_batch_forward_columns(rows)]
    return [
        *(dense_forward_whole_batch(*shape, split) for shape in columns for split in splits),
        *(dense_backward_whole_batch(rule, rows) for rule in RULES for rows in plain),
        *(dense_update_outer_products(rule, rows) for rule in RULES for rows in OUTER_PRODUCTS),
        *(batch_fragments(components) for components in TENSOR_WHOLE_BATCHES),
        *(dense_forward_tensor_whole_batch(*shape, split) for shape in tensor for split in splits),
        *(dense_backward_tensor_whole_batch(rule, *shape) for rule in RULES for shape in tensor),
    ]
