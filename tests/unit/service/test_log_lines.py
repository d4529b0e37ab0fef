"""Lines that nobody waits for: bounded, counted, and never in pieces between others."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from encoder_service.ops.log_lines import PAUSE_S, LineWriter

LIMIT_S = 20.0


@contextmanager
def writing(writer: LineWriter) -> Iterator[LineWriter]:
    yield writer
    assert writer.close(LIMIT_S)


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_arrive_in_order_from_many_threads() -> None:
    out: list[bytes] = []

    def write(_: int, data: memoryview) -> int:
        out.append(bytes(data))
        return len(data)

    with writing(LineWriter(2, write=write)) as writer:
        threads = [
            threading.Thread(target=lambda own=own: [writer.put(f"{own} {n}") for n in range(200)])  # type: ignore[misc]
            for own in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.flush(LIMIT_S)
    lines = [line.split() for line in b"".join(out).decode().splitlines()]
    assert len(lines) == 800
    for own in range(4):
        assert [int(n) for which, n in lines if which == str(own)] == list(range(200))
    assert not writer.lost


def test_a_pipe_that_nobody_reads_stops_nobody() -> None:
    """The writer is stuck in its first write; what is over the bound is lost and counted."""
    is_stuck, go_on, out = threading.Event(), threading.Event(), list[bytes]()
    told: list[int] = []

    def write(_: int, data: memoryview) -> int:
        is_stuck.set()
        assert go_on.wait(LIMIT_S)
        out.append(bytes(data))
        return len(data)

    with writing(LineWriter(2, max_waiting_bytes=100, write=write, on_lost=told.append)) as writer:
        writer.put("a" * 9)
        assert is_stuck.wait(LIMIT_S)
        for _ in range(20):
            writer.put("b" * 9)
        assert writer.lost == {"full": 11}  # of ten bytes each, ten find room
        assert not writer.flush(0.01)
        go_on.set()
        assert writer.flush(LIMIT_S)
        writer.put("c")
    assert b"".join(out) == b"aaaaaaaaa\n" + b"bbbbbbbbb\n" * 9 + b"c\n"
    assert told == [11], "said once"


def test_a_full_disk_loses_lines_and_takes_them_again() -> None:
    """A line of which half was written is ended before the next."""
    script: list[Callable[[memoryview], int]] = [
        len, no_space, lambda _: 3, no_space, no_space, len, len,
    ]  # fmt: skip
    out, told = list[bytes](), list[int]()

    def write(_: int, data: memoryview) -> int:
        taken = script.pop(0)(data)
        out.append(bytes(data[:taken]))
        return taken

    with writing(LineWriter(2, write=write, on_lost=told.append)) as writer:
        for line in ("first", "lost", "torn", "gone", "back", "more"):
            writer.put(line)
        assert writer.flush(LIMIT_S)
    assert b"".join(out) == b"first\ntor\nback\nmore\n"
    assert writer.lost == {"failed": 3}
    assert told == [3]
    assert not script


def test_a_pipe_that_does_not_block_is_waited_for_by_the_thread_alone() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    line = "x" * 4095
    with writing(LineWriter(write)) as writer:
        for _ in range(40):  # more than a pipe holds
            writer.put(line)
        found = 0
        while found < 40 * 4096:
            found += len(os.read(read, 1 << 16))
    assert not writer.lost
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("closed"), OSError(errno.EIO, "input/output")]
)
def test_whatever_writing_raises_costs_the_line_alone(error: Exception) -> None:
    def write(*_: object) -> int:
        raise error

    with writing(LineWriter(2, write=write)) as writer:
        writer.put("a\ud800")  # half a character too
        assert writer.flush(LIMIT_S)
    assert writer.lost == {"failed": 1}
    writer.put("too late")
    assert writer.lost == {"failed": 1, "closed": 1}


def test_a_descriptor_that_takes_nothing_and_reports_nothing_is_not_asked_for_ever() -> None:
    """A write of no bytes that is no error either: a thread that tried again at once would take a core."""
    num_writes = 0

    def write(*_: object) -> int:
        nonlocal num_writes
        num_writes += 1
        return 0

    with writing(LineWriter(2, write=write)) as writer:
        writer.put("a")
        assert writer.flush(LIMIT_S), "still trying"
    assert writer.lost == {"failed": 1}
    assert num_writes == 1


def test_a_full_descriptor_of_which_nothing_can_be_asked_costs_the_line_alone() -> None:
    """select takes no descriptor above 1023, nor one that was closed meanwhile."""

    def write(*_: object) -> int:
        raise BlockingIOError

    for descriptor in (1 << 20, -1):
        with writing(LineWriter(descriptor, write=write)) as writer:
            writer.put("a")
            assert writer.flush(LIMIT_S), "its thread has ended"
            assert writer.lost == {"failed": 1}


def test_a_descriptor_that_seems_to_have_room_is_not_asked_without_a_pause() -> None:
    """poll says that it may be written, and a write of a whole line that it may not."""
    read, write_end = os.pipe()
    num_writes, enough = 0, threading.Event()

    def write(_: int, data: memoryview) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes <= 20:
            raise BlockingIOError
        enough.set()
        return len(data)

    started_s = time.monotonic()
    with writing(LineWriter(write_end, write=write)) as writer:
        writer.put("a")
        assert enough.wait(LIMIT_S)
    assert time.monotonic() - started_s > 20 * PAUSE_S
    assert not writer.lost
    os.close(read)
    os.close(write_end)


def test_a_writer_that_is_stuck_is_left_behind() -> None:
    is_stuck, never = threading.Event(), threading.Event()

    def write(_: int, data: memoryview) -> int:
        is_stuck.set()
        never.wait(LIMIT_S)
        return len(data)

    writer = LineWriter(2, write=write)
    writer.put("a")
    assert is_stuck.wait(LIMIT_S)
    assert not writer.close(0.01)
    never.set()
    writer._thread.join(LIMIT_S)
