"""Connections of the HTTP ports: which ones end, and who is answered while others hold all of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from encoder_service.ops import http_server
from encoder_service.ops.http_server import HttpLimits, HttpServer
from tests.certificates import Authority
from tests.unit.service.rig import until

pytestmark = pytest.mark.anyio
WHOLE = b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n"
PART = b"GET / HTTP/1.1\r\nHost: he"
UPLOAD = b"POST /upload HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n"
NUM_CONNECTIONS = 64
# Less than a probe waits; more than a loaded machine takes.
PROMPT_S = 4.0
LARGE = bytes(256 << 10)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    found = PlainTextResponse("answered")
    match scope["path"]:
        case "/slow":
            await asyncio.sleep(1.0)
        case "/upload":
            await Request(scope, receive).body()
        case "/readyz":
            found = PlainTextResponse(LARGE)
    await found(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(max_connections: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpServer]:
    server = HttpServer(answer, "127.0.0.1:0", HttpLimits(max_connections, 1024, 4096), tls)
    server.start()
    try:
        async with asyncio.timeout(60):
            yield server
    finally:
        await server.stop()


async def connected(
    server: HttpServer, source: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(source, 0))


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the server ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(4096):
            found += part
    return found


# -- what ends by itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "num_answers"),
    [(b"", 0), (PART, 0), (WHOLE % b"" + PART, 1), (WHOLE % b"slow", 1), (WHOLE % b"" + WHOLE % b"slow", 2)],
    ids=["nothing", "a part", "a request and a part", "a request that takes longer", "two at once"],
)
async def test_p46_a_connection_without_a_request_ends(
    sent: bytes, num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.25)
    async with serving(4) as server:
        reader, writer = await connected(server)
        writer.write(sent)
        assert (await read_all(reader)).count(b"answered") == num_answers
        writer.close()


async def test_headers_that_come_letter_by_letter_do_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.25)
    async with serving(4) as server:
        reader, writer = await connected(server)
        ended = asyncio.ensure_future(read_all(reader))
        writer.write(PART)
        while not ended.done():
            writer.write(b"x")
            await asyncio.wait([ended], timeout=0.02)
        writer.close()


async def test_an_answer_that_nobody_reads_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.25)
    async with serving(4) as server:
        _, writer = await connected(server)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(WHOLE % b"readyz")
        await until(lambda: len(server.connections.waiting) == 1)
        await until(lambda: not server.connections.shares.num_used)
        writer.close()


# -- displacement --------------------------------------------------------------------------------------


async def test_p69_a_new_connection_displaces_the_one_that_has_waited_the_longest() -> None:
    async with serving(4) as server:
        busy, busy_writer = await connected(server)
        busy_writer.write(WHOLE % b"slow")
        await asyncio.sleep(0.05)
        # Three of four are one peer's share.
        first, second, third = [await connected(server) for _ in range(3)]
        assert await read_all(first[0]) == b""
        fourth = await connected(server)
        assert await read_all(second[0]) == b""
        for reader, writer in (third, fourth):
            writer.write(WHOLE % b"")
            assert await reader.readuntil(b"answered")
        assert await busy.readuntil(b"answered")
        for writer in (busy_writer, first[1], second[1], third[1], fourth[1]):
            writer.close()


async def test_more_requests_than_their_share_of_the_connections_are_answered_503() -> None:
    async with serving(8) as server:
        started = [await connected(server) for _ in range(6)]
        for _, writer in started:
            writer.write(UPLOAD)
        refused = await read_all(started[-1][0])
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"5 requests are in progress, 5 of them from this address; at most 6 may be" in refused
        for _, writer in started:
            writer.write(b"123456789")
        for reader, writer in started[:5]:
            assert b"answered" in await reader.readuntil(b"answered")
            writer.close()
        started[-1][1].close()


# -- floods --------------------------------------------------------------------------------------------


class Flood:
    """Many connections from one address, each opened again when it ends. sent: on each; no answer is read.
    Runs on a thread."""

    def __init__(self, address: str, source: str, sent: bytes, num_sockets: int) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._source, self._sent = (host, int(port)), source, sent
        self._num_sockets = num_sockets
        self._poll = select.epoll()
        self._open_ones: dict[int, socket.socket] = {}
        self._is_over = threading.Event()
        self.num_opened = 0

    def run(self) -> None:
        for _ in range(self._num_sockets):
            self._open()
        while not self._is_over.is_set():
            for number, events in self._poll.poll(0.05):
                self._go_on(number, events)
        for found in self._open_ones.values():
            found.close()
        self._poll.close()

    def stop(self) -> None:
        self._is_over.set()

    def _open(self) -> None:
        found = socket.socket()
        found.setblocking(False)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        found.bind((self._source, 0))
        found.connect_ex(self._address)
        self.num_opened += 1
        self._open_ones[found.fileno()] = found
        self._poll.register(found, select.EPOLLOUT | select.EPOLLRDHUP)

    def _go_on(self, number: int, events: int) -> None:
        if events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            self._open_ones.pop(number).close()
            self._open()
            return
        with contextlib.suppress(OSError):
            self._open_ones[number].send(self._sent)
        self._poll.modify(number, select.EPOLLRDHUP)


@contextlib.contextmanager
def flooded(server: HttpServer, source: str, sent: bytes, num_sockets: int) -> Iterator[Flood]:
    flood = Flood(server.address, source, sent, num_sockets)
    thread = threading.Thread(target=flood.run)
    thread.start()
    try:
        yield flood
    finally:
        flood.stop()
        thread.join()


def probe(address: str, tls: ssl.SSLContext | None = None) -> float:
    """Seconds until a fresh connection has its answer."""
    begun_s = time.monotonic()
    kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    given: dict[str, Any] = {} if tls is None else {"context": tls}
    with contextlib.closing(kind(address, timeout=PROMPT_S, **given)) as connection:  # type: ignore[arg-type]
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"answered")
    return time.monotonic() - begun_s


@pytest.mark.parametrize(
    ("source", "sent", "num_sockets", "num_probes"),
    [
        ("127.0.0.2", b"", 192, 50),
        ("127.0.0.1", b"", 192, 50),
        ("127.0.0.1", PART, 192, 15),
        ("127.0.0.1", UPLOAD, 192, 15),
        ("127.0.0.1", WHOLE % b"healthz", 192, 15),
        ("127.0.0.1", 40 * (WHOLE % b"readyz"), 64, 5),
    ],
    ids=["another address", "nothing", "a part", "an upload without its body", "checks", "unread answers"],
)
async def test_p74_health_is_answered_whatever_connections_are_held(
    source: str, sent: bytes, num_sockets: int, num_probes: int
) -> None:
    async with serving(NUM_CONNECTIONS) as server:
        with flooded(server, source, sent, num_sockets) as flood:
            await until(lambda: flood.num_opened > num_sockets)
            times_s = [await asyncio.to_thread(probe, server.address) for _ in range(num_probes)]
    assert max(times_s) < PROMPT_S


async def test_p74_health_is_answered_over_tls_while_others_do_not_shake_hands(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.cert, files.key)
    trusting = ssl.create_default_context(cafile=authority.ca)
    async with serving(4 * NUM_CONNECTIONS, tls) as server:
        with flooded(server, "127.0.0.1", b"", 4 * NUM_CONNECTIONS) as flood:
            await until(lambda: flood.num_opened > 4 * NUM_CONNECTIONS)
            times_s = [await asyncio.to_thread(probe, server.address, trusting) for _ in range(15)]
            assert server.connections.shares.num_used <= 4 * NUM_CONNECTIONS
    assert max(times_s) < PROMPT_S


async def test_p71_without_descriptors_accepting_pauses_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes on once there are some."""
    monkeypatch.setattr(http_server, "NO_DESCRIPTORS_S", 0.01)
    num_failed = 0
    async with serving(4) as server:
        loop = asyncio.get_running_loop()

        async def accept(_: socket.socket) -> tuple[socket.socket, object]:
            nonlocal num_failed
            num_failed += 1
            if num_failed == 5:
                monkeypatch.undo()
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "sock_accept", accept)
        with structlog.testing.capture_logs() as lines:
            assert await asyncio.to_thread(probe, server.address) < PROMPT_S
            assert await asyncio.to_thread(probe, server.address) < PROMPT_S
    assert num_failed == 5
    assert [line["error"] for line in lines] == ["Too many open files"]
