"""Graphs: launches and copies that are captured once and replayed as one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .bindings import call, cu
from .device import Device, Resource
from .streams import Stream


class Graph(Resource):
    """The work that a stream was given inside a :func:`capture`."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, None)
        self.name = name

    def _destroy(self, handle: Any) -> None:
        call(cu.cuGraphDestroy, handle)

    @property
    def nodes(self) -> int:
        """How many launches and copies it holds."""
        _, count = call(cu.cuGraphGetNodes, self.handle)
        return int(count)

    def instantiate(self) -> Replay:
        """Make it ready to launch.  The graph may be closed then; modules and memory that it uses may not."""
        return Replay(self.device, call(cu.cuGraphInstantiate, self.handle, 0), self.name)


class Replay(Resource):
    """A graph that is ready to launch."""

    def __init__(self, device: Device, handle: Any, name: str) -> None:
        super().__init__(device, handle)
        self.name = name

    def _destroy(self, handle: Any) -> None:
        call(cu.cuGraphExecDestroy, handle)

    def launch(self, stream: Stream) -> None:
        """Put the whole graph on a stream."""
        self.device.last_launch = self.name
        call(cu.cuGraphLaunch, self.handle, stream.bound)


@contextlib.contextmanager
def capture(stream: Stream, name: str = "a graph") -> Iterator[Graph]:
    """Put what ``stream`` is given inside the block into a graph instead of running it.

    Another stream takes part from where it waits for an event recorded on this one until this one waits for one
    recorded on the other, which must happen before the block ends.  An error in the block leaves no graph.
    """
    graph = Graph(stream.device, name)
    # In any mode but the relaxed one, device memory that the garbage collector frees meanwhile ends the capture.
    call(cu.cuStreamBeginCapture, stream.bound, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield graph
    except BaseException:
        _, broken = cu.cuStreamEndCapture(stream.bound)
        if broken is not None and int(broken):
            cu.cuGraphDestroy(broken)
        raise
    graph.handle = call(cu.cuStreamEndCapture, stream.bound)
