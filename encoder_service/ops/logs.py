"""Structured logs: one event per line on standard error, readable or JSON.

Owns the format of the lines, the request id that joins the lines of one request, and the thread that writes
them. The id is a context variable, so that it is in every line of the task that serves a call and of the
tasks that this task starts. A caller that logs never waits for the reader of standard error: lines go through
a bounded queue. A line that finds the queue full, or that cannot be written, is lost and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from itertools import count
from logging.handlers import QueueHandler, QueueListener
from typing import Literal

import structlog

log = structlog.get_logger(__name__)

REQUEST_ID_KEY = "x-request-id"
# Ids are repeated in logs and trailers, so they are short and have no white space or control characters.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

MAX_WAITING_LINES = 10_000
# How long the process waits at its end for lines that are not written yet.
FLUSH_S = 1.0
FLUSH_POLL_S = 0.005
# Wait for a full non-blocking pipe.
PAUSE_S = 0.01

# Ids for callers that gave none: a random part per process, then a counter. They are unique, not secret.
_PROCESS_ID = uuid.uuid4().hex[:16]
_numbers = count()
_request: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))
_lines: LineQueue | None = None


def request_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's request id if it is 1 to 128 letters, digits and ``._:/+=@-``, otherwise a new id."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and REQUEST_ID.fullmatch(value):
            return value
    return f"{_PROCESS_ID}{next(_numbers):016x}"


def bind_request(request_id: str, trace_id: str = "") -> None:
    """Adds the request id, and the trace id if there is one, to every line of this task from now on."""
    _request.set((request_id, trace_id))


def add_request(
    _logger: object, _method: str, line: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A structlog processor: adds the ids of ``bind_request``."""
    for name, value in zip(("request_id", "trace_id"), _request.get(), strict=True):
        if value:
            line.setdefault(name, value)
    return line


class DescriptorHandler(logging.Handler):
    """Writes lines to a file descriptor. Uses no stream object: a thread that is stuck in one would hold a
    lock that the interpreter needs when it exits."""

    def __init__(self, descriptor: int, on_written: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._descriptor, self._on_written = descriptor, on_written
        self._is_torn = False
        self.num_failed = 0

    def emit(self, record: logging.LogRecord) -> None:
        data = record.getMessage().encode(errors="backslashreplace") + b"\n"
        # If the last line failed in its middle, this line begins with a line break.
        rest = memoryview(b"\n" + data if self._is_torn else data)
        started = len(rest)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:
                    time.sleep(PAUSE_S)
        except OSError:
            self._is_torn = self._is_torn or len(rest) < started
            self.num_failed += 1
        else:
            self._is_torn = False
            self._on_written()


class LineQueue(QueueHandler):
    """Queues lines for a listener's thread, which writes them to the descriptor."""

    def __init__(self, descriptor: int, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(max_waiting_lines)
        super().__init__(self._waiting)
        self._handler = DescriptorHandler(descriptor, self._report_lost)
        self._num_full = self._num_reported = 0
        QueueListener(self._waiting, self._handler).start()

    @property
    def num_lost(self) -> int:
        """Number of lines that found the queue full or could not be written."""
        return self._num_full + self._handler.num_failed

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_full += 1

    def _report_lost(self) -> None:
        """Logs the number of lost lines, if it has grown. Runs on the listener's thread after each write."""
        num_lost = self.num_lost
        if num_lost != self._num_reported:
            self._num_reported = num_lost
            log.warning("log lines were lost", num_lost=num_lost)

    def flush_within(self, timeout_s: float) -> bool:
        """Waits until every queued line is written or lost. Returns False on timeout: the listener's thread,
        a daemon, may be stuck in a write."""
        ends_s = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks:
            if time.monotonic() >= ends_s:
                return False
            time.sleep(FLUSH_POLL_S)
        return True


class StreamHandler(logging.Handler):
    """Writes lines at once, for a standard error without a descriptor. A failed line is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(record.getMessage(), file=sys.stderr)


def configure_logs(format: Literal["text", "json"], level: str) -> None:  # noqa: A002
    """Sets up structlog for the process. level: debug, info, warning or error."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The default prints the local variables of every frame, which include a caller's image bytes.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    processors: list[structlog.typing.Processor] = [
        add_request,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        processors.append(structlog.processors.format_exc_info)
    lines = open_lines()
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )


def open_lines() -> logging.Logger:
    """A logger of whole lines on standard error, outside the hierarchy of the process's other loggers."""
    global _lines
    stop_logs()
    lines = logging.Logger("encoder_service.lines")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        _lines = LineQueue(sys.stderr.fileno())
    lines.addHandler(_lines or StreamHandler())
    return lines


@atexit.register
def stop_logs() -> None:
    """Waits for queued lines, at most FLUSH_S."""
    global _lines
    if _lines is not None:
        _lines.flush_within(FLUSH_S)
        _lines = None
