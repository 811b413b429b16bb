"""Training steps inside one kernel, which keeps the network on the chip."""

from __future__ import annotations

from ..persistent.kernel import PersistentKernel
from .binding import Binder, Put
from .workspace import Workspace

MOST_SEQUENCE = 2**32 - 1  # of a step's messages; words that no step has written hold 0


class PersistentSteps:
    """Launches of a plan's persistent kernel.

    Attributes:
        sequence: the sequence number of the next step's messages, which goes on from launch to launch.
    """

    def __init__(self, workspace: Workspace, kernel: PersistentKernel) -> None:
        self.workspace, self.kernel = workspace, kernel
        self.sequence = 1

    def numbered(self, steps: int) -> int:
        """The sequence number of the first of so many steps, which are put on the stream next."""
        stream, arrays = self.workspace.stream, self.workspace.arrays
        if self.sequence + steps > MOST_SEQUENCE:
            stream.fill(arrays.addresses["messages"], arrays.sizes["messages"])
            self.sequence = 1
        first = self.sequence
        self.sequence += steps
        return first


class BoundPersistentSteps:
    """Launches of a persistent kernel on one data set, bound once: a small set's epoch takes less than binding."""

    def __init__(self, steps: PersistentSteps, binder: Binder) -> None:
        self._steps, self._binder, self._stream = steps, binder, steps.workspace.stream
        source, textured = binder.data.kind
        self._train = binder.prepare(steps.kernel.train(source, textured=textured), steps=0, sequence=0)
        self._add_errors: dict[int, Put] = {}  # by the number of steps

    def put(self, steps: int) -> None:
        """Put so many steps on the stream, all in one launch."""
        self._train(steps=steps, sequence=self._steps.numbered(steps))
        if steps not in self._add_errors:
            self._add_errors[steps] = self._binder.bind(self._steps.kernel.add_errors(steps))
        self._add_errors[steps](self._stream)
