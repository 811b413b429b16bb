"""The tensor-core products of a step, run one at a time: as a step launches them, and without their epilogues.

They are compared with other libraries' products of the very same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ....datasets import Dataset
from ....plan import Plan
from .. import kernels
from ..kernels import Argument, GemmTile, padded_columns, padded_rows
from ..kernels.launches import At, Launch, Map, Value
from ..run.program import CudaProgram
from ..runtime import Device, Stopwatch, capture, seconds_of
from .costs import lengths_of
from .probe import Probe

SCRATCH = "a product alone"
# Products of operands that lie in memory.
_FAMILIES = {"tensor_forward", "tensor_forward_loss"} | {
    f"tensor_backward_{of}" for of in ("input", "weight", "update")
}


@dataclass(frozen=True)
class Operand:
    """A matrix that is multiplied: float32 numbers, or the one to three bfloat16 components of split ones.

    Attributes:
        pitch: elements from one row to the next.
        components: 0 of float32 numbers.
        component_stride: elements from one component to the next.
    """

    address: int
    rows: int
    columns: int
    pitch: int
    components: int
    component_stride: int = 0


class Products:
    """The products on tensor cores of a training step, in the caches and arrays that the step leaves.

    Arguments:
        start: gives the program its state.
        data: the rows that it is trained on.
    """

    def __init__(self, plan: Plan, device: Device, start: Callable[[CudaProgram], None], data: Dataset) -> None:
        self._plan, self._device = plan, device
        self._probe = Probe(plan, device, start, data)
        self.stream = self._probe.stream

    @property
    def launches(self) -> list[Launch]:
        """The launches of products in the first shard, in the order of a step."""
        shard = self._probe.binder.lowered.shards[0]
        return [launch for launch in shard if _family(launch) in _FAMILIES]

    def address(self, array: str) -> int:
        """The address of an array of the program."""
        return self._probe.program.address(array)

    def alone(self, launch: Launch) -> Launch:
        """The same product by the same kernel, whose epilogue only stores C, in an array that nothing else reads.

        C is stored in bfloat16 where the operands are, except for gradients of weights; otherwise in float32.
        """
        family, tile = _family(launch), self._tile(launch)
        widths = [lengths_of(other, 0)[axis] for other in self.launches for axis in ("k", "n")]
        most_rows = padded_rows(max(self._plan.capacity, *widths))
        with self._device:
            self._probe.program.workspace.take({SCRATCH: 4 * most_rows * padded_columns(max(widths))})
        if family in ("tensor_forward", "tensor_forward_loss"):
            entry = kernels.tensor_forward("identity", tile)
        elif family == "tensor_backward_input":
            entry = kernels.tensor_backward_input("identity", tile)
        else:
            entry = kernels.tensor_backward_weight(tile)
        # What only the epilogue reads or writes; and arguments that a product which ends with the loss does not have.
        left_out: dict[str, Value] = dict.fromkeys(
            ("b", "z", "y", "y_components", "saved", "saved_components", "dx", "dx_components", "db_partials")
        )
        missing: dict[str, Value] = {
            **dict.fromkeys(("x_row_scales", "w_column_scales", "x", "w")),
            "y_stride": 0,
            "prefetch": 0,
            "keep": 1.0,
        }
        ending = "_components" if tile.operand_format.is_single else ""
        stored: dict[str, Value] = {name: At(SCRATCH) for name in (f"y{ending}", f"dx{ending}", "dw")}
        values = {**missing, **launch.values, **left_out, **stored}
        return replace(
            launch, entry=entry, values={argument.name: values[argument.name] for argument in entry.arguments}
        )

    def operands(self, launch: Launch) -> tuple[Operand, Operand]:
        """What a launch multiplies, before either is transposed: bfloat16 components, or the floats of scaled ones."""
        split = [each for each in launch.entry.arguments if each.ctype in ("const uint16_t*", "const TensorMap*")]
        first, second = (self._operand(launch, argument) for argument in split[:2])
        return first, second

    def timer(self, launch: Launch, seconds: float) -> Callable[[], float]:
        """A function that repeats a launch for about so many seconds, as one graph, and returns the time of one."""
        probe, stream = self._probe, self.stream
        launch = replace(launch, pdl=False)  # a repeat must not read before the one before it has written
        with self._device:
            probe.program.workspace.auxiliary.load([launch.entry])
            put = probe.binder.bind(launch)
            once = seconds_of(stream, lambda: put(stream), reset=probe.reset, most=1)
            repeats = max(1, round(seconds / once))
            with capture(stream, "a graph of one product") as graph:
                for _ in range(repeats):
                    put(stream)
            replay = graph.instantiate()

        def run() -> float:
            with self._device:
                stopwatch = Stopwatch(stream)
                probe.reset()
                return stopwatch.seconds(lambda: replay.launch(stream)) / repeats

        return run

    def _tile(self, launch: Launch) -> GemmTile:
        operand_format = launch.entry.operand_format
        assert operand_format is not None
        tiles: tuple[GemmTile, ...] = (
            *kernels.sm80_tiles(operand_format),
            *kernels.sm90_tiles(operand_format),
            *kernels.wide_tiles(operand_format),
            *kernels.medium_tiles(operand_format),
            *kernels.shared_tiles(operand_format),
            *kernels.narrow_tiles(operand_format),
            *kernels.cluster_tiles(operand_format),
        )
        return next(tile for tile in tiles if launch.entry.name.endswith(f"_{tile.name}"))

    def _operand(self, launch: Launch, argument: Argument) -> Operand:
        """One operand; the float32 array of a split one is the argument of the same name without what follows "_"."""
        lengths, operand_format = lengths_of(launch, self._plan.capacity), launch.entry.operand_format
        assert argument.axes is not None and operand_format is not None
        rows, columns = (lengths[str(axis)] for axis in argument.axes[1:])
        if not operand_format.scaled:
            components, pitch = launch.values[argument.name], padded_columns(columns)
            assert isinstance(components, At | Map)
            stride = padded_rows(rows) * pitch
            return Operand(self.address(components.array), rows, columns, pitch, operand_format.components, stride)
        array = launch.values[argument.name.partition("_")[0]]
        assert isinstance(array, At)
        return Operand(self.address(array.array) + 4 * array.offset, rows, columns, columns, 0)


def _family(launch: Launch) -> str:
    return launch.entry.function.partition("<")[0]
