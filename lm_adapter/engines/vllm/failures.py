"""Why a request failed, from the scheduler's process to the API server that answers the client.

Owns the socket and the form of a report. vLLM ends a request without its rows as ``error`` and answers 500
without a reason. Each API server listens on a datagram socket, whose name travels with the images. The
scheduler sends the reason before vLLM's own answer leaves, and the server raises it instead of vLLM's error.
If a report does not arrive, as from another node, vLLM's answer stays; the engine's log has the reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import queue
import re
import secrets
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lm_adapter.engines.shared.error_text import message_of, status_of
from lm_adapter.errors import EncoderError

logger = logging.getLogger("vllm.vision_encoder")

MAX_KEPT = 1024
RECEIVE_BYTES = 1 << 16
COMPLETIONS = "cmpl-"
"""Prefix of the API's ids of completions. The engine appends ``-0`` and so on to these, ``_0`` to the ids of
chats and responses."""
SEND_S = 0.05
"""How long a late report waits until the API server has read earlier ones."""


def vllm_error(status: int, message: str) -> Exception:
    """An exception that vLLM's API answers with this HTTP status."""
    from http import HTTPStatus

    from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError

    kinds = {503: RetryableRequestError, 504: RetryableRequestError}
    error: Exception = (VLLMValidationError if status < 500 else kinds.get(status, GenerationError))(message)
    if isinstance(error, GenerationError):
        error.status_code = HTTPStatus(status)
    return error


def send_report(reply: str, request_id: str, error: EncoderError) -> None:
    """reply: the name of ``listening``; empty for requests that no API server sent. Never waits, because the
    scheduler's thread calls it."""
    if not reply:
        return
    report = {"request_id": request_id, "status": status_of(error), "message": message_of(error)}
    sending = functools.partial(_send, reply, request_id, json.dumps(report).encode())
    try:
        sending(timeout_s=0)
    except BlockingIOError:
        with contextlib.suppress(queue.Full):
            _late_reports(reply).put_nowait(sending)


def _send(reply: str, request_id: str, report: bytes, *, timeout_s: float) -> None:
    """timeout_s: how long to wait while the API server's socket is full; with 0, raises BlockingIOError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(timeout_s)
            # Connected: on a full socket, sendto with a timeout would repeat without a pause.
            sender.connect(f"\0{reply}".encode())
            sender.send(report)
    except BlockingIOError:
        raise
    except (OSError, UnicodeError) as failure:
        logger.warning("the API server does not learn why request %s failed: %s", request_id, failure)


@functools.cache
def _late_reports(reply: str) -> queue.Queue[Callable[..., None]]:
    """Reports that found this API server's socket full. A thread of their own sends them one by one."""
    late: queue.Queue[Callable[..., None]] = queue.Queue(MAX_KEPT)

    def run() -> None:
        while True:
            late.get()(timeout_s=SEND_S)

    threading.Thread(target=run, name=f"reports to {reply}", daemon=True).start()
    return late


class Failures:
    """The API server's side. name: the address for ``send_report``."""

    def __init__(self) -> None:
        self.name = f"vision-encoder-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # An abstract name of Linux: it leaves no file behind.
        self._socket.bind(f"\0{self.name}".encode())
        self._reports: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="vision-encoder-failures", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        """Reads at once: the kernel keeps only about ten datagrams, and many requests may fail together."""
        waiting = select.poll()  # of descriptors above 1023, too
        with contextlib.suppress(OSError, ValueError):
            waiting.register(self._socket, select.POLLIN)
            while True:
                waiting.poll()
                self._receive()

    def _receive(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            while True:
                message = self._socket.recv(RECEIVE_BYTES)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    report = json.loads(message)
                    self._reports[str(report["request_id"])] = int(report["status"]), str(report["message"])
                while len(self._reports) > MAX_KEPT:
                    self._reports.popitem(last=False)

    def take(self, request_id: str) -> tuple[int, str] | None:
        """Status and message of a failed request. request_id: the API's.

        The engine derives its id from the API's. ``cmpl-abc`` becomes ``0_cmpl-abc-0-1f3c5d7e``: the number
        of the sample, the API's id, the number of the prompt, and a random end. For a beam, ``chatcmpl-abc``
        becomes ``chatcmpl-abc-0b7e1f2d-beam-3-4f2c9b1a``. An id with the number of a prompt may also be
        another client's own id: if several such ids have different reports, none is taken."""
        self._receive()
        separator = "-" if request_id.startswith(COMPLETIONS) else "_"
        ends = r"(?:-\w+-beam-\d+)?(?:-\w{8})?"
        engines_id = re.compile(rf"(?:\d+_)?{re.escape(request_id)}({separator}\d+)?{ends}")
        with self._lock:
            matches = [match for name in self._reports if (match := engines_id.fullmatch(name))]
            mine = [match for match in matches if match[1] is None] or matches
            if len({self._reports[match[0]] for match in mine if match[1] is not None}) > 1:
                return None
            reports = [self._reports.pop(match[0]) for match in mine]
        return reports[-1] if reports else None


@functools.cache
def listening() -> Failures:
    """The socket of this process. First called with a first image, when no vLLM process is forked any
    more."""
    return Failures()


def answer_with_reasons() -> None:
    """Makes vLLM's API raise the reasons. Replaces one method of vLLM, which has no hook for this."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    vllms_method: Any = GenerateBaseServing._raise_if_error
    if getattr(vllms_method, "has_reasons", False):
        return

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "error" and (reason := listening().take(request_id)) is not None:
            raise vllm_error(*reason)
        vllms_method(self, finish_reason, request_id)

    raise_if_error.has_reasons = True  # type: ignore[attr-defined]
    GenerateBaseServing._raise_if_error = raise_if_error
