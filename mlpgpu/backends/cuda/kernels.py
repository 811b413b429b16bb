"""The table of kernels: what each entry is called, what it takes, and how it is launched.

Nothing here needs a GPU, a driver or a compiler.  The sources under ``cuda/`` define templates; an
:class:`Entry` names one instantiation.  :func:`unit_source` writes the translation unit in which
entries of one header stand, for nvcc and for the host compiler of the tests alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from ...activations import ACTIVATIONS
from ...losses import LOSSES, OUTPUTS
from ...metrics import METRICS
from ...optimizers import OPTIMIZERS
from ..base import MOST_BINS

WARP = 32


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Argument:
    """One kernel argument: its name and its C type, such as ``const float*`` or ``int``."""

    name: str
    ctype: str

    @property
    def is_pointer(self) -> bool:
        return self.ctype.endswith("*")


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        name: its ``extern "C"`` name.
        header: the file under ``cuda/`` that defines its template.
        function: the template's instantiation, such as ``dense_forward<Relu, Tile<64, 64>>``.
        arguments: in order.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        cooperative: whether its blocks wait for each other.
        host_excluded: the instruction that keeps it from running on the host in tests, or None.
        blocks: that must fit on a multiprocessor at once, which limits their registers.
        spill_bytes: the most that a thread may store and load again for that, as ptxas counts it.
        needs: the oldest architecture that has its instructions, such as ``sm_80``; one with a letter, such as
            ``sm_90a``, is the only one.
        cluster: blocks that share their memory, in groups along the grid's first axis.
        constants: whether it reads the constant variables of update.cuh, which each compiled unit has for itself.
    """

    name: str
    header: str
    function: str
    arguments: tuple[Argument, ...]
    threads: int
    shared_bytes: int = 0
    cooperative: bool = False
    host_excluded: str | None = None
    blocks: int = 1
    spill_bytes: int = 0
    needs: str = "sm_75"
    cluster: int = 1
    constants: bool = False

    def runs_on(self, arch: str) -> bool:
        """Whether it can be compiled for ``arch``."""
        if self.needs[-1].isalpha():
            return arch == self.needs
        return architecture(arch) >= architecture(self.needs)


def arguments(signature: str) -> tuple[Argument, ...]:
    """Arguments from a C parameter list, such as ``"const float* x, int n"``."""
    pairs = (parameter.strip().rsplit(" ", 1) for parameter in signature.split(","))
    return tuple(Argument(name, ctype) for ctype, name in pairs)


def unit_source(entries: Sequence[Entry]) -> str:
    """C++ source of a translation unit that defines ``entries``; all are of one header."""
    (header,) = {entry.header for entry in entries}
    definitions = [_definition(entry) for entry in entries]
    return "\n".join([f'#include "{header}"', "", "namespace mlpgpu::entries {", "", *definitions, "}"])


def _definition(entry: Entry) -> str:
    parameters = ", ".join(f"{a.ctype} {a.name}" for a in entry.arguments)
    call = ", ".join(a.name for a in entry.arguments)
    cluster = f" __cluster_dims__({entry.cluster}, 1, 1)" if entry.cluster > 1 else ""
    return (
        f'extern "C" __global__ void{cluster} __launch_bounds__({entry.threads}, {entry.blocks})\n'
        f"{entry.name}({parameters}) {{\n    ::mlpgpu::{entry.function}({call});\n}}\n"
    )


def units(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries by header, in order and each once: what is compiled together."""
    grouped: dict[str, list[Entry]] = {}
    for entry in dict.fromkeys(entries):
        grouped.setdefault(entry.header, []).append(entry)
    return grouped


# --- the table ---

_ROWS = "const Step* step, int share, int shares"
ROW_THREADS = 256
TILE_THREADS = 256
WARPS_PER_BLOCK = ROW_THREADS // WARP
SUM_BYTES = 8 * WARP  # one double for each warp of the largest block


@dataclass(frozen=True)
class Tile:
    """The tile of C, m by n, that a block computes in slices k deep: ``Tile<m, n, k>`` of gemm.cuh."""

    m: int
    n: int
    k: int

    @property
    def shared_bytes(self) -> int:
        """Two stages of a slice of A and one of B, each line padded by 4."""
        return 4 * 2 * self.k * (self.m + self.n + 8)

    def grid(self, m: int, n: int, parts: int = 1) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return ceil_div(m, self.m), ceil_div(n, self.n), parts

    def __str__(self) -> str:
        return f"Tile<{self.m}, {self.n}, {self.k}>"

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"{self.m}x{self.n}"


TILES = (Tile(128, 128, 16), Tile(128, 96, 16), Tile(128, 64, 16), Tile(64, 64, 16), Tile(32, 32, 16))
WASTE = 8  # a larger tile may compute an eighth more than a smaller one does


def tile_for(m: int, n: int, multiprocessors: int, parts: int = 1) -> Tile:
    """The tile for an m by n product, in so many parts.

    Of those whose blocks fill nine tenths of the multiprocessors it is the largest, unless another one has an
    eighth less to compute beyond the borders; if none does, it is the smallest.  The bits do not depend on it:
    every tile sums over k in the same order.
    """
    grids = {tile: math.prod(tile.grid(m, n, parts)) for tile in TILES}
    filling = [tile for tile in TILES if 10 * grids[tile] >= 9 * multiprocessors] or [TILES[-1]]
    least = min(grids[tile] * tile.m * tile.n for tile in filling)
    return next(tile for tile in filling if WASTE * grids[tile] * tile.m * tile.n <= (WASTE + 1) * least)


@dataclass(frozen=True)
class SplitTile:
    """The tile of C that a block computes of float32 split into bfloat16: ``SplitTile<m, n>`` of split.cuh."""

    m: int
    n: int

    @property
    def shared_bytes(self) -> int:
        """Slices of both operands in three parts, lines padded by 8, or C in their place; flags of rows and columns."""
        depth, parts = 32, 3
        slices = 2 * parts * (max(depth * (self.m + 8), self.m * (depth + 8)) + depth * (self.n + 8))
        return max(slices, 4 * self.m * self.n) + 4 * (self.m + self.n)

    def grid(self, m: int, n: int, parts: int = 1) -> tuple[int, int, int]:
        """As of a :class:`Tile`."""
        return ceil_div(m, self.m), ceil_div(n, self.n), parts

    def __str__(self) -> str:
        return f"SplitTile<{self.m}, {self.n}>"

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"split_{self.m}x{self.n}"


SPLIT = SplitTile(64, 96)
SPLIT_LEAST_N = 49  # of fewer columns a tile would be padding for the larger part


def camel(name: str) -> str:
    """The struct of a row of a NumPy table: ``leaky_relu`` is ``LeakyRelu``."""
    return "".join(word.capitalize() for word in name.split("_"))


def _product(name: str, tile: Tile, rest: str, *, activation: str | None = None, spill_bytes: int = 0) -> Entry:
    """An entry built on gemm.cuh: two blocks on a multiprocessor, whose 16 warps hide each other's waiting."""
    kind = f"{name}_{activation}" if activation else name
    instance = f"{name}<{camel(activation)}, {tile}>" if activation else f"{name}<{tile}>"
    return Entry(
        f"{kind}_{tile.name}",
        "dense.cuh",
        instance,
        arguments(f"{_ROWS}, {rest}"),
        TILE_THREADS,
        tile.shared_bytes,
        blocks=2,
        spill_bytes=spill_bytes,
    )


def dense_forward(activation: str, tile: Tile) -> Entry:
    rest = "const float* x, const int* order, const float* w, const float* b, float* z, float* y, int k, int n"
    return _product("dense_forward", tile, rest, activation=activation)


_PART = "const float* x, const int* order, const float* w, float* parts, int k, int n, int part, int capacity"


def dense_forward_part(tile: Tile | SplitTile) -> Entry:
    """Sums over parts of k."""
    if isinstance(tile, Tile):
        return _product("dense_forward_part", tile, _PART)
    return _split_product("dense_forward_part_split", f"dense_forward_part_{tile.name}", str(tile), f"{_ROWS}, {_PART}")


def _split_product(function: str, name: str, instance: str, signature: str, *, constants: bool = False) -> Entry:
    """An entry built on split.cuh."""
    return Entry(
        name,
        "split_dense.cuh",
        f"{function}<{instance}>",
        arguments(signature),
        TILE_THREADS,
        SPLIT.shared_bytes,
        blocks=2,
        spill_bytes=40,  # around the epilogue
        needs="sm_80",
        constants=constants,
    )


FEW_ROWS, FEW_SHARED_BYTES = 8, 4 * (256 * 32 + 3072)  # Few of dense.cuh


def dense_forward_part_few() -> Entry:
    """As :func:`dense_forward_part`, for at most FEW_ROWS rows and FEW_MOST_N columns."""
    name = "dense_forward_part_few"
    return Entry(name, "dense.cuh", name, arguments(f"{_ROWS}, {_PART}"), ROW_THREADS, FEW_SHARED_BYTES, blocks=2)


def dense_forward_sum(activation: str) -> Entry:
    signature = f"{_ROWS}, const float* parts, const float* b, float* z, float* y, int n, int count, int capacity"
    function = f"dense_forward_sum<{camel(activation)}>"
    name = f"dense_forward_sum_{activation}"
    return Entry(name, "dense.cuh", function, arguments(signature), ROW_THREADS, 4 * ROW_THREADS, blocks=4)


def dense_backward_input(activation: str, tile: Tile) -> Entry:
    rest = "const float* dz, const float* w, const float* saved, float* dx, int k, int n"
    # With some activations, on sm_75 and sm_80 alone: around the epilogue, not in the loop.
    spill_bytes = 576 if tile in TILES[:2] else 0
    return _product("dense_backward_input", tile, rest, activation=activation, spill_bytes=spill_bytes)


# A few bytes outside the loop cost less than half the warps: 47 against 39 TFLOP/s on an H200.
_WEIGHT_SPILL_BYTES = 144


def dense_backward_weight(tile: Tile) -> Entry:
    rest = "const float* x, const int* order, const float* dz, float* dw, float* db, int k, int n"
    return _product("dense_backward_weight", tile, rest, spill_bytes=_WEIGHT_SPILL_BYTES if tile in TILES[:2] else 0)


def dense_backward_update(optimizer: str, form: Tile | SplitTile | str) -> Entry:
    """The gradient of a weight and a bias, and the optimizer's step along it.

    ``form`` is a tile of either kind; or ``"narrow"``, without tiles; or ``"few"``, for at most FEW_ROWS rows and
    FEW_LEAST_N to FEW_MOST_N columns.
    """
    signature = (
        f"{_ROWS}, const float* x, const int* order, const float* dz, const double* totals, float* weight, "
        "float* bias, float* weight_slots, float* bias_slots, int64_t size, int k, int n"
    )
    rule, function = f"{optimizer}Rule", "dense_backward_update"
    if isinstance(form, SplitTile):
        name = f"{function}_{optimizer}_{form.name}"
        return _split_product(f"{function}_split", name, f"{rule}, {form}", signature, constants=True)
    if isinstance(form, Tile):
        name, instance = form.name, f"{function}<{rule}, {form}>"
        threads, shared_bytes, blocks = TILE_THREADS, form.shared_bytes, 2
    else:
        name, instance = form, f"{function}_{form}<{rule}>"
        threads, shared_bytes, blocks = *{"narrow": NARROW, "few": FEW_UPDATE}[form], 2
    return Entry(
        f"{function}_{optimizer}_{name}",
        "dense_update.cuh",
        instance,
        arguments(signature),
        threads,
        shared_bytes,
        blocks=blocks,
        spill_bytes=_WEIGHT_SPILL_BYTES if form in TILES[:2] else 0,
        constants=True,
    )


NARROW_LINES, NARROW_COLUMNS = 8, 16
FEW_LEAST_N, FEW_MOST_N, FEW_SIZE = 16, 512, 16 * ROW_THREADS  # FewUpdate
# Threads and shared bytes of a block.
NARROW = 512, 4 * 512 * (NARROW_COLUMNS + 4)
FEW_UPDATE = ROW_THREADS, 4 * FEW_ROWS * (FEW_SIZE // FEW_LEAST_N + 2 + FEW_MOST_N)


def few_grid(k: int, n: int) -> tuple[int, int, int]:
    """Blocks of the update of a weight (k, n) by few rows."""
    return ceil_div(k * n, FEW_SIZE), 1, 1


def narrow_grid(k: int, n: int) -> tuple[int, int, int]:
    """Blocks of the update without tiles, for a weight (k, n) and a bias."""
    return ceil_div(k + 1, NARROW_LINES), ceil_div(n, NARROW_COLUMNS), 1


HEAD_ROWS, HEAD_MOST_N, HEAD_SHARED_BYTES = 8, 32, 4 * (256 * 8 + 1024 * 8 + 2 * 8 * 32)  # Head of head.cuh


def head(name: str, kind: str, *, textured: bool = True) -> Entry:
    """The last dense layer, a loss, and dx; arguments as of :func:`loss`."""
    source, target, suffix = _target(kind, textured)
    signature = (
        f"{_ROWS}, const int* order, const float* x, const float* w, const float* b, {source} targets, "
        "const float* weights, const float* mean, const float* scale, float* delta, double* sums, unsigned* arrived, "
        "double* totals, double* losses, const float* saved, int activation, float* dx, int k, int n"
    )
    function = f"head<{camel(name)}, {target}>"
    return Entry(
        f"head_{name}_{kind}{suffix}", "head.cuh", function, arguments(signature), ROW_THREADS, HEAD_SHARED_BYTES
    )


def activation_number(name: str) -> int:
    """The place in the table, which kernels know it by that are made for all activations."""
    return list(ACTIVATIONS).index(name)


# --- products on tensor cores: what their operands are held as, and the tiles ---

PLANE_ROWS, PLANE_COLUMNS = 128, 64  # what planes are padded to multiples of
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Form:
    """How tensor cores are given float32 numbers: a struct of planes.cuh, and how many planes it takes."""

    struct: str
    planes: int
    scaled: bool

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.struct).lower()


FORMS: dict[str, Form] = {
    "float32": Form("HalfPair", 2, scaled=True),
    "tf32": Form("Half", 1, scaled=True),
    "bfloat16": Form("Bfloat16", 1, scaled=False),
}  # by precision


# Below, plain cores have made a product before tensor cores have its operands.
TENSOR_LEAST_WIDTH, TENSOR_LEAST_WEIGHTS, TENSOR_LEAST_ROWS = 128, 1 << 18, 256


def architecture(arch: str) -> int:
    """``sm_90a`` as 90."""
    return int(re.sub(r"\D", "", arch))


def form_of(precision: str, arch: str) -> Form | None:
    """How products are made in this precision; None where plain cores make them all."""
    return FORMS.get(precision) if architecture(arch) >= 80 else None


def takes_tensor_cores(k: int, n: int, rows: int | None) -> bool:
    """Whether a layer of these widths is worth it in a step of up to so many rows.

    In an evaluation ``rows`` is None: there the bits of a row must not depend on how many go with it.
    """
    wide = min(k, n) >= TENSOR_LEAST_WIDTH and k * n >= TENSOR_LEAST_WEIGHTS
    return wide and (rows is None or rows >= TENSOR_LEAST_ROWS)


def padded_rows(rows: int) -> int:
    """Rows of the planes of so many rows."""
    return PLANE_ROWS * ceil_div(rows, PLANE_ROWS)


def padded_columns(n: int) -> int:
    """Elements from row to row of planes that are ``n`` wide."""
    return PLANE_COLUMNS * ceil_div(n, PLANE_COLUMNS)


@dataclass(frozen=True)
class MatrixTile:
    """How tensor.cuh makes a product of planes: blocks with tiles of C, m by n.

    Attributes:
        header: where its struct is defined.
        source: the C type of what it is given of an operand.
    """

    form: Form
    m: int
    n: int

    header = "tensor.cuh"
    source = "const uint16_t*"
    threads = TILE_THREADS
    cluster = 1
    needs = "sm_80"
    host_excluded = None
    spill_bytes = 0
    K = 32

    @property
    def stages(self) -> int:
        return 4 // self.form.planes

    @property
    def blocks(self) -> int:
        """That fit on a multiprocessor at once."""
        return 1 if self.m == 128 else 2

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"{self.form.name}_{self.m}x{self.n}"

    @property
    def struct(self) -> str:
        """The product of tensor_dense.cuh."""
        return f"MatrixProduct<{self.form.struct}, MatrixTile<{self.m}, {self.n}, {self.stages}>>"

    def shared_bytes(self, *, a_inner: bool, b_inner: bool) -> int:
        """The stages of a slice of each plane, whose lines, along the contiguous index, are padded by 8."""
        sides = ((self.m, a_inner), (self.n, b_inner))
        slices = (m * (self.K + 8) if inner else self.K * (m + 8) for m, inner in sides)
        return 2 * self.stages * self.form.planes * sum(slices)

    def grid(self, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return ceil_div(m, self.m), ceil_div(n, self.n), 1


@dataclass(frozen=True)
class WgmmaTile:
    """How wgmma.cuh makes a product of planes: a block for each multiprocessor takes one tile of C after another."""

    form: Form
    m: int
    n: int

    header = "wgmma.cuh"
    source = "const TensorMap*"
    needs = "sm_90a"
    host_excluded = None
    blocks = 1
    spill_bytes = 64  # in the epilogue, of scaled forms
    K = 64

    @property
    def threads(self) -> int:
        """A producer's warpgroup, and one for every 64 rows."""
        return 128 * (1 + self.m // 64)

    @property
    def cluster(self) -> int:
        """Blocks that share their part of B.  Of four and more, too few fit on the card at once."""
        return 2 if self.m == 128 else 1

    @property
    def stages(self) -> int:
        """As many as shared memory holds; more than 6 gain nothing."""
        return min(6, (self.SHARED_BYTES - self._patch_bytes) // (self._stage_bytes + self.BARRIER_BYTES))

    SHARED_BYTES = (227 << 10) - 1024  # of a block, less what aligning the stages may take
    BARRIER_BYTES = 16  # of a stage

    @property
    def _patch_bytes(self) -> int:
        """Sixteen lines of 32, padded by 8, for each of four warps for every 64 rows."""
        return 4 * 16 * (32 + 8) * 4 * (self.m // 64)

    @property
    def _stage_bytes(self) -> int:
        return 2 * self.K * self.form.planes * (self.m + self.n)

    @property
    def name(self) -> str:
        """As part of an entry's name."""
        return f"{self.form.name}_wgmma_{self.m}x{self.n}"

    @property
    def struct(self) -> str:
        """The product of tensor_dense.cuh."""
        return f"WgmmaProduct<WgmmaTile<{self.form.struct}, {self.m}, {self.n}, {self.stages}, {self.cluster}>>"

    def shared_bytes(self, *, a_inner: bool, b_inner: bool) -> int:
        """Patches, then the stages, aligned to 1024, and their barriers."""
        return self._patch_bytes + 1024 + self.stages * (self._stage_bytes + self.BARRIER_BYTES)

    def box_rows(self, *, a_inner: bool, b_inner: bool) -> tuple[int, int]:
        """How many rows of the planes of A and of B, stored along k or not, the kernel copies at once."""
        return self.m if a_inner else self.K, (self.n if b_inner else self.K) // self.cluster

    def _clusters(self, m: int, n: int) -> int:
        return ceil_div(m, self.m * self.cluster) * ceil_div(n, self.n)

    def grid(self, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for an m by n product."""
        return self.cluster * min(self._clusters(m, n), max(1, multiprocessors // self.cluster)), 1, 1

    def clocks(self, m: int, n: int, multiprocessors: int) -> int:
        """About how long the card takes for every 64 along k of an m by n product."""
        products = {1: 1, 2: 3}[self.form.planes]
        multiply = products * self.m * self.n * self.K // 2048
        # wgmma reads 64 lines of A and n of B for every 64 rows; the copy engine writes each slice once.
        read = products * (self.m // 64) * 2 * self.K * (64 + self.n)
        share_memory = (read + self._stage_bytes) // 128
        waves = ceil_div(self._clusters(m, n), max(1, multiprocessors // self.cluster))
        return waves * max(multiply, share_memory)


ProductTile = MatrixTile | WgmmaTile


def matrix_tiles(form: Form) -> tuple[MatrixTile, ...]:
    """The largest first."""
    return MatrixTile(form, 128, 128), MatrixTile(form, 64, 64)


def wgmma_tiles(form: Form) -> tuple[WgmmaTile, ...]:
    """The largest first: as wide as registers allow."""
    return WgmmaTile(form, 128, 256 // form.planes), WgmmaTile(form, 64, 128)


def matrix_tile_for(form: Form, m: int, n: int, multiprocessors: int, arch: str) -> ProductTile:
    """As :func:`tile_for`; here too the bits do not depend on the tile."""
    if arch == WgmmaTile.needs:
        return min(wgmma_tiles(form), key=lambda tile: tile.clocks(m, n, multiprocessors))
    largest, smallest = matrix_tiles(form)
    x, y, _ = largest.grid(m, n, multiprocessors)
    return largest if 10 * x * y >= 9 * multiprocessors else smallest


def _tensor_product(
    name: str, epilogue: str, tile: ProductTile, rest: str, *, a_inner: bool, b_inner: bool, constants: bool = False
) -> Entry:
    """An entry of tensor_dense.cuh; ``epilogue`` is an activation, an optimizer or nothing.

    In ``rest``, SOURCE is what the product takes.
    """
    kind = f"{name}_{epilogue}" if epilogue else name
    struct = f"{epilogue}Rule" if constants else camel(epilogue)
    parameters = ", ".join(filter(None, [tile.struct, struct]))
    return Entry(
        f"{kind}_{tile.name}",
        tile.header,
        f"{name}<{parameters}>",
        arguments(f"{_ROWS}, {rest.replace('SOURCE', tile.source)}"),
        tile.threads,
        tile.shared_bytes(a_inner=a_inner, b_inner=b_inner),
        host_excluded=tile.host_excluded,
        blocks=tile.blocks,
        spill_bytes=tile.spill_bytes,
        needs=tile.needs,
        cluster=tile.cluster,
        constants=constants,
    )


def tensor_forward(activation: str, tile: ProductTile) -> Entry:
    rest = (
        "SOURCE x_planes, int64_t x_plane, SOURCE w_planes, const int* x_lines, const int* w_columns, "
        "const float* x, const float* w, const float* b, float* z, float* y, uint16_t* y_planes, int k, int n"
    )
    return _tensor_product("tensor_forward", activation, tile, rest, a_inner=True, b_inner=False)


def tensor_backward_input(activation: str, tile: ProductTile) -> Entry:
    rest = (
        "SOURCE dz_planes, int64_t dz_plane, SOURCE w_planes, const int* dz_lines, const int* w_lines, "
        "const float* dz, const float* w, const float* saved, const uint16_t* saved_planes, float* dx, "
        "uint16_t* dx_planes, int k, int n"
    )
    return _tensor_product("tensor_backward_input", activation, tile, rest, a_inner=True, b_inner=True)


def tensor_backward_weight(tile: ProductTile) -> Entry:
    rest = (
        "SOURCE x_planes, int64_t x_plane, SOURCE dz_planes, int64_t dz_plane, const int* x_columns, "
        "const int* w_lines, const int* dz_columns, const float* x, const float* dz, float* dw, int k, int n"
    )
    return _tensor_product("tensor_backward_weight", "", tile, rest, a_inner=False, b_inner=False)


def tensor_backward_update(optimizer: str, tile: ProductTile) -> Entry:
    rest = (
        "SOURCE x_planes, int64_t x_plane, SOURCE dz_planes, int64_t dz_plane, const int* x_columns, "
        "const int* w_lines, const int* dz_columns, const float* x, const float* dz, const float* db, "
        "const double* totals, float* weight, float* bias, uint16_t* w_planes, float* weight_slots, "
        "float* bias_slots, int64_t size, int k, int n"
    )
    name = "tensor_backward_update"
    return _tensor_product(name, optimizer, tile, rest, a_inner=False, b_inner=False, constants=True)


SPLIT_BYTES = 4 * 2 * WARPS_PER_BLOCK  # of a block that splits a row: two words of each warp
COLUMN_THREADS = 1024  # of the blocks that go through all rows of 32 columns


def _planes(name: str, form: Form, rest: str, threads: int = ROW_THREADS, shared_bytes: int = 0) -> Entry:
    function = f"{name}<{form.struct}>"
    return Entry(f"{name}_{form.name}", "planes.cuh", function, arguments(rest), threads, shared_bytes)


def split_rows(form: Form) -> Entry:
    rest = (
        f"{_ROWS}, const float* x, const int* order, const int* weight_lines, uint16_t* planes, int64_t plane, "
        "int* lines, int* columns, int n"
    )
    return _planes("split_rows", form, rest, shared_bytes=SPLIT_BYTES)


def split_weights(form: Form) -> Entry:
    rest = "const float* w, uint16_t* planes, int* lines, int* columns, int k, int n"
    return _planes("split_weights", form, rest, shared_bytes=SPLIT_BYTES)


def split_columns(form: Form) -> Entry:
    rest = (
        f"{_ROWS}, const float* dz, const int* lines, const int* x_lines, uint16_t* planes, int64_t plane, "
        "int* columns, float* db, int n"
    )
    return _planes("split_columns", form, rest, COLUMN_THREADS, 4 * COLUMN_THREADS)


def sum_columns() -> Entry:
    signature = f"{_ROWS}, const uint16_t* dz, float* db, int n"
    return Entry("sum_columns", "planes.cuh", "sum_columns", arguments(signature), COLUMN_THREADS, 4 * COLUMN_THREADS)


def clear_words() -> Entry:
    return Entry("clear_words", "planes.cuh", "clear_words", arguments("int* words, int64_t size"), ROW_THREADS)


def _tensor_entries() -> list[Entry]:
    entries = []
    for form in FORMS.values():
        entries += [split_rows(form), split_weights(form), split_columns(form)]
        tiles: tuple[ProductTile, ...] = (*matrix_tiles(form), *wgmma_tiles(form))
        for tile in tiles:
            entries.append(tensor_backward_weight(tile))
            entries += [tensor_backward_update(optimizer, tile) for optimizer in OPTIMIZERS]
            entries += [tensor_forward(activation, tile) for activation in ACTIVATIONS]
            entries += [tensor_backward_input(activation, tile) for activation in ACTIVATIONS]
    return [*entries, sum_columns(), clear_words()]


def dense_backward_atomic() -> Entry:
    signature = (
        f"{_ROWS}, const float* x, const float* dz, const float* w, float* dw, float* db, float* dx, int k, int n"
    )
    name = "dense_backward_atomic"
    return Entry(name, "dense.cuh", name, arguments(signature), 256, 3 * 32 * 33 * 4)


LOCAL_ROWS = 4  # of locally_connected.cuh


def _local(name: str, rest: str, *, activation: str | None = None, shared_bytes: int = 0) -> Entry:
    kind = f"{name}_{activation}" if activation else name
    instance = f"{name}<{camel(activation)}>" if activation else name
    signature = arguments(f"{_ROWS}, {rest}")
    return Entry(kind, "locally_connected.cuh", instance, signature, ROW_THREADS, shared_bytes)


def local_forward(activation: str) -> Entry:
    rest = (
        "const float* x, const float* w, const float* b, float* z, float* y, int m, int n, int window, int pitch, "
        "int b_step"
    )
    return _local("local_forward", rest, activation=activation)


def local_backward_input(activation: str) -> Entry:
    rest = "const float* dz, const float* w, const float* saved, float* dx, int m, int n, int window, int pitch"
    return _local("local_backward_input", rest, activation=activation)


def local_backward_weight() -> Entry:
    rest = "const float* x, const float* dz, float* dw, int m, int n, int window, int pitch"
    return _local("local_backward_weight", rest)


def local_backward_bias() -> Entry:
    return _local("local_backward_bias", "const float* dz, float* db, int n, int pitch")


def local_backward_shared_bias() -> Entry:
    return _local("local_backward_shared_bias", "const float* dz, float* db, int n", shared_bytes=SUM_BYTES)


def _over_rows(name: str, function: str, rest: str) -> Entry:
    return Entry(name, "rows.cuh", function, arguments(f"{_ROWS}, {rest}"), ROW_THREADS)


SOURCES = {"float32": "float", "uint8": "unsigned char"}  # C types of a data set's inputs


def gather(source: str) -> Entry:
    """``source`` is one of :data:`SOURCES`."""
    ctype = SOURCES[source]
    rest = f"const int* order, const {ctype}* data, float scale, float* x, int n"
    return _over_rows(f"gather_{source}", f"gather<{ctype}>", rest)


def standardize() -> Entry:
    return _over_rows(
        "standardize", "standardize", "const float* x, const float* mean, const float* scale, float* y, int n"
    )


def dropout() -> Entry:
    rest = (
        "const float* x, float* y, int n, uint64_t seed, uint64_t purpose, uint64_t layer, uint64_t threshold, "
        "float keep"
    )
    return _over_rows("dropout", "dropout", rest)


def zero() -> Entry:
    return _over_rows("zero", "zero", "float* x, int n")


def activation_backward(activation: str) -> Entry:
    function = f"activation_backward<{camel(activation)}>"
    return _over_rows(f"activation_backward_{activation}", function, "const float* saved, float* dy, int n")


def _target(kind: str, textured: bool) -> tuple[str, str, str]:
    """The C type of targets, the struct that reads one, and the end of the entry's name."""
    source = "Texture" if textured else "const float*"
    return source, {"index": "Index", "dense": "DenseTarget"}[kind] + f"<{source}>", "" if textured else "_plain"


def loss(name: str, kind: str, *, textured: bool = True) -> Entry:
    """``kind`` is ``index`` or ``dense``; ``textured`` whether targets are read through a texture object."""
    source, target, suffix = _target(kind, textured)
    signature = (
        f"{_ROWS}, const int* order, const float* logits, {source} targets, const float* weights, "
        "const float* mean, const float* scale, float* delta, double* sums, unsigned* arrived, double* totals, "
        "double* losses, int n"
    )
    function = f"loss<{camel(name)}, {target}>"
    return Entry(f"loss_{name}_{kind}{suffix}", "loss.cuh", function, arguments(signature), ROW_THREADS, SUM_BYTES)


def total_error() -> Entry:
    signature = "const Step* step, const double* sums, int count, double* totals, double* losses"
    return Entry("total_error", "loss.cuh", "total_error", arguments(signature), ROW_THREADS, SUM_BYTES)


def step_errors() -> Entry:
    """Follows a resident kernel, whose own entry :mod:`.resident` makes for each plan."""
    signature = "const Step* step, const float* errors, int capacity, double* losses"
    return Entry("step_errors", "loss.cuh", "step_errors", arguments(signature), ROW_THREADS, SUM_BYTES)


def output(function: str) -> Entry:
    signature = f"{_ROWS}, const float* logits, const float* mean, const float* scale, float* y, int n"
    name = f"output_{function}"
    return Entry(name, "loss.cuh", f"output<{camel(function)}Output>", arguments(signature), ROW_THREADS)


METRIC_THREADS = 1024  # where the sums have one column, one block adds up the whole batch


def classes(kind: str, *, textured: bool = True) -> Entry:
    """Arguments as of :func:`loss`."""
    source, target, suffix = _target(kind, textured)
    signature = (
        f"const Step* step, const int* order, const float* output, {source} targets, int* predicted, int* actual, "
        "int n, int classes"
    )
    return Entry(f"classes_{kind}{suffix}", "metrics.cuh", f"classes<{target}>", arguments(signature), ROW_THREADS)


def metric(name: str, *, textured: bool = True) -> Entry:
    """``textured`` makes a difference to metrics of numbers."""
    if METRICS[name].of == "classes":
        output, source, compared, suffix = "const int*", "const int*", "Classes", ""
    else:
        source, _, suffix = _target("dense", textured)
        output, compared = "const float*", f"Numbers<{source}>"
    signature = (
        f"const Step* step, const int* order, const float* weights, {output} output, {source} targets, double* sums, "
        "int n"
    )
    function = f"metric<{camel(name)}Metric, {compared}>"
    return Entry(f"metric_{name}{suffix}", "metrics.cuh", function, arguments(signature), METRIC_THREADS, SUM_BYTES)


def metric_entries(kind: str, *, textured: bool = True) -> list[Entry]:
    """All that metrics added up by batches can ask for on targets of one kind."""
    added = (name for name, row in METRICS.items() if row.of != "ranks")
    return [classes(kind, textured=textured), *(metric(name, textured=textured) for name in added)]


def reduce() -> Entry:
    signature = "const float* partials, int64_t pitch, int shares, int uses, int64_t size, float* gradient"
    return Entry("reduce", "update.cuh", "reduce", arguments(signature), ROW_THREADS)


def squares() -> Entry:
    signature = "const float* gradient, int64_t size, double* sums"
    return Entry("squares", "update.cuh", "squares", arguments(signature), ROW_THREADS, SUM_BYTES)


def clip() -> Entry:
    signature = "const double* sums, int count, const double* totals, float* factor"
    return Entry("clip", "update.cuh", "clip", arguments(signature), ROW_THREADS, SUM_BYTES, constants=True)


def update(optimizer: str) -> Entry:
    signature = (
        "const Step* step, const double* totals, const float* factor, const float* partials, int64_t pitch, "
        "int shares, float* parameters, float* slots, int64_t size"
    )
    function = f"update<{optimizer}Rule>"
    return Entry(f"update_{optimizer}", "update.cuh", function, arguments(signature), ROW_THREADS, constants=True)


def advance() -> Entry:
    return Entry("advance", "update.cuh", "advance", arguments("Step* step"), 1)


SCAN_TILE = 4096  # of scan.cuh
SCANNED = {"float32": ("float", 4), "int32": ("int", 4), "float64": ("double", 8)}  # C type and bytes of summands
SORT_DIGITS = 256
KEYS = {"uint32": ("uint32_t", 4), "uint64": ("uint64_t", 8)}  # C type and bytes of keys that can be sorted


def prefix_sum(dtype: str) -> Entry:
    """``dtype`` is one of :data:`SCANNED`."""
    ctype, size = SCANNED[dtype]
    signature = f"const {ctype}* x, {ctype}* y, int64_t n, int exclusive, unsigned* ticket, uint64_t* nodes"
    shared = 8 + size * (ROW_THREADS // WARP + 1)
    return Entry(f"prefix_sum_{dtype}", "scan.cuh", f"prefix_sum<{ctype}>", arguments(signature), ROW_THREADS, shared)


def sort_tile(dtype: str) -> int:
    """The keys that a block sorts: SortTile of sort.cuh."""
    return SORT_DIGITS * 64 // KEYS[dtype][1]


def sort_counts(dtype: str) -> Entry:
    """``dtype`` is one of :data:`KEYS`."""
    signature = f"const {KEYS[dtype][0]}* keys, int64_t n, int shift, int* counts"
    name, shared = f"sort_counts_{dtype}", 4 * SORT_DIGITS
    return Entry(name, "sort.cuh", "sort_counts", arguments(signature), SORT_DIGITS, shared)


def sort_scatter(dtype: str) -> Entry:
    """``dtype`` is one of :data:`KEYS`."""
    key, key_bytes = KEYS[dtype]
    signature = (
        f"const {key}* keys, const int* values, int64_t n, int shift, const int* starts, {key}* keys_out, "
        "int* values_out"
    )
    warps = SORT_DIGITS // WARP
    shared = sort_tile(dtype) * (key_bytes + 4) + 4 * (SORT_DIGITS * (warps + 1) + warps)
    return Entry(f"sort_scatter_{dtype}", "sort.cuh", "sort_scatter", arguments(signature), SORT_DIGITS, shared)


def rank_keys() -> Entry:
    signature = (
        "const Step* step, const int* order, const float* weights, const float* output, const int* actual, "
        "uint32_t* keys, int* of_class, float* of_weight, int n, int curves"
    )
    return Entry("rank_keys", "ranks.cuh", "rank_keys", arguments(signature), ROW_THREADS)


def rank_weights() -> Entry:
    signature = (
        "const int* rows, const int* of_class, const float* of_weight, int64_t n, int positive, double* positives, "
        "double* negatives"
    )
    return Entry("rank_weights", "ranks.cuh", "rank_weights", arguments(signature), ROW_THREADS)


def rank_area(metric: str) -> Entry:
    signature = (
        "const uint32_t* keys, const double* positives, const double* negatives, int64_t n, double* parts, "
        "unsigned* arrived, double* sums, int curve, int curves"
    )
    function = f"rank_area<{camel(metric)}Metric>"
    return Entry(f"rank_area_{metric}", "ranks.cuh", function, arguments(signature), ROW_THREADS, SUM_BYTES)


def rank_entries() -> list[Entry]:
    """All that metrics of ranks can ask for, beside the classes of rows."""
    areas = [rank_area(name) for name, row in METRICS.items() if row.of == "ranks"]
    sort = [sort_counts("uint32"), prefix_sum("int32"), sort_scatter("uint32")]
    return [rank_keys(), *sort, rank_weights(), prefix_sum("float64"), *areas]


def extremes() -> Entry:
    signature, shared = "const float* x, int64_t n, float* parts", 4 * 2 * WARPS_PER_BLOCK
    return Entry("extremes", "histogram.cuh", "extremes", arguments(signature), ROW_THREADS, shared)


def histogram() -> Entry:
    signature = "const float* x, int64_t n, const double* edges, int bins, unsigned long long* counts"
    return Entry("histogram", "histogram.cuh", "histogram", arguments(signature), ROW_THREADS, 4 * MOST_BINS)


CHAINS = 8  # of rates.cuh


def multiply_add() -> Entry:
    """For measuring the card: no plan asks for it."""
    signature = "float a, float b, int rounds, float* y"
    return Entry("multiply_add", "rates.cuh", "multiply_add", arguments(signature), ROW_THREADS)


def all_entries() -> tuple[Entry, ...]:
    """Every entry that a plan or its metrics can ask for, from the tables of the NumPy specification."""
    entries = [*(dense_forward_part(tile) for tile in (*TILES, SPLIT)), dense_forward_part_few()]
    entries += [dense_backward_weight(tile) for tile in TILES]
    for activation in ACTIVATIONS:
        entries += [dense_forward(activation, tile) for tile in TILES]
        entries += [dense_backward_input(activation, tile) for tile in TILES]
        entries += [dense_forward_sum(activation), activation_backward(activation)]
        entries += [local_forward(activation), local_backward_input(activation)]
    entries += [local_backward_weight(), local_backward_bias(), local_backward_shared_bias()]
    entries += [dense_backward_atomic(), gather("float32"), gather("uint8"), standardize()]
    entries += [
        zero(),
        dropout(),
        *(loss(name, kind, textured=t) for name, row in LOSSES.items() for kind in row.targets for t in (True, False)),
        total_error(),
        step_errors(),
    ]
    entries += [*(output(function) for function in OUTPUTS), reduce(), squares(), clip()]
    entries += [*(update(optimizer) for optimizer in OPTIMIZERS), advance()]
    forms: tuple[Tile | SplitTile | str, ...] = (*TILES, SPLIT, "narrow", "few")
    entries += [dense_backward_update(optimizer, form) for optimizer in OPTIMIZERS for form in forms]
    entries += [
        head(name, kind, textured=t) for name, row in LOSSES.items() for kind in row.targets for t in (True, False)
    ]
    entries += [*(prefix_sum(dtype) for dtype in SCANNED), extremes(), histogram(), *rank_entries()]
    entries += [entry(dtype) for dtype in KEYS for entry in (sort_counts, sort_scatter)]
    for kind, textured in product(("index", "dense"), (True, False)):
        entries += metric_entries(kind, textured=textured)
    entries += _tensor_entries()
    return tuple(dict.fromkeys(entries))
