"""Dense layers of float32 operands: ``dense/dense.cuh`` and the updates beside it, with products by ``gemm/simt.cuh``,
``gemm/split_sm80.cuh`` or ``gemm/split_sm90.cuh``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ....activations import ACTIVATIONS
from ....optimizers import OPTIMIZERS
from .entry import DENSE_PRODUCT, ROW_THREADS, ROWS, Entry, arguments, camel, ceil_div
from .operand_format import Form
from .updates import slot_count

SPLIT_FORMAT = Form("Bfloat16Triple", 3, scaled=False)  # of operands that a kernel splits itself: SplitTile


@dataclass(frozen=True)
class BlockTile:
    """The tile of C, m by n, that a block computes; of such blocks so many are to fit on a multiprocessor."""

    m: int
    n: int
    threads: ClassVar[int] = 256
    blocks: ClassVar[int] = 2  # whose 16 warps hide each other's waiting
    main_loop: ClassVar[str | None] = None  # the file that computes such tiles, if dense/dense.cuh does not include it
    needs: ClassVar[str] = "sm_75"
    spill_bytes: ClassVar[int] = 0
    operand_format: ClassVar[Form | None] = None

    def grid(self, m: int, n: int, parts: int = 1) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return ceil_div(m, self.m), ceil_div(n, self.n), parts


@dataclass(frozen=True)
class Tile(BlockTile):
    """One that is computed in slices k deep: ``Tile<m, n, k>`` of gemm/simt.cuh."""

    k: int

    @property
    def shared_bytes(self) -> int:
        """Two stages of a slice of A and one of B, each line padded by 4."""
        return 4 * 2 * self.k * (self.m + self.n + 8)

    def __str__(self) -> str:
        return f"Tile<{self.m}, {self.n}, {self.k}>"

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"{self.m}x{self.n}"


TILES = (Tile(128, 128, 16), Tile(128, 96, 16), Tile(128, 64, 16), Tile(64, 64, 16), Tile(32, 32, 16))


@dataclass(frozen=True)
class SplitTile(BlockTile):
    """One that is computed of float32 split into bfloat16: ``SplitTile<m, n>`` of gemm/split_sm80.cuh."""

    main_loop: ClassVar[str | None] = "gemm/split_sm80.cuh"
    needs: ClassVar[str] = "sm_80"
    spill_bytes: ClassVar[int] = 40  # around the epilogue
    operand_format: ClassVar[Form | None] = SPLIT_FORMAT

    @property
    def shared_bytes(self) -> int:
        """Slices of both operands in three parts, lines padded by 8, or C in their place; flags of rows and columns."""
        depth, parts = 32, 3
        slices = 2 * parts * (max(depth * (self.m + 8), self.m * (depth + 8)) + depth * (self.n + 8))
        return max(slices, 4 * self.m * self.n) + 4 * (self.m + self.n)

    def __str__(self) -> str:
        return f"SplitTile<{self.m}, {self.n}>"

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"split_{self.m}x{self.n}"


_HELD_BYTES = 208  # a thread's part of C, where some of it is summed again


def _plane_bytes(k: int, n: int) -> int:
    """``SplitPlanes`` of gemm/split_sm90.cuh: three parts of two bytes."""
    return 3 * 2 * k * n


@dataclass(frozen=True)
class WarpgroupTile(BlockTile):
    """Likewise, by warpgroups: ``WarpgroupTile`` of gemm/split_sm90.cuh."""

    threads: ClassVar[int] = 512
    blocks: ClassVar[int] = 1
    main_loop: ClassVar[str | None] = "gemm/split_sm90.cuh"
    needs: ClassVar[str] = "sm_90a"
    spill_bytes: ClassVar[int] = _HELD_BYTES
    operand_format: ClassVar[Form | None] = SPLIT_FORMAT

    @property
    def shared_bytes(self) -> int:
        """Four stages of A's slices, two of B's planes, with two barriers each; A's rows, and flags of columns."""
        depth = 64
        of_a, of_b = 4 * (4 * self.m * (depth + 8) + 16), 2 * (_plane_bytes(depth, self.n) + 16)
        return of_a + of_b + 8 * self.m + 4 * self.n

    def __str__(self) -> str:
        return "WarpgroupTile"

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"split_wgmma_{self.m}x{self.n}"


SPLIT, WARPGROUP_SPLIT = SplitTile(64, 96), WarpgroupTile(128, 96)


def _tiled(
    header: str,
    name: str,
    epilogue: str,
    tile: Tile | SplitTile | WarpgroupTile,
    rest: str,
    *,
    spill_bytes: int = 0,
    constants: bool = False,
) -> Entry:
    """An entry that computes tiles; ``epilogue`` is an activation, an optimizer or nothing."""
    kind = f"{name}_{epilogue}" if epilogue else name
    struct = f"{epilogue}Rule" if constants else camel(epilogue)
    parameters = ", ".join(filter(None, [struct, str(tile)]))
    return Entry(
        f"{kind}_{tile.name}",
        header,
        f"{name}<{parameters}>",
        arguments(f"{ROWS}, {rest}"),
        tile.threads,
        tile.shared_bytes,
        blocks=tile.blocks,
        spill_bytes=max(spill_bytes, tile.spill_bytes),
        needs=tile.needs,
        constants=constants,
        main_loop=tile.main_loop,
        products=(DENSE_PRODUCT,),
        operand_format=tile.operand_format,
    )


_X = "const float* x[rows,k], const int* order[rows]"


def dense_forward(activation: str, tile: Tile) -> Entry:
    rest = f"{_X}, const float* w[k,n], const float* b[n], float* z[rows,n], float* y[rows,n], int k, int n"
    return _tiled("dense/dense.cuh", "dense_forward", activation, tile, rest)


_PART = f"{_X}, const float* w[k,n], float* parts[grid.z,rows,n], int k, int n, int part, int capacity"


def dense_forward_part(tile: Tile | SplitTile | WarpgroupTile) -> Entry:
    """Sums over parts of k."""
    return _tiled("dense/split_k.cuh", "dense_forward_part", "", tile, _PART)


FEW_ROWS, FEW_SHARED_BYTES = 8, 4 * (256 * 32 + 3072)  # Few of dense/few_rows.cuh


def dense_forward_part_few() -> Entry:
    """As :func:`dense_forward_part`, for at most FEW_ROWS rows."""
    name = "dense_forward_part_few"
    return Entry(
        name, "dense/few_rows.cuh", name, arguments(f"{ROWS}, {_PART}"), ROW_THREADS, FEW_SHARED_BYTES, blocks=2,
        products=(DENSE_PRODUCT,),
    )  # fmt: skip


def dense_forward_sum(activation: str) -> Entry:
    signature = (
        f"{ROWS}, const float* parts[count,rows,n], const float* b[n], float* z[rows,n], float* y[rows,n], int n, "
        "int count, int capacity"
    )
    function = f"dense_forward_sum<{camel(activation)}>"
    name = f"dense_forward_sum_{activation}"
    return Entry(name, "dense/split_k.cuh", function, arguments(signature), ROW_THREADS, 4 * ROW_THREADS, blocks=4)


def dense_backward_input(activation: str, tile: Tile) -> Entry:
    rest = "const float* dz[rows,n], const float* w[k,n], const float* saved[rows,k], float* dx[rows,k], int k, int n"
    # With some activations, on sm_75 and sm_80 alone: around the epilogue, not in the loop.
    spill_bytes = 576 if tile in TILES[:2] else 0
    return _tiled("dense/dense.cuh", "dense_backward_input", activation, tile, rest, spill_bytes=spill_bytes)


# A few bytes outside the loop cost less than half the warps: 47 against 39 TFLOP/s on an H200.
_WEIGHT_SPILL_BYTES = 144


def dense_backward_weight(tile: Tile) -> Entry:
    rest = f"{_X}, const float* dz[rows,n], float* dw[k,n], float* db[n], int k, int n"
    spill_bytes = _WEIGHT_SPILL_BYTES if tile in TILES[:2] else 0
    return _tiled("dense/dense.cuh", "dense_backward_weight", "", tile, rest, spill_bytes=spill_bytes)


def _updated(optimizer: str) -> str:
    """What an update takes, and changes, of a dense layer's parameters."""
    slots = slot_count(optimizer)
    return (
        f"{_X}, const float* dz[rows,n], const double* totals[2], inout float* weight[k,n], inout float* bias[n], "
        f"inout float* weight_slots[{slots},k,n], inout float* bias_slots[{slots},n], int64_t size"
    )


def dense_backward_update(optimizer: str, form: Tile | SplitTile | str) -> Entry:
    """The gradient of a weight and a bias, and the optimizer's step along it.

    ``form`` is a tile of either kind; or ``"narrow"``, without tiles; or ``"tall"``, for at most TALL_ROWS rows and
    TALL_COLUMNS columns.
    """
    rest = f"{_updated(optimizer)}, int k, int n"
    header, name = "dense/update.cuh", "dense_backward_update"
    if not isinstance(form, str):
        spill_bytes = _WEIGHT_SPILL_BYTES if form in TILES[:2] else 0
        return _tiled(header, name, optimizer, form, rest, spill_bytes=spill_bytes, constants=True)
    function, signature = f"{name}_{form}<{optimizer}Rule>", arguments(f"{ROWS}, {rest}")
    entry = f"{name}_{optimizer}_{form}"
    if form == "tall":
        return Entry(
            entry, "dense/large_k_update.cuh", function, signature, *_tall_shape(slot_count(optimizer)),
            needs="sm_90a", spill_bytes=_HELD_BYTES, constants=True, products=(DENSE_PRODUCT,),
            operand_format=SPLIT_FORMAT,
        )  # fmt: skip
    early = tuple((name, 0) for name in ("x", "order", "weight", "bias", "weight_slots", "bias_slots"))
    return Entry(
        entry, "dense/small_n_update.cuh", function, signature, *NARROW, constants=True, early=early, patient=True,
        products=(DENSE_PRODUCT,),
    )  # fmt: skip


TALL_LINES, TALL_COLUMNS, TALL_ROWS = 64, 96, 128  # of a tile: TallUpdate of dense/large_k_update.cuh


def _tall_shape(slots: int) -> tuple[int, int]:
    """Threads and shared bytes of a block."""
    groups, stages, depth = 2 if slots < 2 else 1, 12, 32
    ring = stages * (4 * depth * (TALL_LINES + 4) + 16)
    sums, barriers = groups * 4 * TALL_LINES * TALL_COLUMNS, 8 * 2 * groups
    shared = _plane_bytes(TALL_ROWS, TALL_COLUMNS) + sums + ring + barriers + 8 * TALL_ROWS + 4 * TALL_COLUMNS
    return (groups + 3) * 128, shared


NARROW_LINES, NARROW_COLUMNS = 8, 16
NARROW = 256, 4 * (1024 * 10 + 4)  # threads and shared bytes of a block


def narrow_grid(k: int, n: int) -> tuple[int, int, int]:
    """Blocks of the update without tiles, for a weight (k, n) and a bias."""
    return ceil_div(k + 1, NARROW_LINES), ceil_div(n, NARROW_COLUMNS), 1


FEW_PART, FEW_COLUMNS = 512, 256  # of a block, at most: FewUpdate
STREAM_PART, STREAM_COLUMNS = 704, 96  # StreamUpdate of dense/few_rows_stream.cuh
STREAM_THREADS, STREAM_PLACES, STREAM_STAGES = 480, 46080, 12
STREAM_SHARED_BYTES = 4 * (STREAM_PLACES + 2 * FEW_ROWS * STREAM_PART + 2 * 2 * STREAM_STAGES)


def dense_update_few(optimizer: str, *, stream: bool = False) -> Entry:
    """As :func:`dense_backward_update` for at most FEW_ROWS rows, and the parts of the next step's z.

    As a stream it is for at most STREAM_COLUMNS columns.
    """
    signature = (
        f"const Step* step[0], {_updated(optimizer)}, float* parts[grid.x,rows,n], int k, int n, int part, int capacity"
    )
    name = "dense_update_stream" if stream else "dense_update_few"
    return Entry(
        f"{name}_{optimizer}",
        "dense/few_rows_stream.cuh" if stream else "dense/few_rows_update.cuh",
        f"{name}<{optimizer}Rule>",
        arguments(signature),
        STREAM_THREADS if stream else ROW_THREADS,
        STREAM_SHARED_BYTES if stream else 4 * 2 * FEW_ROWS * FEW_PART,
        blocks=1 if stream else 2,
        needs="sm_90a" if stream else "sm_75",
        constants=True,
        products=(replace(DENSE_PRODUCT, when=("dz",)), replace(DENSE_PRODUCT, when=("parts",))),
    )


def few_grid(k: int, n: int, part: int) -> tuple[int, int, int]:
    """Blocks of the update of a weight (k, n) by few rows."""
    return ceil_div(k, part), ceil_div(n, FEW_COLUMNS), 1


def dense_backward_atomic() -> Entry:
    signature = (
        f"{ROWS}, const float* x[rows,k], const float* dz[rows,n], const float* w[k,n], float* dw[k,n], float* db[n], "
        "inout float* dx[rows,k], int k, int n"
    )
    name, products = "dense_backward_atomic", (DENSE_PRODUCT, replace(DENSE_PRODUCT, when=("dx",)))
    return Entry(name, "dense/atomic.cuh", name, arguments(signature), 256, 3 * 32 * 33 * 4, products=products)


def dense_entries() -> list[Entry]:
    """All of dense layers but those on tensor cores."""
    entries = [*(dense_forward_part(tile) for tile in (*TILES, SPLIT, WARPGROUP_SPLIT)), dense_forward_part_few()]
    entries += [dense_backward_weight(tile) for tile in TILES]
    for activation in ACTIVATIONS:
        entries += [dense_forward(activation, tile) for tile in TILES]
        entries += [dense_backward_input(activation, tile) for tile in TILES]
        entries.append(dense_forward_sum(activation))
    forms: tuple[Tile | SplitTile | str, ...] = (*TILES, SPLIT, "narrow", "tall")
    entries += [dense_backward_update(optimizer, form) for optimizer in OPTIMIZERS for form in forms]
    entries += [dense_update_few(optimizer, stream=stream) for optimizer in OPTIMIZERS for stream in (False, True)]
    return [*entries, dense_backward_atomic()]
