"""Training steps inside one kernel, which keeps the network on the chip."""

from __future__ import annotations

from ..kernels.launches import Launch
from ..persistent.kernel import PersistentKernel
from .binding import Binder
from .workspace import Workspace

MOST_SEQUENCE = 2**32 - 1  # of a step's messages; words that no step has written hold 0


class PersistentSteps:
    """Launches of a plan's persistent kernel.

    Attributes:
        sequence: the sequence number of the next step's messages, which goes on from launch to launch.
    """

    def __init__(self, workspace: Workspace, kernel: PersistentKernel) -> None:
        self._workspace, self._kernel = workspace, kernel
        self.sequence = 1
        self._train: dict[tuple[str, bool], Launch] = {}  # by the kind of the data

    def put(self, binder: Binder, steps: int) -> None:
        """Put so many steps on the stream, all in one launch."""
        stream, arrays, data = self._workspace.stream, self._workspace.arrays, binder.data
        if self.sequence + steps > MOST_SEQUENCE:
            stream.fill(arrays.addresses["messages"], arrays.sizes["messages"])
            self.sequence = 1
        if data.kind not in self._train:
            source, textured = data.kind
            self._train[data.kind] = self._kernel.train(source, textured=textured)
        binder.bind(self._train[data.kind], steps=steps, sequence=self.sequence)(stream)
        binder.bind(self._kernel.add_errors(steps))(stream)
        self.sequence += steps
