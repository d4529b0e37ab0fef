"""Streams and events: the order in which the device does what the host hands it.

Owns the seam between the engine's steps and CUDA. Three streams: ``upload`` brings pixels and metadata,
``compute`` runs everything that a forward pass reads or writes, ``download`` takes rows away. Work within a
stream runs in the order it was given; between streams only a recorded event orders anything. On a CPU each
piece of work runs at once, in the same order; tests put a device in this place that runs work when told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream; ``torch.cuda.Event`` is one. One that was never recorded is over."""

    def query(self) -> bool:
        """Whether the device has passed the point."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the device has; raises what the device failed with."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one; both timed, recorded and over."""


class Stream(Protocol):
    def run(self, work: Callable[[], object]) -> None:
        """Hands ``work`` to the device, in this stream's order. What it raises on the host passes through."""

    def run_raw(self, work: Callable[[int], object]) -> None:
        """``run`` for work that enqueues by itself in the stream with this handle, 0 on a CPU: the current
        stream stays what it is, which saves most of what ``run`` costs."""

    def record(self, event: Any) -> None:
        """Puts ``event`` behind everything handed over so far; an earlier recording is forgotten."""

    def wait(self, event: Any) -> None:
        """What is handed over from now on waits, on the device, for the event's last recording."""

    def probe(self) -> None:
        """Raises what the device failed with, if it has; does not wait."""


@dataclass(frozen=True)
class Streams:
    """A device's streams, and how its events are made: timed ones know when they passed; those that threads
    wait for block the thread instead of spinning on a core."""

    compute: Stream
    upload: Stream
    download: Stream
    make_event: Callable[[], Event]
    make_timed_event: Callable[[], Event]
    make_blocking_event: Callable[[], Event]


def streams_of(device: torch.device, clock: Callable[[], float]) -> Streams:
    """The streams for a tower on ``device``. clock: seconds, for the timed events of a CPU."""
    if device.type != "cuda":
        stream = InlineStream()

        def make() -> Event:
            return InlineEvent(clock)

        return Streams(stream, stream, stream, make, make, make)
    return Streams(
        CurrentStream(device),
        SideStream(device),
        SideStream(device),
        lambda: cuda_event(),
        lambda: cuda_event(enable_timing=True),
        lambda: cuda_event(blocking=True),
    )


def cuda_event(**options: bool) -> Event:
    event: Event = torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
    return event


class InlineEvent:
    """A point that is passed as soon as it is recorded."""

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
    """Work runs when it is handed over, on the calling thread."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def run_raw(self, work: Callable[[int], object]) -> None:
        work(0)

    def record(self, event: InlineEvent) -> None:
        event.record()

    def wait(self, event: InlineEvent) -> None:
        assert event.query()

    def probe(self) -> None:
        pass


class CurrentStream:
    """Whatever stream of the device is the calling thread's current one."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[int, torch.cuda.Stream] = {}

    def run(self, work: Callable[[], object]) -> None:
        work()

    def run_raw(self, work: Callable[[int], object]) -> None:
        work(torch._C._cuda_getCurrentRawStream(self._index))

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self._current())

    def wait(self, event: torch.cuda.Event) -> None:
        self._current().wait_event(event)

    def probe(self) -> None:
        self._current().query()

    def _current(self) -> torch.cuda.Stream:
        """torch.cuda.current_stream costs several microseconds, mostly for making an object, and a step asks
        eight times. Torch's streams live as long as the process, so that a handle stays what it was."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = torch.cuda.current_stream(self._index)
        return known


class SideStream:
    """A stream of its own, which does not wait for the default stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def run_raw(self, work: Callable[[int], object]) -> None:
        work(self.stream.cuda_stream)

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self.stream)

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def probe(self) -> None:
        self.stream.query()
