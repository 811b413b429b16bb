"""The tensor-core products of a step, run one at a time: as a step launches them, and without what it does beside.

That is for comparisons with other libraries' products, of the very numbers that ours multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import kernels
from .costs import TENSOR_HEADERS, form_in
from .driver import Event, capture
from .kernels import ProductTile, padded_columns, padded_rows
from .launches import At, Launch, Map
from .probe import Probe
from .timing import seconds_of

SCRATCH = "a product alone"

# The arguments that are a form's operands as planes, and as floats, without the ending.
OPERANDS = {
    "tensor_forward": ("x", "w"),
    "tensor_forward_loss": ("x", "w"),
    "tensor_backward_input": ("dz", "w"),
    "tensor_backward_update": ("x", "dz"),
    "tensor_backward_weight": ("x", "dz"),
}
# Of an argument, the axes of its array.
AXES = {"x": ("rows", "k"), "w": ("k", "n"), "dz": ("rows", "n")}


@dataclass(frozen=True)
class Operand:
    """Where a matrix lies that is multiplied: in planes of bfloat16 numbers, or none of them and in float32."""

    address: int
    rows: int
    columns: int
    pitch: int  # elements from one row to the next
    planes: int
    plane: int = 0  # elements from one plane to the next


class Products(Probe):
    """A program whose products on tensor cores can be run one at a time, in a training step's caches and arrays."""

    @property
    def launches(self) -> list[Launch]:
        """Those of the first share, in the order of a step."""
        assert self._training is not None
        share = self._kernels(self._training[0]).lowered.shares[0]
        return [launch for launch in share if launch.entry.header in TENSOR_HEADERS]

    def alone(self, launch: Launch) -> Launch:
        """The same product, by the same kernel but for its end, which stores C in an array of its own as it is.

        It is stored as a plane of bfloat16 where operands have one, but for gradients of weights; else in float32.
        """
        family, tile = _family(launch), self._tile(launch)
        widths = [int(launch.values[axis]) for launch in self.launches for axis in AXES["w"]]  # type: ignore[arg-type]  # numbers
        most_rows = kernels.padded_rows(max(self._plan.capacity, *widths))
        with self._device:
            self._take({SCRATCH: 4 * most_rows * padded_columns(max(widths))})
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
        # What one that ends with a loss is not given.
        missing = {**dict.fromkeys(("x_lines", "w_columns", "x", "w")), "y_plane": 0, "early": 0}
        values = {"dw": At(SCRATCH), **missing, **launch.values, **taken, **stored}
        return replace(
            launch, entry=entry, values={argument.name: values[argument.name] for argument in entry.arguments}
        )

    def operands(self, launch: Launch) -> tuple[Operand, Operand]:
        """What it multiplies, before either is transposed: planes of bfloat16, or floats that planes are made of."""
        first, second = (self._operand(launch, name) for name in OPERANDS[_family(launch)])
        return first, second

    def turn(self, launch: Launch, seconds: float) -> Callable[[], float]:
        """A function that runs a launch for about so many seconds, as one graph, and returns what each time took."""
        assert self._training is not None
        launch = replace(launch, overlaps=False)  # of a launch of its own, whose arrays it may not read too early
        with self._device:
            self._have([launch.entry])
            put = self._bind(launch, self._training[0], self._sampling.seed)
            once = seconds_of(self._stream, lambda: put(self._stream), reset=self._reset, most=1)
            repeats = max(1, round(seconds / once))
            with capture(self._stream, "a graph of one product") as graph:
                for _ in range(repeats):
                    put(self._stream)
            replay = graph.instantiate()

        def run() -> float:
            with self._device:
                start, end = Event(self._device, timing=True), Event(self._device, timing=True)
                self._reset()
                self._stream.record(start)
                replay.launch(self._stream)
                self._stream.record(end)
                end.synchronize()
                return end.seconds_since(start) / repeats

        return run

    def _tile(self, launch: Launch) -> ProductTile:
        form = form_in(launch)
        assert form is not None
        tiles: tuple[ProductTile, ...] = (*kernels.matrix_tiles(form), *kernels.wgmma_tiles(form))
        return next(tile for tile in tiles if launch.entry.name.endswith(f"_{tile.name}"))

    def _operand(self, launch: Launch, name: str) -> Operand:
        lengths = {**launch.values, "rows": self._plan.capacity}
        rows, columns = (lengths[axis] for axis in AXES[name])
        assert isinstance(rows, int) and isinstance(columns, int)
        form = form_in(launch)
        if form and not form.scaled:
            planes, pitch = launch.values[f"{name}_planes"], padded_columns(columns)
            assert isinstance(planes, At | Map)
            address = self._addresses[planes.array]
            return Operand(address, rows, columns, pitch, form.planes, padded_rows(rows) * pitch)
        array = launch.values[name]
        assert isinstance(array, At)
        return Operand(self._addresses[array.array] + 4 * array.offset, rows, columns, columns, 0)


def _family(launch: Launch) -> str:
    return launch.entry.function.partition("<")[0]
