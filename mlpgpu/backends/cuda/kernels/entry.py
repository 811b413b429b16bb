"""What an entry is: a kernel's name, what it takes, and how it is launched.

The sources under ``cuda/`` define templates; an :class:`Entry` names one instantiation.
:func:`unit_source` writes the translation unit of some entries, for nvcc and for the host compiler of the
tests alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from .operand_format import OperandFormat

WARP = 32
ROW_THREADS = 256
WARPS_PER_BLOCK = ROW_THREADS // WARP
SUM_BYTES = 8 * WARP  # one double for each warp of the largest block

ROWS = "const Step* step[0], int shard, int shards"  # what a kernel over the rows of a shard takes first
DROPOUT = "uint64_t seed, int layer, uint32_t least, float keep"  # and of a dropout last; keep is 0 without one
DROPS = "const uint32_t* kept[0], float keep"  # of a dropout that a product ends with; null without one
DROPPED = "_dropped"  # behind the name of a kernel's family that ends with one: others know nothing of dropouts
KEPT_BITS = 32  # of a word: an element each
DROPOUT_BLOCK = 8  # of random numbers that are made together, each of which decides on an element

# Of array elements by C type; of a tensor map, those of the matrix that it describes.
ITEM_BYTES = {
    "float": 4, "double": 8, "int": 4, "unsigned": 4, "uint32_t": 4, "uint64_t": 8, "unsigned long long": 8,
    "uint16_t": 2, "unsigned char": 1, "void": 1, "Texture": 4, "TensorMap": 2, "Step": 24, "TailLayer": 20,
    "StackLayer": 40, "NetworkLayer": 20, "RowStepLevel": 36, "UpdatedLayer": 36, "TensorRowStepLevel": 48,
    "LayerOfBlocks": 40, "FewRowsLayer": 84, "int64_t": 8,
}  # fmt: skip

SOURCES = {"float32": "float", "uint8": "unsigned char"}  # C types of a data set's inputs


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def strided_grid(elements: int, most_blocks: int, per_thread: int = 1) -> tuple[int, int, int]:
    """The grid of a kernel whose threads stride over an array, each taking ``per_thread`` elements at a time."""
    return max(1, min(ceil_div(elements, ROW_THREADS * per_thread), most_blocks)), 1, 1


@dataclass(frozen=True)
class Argument:
    """One kernel argument.

    Attributes:
        ctype: its C type, such as ``const float*`` or ``int``.
        axes: of the array that a pointer or a texture stands for: whole numbers, and names of lengths, which are the
            kernel's whole-number arguments, ``rows`` of the launch's shard, ``grid.x``, ``grid.y`` and ``grid.z``, or
            those that the launch adds (``Launch.lengths``).  None where the signature states none.
        is_updated: whether the kernel reads the array and writes it back.
    """

    name: str
    ctype: str
    axes: tuple[str | int, ...] | None = None
    is_updated: bool = False

    @property
    def is_pointer(self) -> bool:
        return self.ctype.endswith("*")

    @property
    def is_array(self) -> bool:
        """Whether it stands for an array in device memory."""
        return self.is_pointer or self.ctype == "Texture"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of the array."""
        return ITEM_BYTES[self.ctype.removeprefix("const ").removesuffix("*")]


@dataclass(frozen=True)
class Product:
    """A matrix product that a kernel makes.

    Attributes:
        axes: lengths, as in an :class:`Argument`, whose product is the number of multiplications.
        when: arguments that may be null; if all of them are, the kernel leaves this product out.  A product without
            such arguments is always made.
    """

    axes: tuple[str | int, ...]
    when: tuple[str, ...] = ()


DENSE_PRODUCT = Product(("rows", "k", "n"))  # of x (rows, k) and a weight (k, n), or of either's gradient


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        name: its ``extern "C"`` name.
        header: the file under ``cuda/`` that defines its template.
        function: the template's instantiation, such as ``dense_forward<Relu, SimtTile<64, 64>>``.
        arguments: in order.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        main_loop: the file under ``cuda/gemm/`` that makes its products, where the template takes one as an argument.
        block: the struct in ``cuda/`` whose THREADS and SHARED_BYTES must be ``threads`` and ``shared_bytes``, as the
            compiler checks; ``PlainBlock`` is that of a kernel whose threads stride over elements and share no memory.
            None is for kernels outside the table.
        cooperative: whether its blocks wait for each other.
        host_excluded: the instruction that keeps it from running on the host in tests, or None.
        blocks: that must fit on a multiprocessor at once, which limits their registers.
        spill_bytes: the most that a thread may store and load again for that, as ptxas counts it.
        needs: the oldest architecture that has its instructions, such as ``sm_80``; one with a letter, such as
            ``sm_90a``, is the only one.
        cluster: blocks that share their memory, in groups along the grid's first axis.
        prefetched: arguments whose arrays it may read before it waits for the launch before it (programmatic dependent
            launch, common/dependent_launch.cuh), each with the bit of its argument ``prefetch`` that allows it, or 0
            where it always does.  None if it never waits for another launch, so that no launch may overlap it.
        unawaited: whether nothing in its step waits for it.
        constants: whether it reads the constant variables of math/optimizers.cuh, which each compiled unit has for
            itself.
        loss_numbers: whether it reads that of math/losses.cuh.
        products: the matrix products that it makes.
        operand_format: what its tensor cores multiply in the place of float32 numbers, if they do.
        gathered: a C struct, of which the template takes several at the end, and how many arguments make one.
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
    loss_numbers: bool = False
    prefetched: tuple[tuple[str, int], ...] | None = None
    unawaited: bool = False
    main_loop: str | None = None
    block: str | None = "PlainBlock"
    products: tuple[Product, ...] = ()
    operand_format: OperandFormat | None = None
    gathered: tuple[str, int] | None = None

    @property
    def constant_names(self) -> tuple[str, ...]:
        """The constant variables that it reads."""
        return ("hyper", "schedule") * self.constants + ("loss_numbers",) * self.loss_numbers

    @property
    def headers(self) -> tuple[str, ...]:
        """What its unit includes."""
        return (self.main_loop, self.header) if self.main_loop else (self.header,)

    @property
    def unit(self) -> str:
        """The file by which it is compiled together with others: its main loop, or its own header."""
        return self.headers[0]

    @property
    def is_extended(self) -> bool:
        """Whether its launches have attributes, which not every call can give them."""
        return self.cooperative or self.prefetched is not None

    def runs_on(self, arch: str) -> bool:
        """Whether it can be compiled for ``arch``."""
        if self.needs[-1].isalpha():
            return arch == self.needs
        return architecture(arch) >= architecture(self.needs)


@cache
def arguments(signature: str) -> tuple[Argument, ...]:
    """Arguments from a C parameter list that also states the axes of arrays.

    In ``"const float* x[rows,k], inout float* w[k,n], float* sum[], int k, int n"`` the kernel reads x, updates w in
    place and writes one element of sum.  The bytes of an array with an axis of 0 are not counted among those that the
    kernel moves: a step's description, which caches serve, and scratch memory.
    """
    return tuple(_argument(parameter) for parameter in re.split(r",\s*(?![^\[]*\])", signature.strip()))


def _argument(parameter: str) -> Argument:
    found = re.fullmatch(r"(inout )?(.+) (\w+)(?:\[([\w.,]*)\])?", parameter)
    assert found, f"not a parameter: {parameter!r}"
    inout, ctype, name, listed = found.groups()
    if listed is None:
        return Argument(name, ctype)
    axes = tuple(int(axis) if axis.isdigit() else axis for axis in listed.split(",") if axis)
    return Argument(name, ctype, axes, inout is not None)


def dropping(made: Entry, family: str) -> Entry:
    """The variant of a product that ends with a dropout."""
    name = made.name.replace(family, family + DROPPED, 1)
    return replace(made, name=name, function=made.function.removesuffix(">") + ", true>")


def unit_source(entries: Sequence[Entry]) -> str:
    """C++ source of a translation unit that defines ``entries``."""
    includes = [f'#include "{header}"' for header in included(entries)]
    definitions = [_definition(entry) for entry in entries]
    checks = dict.fromkeys(_check(entry) for entry in entries if entry.block)
    return "\n".join([*includes, "", "namespace mlpgpu::entries {", "", *checks, "", *definitions, "}"])


def included(entries: Iterable[Entry]) -> list[str]:
    """The headers of all entries, each once, main loops before the kernels that take them."""
    return list(dict.fromkeys(header for entry in entries for header in entry.headers))


def _check(entry: Entry) -> str:
    """An assertion that the kernel's block is what the table says."""
    sizes = f"{entry.block}::THREADS == {entry.threads} && {entry.block}::SHARED_BYTES == {entry.shared_bytes}"
    return f'static_assert({sizes}, "{entry.header} lays out another block than the table of entries");'


def _definition(entry: Entry) -> str:
    parameters = ", ".join(f"{a.ctype} {a.name}" for a in entry.arguments)
    call = ", ".join(_given(entry))
    cluster = f" __cluster_dims__({entry.cluster}, 1, 1)" if entry.cluster > 1 else ""
    return (
        f'extern "C" __global__ void{cluster} __launch_bounds__({entry.threads}, {entry.blocks})\n'
        f"{entry.name}({parameters}) {{\n    ::mlpgpu::{entry.function}({call});\n}}\n"
    )


def _given(entry: Entry) -> list[str]:
    """What the template is given: the arguments, or structs of them."""
    names = [a.name for a in entry.arguments]
    if entry.gathered is None:
        return names
    struct, each = entry.gathered
    alone = next(i for i, name in enumerate(names) if name.endswith("_0"))
    members = [names[i : i + each] for i in range(alone, len(names), each)]
    return [*names[:alone], *(f"::mlpgpu::{struct}{{{', '.join(of)}}}" for of in members)]


def units(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries by unit, in order and each once: what is compiled together."""
    grouped: dict[str, list[Entry]] = {}
    for entry in dict.fromkeys(entries):
        grouped.setdefault(entry.unit, []).append(entry)
    return grouped


def architecture(arch: str) -> int:
    """``sm_90a`` as 90."""
    return int(re.sub(r"\D", "", arch))
