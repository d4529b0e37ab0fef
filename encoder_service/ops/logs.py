"""Structured logs: one event per line on standard error, readable or JSON.

Owns the format of the lines, the request id that joins the lines of one request, and the thread that writes
them. The id is a context variable, so that it is in every line of the task that serves a call and of the
tasks that this task starts. A caller that logs never waits for the reader of standard error: lines go through
a bounded queue. A line that finds the queue full is lost and counted; one that cannot be written is lost.
"""

from __future__ import annotations

import atexit
import logging
import queue
import re
import sys
import time
import uuid
from collections.abc import Iterable
from itertools import count
from logging.handlers import QueueHandler, QueueListener
from typing import Literal, TextIO

import structlog

log = structlog.get_logger(__name__)

REQUEST_ID_KEY = "x-request-id"
# Ids are repeated in logs and trailers, so they are short and have no white space or control characters.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

MAX_WAITING_LINES = 10_000
# How long the process waits at its end for lines that are not written yet.
FLUSH_S = 1.0
FLUSH_POLL_S = 0.005

# Ids for callers that gave none: a random part per process, then a counter. They are unique, not secret.
_PROCESS_ID = uuid.uuid4().hex[:16]
_numbers = count()
_lines: LineQueue | None = None


def request_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's request id if it is 1 to 128 letters, digits and ``._:/+=@-``, otherwise a new id."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and REQUEST_ID.fullmatch(value):
            return value
    return f"{_PROCESS_ID}{next(_numbers):016x}"


def bind_request(request_id: str, trace_id: str = "") -> None:
    """Adds the request id, and the trace id if there is one, to every line of this task from now on."""
    structlog.contextvars.clear_contextvars()
    ids = {"request_id": request_id, "trace_id": trace_id}
    structlog.contextvars.bind_contextvars(**{name: value for name, value in ids.items() if value})


class LineQueue(QueueHandler):
    """Queues lines for a listener's thread, which writes them to the stream."""

    def __init__(self, stream: TextIO, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(max_waiting_lines)
        super().__init__(self._waiting)
        self.num_lost = self._num_reported = 0
        QueueListener(self._waiting, logging.StreamHandler(stream)).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_lost += 1
            return
        if self.num_lost != self._num_reported:
            self._num_reported = self.num_lost
            log.warning("log lines were lost", num_lost=self.num_lost)

    def flush_within(self, timeout_s: float) -> bool:
        """Waits until every queued line is written or lost. Returns False on timeout: the listener's thread,
        a daemon, may be stuck in a write."""
        ends_s = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks:
            if time.monotonic() >= ends_s:
                return False
            time.sleep(FLUSH_POLL_S)
        return True


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
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        processors.append(structlog.processors.format_exc_info)
    global _lines
    stop_logs()
    logging.raiseExceptions = False  # a line that cannot be written causes no second one
    _lines = LineQueue(sys.stderr)
    lines = logging.Logger("encoder_service.lines")  # outside the hierarchy of the process's other loggers
    lines.addHandler(_lines)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )


@atexit.register
def stop_logs() -> None:
    """Waits for queued lines, at most FLUSH_S."""
    global _lines
    if _lines is not None:
        _lines.flush_within(FLUSH_S)
        _lines = None
