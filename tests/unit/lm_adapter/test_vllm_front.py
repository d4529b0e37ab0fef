"""The front before vLLM, with a pretended vLLM behind it and a made-up encoder beside it."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from lm_adapter import AsyncVisionEncoderClient, ItemFailed
from lm_adapter.engines.vllm_front import Failures, Front, create_app
from lm_adapter.engines.vllm_items import read_params
from lm_adapter.testing import FakeEncoder

pytestmark = pytest.mark.anyio


class PretendedVllm:
    """Answers as told, in turn; keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.answers: list[Callable[[dict[str, Any]], Response]] = []

    async def chat(self, request: Any) -> Response:
        body = await request.json()
        self.bodies.append(body)
        answer = self.answers.pop(0) if self.answers else None
        return answer(body) if answer else JSONResponse({"choices": ["fine"]})

    async def models(self, request: Any) -> Response:
        return JSONResponse(
            {"path": request.url.path, "query": str(request.url.query), "method": request.method}
        )

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_route("/{path:path}", self.models, methods=["GET", "POST"])
        return app


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ve-front-") as name:
        yield name


@pytest.fixture
def vllm() -> PretendedVllm:
    return PretendedVllm()


@asynccontextmanager
async def front(vllm: PretendedVllm, target: str, path: str) -> AsyncIterator[httpx.AsyncClient]:
    failures = Failures(path)
    failures.open()
    client = AsyncVisionEncoderClient(target, timeout_s=3, transports=("inline",))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(vllm.app()), base_url="http://vllm")
    served = Front(client, http, failures, timeout_s=3)
    app = FastAPI()
    app.add_route("/v1/chat/completions", served.chat, methods=["POST"])
    app.add_route("/{path:path}", served.other, methods=["GET", "POST"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as outside:
        yield outside
    await http.aclose()
    await client.close()
    failures.close()


def chat_body(*images: bytes, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What?"}]
    for image in images:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **fields}


def rejecting(path: str, reason: str, *, streamed: bool = False) -> Callable[[dict[str, Any]], Response]:
    """vLLM as it rejects a request, after its connector has told why."""

    def answer(body: dict[str, Any]) -> Response:
        _, reply = read_params(body["ec_transfer_params"])
        account = {"reply": reply, "reason": reason, "message": "14 rows, 12 expected", "retryable": True}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"no JSON", path)
            sender.sendto(b"[]", path)
            sender.sendto(json.dumps(account).encode(), path)
        error = {"error": {"message": "Internal server error"}}
        if not streamed:
            return JSONResponse(error, 500)
        role = 'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
        events = [role, f"data: {json.dumps(error)}\n\n", "data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    return answer


async def test_images_go_to_the_encoder_and_grids_to_vllm(vllm: PretendedVllm, folder: str) -> None:
    images = [secrets.token_bytes(40) for _ in range(2)]
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, f"{folder}/f") as client:
            response = await client.post("/v1/chat/completions", json=chat_body(*images, temperature=0))
        assert encoder.num_calls["Prefetch"] == 1
    assert response.json() == {"choices": ["fine"]}
    (body,) = vllm.bodies
    items, reply = read_params(body["ec_transfer_params"])
    assert len(items) == 2
    assert reply
    parts = body["messages"][0]["content"]
    assert [part["uuid"] for part in parts[1:]] == [key.hex() for key, _ in items]
    assert [part["image_embeds"]["image_grid_thw"] for part in parts[1:]] == [list(grid) for _, grid in items]
    assert body["temperature"] == 0


async def test_text_and_other_paths_are_passed_on(vllm: PretendedVllm, folder: str) -> None:
    """Also while there is no encoder."""
    async with front(vllm, "127.0.0.1:1", f"{folder}/f") as client:
        assert (await client.post("/v1/chat/completions", json=chat_body())).status_code == 200
        assert (await client.get("/v1/models?x=1")).json() == {
            "path": "/v1/models",
            "query": "x=1",
            "method": "GET",
        }
    assert vllm.bodies == [chat_body()]


@pytest.mark.parametrize("streamed", [False, True])
async def test_p32_a_rejection_has_its_reason_and_status(
    streamed: bool, vllm: PretendedVllm, folder: str
) -> None:
    vllm.answers = [rejecting(f"{folder}/f", "INVALID_ROWS", streamed=streamed)]
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, f"{folder}/f") as client:
            response = await client.post("/v1/chat/completions", json=chat_body(b"x", stream=streamed))
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "INVALID_ROWS"
    assert "14 rows" in response.json()["error"]["message"]
    assert len(vllm.bodies) == 1


async def test_rows_that_are_lost_are_encoded_again_once(vllm: PretendedVllm, folder: str) -> None:
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, f"{folder}/f") as client:
            vllm.answers = [rejecting(f"{folder}/f", "UNKNOWN_KEY")]
            answered = await client.post("/v1/chat/completions", json=chat_body(b"x"))
            vllm.answers = [rejecting(f"{folder}/f", "UNKNOWN_KEY")] * 2
            given_up = await client.post("/v1/chat/completions", json=chat_body(b"y"))
        assert encoder.num_calls["Prefetch"] == 4
    assert answered.status_code == 200
    assert given_up.status_code == 503
    assert given_up.headers["retry-after"]
    replies = [read_params(body["ec_transfer_params"])[1] for body in vllm.bodies]
    assert len(set(replies)) == 4


async def test_streams_without_a_failure_are_passed_on_whole(vllm: PretendedVllm, folder: str) -> None:
    events = ['data: {"choices":[1]}\n\n', 'data: {"choices":[2]}\n\n', "data: [DONE]\n\n"]
    vllm.answers = [lambda _: StreamingResponse(iter(events), media_type="text/event-stream")]
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, f"{folder}/f") as client:
            response = await client.post("/v1/chat/completions", json=chat_body(b"x", stream=True))
    assert response.text == "".join(events)
    assert response.headers["content-type"].startswith("text/event-stream")


async def test_vllms_own_errors_stay_its_own(vllm: PretendedVllm, folder: str) -> None:
    vllm.answers = [lambda _: JSONResponse({"error": "too long"}, 400), lambda _: JSONResponse({}, 500)]
    with FakeEncoder() as encoder:
        async with front(vllm, encoder.target, f"{folder}/f") as client:
            assert (await client.post("/v1/chat/completions", json=chat_body(b"x"))).status_code == 400
            assert (await client.post("/v1/chat/completions", json=chat_body(b"x"))).status_code == 500


async def test_p32_what_the_encoder_refuses_never_reaches_vllm(vllm: PretendedVllm, folder: str) -> None:
    failures = [
        ItemFailed("not an image", reason="UNSUPPORTED_CONTENT", status=3),
        ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=1500),
    ]
    from blake3 import blake3

    with FakeEncoder() as encoder:
        for number, failure in enumerate(failures):
            encoder.script.failures[blake3(bytes([number])).digest()] = failure
        async with front(vllm, encoder.target, f"{folder}/f") as client:
            answers = [
                await client.post("/v1/chat/completions", json=chat_body(bytes([number])))
                for number in range(2)
            ]
            broken = await client.post("/v1/chat/completions", content=b"{")
    async with front(vllm, "127.0.0.1:1", f"{folder}/f") as client:
        away = await client.post("/v1/chat/completions", json=chat_body(b"x"))
    assert [answer.status_code for answer in answers] == [400, 429]
    assert answers[1].headers["retry-after"] == "2"
    assert broken.status_code == 400
    assert away.status_code in (503, 504)
    assert vllm.bodies == []


async def test_the_applications_socket_comes_and_goes_with_it(folder: str) -> None:
    path = Path(folder) / "f"
    path.write_text("left by another")
    app = create_app(vllm="http://127.0.0.1:1", encoder="127.0.0.1:1", failures_path=str(path))
    async with app.router.lifespan_context(app):
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
