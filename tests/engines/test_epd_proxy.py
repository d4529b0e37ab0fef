"""The proxy of vLLM's own split, a peer of the bench: what its two instances are asked, that a request
without rows has failed, and with real instances the tokens."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.epd_proxy import CHAT, application
from bench.epd_requests import Pictures, Timed, body_of, message, send
from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.ports import free_port
from bench.harness.processes import Process, answers
from bench.harness.vllm import VllmServer
from bench.harness.waiting import PATIENCE_S

FIRST, SECOND, CLIP = b"\xff\xd8one", b"\xff\xd8two", b"a clip"
TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
Answer = Callable[[dict[str, Any]], web.Response]


def rows(asked: dict[str, Any]) -> web.Response:
    """Of an instance that encodes. A file that comes twice has rows once."""
    found: dict[str, Any] = {}
    for index, part in enumerate(asked["messages"][0]["content"]):
        about = {"peer_host": "127.0.0.1", "item_indices": [], "metadata": {"grid": [len(found)]}}
        found.setdefault(part["uuid"], about)["item_indices"].append(index)
    return web.json_response({"ec_transfer_params": found})


def sent_by_proxy(encode: Answer, body: bytes) -> tuple[list[Any], list[Any], Timed]:
    """What the first instance was asked, and the second, and how the bench counts the request."""
    asked: tuple[list[Any], list[Any]] = ([], [])

    async def encoder(request: web.Request) -> web.Response:
        asked[0].append(await request.json())
        return encode(asked[0][-1])

    async def server(request: web.Request) -> web.Response:
        asked[1].append(await request.json())
        return web.Response(body=TOKEN * 2, content_type="text/event-stream")

    async def run() -> Timed:
        instances = []
        for handler in (encoder, server):
            instances.append(web.Application())
            instances[-1].router.add_post(CHAT, handler)
        async with TestServer(instances[0]) as first, TestServer(instances[1]) as second:
            urls = [str(one.make_url("")).rstrip("/") for one in (first, second)]
            async with TestServer(application(*urls)) as proxy, aiohttp.ClientSession() as client:
                return await send(client, str(proxy.make_url("")).rstrip("/"), body)

    timed = asyncio.run(run())
    return (*asked, timed)


def test_one_instance_gets_the_files_and_the_other_their_places() -> None:
    """Which would else measure a server that encodes by itself."""
    messages = [message(1, [FIRST, SECOND]), {"role": "assistant", "content": "a"}]
    messages.append(message(2, [CLIP, FIRST]))
    encoded, (request,), timed = sent_by_proxy(rows, body_of(messages, 2))
    assert not timed.failure
    assert len(timed.gaps_ms) == 1

    kinds = [[part["type"] for part in one["messages"][0]["content"]] for one in encoded]
    assert sorted(kinds) == [["image_url"] * 3, ["video_url"]]
    parts = [part for one in request["messages"] if one["role"] == "user" for part in one["content"]]
    files = [part for part in parts if part["type"] != "text"]
    assert [part["type"] for part in files] == [
        "image_embeds",
        "image_embeds",
        "video_embeds",
        "image_embeds",
    ]
    assert [part[part["type"]]["grid"] for part in files] == [[0], [1], [0], [0]]
    assert files[0]["uuid"] == files[3]["uuid"]
    assert request["ec_transfer_params"].keys() == {part["uuid"] for part in files}
    assert (request["max_tokens"], request["messages"][1]["content"]) == (2, "a")
    assert base64.b64encode(FIRST).decode() not in str(request)


def test_text_goes_to_the_server_alone() -> None:
    encoded, (request,), timed = sent_by_proxy(rows, body_of([message(1, [])], 2))
    assert not timed.failure
    assert not encoded
    assert "ec_transfer_params" not in request


def without_places(asked: dict[str, Any]) -> web.Response:
    found = {part["uuid"]: {"item_indices": [0], "metadata": {}} for part in asked["messages"][0]["content"]}
    return web.json_response({"ec_transfer_params": found})


@pytest.mark.parametrize(
    ("encode", "reason"),
    [
        (lambda _: web.json_response({"error": "full"}, status=500), "full"),
        (lambda _: web.json_response({"ec_transfer_params": None}), "file 1 of 1"),
        (without_places, "file 1 of 1"),
    ],
    ids=["an error", "no rows", "rows that are no longer there"],
)
def test_a_request_whose_files_were_not_encoded_has_failed(encode: Answer, reason: str) -> None:
    _, asked, timed = sent_by_proxy(encode, body_of([message(1, [FIRST])], 2))
    assert reason in timed.failure
    assert not asked


@pytest.fixture
def split(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URLs of the proxy before two instances of vLLM, and of the one with the language model. They pass rows
    by files, with vLLM's only connector that needs no GPU."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_vl", size="tiny")
    sizes = {"width": 64, "height": 64}
    limits = {"image": {"count": 4, **sizes}, "video": {"count": 1, "num_frames": 4, **sizes}}
    config = {"ec_connector": "ECExampleConnector"}
    config["ec_connector_extra_config"] = {"shared_storage_path": str(tmp_path / "rows")}  # type: ignore[assignment]
    with ExitStack() as stack:
        urls = []
        for role in ("ec_producer", "ec_consumer"):
            (tmp_path / role).mkdir()
            arguments = ["--ec-transfer-config", json.dumps(config | {"ec_role": role})]
            arguments += ["--limit-mm-per-prompt", json.dumps(limits)]
            server = VllmServer(checkpoint, "float32", None, tmp_path / role, arguments)
            stack.callback(server.stop)
            server.wait_ready()
            urls.append(server.url)
        port = free_port()
        proxy = Process(["-m", "bench.epd_proxy", str(port), *urls], tmp_path / "proxy.log")
        stack.callback(proxy.stop)
        url = f"http://127.0.0.1:{port}"
        proxy.wait_for(lambda: answers(f"{url}/health"), "the proxy")
        yield url, urls[1]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_requests_through_the_proxy_get_the_tokens_of_vllms_own_tower(split: tuple[str, str]) -> None:
    choice = random.Random(1)
    photos, clips = Pictures((112, 84), choice), Pictures((64, 64), choice, 1)
    files = [photos.take(choice, b"") for _ in range(2)]
    messages = [message(1, files), {"role": "assistant", "content": "a"}]
    messages.append(message(2, [clips.take(choice, b""), files[0]]))
    request = json.loads(body_of(messages, 8)) | {"stream": False, "logprobs": True}

    def answer(url: str) -> list[tuple[str, float]]:
        answered = httpx.post(f"{url}{CHAT}", json=request, timeout=PATIENCE_S)
        assert answered.status_code == 200, answered.text
        found = answered.json()["choices"][0]["logprobs"]["content"]
        return [(one["token"], one["logprob"]) for one in found]

    through_proxy, own = map(answer, split)
    assert [token for token, _ in through_proxy] == [token for token, _ in own]
    assert [value for _, value in through_proxy] == pytest.approx([value for _, value in own], abs=1e-4)
