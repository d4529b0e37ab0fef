"""Requests that callers get wrong: any JSON anywhere is rewritten by the front, or it says what is wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st

from lm_adapter import AsyncVisionEncoderClient, PreprocessOptions
from lm_adapter.convert import item_message
from lm_adapter.engines.vllm_front import Front
from lm_adapter.engines.vllm_items import KeyedItem, read_params
from lm_adapter.engines.vllm_rewrite import choices_of, failure_of, images_of, rewritten, without_images
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder

URL = "data:image/png;base64," + base64.b64encode(b"x").decode()
OPTIONS = [field.name for field in fields(PreprocessOptions)]
TEXTS = st.text(max_size=12) | st.sampled_from(["\ud800", "http://[", "https://a/\ud800", "image_url", URL])
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1.5, 4096.0, 2**32, 10**30, 1e30])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DATA_URLS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["data:", "DATA:", "data", ""]),
    st.sampled_from(["image/png", "", ";", "é"]),
    st.sampled_from([";base64,", ",", ";base64", ";BASE64,"]),
    st.text("AZaz09+/= \n_-é\ud800", max_size=12),
)
URLS = st.sampled_from([URL]) | DATA_URLS | JSON


def parts() -> st.SearchStrategy[Any]:
    named = st.sampled_from(["image_url", "input_image", "video_url", "text"])
    whole = st.builds(
        lambda kind, url, more: {**more, "type": kind, "image_url": {"url": url}, "input_image": url},
        named | JSON,
        URLS,
        st.dictionaries(TEXTS, JSON, max_size=2),
    )
    return st.just({"type": "image_url", "image_url": {"url": URL}}) | whole | JSON


def bodies() -> st.SearchStrategy[dict[str, Any]]:
    message = st.fixed_dictionaries({"role": JSON, "content": st.lists(parts(), max_size=3) | JSON}) | JSON
    options = st.dictionaries(st.sampled_from(OPTIONS) | TEXTS, NUMBERS | JSON, max_size=3)
    return st.fixed_dictionaries(
        {"messages": st.lists(message, max_size=3) | JSON},
        optional={
            "mm_processor_kwargs": options | JSON,
            "ec_transfer_params": JSON,
            "n": JSON,
            "echo": JSON,
            "other": JSON,
        },
    )


@given(bodies())
def test_p33_any_json_is_rewritten_or_refused_with_words(body: dict[str, Any]) -> None:
    """As the front does it, from the bytes of a request to those that vLLM gets or the caller's answer."""
    body = json.loads(json.dumps(body))
    assert choices_of(body).number >= 1
    try:
        images = images_of(body)
        for item in images.items:
            item_message(item)
        rows = [KeyedItem(bytes([number]) * 32, Grid(1, 2, 2)) for number in range(len(images.items))]
        sent = (
            json.loads(json.dumps(rewritten(without_images(body, images), images, rows, "qwen3_vl", "r")))
            if rows
            else body
        )
    except InvalidRequest as error:
        failure = failure_of(error)
        assert failure.status == 400
        assert failure.body()["error"]["type"] == "invalid_request_error"
        assert JSONResponse(failure.body(), failure.status).body
        return
    if rows:
        assert read_params(sent["ec_transfer_params"]) == (rows, "r")
        assert "mm_processor_kwargs" not in sent


def chat(url: Any = URL, **fields: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


@contextmanager
def encoder() -> Iterator[AsyncVisionEncoderClient]:
    with FakeEncoder() as fake:
        yield AsyncVisionEncoderClient(fake.target, timeout_s=3, transports=("inline",))


DEEP = "[" * 100_000 + "]" * 100_000
CASES = {
    "a list beside the keys": (chat(ec_transfer_params=[1]), "ec_transfer_params is a list, needs an object"),
    "a text beside the keys": (chat(ec_transfer_params="x"), "ec_transfer_params is a str, needs an object"),
    "base64 that is not ASCII": (
        chat("data:image/png;base64,é"),
        "message 0 has a data: URL that is not base64",
    ),
    "half a pixel": (
        chat(mm_processor_kwargs={"min_pixels": 1.5}),
        "mm_processor_kwargs has min_pixels 1.5, needs a whole number of 1 to",
    ),
    "more pixels than there are": (
        chat(mm_processor_kwargs={"max_pixels": 10**30}),
        "mm_processor_kwargs has max_pixels 1000000000000000000000000000000, needs a whole number of 1 to",
    ),
    "no number of frames": (
        chat(mm_processor_kwargs={"fps": float("nan")}),
        "mm_processor_kwargs has fps nan, needs a number above 0",
    ),
    "deeper than can be read": (f'{{"messages": {DEEP}}}', "the request is nested too deeply"),
    "a message that is none": (chat() | {"messages": [7, *chat()["messages"]]}, ""),
    "padding within": (
        chat("data:image/png;base64," + "A" * ((1 << 20) - 4) + "QQ==" + "AAAA"),
        "message 0 has a data: URL that is not base64",
    ),
    "no request": ("[1]", "the request is a list, needs an object"),
    "no UTF-8": (b'{"messages": "\xff"}', "the request is no JSON"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES)
async def test_p33_a_callers_mistake_is_answered_as_one(case: str) -> None:
    body, said = CASES[case]
    http = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=passed_on())), base_url="http://v"
    )
    content = json.dumps(body) if isinstance(body, dict) else body
    with encoder() as client:
        app = FastAPI()
        app.add_route("/v1/chat/completions", Front(client, http, None, timeout_s=3).chat, methods=["POST"])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as outside:
            answer = await outside.post("/v1/chat/completions", content=content)
        await client.close()
    await http.aclose()
    if not said:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]


async def passed_on() -> Any:
    yield b"{}"
