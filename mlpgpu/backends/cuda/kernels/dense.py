"""Dense layers of float32 operands: ``dense/dense.cuh`` and the updates beside it, with products by ``gemm/simt.cuh``,
``gemm/split_sm80.cuh`` or ``gemm/split_sm90.cuh``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from ....activations import ACTIVATIONS
from ...sources import camel
from .entry import DENSE_PRODUCT, DROPS, ROW_THREADS, ROWS, WARP, Entry, Product, arguments, ceil_div, dropping
from .operand_format import BFLOAT16, BFLOAT16_PAIR, BFLOAT16_TRIPLE, OperandFormat
from .updates import RULES, slot_count

# What the kernels that split numbers themselves multiply, but that a pair's second component is not scaled.
FORMAT_OF_COMPONENTS = {each.components: each for each in (BFLOAT16, BFLOAT16_PAIR, BFLOAT16_TRIPLE)}


@dataclass(frozen=True)
class BlockTile:
    """The tile of C, m by n, that a block of so many threads computes; ``blocks`` are to fit on a multiprocessor."""

    m: int
    n: int
    threads: ClassVar[int] = 256
    blocks: ClassVar[int] = 2  # whose 16 warps hide each other's waiting
    main_loop: ClassVar[str | None] = None  # the file that computes such tiles, if dense/dense.cuh does not include it
    needs: ClassVar[str] = "sm_75"
    spill_bytes: ClassVar[int] = 0
    operand_format: ClassVar[OperandFormat | None] = None

    def grid(self, m: int, n: int, parts: int = 1) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return ceil_div(m, self.m), ceil_div(n, self.n), parts


@dataclass(frozen=True)
class SimtTile(BlockTile):
    """A tile that multiply-adds compute in slices of k: ``SimtTile<m, n, k>`` of gemm/simt.cuh."""

    k: int

    @property
    def shared_bytes(self) -> int:
        """Two stages of a slice of A and one of B, each row padded by 4."""
        return 4 * 2 * self.k * (self.m + self.n + 8)

    def __str__(self) -> str:
        return f"SimtTile<{self.m}, {self.n}, {self.k}>"

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"{self.m}x{self.n}"


TILES: tuple[SimtTile, ...] = tuple(
    SimtTile(m, n, 16) for m, n in ((128, 128), (128, 96), (128, 64), (64, 64), (32, 32))
)


@dataclass(frozen=True)
class WarpSplitTile(BlockTile):
    """A small tile that multiply-adds compute, whose k the block's warps share: ``WarpSplitTile<n, warps>`` of
    gemm/warp_split.cuh."""

    main_loop: ClassVar[str | None] = "gemm/warp_split.cuh"
    K: ClassVar[int] = 128  # of a slice: 16 for each warp

    @property
    def shared_bytes(self) -> int:
        """A slice of A and one of B, each row padded by 4."""
        return 4 * (self.m + self.n) * (self.K + 4)

    def __str__(self) -> str:
        return f"WarpSplitTile<{self.n}, {self.threads // 32}>"

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"warp_split_{self.m}x{self.n}"


WARP_SPLIT_TILES: tuple[WarpSplitTile, ...] = (WarpSplitTile(32, 16), WarpSplitTile(32, 8))


@dataclass(frozen=True)
class WarpSplitWeightTile(WarpSplitTile):
    """Such a tile of a weight, whose k are a batch's rows."""

    threads: ClassVar[int] = 512
    blocks: ClassVar[int] = 1
    K: ClassVar[int] = 256


WARP_SPLIT_WEIGHT = WarpSplitWeightTile(32, 16)


@dataclass(frozen=True)
class StripTile(BlockTile):
    """A strip of a weight of few columns or few rows, whose k are a batch's rows: ``StripTile<n>`` or
    ``RowStripTile<m>`` of gemm/strip.cuh."""

    main_loop: ClassVar[str | None] = "gemm/strip.cuh"
    blocks: ClassVar[int] = 2
    spill_bytes: ClassVar[int] = 128  # of 16 rows, addresses

    @property
    def K(self) -> int:
        """Rows of the batch that a block has in flight."""
        return 64 if min(self.m, self.n) <= 4 else 32

    @property
    def shared_bytes(self) -> int:
        """The sums of a strip for each of eight warps."""
        return 4 * 8 * self.m * self.n

    def __str__(self) -> str:
        return f"StripTile<{self.n}>" if self.n < self.m else f"RowStripTile<{self.m}>"

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"strip_{self.m}x{self.n}"


STRIPS: tuple[StripTile, ...] = (
    *(StripTile(128, n) for n in (1, 2, 4, 8)), *(StripTile(m, 128) for m in (4, 8, 16)),
)  # fmt: skip


def strip(k: int, n: int) -> StripTile | None:
    """Of STRIPS the narrowest that has all columns or all rows of a weight (k, n), if there is one."""
    return next((tile for tile in STRIPS if (n <= tile.n < tile.m) or (k <= tile.m < tile.n)), None)


@dataclass(frozen=True)
class ShortTile(BlockTile):
    """A tile of at most k terms that multiply-adds compute: ``ShortTile<k>`` of gemm/strip.cuh."""

    k: int
    main_loop: ClassVar[str | None] = "gemm/strip.cuh"

    @property
    def shared_bytes(self) -> int:
        """A slice of A."""
        return 4 * self.m * self.k

    def __str__(self) -> str:
        return f"ShortTile<{self.k}>"

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"short_{self.k}"


SHORT_TILES: tuple[ShortTile, ...] = (ShortTile(128, 128, 8), ShortTile(128, 128, 16))


@dataclass(frozen=True)
class SplitSm80Tile(BlockTile):
    """A tile of float32 operands that are split into bfloat16: ``SplitSm80Tile<m, n>`` of gemm/split_sm80.cuh."""

    main_loop: ClassVar[str | None] = "gemm/split_sm80.cuh"
    needs: ClassVar[str] = "sm_80"
    spill_bytes: ClassVar[int] = 40  # around the epilogue
    operand_format: ClassVar[OperandFormat | None] = BFLOAT16_TRIPLE

    @property
    def shared_bytes(self) -> int:
        """Slices of both operands in three components, rows padded by 8, or C in their place; a flag for each row and
        column."""
        depth, components = 32, 3
        slices = 2 * components * (max(depth * (self.m + 8), self.m * (depth + 8)) + depth * (self.n + 8))
        return max(slices, 4 * self.m * self.n) + 4 * (self.m + self.n)

    def __str__(self) -> str:
        return f"SplitSm80Tile<{self.m}, {self.n}>"

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"split_sm80_{self.m}x{self.n}"


_RECOMPUTED_BYTES = 208  # a thread's elements of C, where some are recomputed


def _component_bytes(k: int, n: int) -> int:
    """Bytes of ``SplitComponents`` of gemm/split_sm90.cuh: three components of two bytes for each element."""
    return 3 * 2 * k * n


@dataclass(frozen=True)
class SplitSm90Tile(BlockTile):
    """A tile of split float32 operands that warpgroups compute: ``SplitSm90Tile`` of gemm/split_sm90.cuh."""

    threads: ClassVar[int] = 512
    blocks: ClassVar[int] = 1
    main_loop: ClassVar[str | None] = "gemm/split_sm90.cuh"
    needs: ClassVar[str] = "sm_90a"
    spill_bytes: ClassVar[int] = _RECOMPUTED_BYTES
    operand_format: ClassVar[OperandFormat | None] = BFLOAT16_TRIPLE

    @property
    def shared_bytes(self) -> int:
        """Four stages of A's slices, two of B's components, with two barriers each; A's rows, and flags of columns."""
        depth = 64
        of_a, of_b = 4 * (4 * self.m * (depth + 8) + 16), 2 * (_component_bytes(depth, self.n) + 16)
        return of_a + of_b + 8 * self.m + 4 * self.n

    def __str__(self) -> str:
        return "SplitSm90Tile"

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"split_sm90_{self.m}x{self.n}"


SPLIT_SM80, SPLIT_SM90 = SplitSm80Tile(64, 96), SplitSm90Tile(128, 96)
SPLIT_SM80_SLICE = 32  # K of SplitSm80Tile

TileOfParts = WarpSplitTile | SplitSm80Tile | StripTile  # whose blocks may have parts of the rows


def _tiled(
    header: str,
    name: str,
    epilogue: str,
    tile: SimtTile | WarpSplitTile | SplitSm80Tile | SplitSm90Tile | StripTile | ShortTile,
    rest: str,
    *,
    spill_bytes: int = 0,
    constants: bool = False,
) -> Entry:
    """An entry that computes tiles; ``epilogue`` is an activation, a rule or nothing."""
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
        block=str(tile),
        products=(DENSE_PRODUCT,),
        operand_format=tile.operand_format,
    )


INPUT_SIGNATURE = "const float* x[rows,k], const int* order[rows]"


def dense_forward(activation: str, tile: SimtTile | WarpSplitTile | ShortTile, *, drops: bool = False) -> Entry:
    """Outputs, or if it ``drops`` some what a dropout leaves of them."""
    rest = (
        f"{INPUT_SIGNATURE}, const float* w[k,n], const float* b[n], float* z[rows,n], float* y[rows,n], {DROPS}, "
        "int k, int n"
    )
    name, spill_bytes = "dense_forward", 176 if tile == TILES[0] else 0  # on sm_90a, before the products
    made = _tiled("dense/dense.cuh", name, activation, tile, rest, spill_bytes=spill_bytes)
    return dropping(made, name) if drops else made


_PART = f"{INPUT_SIGNATURE}, const float* w[k,n], float* partials[grid.z,rows,n], int k, int n, int part, int capacity"


def dense_forward_split_k(tile: SimtTile | WarpSplitTile | SplitSm80Tile | SplitSm90Tile) -> Entry:
    """The split-K partials of x W."""
    spill_bytes = 40 if tile in TILES[:2] else 0  # around the epilogue, not in the loop
    return _tiled("dense/split_k.cuh", "dense_forward_split_k", "", tile, _PART, spill_bytes=spill_bytes)


FEW_ROWS, FEW_SHARED_BYTES = 8, 4 * (256 * 32 + 3072)  # Few of dense/few_rows.cuh


def dense_forward_few_rows() -> Entry:
    """The split-K partials of x W for at most FEW_ROWS rows."""
    name = "dense_forward_few_rows"
    return Entry(
        name, "dense/few_rows.cuh", name, arguments(f"{ROWS}, {_PART}"), ROW_THREADS, FEW_SHARED_BYTES, blocks=2,
        block="FewRowsForward", products=(DENSE_PRODUCT,),
    )  # fmt: skip


def dense_forward_sum_partials(activation: str) -> Entry:
    signature = (
        f"{ROWS}, const float* partials[count,rows,n], const float* b[n], float* z[rows,n], float* y[rows,n], {DROPS}, "
        "int n, int count, int capacity"
    )
    function = f"dense_forward_sum_partials<{camel(activation)}>"
    name = f"dense_forward_sum_partials_{activation}"
    return Entry(
        name,
        "dense/split_k.cuh",
        function,
        arguments(signature),
        ROW_THREADS,
        4 * ROW_THREADS,
        blocks=4,
        block="PartSum",
    )


def dense_backward_input(activation: str, tile: SimtTile | WarpSplitTile, *, drops: bool = False) -> Entry:
    """dx with an activation's derivative, or if it ``drops`` some with a dropout above that, whose mask it is given."""
    rest = (
        f"const float* dz[rows,n], const float* w[k,n], const float* saved[rows,k], float* dx[rows,k], {DROPS}, "
        "float restore, int k, int n"
    )
    # Around the epilogue, not in the loop.
    spill_bytes = 176 + 48 * drops if tile in TILES[:2] else 64 if drops and isinstance(tile, WarpSplitTile) else 0
    name = "dense_backward_input"
    made = _tiled("dense/dense.cuh", name, activation, tile, rest, spill_bytes=spill_bytes)
    return dropping(made, name) if drops else made


# A few bytes outside the loop cost less than half the warps: 47 against 39 TFLOP/s on an H200.
_WEIGHT_SPILL_BYTES = 144


def dense_backward_weight(tile: SimtTile | WarpSplitTile | None) -> Entry:
    """The gradient of a weight and a bias, by a tile; or without tiles, for few columns."""
    rest = f"{INPUT_SIGNATURE}, const float* dz[rows,n], float* dw[k,n], float* db[n], int k, int n"
    if tile is None:
        name = "dense_backward_weight_small_n"
        return Entry(
            name, "dense/small_n_update.cuh", name, arguments(f"{ROWS}, {rest}"), *SMALL_N_SHAPE,
            prefetched=(("x", 0), ("order", 0)), products=(DENSE_PRODUCT,), block="SmallN",
        )  # fmt: skip
    spill_bytes = _WEIGHT_SPILL_BYTES if tile in TILES[:2] else 0
    return _tiled("dense/dense.cuh", "dense_backward_weight", "", tile, rest, spill_bytes=spill_bytes)


def update_signature(rule: str) -> str:
    """The operands of dW in a signature, and the parameters and slots that an update changes."""
    return f"{INPUT_SIGNATURE}, {gradient_signature(rule)}"


def gradient_signature(rule: str) -> str:
    """The same without x."""
    slots = slot_count(rule)
    return (
        "const float* dz[rows,n], const double* totals[2], inout float* weight[k,n], inout float* bias[n], "
        f"inout float* weight_slots[{slots},k,n], inout float* bias_slots[{slots},n], int64_t size"
    )


def dense_backward_update(rule: str, tile: SimtTile | WarpSplitTile | SplitSm80Tile | str) -> Entry:
    """The gradient of a weight and a bias, and the step of ``rule``, one of ``RULES``, along it.

    ``tile`` is one of any kind; or ``"small_n"``, without tiles; or ``"few_columns"``, without tiles for few rows and
    at most SMALL_N_COLUMNS columns; or ``"large_k"``, for at most LARGE_K_MOST_ROWS rows and LARGE_K_MOST_N columns.
    """
    rest = f"{update_signature(rule)}, int k, int n"
    header, name = "dense/update.cuh", "dense_backward_update"
    if not isinstance(tile, str):
        spill_bytes = _WEIGHT_SPILL_BYTES if tile in TILES[:2] else 0
        return _tiled(header, name, rule, tile, rest, spill_bytes=spill_bytes, constants=True)
    function, signature = f"{name}_{tile}<{rule}Rule>", arguments(f"{ROWS}, {rest}")
    entry = f"{name}_{rule}_{tile}"
    if tile == "large_k":
        return Entry(
            entry, "dense/large_k_update.cuh", function, signature, *_large_k_shape(slot_count(rule)),
            needs="sm_90a", spill_bytes=_RECOMPUTED_BYTES, constants=True, products=(DENSE_PRODUCT,),
            operand_format=BFLOAT16_TRIPLE, block=f"LargeKUpdate<{rule}Rule>",
        )  # fmt: skip
    if tile == "few_columns":
        return Entry(
            entry, "dense/small_n_update.cuh", function, signature, *FEW_COLUMNS_SHAPE, constants=True,
            prefetched=(), unawaited=True, products=(DENSE_PRODUCT,), block="FewColumns",
        )  # fmt: skip
    prefetched = tuple((name, 0) for name in ("x", "order", "weight", "bias", "weight_slots", "bias_slots"))
    return Entry(
        entry, "dense/small_n_update.cuh", function, signature, *SMALL_N_SHAPE, constants=True, prefetched=prefetched,
        unawaited=True, products=(DENSE_PRODUCT,), block="SmallN",
    )  # fmt: skip


def dense_backward_update_by_parts(rule: str, tile: TileOfParts) -> Entry:
    """The same by blocks of which each has ``part`` of the rows of a tile."""
    rest = (
        f"{update_signature(rule)}, float* partials[grid.x,grid.y,grid.z,{sums_of_part(tile)}], "
        "inout unsigned* arrived[grid.x,grid.y], int part, int k, int n"
    )
    name = "dense_backward_update_by_parts"
    entry = _tiled("dense/split_k.cuh", name, rule, tile, rest, constants=True)
    return replace(entry, block=f"UpdateByParts<{tile}>", prefetched=())


def sums_of_part(tile: TileOfParts) -> int:
    """Of a tile and of its columns: UpdateByParts of dense/split_k.cuh."""
    return (tile.m + 1) * tile.n


PARTS_SUMS = sums_of_part(WARP_SPLIT_WEIGHT)
PART_SUM_MANY, PART_SUM_THREADS = 1 << 16, 256  # PartSum of dense/split_k.cuh


def sum_partials_blocks(elements: int) -> int:
    """Blocks that add up the partial sums of so many elements, which a thread each has if they are many."""
    return ceil_div(elements, PART_SUM_THREADS if elements >= PART_SUM_MANY else WARP)


LARGE_K_ROWS, LARGE_K_MOST_N, LARGE_K_MOST_ROWS = 64, 96, 128  # of a tile: LargeKUpdate of dense/large_k_update.cuh


def _large_k_shape(slots: int) -> tuple[int, int]:
    """Threads and shared bytes of a block."""
    groups, stages, depth = 2 if slots < 2 else 1, 12, 32
    ring = stages * (4 * depth * (LARGE_K_ROWS + 4) + 16)
    sums, barriers = groups * 4 * LARGE_K_ROWS * LARGE_K_MOST_N, 8 * 2 * groups
    shared = _component_bytes(LARGE_K_MOST_ROWS, LARGE_K_MOST_N) + sums + ring + barriers
    return (groups + 3) * 128, shared + 8 * LARGE_K_MOST_ROWS + 4 * LARGE_K_MOST_N


SMALL_N_ROWS, SMALL_N_COLUMNS = 8, 16
SMALL_N_BATCH = 512  # rows at a time, of 16 columns
SMALL_N_SHAPE = 256, 4 * (1024 * 10 + 4)  # threads and shared bytes of a block
FEW_COLUMNS_SHAPE = 64, 4 * 65 * SMALL_N_COLUMNS  # FewColumns of dense/small_n_update.cuh


def small_n_grid(k: int, n: int) -> tuple[int, int, int]:
    """Blocks of the update without tiles, for a weight (k, n) and a bias."""
    return ceil_div(k + 1, SMALL_N_ROWS), ceil_div(n, SMALL_N_COLUMNS), 1


def few_columns_grid(k: int) -> tuple[int, int, int]:
    """Blocks of the update of a weight of few columns by few rows."""
    return ceil_div(k, FEW_COLUMNS_SHAPE[0]), 1, 1


def update_layers(rule: str, tile: WarpSplitTile | None, *, by_parts: bool = False) -> Entry:
    """The update of several layers at once, without tiles or by one, whose blocks may have parts of the rows; what
    layers read lies in one array of outputs and one of deltas.

    Its launches tell the lengths ``inputs`` of a row, ``hidden`` and ``deltas``, the columns of both arrays that it
    reads, and the ``products`` of a row; ``moved`` are the parameters of its layers.  Where blocks have parts of the
    rows they tell ``slices``: of rows, that a multiprocessor goes through, as :func:`..select.counted.slices_in_turn`
    counts them.
    """
    signature = (
        f"{ROWS}, const UpdatedLayer* described[layer_count], int layer_count, const float* inputs[rows,inputs], "
        "const int* order[rows], const float* outputs[rows,hidden], const float* deltas[rows,deltas], "
        f"const double* totals[2], inout float* parameters[moved], inout float* slots[{slot_count(rule)},moved], "
        "int64_t size, int capacity"
    )
    if by_parts:
        signature += f", float* partials[grid.x,{PARTS_SUMS}], inout unsigned* arrived[grid.x]"
    tiled = f"UpdateByParts<{tile}>" if by_parts else str(tile)
    way, name = ("SmallN", "small_n") if tile is None else (tiled, tile.name + "_by_parts" * by_parts)
    known = ("described", "inputs", "order", "outputs", "parameters", "slots") if tile is None else ("described",)
    return Entry(
        f"update_layers_{rule}_{name}", "fused/update_layers.cuh",
        f"update_layers<{rule}Rule, {way}>", arguments(signature),
        *(SMALL_N_SHAPE if tile is None else (tile.threads, tile.shared_bytes)), constants=True,
        products=(Product(("rows", "products")),), block=way, main_loop=tile.main_loop if tile else None,
        prefetched=tuple((name, 0) for name in known),
    )  # fmt: skip


FEW_PART, FEW_COLUMNS = 512, 256  # of a block, at most: FewRowsUpdate
STREAM_PART, STREAM_COLUMNS = 704, 96  # StreamUpdate of dense/few_rows_stream.cuh
STREAM_THREADS, STREAM_PLACES, STREAM_STAGES = 480, 46080, 12
STREAM_SHARED_BYTES = 4 * (STREAM_PLACES + 2 * FEW_ROWS * STREAM_PART + 2 * 2 * STREAM_STAGES)


def dense_update_few_rows(rule: str, *, stream: bool = False) -> Entry:
    """The update by at most FEW_ROWS rows, which leaves the split-K partials of the next step's z.

    A kernel that streams the weight is for at most STREAM_COLUMNS columns.
    """
    sizes = "float* partials[grid.x,rows,n], int k, int n, int part, int capacity"
    signature = f"const Step* step[0], {update_signature(rule)}, {sizes}"
    name = "dense_update_stream" if stream else "dense_update_few_rows"
    return Entry(
        f"{name}_{rule}",
        "dense/few_rows_stream.cuh" if stream else "dense/few_rows_update.cuh",
        f"{name}<{rule}Rule>",
        arguments(signature),
        STREAM_THREADS if stream else ROW_THREADS,
        STREAM_SHARED_BYTES if stream else 4 * 2 * FEW_ROWS * FEW_PART,
        blocks=1 if stream else 2,
        needs="sm_90a" if stream else "sm_75",
        block="StreamUpdate" if stream else "FewRowsUpdate",
        constants=True,
        products=(replace(DENSE_PRODUCT, when=("dz",)), replace(DENSE_PRODUCT, when=("partials",))),
    )


def few_rows_grid(k: int, n: int, part: int) -> tuple[int, int, int]:
    """Blocks of the update of a weight (k, n) by few rows."""
    return ceil_div(k, part), ceil_div(n, FEW_COLUMNS), 1


def dense_backward_atomic() -> Entry:
    signature = (
        f"{ROWS}, const float* x[rows,k], const float* dz[rows,n], const float* w[k,n], float* dw[k,n], float* db[n], "
        "inout float* dx[rows,k], int k, int n"
    )
    name, products = "dense_backward_atomic", (DENSE_PRODUCT, replace(DENSE_PRODUCT, when=("dx",)))
    return Entry(
        name,
        "dense/atomic.cuh",
        name,
        arguments(signature),
        256,
        3 * 32 * 33 * 4,
        products=products,
        block="AtomicTile",
    )


def dense_entries() -> list[Entry]:
    """The entries of dense layers whose operands are float32."""
    split_k: tuple[SimtTile | WarpSplitTile | SplitSm80Tile | SplitSm90Tile, ...]
    split_k = (*TILES, *WARP_SPLIT_TILES, SPLIT_SM80, SPLIT_SM90)
    entries = [*(dense_forward_split_k(tile) for tile in split_k), dense_forward_few_rows()]
    of_weights: tuple[SimtTile | WarpSplitTile | None, ...] = (*TILES, WARP_SPLIT_WEIGHT, None)
    entries += [dense_backward_weight(tile) for tile in of_weights]
    row_tiles: tuple[SimtTile | WarpSplitTile, ...] = (*TILES, *WARP_SPLIT_TILES)
    for activation in ACTIVATIONS:
        for tile, drops in product(row_tiles, (False, True)):
            entries.append(dense_forward(activation, tile, drops=drops))
            entries.append(dense_backward_input(activation, tile, drops=drops))
        entries += [dense_forward(activation, tile, drops=drops) for tile in SHORT_TILES for drops in (False, True)]
        entries.append(dense_forward_sum_partials(activation))
    tiles: tuple[SimtTile | WarpSplitTile | SplitSm80Tile | str, ...] = (
        *TILES, WARP_SPLIT_WEIGHT, SPLIT_SM80, "small_n", "few_columns", "large_k",
    )  # fmt: skip
    entries += [dense_backward_update(rule, tile) for rule in RULES for tile in tiles]
    of_parts: tuple[TileOfParts, ...] = WARP_SPLIT_WEIGHT, SPLIT_SM80, *STRIPS
    entries += [dense_backward_update_by_parts(rule, tile) for rule in RULES for tile in of_parts]
    entries += [update_layers(rule, tile) for rule in RULES for tile in (None, WARP_SPLIT_WEIGHT)]
    entries += [update_layers(rule, WARP_SPLIT_WEIGHT, by_parts=True) for rule in RULES]
    entries += [dense_update_few_rows(rule, stream=stream) for rule in RULES for stream in (False, True)]
    return [*entries, dense_backward_atomic()]
