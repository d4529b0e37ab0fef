"""Logs: what never enters them, and that no caller waits for them."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import structlog

from encoder_service.ops.logs import LineQueue, configure_logs, request_id_of, stop_logs

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
        stop_logs()
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
    out = io.StringIO()
    lines = LineQueue(out)

    def log(own: int) -> None:
        for number in range(200):
            lines.handle(record(f"{own} {number} {'x' * 200}"))

    threads = [threading.Thread(target=log, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines.flush_within(LIMIT_S)
    assert lines.num_lost == 0
    numbers = [line.split()[:2] for line in out.getvalue().splitlines()]
    for own in range(4):
        assert [int(n) for which, n in numbers if which == str(own)] == list(range(200))


def test_a_pipe_that_is_not_read_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[int] = []
    recorder = SimpleNamespace(warning=lambda _event, num_lost: warnings.append(num_lost))
    monkeypatch.setattr("encoder_service.ops.logs.log", recorder)
    read, write = os.pipe()
    reader = threading.Thread(target=lambda: list(iter(lambda: os.read(read, 1 << 20), b"")))
    with os.fdopen(write, "w") as stream:
        lines = LineQueue(stream, max_waiting_lines=10)
        for _ in range(40):
            lines.handle(record("x" * 16_383))
        assert 0 < lines.num_lost <= 40 - 10
        assert not lines.flush_within(0.01)
        reader.start()
        assert lines.flush_within(LIMIT_S)
        lines.handle(record("again"))
        assert warnings == [lines.num_lost]
        assert lines.flush_within(LIMIT_S)
    reader.join()
    os.close(read)
