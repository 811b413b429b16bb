"""Whether a whole network goes forward in one launch for few rows, and how its layers are cut there."""

from __future__ import annotations

from dataclasses import dataclass

from .... import plan as ops
from ....plan import Plan
from ..kernels import (
    NETWORK_BUFFERS,
    NETWORK_MOST_ROWS,
    NETWORK_SPREAD_ROWS,
    NETWORK_TILE_COLUMNS,
    WARP_TEAM,
    activation_number,
    ceil_div,
)
from . import thresholds
from .dense import DensePath, Simt
from .select import OutputPath, select
from .setting import Setting


@dataclass(frozen=True)
class FewRowsNetwork:
    """A network in one launch.

    Attributes:
        layers: of each the struct NetworkLayer of fused/network.cuh.
        spread: how many of them all blocks compute; the last block to end the last of these goes on alone.
        standardize: what is done to the inputs, or None.
        output: what makes predictions.
    """

    plan: Plan
    layers: tuple[tuple[int, ...], ...]
    spread: int
    standardize: ops.Standardize | None
    output: ops.Output
    multiprocessors: int
    why: str

    def __str__(self) -> str:
        alone = len(self.layers) - self.spread
        return f"one launch for up to {NETWORK_MOST_ROWS} rows, {self.spread} layers by all blocks, {alone} by one"

    @property
    def pitch(self) -> int:
        """Elements of a row of scratch memory."""
        return 4 * ceil_div(max(self.plan.n_in, *(n for n, *_ in self.layers)), 4)

    @property
    def scratch_bytes(self) -> int:
        return 4 * NETWORK_BUFFERS * NETWORK_MOST_ROWS * self.pitch

    def takes(self, rows: int) -> bool:
        """Whether the launch has room for so many rows."""
        return rows <= NETWORK_MOST_ROWS

    def blocks(self, rows: int) -> int:
        """Blocks of a launch: as many as its layers have tiles, if the card has as many multiprocessors."""
        groups = ceil_div(rows, NETWORK_SPREAD_ROWS)
        tiles = max((groups * ceil_div(n, 1 << shift) for n, *_, shift in self.layers[: self.spread]), default=1)
        return min(tiles, self.multiprocessors)

    @property
    def lengths(self) -> dict[str, int]:
        """Those that a launch tells beside its arguments."""
        products = sum(p.size for p in self.plan.parameters if len(p.shape) == 2)
        return {"products": products, "parameters": self.plan.parameter_count}


def few_rows_network(plan: Plan, setting: Setting) -> FewRowsNetwork | str:
    """How one launch takes few rows through a network, or why none does.

    A row's bits are those of other launches, since a z that multiply-adds make is one chain over k in either.
    """
    if not thresholds.NETWORK_IS_USED:
        return "a test asks for it"
    selection = select(plan, setting, is_training=False)
    offsets = {p.name: p.offset for p in plan.parameters}
    shapes = {p.name: p.shape for p in plan.parameters}
    if plan.parameter_count >= 1 << 31:
        return f"{plan.parameter_count:,} parameters are more than an int counts"
    layers, standardize, output = [], None, None
    for each in selection.operations:
        op, path = each.operation, each.path
        if isinstance(op, ops.Dense):
            if not isinstance(path, DensePath) or not isinstance(path.forward, Simt):
                return f"{each.title} is made otherwise than by chains of multiply-adds"
            k, n = shapes[op.weight]
            layers.append((k, n, offsets[op.weight], offsets[op.bias] if op.bias else -1, op.activation))
        elif isinstance(op, ops.Standardize) and op.x == "x":
            standardize = op
        elif isinstance(op, ops.Output) and isinstance(path, OutputPath):
            if path.team != WARP_TEAM:
                return f"a block takes a row of its {plan.n_out:,} outputs"
            output = op
        elif not isinstance(op, ops.Gather):
            return f"{each.title} has no part in it"
    if not layers or output is None:
        return "it has no dense layer"
    least = thresholds.NETWORK_SPREAD_WEIGHTS
    spread = max((number + 1 for number, (k, n, *_) in enumerate(layers) if k * n > least), default=0)
    described = tuple(
        (n, weight, bias, activation_number(activation), _shift(n, setting.multiprocessors if number < spread else 1))
        for number, (_, n, weight, bias, activation) in enumerate(layers)
    )
    why = f"multiply-adds make all layers; the last of more than {least:,} weights is number {spread}"
    return FewRowsNetwork(plan, described, spread, standardize, output, setting.multiprocessors, why)


def _shift(n: int, blocks: int) -> int:
    """How wide tiles are: as narrow as possible, if there are no more than so many."""
    columns = next((each for each in NETWORK_TILE_COLUMNS if ceil_div(n, each) <= blocks), NETWORK_TILE_COLUMNS[-1])
    return columns.bit_length() - 1
