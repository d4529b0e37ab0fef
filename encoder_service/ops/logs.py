"""Structured logs: one event per line, on standard error, readable or JSON. Writing them is ``log_lines``'s.

Owns their form and the id that ties the lines of one request together. It is a context variable, so that it
is in every line of the task that serves the call and of the tasks that this one starts; a line looks for it,
since there are many calls and few lines.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from itertools import count
from typing import Literal

import structlog

from encoder_service.ops.log_lines import LineWriter

REQUEST_ID_KEY = "x-request-id"
# What is repeated into logs and trailers is kept short and free of anything that either could stumble over.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

# Ids that callers did not give: the process's own half, then a number. They are told apart and not secret.
_PROCESS_ID = uuid.uuid4().hex[:16]
_numbers = count()
_request: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))

# At the end of the process, for lines that are not written yet.
FLUSH_S = 1.0
_writer: LineWriter | None = None


def request_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's request id, or a new one where it gave none that is 1 to 128 letters, digits and
    ``._:/+=@-``."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and REQUEST_ID.fullmatch(value):
            return value
    return f"{_PROCESS_ID}{next(_numbers):016x}"


def bind_request(request_id: str, trace_id: str = "") -> None:
    """Puts the id, and the trace's where there is one, into every line of this task from now on."""
    _request.set((request_id, trace_id))


def add_request(
    _logger: object, _method: str, line: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A processor: what ``bind_request`` put into this task."""
    for name, value in zip(("request_id", "trace_id"), _request.get(), strict=True):
        if value:
            line.setdefault(name, value)
    return line


class QueuedLines:
    """structlog's logger: lines go to a writer, and nobody waits for them."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, message: str) -> None:
        self._writer.put(message)

    log = debug = info = warning = error = critical = exception = fatal = failure = warn = err = msg


class StandardError(structlog.PrintLogger):
    """Where standard error is no file of the system: lines that cannot be written are lost, no call fails for
    its log."""

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().msg(message)

    log = debug = info = warning = error = critical = exception = fatal = failure = warn = err = msg


def configure_logs(format: Literal["text", "json"], level: str) -> None:  # noqa: A002
    """Sets up structlog for the process. level: debug, info, warning or error."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The default shows the locals of every frame: a caller's image bytes among them.
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
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=logger_factory(),
        cache_logger_on_first_use=True,
    )


def logger_factory() -> Callable[..., QueuedLines | StandardError]:
    """Loggers on standard error, by way of a thread where it has a descriptor."""
    global _writer
    stop_logs(FLUSH_S)
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return lambda *_: StandardError(sys.stderr)
    log = structlog.get_logger(__name__)
    writer = _writer = LineWriter(
        descriptor, on_lost=lambda lost: log.warning("log lines were lost", lost=lost)
    )
    return lambda *_: QueuedLines(writer)


@atexit.register
def stop_logs(timeout_s: float = FLUSH_S) -> None:
    """Writes what waits and ends the writer, within the time. Lines after it are lost."""
    if _writer is not None:
        _writer.close(timeout_s)


def lost_lines() -> Mapping[str, int]:
    """Lines lost so far, by reason: ``full`` (nobody takes them), ``failed`` (could not be written)."""
    lost = Counter() if _writer is None else _writer.lost
    return {reason: lost[reason] for reason in ("full", "failed")}
