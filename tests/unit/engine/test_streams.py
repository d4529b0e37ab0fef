"""The compute stream follows its caller from one stream to another; a stand-in takes the place of CUDA."""

from __future__ import annotations

import threading

import pytest
import torch

from encoder_service.engine import streams
from encoder_service.engine.copies import CopyList, HostCopies, Memory
from encoder_service.engine.streams import CurrentStream, Passage


class FakeCuda:
    """One device. calls: what was asked of its streams and events, as (what, stream)."""

    def __init__(self) -> None:
        self.handle = 0
        self.calls: list[tuple[str, int]] = []


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.handle = cuda.handle

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def query(self) -> bool:
        self.cuda.calls.append(("query", self.handle))
        return True


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.cuda.calls.append(("record", stream.handle))

    def wait(self, stream: FakeStream) -> None:
        self.cuda.calls.append(("wait", stream.handle))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: cuda.handle, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: FakeStream(cuda))
    monkeypatch.setattr(streams, "cuda_event", lambda: FakeEvent(cuda))
    return cuda


def test_a_launch_in_another_stream_comes_after_the_one_before(cuda: FakeCuda) -> None:
    current = CurrentStream(torch.device("cuda", 0))
    current.follow()
    assert cuda.calls == [("query", 0)]  # the thread's first
    cuda.calls.clear()
    current.follow()
    assert cuda.calls == []
    cuda.handle = 7
    current.follow()
    current.follow()
    assert cuda.calls == [("record", 0), ("wait", 7)]
    cuda.handle = 0
    current.follow()
    assert cuda.calls[2:] == [("record", 7), ("wait", 0)]


def test_a_thread_is_made_known_to_the_device_before_it_copies(cuda: FakeCuda) -> None:
    current = CurrentStream(torch.device("cuda", 0))
    current.follow()
    thread = threading.Thread(target=current.follow)
    thread.start()
    thread.join()
    assert cuda.calls == [("query", 0)] * 2


def test_copies_go_to_whatever_stream_is_current(cuda: FakeCuda) -> None:
    seen: list[int] = []

    class Seen(HostCopies):
        def one(self, destination: Memory, source: Memory, num_bytes: int, stream: int) -> None:
            seen.append(stream)

        def many(self, copies: CopyList, count: int, stream: int) -> None:
            seen.append(stream)

    current, memory = CurrentStream(torch.device("cuda", 0)), Memory(torch.zeros(1))
    for handle in (0, 9):
        cuda.handle = handle
        current.copy(Seen(), memory, memory, 4)
        current.copy_many(Seen(), CopyList.of_capacity(1), 1)
    assert seen == [0, 0, 9, 9]


def test_nobody_waits_for_a_batch_that_is_known_to_be_over() -> None:
    waited: list[bool] = []

    class Event:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            waited.append(True)

        def elapsed_time(self, end_event: Event) -> float:
            return 0.0

    passage = Passage(Event(), Event())
    passage.wait_on_host()
    assert waited == [True]
    passage.over = True
    passage.wait_on_host()
    assert waited == [True]
