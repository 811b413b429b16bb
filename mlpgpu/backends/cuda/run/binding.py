"""A plan's launches made ready for one data set: named values become addresses and numbers, and are packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..kernels import Argument, Entry
from ..kernels.launches import At, Launch, Map, Value
from ..runtime import Function, PreparedLaunch, Stream, pack
from .data.feed import Feed
from .workspace import Workspace

Put = Callable[[Stream], None]  # puts a launch whose arguments are packed on a stream


class Binder:
    """Binds launches to a data set.

    Arguments:
        seed: of the random numbers that launches draw.
        rows: an evaluation's, where its launches are for fewer rows than the plan's capacity.
        reaches_cards: whether kernels reach the memory of other ranks' cards.

    Attributes:
        lowered: the plan's launches for data of this kind.
    """

    def __init__(
        self, workspace: Workspace, data: Feed, seed: int, *, rows: int | None = None, reaches_cards: bool = False
    ) -> None:
        self._workspace, self.data = workspace, data
        self._kernels = workspace.kernels_for(data, rows, reaches_cards=reaches_cards)
        self.lowered = self._kernels.lowered
        self._numbers: dict[str, Value] = {
            "scale": data.scale,
            "seed": seed,
            "weights": data.arrays.addresses.get("weights"),
            "plain targets": data.arrays.addresses.get("targets"),
            "targets": data.targets,
        }

    def tell(self, addresses: Mapping[str, int]) -> None:
        """Take the addresses of what belongs to neither the program nor the data set, before launches are bound."""
        self._numbers |= addresses

    def bind(self, launch: Launch, stage: int = 0, **others: Value) -> Put:
        """Pack the arguments of a launch.

        Args:
            stage: the step's index among those whose inputs are made ready together.
            others: values by name, which come before arrays of that name; those of arrays are where these begin.
        """
        function, packed = self.function(launch.entry), self._packed(launch, stage, others)
        grid, pdl = launch.grid, launch.pdl

        def put(stream: Stream) -> None:
            function.launch(stream, grid, packed, pdl=pdl)

        return self._traced(launch.entry, put)

    def prepare(self, launch: Launch, **changing: Value) -> Callable[..., None]:
        """A launch of which some arguments change, for the plan's stream alone.

        Args:
            changing: first values of these, by name; each call is given others.
        """
        stream, packed = self._workspace.stream, self._packed(launch, 0, changing)
        prepared = PreparedLaunch(self.function(launch.entry), stream, launch.grid, packed, pdl=launch.pdl)

        def put(**values: float) -> None:
            self._traced(launch.entry, lambda _: prepared.launch(**values))(stream)

        return put

    def _packed(self, launch: Launch, stage: int, others: Mapping[str, Value]) -> bytes:
        numbers = {**self._numbers, **others}
        values = [self._number(a, launch.values[a.name], numbers, others, stage) for a in launch.entry.arguments]
        return pack(launch.entry, values)

    def _traced(self, entry: Entry, put: Put) -> Put:
        """The launch of a kernel of the plan's own is told the trace, if there is one."""
        trace = self._workspace.trace
        if trace is None or entry not in self._kernels.loaded:
            return put
        begin = trace.begin

        def put_traced(stream: Stream) -> None:
            end = begin(stream, entry.name)
            put(stream)
            end()

        return put_traced

    def function(self, entry: Entry) -> Function:
        """The kernel of an entry: the plan's own, or one of no plan that was loaded."""
        loaded = self._kernels.loaded
        return loaded[entry] if entry in loaded else self._workspace.auxiliary[entry]

    def _number(
        self, argument: Argument, value: Value, numbers: Mapping[str, Value], others: Mapping[str, Value], stage: int
    ) -> float | None:
        """The number that a kernel is given for the value of an argument."""
        if isinstance(value, Map):
            return self._workspace.maps[replace(value, place=stage) if value.array in others else value]
        if not isinstance(value, At):
            return value
        if value.array in numbers:
            begin = numbers[value.array]
            assert begin is None or isinstance(begin, (int, float))
            return begin + value.offset * argument.item_bytes if begin is not None and value.offset else begin
        address = self.data.arrays.addresses.get(value.array) or self._workspace.arrays.addresses[value.array]
        return address + value.offset * argument.item_bytes

    def set_constant(self, name: str, values: np.ndarray) -> None:
        """Upload a constant variable, in each module that reads it."""
        for address in self._kernels.constants[name]:
            self._workspace.stream.upload(address, values)
