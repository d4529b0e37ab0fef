"""Logs: what never enters them, and that no caller waits for them."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import structlog

from encoder_service.ops.logs import DescriptorHandler, LineQueue, configure_logs, request_id_of

LIMIT_S = 20.0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_shows_no_callers_bytes(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The default of structlog shows every frame's locals."""

    def decode(content: bytes) -> None:
        raise ValueError("a defect")

    configure_logs(log_format, "info")  # type: ignore[arg-type]
    try:
        try:
            decode(b"private" * 3)
        except ValueError:
            structlog.get_logger("test").exception("item failed")
    finally:
        structlog.reset_defaults()
    shown = capsys.readouterr().err
    assert "a defect" in shown
    assert "privateprivate" not in shown


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "A.b:c/d+e=f@g_h"])
def test_a_callers_request_id_is_kept(given: str) -> None:
    assert request_id_of([("other", "x"), ("x-request-id", given)]) == given


@pytest.mark.parametrize(
    "metadata",
    [[], [("x-request-id", "")], [("x-request-id", "a" * 129)], [("x-request-id", "a\nlevel=error")],
     [("x-request-id", b"bytes")], [("x-request-id", "caf\u00e9")], [("x-request-id", "two words")]],
)  # fmt: skip
def test_what_no_log_should_repeat_is_replaced(metadata: list[tuple[str, str | bytes]]) -> None:
    first, second = request_id_of(metadata), request_id_of(metadata)
    assert re.fullmatch(r"[0-9a-f]{32}", first)
    assert first != second


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed file")])
def test_a_line_that_cannot_be_written_raises_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stderr", Full())
    configure_logs("json", "info")
    try:
        structlog.get_logger("test").warning("item failed")
        structlog.get_logger("test").exception("item failed")
    finally:
        structlog.reset_defaults()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("lines", logging.INFO, "", 0, text, None, None)


def test_lines_arrive_whole_and_in_order_from_many_threads() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)  # the thread waits for room, the callers do not
    lines = LineQueue(write)

    def log(own: int) -> None:
        for number in range(200):
            lines.handle(record(f"{own} {number} {'x' * 200}"))

    threads = [threading.Thread(target=log, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = b""
    while found.count(b"\n") < 800:
        found += os.read(read, 1 << 16)
    assert lines.flush_within(LIMIT_S)
    assert lines.num_lost == 0
    numbers = [line.split()[:2] for line in found.decode().splitlines()]
    for own in range(4):
        assert [int(n) for which, n in numbers if which == str(own)] == list(range(200))
    os.close(read)
    os.close(write)


def test_a_pipe_that_is_not_read_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[int] = []
    recorder = SimpleNamespace(warning=lambda _event, num_lost: warnings.append(num_lost))
    monkeypatch.setattr("encoder_service.ops.logs.log", recorder)
    read, write = os.pipe()
    lines = LineQueue(write, max_waiting_lines=10)
    for _ in range(40):
        lines.handle(record("x" * 16_383))
        time.sleep(0.002)
    assert 0 < lines.num_lost <= 40 - 10
    assert not lines.flush_within(0.01)
    os.read(read, 1 << 20)
    threading.Thread(target=lambda: [os.read(read, 1 << 20) for _ in range(20)], daemon=True).start()
    assert lines.flush_within(LIMIT_S)
    assert warnings[-1] == lines.num_lost


def test_a_full_disk_loses_lines_and_takes_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of which half was written is ended before the next."""

    def no_space(_: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    script: list[Callable[[memoryview], int]] = [
        len, no_space, lambda _: 3, no_space, no_space, len, len,
    ]  # fmt: skip
    out: list[bytes] = []

    def write(_: int, data: memoryview) -> int:
        taken = script.pop(0)(data)
        out.append(bytes(data[:taken]))
        return taken

    monkeypatch.setattr("encoder_service.ops.logs.os.write", write)
    num_written = 0

    def on_written() -> None:
        nonlocal num_written
        num_written += 1

    handler = DescriptorHandler(2, on_written)
    for line in ("first", "lost", "torn", "gone", "back", "more"):
        handler.emit(record(line))
    assert b"".join(out) == b"first\ntor\nback\nmore\n"
    assert (handler.num_failed, num_written) == (3, 3)
    assert not script


def test_a_failed_write_costs_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("encoder_service.ops.logs.os.write", write)
    handler = DescriptorHandler(-1)
    handler.emit(record("a\ud800"))  # half a surrogate pair too
    assert handler.num_failed == 1
