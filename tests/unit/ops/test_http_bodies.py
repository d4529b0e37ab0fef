"""Bodies of HTTP requests: counted before they are held, shared between addresses, bounded in time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from encoder_service.errors import VisionEncoderError
from encoder_service.ops import http_server
from encoder_service.ops.http_requests import error_response, failure_fields
from encoder_service.ops.http_server import HttpLimits, HttpServer, read_body
from tests.unit.service.rig import until

pytestmark = pytest.mark.anyio
KIB = 1 << 10
LIMITS = HttpLimits(max_connections=64, max_body_bytes=64 * KIB, max_bodies_bytes=256 * KIB)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body; ``/unread`` does not read it."""
    if scope["path"] == "/unread":
        await PlainTextResponse("unread", 404)(scope, receive, send)
        return
    with contextlib.suppress(ClientDisconnect):
        try:
            body = await read_body(Request(scope, receive))
            await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)
        except VisionEncoderError as error:
            await error_response(failure_fields(error))(scope, receive, send)


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    found = HttpServer(app, "127.0.0.1:0", LIMITS)
    found.start()
    async with asyncio.timeout(30):
        yield found
    await found.stop()


def num_held(server: HttpServer) -> int:
    return server.requests.bodies.num_used


class Upload:
    """A POST of which a part is sent. num_bytes: of its body; None: in chunks."""

    def __init__(self, server: HttpServer, num_bytes: int | None, source: str = "127.0.0.1") -> None:
        self._address, self._source, self._num_bytes = server.address, source, num_bytes

    async def send(self, num_bytes: int, *, path: str = "/", expects: str = "") -> None:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(
            host, int(port), local_addr=(self._source, 0)
        )
        length = f"Content-Length: {self._num_bytes}"
        if self._num_bytes is None:
            length = "Transfer-Encoding: chunked"
        self._writer.write(f"POST {path} HTTP/1.1\r\nHost: a\r\n{expects}{length}\r\n\r\n".encode())
        if self._num_bytes is None:
            self._writer.write(b"%x\r\n%b\r\n" % (num_bytes, bytes(num_bytes)))
        else:
            self.go_on(num_bytes)

    def go_on(self, num_bytes: int) -> None:
        self._writer.write(bytes(num_bytes))

    async def answer(self) -> bytes:
        """Until the server ends the connection."""
        try:
            return await self._reader.read()
        finally:
            self.leave()

    async def status(self) -> int:
        return int((await self._reader.readline()).split()[1])

    def leave(self) -> None:
        self._writer.close()


@pytest.mark.parametrize("expects", ["", "Expect: 100-continue\r\n"])
async def test_p67_a_stated_size_above_the_limit_is_refused_before_the_body(
    server: HttpServer, expects: str
) -> None:
    upload = Upload(server, 64 * KIB + 1)
    await upload.send(0, expects=expects)
    answer = await upload.answer()
    assert answer.startswith(b"HTTP/1.1 413")  # and no 100 before it
    assert b"connection: close" in answer
    assert b"65537 bytes or more, at most 65536 are taken" in answer


async def test_p67_chunks_are_counted_as_they_arrive(server: HttpServer) -> None:
    upload = Upload(server, None)
    await upload.send(64 * KIB + 1)
    assert (await upload.answer()).startswith(b"HTTP/1.1 413")
    assert num_held(server) == 0


async def test_p67_bodies_at_once_hold_no_more_than_their_bound(server: HttpServer) -> None:
    """What has no room is refused before it is sent; another address finds room."""
    uploads = [Upload(server, 60 * KIB) for _ in range(20)]
    for upload in uploads:
        await upload.send(1 * KIB)
    refused = [await upload.answer() for upload in uploads[3:]]
    assert all(
        answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in answer.title() for answer in refused
    )
    text = (
        b"bodies of other requests have 184320 bytes of 262144, those of this address 184320; there is room"
    )
    assert text in refused[0]
    assert b"the body needs 61440" in refused[0]
    assert num_held(server) == 3 * 60 * KIB
    other = Upload(server, 60 * KIB, "127.0.0.2")
    await other.send(60 * KIB)
    assert await other.status() == 200
    for upload in uploads[:3]:
        upload.go_on(59 * KIB)
        assert await upload.status() == 200
        upload.leave()
    other.leave()
    assert num_held(server) == 0


@pytest.mark.parametrize("num_stated", [60 * KIB, None], ids=["length", "chunks"])
async def test_p67_a_body_that_stops_ends_in_time(
    server: HttpServer, num_stated: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "RECEIVE_S", 0.2)
    monkeypatch.setattr(http_server, "LINGER_S", 0.05)
    uploads = [Upload(server, num_stated) for _ in range(3)]
    for upload in uploads:
        await upload.send(40 * KIB)
    for upload in uploads:
        answer = await upload.answer()
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"did not arrive within 0.2 s: 40960 bytes of" in answer
    assert num_held(server) == 0


async def test_a_caller_that_leaves_gives_its_bytes_back(server: HttpServer) -> None:
    upload = Upload(server, 60 * KIB)
    await upload.send(10 * KIB)
    await until(lambda: num_held(server) > 0)
    upload.leave()
    await until(lambda: num_held(server) == 0)


@pytest.mark.parametrize("num_bytes", [60 * KIB, 16 << 20], ids=["small", "large"])
async def test_an_answer_before_the_end_of_the_body_arrives(server: HttpServer, num_bytes: int) -> None:
    """Also at a client that sends everything before it reads."""

    def post() -> tuple[int, str | None]:
        with contextlib.closing(http.client.HTTPConnection(server.address, timeout=10)) as connection:
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            connection.request("POST", "/unread", bytes(num_bytes))
            response = connection.getresponse()
            return response.status, response.headers["connection"]

    assert await asyncio.to_thread(post) == (404, "close")


async def test_a_whole_body_leaves_the_connection_open(server: HttpServer) -> None:
    upload = Upload(server, 60 * KIB)
    await upload.send(30 * KIB)
    upload.go_on(30 * KIB)
    assert await upload._reader.readuntil(b"61440 bytes")
    upload._writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await upload._reader.readuntil(b"0 bytes")
    upload.leave()
