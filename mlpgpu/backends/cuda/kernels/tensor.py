"""Dense layers on tensor cores: the products of ``dense/tensor_dense.cuh``, made by ``gemm/gemm_sm80.cuh`` or
``gemm/gemm_sm90.cuh``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ....activations import ACTIVATIONS
from ...sources import camel
from .entry import DENSE_PRODUCT, DROPS, ROW_THREADS, ROWS, Entry, Product, arguments, ceil_div, dropping
from .losses import LOSS_SUMS, SUMS_OF_TERMS, reads_numbers
from .operand_format import BFLOAT16_PAIR, BFLOAT16_TRIPLE, HALF, HALF_PAIR, OPERAND_FORMATS, OperandFormat
from .updates import RULES, slot_count

LOSS_COLUMNS = 8  # a product that ends with a loss has a multiple of these: vectors of a component
PREFETCH_A, PREFETCH_B, PREFETCH_EPILOGUE = 1, 2, 4  # of common/dependent_launch.cuh


@dataclass(frozen=True)
class Sm80Tile:
    """How gemm/gemm_sm80.cuh makes a product of components: blocks with tiles of C, m by n.

    Attributes:
        main_loop: where its struct is defined.
        source: the C type of the arguments that are its operands.
    """

    operand_format: OperandFormat
    m: int
    n: int

    main_loop = "gemm/gemm_sm80.cuh"
    source = "const uint16_t*"
    threads = 256
    cluster = 1
    needs = "sm_80"
    spill_bytes = 0
    pdl = False
    K = 32

    @property
    def stages(self) -> int:
        return 4 // self.operand_format.components

    @property
    def blocks(self) -> int:
        """How many blocks fit on a multiprocessor at once."""
        return 1 if self.m == 128 else 2

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"{self.operand_format.name}_{self.m}x{self.n}"

    def column_partials(self, m: int) -> int | None:
        """This main loop leaves no partial sums of the bias's gradient."""
        return None

    def with_light_epilogue(self) -> Sm80Tile:
        """This tile, which is the same whatever its epilogue does."""
        return self

    @property
    def struct(self) -> str:
        """The product of dense/tensor_dense.cuh."""
        return f"GemmSm80<{self.operand_format.struct}, Sm80Tile<{self.m}, {self.n}, {self.stages}>>"

    def shared_bytes(self, *, a_inner: bool, b_inner: bool) -> int:
        """The stages, each with a slice of every component, whose rows along the contiguous index are padded by 8."""
        sides = ((self.m, a_inner), (self.n, b_inner))
        slices = (m * (self.K + 8) if inner else self.K * (m + 8) for m, inner in sides)
        return 2 * self.stages * self.operand_format.components * sum(slices)

    def grid(self, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return ceil_div(m, self.m), ceil_div(n, self.n), 1


@dataclass(frozen=True)
class Sm90Tile:
    """How gemm/gemm_sm90.cuh makes a product of components: a block for each multiprocessor takes one tile of C after
    another.

    Attributes:
        across: warpgroups that share 64 rows.  Two finish the epilogue of a small tile in half the time, and read a
            third more of shared memory for its product; four in a quarter, and read two thirds more.
    """

    operand_format: OperandFormat
    m: int
    n: int
    across: int = 1

    main_loop = "gemm/gemm_sm90.cuh"
    source = "const TensorMap*"
    needs = "sm_90a"
    blocks = 1
    spill_bytes = 80  # in the epilogue, of scaled formats, and of three components where four warpgroups share rows
    pdl = True  # programmatic dependent launch
    K = 64

    @property
    def threads(self) -> int:
        """The threads of the producer's warpgroup and of the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.m // 64 * self.across

    @property
    def cluster(self) -> int:
        """Blocks that share their part of B.  Of four and more, too few fit on the card at once; two or three tiles of
        64 rows took longer so wherever they were measured.  Half of 192 columns would be no whole boxes."""
        return 2 if self.m == 128 and self.n % 128 == 0 else 1

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory holds, for more than 6 gain nothing but where they are small."""
        enough = max(6, ceil_div(self.ON_THEIR_WAY, self.stage_bytes))
        return min(enough, (self.SHARED_BYTES - self._staging_bytes) // (self.stage_bytes + self.BARRIER_BYTES))

    ON_THEIR_WAY = 64 << 10  # bytes of stages, at least: 64 a clock from the cache, for the 1,000 clocks that they take
    BARRIER_BYTES, END_BYTES = 16, 16  # of a stage's barriers, and of the one after them
    SHARED_BYTES = (227 << 10) - 1024 - END_BYTES  # of a block, less what aligning the stages may take

    @property
    def _staging_bytes(self) -> int:
        """A staging tile of 16 rows of up to 32 floats, padded by 8, for each of a consumer's four warps."""
        return 4 * 16 * (min(32, self.n // self.across) + 8) * 4 * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Bytes of a slice of A and one of B."""
        return 2 * self.K * self.operand_format.components * (self.m + self.n)

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"{self.operand_format.name}_sm90_{self.m}x{self.n}" + "_across_4" * (self.across == 4)

    @property
    def struct(self) -> str:
        """The product of dense/tensor_dense.cuh."""
        shape = f"{self.operand_format.struct}, {self.m}, {self.n}, {self.stages}, {self.cluster}, {self.across}"
        return f"GemmSm90<Sm90Tile<{shape}>>"

    def shared_bytes(self, *, a_inner: bool, b_inner: bool) -> int:
        """The staging tiles, then the stages, aligned to 1024, and their barriers."""
        return self._staging_bytes + 1024 + self.stages * (self.stage_bytes + self.BARRIER_BYTES) + self.END_BYTES

    def boxes(self, *, a_inner: bool, b_inner: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of the components of A and of B, stored along k or not, that the kernel copies at once."""
        a = (self.m, 64) if a_inner else (self.K, 64)
        return a, (self.n // self.cluster, 64) if b_inner else (self.K, min(64, self.n))

    def with_light_epilogue(self) -> Sm90Tile:
        """The tile of a product whose epilogue does little: one warpgroup will do for one component without scales."""
        return replace(self, across=1) if self.operand_format.is_single and self.across == 2 else self

    def column_partials(self, m: int) -> int | None:
        """How many partial sums of the bias's gradient a product leaves for a weight (m, n); None of scaled formats."""
        tiles = ceil_div(m, self.m)
        return None if self.operand_format.scaled else tiles * self.summing_warps(tiles)

    @staticmethod
    def summing_warps(tiles: int) -> int:
        """Warps of a block that sum the bias's gradient, where so many tiles share the rows of a slice."""
        return 3 if tiles <= 8 else 1

    def clusters(self, m: int, n: int) -> int:
        """Clusters of tiles of an m by n product."""
        return ceil_div(m, self.m * self.cluster) * ceil_div(n, self.n)

    def grid(self, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return self.cluster * min(self.clusters(m, n), max(1, multiprocessors // self.cluster)), 1, 1


@dataclass(frozen=True)
class ClusterSplitTile:
    """How gemm/cluster_split.cuh makes a product: a cluster of blocks for each tile of C.

    Each block has a part of the terms, which of a weight's gradient are the rows.

    Attributes:
        split: blocks of a cluster.
        side: rows of a tile, and columns unless it is wide.
        is_wide: whether a tile has twice as many columns as rows, so that blocks read operands less often, and memory
            has longer pieces of rows.
        shares_k: whether it makes activations, by no more blocks than there are multiprocessors, so that each may have
            more of its operands in flight.
    """

    operand_format: OperandFormat
    split: int
    side: int = 64
    is_wide: bool = False
    shares_k: bool = False

    across = 1
    main_loop = "gemm/cluster_split.cuh"
    source = "const TensorMap*"
    needs = "sm_90a"
    spill_bytes = 156  # in the epilogue: of scaled formats, and of four quads at once by Adam, which takes less time so
    pdl = True
    K = 64

    @property
    def blocks(self) -> int:
        """How many blocks fit on a multiprocessor at once: as many as the sums in registers allow.

        There is one of large tiles, and one of three components whose blocks share k, each with more stages.
        """
        if self.side > 64 or (self.operand_format.components == 3 and self.split > 1):
            return 1
        return 3 if self.operand_format.components == 1 and not (self.is_wide or self.shares_k) else 2

    def at_once(self, multiprocessors: int) -> int:
        """How many blocks are on a card at once: where each has a multiprocessor to itself, clusters of four and eight
        leave some idle, 12 of 132 of an H100."""
        room = self.blocks * multiprocessors
        return room * 10 // 11 if self.blocks == 1 and self.split > 2 else room

    @property
    def m(self) -> int:
        """Rows of a tile."""
        return self.side

    @property
    def n(self) -> int:
        """Columns of a tile."""
        return 2 * self.side if self.is_wide else self.side

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.side // 64

    @property
    def threads(self) -> int:
        """Of a block: the producer's warpgroup and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def cluster(self) -> int:
        """Blocks that share their memory."""
        return self.split

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as the memory of that many blocks holds."""
        if self.side > 64:
            return 6 // self.operand_format.components
        return {1: 6 if self.shares_k else 4, 2: 3, 3: 2 if self.blocks > 1 else 4}[self.operand_format.components]

    @property
    def stage_bytes(self) -> int:
        """Bytes of a slice of A and one of B."""
        return 2 * self.K * self.operand_format.components * (self.m + self.n)

    @property
    def name(self) -> str:
        """The tile as part of an entry's name."""
        return f"{self.operand_format.name}_sm90_{self.m}x{self.n}_by_{self.split}"

    @property
    def struct(self) -> str:
        """The product of dense/tensor_dense.cuh."""
        tile = f"Sm90Tile<{self.operand_format.struct}, {self.m}, {self.n}, {self.stages}, 1, {self.across}>"
        return f"GemmClusterSplit<{tile}, {self.split}>"

    def shared_bytes(self, *, a_inner: bool, b_inner: bool) -> int:
        """The stages, aligned to 1024, and their barriers."""
        return 1024 + self.stages * (self.stage_bytes + 16)

    def boxes(self, *, a_inner: bool, b_inner: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of the components of A and of B that the kernel copies at once."""
        return (self.K, 64), (self.K, 64)

    def with_light_epilogue(self) -> ClusterSplitTile:
        """This tile, which is the same whatever its epilogue does."""
        return self

    def column_partials(self, m: int) -> int | None:
        """How many partial sums of the bias's gradient a product leaves for a weight (m, n); None of scaled formats."""
        tiles = ceil_div(m, self.m)
        return None if self.operand_format.scaled else self.split * tiles * Sm90Tile.summing_warps(tiles)

    def clusters(self, m: int, n: int) -> int:
        """Clusters for an m by n product, of which each makes a tile."""
        return ceil_div(m, self.m) * ceil_div(n, self.n)

    def grid(self, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return self.split * self.clusters(m, n), 1, 1


GemmTile = Sm80Tile | Sm90Tile | ClusterSplitTile


def sm80_tiles(operand_format: OperandFormat) -> tuple[Sm80Tile, ...]:
    """The largest first; none of three components, which steps have on sm_90a alone."""
    if operand_format == BFLOAT16_TRIPLE:
        return ()
    small = Sm80Tile(operand_format, 64, 64)
    return (small,) if operand_format == BFLOAT16_PAIR else (Sm80Tile(operand_format, 128, 128), small)


def sm90_tiles(operand_format: OperandFormat) -> tuple[Sm90Tile, ...]:
    """The largest first: as wide as registers allow."""
    large = Sm90Tile(operand_format, 128, 128 if operand_format.components > 1 else 256)
    return large, Sm90Tile(operand_format, 64, 128, across=2)


def wide_tiles(operand_format: OperandFormat) -> tuple[Sm90Tile, ...]:
    """Those with rows of activations, one of which may do where the tiles above leave most of a card's last wave idle.

    There are none of several components, for whose sums three warpgroups have too few registers.
    """
    return () if operand_format.components > 1 else (Sm90Tile(operand_format, 64, 192, across=3),)


def medium_tiles(operand_format: OperandFormat) -> tuple[Sm90Tile, ...]:
    """Those between the largest and the others, which may fill the card's last wave where the largest leave most of it
    idle; the largest of several components are no larger."""
    return tuple(Sm90Tile(operand_format, 128, n) for n in (192, 128)) if operand_format.components == 1 else ()


def shared_tiles(operand_format: OperandFormat) -> tuple[Sm90Tile, ...]:
    """Those with rows of activations whose epilogue more warps share, for products over a short k.

    There are none of pairs of halves, whose products would wait for shared memory.
    """
    return () if operand_format == HALF_PAIR else (Sm90Tile(operand_format, 64, 128, across=4),)


def narrow_tiles(operand_format: OperandFormat) -> tuple[Sm90Tile, ...]:
    """Those of few columns, by which few rows or few columns fill the card, the widest first.

    There are none of single halves, whose networks have wide layers.
    """
    return () if operand_format == HALF else (Sm90Tile(operand_format, 64, 64), Sm90Tile(operand_format, 64, 16))


def narrow_weight_tiles(operand_format: OperandFormat) -> tuple[Sm90Tile, ...]:
    """Those that make the gradient of a weight as well: narrower ones would read x more often than they save."""
    return narrow_tiles(operand_format)[:1]


def cluster_split_tiles(operand_format: OperandFormat) -> tuple[ClusterSplitTile, ...]:
    """Those whose clusters share the rows of a weight's gradient, the fewest blocks first."""
    return tuple(ClusterSplitTile(operand_format, split) for split in (1, 2, 4, 8))


def large_cluster_tiles(operand_format: OperandFormat) -> tuple[ClusterSplitTile, ...]:
    """The same with large tiles, which read half as much from the second-level cache, the fewest blocks first.

    There are none of scaled formats, nor of three components, whose sums take too many registers.
    """
    has_room = not operand_format.scaled and operand_format.components < 3
    return tuple(ClusterSplitTile(operand_format, split, 128) for split in (2, 4, 8)) if has_room else ()


def wide_cluster_tiles(operand_format: OperandFormat) -> tuple[ClusterSplitTile, ...]:
    """Wide tiles, one for each block.

    There are none of several components, whose sums leave no room for two blocks, and of halves, which gain nothing.
    """
    return (ClusterSplitTile(operand_format, 1, is_wide=True),) if operand_format.is_single else ()


def cluster_tiles(operand_format: OperandFormat) -> tuple[ClusterSplitTile, ...]:
    """All tiles of gemm/cluster_split.cuh that make gradients of weights."""
    of_clusters = cluster_split_tiles, large_cluster_tiles, wide_cluster_tiles
    return tuple(tile for tiles_of in of_clusters for tile in tiles_of(operand_format))


def tiles_sharing_k(operand_format: OperandFormat) -> tuple[ClusterSplitTile, ...]:
    """Those whose clusters share k of a product that makes activations, the fewest blocks first."""
    return tuple(replace(tile, shares_k=True) for tile in cluster_split_tiles(operand_format)[1:])


def _tensor_product(
    name: str,
    epilogue: str,
    tile: GemmTile,
    rest: str,
    *,
    a_inner: bool,
    b_inner: bool,
    end: tuple[str, ...] = (),
    header: str = "dense/tensor_dense.cuh",
    constants: bool = False,
) -> Entry:
    """An entry of ``header``; ``epilogue`` is an activation, a rule, a loss or nothing.

    In ``rest``, SOURCE is the C type of A and of B, in this order, and COMPONENTS the number of components of an array;
    ``end`` names what the epilogue may prefetch.
    """
    kind = f"{name}_{epilogue}" if epilogue else name
    struct = f"{epilogue}Rule" if constants else camel(epilogue)
    parameters = ", ".join(filter(None, [tile.struct, struct]))
    signature = arguments(
        f"{ROWS}, {rest.replace('SOURCE', tile.source).replace('COMPONENTS', str(tile.operand_format.components))}"
    )
    a, b = [argument.name for argument in signature if argument.ctype == tile.source][:2]
    prefetched = (a, PREFETCH_A), (b, PREFETCH_B), *((each, PREFETCH_EPILOGUE) for each in end)
    return Entry(
        f"{kind}_{tile.name}",
        header,
        f"{name}<{parameters}>",
        signature,
        tile.threads,
        tile.shared_bytes(a_inner=a_inner, b_inner=b_inner),
        blocks=tile.blocks,
        spill_bytes=tile.spill_bytes,
        needs=tile.needs,
        cluster=tile.cluster,
        constants=constants,
        prefetched=prefetched if tile.pdl and "prefetch" in {argument.name for argument in signature} else None,
        main_loop=tile.main_loop,
        block=f"{tile.struct}::Block<{str(a_inner).lower()}, {str(b_inner).lower()}>",
        products=(DENSE_PRODUCT,),
        operand_format=tile.operand_format,
    )


# The operands of products.  The float32 arrays beside them are read only where split operands do not hold a number.
_X_AND_W = "SOURCE x_components[COMPONENTS,rows,k], int64_t x_stride, SOURCE w_components[COMPONENTS,k,n]"
_X_AND_DZ = (
    "SOURCE x_components[COMPONENTS,rows,k], int64_t x_stride, SOURCE dz_components[COMPONENTS,rows,n], "
    "int64_t dz_stride, const int* x_column_scales[k], const int* w_row_scales[k], "
    "const int* dz_column_scales[n], const float* x[0], const float* dz[0]"
)


# Of tiles of 192 columns, whose epilogue goes in three pieces: of biases, and of what dropouts keep as well.
WIDE_FORWARD_SPILL_BYTES = 352, 848


def tensor_forward(activation: str, tile: GemmTile, *, drops: bool = False) -> Entry:
    """Outputs, or if it ``drops`` some what a dropout leaves of them."""
    rest = (
        f"{_X_AND_W}, const int* x_row_scales[rows], const int* w_column_scales[n], const float* x[0], "
        "const float* w[0], const float* b[n], float* z[rows,n], float* y[rows,n], "
        f"uint16_t* y_components[COMPONENTS,rows,n], int64_t y_stride, {DROPS}, int prefetch, int k, int n"
    )
    name, tile = "tensor_forward", tile.with_light_epilogue()
    made = _tensor_product(name, activation, tile, rest, a_inner=True, b_inner=False, end=("b",))
    if isinstance(tile, Sm90Tile) and tile.n == 192:
        made = replace(made, spill_bytes=WIDE_FORWARD_SPILL_BYTES[drops])
    return dropping(made, name) if drops else made


def tensor_forward_loss(loss: str, tile: GemmTile) -> Entry:
    """The last layer and a loss, which is one of ``SUMS_OF_TERMS``."""
    rest = (
        f"{_X_AND_W}, const float* b[n], const int* order[rows], const float* targets[rows,n], "
        f"const float* weights[rows], {LOSS_SUMS}, uint16_t* delta_components[COMPONENTS,rows,n], int k, int n"
    )
    name, header = "tensor_forward_loss", "dense/tensor_loss.cuh"
    entry = _tensor_product(name, loss, tile, rest, a_inner=True, b_inner=False, header=header)
    return replace(entry, loss_numbers=reads_numbers(loss))


def tensor_backward_input(activation: str, tile: GemmTile, *, drops: bool = False) -> Entry:
    """dx with an activation's derivative, or if it ``drops`` some with a dropout above that, whose mask it is given."""
    rest = (
        "SOURCE dz_components[COMPONENTS,rows,n], int64_t dz_stride, SOURCE w_components[COMPONENTS,k,n], "
        "const int* dz_row_scales[rows], const int* w_row_scales[k], const float* dz[0], const float* w[0], "
        "const float* saved[rows,k], const uint16_t* saved_components[COMPONENTS,rows,k], float* dx[rows,k], "
        f"uint16_t* dx_components[COMPONENTS,rows,k], int64_t dx_stride, {DROPS}, float restore, int prefetch, int k, "
        "int n"
    )
    name, tile, end = "tensor_backward_input", tile.with_light_epilogue(), ("saved", "saved_components")
    made = _tensor_product(name, activation, tile, rest, a_inner=True, b_inner=True, end=end)
    return dropping(made, name) if drops else made


def tensor_backward_weight(tile: GemmTile) -> Entry:
    rest = f"{_X_AND_DZ}, float* dw[k,n], float* db_partials[0], int prefetch, int k, int n"
    return _tensor_product("tensor_backward_weight", "", tile, rest, a_inner=False, b_inner=False)


RECEIVED_SPILL_BYTES = 304  # more than others: a quad of the other gradient beside the optimizer's


def tensor_backward_update(rule: str, tile: GemmTile, *, receives: bool = False) -> Entry:
    """It ``receives`` the gradient of the other one of two shards, which it adds to its own."""
    slots = slot_count(rule)
    rest = (
        f"{_X_AND_DZ}, const float* db[n], float* db_partials[0], const double* totals[2], inout float* weight[k,n], "
        f"inout float* bias[n], uint16_t* w_components[COMPONENTS,k,n], inout float* weight_slots[{slots},k,n], "
        f"inout float* bias_slots[{slots},n], int64_t size, int prefetch, int k, int n"
        + ", const float* received[k,n]"
        * receives
    )
    name, end, header = "tensor_backward_update", ("totals", "weight", "weight_slots"), "dense/tensor_update.cuh"
    made = _tensor_product(name, rule, tile, rest, a_inner=False, b_inner=False, end=end, header=header, constants=True)
    if not receives:
        return made
    function, spilled = made.function.removesuffix(">") + ", true>", made.spill_bytes + RECEIVED_SPILL_BYTES
    return replace(made, name=made.name.replace(name, f"{name}_received", 1), function=function, spill_bytes=spilled)


def move_weight(rule: str, operand_format: OperandFormat) -> Entry:
    """The step of a weight whose gradients of two shards are stored; it writes operands of a format without scales."""
    signature = (
        "const Step* step[0], const double* totals[2], const float* gradient[k,n], const float* received[k,n], "
        f"inout float* weight[k,n], uint16_t* w_components[{operand_format.components},k,n], "
        f"inout float* weight_slots[{slot_count(rule)},k,n], int64_t size, int k, int n"
    )
    function = f"move_weight<{operand_format.struct}, {rule}Rule>"
    name, header = f"move_weight_{rule}_{operand_format.name}", "dense/tensor_update.cuh"
    return Entry(name, header, function, arguments(signature), ROW_THREADS, constants=True)


def tensor_backward_updates(rule: str, tile: ClusterSplitTile, count: int) -> Entry:
    """The updates of so many layers, of a format without scales; arguments of a layer have its number behind them."""
    slots, components = slot_count(rule), tile.operand_format.components
    of_layer = (
        f"const TensorMap* x_components_#[{components},rows,k_#], "
        f"const TensorMap* dz_components_#[{components},rows,n_#], const uint16_t* dz_#[0], "
        "inout float* weight_#[k_#,n_#], inout float* bias_#[n_#], "
        f"uint16_t* w_components_#[{components},k_#,n_#], inout float* weight_slots_#[{slots},k_#,n_#], "
        f"inout float* bias_slots_#[{slots},n_#], int k_#, int n_#, int first_#"
    )
    layers = [of_layer.replace("#", str(number)) for number in range(count)]
    common = f"{ROWS}, const double* totals[2], int64_t size, int capacity, int prefetch"
    bits = {"x_components": PREFETCH_A, "dz_components": PREFETCH_B}
    bits |= dict.fromkeys(("weight", "weight_slots"), PREFETCH_EPILOGUE)
    known = ((f"{name}_{number}", bit) for number in range(count) for name, bit in bits.items())
    return Entry(
        f"tensor_backward_updates_{count}_{rule}_{tile.name}", "fused/tensor_updates.cuh",
        f"tensor_backward_updates<{tile.struct}, {rule}Rule>", arguments(", ".join((common, *layers))), tile.threads,
        tile.shared_bytes(a_inner=False, b_inner=False), blocks=tile.blocks, spill_bytes=tile.spill_bytes,
        needs=tile.needs, cluster=tile.cluster, constants=True, prefetched=(("totals", PREFETCH_EPILOGUE), *known),
        main_loop=tile.main_loop, block=f"{tile.struct}::Block<false, false>",
        products=tuple(Product(("rows", f"k_{number}", f"n_{number}")) for number in range(count)),
        operand_format=tile.operand_format, gathered=("MovedLayer", len(arguments(layers[0]))),
    )  # fmt: skip


def tensor_entries() -> list[Entry]:
    """The entries of products of split operands, of any format."""
    entries = [move_weight(rule, each) for rule in RULES for each in OPERAND_FORMATS if not each.scaled]
    for operand_format in OPERAND_FORMATS:
        usual: tuple[GemmTile, ...] = (
            *sm80_tiles(operand_format), *sm90_tiles(operand_format), *medium_tiles(operand_format)
        )  # fmt: skip
        for tile in (*usual, *narrow_weight_tiles(operand_format), *cluster_tiles(operand_format)):
            entries.append(tensor_backward_weight(tile))
            entries += [
                tensor_backward_update(rule, tile, receives=receives) for rule in RULES for receives in (False, True)
            ]
            if isinstance(tile, ClusterSplitTile) and not operand_format.scaled:
                entries += [tensor_backward_updates(rule, tile, 2) for rule in RULES]
        others = (*wide_tiles(operand_format), *shared_tiles(operand_format), *narrow_tiles(operand_format))
        for tile in (*usual, *others, *tiles_sharing_k(operand_format)):
            for drops, activation in product((False, True), ACTIVATIONS):
                entries.append(tensor_forward(activation, tile, drops=drops))
                entries.append(tensor_backward_input(activation, tile, drops=drops))
            if operand_format.is_single and isinstance(tile, (Sm80Tile, Sm90Tile)):
                entries += [tensor_forward_loss(loss, tile) for loss in SUMS_OF_TERMS]
    return entries
