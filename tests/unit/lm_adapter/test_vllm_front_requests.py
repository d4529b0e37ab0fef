"""Requests as the front before vLLM takes them in: within a bound, and without holding up its loop."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from lm_adapter import AsyncVisionEncoderClient, ImageItem
from lm_adapter.engines import vllm_front, vllm_front_requests
from lm_adapter.engines.vllm_front import Front, create_app
from lm_adapter.engines.vllm_front_requests import MAX_BODY_BYTES, OFF_LOOP_BYTES, Room
from lm_adapter.engines.vllm_rewrite import PORTION_CHARS, images_of
from lm_adapter.errors import EncoderOverloaded, InvalidRequest
from lm_adapter.testing import FakeEncoder

pytestmark = pytest.mark.anyio


class SlowVllm:
    """Answers once it may; keeps how much it was sent."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.bodies: list[Any] = []

    async def asked(self, *, num_times: int) -> None:
        ends_s = time.monotonic() + 10
        while len(self.bodies) < num_times:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.005)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.content)
        await self.may_answer.wait()
        return httpx.Response(200, content=fine())


async def fine() -> AsyncIterator[bytes]:
    yield b"{}"


@asynccontextmanager
async def front(vllm: SlowVllm, target: str, room: Room) -> AsyncIterator[httpx.AsyncClient]:
    client = AsyncVisionEncoderClient(target, timeout_s=5, transports=("inline",))
    http = httpx.AsyncClient(transport=httpx.MockTransport(vllm), base_url="http://vllm")
    served = Front(client, http, None, timeout_s=5, room=room)
    app = FastAPI()
    app.add_route("/v1/chat/completions", served.chat, methods=["POST"])
    app.add_route("/{path:path}", served.other, methods=["POST"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as outside:
        yield outside
    await http.aclose()
    await client.close()


def body_with(*images: bytes) -> bytes:
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_requests_in_progress_are_bounded_in_bytes(path: str) -> None:
    """One more is told when to come again; it fits once vLLM has answered those before it."""
    body = body_with(secrets.token_bytes(3000))
    room = Room(3 * len(body) - 1)
    vllm = SlowVllm()
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, room) as client:
            held = [asyncio.create_task(client.post(path, content=body)) for _ in range(2)]
            await vllm.asked(num_times=2)
            refused = await client.post(path, content=body)
            small = asyncio.create_task(client.post(path, content=body_with()))
            await vllm.asked(num_times=3)
            vllm.may_answer.set()
            answers = [*await asyncio.gather(*held, small), await client.post(path, content=body)]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert f"{2 * len(body)} of {room.max_bytes} bytes" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert room.num_bytes == 0


async def test_a_request_without_a_length_is_refused_where_it_stops_to_fit() -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * 1000

    room = Room(4500)
    async with front(SlowVllm(), "127.0.0.1:1", room) as client:
        answer = await client.post("/v1/embeddings", content=endless())
        announced = await client.post(
            "/v1/embeddings", content=endless(), headers={"content-length": str(1 << 20)}
        )
        length = str(MAX_BODY_BYTES + 1)
        too_long = await client.post("/v1/embeddings", content=endless(), headers={"content-length": length})
    assert [answer.status_code, announced.status_code] == [429, 429]
    assert too_long.status_code == 400
    # Those that say how long they are, are not read at all.
    assert num_sent == 5
    assert room.num_bytes == 0


async def test_room_is_given_back_by_requests_that_fail_and_callers_that_leave() -> None:
    room = Room(1 << 20)
    vllm = SlowVllm()
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, room) as client:
            assert (await client.post("/v1/chat/completions", content=b"{" * 999)).status_code == 400
            leaving = asyncio.create_task(client.post("/v1/chat/completions", content=body_with(b"x")))
            await vllm.asked(num_times=1)
            assert room.num_bytes > 0
            leaving.cancel()
            await asyncio.wait({leaving})
    assert room.num_bytes == 0


def test_room_names_both_numbers() -> None:
    room = Room(100)
    room.take(60)
    with pytest.raises(EncoderOverloaded, match=r"60 of 100 bytes.* 41 more"):
        room.take(41)
    room.take(40)
    room.give(100)
    assert room.num_bytes == 0


async def test_room_for_less_than_one_request_stops_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="max_held_bytes is 5, a request may have 67108864"):
        create_app(vllm="http://127.0.0.1:1", encoder="127.0.0.1:1", max_held_bytes=5)
    words = ["--vllm", "http://127.0.0.1:1", "--encoder", "127.0.0.1:1", "--max-held-bytes", "5"]
    with pytest.raises(SystemExit):
        vllm_front.main(words)
    assert "max_held_bytes is 5, a request may have 67108864" in capsys.readouterr().err


async def test_large_requests_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noticed(body: Any) -> Any:
        threads.append(threading.get_ident())
        return images_of(body)

    monkeypatch.setattr(vllm_front_requests, "images_of", noticed)
    vllm = SlowVllm()
    vllm.may_answer.set()
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, Room(1 << 30)) as client:
            for num_bytes in (100, OFF_LOOP_BYTES):
                body = body_with(secrets.token_bytes(num_bytes))
                answer = await client.post("/v1/chat/completions", content=body)
                assert answer.status_code == 200, answer.text
    small, large = threads
    assert small == threading.get_ident()
    assert large != threading.get_ident()
    assert max(map(len, vllm.bodies)) < 1000


@pytest.mark.parametrize("less", [0, 1, 2, 3, 4, PORTION_CHARS // 4 * 3])
def test_base64_in_portions_is_what_it_is_at_once(less: int) -> None:
    data = secrets.token_bytes(PORTION_CHARS // 2 * 3 - less)
    (item,) = images_of(json.loads(body_with(data))).items
    assert isinstance(item, ImageItem)
    assert item.data == data
