"""How long work takes on a card: launches are captured as a graph, which is replayed between two events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .graphs import capture
from .streams import Event, Stream

REPLAY_SECONDS = 2e-3  # about how long a replay is
MOST_REPEATS = 256
TRIALS = 5


def seconds_of(
    stream: Stream, put: Callable[[], object], *, reset: Callable[[], None] = lambda: None, most: int = MOST_REPEATS
) -> float:
    """The median time of what ``put`` puts on a stream, when up to ``most`` repeats of it run in a row.

    ``reset`` is called before each replay, and not measured.
    """
    first = _replayed(stream, put, 1, reset)
    repeats = min(most, int(REPLAY_SECONDS / first))
    return _replayed(stream, put, repeats, reset) if repeats > 1 else first


class Stopwatch:
    """Times a stream's work between two events, which exist before the work begins."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._start, self._end = Event(stream.device, timing=True), Event(stream.device, timing=True)

    def seconds(self, put: Callable[[], object]) -> float:
        """How long the stream takes for what ``put`` puts on it."""
        self._stream.record(self._start)
        put()
        self._stream.record(self._end)
        self._end.synchronize()
        return self._end.seconds_since(self._start)


def _replayed(stream: Stream, put: Callable[[], object], repeats: int, reset: Callable[[], None]) -> float:
    with capture(stream, "a graph of measured launches") as graph:
        for _ in range(repeats):
            put()
    replay = graph.instantiate()
    stopwatch, found = Stopwatch(stream), []
    for _ in range(TRIALS):
        # During the first replay the host puts the second one on the stream, so that it begins without delay.
        reset()
        replay.launch(stream)
        reset()
        found.append(stopwatch.seconds(lambda: replay.launch(stream)) / repeats)
    return statistics.median(found)
