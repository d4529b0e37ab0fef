"""One call over HTTP: its checks, limits, deadline and end, on a pipeline of fakes."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from bench.harness.waiting import PATIENCE_S
from encoder_service.http import endpoint as module
from encoder_service.http.endpoint import ROUTE
from encoder_service.http.requests import EncodeCall, parse_call
from encoder_service.ops import http_server
from encoder_service.types import EncodedFile, Item, Modality
from tests.fakes import fake_image
from tests.unit.http.endpoint_rig import MAX_BODY_BYTES, MAX_QUEUED_BYTES, EndpointRig, pipeline_rig, post
from tests.unit.service.rig import Rig, check_released, running, until

pytestmark = pytest.mark.anyio
JSON = {"accept": "application/json"}
TYPE = {"content-type": "application/json"}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(pipeline_rig()) as rig:
        yield rig
    check_released(rig.store)
    assert rig.pipeline.undelivered.num_bytes == 0


@pytest.fixture
async def endpoint(rig: Rig) -> AsyncIterator[EndpointRig]:
    """Holds nothing at a test's end."""
    found = EndpointRig(rig).attach()
    yield found
    rig.fake.gate.set()
    await until(lambda: not found.endpoint.num_calls)
    assert found.admission.num_bytes == 0


@pytest.fixture
async def client(endpoint: EndpointRig) -> AsyncIterator[httpx.AsyncClient]:
    async with endpoint.client() as found:
        yield found


def reason(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    text: str = answer.json()["error"]["reason"]
    return text


def requests(rig: Rig, status: str) -> float:
    value = rig.metrics.registry.get_sample_value(
        "ve_requests_total", {"method": "http/encode", "status": status}
    )
    return value or 0


def items_of(answer: httpx.Response) -> list[dict[str, Any]]:
    size = int.from_bytes(answer.content[:8], "little")
    items: list[dict[str, Any]] = json.loads(
        json.loads(answer.content[8 : 8 + size])["__metadata__"]["items"]
    )
    return items


async def test_rows_are_the_pipeline_s_in_both_forms(rig: Rig, client: httpx.AsyncClient) -> None:
    images = [fake_image(4, 4, 1), fake_image(8, 4, 2)]
    answer = await post(client, *images)
    assert answer.headers["content-type"] == "application/octet-stream"
    tensors = load(answer.content)
    in_json = (await post(client, *images, headers=JSON)).json()
    assert in_json["model"] == "fake"
    for index, (image, item) in enumerate(zip(images, in_json["items"], strict=True)):
        result = await rig.pipeline.encode(Item(Modality.IMAGE, EncodedFile(image)))
        rows = tensors[f"rows.{index}"]
        assert torch.equal(rows, result.encoded.rows)
        assert base64.b64decode(item["rows"]) == rows.numpy().tobytes()
        assert [item["num_rows"], item["width"]] == list(rows.shape)
        assert item["key"] == result.encoded.key.hex()
        result.release()
    assert [item["tier"] for item in in_json["items"]] == ["host", "host"]
    assert requests(rig, "OK") == 2


@pytest.mark.parametrize(
    ("accept", "is_json"),
    [
        ("*/*", False),
        ("", False),
        ("application/json, text/plain, */*", True),  # what fetch libraries send
        ("Application/JSON;charset=utf-8", True),
        ("application/json;q=0.5, application/octet-stream;q=0.9", False),
        ("application/octet-stream;q=0.5, application/json", True),
        ("application/json;q=0", False),
        ("application/octet-stream, application/json", False),
        ("application/jsonx", False),
        ("application/json;q=high", False),
    ],
)
async def test_the_answer_has_the_form_that_the_caller_prefers(
    client: httpx.AsyncClient, accept: str, is_json: bool
) -> None:
    answer = await post(client, fake_image(4, 4), headers={"accept": accept, "content-encoding": "identity"})
    expected = "application/json" if is_json else "application/octet-stream"
    assert answer.headers["content-type"] == expected


async def test_a_bad_item_fails_alone(rig: Rig, client: httpx.AsyncClient) -> None:
    for headers in ({}, JSON):
        answer = await post(client, b"bad", fake_image(4, 4), b"worse", headers=headers)
        assert answer.status_code == 200
        items = answer.json()["items"] if headers else items_of(answer)
        assert [item.get("failure", {}).get("reason") for item in items] == [
            "UNDECODABLE_IMAGE",
            None,
            "UNDECODABLE_IMAGE",
        ]
        assert items[0]["failure"]["status"] == 400
    assert list(load((await post(client, b"bad", fake_image(4, 4))).content)) == ["rows.1"]


async def test_the_status_of_one_item_is_its_own_and_of_several_200(
    rig: Rig, client: httpx.AsyncClient
) -> None:
    assert reason(await post(client, b"bad"), 400) == "UNDECODABLE_IMAGE"
    assert requests(rig, "OK") == 1  # as by gRPC: the call was answered, and its item counts as failed
    both = await post(client, b"bad", b"worse")
    assert both.status_code == 200
    assert load(both.content) == {}
    unknown = await client.post(ROUTE, json={"items": [{"content_digest": "ab" * 32}]})
    assert reason(unknown, 404) == "UNKNOWN_KEY"


@pytest.mark.parametrize(
    ("request_", "status", "reason_"),
    [
        ({"json": {"items": []}}, 400, "INVALID_REQUEST"),
        ({"content": b'{"items": [{}], "model": "\\ud800"}', "headers": TYPE}, 400, "INVALID_REQUEST"),
        ({"content": b'{"items": [{}], "\\ud800": 1}', "headers": TYPE}, 400, "INVALID_REQUEST"),
        ({"json": {"items": [{}], "model": "other"}}, 404, "UNKNOWN_MODEL"),
        ({"json": {"items": [{}], "namespace": "n" * 257}}, 400, "INVALID_REQUEST"),
        ({"content": b"x" * (MAX_BODY_BYTES + 1)}, 413, "BODY_TOO_LARGE"),
        ({"files": {"image": b"x"}, "headers": {"content-encoding": "gzip"}}, 415, "UNSUPPORTED_MEDIA_TYPE"),
        ({"files": {"image": b"x"}, "headers": {"x-timeout-s": "soon"}}, 400, "INVALID_REQUEST"),
        ({"files": {"image": b"x"}, "headers": {"x-timeout-s": "-1"}}, 400, "INVALID_REQUEST"),
        ({"files": {"image": b"x"}, "headers": {"x-timeout-s": "nan"}}, 400, "INVALID_REQUEST"),
        ({"files": {"image": b"x"}, "headers": {"origin": "https://evil.example"}}, 403, "PERMISSION_DENIED"),
        ({"files": {"image": b"x"}, "headers": {"authorization": "Basic eDp5"}}, 401, "UNAUTHENTICATED"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_calls_that_are_refused_as_a_whole(
    rig: Rig, client: httpx.AsyncClient, request_: dict[str, Any], status: int, reason_: str
) -> None:
    answer = await client.post(ROUTE, **request_)
    assert reason(answer, status) == reason_
    assert answer.headers["x-instance-id"] == "instance"
    assert rig.fake.num_opened == 0


async def test_a_body_without_a_length_is_not_read_beyond_the_limit(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1024
            assert sent < 1 << 20
            await asyncio.sleep(0)
            yield bytes(1024)

    monkeypatch.setattr(http_server, "LINGER_S", 0)
    answer = await client.post(ROUTE, content=endless(), headers={"content-type": "application/json"})
    assert reason(answer, 413) == "BODY_TOO_LARGE"
    assert "5120 bytes or more, at most 4096 are taken" in answer.json()["error"]["message"]


async def test_before_the_model_is_loaded_calls_are_refused_for_now(rig: Rig) -> None:
    async with EndpointRig(rig).client() as client:
        answer = await post(client, fake_image(4, 4))
    assert reason(answer, 503) == "NOT_READY"
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_full_service_says_when_to_come_back(rig: Rig, client: httpx.AsyncClient) -> None:
    """Of bytes, the call; of patches, each of its items."""
    permit = rig.pipeline.admission.acquire(MAX_QUEUED_BYTES - 10)
    answers = [await post(client, fake_image(4, 4))]
    permit.release()
    permit = rig.pipeline.admission.acquire(0)
    permit.add_patches(rig.pipeline.admission.max_patches, 4)
    answers.append(await post(client, fake_image(4, 4)))
    several = await post(client, fake_image(4, 4), fake_image(8, 4), headers=JSON)
    permit.release()
    for answer in answers:
        assert reason(answer, 503) == "QUEUE_FULL"
        assert int(answer.headers["retry-after"]) >= 1
    failures = [item["failure"] for item in several.json()["items"]]
    assert all(failure["retryable"] and failure["retry_after_ms"] for failure in failures)


async def test_rows_count_with_the_body_until_they_are_sent(
    rig: Rig, endpoint: EndpointRig, client: httpx.AsyncClient
) -> None:
    """An item whose rows have no room fails, the others are answered."""
    width = 4 * rig.tower.width
    answer = await post(client, *(fake_image(8, 8, value) for value in range(1, 6)), headers=JSON)
    items = answer.json()["items"]
    held = sum(item["num_rows"] * width for item in items if "rows" in item)
    assert 0 < held < endpoint.admission.max_bytes
    permit = endpoint.admission.acquire(endpoint.admission.max_bytes - 1500)
    answer = await post(client, *(fake_image(8, 8, value) for value in range(1, 3)), headers=JSON)
    permit.release()
    reasons = [item.get("failure", {}).get("reason") for item in answer.json()["items"]]
    assert "QUEUE_FULL" in reasons


async def test_at_the_deadline_unfinished_items_fail_and_finished_ones_are_answered(
    rig: Rig, client: httpx.AsyncClient
) -> None:
    assert (await post(client, fake_image(4, 4, 1))).status_code == 200
    rig.fake.gate.clear()
    answer = await post(
        client, fake_image(4, 4, 1), fake_image(4, 4, 2), headers={**JSON, "x-timeout-s": "0.2"}
    )
    first, second = answer.json()["items"]
    assert "rows" in first
    assert (second["failure"]["reason"], second["failure"]["status"]) == ("DEADLINE_EXCEEDED", 504)
    assert reason(await post(client, fake_image(4, 4, 3), headers={"x-timeout-s": "0.1"}), 504)


async def test_a_body_that_comes_later_than_the_deadline(client: httpx.AsyncClient) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    headers = {"content-type": "application/json", "x-timeout-s": "0.05"}
    answer = await client.post(ROUTE, content=slow(), headers=headers)
    assert reason(answer, 504) == "DEADLINE_EXCEEDED"


async def test_a_body_counts_until_its_parsing_has_ended(
    endpoint: EndpointRig, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once its time has passed, because it is in memory; and another large one waits for it."""
    may_end, parsed = threading.Event(), list[int]()

    def parse(content_type: str, data: bytes, limits: Any) -> EncodeCall:
        parsed.append(len(data))
        assert may_end.wait(PATIENCE_S)
        return parse_call(content_type, data, limits)

    monkeypatch.setattr(module, "MAX_HASHED_ON_LOOP_BYTES", 0)
    monkeypatch.setattr(module, "parse_call", parse)
    first = asyncio.ensure_future(post(client, fake_image(4, 4), headers={"x-timeout-s": "0.05"}))
    try:
        await until(lambda: parsed)
        second = await post(client, fake_image(4, 4), headers={"x-timeout-s": "0.1"})
        assert reason(second, 504) == "DEADLINE_EXCEEDED"
        assert len(parsed) == 1
        assert endpoint.admission.num_bytes == parsed[0]
    finally:
        may_end.set()
    assert reason(await first, 504) == "DEADLINE_EXCEEDED"


async def test_p15_an_encode_that_nobody_waits_for_ends_with_its_caller(
    rig: Rig, endpoint: EndpointRig, client: httpx.AsyncClient
) -> None:
    """Whenever the caller leaves, nothing stays held: the fixtures look."""
    rig.fake.gate.clear()
    body = client.build_request("POST", ROUTE, files={"image": fake_image(4, 4, 9)})
    has_left = asyncio.Event()
    messages = iter([{"type": "http.request", "body": body.read(), "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 499) == 499  # nobody reads it

    scope = {
        "type": "http",
        "method": "POST",
        "path": ROUTE,
        "scheme": "http",
        "query_string": b"",
        "server": ("encoder", 80),
        "client": ("127.0.0.1", 1),
        "headers": [(name.lower().encode(), value.encode()) for name, value in body.headers.items()],
    }
    serving = asyncio.ensure_future(endpoint.endpoint(scope, receive, send))
    await until(lambda: rig.fake.num_opened)
    has_left.set()
    await serving
    assert requests(rig, "CANCELLED") == 1
    assert len(rig.pipeline.inflight) == 0
    rig.fake.gate.set()
