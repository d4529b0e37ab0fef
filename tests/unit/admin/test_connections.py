"""Connections of the HTTP ports on which no request comes."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from encoder_service.ops.admin import plane
from encoder_service.ops.admin.plane import AdminServer

WHOLE = b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n"
PART = b"GET / HTTP/1.1\r\nHost: he"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    await PlainTextResponse("answered")(scope, receive, send)


@pytest.mark.parametrize(
    ("sent", "num_answers"),
    [(b"", 0), (PART, 0), (WHOLE % b"" + PART, 1), (WHOLE % b"slow", 1)],
    ids=["nothing", "a part", "a request and a part", "a request that takes longer"],
)
def test_p46_a_connection_without_a_request_ends(
    sent: bytes, num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "REQUEST_S", 0.25)

    async def talk() -> bytes:
        server = AdminServer(answer, "127.0.0.1:0", max_connections=4)
        server.start()
        try:
            async with asyncio.timeout(20):
                reader, writer = await connected(server.address)
                writer.write(sent)
                found = await read_all(reader)
                writer.close()
                return found
        finally:
            await server.stop()

    assert asyncio.run(talk()).count(b"answered") == num_answers


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Once the server listens."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            return await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the server ends the connection."""
    found = b""
    try:
        while part := await reader.read(4096):
            found += part
    except ConnectionResetError:
        pass
    return found
