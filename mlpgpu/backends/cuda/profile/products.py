"""The tensor-core products of a step, run one at a time: as a step launches them, and without their epilogues.

They are compared with other libraries' products of the very same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ....datasets import Dataset
from ....plan import Plan
from .. import kernels
from ..kernels import ProductTile, padded_columns, padded_rows
from ..kernels.launches import At, Launch, Map
from ..run.program import CudaProgram
from ..runtime import Device, Event, capture, seconds_of
from .probe import Probe

SCRATCH = "a product alone"

# The operands of a kernel: the names of its arguments, without what the name of a split operand ends with.
OPERANDS = {
    "tensor_forward": ("x", "w"),
    "tensor_forward_loss": ("x", "w"),
    "tensor_backward_input": ("dz", "w"),
    "tensor_backward_update": ("x", "dz"),
    "tensor_backward_weight": ("x", "dz"),
}
# The axes of each operand.
AXES = {"x": ("rows", "k"), "w": ("k", "n"), "dz": ("rows", "n")}


@dataclass(frozen=True)
class Operand:
    """A matrix that is multiplied: float32 numbers, or the bfloat16 components (hi, or hi and lo) of split ones.

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
        data: what it is trained on.
    """

    def __init__(self, plan: Plan, device: Device, start: Callable[[CudaProgram], None], data: Dataset) -> None:
        self._plan, self._device = plan, device
        self._probe = Probe(plan, device, start, data)
        self.stream = self._probe.stream

    @property
    def launches(self) -> list[Launch]:
        """Those of the first shard, in the order of a step."""
        shard = self._probe.binder.lowered.shards[0]
        return [launch for launch in shard if launch.entry.operand_format in kernels.FORMS]

    def address(self, array: str) -> int:
        """The address of an array of the program."""
        return self._probe.program.address(array)

    def alone(self, launch: Launch) -> Launch:
        """The same product by the same kernel, whose epilogue only stores C, in an array of its own.

        C is stored in bfloat16 where the operands are, except for gradients of weights; otherwise in float32.
        """
        family, tile = _family(launch), self._tile(launch)
        widths = [int(launch.values[axis]) for launch in self.launches for axis in AXES["w"]]  # type: ignore[arg-type]  # numbers
        most_rows = kernels.padded_rows(max(self._plan.capacity, *widths))
        with self._device:
            self._probe.program.workspace.take({SCRATCH: 4 * most_rows * padded_columns(max(widths))})
        taken = {"b": None, "z": None, "saved": None, "saved_planes": None, "db": None, "parts": None, "arrived": None}
        if family in ("tensor_forward", "tensor_forward_loss"):
            entry = kernels.tensor_forward("identity", tile)
        elif family == "tensor_backward_input":
            entry = kernels.tensor_backward_input("identity", tile)
        else:
            entry = kernels.tensor_backward_weight(tile)
        ending = "_planes" if tile.form.is_single else ""
        stored = {
            **dict.fromkeys(("y", "y_planes", "dx", "dx_planes")),
            f"y{ending}": At(SCRATCH),
            f"dx{ending}": At(SCRATCH),
        }
        # Arguments that a product which ends with the loss does not have.
        missing = {**dict.fromkeys(("x_lines", "w_columns", "x", "w")), "y_plane": 0, "early": 0}
        values = {"dw": At(SCRATCH), **missing, **launch.values, **taken, **stored}
        return replace(
            launch, entry=entry, values={argument.name: values[argument.name] for argument in entry.arguments}
        )

    def operands(self, launch: Launch) -> tuple[Operand, Operand]:
        """What it multiplies, before either is transposed: bfloat16 components, or the floats of scaled ones."""
        first, second = (self._operand(launch, name) for name in OPERANDS[_family(launch)])
        return first, second

    def turn(self, launch: Launch, seconds: float) -> Callable[[], float]:
        """A function that runs a launch for about so many seconds, as one graph, and returns the time of each run."""
        probe, stream = self._probe, self.stream
        launch = replace(launch, overlaps=False)  # it follows itself, and must not read early what it writes
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
                start, end = Event(self._device, timing=True), Event(self._device, timing=True)
                probe.reset()
                stream.record(start)
                replay.launch(stream)
                stream.record(end)
                end.synchronize()
                return end.seconds_since(start) / repeats

        return run

    def _tile(self, launch: Launch) -> ProductTile:
        form = launch.entry.operand_format
        assert form is not None
        tiles: tuple[ProductTile, ...] = (*kernels.matrix_tiles(form), *kernels.wgmma_tiles(form))
        return next(tile for tile in tiles if launch.entry.name.endswith(f"_{tile.name}"))

    def _operand(self, launch: Launch, name: str) -> Operand:
        lengths = {**launch.values, "rows": self._plan.capacity}
        rows, columns = (lengths[axis] for axis in AXES[name])
        assert isinstance(rows, int) and isinstance(columns, int)
        form = launch.entry.operand_format
        if form and not form.scaled:
            planes, pitch = launch.values[f"{name}_planes"], padded_columns(columns)
            assert isinstance(planes, At | Map)
            address = self.address(planes.array)
            return Operand(address, rows, columns, pitch, form.planes, padded_rows(rows) * pitch)
        array = launch.values[name]
        assert isinstance(array, At)
        return Operand(self.address(array.array) + 4 * array.offset, rows, columns, columns, 0)


def _family(launch: Launch) -> str:
    return launch.entry.function.partition("<")[0]
