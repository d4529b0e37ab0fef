"""Streams and events: the order in which the device does what the host hands it.

Owns the seam between the engine's steps and CUDA. Four streams: ``upload`` brings pixels, ``compute`` runs
everything that a forward pass reads or writes, ``download`` takes rows to the host, ``place`` to their places
on the device. Work within a stream runs in the order it was given; between streams only a recorded event
orders anything. On a CPU each piece of work runs at once, in the same order; tests put a device in this place
that runs work when told.

``compute`` stays whatever stream is the caller's current one, the legacy default stream on the engine's
thread: graphs are replayed in the current stream, and whoever runs the graph runner expects his own order.
Plain copies take the legacy stream; a batch of copies does not, and is therefore never made in ``compute``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch

from encoder_service.engine.copies import Copies, CopyList, Memory


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

    def copy(self, copies: Copies, destination: Memory, source: Memory, num_bytes: int) -> None:
        """``copies.one`` in this stream's order. The current stream stays what it is, which saves most of
        what ``run`` costs."""

    def copy_many(self, copies: Copies, pieces: CopyList, count: int) -> None:
        """``copies.many`` in this stream's order."""

    def record(self, event: Any) -> None:
        """Puts ``event`` behind everything handed over so far; an earlier recording is forgotten."""

    def wait(self, event: Any) -> None:
        """What is handed over from now on waits, on the device, for the event's last recording."""

    def follow(self) -> None:
        """What is handed over from now on comes after everything that was before the last call of this, in
        the same stream or, where it stands for one after the other, in the one before. On the thread that
        hands work over, before it does."""

    def probe(self) -> None:
        """Raises what the device failed with, if it has; does not wait."""


@dataclass(frozen=True)
class Streams:
    """A device's streams, and how its events are made: timed ones know when they passed; those that threads
    wait for block the thread instead of spinning on a core."""

    compute: Stream
    upload: Stream
    download: Stream
    place: Stream
    make_event: Callable[[], Event]
    make_timed_event: Callable[[], Event]
    make_blocking_event: Callable[[], Event]


def streams_of(device: torch.device, clock: Callable[[], float]) -> Streams:
    """The streams for a tower on ``device``. clock: seconds, for the timed events of a CPU."""
    if device.type != "cuda":
        stream = InlineStream()

        def make() -> Event:
            return InlineEvent(clock)

        return Streams(stream, stream, stream, stream, make, make, make)
    return Streams(
        CurrentStream(device),
        SideStream(device),
        SideStream(device),
        SideStream(device),
        lambda: cuda_event(),
        lambda: cuda_event(enable_timing=True),
        lambda: cuda_event(blocking=True),
    )


def cuda_event(**options: bool) -> Event:
    event: Event = torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
    return event


class Passage:
    """A batch's way through the compute stream. started, ended: timed events around it. over: whether some
    thread knows that ``ended`` has passed; from then on the events may be another batch's, and whatever waits
    for the batch is not to look at them any more."""

    __slots__ = ("ended", "over", "started")

    def __init__(self, started: Event, ended: Event) -> None:
        self.started = started
        self.ended = ended
        self.over = False

    def wait_on_host(self) -> None:
        """Blocks the calling thread until the batch has ended."""
        if not self.over:
            self.ended.synchronize()


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

    def copy(self, copies: Copies, destination: Memory, source: Memory, num_bytes: int) -> None:
        copies.one(destination, source, num_bytes, 0)

    def copy_many(self, copies: Copies, pieces: CopyList, count: int) -> None:
        copies.many(pieces, count, 0)

    def record(self, event: InlineEvent) -> None:
        event.record()

    def wait(self, event: InlineEvent) -> None:
        assert event.query()

    def follow(self) -> None:
        pass

    def probe(self) -> None:
        pass


class CurrentStream:
    """Whatever stream of the device is the calling thread's current one."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[int, torch.cuda.Stream] = {}
        self._last: torch.cuda.Stream | None = None
        self._last_thread = 0
        self._left = cuda_event()

    def run(self, work: Callable[[], object]) -> None:
        work()

    def copy(self, copies: Copies, destination: Memory, source: Memory, num_bytes: int) -> None:
        copies.one(destination, source, num_bytes, torch._C._cuda_getCurrentRawStream(self._index))

    def copy_many(self, copies: Copies, pieces: CopyList, count: int) -> None:
        copies.many(pieces, count, torch._C._cuda_getCurrentRawStream(self._index))

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self._current())

    def wait(self, event: torch.cuda.Event) -> None:
        event.wait(self._current())

    def follow(self) -> None:
        current = self._current()
        if current is not self._last:
            if self._last is not None:
                # Behind all that the stream has by now, which is no less than what was handed to it here.
                self._left.record(self._last)  # type: ignore[attr-defined]
                current.wait_event(self._left)  # type: ignore[arg-type]
            self._last = current
        if get_ident() != self._last_thread:
            # The first call of the CUDA runtime on a thread binds the device's context to it. The driver's
            # own calls do not, and copies may be the first that a thread asks for.
            current.query()
            self._last_thread = get_ident()

    def probe(self) -> None:
        self._current().query()

    def _current(self) -> torch.cuda.Stream:
        """torch.cuda.current_stream costs several microseconds, mostly for making an object, and a step asks
        five times. Torch's streams live as long as the process, so that a handle stays what it was."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = torch.cuda.current_stream(self._index)
        return known


class SideStream:
    """A stream of its own, which does not wait for the default stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle: int = self.stream.cuda_stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def copy(self, copies: Copies, destination: Memory, source: Memory, num_bytes: int) -> None:
        copies.one(destination, source, num_bytes, self._handle)

    def copy_many(self, copies: Copies, pieces: CopyList, count: int) -> None:
        copies.many(pieces, count, self._handle)

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self.stream)

    def wait(self, event: torch.cuda.Event) -> None:
        event.wait(self.stream)

    def follow(self) -> None:
        pass

    def probe(self) -> None:
        self.stream.query()
