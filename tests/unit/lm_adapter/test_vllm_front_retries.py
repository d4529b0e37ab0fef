"""What the front before vLLM asks its encoder again by itself, and how often."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from blake3 import blake3
from fastapi import FastAPI

from lm_adapter import AsyncVisionEncoderClient, ItemFailed
from lm_adapter.engines import vllm_front_images
from lm_adapter.engines.vllm_front import Front
from lm_adapter.engines.vllm_rewrite import Failure
from lm_adapter.testing import FakeEncoder

pytestmark = pytest.mark.anyio

NUM_REQUESTS = 60
SHARE, RESERVE_PER_S = 0.2, 1.0
# Ten seconds' worth of the reserve may go at once, and a second goes by meanwhile or four.
MOST_ATTEMPTS = NUM_REQUESTS * (1 + SHARE) + 10 * RESERVE_PER_S
GOING = ItemFailed("going away", reason="NOT_READY", status=14, retryable=True)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_front_images, "RETRY_RESERVE_PER_S", RESERVE_PER_S)


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as running:
        yield running


async def fine() -> AsyncIterator[bytes]:
    yield b'{"choices": ["fine"]}'


@asynccontextmanager
async def front(target: str) -> AsyncIterator[httpx.AsyncClient]:
    """Before a vLLM that accepts everything."""
    client = AsyncVisionEncoderClient(target, timeout_s=5, transports=("inline",))
    vllm = httpx.MockTransport(lambda _: httpx.Response(200, content=fine()))
    http = httpx.AsyncClient(transport=vllm, base_url="http://vllm")
    served = FastAPI()
    chat = Front(client, http, None, timeout_s=5).chat
    served.add_route("/v1/chat/completions", chat, methods=["POST"])
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as outside:
        yield outside
    await http.aclose()
    await client.close()


def body_with(*images: bytes) -> dict[str, Any]:
    parts = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(image).decode()},
        }
        for image in images or (secrets.token_bytes(16),)
    ]
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


async def ask(client: httpx.AsyncClient, *images: bytes) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body_with(*images))


def sizes(fake: FakeEncoder) -> list[int]:
    """Items of each Prefetch that the encoder has received."""
    return [len(call.request.items) for call in fake.calls if call.method == "Prefetch"]


async def test_requests_that_all_fail_stay_within_the_retry_budget(fake: FakeEncoder) -> None:
    fake.script.call_failures["Prefetch"] = (grpc.StatusCode.UNAVAILABLE, GOING)
    async with front(fake.target) as client:
        answers = await asyncio.gather(*(ask(client) for _ in range(NUM_REQUESTS)))
    assert {answer.status_code for answer in answers} == {503}
    assert all(answer.headers["retry-after"] for answer in answers)
    assert NUM_REQUESTS < sum(sizes(fake)) <= MOST_ATTEMPTS


async def test_items_that_fail_on_their_own_stay_within_the_budget_too(fake: FakeEncoder) -> None:
    """The call is answered, each of its items says that the encoder is about to leave."""
    images = [secrets.token_bytes(16) for _ in range(NUM_REQUESTS)]
    for image in images:
        fake.script.failures[blake3(image).digest()] = GOING
    async with front(fake.target) as client:
        answers = await asyncio.gather(*(ask(client, image) for image in images))
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"]["code"] for answer in answers} == {"NOT_READY"}
    assert NUM_REQUESTS < sum(sizes(fake)) <= MOST_ATTEMPTS


@pytest.mark.parametrize("reason", ["NOT_READY", "DRAINING"])
async def test_p32_an_encoder_that_restarts_is_waited_for(fake: FakeEncoder, reason: str) -> None:
    """Only what it did not take is sent again."""
    taken, refused = secrets.token_bytes(16), secrets.token_bytes(16)
    failure = ItemFailed("going away", reason=reason, status=14, retryable=True)
    fake.script.failures[blake3(refused).digest()] = failure

    async def come_back() -> None:
        await asyncio.sleep(0.5)
        fake.script.failures.clear()

    async with front(fake.target) as client:
        answer, _ = await asyncio.gather(ask(client, taken, refused), come_back())
    assert answer.status_code == 200, answer.text
    found = sizes(fake)
    assert len(found) > 1
    assert found == [2, *[1] * (len(found) - 1)]


async def test_what_the_encoder_advises_is_what_is_waited(fake: FakeEncoder) -> None:
    """And where that is longer than the front waits at all, the caller is told at once."""
    soon, late = secrets.token_bytes(16), secrets.token_bytes(16)
    for image, after_ms in ((soon, 900), (late, 60_000)):
        fake.script.failures[blake3(image).digest()] = ItemFailed(
            "going away", reason="NOT_READY", status=14, retryable=True, retry_after_ms=after_ms
        )
    async with front(fake.target) as client:
        begun_s = time.monotonic()
        answer = await ask(client, late)
        assert time.monotonic() - begun_s < 0.9
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
        assert sum(sizes(fake)) == 1
        answer = await ask(client, soon)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        # Within three seconds: at once, and three times at most after.
        assert 2 <= sum(sizes(fake)) - 1 <= 4


async def test_a_request_with_an_image_that_is_bad_waits_for_no_other(fake: FakeEncoder) -> None:
    away, bad = secrets.token_bytes(16), secrets.token_bytes(16)
    fake.script.failures[blake3(away).digest()] = GOING
    fake.script.failures[blake3(bad).digest()] = ItemFailed("no image", reason="UNSUPPORTED", status=3)
    async with front(fake.target) as client:
        answer = await ask(client, away, bad)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "UNSUPPORTED")
    assert sum(sizes(fake)) == 2


async def test_a_request_whose_rows_were_lost_draws_on_the_same_budget(fake: FakeEncoder) -> None:
    """It is sent anew once, which is a retry as well."""
    client = AsyncVisionEncoderClient(fake.target, timeout_s=5, transports=("inline",))
    told: list[dict[str, Any]] = []

    class Accounts:
        async def take(self, reply: str) -> Any:
            return lost

    lost = Failure(503, "UNKNOWN_KEY", "the rows are gone", retryable=True)

    def reject(request: httpx.Request) -> httpx.Response:
        told.append(json.loads(request.content))
        return httpx.Response(500, json={"error": "Internal server error"})

    http = httpx.AsyncClient(transport=httpx.MockTransport(reject), base_url="http://vllm")
    failures: Any = Accounts()
    served = FastAPI()
    chat = Front(client, http, failures, timeout_s=5).chat
    served.add_route("/v1/chat/completions", chat, methods=["POST"])
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as outside:
        answers = [await ask(outside) for _ in range(NUM_REQUESTS)]
    await http.aclose()
    await client.close()
    assert {answer.status_code for answer in answers} == {503}
    assert len(told) == sum(sizes(fake))
    assert NUM_REQUESTS < len(told) <= MOST_ATTEMPTS
