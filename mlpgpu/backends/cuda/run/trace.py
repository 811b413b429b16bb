"""When work on streams began and ended, for timelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..runtime import Device, Event, Stream


@dataclass(frozen=True)
class Span:
    """When something ran, in seconds since its timeline began, and on which stream."""

    stream: str
    name: str
    start: float
    end: float


class Trace:
    """Remembers when work on streams begins and ends, inside :meth:`recording`.

    A program that is given one tells it of its launches, of its copies of data, and of the steps on each piece of them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_on = False
        self._found: list[tuple[str, str, Event, Event]] = []

    def begin(self, stream: Stream, name: str) -> Callable[[], None]:
        """The work that the stream is given from here on has this name, until the returned function is called."""
        if not self._is_on:
            return lambda: None
        start = self._reached(stream)
        return lambda: self._found.append((stream.name, name, start, self._reached(stream)))

    @contextmanager
    def recording(self, stream: Stream) -> Iterator[list[Span]]:
        """Record inside the block; the list is filled when it ends, with times since ``stream`` came to its begin."""
        spans: list[Span] = []
        self._is_on, self._found, begin = True, [], self._reached(stream)
        yield spans
        self._is_on = False
        self._device.synchronize()
        for stream_name, name, start, end in self._found:
            spans.append(Span(stream_name, name, start.seconds_since(begin), end.seconds_since(begin)))

    def _reached(self, stream: Stream) -> Event:
        """An event behind the stream's work so far."""
        event = Event(self._device, timing=True)
        stream.record(event)
        return event
