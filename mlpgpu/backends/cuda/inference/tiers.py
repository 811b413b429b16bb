"""The launches of an inference, for few rows to many, with the arrays that they share on a card."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....plan import Plan
from .. import kernels
from ..kernels import strided_grid
from ..kernels.launches import BLOCKS_PER_MULTIPROCESSOR, At, Launch, Lowered, Map, Value
from ..lower.lowering import lower
from ..run.arrays import Arrays, check_room
from ..run.maps import TensorMaps
from ..runtime import Device, LoadedKernels, Stream, capture, pack
from ..select.inference import by_helpers, card_checks_inputs, piece_rows, row_tiers
from .copies import AT_ONCE
from .room import Room

ROOMS = AT_ONCE + 3  # of pieces that flow through: of the others one goes up, one is computed, one comes back
DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}


class Tier:
    """The launches for at most ``capacity`` rows.

    Attributes:
        rooms: for pieces; made when they are first needed.
        by_helpers: whether threads in C++ copy its rows, and look for inputs that are not finite.
        checks_inputs: whether the card looks for inputs that are not finite.
    """

    def __init__(
        self, plan: Plan, source: str, lowered: Lowered, device: Device, stream: Stream, *, by_helpers: bool
    ) -> None:
        self.plan, self.capacity, self.lowered = plan, plan.capacity, lowered
        self.rooms: list[Room] = []
        self.by_helpers = by_helpers
        self.checks_inputs = not by_helpers and card_checks_inputs(source, plan.capacity)
        # What a launch is told in an array of words, and what blocks of it tell each other, belongs to its tier.
        kinds = {_stem(name) for name in lowered.words}
        private = {name: size for name, size in lowered.bytes.items() if name in lowered.words or _stem(name) in kinds}
        self.arrays = Arrays(device)
        for name, size in self.arrays.allocate(private).items():
            stream.fill(self.arrays.addresses[name], max(1, size))
        for name, words in lowered.words.items():
            stream.upload(self.arrays.addresses[name], np.array(words, np.int32))

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Bytes of the arrays that tiers share."""
        return {name: size for name, size in self.lowered.bytes.items() if name not in self.arrays.addresses}

    def close(self) -> None:
        """Give everything back; work that uses it must have ended."""
        for room in self.rooms:
            room.close()
        self.arrays.close()


def find_nonfinite(plan: Plan, multiprocessors: int) -> Launch:
    """The launch that looks for inputs that are not finite."""
    values: dict[str, Value] = {
        "step": At("step"), "shard": 0, "shards": 1, "data": At("data"), "found": At("found"), "n": plan.n_in,
    }  # fmt: skip
    grid = strided_grid(plan.capacity * plan.n_in, BLOCKS_PER_MULTIPROCESSOR * multiprocessors)
    return Launch(kernels.find_nonfinite_rows(), grid, values)


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


class Tiers:
    """A network's launches for inputs of one type, ``"float32"`` or ``"uint8"``, and its arrays.

    Its methods are called inside ``with device:``.

    Arguments:
        plan: without a training step; its capacity bounds the rows of a piece.
        shared: addresses of the parameters and the statistics.
        has_helpers: whether there are threads in C++ that copy rows.

    Attributes:
        dtype: of an input on the card, of ``item_bytes`` each.

    Raises:
        BackendError: the card has not the memory.
    """

    def __init__(
        self, plan: Plan, device: Device, stream: Stream, source: str, shared: dict[str, int], *, has_helpers: bool
    ) -> None:
        self._device, self._stream, self._source = device, stream, source
        self.dtype = DTYPES[source]
        self.item_bytes = self.dtype.itemsize
        self._scale = 1.0
        self._is_ready = False  # whether operands were made of the current weights
        most = piece_rows(plan, self.item_bytes)
        self._tiers = []
        for rows in row_tiers(most):
            of_rows = plan.with_capacity(rows)
            lowered = lower(
                of_rows, multiprocessors=device.multiprocessors, source=source, textured=False, arch=device.arch
            )
            are_copied = has_helpers and by_helpers(rows * plan.n_in * self.item_bytes)
            self._tiers.append(Tier(of_rows, source, lowered, device, stream, by_helpers=are_copied))
        self._arrays = Arrays(device, shared)
        sizes: dict[str, int] = {"order": 4 * most}
        for tier in self._tiers:
            for name, size in tier.shared_bytes.items():
                sizes[name] = max(size, sizes.get(name, 0))
        check_room(plan, device, self._arrays.missing(sizes))
        for name, size in self._arrays.allocate(sizes).items():
            stream.fill(self._arrays.addresses[name], max(1, size))
        stream.upload(self._arrays.addresses["order"], np.arange(most, dtype=np.int32))
        self._maps = TensorMaps(device, stream, self._arrays)
        self._kernels = LoadedKernels(device)

    def set_scale(self, scale: float) -> None:
        """Inputs are multiplied by ``scale``."""
        if scale != self._scale:
            self._scale = scale
            for tier in self._tiers:
                for room in tier.rooms:
                    room.forget_launches()

    def parameters_changed(self) -> None:
        """Make what products need of the parameters anew before the next rows."""
        self._is_ready = False

    def tier(self, rows: int) -> Tier:
        """The launches for so many rows, or for pieces of them, with operands of the current weights."""
        tier = next((each for each in self._tiers if rows <= each.capacity), self._tiers[-1])
        if not self._is_ready:
            self._kernels.load(launch.entry for launch in tier.lowered.evaluation_begin)
            for launch in tier.lowered.evaluation_begin:
                self._put(launch, tier, {})
            self._is_ready = True
        return tier

    def rooms(self, tier: Tier, count: int) -> Sequence[Room]:
        """So many rooms for pieces of a tier, ready to be replayed."""
        while len(tier.rooms) < count:
            tier.rooms.append(Room(self._device, tier.plan, tier.capacity, self.dtype))
        for room in tier.rooms[:count]:
            if room.replay is None:
                self._capture(tier, room)
        return tier.rooms[:count]

    def _capture(self, tier: Tier, room: Room) -> None:
        launches = list(tier.lowered.evaluation)
        if tier.checks_inputs:
            launches.append(find_nonfinite(tier.plan, self._device.multiprocessors))
        self._kernels.load(launch.entry for launch in launches)
        self._maps.make(tier.lowered.maps())
        self._stream.synchronize()
        with capture(self._stream, f"a prediction of up to {tier.capacity} rows") as graph:
            for launch in launches:
                self._put(launch, tier, room.addresses)
        room.replay = graph.instantiate()
        graph.close()

    def _put(self, launch: Launch, tier: Tier, of_room: dict[str, int]) -> None:
        addresses = {**self._arrays.addresses, **tier.arrays.addresses, **of_room}

        def number(argument: kernels.Argument) -> float | None:
            value = launch.values[argument.name]
            if isinstance(value, Map):
                return self._maps.addresses[value]
            if not isinstance(value, At):
                return value
            if value.array == "scale":
                return self._scale
            return addresses[value.array] + value.offset * argument.item_bytes

        packed = pack(launch.entry, [number(argument) for argument in launch.entry.arguments])
        self._kernels[launch.entry].launch(self._stream, launch.grid, packed, pdl=launch.pdl)

    def close(self) -> None:
        """Give everything back; work that uses it must have ended."""
        for tier in self._tiers:
            tier.close()
        self._maps.close()
        self._arrays.close()
