"""What the front before vLLM tries again by itself, and how often: one encoder and a fleet alike."""

from __future__ import annotations

import asyncio
import base64
import contextlib
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

from lm_adapter import AsyncFleetClient, AsyncVisionEncoderClient, FleetSettings, ItemFailed
from lm_adapter.engines import vllm_front
from lm_adapter.engines.vllm_fetch import FetchSettings
from lm_adapter.engines.vllm_front import Front
from lm_adapter.engines.vllm_rewrite import Failure
from lm_adapter.errors import InvalidRequest
from lm_adapter.testing import FakeEncoder

pytestmark = pytest.mark.anyio

NUM_REQUESTS = 60
SHARE, RESERVE_PER_S = 0.2, 1.0
# Ten seconds' worth of the reserve may go at once, and a second goes by meanwhile or four.
MOST_ATTEMPTS = NUM_REQUESTS * (1 + SHARE) + 10 * RESERVE_PER_S
SETTINGS = FleetSettings(
    retry_share=SHARE, retry_reserve_per_s=RESERVE_PER_S, refresh_s=0.5, check_interval_s=0.2, max_hedges=0
)
GOING = ItemFailed("going away", reason="NOT_READY", status=14, retryable=True)


@pytest.fixture
def fakes() -> Iterator[list[FakeEncoder]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEncoder(f"127.0.0.{number}:0")) for number in (2, 3, 4)]


async def fine() -> AsyncIterator[bytes]:
    yield b'{"choices": ["fine"]}'


@asynccontextmanager
async def front(*targets: str) -> AsyncIterator[httpx.AsyncClient]:
    """Before a vLLM that is content with everything; of one encoder or of several."""
    client: AsyncVisionEncoderClient | AsyncFleetClient
    if len(targets) == 1:
        client = AsyncVisionEncoderClient(targets[0], timeout_s=5, transports=("inline",))
    else:
        client = AsyncFleetClient(targets, settings=SETTINGS, timeout_s=5, transports=("inline",))
        await client.wait_ready(10, num_replicas=len(targets))
    vllm = httpx.MockTransport(lambda _: httpx.Response(200, content=fine()))
    http = httpx.AsyncClient(transport=vllm, base_url="http://vllm")
    served = FastAPI()
    chat = Front(client, http, None, timeout_s=5, settings=SETTINGS).chat
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


def num_items(fakes: list[FakeEncoder]) -> int:
    """That encoders were sent, each time counted."""
    return sum(call.num_items for one in fakes for call in one.calls if call.method == "Prefetch")


@pytest.mark.parametrize("num_encoders", [1, 3])
async def test_requests_that_all_fail_stay_within_the_retry_budget(
    fakes: list[FakeEncoder], num_encoders: int
) -> None:
    """docs/fleet.md: what fails everywhere costs (1 + share) times what is meant, and the reserve."""
    fakes = fakes[:num_encoders]
    for one in fakes:
        one.script.call_failures["Prefetch"] = (grpc.StatusCode.UNAVAILABLE, GOING)
    async with front(*(one.target for one in fakes)) as client:
        answers = await asyncio.gather(*(ask(client) for _ in range(NUM_REQUESTS)))
    assert {answer.status_code for answer in answers} == {503}
    assert all(answer.headers["retry-after"] for answer in answers)
    assert NUM_REQUESTS < num_items(fakes) <= MOST_ATTEMPTS


async def test_items_that_fail_on_their_own_stay_within_the_budget_too(fakes: list[FakeEncoder]) -> None:
    """The call is answered, each of its items says that the encoder is about to leave."""
    images = [secrets.token_bytes(16) for _ in range(NUM_REQUESTS)]
    for image in images:
        fakes[0].script.failures[blake3(image).digest()] = GOING
    async with front(fakes[0].target) as client:
        answers = await asyncio.gather(*(ask(client, image) for image in images))
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"]["code"] for answer in answers} == {"NOT_READY"}
    assert NUM_REQUESTS < num_items(fakes[:1]) <= MOST_ATTEMPTS


@pytest.mark.parametrize("num_encoders", [1, 3])
@pytest.mark.parametrize("reason", ["NOT_READY", "DRAINING"])
async def test_p32_an_encoder_that_restarts_is_waited_for(
    fakes: list[FakeEncoder], num_encoders: int, reason: str
) -> None:
    """Only what it did not take is sent again."""
    fakes = fakes[:num_encoders]
    taken, refused = secrets.token_bytes(16), secrets.token_bytes(16)
    failure = ItemFailed("going away", reason=reason, status=14, retryable=True)
    for one in fakes:
        one.script.failures[blake3(refused).digest()] = failure

    async def come_back() -> None:
        await asyncio.sleep(0.5)
        for one in fakes:
            one.script.failures.clear()

    async with front(*(one.target for one in fakes)) as client:
        answer, _ = await asyncio.gather(ask(client, taken, refused), come_back())
    assert answer.status_code == 200, answer.text
    if num_encoders == 1:
        sizes = [call.num_items for call in fakes[0].calls if call.method == "Prefetch"]
        assert len(sizes) > 1
        assert sizes == [2, *[1] * (len(sizes) - 1)]


async def test_what_the_encoder_advises_is_what_is_waited(fakes: list[FakeEncoder]) -> None:
    """And where that is longer than the front waits at all, the caller is told at once."""
    soon, late = secrets.token_bytes(16), secrets.token_bytes(16)
    for image, after_ms in ((soon, 900), (late, 60_000)):
        fakes[0].script.failures[blake3(image).digest()] = ItemFailed(
            "going away", reason="NOT_READY", status=14, retryable=True, retry_after_ms=after_ms
        )
    async with front(fakes[0].target) as client:
        begun_s = time.monotonic()
        answer = await ask(client, late)
        assert time.monotonic() - begun_s < 0.9
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
        assert num_items(fakes[:1]) == 1
        answer = await ask(client, soon)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        # Within three seconds: at once, and three times at most after.
        assert 2 <= num_items(fakes[:1]) - 1 <= 4


async def test_a_request_with_an_image_that_is_bad_waits_for_no_other(fakes: list[FakeEncoder]) -> None:
    away, bad = secrets.token_bytes(16), secrets.token_bytes(16)
    fakes[0].script.failures[blake3(away).digest()] = GOING
    fakes[0].script.failures[blake3(bad).digest()] = ItemFailed("no image", reason="UNSUPPORTED", status=3)
    async with front(fakes[0].target) as client:
        answer = await ask(client, away, bad)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "UNSUPPORTED")
    assert num_items(fakes[:1]) == 2


async def test_a_request_whose_rows_were_lost_draws_on_the_same_budget(fakes: list[FakeEncoder]) -> None:
    """It is sent anew once, which is a retry as well."""
    client = AsyncVisionEncoderClient(fakes[0].target, timeout_s=5, transports=("inline",))
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
    chat = Front(client, http, failures, timeout_s=5, settings=SETTINGS).chat
    served.add_route("/v1/chat/completions", chat, methods=["POST"])
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as outside:
        answers = [await ask(outside) for _ in range(NUM_REQUESTS)]
    await http.aclose()
    await client.close()
    assert {answer.status_code for answer in answers} == {503}
    assert len(told) == num_items(fakes[:1])
    assert NUM_REQUESTS < len(told) <= MOST_ATTEMPTS


async def test_the_retry_budget_is_set_for_connector_and_front_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"retry_share": 0.5, "retry_reserve_per_s": 2}
    client = FetchSettings.read({"target": "a:1,b:1", **given}).client()
    assert isinstance(client, AsyncFleetClient)
    assert client.settings == FleetSettings(retry_share=0.5, retry_reserve_per_s=2)
    await client.close()
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    monkeypatch.setattr(vllm_front, "create_app", lambda **options: told.update(options))
    words = ["--vllm", "http://127.0.0.1:1", "--encoder", "a:1,b:1"]
    vllm_front.main([*words, "--retry-share", "0.5", "--retry-reserve-per-s", "2"])
    assert told["settings"] == client.settings
    vllm_front.main(words)
    assert told["settings"] == FleetSettings()


def test_a_retry_budget_that_cannot_be_stops_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="retry_share is 11, 0 to 10"):
        FetchSettings.read({"target": "a:1,b:1", "retry_share": 11})
    with pytest.raises(SystemExit):
        vllm_front.main(["--vllm", "http://127.0.0.1:1", "--encoder", "a:1", "--retry-share", "11"])
    assert "retry_share is 11.0, 0 to 10" in capsys.readouterr().err
