"""vLLM as its front sees it: answers on their way, and the reasons that they leave out.

Owns the connection that an answer comes by, until the answer is over or nobody waits for it, and the socket
to which the connector tells why it rejected a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_adapter.engines.vllm_rewrite import Failure
from lm_adapter.errors import EncoderUnavailable

__all__ = ["Answer", "Failures", "vllm_away"]

MAX_ACCOUNT_BYTES = 1 << 14
MAX_ACCOUNTS = 4096
ACCOUNT_POLL_S = 0.01
ACCOUNT_POLLS = 20


class Failures:
    """Accounts of rejected requests, by reply name: a datagram socket that the connector writes to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._accounts: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._socket: socket.socket | None = None
        self._file: tuple[int, int] | None = None

    def open(self) -> None:
        """On the running loop. A socket file that a former front left is replaced."""
        Path(self.path).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._file = _file_at(self.path)
        Path(self.path).chmod(0o600)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Harmless when done twice. A successor that has taken the path over keeps it."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        # Before the socket is closed, as long as nothing else can get its file's number.
        if _file_at(self.path) == self._file:
            Path(self.path).unlink(missing_ok=True)
        self._socket.close()
        self._socket = None

    def _read(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._socket.recv(MAX_ACCOUNT_BYTES)
                with contextlib.suppress(ValueError, AttributeError):
                    account = json.loads(data)
                    self._accounts[str(account.get("reply"))] = account
                    if len(self._accounts) > MAX_ACCOUNTS:
                        self._accounts.popitem(last=False)

    async def take(self, reply: str) -> Failure | None:
        """The account of this request, sent before vLLM answers; None where there is none."""
        for _ in range(ACCOUNT_POLLS):
            if reply in self._accounts:
                break
            await asyncio.sleep(ACCOUNT_POLL_S)
        account = self._accounts.pop(reply, None)
        return Failure.of_account(account) if account is not None else None


def _file_at(path: str) -> tuple[int, int] | None:
    """Device and number of what lies there; None for nothing."""
    try:
        found = Path(path).lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def vllm_away() -> Iterator[None]:
    """Turns what httpx raises for a vLLM that cannot be reached, or goes away, into EncoderUnavailable."""
    import httpx

    try:
        yield
    except httpx.TransportError as error:
        raise EncoderUnavailable(
            f"vLLM does not answer: {type(error).__name__}: {error}", reason="VLLM_UNAVAILABLE"
        ) from error


class Answer:
    """vLLM's answer on its way. Of a streamed one the beginning is looked at, up to the first text."""

    def __init__(self, upstream: Any) -> None:
        self.status: int = upstream.status_code
        self._upstream = upstream
        self._chunks: AsyncIterator[bytes] = upstream.aiter_raw()
        self._first = bytearray()

    async def starts_with_error(self, num_choices: int = 1, *, echoes: bool = False) -> bool:
        """Whether a stream is that of a rejected request. num_choices: the request's ``n``; echoes: its
        ``echo``. Raises EncoderUnavailable for a vLLM that goes away meanwhile."""
        if "text/event-stream" not in self._upstream.headers.get("content-type", ""):
            return False
        # vLLM names every choice's role, and repeats what it is to echo of the prompt, before it looks at
        # what became of the request.
        num_before = num_choices * (2 if echoes else 1)
        number = end = 0
        while (event := await self._event(end)) is not None:
            number, end = number + 1, end + len(event)
            if event.startswith(b'data: {"error"'):
                return True
            # The first one is looked past whatever it is.
            is_before = number <= num_before and (echoes or _names_role(event))
            if not is_before and number > 1:
                break
        return False

    async def _event(self, start: int) -> bytes | None:
        """The whole event that begins at this byte; None where the stream ends before."""
        searched = start
        while (end := self._first.find(b"\n\n", searched)) < 0:
            searched = max(start, len(self._first) - 1)
            try:
                with vllm_away():
                    self._first += await anext(self._chunks)
            except StopAsyncIteration:
                return None
        return bytes(self._first[start : end + 2])

    def response(self) -> Any:
        from fastapi.responses import StreamingResponse

        kept = {"content-type", "content-encoding", "x-request-id", "retry-after"}
        headers = {name: value for name, value in self._upstream.headers.items() if name in kept}
        return _Closing(StreamingResponse(self._stream(), self.status, headers), self)

    async def close(self) -> None:
        await self._upstream.aclose()

    async def _stream(self) -> AsyncIterator[bytes]:
        if self._first:
            yield bytes(self._first)
        async for chunk in self._chunks:
            yield chunk


def _names_role(event: bytes) -> bool:
    """Whether it says of choices whose they are, and nothing of their text."""
    try:
        choices = json.loads(event.removeprefix(b"data: "))["choices"]
        return bool(choices) and all(
            choice["delta"].get("role") and not choice["delta"].get("content") for choice in choices
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


class _Closing:
    """A response after which the answer is closed, also one that was never begun: its caller had left."""

    def __init__(self, response: Any, answer: Answer) -> None:
        self._response = response
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            await self._answer.close()
