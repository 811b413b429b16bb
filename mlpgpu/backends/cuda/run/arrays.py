"""Named arrays on a card: the one place where a program allocates the card's memory."""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import BackendError
from ....plan import Dense, Plan
from ..kernels.launches import DELTAS, KEPT_ELEMENTS, OUTPUTS
from ..runtime import Arena, Device, aligned
from ..select.local_stack import ROW_ARRAYS


class Arrays:
    """Arrays on a card by name, allocated as they are asked for.

    Arguments:
        shared: addresses of arrays that another program owns.

    Attributes:
        addresses: of every array.
        sizes: bytes of each array, without those that are shared.
    """

    def __init__(self, device: Device, shared: Mapping[str, int] | None = None) -> None:
        self._device = device
        self._arenas: list[Arena] = []
        self.addresses: dict[str, int] = dict(shared or {})
        self.sizes: dict[str, int] = {}

    def missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The arrays that are not there yet, with the bytes that each takes, which are at least 1."""
        return {name: max(1, size) for name, size in sizes.items() if name not in self.addresses}

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Allocate those that are not there yet, uninitialised and all together; returns :meth:`missing` of them.

        Raises:
            BackendError: the card has not that much free.
        """
        missing = self.missing(sizes)
        if missing:
            arena, addresses = Arena.of(self._device, missing)
            self._arenas.append(arena)
            self.addresses |= addresses
            self.sizes |= {name: sizes[name] for name in missing}
        return missing

    def close(self) -> None:
        """Give the memory back; work that uses it must have ended."""
        for arena in self._arenas:
            arena.close()
        self._arenas, self.addresses, self.sizes = [], {}, {}


def _grows_with_rows(name: str, plan: Plan) -> bool:
    """Whether an array has a part for each row: a buffer, its operands for tensor cores, what a kernel keeps of it."""
    buffer, _, of_buffer = name.partition(".")
    is_of_buffer = not of_buffer or of_buffer.startswith(("components", "row_scales", "fragments"))
    has_rows = buffer in plan.buffers and plan.buffers[buffer].axes[1] == "row"
    of_blocks = "row step.y", "row step.dz", "tensor row step.slopes", "input layer.sums", "input layer.deltas"
    is_listed = name in (*of_blocks, OUTPUTS, DELTAS) or name.startswith(KEPT_ELEMENTS) or name.endswith(ROW_ARRAYS)
    return (has_rows and is_of_buffer) or is_listed


def check_room(plan: Plan, device: Device, sizes: Mapping[str, int]) -> None:
    """Whether the card has room for a plan's arrays, of so many bytes each.

    Raises:
        BackendError: it has not; the message says how many rows or parameters it has room for.
    """
    total, free = sum(map(aligned, sizes.values())), device.free_bytes
    if total <= free:
        return
    of_rows = sum(size for name, size in sizes.items() if _grows_with_rows(name, plan))
    others = total - of_rows
    if others < free:
        rows = (free - others) * plan.capacity // of_rows
        hint = f"a batch of at most about {rows:,} rows fits"
    else:
        hint = f"about {free * plan.parameter_count // others:,} of the {plan.parameter_count:,} parameters fit"
        if plan.tensor is None and any(isinstance(op, Dense) for op in plan.evaluation):
            started = "" if plan.processes > 1 else "under mpirun, a rank for each, "
            hint += f"; {started}parallel='tensor' gives every card a part of the network"
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    got = f"{total:,} for " + ", ".join(f"{name} ({size:,})" for name, size in largest) + ", …"
    what = f"memory of GPU {device.index}"
    raise BackendError(what, expected=f"at most the {free:,} bytes that are free", got=got, hint=hint)
