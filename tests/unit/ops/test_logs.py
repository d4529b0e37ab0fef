"""Logs: what never enters them, and that no caller waits for them."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from encoder_service.ops.logs import (
    MAX_KINDS,
    REPEAT_S,
    LibraryLines,
    LineQueue,
    RepeatedLines,
    configure_logs,
    request_id_of,
    stop_logs,
)

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
    shown = capsys.readouterr().out
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

    monkeypatch.setattr(sys, "stdout", Full())
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


# -- what libraries write ----------------------------------------------------------------------------------


def test_p72_lines_of_libraries_become_lines_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", "info")
    structlog.configure(cache_logger_on_first_use=False)
    try:
        for _ in range(100):
            logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("uvicorn.access").info("not shown")
        try:
            raise OSError("full")
        except OSError:
            logging.getLogger("asyncio").exception("failed at %d", 3)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("an old name", DeprecationWarning, stacklevel=1)
            warnings.warn("another old name", DeprecationWarning, stacklevel=1)
    finally:
        stop_logs()
        structlog.reset_defaults()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["level"], line["logger"]) for line in found] == [
        ("warning", "uvicorn.error"), ("error", "asyncio"), ("warning", "py.warnings"),
        ("warning", "py.warnings"),
    ]  # fmt: skip
    assert found[1]["event"] == "failed at 3"
    assert "OSError: full" in found[1]["exception"]
    assert LibraryLines not in map(type, logging.getLogger().handlers)


def test_p71_a_repeated_line_is_counted_and_shown_again_later() -> None:
    now = [0.0]
    lines = RepeatedLines(lambda: now[0])
    assert lines.due("a") == lines.due("b") == {}
    assert [lines.due("a") for _ in range(5)] == [None] * 5
    now[0] += REPEAT_S
    assert lines.due("a") == {"num_left_out": 5}
    for number in range(MAX_KINDS):
        lines.due(number)
    assert lines.due("a") == {}, "so many kinds are not kept"


def test_p71_a_few_lines_may_pass_before_others_are_left_out() -> None:
    now = [0.0]
    lines = RepeatedLines(lambda: now[0])
    assert [lines.due("a", 3) for _ in range(5)] == [{}, {}, {}, None, None]
    now[0] += REPEAT_S
    assert [lines.due("a", 3) for _ in range(4)] == [{"num_left_out": 2}, {}, {}, None]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_p71_a_caller_forges_no_line(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks and what a terminal interprets are escaped, in a warning of Python too."""
    configure_logs(log_format, "info")  # type: ignore[arg-type]
    structlog.configure(cache_logger_on_first_use=False)
    try:
        structlog.get_logger("test").warning("item failed", namespace="a\nb\x1b[2J", error="c\rd e")
        logging.getLogger("library").warning("first\n  second\x1b[2J")
    finally:
        stop_logs()
        structlog.reset_defaults()
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert all(line.isprintable() for line in shown.splitlines())
    assert len(shown.splitlines()) == 2


# Writes far more than a pipe, a socket or a terminal holds, in Python, past it, and by the logs' own thread.
UNREAD = """
import os, sys, threading
from encoder_service.ops.logs import never_wait
stream = never_wait()
assert stream is not None
for name in ("stdout", "stderr"):
    file = getattr(sys, name)
    for _ in range(200):
        print("x" * 16_000, file=file, flush=True)
        try:
            os.write(file.fileno(), b"y" * 16_000)
        except BlockingIOError:
            pass
waiting = threading.Thread(target=lambda: print("z" * 4_000_000, file=stream, flush=True), daemon=True)
waiting.start()
waiting.join(0.2)
assert waiting.is_alive(), "lines of the log wait for their reader"
os._exit(7)
"""


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_p72_output_that_nobody_reads_makes_nobody_wait(kind: str) -> None:
    if kind == "socket":
        reads, writes = (end.detach() for end in socket.socketpair())
    else:
        reads, writes = os.pipe() if kind == "pipe" else os.openpty()
    try:
        ended = subprocess.run([sys.executable, "-c", UNREAD], stdout=writes, stderr=writes, timeout=60)
        assert ended.returncode == 7
        assert kind == "socket" or os.get_blocking(writes), "of this process's own"
    finally:
        os.close(reads)
        os.close(writes)


CRASH = """
import ctypes, faulthandler, sys
from encoder_service.ops.logs import never_wait
never_wait()
faulthandler.enable()
print("from Python", file=sys.stderr)
ctypes.CDLL(None).perror(b"from C")
ctypes.string_at(0)
"""


def test_p72_the_last_words_of_a_process_are_written() -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGSEGV
    for words in (b"from Python", b"from C", b"Segmentation fault"):
        assert words in ended.stderr


def test_output_in_a_file_or_closed_is_left_as_it_is(tmp_path: Path) -> None:
    code = "from encoder_service.ops.logs import never_wait; assert never_wait() is None; print('said')"
    with (tmp_path / "file").open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, stderr=file, timeout=60, check=True)
    assert (tmp_path / "file").read_text() == "said\n"
    closed = f'exec "$0" -c "{code}" 1>&- 2>&-'
    subprocess.run(["bash", "-c", closed, sys.executable], timeout=60, check=True)
