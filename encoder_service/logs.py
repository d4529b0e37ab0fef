"""Structured logs: one event per line, on standard error, readable or JSON.

Owns their form and the id that ties the lines of one request together. It is bound as a context variable,
so that it is in every line of the task that serves the call and of the tasks that this one starts.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import uuid
from collections.abc import Iterable
from typing import Literal

import structlog

REQUEST_ID_KEY = "x-request-id"
# What is repeated into logs and trailers is kept short and free of anything that either could stumble over.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's request id, or a new one where it gave none that is 1 to 128 letters, digits and
    ``._:/+=@-``."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex


def bind_request(request_id: str, trace_id: str = "") -> None:
    """Puts the id, and the trace's where there is one, into every line of this task from now on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
    if trace_id:
        structlog.contextvars.bind_contextvars(trace_id=trace_id)


class StandardError(structlog.PrintLogger):
    """Lines that cannot be written, for a full disk or a pipe that nobody reads any more, are lost: no call
    fails for its log."""

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
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: StandardError(sys.stderr),
        cache_logger_on_first_use=True,
    )
