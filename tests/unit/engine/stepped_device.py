"""A device that runs its queued work one piece at a time, in any order that streams and events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from encoder_service.engine.streams import Streams


class SteppedEvent:
    """Counts its recordings and those that the device has passed. Waiting for it on the host runs the
    device until then."""

    def __init__(self, device: SteppedDevice) -> None:
        self.device = device
        self.recorded = 0
        self.passed = 0
        self.passed_at = 0

    def query(self) -> bool:
        return self.passed >= self.recorded

    def synchronize(self) -> None:
        while not self.query():
            self.device.check()
            assert self.device.step(), "the host waits for what the device will never pass"
        self.device.check()

    def elapsed_time(self, end_event: SteppedEvent) -> float:
        return float(end_event.passed_at - self.passed_at)


@dataclass(frozen=True)
class Work:
    run: Callable[[], object]


@dataclass(frozen=True)
class Record:
    event: SteppedEvent
    number: int


@dataclass(frozen=True)
class Wait:
    event: SteppedEvent
    number: int


class SteppedStream:
    def __init__(self, device: SteppedDevice) -> None:
        self.device = device
        self.queue: deque[Work | Record | Wait] = deque()

    def run(self, work: Callable[[], object]) -> None:
        self.queue.append(Work(work))

    def record(self, event: SteppedEvent) -> None:
        event.recorded += 1
        self.queue.append(Record(event, event.recorded))

    def wait(self, event: SteppedEvent) -> None:
        self.queue.append(Wait(event, event.recorded))

    def probe(self) -> None:
        self.device.check()

    @property
    def is_runnable(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, Wait) or first.event.passed >= first.number

    def step(self) -> None:
        """Runs the first piece; a stream that cannot go on is not to be stepped."""
        assert self.is_runnable
        piece = self.queue.popleft()
        self.device.steps += 1
        if isinstance(piece, Work):
            try:
                with torch.inference_mode():  # as on the engine's threads
                    piece.run()
            except Exception as error:
                self.device.failure = self.device.failure or error
        elif isinstance(piece, Record):
            piece.event.passed = max(piece.event.passed, piece.number)
            piece.event.passed_at = self.device.steps

    def run_on(self) -> None:
        """Runs this stream alone, as far as it comes."""
        while self.is_runnable:
            self.step()


class SteppedDevice:
    """choose: the index of one of so many runnable streams. A failed piece of work loses the device."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.failure: Exception | None = None
        self.steps = 0
        self.compute, self.upload, self.download = (SteppedStream(self) for _ in range(3))

    @property
    def all(self) -> tuple[SteppedStream, SteppedStream, SteppedStream]:
        return self.compute, self.upload, self.download

    @property
    def streams(self) -> Streams:
        return Streams(*self.all, lambda: SteppedEvent(self))

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def step(self) -> bool:
        """Runs one piece of some stream; False when no stream can go on."""
        runnable = [stream for stream in self.all if stream.is_runnable]
        if runnable:
            runnable[self.choose(len(runnable))].step()
        return bool(runnable)
