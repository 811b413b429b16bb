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


def _replayed(stream: Stream, put: Callable[[], object], repeats: int, reset: Callable[[], None]) -> float:
    with capture(stream, "a graph of measured launches") as graph:
        for _ in range(repeats):
            put()
    replay = graph.instantiate()
    start, end = Event(stream.device, timing=True), Event(stream.device, timing=True)
    found = []
    for _ in range(TRIALS):
        # During the first replay the host puts the second one on the stream, so that it begins without delay.
        reset()
        replay.launch(stream)
        reset()
        stream.record(start)
        replay.launch(stream)
        stream.record(end)
        end.synchronize()
        found.append(end.seconds_since(start) / repeats)
    return statistics.median(found)
