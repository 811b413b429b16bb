"""Which kernel makes each product of a dense layer: forward, dx, and dW with or without the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import kernels
from ..kernels import (
    WARP_SPLIT_TILES,
    ClusterSplitTile,
    GemmTile,
    ShortTile,
    SimtTile,
    Sm90Tile,
    SplitSm80Tile,
    SplitSm90Tile,
    StripTile,
    WarpSplitTile,
    ceil_div,
    filled_rows,
)
from . import thresholds
from .counted import (
    few_columns_clocks,
    grouped_share_clocks,
    head_clocks,
    input_clocks,
    is_faster,
    operand_clocks,
    partials_clocks,
    parts_clocks,
    parts_of_rows,
    parts_of_strips,
    pass_clocks,
    plain_whole_batch_clocks,
    short_clocks,
    simt_clocks,
    slices_in_turn,
    staged_pass_clocks,
    streamed_clocks,
    update_clocks,
    whole_batch_clocks,
)
from .setting import Verdict, Work
from .tiles import fills, gemm_tile, product_tile, simt_tile, small_batch_tile, step_tile, weight_tile


@dataclass(frozen=True)
class Simt:
    """Multiply-adds outside the tensor cores, a tile of C for each block."""

    tile: SimtTile
    why: str

    def __str__(self) -> str:
        return f"simt {self.tile.name}"


@dataclass(frozen=True)
class Short:
    """Multiply-adds over few terms, in a step of many rows: the part of W of a tile of C lies in registers."""

    tile: ShortTile
    why: str

    def __str__(self) -> str:
        return f"simt {self.tile.m}x{self.tile.n} over at most {self.tile.k} terms"


@dataclass(frozen=True)
class WarpSplit:
    """Multiply-adds by small tiles whose warps share k, in a step: for few rows, or for a small weight, whose k are
    the rows.  An evaluation has none: there every z is one chain over k, so that the bits of a row do not depend on
    how many go with it."""

    tile: WarpSplitTile
    why: str

    def __str__(self) -> str:
        return f"warp split {self.tile.m}x{self.tile.n}"


def _of_tile(tile: SimtTile | WarpSplitTile, why: str) -> Simt | WarpSplit:
    return Simt(tile, why) if isinstance(tile, SimtTile) else WarpSplit(tile, why)


@dataclass(frozen=True)
class Gemm:
    """Tensor cores, on operands in a format of theirs: gemm_sm80, gemm_sm90 or cluster_split.

    Attributes:
        sums_columns: whether a product for a weight's gradient may sum the bias's beside it.
    """

    tile: GemmTile
    why: str
    sums_columns: bool = True

    def __str__(self) -> str:
        if isinstance(self.tile, ClusterSplitTile):
            return f"cluster split {self.tile.m}x{self.tile.n} by {self.tile.split}"
        return f"{'gemm_sm90' if self.tile.needs == 'sm_90a' else 'gemm_sm80'} {self.tile.m}x{self.tile.n}"

    @property
    def leaves_bias(self) -> bool:
        """Whether a product for a weight's gradient leaves partial sums of the bias's."""
        return self.sums_columns and self.tile.column_partials(1) is not None


@dataclass(frozen=True)
class SplitK:
    """``count`` partial sums, each over ``part`` of k, which a second kernel adds up.

    ``tile`` is of multiply-adds, or of operands that tensor cores split inside the product; None for few rows.
    """

    part: int
    count: int
    tile: SimtTile | WarpSplitTile | SplitSm80Tile | SplitSm90Tile | None
    why: str

    def __str__(self) -> str:
        kind = {
            SimtTile: "simt", WarpSplitTile: "warp split", SplitSm80Tile: "split_sm80", SplitSm90Tile: "split_sm90",
        }  # fmt: skip
        made = "few rows" if self.tile is None else f"{kind[type(self.tile)]} {self.tile.m}x{self.tile.n}"
        return f"split-K, {self.count} partial sums over {self.part} of k, {made}"


@dataclass(frozen=True)
class UpdateByParts:
    """An update by tiles whose warps share rows, of each ``parts`` blocks, which have ``part`` of the batch's rows."""

    tile: WarpSplitTile
    parts: int
    part: int
    why: str

    def __str__(self) -> str:
        return f"warp split {self.tile.m}x{self.tile.n}, {self.parts} parts of {self.part} rows"


@dataclass(frozen=True)
class Strips:
    """An update of few columns or rows by strips; ``parts`` as of :class:`UpdateByParts`."""

    tile: StripTile
    parts: int
    part: int
    why: str

    def __str__(self) -> str:
        return f"strips {self.tile.m}x{self.tile.n}, {self.parts} parts of {self.part} rows"


@dataclass(frozen=True)
class Atomic:
    """Both products of the backward pass in one kernel, whose blocks add to memory."""

    why: str

    def __str__(self) -> str:
        return "atomic"


@dataclass(frozen=True)
class SmallN:
    """The gradient of a weight without tiles: each block has some rows of W."""

    why: str

    def __str__(self) -> str:
        return "small n"


@dataclass(frozen=True)
class FewColumns:
    """An update of few columns by few rows of the batch: a thread has a row of W."""

    why: str

    def __str__(self) -> str:
        return "few columns"


@dataclass(frozen=True)
class FewRows:
    """An update whose blocks keep the whole batch, each with so much of k; ``stream`` takes W through shared memory."""

    part: int
    stream: bool
    why: str

    def __str__(self) -> str:
        way = "W streams through shared memory" if self.stream else "W passes through registers"
        return f"few rows, {way}, {self.part} rows of W per block"


@dataclass(frozen=True)
class WholeBatch:
    """Products of few rows by one pass over W, whose blocks keep at most ``rows`` rows; dx and the update are one.

    ``split`` blocks of a forward product have the same ``columns``, each a part of k.  Tensor cores multiply so many
    ``components`` of a number, or none where plain cores multiply.  Where nobody reads dx, W may be moved as a flat
    array by blocks for at most ``flat`` rows.
    """

    rows: int
    why: str
    columns: int = 16
    split: int = 1
    components: int = 0
    flat: int | None = None

    def __str__(self) -> str:
        made = f"whole batch of {self.rows} rows" + f", k by {self.split} blocks" * (self.split > 1)
        return made + f", tensor cores by {self.components} components" * (self.components > 0)


@dataclass(frozen=True)
class LargeK:
    """An update by one block a multiprocessor, which keeps dz split and goes through tiles of W's rows."""

    why: str

    def __str__(self) -> str:
        return "large k"


@dataclass(frozen=True)
class SplitOperands:
    """An update by tensor cores, whose product splits its operands itself; ``parts`` as of :class:`UpdateByParts`."""

    tile: SplitSm80Tile
    parts: int
    part: int
    why: str

    def __str__(self) -> str:
        of_parts = f", {self.parts} parts of {self.part} rows" if self.parts > 1 else ""
        return f"split_sm80 {self.tile.m}x{self.tile.n}{of_parts}"


SmallUpdate = WarpSplit | UpdateByParts | SmallN  # those that one launch may make of several layers
Forward = Simt | Short | WarpSplit | SplitK | WholeBatch | Gemm
Input = Simt | WarpSplit | WholeBatch | Gemm | Atomic
Update = (
    Simt | WarpSplit | UpdateByParts | Strips | Gemm | Atomic | SmallN | FewColumns | FewRows | WholeBatch | LargeK
    | SplitOperands
)  # fmt: skip


@dataclass(frozen=True)
class DensePath:
    """The kernels of a dense layer; an evaluation has a forward product alone.

    Attributes:
        dx: of the gradient by the layer's input.
        update: of the gradient by its weight; where products update in place, with the optimizer's step.  A frozen
            layer has none.
    """

    forward: Forward
    dx: Input | None
    update: Update | None

    @property
    def products(self) -> dict[str, Forward | Input | Update]:
        """The products that the layer has, by name."""
        named = {"forward": self.forward, "dx": self.dx, "update": self.update}
        return {name: product for name, product in named.items() if product is not None}

    @property
    def why(self) -> str:
        return "; ".join(f"{name}: {product.why}" for name, product in self.products.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} {product}" for name, product in self.products.items())


def is_cut(k: int, n: int) -> bool:
    """Whether a product over k is cut into parts, which follows from the widths alone, as its bits do."""
    return k >= thresholds.SPLIT_K_LEAST_K and n <= thresholds.SPLIT_K_MOST_N


def is_wide(k: int, n: int) -> bool:
    """Whether tensor cores make the products of a layer, if there are enough rows."""
    width, weights = thresholds.GEMM_LEAST_WIDTH, thresholds.GEMM_LEAST_WEIGHTS
    return min(k, n) >= width and k * n >= weights and not is_cut(k, n)


def part_length(k: int, n: int) -> int:
    """How much of k each part of a product that is cut takes."""
    parts = thresholds.MOST_PARTS // ceil_div(n, thresholds.PART_COLUMNS)
    return max(thresholds.PART_LEAST_K, 16 * ceil_div(k, 16 * parts))


def split_part_length(k: int) -> int:
    """How much of k each partial sum takes, where the kernel splits operands."""
    of_slices = thresholds.SPLIT_OPERANDS_SLICE
    return max(thresholds.PART_LEAST_K, of_slices * ceil_div(k, of_slices * thresholds.SPLIT_OPERANDS_MOST_PARTS))


def on_tensor_cores(k: int, n: int, work: Work) -> bool:
    """Whether tensor cores make all products of a layer.

    In an evaluation the widths alone decide: the bits of a row must not depend on how many go with it.
    """
    if work.operand_format is None:
        return False
    if not work.is_training:
        return is_wide(k, n)
    if keeps_whole_batch(k, n, work):
        return False
    return _is_large(k, n, work) or bool(_on_narrow_tiles(k, n, work))


def fills_by_rows(k: int, n: int, work: Work) -> bool:
    """Whether a step has so many rows that a layer that is split along k fills a card without that, on tensor cores."""
    operand_format = work.operand_format
    if not (work.is_training and _has_narrow_tiles(work)) or operand_format is None or not is_cut(k, n):
        return False
    least_n = thresholds.UNCUT_LEAST_N_OF_SCALED if operand_format.scaled else thresholds.UNCUT_LEAST_N
    columns, share = (128, 2) if operand_format.scaled else (thresholds.UNCUT_COLUMNS, 3)  # of a tile; of the card
    tiles = ceil_div(work.rows, 64) * ceil_div(n, columns)
    return n >= least_n and share * tiles >= work.setting.multiprocessors


def may_be_uncut(k: int, n: int, work: Work) -> bool:
    """Whether counts say if a step multiplies a layer on tensor cores, which is split along k else.

    So it is not of the fewest columns, unless operands are single 16-bit numbers, nor of a longer k whose update keeps
    dz in a block.
    """
    operand_format = work.operand_format
    if not (work.is_training and _has_narrow_tiles(work)) or operand_format is None or not is_cut(k, n):
        return False
    if k > thresholds.CUT_MOST_K and _keeps_delta(n, work):
        return False
    is_counted = thresholds.CUT_LAYERS_ARE_COUNTED and thresholds.LAYERS_ARE_COUNTED_TOGETHER
    suits = operand_format.is_single or n >= thresholds.SPLIT_OPERANDS_LEAST_N
    return is_counted and suits and work.rows >= thresholds.NARROW_LEAST_ROWS


def _is_large(k: int, n: int, work: Work) -> bool:
    """Whether a step's products are on tensor cores without a count."""
    return is_wide(k, n) and work.rows >= thresholds.GEMM_LEAST_ROWS


def _has_narrow_tiles(work: Work) -> bool:
    return thresholds.NARROW_TILES_ARE_USED and work.setting.arch == Sm90Tile.needs


def _on_narrow_tiles(k: int, n: int, work: Work) -> Verdict:
    """Whether a step on few rows or weights is on tensor cores, since they are counted to take far less, and why."""
    if not _has_narrow_tiles(work):
        return Verdict(False, "narrow tiles are switched off, or not for this card")
    if work.rows < thresholds.NARROW_LEAST_ROWS:
        return Verdict(False, f"{work.rows:,} rows < {thresholds.NARROW_LEAST_ROWS}")
    if fills_by_rows(k, n, work):
        return Verdict(True, f"{work.rows:,} rows fill the card")
    if is_cut(k, n) and (work.tensor_shapes is None or not may_be_uncut(k, n, work)):
        return Verdict(False, "the layer's forward product is split along k")
    layer = CountedLayer(k, n)
    tensor, plain = _tensor_clocks(layer, work), _plain_clocks(layer, work)
    counted = f"a layer's products and operands are counted at {tensor:,} clocks on tensor cores, {plain:,} on others"
    if work.tensor_shapes is not None:
        return Verdict((k, n) in work.tensor_shapes, f"{counted}; those of all layers together decide")
    for what, count, least in (
        ("columns or rows of W", min(k, n), thresholds.NARROW_LEAST_WIDTH),
        ("weights", k * n, thresholds.NARROW_LEAST_WEIGHTS),
    ):
        if count < least:
            return Verdict(False, f"{count:,} {what} < {least:,}")
    return Verdict(is_faster(tensor, plain), counted)


@dataclass(frozen=True)
class CountedLayer:
    """A dense layer of a step, as its clocks are counted.

    Attributes:
        is_moved: whether the step moves its weight.
        makes_dx: whether a layer before it needs its delta.
        follows: whether the dense layer before it makes its x, with nothing or a dropout between them, which either
            of their products makes, or a launch of its own that leaves operands as well.
        has_head: whether one kernel makes its products and the loss, if plain cores do.
        head_clocks: of that kernel, where the layer is split along k without it.
    """

    k: int
    n: int
    is_moved: bool = True
    makes_dx: bool = True
    follows: bool = False
    has_head: bool = False
    head_clocks: int = 0


@dataclass(frozen=True)
class CountedStep:
    """What all layers of a step are counted at, launches included.

    Attributes:
        shapes: (k, n) of those that tensor cores make.
    """

    shapes: frozenset[tuple[int, int]]
    clocks: int


def count_step(layers: Sequence[CountedLayer], work: Work) -> CountedStep | None:
    """Which layers of a step are on tensor cores so that all its launches take the fewest clocks.

    None where nothing is counted: on other cards, for few rows, or if layers are not counted together.
    """
    if not thresholds.LAYERS_ARE_COUNTED_TOGETHER or not layers or work.operand_format is None:
        return None
    if not _has_narrow_tiles(work) or work.rows < thresholds.NARROW_LEAST_ROWS or not work.is_training:
        return None
    tenths, is_scaled = thresholds.LAYERS_TENTHS, work.operand_format.scaled
    is_few = _may_leave_whole_batch(work) and any(keeps_whole_batch(each.k, each.n, work) for each in layers)
    # By whether the layer before is on tensor cores: tenths of clocks, and which layers are.
    best: dict[bool, tuple[int, tuple[bool, ...]]] = {False: (0, ())}
    for layer in layers:
        found: dict[bool, tuple[int, tuple[bool, ...]]] = {}
        for is_on in _ways(layer, work):
            clocks = tenths * _tensor_clocks(layer, work) if is_on else 10 * _plain_clocks(layer, work)
            for before, (until, chosen) in best.items():
                passes = 0
                if is_on and not is_scaled and not (before and layer.follows):
                    of_inputs = pass_clocks if chosen else staged_pass_clocks  # first inputs: of several steps at once
                    made = of_inputs(work.operand_format, work.rows * layer.k)
                    passes += made // thresholds.STAGED_PASSES_OF_FEW_ROWS if is_few and not chosen else made
                # The delta that this layer leaves for the one before.
                if before and not is_scaled and not (layer.follows and (is_on or layer.has_head)):
                    passes += pass_clocks(work.operand_format, work.rows * layer.k)
                total = until + clocks + tenths * passes
                if is_on not in found or total < found[is_on][0]:
                    found[is_on] = total, (*chosen, is_on)
        best = found
    total, chosen = min(best.values())
    if not is_scaled and not is_few:  # whose weights one launch moves, with their biases
        total += tenths * thresholds.LAUNCH_CLOCKS
    plain = sum(10 * _plain_clocks(layer, work) for layer in layers)
    is_any = any(chosen) and (total < plain or any(_ways(layer, work) == (True,) for layer in layers))
    on = zip(layers, chosen, strict=True)
    shapes = frozenset((layer.k, layer.n) for layer, is_on in on if is_on) if is_any else frozenset()
    launches = sum(1 + layer.makes_dx + layer.is_moved for layer in layers) + 1
    return CountedStep(shapes, (total if is_any else plain) // 10 + launches * thresholds.LAUNCH_CLOCKS)


def _ways(layer: CountedLayer, work: Work) -> tuple[bool, ...]:
    """Whether a layer may be on plain cores, and on tensor cores."""
    if fills_by_rows(layer.k, layer.n, work):
        return (True,)
    if may_be_uncut(layer.k, layer.n, work):
        return False, True
    if is_cut(layer.k, layer.n):
        return (False,)
    if keeps_whole_batch(layer.k, layer.n, work):
        return (False, True) if _may_leave_whole_batch(work) else (False,)
    return (True,) if _is_large(layer.k, layer.n, work) else (False, True)


def _may_leave_whole_batch(work: Work) -> bool:
    """Whether counts decide between tiles on tensor cores and blocks that keep the whole batch."""
    is_plain = work.operand_format is not None and not work.operand_format.scaled
    return thresholds.WHOLE_BATCHES_ARE_COUNTED and work.in_place and is_plain


def _whole_batch_clocks(layer: CountedLayer, work: Work) -> int:
    """Of both passes over a layer's W by blocks that keep the whole batch."""
    k, n, sms = layer.k, layer.n, work.setting.multiprocessors
    forward = _forward(k, n, work)
    assert isinstance(forward, WholeBatch)
    longer = 1 if n % 4 == 0 else thresholds.PASSED_WITHOUT_VECTORS
    streamed = int(longer * streamed_clocks(thresholds.PASSED_BYTES * k * n))
    if not forward.components:
        clocks = plain_whole_batch_clocks(k, n, work.rows, forward.split, sms, makes_dx=layer.makes_dx)
        return max(clocks, streamed)
    grids = (
        kernels.whole_batch_forward_grid(n, forward.columns, forward.split),
        kernels.tensor_whole_batch_backward_grid(k, n, sms),
    )
    entries = (
        kernels.dense_forward_tensor_whole_batch(forward.rows, forward.components, forward.split),
        kernels.dense_backward_tensor_whole_batch("SGD", forward.rows, forward.components),
    )
    passes = zip(entries, grids, strict=True)
    return max(sum(whole_batch_clocks(entry, grid, k, n, work.rows, sms) for entry, grid in passes), streamed)


def _tensor_clocks(layer: CountedLayer, work: Work) -> int:
    """Of a layer's products and of the passes that make its operands, where all need some."""
    operand_format, sms, arch = work.operand_format, work.setting.multiprocessors, work.setting.arch
    assert operand_format is not None
    k, n, rows = layer.k, layer.n, product_rows(work)
    is_alone = work.tensor_shapes is None and not thresholds.LAYERS_ARE_COUNTED_TOGETHER
    clocks = operand_clocks(operand_format, k, n, work.rows) if operand_format.scaled else 0
    if not operand_format.scaled:
        clocks += thresholds.SPLIT_PASS_CLOCKS // 2 if is_alone else 0
        clocks += 0 if work.in_place or not layer.is_moved else pass_clocks(operand_format, k * n)
    if layer.has_head:  # four launches in the place of two, and passes over x, which a head takes as it is
        clocks += 2 * thresholds.LAUNCH_CLOCKS + thresholds.LOSS_CLOCKS
        clocks += work.rows * layer.k * thresholds.SPLIT_THOUSAND_CLOCKS // 1000 if operand_format.scaled else 0
    of_x = streamed_clocks(2 * rows * k) if is_cut(k, n) else 0  # of few columns it is x whose bytes take time
    is_few = keeps_whole_batch(k, n, work)
    for columns, depth, is_made, least in ((n, k, True, of_x), (k, n, layer.makes_dx, 2 * of_x)):
        tile, counted, _ = step_tile(operand_format, rows, columns, depth, sms, arch, has_floats=work.has_floats)
        whole = is_few and isinstance(tile, ClusterSplitTile)
        clocks += max(least, counted + thresholds.CLUSTER_PRODUCT_CLOCKS * whole) if is_made else 0
    if is_few:
        clocks += grouped_share_clocks(operand_format, k, n, work.rows, sms) if layer.is_moved else 0
        return max(clocks, streamed_clocks((thresholds.MOVED_BYTES + 6 * operand_format.components) * k * n))
    of_weight = weight_tile(operand_format, k, n, work.rows, sms, arch, in_place=work.in_place)
    return clocks + (max(of_x, of_weight.clocks) if layer.is_moved else 0)


def _plain_clocks(layer: CountedLayer, work: Work) -> int:
    k, n, sms, clocks = layer.k, layer.n, work.setting.multiprocessors, 0
    late = thresholds.LATE_LAUNCH_CLOCKS
    if not layer.has_head and layer.is_moved and keeps_whole_batch(k, n, work) and _may_leave_whole_batch(work):
        return _whole_batch_clocks(layer, work)
    if layer.has_head:
        clocks = layer.head_clocks or head_clocks(k, n, work.rows, sms)
    elif is_cut(k, n) and not keeps_whole_batch(k, n, work):
        clocks = thresholds.LAUNCH_CLOCKS + split_clocks(k, n, work, makes_dx=layer.makes_dx)
    else:
        cut, by_parts_of_k = _cut_of_step(k, n, work)
        for columns, depth, is_made in ((n, k, True), (k, n, layer.makes_dx)):
            tile, _ = small_batch_tile(work.rows, columns, depth, sms)
            known = simt_clocks(tile, work.rows, columns, depth, sms)
            if columns == n and cut and is_faster(by_parts_of_k, known):
                known = by_parts_of_k
            if is_made and depth == k and (short := _short_tile(k, n, work)):
                known = short_clocks(short, work.rows, n, sms)
            clocks += late + known if is_made else 0
    if not layer.is_moved:
        return clocks
    of_update = _unstripped_clocks(k, n, work) if work.in_place else _whole_update_clocks(k, n, work)
    if is_bound_by_rows(k, n, work):
        strips = _strips(k, n, work)
        assert strips is not None
        of_update = parts_of_strips(strips.tile, k, n, work.rows, sms)[1]
    return clocks + late + of_update


def split_clocks(k: int, n: int, work: Work, *, makes_dx: bool = True) -> int:
    """Of a layer's forward product, split along k, of the sum of its parts, and of dx; without their launches."""
    forward, rows, sms = _forward(k, n, work), work.rows, work.setting.multiprocessors
    assert isinstance(forward, SplitK)
    if forward.tile is None:
        clocks = thresholds.FEW_ROWS_FORWARD_CLOCKS
    elif isinstance(forward.tile, (SimtTile, WarpSplitTile)):
        late = thresholds.LATE_LAUNCH_CLOCKS
        clocks = late + simt_clocks(forward.tile, rows, n, forward.part, sms, forward.count)
    else:
        clocks = streamed_clocks(4 * k * (rows + n), alone=False)  # at least
    clocks += partials_clocks(rows, n, sms)
    tile, _ = small_batch_tile(rows, k, n, sms)
    return clocks + (thresholds.LATE_LAUNCH_CLOCKS + input_clocks(tile, rows, k, n, sms) if makes_dx else 0)


def product_rows(work: Work) -> int:
    """Rows of the products that write operands: those that are filled with 0 as well."""
    operand_format = work.operand_format
    has_padding = thresholds.NARROW_TILES_ARE_USED and operand_format is not None and not operand_format.scaled
    return filled_rows(work.rows) if has_padding else work.rows


def splits_operands(k: int, n: int, work: Work) -> bool:
    """Whether tensor cores make the products of a layer that is split along k.

    In a step alone: what an evaluation computes must not depend on how many rows there are.
    """
    is_worth_it = is_cut(k, n) and n >= thresholds.SPLIT_OPERANDS_LEAST_N and work.rows > kernels.FEW_ROWS
    return work.operand_format is not None and work.is_training and is_worth_it


def keeps_whole_batch(k: int, n: int, work: Work) -> bool:
    """Whether each of a layer's products in a step is one pass over W by blocks that keep all rows of the batch."""
    return whole_batch_components(k, n, work) is not None


def whole_batch_components(k: int, n: int, work: Work) -> int | None:
    """How many components of a number such passes multiply on tensor cores, 0 on plain cores; None without passes."""
    is_ordered = work.is_training and work.reduction == "ordered" and kernels.architecture(work.setting.arch) >= 80
    is_short = k <= thresholds.CUT_MOST_K and n > kernels.HEAD_MOST_N and not work.has_tail
    is_whole = not is_cut(k, n) or (is_short and work.rows <= thresholds.CUT_ROWS)
    is_large = n > kernels.SMALL_N_COLUMNS and k * n >= _least_whole_batch(work) and is_whole
    if not (thresholds.WHOLE_BATCH_IS_USED and is_ordered and is_large) or (k, n) in (work.tensor_shapes or ()):
        return None
    components = _components(work)
    if components and _is_one_pass_on_tensor_cores(k * n, work):
        return components
    return 0 if work.rows <= kernels.WHOLE_BATCHES[-1] and not _is_more_arithmetic(k * n, work) else None


def _least_whole_batch(work: Work) -> int:
    """Weights of the smallest layer whose products are passes over W."""
    is_few = work.rows < thresholds.NARROW_LEAST_ROWS
    return thresholds.WHOLE_BATCH_LEAST_WEIGHTS if is_few else thresholds.WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE


def _is_one_pass_on_tensor_cores(weights: int, work: Work) -> bool:
    """Whether such passes over so many weights take less time on tensor cores than other ways."""
    is_few = work.rows <= thresholds.TENSOR_WHOLE_BATCH_FEW_ROWS
    least, of_more = thresholds.TENSOR_WHOLE_BATCH_LEAST_WEIGHTS, thresholds.TENSOR_WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE
    suits = thresholds.TENSOR_WHOLE_BATCH_LEAST_ROWS <= work.rows <= _most_rows_of_one_pass(work)
    is_used = thresholds.TENSOR_WHOLE_BATCH_IS_USED and work.setting.arch == "sm_90a"
    return is_used and suits and weights >= (least if is_few else of_more)


def _most_rows_of_one_pass(work: Work) -> int:
    assert work.operand_format is not None
    return thresholds.TENSOR_WHOLE_BATCH_MOST_ROWS[work.operand_format.scaled]


def _components(work: Work) -> int:
    """Of a number in the precision of a step, if tensor cores multiply: 8, 16 or all bits of it."""
    if work.operand_format is None:
        return 0
    if work.operand_format in (kernels.HALF_PAIR, kernels.BFLOAT16_TRIPLE):
        return 3
    return 1 if work.operand_format.is_single else 2


def _is_more_arithmetic(weights: int, work: Work) -> bool:
    """Whether so many weights take less time on tensor cores than multiply-adds by all rows of a batch take."""
    operand_format = work.operand_format
    if operand_format is None or operand_format.components > 1 or work.rows <= thresholds.WHOLE_BATCH_ROWS_OF_SINGLES:
        return False
    of_scaled, others = thresholds.WHOLE_BATCH_MOST_WEIGHTS_OF_SCALED, thresholds.WHOLE_BATCH_MOST_WEIGHTS_OF_SINGLES
    return weights >= (of_scaled if operand_format.scaled else others)


def updates_few_rows(k: int, n: int, work: Work) -> bool:
    """Whether an update is that for few rows of a layer whose forward product is split along k."""
    is_few = work.in_place and work.rows <= kernels.FEW_ROWS and is_cut(k, n)
    return is_few and thresholds.FEW_ROWS_LEAST_WEIGHTS <= k * n < thresholds.FEW_ROWS_MOST_WEIGHTS


def streams_weight(k: int, n: int, work: Work) -> bool:
    """Whether such an update takes W as a stream."""
    return updates_few_rows(k, n, work) and n <= kernels.STREAM_COLUMNS and work.setting.arch == "sm_90a"


def dense_path(k: int, n: int, work: Work, *, is_frozen: bool = False, ends_with_loss: bool = False) -> DensePath:
    """The kernels of a dense layer with a weight (k, n), which steps move unless it is frozen.

    Args:
        ends_with_loss: whether its forward product may end with a loss, if tensor cores make it.
    """
    if on_tensor_cores(k, n, work):
        path = _gemm_path(k, n, work, ends_with_loss=ends_with_loss)
        return replace(path, update=None) if is_frozen else path
    forward = _forward(k, n, work)
    if not work.is_training:
        return DensePath(forward, None, None)
    if work.reduction == "atomic" and not is_frozen:
        both = Atomic('reduction="atomic": blocks of both products add their sums to memory by atomicAdd')
        return DensePath(forward, both, both)
    if isinstance(forward, WholeBatch) and work.in_place and not is_frozen:
        backward = replace(forward, split=1)
        return DensePath(forward, backward, replace(backward, flat=_flat_rows(k, n, work, forward)))
    tile, reason = small_batch_tile(work.rows, k, n, work.setting.multiprocessors)
    dx = _of_tile(tile, f"{_why_simt(k, n, work)}; {reason}")
    return DensePath(forward, dx, None if is_frozen else _update(k, n, work))


def _flat_rows(k: int, n: int, work: Work, forward: WholeBatch) -> int | None:
    """The rows of blocks that move a weight as a flat array, where that is faster than by its rows."""
    is_used = thresholds.OUTER_PRODUCTS_ARE_USED and not forward.components and k * n < 1 << 30
    suits = work.rows <= thresholds.OUTER_PRODUCTS_ROWS or n % 4 != 0
    return kernels.outer_products(work.rows) if is_used and suits else None


def _gemm_path(k: int, n: int, work: Work, *, ends_with_loss: bool) -> DensePath:
    card, operand_format = work.setting, work.operand_format
    assert operand_format is not None
    width, weights = thresholds.GEMM_LEAST_WIDTH, thresholds.GEMM_LEAST_WEIGHTS
    least_rows = f", {work.rows:,} ≥ {thresholds.GEMM_LEAST_ROWS} rows" if work.is_training else ""
    why = f"{k:,}×{n:,} suits tensor cores: both widths ≥ {width}, {k * n:,} ≥ {weights:,} weights{least_rows}"
    if work.is_training and not _is_large(k, n, work):
        why = _on_narrow_tiles(k, n, work).why

    def made(m: int, columns: int, depth: int, *, shares_k: bool) -> Gemm:
        sizes = operand_format, m, columns, depth, card.multiprocessors, card.arch
        if shares_k:
            tile, _, reason = step_tile(*sizes, has_floats=work.has_floats)
        else:
            tile, reason = gemm_tile(*sizes, has_floats=work.has_floats)
        return Gemm(tile, f"{why}; {reason}")

    rows = product_rows(work)
    forward = made(rows, n, k, shares_k=work.is_training and not ends_with_loss)
    if not work.is_training:
        return DensePath(forward, None, None)
    of = weight_tile(operand_format, k, n, work.rows, card.multiprocessors, card.arch, in_place=work.in_place)
    return DensePath(forward, made(rows, k, n, shares_k=True), Gemm(of.tile, f"{why}; {of.why}", of.sums_columns))


def _forward(k: int, n: int, work: Work) -> Forward:
    card = work.setting
    if keeps_whole_batch(k, n, work):
        weights = f"{k * n:,} weights ≥ {_least_whole_batch(work):,}"
        if components := whole_batch_components(k, n, work):
            most_rows = _most_rows_of_one_pass(work)
            why = f"rows: {work.rows} ≤ {most_rows}, {k * n:,} weights: on tensor cores blocks pass over W once"
            fitting = kernels.tensor_whole_batch(work.rows, components)
            split = kernels.tensor_whole_batch_split(k, n, card.multiprocessors)
            return WholeBatch(fitting, why, kernels.TENSOR_WHOLE_BATCH_COLUMNS, split, components)
        most = kernels.whole_batch(work.rows)
        why = f"rows: {work.rows} ≤ {kernels.WHOLE_BATCHES[-1]}, {weights}: blocks that keep the batch pass over W once"
        may_split = thresholds.WHOLE_BATCH_MAY_SPLIT and card.arch == "sm_90a"
        columns = _whole_batch_columns(k, n, most, card.multiprocessors, may_split=may_split)
        split = kernels.whole_batch_split(k, n, most, columns, card.multiprocessors) if may_split else 1
        return WholeBatch(most, why, columns, split)
    if not is_cut(k, n):
        if short := _short_tile(k, n, work):
            return Short(short, f"{_why_simt(k, n, work)}; k = {k} ≤ {short.k}, and {work.rows:,} rows fill the card")
        if work.is_training:
            of_step, reason = small_batch_tile(work.rows, n, k, card.multiprocessors)
            of_parts, clocks = _cut_of_step(k, n, work)
            known = simt_clocks(of_step, work.rows, n, k, card.multiprocessors)
            if of_parts and is_faster(clocks, known):
                counted = f"counted clocks: {clocks:,} as split-K partials, with their sum, {known:,} without"
                return replace(of_parts, why=f"{_why_simt(k, n, work)}; {counted}")
            return _of_tile(of_step, f"{_why_simt(k, n, work)}; {reason}")
        tile, reason = product_tile(work.rows, n, k, card.multiprocessors)
        return Simt(tile, f"{_why_simt(k, n, work)}; {reason}")
    part = _part(k, n, work)
    count = ceil_div(k, part)
    limits = f"k = {k:,} ≥ {thresholds.SPLIT_K_LEAST_K:,} and n = {n:,} ≤ {thresholds.SPLIT_K_MOST_N}"
    cut = f"split along k, since {limits} leave few output tiles"
    if work.rows <= kernels.FEW_ROWS:
        return SplitK(part, count, None, f"{cut}; rows: {work.rows} ≤ {kernels.FEW_ROWS}")
    if splits_operands(k, n, work):
        why = f"{cut}; n ≥ {thresholds.SPLIT_OPERANDS_LEAST_N}: tensor cores, by operands split in the kernel"
        is_newest = card.arch == kernels.SPLIT_SM90.needs
        return SplitK(part, count, kernels.SPLIT_SM90 if is_newest else kernels.SPLIT_SM80, why)
    tile, reason = simt_tile(work.rows, n, card.multiprocessors, count)
    return SplitK(part, count, tile, f"{cut}; {_why_not_split(n, work)}; {reason}")


def _short_tile(k: int, n: int, work: Work) -> ShortTile | None:
    """The tile of a step's forward product over few terms, if its blocks fill the card."""
    tile = next((tile for tile in kernels.SHORT_TILES if k <= tile.k), None)
    if tile is None or not (work.is_training and thresholds.SHORT_TILES_ARE_USED):
        return None
    return tile if fills(math.prod(tile.grid(work.rows, n)), work.setting.multiprocessors) else None


def is_bound_by_rows(k: int, n: int, work: Work) -> bool:
    """Whether plain cores make a layer's products in a step, over few inputs, as fast as its outputs pass memory."""
    strips = _strips(k, n, work)
    return _short_tile(k, n, work) is not None and strips is not None and strips.tile.m < strips.tile.n


def _whole_batch_columns(k: int, n: int, rows: int, multiprocessors: int, *, may_split: bool) -> int:
    """Of the columns that a block of the forward pass may have, the most that leave enough blocks, else the fewest; but
    more than those, of few rows, where clusters that share a long k are enough blocks."""
    fewest, *more = kernels.whole_batch_forward_columns(rows)
    least = thresholds.WHOLE_BATCH_FILLED_HUNDREDTHS * multiprocessors
    filling = [columns for columns in more if 100 * ceil_div(n, columns) >= least]
    if filling or not may_split or rows > thresholds.WHOLE_BATCH_WIDE_SPLIT_ROWS:
        return max(filling, default=fewest)
    wider = more[0]
    split = kernels.whole_batch_split(k, n, rows, wider, multiprocessors)
    has_long_k = kernels.whole_batch_slices(k, rows, wider) >= thresholds.WHOLE_BATCH_WIDE_SPLIT_SLICES * split
    return wider if has_long_k and 100 * split * ceil_div(n, wider) >= least else fewest


def _cut_of_step(k: int, n: int, work: Work) -> tuple[SplitK | None, int]:
    """A step's forward product of few tiles by more blocks, each with a part of k; and its clocks, with a launch that
    adds the parts up.  An evaluation has none, whose z are one chain over k."""
    rows, sms = work.rows, work.setting.multiprocessors
    least: tuple[SplitK | None, int] = None, 0
    for tile in WARP_SPLIT_TILES if thresholds.STEPS_ARE_CUT and thresholds.NARROW_TILES_ARE_USED else ():
        parts = min(tile.blocks * sms // math.prod(tile.grid(rows, n)), k // tile.K)
        if parts < 2:
            continue
        part = tile.K * ceil_div(ceil_div(k, tile.K), parts)
        count = ceil_div(k, part)
        clocks = simt_clocks(tile, rows, n, part, sms, count) + thresholds.LAUNCH_CLOCKS + thresholds.LATE_LAUNCH_CLOCKS
        if least[0] is None or clocks < least[1]:
            least = SplitK(part, count, tile, ""), clocks
    return least


def _part(k: int, n: int, work: Work) -> int:
    """How much of k a part takes, of the forward product and of an update by few rows alike."""
    if splits_operands(k, n, work):
        return split_part_length(k)
    if streams_weight(k, n, work):
        return min(split_part_length(k), kernels.STREAM_PART)
    part = part_length(k, n) if is_cut(k, n) else k
    return min(part, kernels.FEW_PART) if updates_few_rows(k, n, work) else part


def _update(k: int, n: int, work: Work) -> Update:
    card = work.setting
    if not work.in_place:
        return _gradient(k, n, work)
    tile, reason = simt_tile(k, n, card.multiprocessors)
    if updates_few_rows(k, n, work):
        size = f"{k * n:,} weights ≥ {thresholds.FEW_ROWS_LEAST_WEIGHTS:,}"
        why = f"rows: {work.rows} ≤ {kernels.FEW_ROWS}, {size}: one pass over W updates it and makes the next step's z"
        stream = streams_weight(k, n, work)
        limit = f"n = {n} {'≤' if n <= kernels.STREAM_COLUMNS else '>'} {kernels.STREAM_COLUMNS}"
        return FewRows(_part(k, n, work), stream, f"{why}; {limit}, on {card.arch}")
    if splits_operands(k, n, work):
        rows = f"{work.rows} rows {'≤' if work.rows <= kernels.LARGE_K_MOST_ROWS else '>'} {kernels.LARGE_K_MOST_ROWS}"
        columns = f"n = {n} {'≤' if n <= kernels.LARGE_K_MOST_N else '>'} {kernels.LARGE_K_MOST_N}"
        least = thresholds.SPLIT_OPERANDS_LEAST_N
        why = (
            f"k is large, n ≥ {least}: tensor cores, by operands split in the kernel; {rows}, {columns}, on {card.arch}"
        )
        if _keeps_delta(n, work):
            return LargeK(why)
        return SplitOperands(kernels.SPLIT_SM80, *_parts_of_split(k, n, work), why)
    grid = tile.grid(k, n)
    if strips := _strips(k, n, work):
        return strips
    if by_parts := _by_parts([(k, n)], _whole_update_clocks(k, n, work), work):
        return replace(by_parts, why=f"{_why_simt(k, n, work)}; {by_parts.why}")
    if has_few_columns(n, work):
        most_rows = thresholds.FEW_COLUMNS_MOST_ROWS
        return FewColumns(f"n = {n} ≤ {kernels.SMALL_N_COLUMNS}, {work.rows} rows ≤ {most_rows}")
    if n <= kernels.SMALL_N_COLUMNS:
        return _few_columns(k, n, work)[0]
    if not fills(grid[0] * grid[1], card.multiprocessors):
        few = f"{grid[0] * grid[1]} of the smallest tiles, too few to fill {card.multiprocessors} multiprocessors"
        return small_update([(k, n)], work, f"{k:,}×{n:,} makes {few}")
    return Simt(tile, f"{_why_simt(k, n, work)}; {reason}")


def _keeps_delta(n: int, work: Work) -> bool:
    """Whether each block of an update that splits its operands keeps all of dz."""
    is_short = work.rows <= kernels.LARGE_K_MOST_ROWS and n <= kernels.LARGE_K_MOST_N
    return is_short and work.setting.arch == "sm_90a"


def _parts_of_split(k: int, n: int, work: Work) -> tuple[int, int]:
    """In how many parts the blocks of an update's tiles that split operands share its rows, and the rows of each.

    A part takes as long as its slices and so many more, for its sums and for the last block, which adds them up.
    """
    tile, sms = kernels.SPLIT_SM80, work.setting.multiprocessors
    slices, tiles = ceil_div(work.rows, kernels.SPLIT_SM80_SLICE), math.prod(tile.grid(k, n))
    if not thresholds.UPDATES_HAVE_PARTS or not _may_share_rows(work):
        return 1, work.rows

    def turns(parts: int) -> int:
        of_sums = thresholds.SPLIT_PART_SLICES if parts > 1 else 0
        return ceil_div(tiles * parts, tile.blocks * sms) * (ceil_div(slices, parts) + of_sums)

    most = max(1, min(slices, thresholds.SPLIT_MOST_PARTS))
    part = kernels.SPLIT_SM80_SLICE * ceil_div(slices, min(range(1, most + 1), key=turns))
    return ceil_div(work.rows, part), part


def _by_parts(shapes: Sequence[tuple[int, int]], without: int, work: Work) -> UpdateByParts | None:
    """A launch that moves weights of few tiles, whose blocks have parts of the rows, if counted to take less."""
    tile = kernels.WARP_SPLIT_WEIGHT
    parts, clocks = parts_of_rows(shapes, work.rows, work.setting.multiprocessors)
    may_have_parts = thresholds.UPDATES_HAVE_PARTS and _may_share_rows(work) and parts > 1
    if not may_have_parts or not is_faster(clocks, without):
        return None
    why = f"counted clocks: {clocks:,} where blocks have parts of the rows, {without:,} where each has all"
    return _in_parts(tile, parts, why, work)


def _unstripped_clocks(k: int, n: int, work: Work) -> int:
    """Of an update on plain cores, but by strips, which no card has measured."""
    whole = _whole_update_clocks(k, n, work)
    has_parts = _by_parts([(k, n)], whole, work) is not None
    return parts_of_rows([(k, n)], work.rows, work.setting.multiprocessors)[1] if has_parts else whole


def _strips(k: int, n: int, work: Work) -> Strips | None:
    """An update by strips, if a weight has so few columns or rows and that is counted to take less by more than half a
    launch."""
    tile = kernels.strip(k, n)
    is_used = thresholds.STRIPS_ARE_USED and thresholds.UPDATES_HAVE_PARTS and _may_share_rows(work)
    if tile is None or not is_used:
        return None
    parts, clocks = parts_of_strips(tile, k, n, work.rows, work.setting.multiprocessors)
    known = _unstripped_clocks(k, n, work)
    if parts == 1 or not is_faster(clocks + thresholds.LAUNCH_CLOCKS // 2, known):
        return None
    few = f"n = {n} ≤ {tile.n}" if tile.n < tile.m else f"k = {k} ≤ {tile.m}"
    why = f"{few}; counted clocks: {clocks:,} by strips, of parts of the rows, {known:,} by other ways"
    return Strips(tile, parts, tile.K * ceil_div(ceil_div(work.rows, tile.K), parts), why)


def has_few_columns(n: int, work: Work) -> bool:
    """Whether an update of n columns gives a thread a row of W."""
    return n <= kernels.SMALL_N_COLUMNS and work.rows <= thresholds.FEW_COLUMNS_MOST_ROWS


def _whole_update_clocks(k: int, n: int, work: Work) -> int:
    """Of an update on plain cores whose blocks have all rows each."""
    if has_few_columns(n, work):
        return few_columns_clocks(work.rows)
    sms = work.setting.multiprocessors
    if n <= kernels.SMALL_N_COLUMNS:
        return _few_columns(k, n, work)[1]
    of_weight, _ = simt_tile(k, n, sms)
    if fills(math.prod(of_weight.grid(k, n)), sms):
        return simt_clocks(of_weight, k, n, work.rows, sms)
    of_few_tiles = (update_clocks(tile, [(k, n)], work.rows, sms) for tile in (None, kernels.WARP_SPLIT_WEIGHT))
    return min(of_few_tiles)


def _few_columns(k: int, n: int, work: Work) -> tuple[WarpSplit | SmallN, int]:
    """How the gradient of a weight of few columns is made by many rows, and what that is counted at."""
    tile, sms = kernels.WARP_SPLIT_WEIGHT, work.setting.multiprocessors
    by_warps, without = (update_clocks(each, [(k, n)], work.rows, sms) for each in (tile, None))
    why = f"n = {n} ≤ {kernels.SMALL_N_COLUMNS}: most of a large tile would be padding"
    if not _may_share_rows(work):
        return SmallN(why), without
    why = f"{why}; counted clocks: {by_warps:,} where warps share rows, {without:,} without tiles"
    if thresholds.FEW_COLUMNS_TILE_TENTHS * by_warps < 10 * without:
        return WarpSplit(tile, why), by_warps
    return SmallN(why), without


def _may_share_rows(work: Work) -> bool:
    """Whether a batch has enough rows for tiles whose warps share them."""
    return thresholds.NARROW_TILES_ARE_USED and work.rows >= thresholds.WARP_SPLIT_LEAST_ROWS


def small_update(shapes: Sequence[tuple[int, int]], work: Work, why: str) -> SmallUpdate:
    """How one launch moves weights (k, n) that make few tiles."""
    if not _may_share_rows(work):
        return SmallN(why)
    tile, sms = kernels.WARP_SPLIT_WEIGHT, work.setting.multiprocessors
    by_warps, without = (update_clocks(each, shapes, work.rows, sms) for each in (tile, None))
    if by_parts := _by_parts(shapes, min(by_warps, without), work):
        return replace(by_parts, why=f"{why}; {by_parts.why}")
    why = f"{why}; counted clocks: {by_warps:,} where warps share rows, {without:,} without tiles"
    return WarpSplit(tile, why) if by_warps < without else SmallN(why)


def small_update_clocks(shapes: Sequence[tuple[int, int]], work: Work) -> int:
    """What that launch is counted at."""
    sms = work.setting.multiprocessors
    whole = min(update_clocks(tile, shapes, work.rows, sms) for tile in (None, kernels.WARP_SPLIT_WEIGHT))
    return parts_of_rows(shapes, work.rows, sms)[1] if _by_parts(shapes, whole, work) else whole


def update_blocks(k: int, n: int, path: SmallUpdate, rows: int) -> tuple[int, int]:
    """Blocks of an update of a weight (k, n), and how many slices of the rows each of them has."""
    if isinstance(path, SmallN):
        return math.prod(kernels.small_n_grid(k, n)), ceil_div(rows, kernels.SMALL_N_BATCH)
    tiles = math.prod(path.tile.grid(k, n))
    if isinstance(path, WarpSplit):
        return tiles, ceil_div(rows, path.tile.K)
    return tiles * path.parts, ceil_div(path.part, path.tile.K)


def in_parts_of_all(updates: Sequence[tuple[int, int, SmallUpdate]], work: Work) -> list[SmallUpdate]:
    """How one launch moves several weights (k, n), given how a launch of each would.

    Where blocks have parts of the rows there are so many that all layers' blocks, not each layer's, are on the card at
    once: a block that comes later takes as long to begin and to end as for several slices of rows.
    """
    shapes = [(k, n) for k, n, path in updates if isinstance(path, UpdateByParts)]
    parts = parts_of_rows(shapes, work.rows, work.setting.multiprocessors)[0] if shapes else 1
    return [
        _in_parts(path.tile, parts, path.why, work) if isinstance(path, UpdateByParts) and parts > 1 else path
        for *_, path in updates
    ]


def _in_parts(tile: WarpSplitTile, parts: int, why: str, work: Work) -> UpdateByParts:
    return UpdateByParts(tile, parts, tile.K * ceil_div(ceil_div(work.rows, tile.K), parts), why)


def updates_in_one_launch(updates: Sequence[tuple[int, int, SmallUpdate]], work: Work) -> Verdict:
    """Whether one launch moves several weights (k, n), whose updates are of one kind, and why."""
    if not thresholds.UPDATES_ARE_GROUPED:
        return Verdict(False, "a test or a benchmark asks for a launch for each layer")
    if len(updates) < 2:
        return Verdict(False, "there is no other update by this kernel")
    together, apart = _clocks_in_one_launch(updates, work)
    why = f"counted clocks, with launches: {together:,} in one launch behind their deltas, {apart:,} in {len(updates)}"
    return Verdict(True, f"{len(updates)} layers are moved by the same kernel; {why}")


def _clocks_in_one_launch(updates: Sequence[tuple[int, int, SmallUpdate]], work: Work) -> tuple[int, int]:
    """Of one launch that moves several weights (k, n), and of a launch for each."""
    of_all = [(k, n, path) for (k, n, _), path in zip(updates, in_parts_of_all(updates, work), strict=True)]
    together = _clocks_of_updates(of_all, work) + thresholds.LAUNCH_CLOCKS
    return together, sum(_clocks_of_updates([each], work) + thresholds.LAUNCH_CLOCKS for each in updates)


def spared_clocks(layers: Sequence[CountedLayer], step: CountedStep, work: Work) -> int:
    """How much less a counted step takes since one launch moves the small weights of all layers on plain cores."""
    if not thresholds.UPDATES_ARE_GROUPED or not work.in_place:
        return 0
    of_kind: dict[type[SmallUpdate], list[tuple[int, int, SmallUpdate]]] = {}
    for layer in layers:
        on_plain_cores = layer.is_moved and (layer.k, layer.n) not in step.shapes
        update = _update(layer.k, layer.n, work) if on_plain_cores else None
        if isinstance(update, (WarpSplit, UpdateByParts, SmallN)):
            of_kind.setdefault(type(update), []).append((layer.k, layer.n, update))
    counted = [_clocks_in_one_launch(updates, work) for updates in of_kind.values()]
    return sum(max(0, apart - together) for together, apart in counted)


def _clocks_of_updates(updates: Sequence[tuple[int, int, SmallUpdate]], work: Work) -> int:
    """Of one launch, without its start."""
    blocks = [update_blocks(k, n, path, work.rows) for k, n, path in updates]
    slices, path = slices_in_turn(blocks, work.setting.multiprocessors), updates[0][2]
    if isinstance(path, UpdateByParts):
        return parts_clocks(slices)
    return slices * (thresholds.SMALL_N_CLOCKS if isinstance(path, SmallN) else thresholds.WARP_SPLIT_WEIGHT_CLOCKS)


def _gradient(k: int, n: int, work: Work) -> Simt | WarpSplit | SmallN:
    """How a gradient is made that is stored for a later update."""
    sms = work.setting.multiprocessors
    usual, reason = simt_tile(k, n, sms)
    why = f"{_why_simt(k, n, work)}; the gradient is stored for a later update; {reason}"
    if n <= kernels.SMALL_N_COLUMNS and thresholds.SMALL_N_GRADIENTS_ARE_USED:
        few, clocks = _few_columns(k, n, work)
        known = simt_clocks(usual, k, n, work.rows, sms)
        counted = f"counted clocks: {clocks:,} by {few}, {known:,} by {usual.m}×{usual.n}"
        if is_faster(clocks, known):
            return replace(few, why=f"the gradient is stored for a later update; {few.why}; {counted}")
        return Simt(usual, f"{why}; {counted}")
    is_small = n > kernels.SMALL_N_COLUMNS and not fills(math.prod(usual.grid(k, n)), sms)
    if not is_small or not _may_share_rows(work):
        return Simt(usual, why)
    tile = kernels.WARP_SPLIT_WEIGHT
    by_warps, known = update_clocks(tile, [(k, n)], work.rows, sms), simt_clocks(usual, k, n, work.rows, sms)
    why = f"{why}; counted clocks: {by_warps:,} where warps share rows, {known:,} by that tile"
    return WarpSplit(tile, why) if by_warps < known else Simt(usual, why)


def _why_simt(k: int, n: int, work: Work) -> str:
    """Why tensor cores do not make a layer's products."""
    if work.operand_format is None:
        return "plain cores, since this precision, reduction and card have no products on tensor cores"
    if is_cut(k, n) and not may_be_uncut(k, n, work):
        return "plain cores, since the layer's forward product is split along k"
    if work.is_training and _has_narrow_tiles(work):
        return f"plain cores, since {_on_narrow_tiles(k, n, work).why}"
    if min(k, n) < thresholds.GEMM_LEAST_WIDTH:
        return f"plain cores, since {k:,}×{n:,} has a width < {thresholds.GEMM_LEAST_WIDTH}"
    if k * n < thresholds.GEMM_LEAST_WEIGHTS:
        return f"plain cores, since {k * n:,} weights < {thresholds.GEMM_LEAST_WEIGHTS:,}"
    return f"plain cores, since {work.rows} rows < {thresholds.GEMM_LEAST_ROWS}"


def _why_not_split(n: int, work: Work) -> str:
    """Why tensor cores do not split the operands of a product that is cut."""
    if work.operand_format is None:
        return "plain cores, since this precision, reduction and card have no products on tensor cores"
    if not work.is_training:
        return "plain cores, since a row's prediction must not depend on how many rows there are"
    return f"plain cores, since n = {n} < {thresholds.SPLIT_OPERANDS_LEAST_N}"
