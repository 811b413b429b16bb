"""Training steps inside one kernel, which keeps the network on the chip."""

from __future__ import annotations

from ..kernels.launches import Launch
from ..persistent.design import Design
from .binding import Binder
from .workspace import Workspace

MOST_SEQUENCE = 2**32 - 1  # of a step's number inside the kernel, by which its messages are known; theirs begin with 0


class PersistentSteps:
    """Launches of a plan's persistent kernel.

    Attributes:
        sequence: the number of the next step inside the kernel, which goes on from launch to launch.
    """

    def __init__(self, workspace: Workspace, design: Design) -> None:
        self._workspace, self._design = workspace, design
        self.sequence = 1
        self._train: dict[tuple[str, bool], Launch] = {}  # by the kind of the data

    def put(self, binder: Binder, steps: int) -> None:
        """Put so many steps on the stream, all in one launch."""
        stream, arrays, data = self._workspace.stream, self._workspace.arrays, binder.data
        if self.sequence + steps > MOST_SEQUENCE:
            stream.fill(arrays.addresses["mail"], arrays.sizes["mail"])
            self.sequence = 1
        if data.kind not in self._train:
            source, textured = data.kind
            self._train[data.kind] = self._design.train(source, textured=textured)
        binder.bind(self._train[data.kind], steps=steps, tag=self.sequence)(stream)
        binder.bind(self._design.add_errors(steps))(stream)
        self.sequence += steps
