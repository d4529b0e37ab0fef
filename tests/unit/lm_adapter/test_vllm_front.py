"""The front before vLLM, with a pretended vLLM behind it and a made-up encoder beside it."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from lm_adapter import AsyncVisionEncoderClient, ItemFailed
from lm_adapter.engines import vllm_front_requests
from lm_adapter.engines.vllm_front import Front, create_app
from lm_adapter.engines.vllm_items import read_params
from lm_adapter.engines.vllm_upstream import Failures
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder
from lm_adapter.types import KeyState, KeyStatus, PrefetchStatus

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
async def front(
    vllm: PretendedVllm | httpx.MockTransport, target: str, path: str
) -> AsyncIterator[httpx.AsyncClient]:
    failures = Failures(path)
    failures.open()
    client = AsyncVisionEncoderClient(target, timeout_s=3, transports=("inline",))
    behind = httpx.ASGITransport(vllm.app()) if isinstance(vllm, PretendedVllm) else vllm
    http = httpx.AsyncClient(transport=behind, base_url="http://vllm")
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


def tell(path: str, body: dict[str, Any], reason: str) -> None:
    """As the connector does."""
    _, reply = read_params(body["ec_transfer_params"])
    account = {"reply": reply, "reason": reason, "message": "14 rows, 12 expected", "retryable": True}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"no JSON", path)
        sender.sendto(b"[]", path)
        sender.sendto(json.dumps(account).encode(), path)


def rejecting(path: str, reason: str, *, streamed: bool = False) -> Callable[[dict[str, Any]], Response]:
    """vLLM as it rejects a request, after its connector has told why."""

    def answer(body: dict[str, Any]) -> Response:
        tell(path, body, reason)
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
    assert [part["uuid"] for part in parts[1:]] == [item.key.hex() for item in items]
    grids = [part["image_embeds"]["image_grid_thw"] for part in parts[1:]]
    assert grids == [list(item.grid) for item in items]
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


async def test_p32_a_rejection_of_several_choices_is_noticed(folder: str) -> None:
    """vLLM names the role of each before it says anything of a failure."""

    async def events(body: dict[str, Any]) -> AsyncIterator[bytes]:
        for index in range(body["n"]):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        tell(f"{folder}/f", body, "INVALID_ROWS")
        yield b'data: {"error": {"message": "Internal server error"}}\n\n'

    def chat(request: httpx.Request) -> httpx.Response:
        stream = events(json.loads(request.content))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    with FakeEncoder() as encoder:
        async with front(httpx.MockTransport(chat), encoder.target, f"{folder}/f") as client:
            response = await client.post("/v1/chat/completions", json=chat_body(b"x", stream=True, n=3))
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "INVALID_ROWS"


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


async def test_a_vllm_that_is_away_is_no_internal_error(folder: str) -> None:
    http = httpx.AsyncClient(base_url="http://127.0.0.1:1")
    with FakeEncoder() as encoder:
        client = AsyncVisionEncoderClient(encoder.target, timeout_s=3, transports=("inline",))
        served = Front(client, http, None, timeout_s=3)
        app = FastAPI()
        app.add_route("/{path:path}", served.chat, methods=["POST"])
        app.add_route("/{path:path}", served.other, methods=["GET"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as outside:
            answers = [
                await outside.post("/v1/chat/completions", json=chat_body(b"x")),
                await outside.post("/v1/chat/completions", json=chat_body()),
                await outside.get("/v1/models"),
            ]
        await client.close()
    await http.aclose()
    assert [answer.status_code for answer in answers] == [503] * 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"VLLM_UNAVAILABLE"}


async def test_a_request_that_is_too_large_is_refused_before_all_of_it_came(
    vllm: PretendedVllm, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_front_requests, "MAX_BODY_BYTES", 1 << 12)
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * (1 << 10)

    async with front(vllm, "127.0.0.1:1", f"{folder}/f") as client:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            num_sent = 0
            response = await client.post(path, content=endless())
            assert response.status_code == 400
            assert num_sent == 5
    assert vllm.bodies == []


async def test_a_caller_that_leaves_takes_the_request_along(folder: str) -> None:
    """While images are encoded and while vLLM works, where it is vLLM that has to hear of it."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> Response:
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return JSONResponse({})

    behind = FastAPI()
    behind.add_route("/v1/chat/completions", slow, methods=["POST"])
    http = httpx.AsyncClient(transport=httpx.ASGITransport(behind), base_url="http://vllm")
    with FakeEncoder() as encoder:
        client = AsyncVisionEncoderClient(encoder.target, timeout_s=3, transports=("inline",))
        app = FastAPI()
        app.add_route("/v1/chat/completions", Front(client, http, None, timeout_s=3).chat, methods=["POST"])
        messages = [{"type": "http.request", "body": json.dumps(chat_body(b"x")).encode()}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(10):
            await app(scope_of("/v1/chat/completions"), receive, send)
        await client.close()
    await http.aclose()
    assert ended.is_set()
    assert sent[0]["status"] == 499


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("test", 1),
        "server": ("front", 80),
    }


class Statuses:
    """As much of a client as a front needs for an image whose header does not tell its size."""

    def __init__(self, *states: KeyState) -> None:
        self.states = list(states)
        self.num_prefetches = 0

    async def info(self, *, timeout_s: float) -> Any:
        return SimpleNamespace(model=lambda: SimpleNamespace(family="qwen3_vl"))

    async def prefetch(self, items: Any, *, timeout_s: float) -> list[PrefetchStatus]:
        self.num_prefetches += 1
        return [PrefetchStatus(b"k" * 32, b"d" * 32, KeyState.IN_FLIGHT) for _ in items]

    async def lookup(self, keys: Any) -> list[KeyStatus]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        grid = Grid(1, 4, 6) if state is KeyState.RESIDENT else None
        return [KeyStatus(keys[0], state, grid)]


@pytest.mark.parametrize(
    ("states", "status", "num_prefetches"),
    [
        ((KeyState.IN_FLIGHT, KeyState.IN_FLIGHT, KeyState.RESIDENT), 200, 1),
        ((KeyState.IN_FLIGHT, KeyState.ABSENT, KeyState.RESIDENT), 200, 2),
        ((KeyState.ABSENT,), 503, 2),
        ((KeyState.IN_FLIGHT,), 504, 1),
    ],
    ids=["encoded", "lost once", "lost", "never encoded"],
)
async def test_a_grid_that_the_header_does_not_tell_is_asked_for(
    states: tuple[KeyState, ...], status: int, num_prefetches: int, vllm: PretendedVllm
) -> None:
    client: Any = Statuses(*states)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(vllm.app()), base_url="http://vllm")
    app = FastAPI()
    app.add_route("/v1/chat/completions", Front(client, http, None, timeout_s=0.3).chat, methods=["POST"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as outside:
        response = await outside.post("/v1/chat/completions", json=chat_body(b"x"))
    await http.aclose()
    assert response.status_code == status
    assert client.num_prefetches == num_prefetches


async def test_the_applications_socket_comes_and_goes_with_it(folder: str) -> None:
    path = Path(folder) / "f"
    path.write_text("left by another")
    app = create_app(vllm="http://127.0.0.1:1", encoder="127.0.0.1:1", failures_path=str(path))
    async with app.router.lifespan_context(app):
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
