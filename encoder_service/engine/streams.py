"""Streams and events, which order the work on the device.

Owns the interface between the engine and CUDA. There are three streams: ``upload`` copies pixels to the
device, ``compute`` runs everything that a forward pass reads or writes, ``download`` copies rows to the host.
Work in one stream runs in the order in which it was queued. Between streams, only events order work. On a
CPU, work runs at once. Tests use a device that runs work later, in any order that streams allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream, for example ``torch.cuda.Event``. An event that was never recorded has passed."""

    def query(self) -> bool:
        """Whether the device has passed the point."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the device has passed the point. Raises the device's failure."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one, both recorded and passed."""


class Stream(Protocol):
    def run(self, work: Callable[[], object]) -> None:
        """Queues ``work`` in this stream. Raises what ``work`` raises on the host."""

    def record(self, event: Any) -> None:
        """Records ``event`` after all work queued so far. Replaces an earlier recording."""

    def wait(self, event: Any) -> None:
        """Makes work that is queued from now on wait, on the device, for the event's latest recording."""

    def probe(self) -> None:
        """Raises the device's failure if there is one. Does not wait."""


@dataclass(frozen=True)
class Streams:
    """A device's streams. make_event: returns a new event with timing; a thread that waits for it sleeps
    instead of spinning."""

    compute: Stream
    upload: Stream
    download: Stream
    make_event: Callable[[], Event]

    @property
    def all(self) -> tuple[Stream, Stream, Stream]:
        return self.compute, self.upload, self.download


def streams_of(device: torch.device, clock: Callable[[], float]) -> Streams:
    """The streams of ``device``. On a GPU, compute is the caller's current stream; it must also be the
    current stream of the threads that launch. clock: seconds, for the events of a CPU."""
    if device.type != "cuda":
        stream = InlineStream()
        return Streams(stream, stream, stream, lambda: InlineEvent(clock))
    return Streams(
        CudaStream(torch.cuda.current_stream(device)),
        CudaStream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        CudaStream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        cuda_event,
    )


def cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    return event


class InlineEvent:
    """An event that has passed as soon as it is recorded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.passed_s = 0.0

    def record(self) -> None:
        self.passed_s = self._clock()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: InlineEvent) -> float:
        return (end_event.passed_s - self.passed_s) * 1e3


class InlineStream:
    """Runs work immediately on the calling thread."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self, event: InlineEvent) -> None:
        event.record()

    def wait(self, event: InlineEvent) -> None:
        assert event.query()

    def probe(self) -> None:
        pass


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self.stream)

    def wait(self, event: torch.cuda.Event) -> None:
        event.wait(self.stream)

    def probe(self) -> None:
        self.stream.query()
