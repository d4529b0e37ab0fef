"""Structured logs: one event per line on standard output, readable or JSON.

Owns the format of the lines, the request id that connects the lines of one request, which lines are left out
because they repeat, and the thread that writes them. The id is a context variable, so it is in every line of
the task that serves a call and of the tasks that this task starts.

Logging never blocks on the reader of standard output, because lines go through a bounded queue to the thread.
If the queue is full, a line is lost and counted. A line that cannot be written is lost. Lines that libraries
log in Python, and Python's warnings, go through the same queue. Libraries that write to a descriptor directly
are made not to block either (``never_wait``), and gRPC is made silent (``silence_grpc``): its lines go to
standard error in a format of their own.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import queue
import re
import select
import stat
import sys
import time
import uuid
from collections.abc import Callable, Hashable, Iterable
from itertools import count
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal, TextIO

import structlog

log = structlog.get_logger(__name__)

REQUEST_ID_KEY = "x-request-id"
# Logs and trailers repeat ids, so they are short and have no white space or control characters.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

MAX_WAITING_LINES = 10_000
# Longest time that the process waits at its end for lines that are not written yet.
FLUSH_S = 1.0
FLUSH_POLL_S = 0.005
# Of lines that a fault or a peer repeats, a few are written in this time.
REPEAT_S = 10.0
MAX_KINDS = 1000
# Read by gRPC when it starts.
GRPC_VERBOSITY = "GRPC_VERBOSITY"

# For callers without an id: a random part per process, then a counter. These ids are unique, not secret.
_PROCESS_ID = uuid.uuid4().hex[:16]
_numbers = count()
_lines: LineQueue | None = None
_library_lines: LibraryLines | None = None


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
    """A handler that queues lines for a thread, which writes them to the stream."""

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
        """Waits until every queued line is written or lost. Returns False after the time: the thread may be
        blocked in a write. It is a daemon."""
        ends_s = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks:
            if time.monotonic() >= ends_s:
                return False
            time.sleep(FLUSH_POLL_S)
        return True


class RepeatedLines:
    """Lets a few of many equal lines pass in REPEAT_S, and counts the others. Thread-safe, except that the
    count may then be too small."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By kind: the start of its REPEAT_S, and the number of lines since then.
        self._lines: dict[Hashable, tuple[float, int]] = {}

    def due(self, kind: Hashable, max_lines: int = 1) -> dict[str, int] | None:
        """None for a line that is left out, because ``max_lines`` have passed. Otherwise fields for the line:
        how many were left out before it."""
        now_s = self._clock()
        started_s, num_lines = self._lines.get(kind, (now_s, 0))
        num_left_out = 0
        if now_s - started_s >= REPEAT_S:
            num_left_out = max(0, num_lines - max_lines)
            started_s, num_lines = now_s, 0
        if kind not in self._lines and len(self._lines) >= MAX_KINDS:
            self._lines.clear()
        self._lines[kind] = started_s, num_lines + 1
        if num_lines >= max_lines:
            return None
        return {"num_left_out": num_left_out} if num_left_out else {}


class LibraryLines(logging.Handler):
    """A handler that logs the lines of libraries with structlog, so that they go through the queue too."""

    def __init__(self) -> None:
        super().__init__()
        self._repeated = RepeatedLines()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())  # warnings and asyncio's errors have several lines
        # Lines with the same template are equal. Python's warnings all have the template "%s".
        template = text if record.msg == "%s" else str(record.msg)
        error = record.exc_info[0] if record.exc_info else None
        fields = self._repeated.due((record.name, record.levelno, template, error))
        if fields is not None:
            log.log(record.levelno, text, logger=record.name, exc_info=record.exc_info, **fields)


def configure_logs(
    format: Literal["text", "json"],  # noqa: A002
    level: str,
    stream: TextIO | None = None,
) -> None:
    """Sets up structlog and the logs of libraries for the process. level: debug, info, warning or error.
    stream: by default standard output."""
    stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - the process has no standard output
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        processors += [
            structlog.processors.format_exc_info,
            in_order,
            structlog.processors.JSONRenderer(),
        ]
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            sort_keys=False,
            # The default prints the local variables of all frames, which include image bytes of callers.
            exception_formatter=structlog.dev.plain_traceback,
        )
        processors += [escaped, renderer]
    global _lines, _library_lines
    stop_logs()
    logging.raiseExceptions = False  # no traceback for a line that cannot be written
    _lines = LineQueue(stream)
    _library_lines = LibraryLines()
    logging.getLogger().addHandler(_library_lines)
    logging.captureWarnings(True)
    lines = logging.Logger("encoder_service.lines")  # not a child of the root logger
    lines.addHandler(_lines)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )


def in_order(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A processor: what every line has comes first."""
    return {**{name: event[name] for name in ("timestamp", "level", "event")}, **event}


def escaped(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A processor: what a terminal would interpret, and line breaks, are escaped. Callers choose namespaces
    and parts of errors."""
    return {
        name: repr(value)[1:-1] if isinstance(value, str) and not value.isprintable() else value
        for name, value in event.items()
    }


@atexit.register
def stop_logs() -> None:
    """Waits up to FLUSH_S for queued lines."""
    global _lines, _library_lines
    if _library_lines is not None:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(_library_lines)
        _library_lines = None
    if _lines is not None:
        _lines.flush_within(FLUSH_S)
        _lines = None


# -- descriptors that do not block -----------------------------------------------------------------------


class _LosingFile(io.FileIO):
    """A file that drops data which its descriptor cannot take at once."""

    def write(self, data: Any) -> int:
        num_written = super().write(data)
        return len(data) if num_written is None else num_written


class _WaitingFile(io.FileIO):
    """A file whose writes block although its descriptor does not."""

    def write(self, data: Any) -> int:
        while (num_written := super().write(data)) is None:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll()
        return num_written


def never_wait() -> TextIO | None:
    """Makes standard output and error of this process lose data that no reader takes, both in Python and for
    libraries that write to their descriptors. Returns a stream on standard output that still blocks, for
    ``configure_logs``; None if there is none. The last words of a crash need no thread: they are written
    directly."""
    waiting = None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except (AttributeError, OSError, ValueError):
            continue  # closed, or replaced by a stream without a descriptor
        if is_file:
            continue  # has no reader
        if name == "stdout":
            waiting = _text(_WaitingFile(os.dup(descriptor), "w"), stream)
        _stop_waiting(descriptor)
        setattr(sys, name, _text(_LosingFile(descriptor, "w", closefd=False), stream))
    return waiting


def _text(file: io.FileIO, like: TextIO) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(file), like.encoding, "backslashreplace", line_buffering=True)


def _stop_waiting(descriptor: int) -> None:
    """Makes writes not block, if possible only those of this process. The flag belongs to the open file
    description, which other processes share. So the descriptor gets a description of its own; a socket cannot
    be opened again, and gets the flag."""
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        os.set_blocking(descriptor, False)
    else:
        os.dup2(own, descriptor)
        os.close(own)


def silence_grpc() -> None:
    """Keeps gRPC's native library from writing to standard error, unless the user has set its variable. Has
    to be called before gRPC's first use."""
    os.environ.setdefault(GRPC_VERBOSITY, "NONE")
