"""Chat requests into what vLLM consumes, and failures into answers; settings and items of the connector."""

from __future__ import annotations

import base64
import secrets
from types import SimpleNamespace
from typing import Any

import pytest

from lm_adapter import ImageItem, PreprocessOptions
from lm_adapter.engines.vllm_items import Geometry, KeyedItem, read_params, transfer_params
from lm_adapter.engines.vllm_rewrite import Failure, failure_of, images_of, rewritten
from lm_adapter.errors import (
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRequest,
    InvalidRows,
    ItemFailed,
)
from lm_adapter.items import Grid, UrlItem


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def body_of(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [*parts]}],
        **fields,
    }


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "and"}


@pytest.mark.parametrize(("family", "name"), [("qwen3_vl", "image_grid_thw"), ("kimi_k25", "grid_thws")])
def test_images_become_grids_and_names_and_the_rest_stays(family: str, name: str) -> None:
    contents = [secrets.token_bytes(20) for _ in range(2)]
    body = body_of(
        image_part(data_url(contents[0])), TEXT, image_part(data_url(contents[1])), temperature=0.5
    )
    images = images_of(body)
    assert [item.data for item in images.items if isinstance(item, ImageItem)] == contents
    rows = [
        KeyedItem(secrets.token_bytes(32), Grid(1, 4, 6)),
        KeyedItem(secrets.token_bytes(32), Grid(1, 8, 2)),
    ]
    found = rewritten(body, images, rows, family, "r")
    content = found["messages"][1]["content"]
    assert content[1] == TEXT
    for part, (key, grid) in zip(content[::2], rows, strict=True):
        assert part == {"type": "image_embeds", "image_embeds": {name: list(grid)}, "uuid": key.hex()}
    assert read_params(found["ec_transfer_params"]) == (rows, "r")
    assert found["temperature"] == 0.5
    assert found["messages"][0] == body["messages"][0]
    assert body["messages"][1]["content"][0]["type"] == "image_url"


def test_processor_arguments_are_the_encoders_and_leave_the_request() -> None:
    """p11: they belong to the key; in vLLM's hands they would only give the images other names."""
    body = body_of(image_part(data_url(b"x")), mm_processor_kwargs={"min_pixels": 4096})
    images = images_of(body)
    assert images.items[0].options == PreprocessOptions(min_pixels=4096)
    assert "mm_processor_kwargs" not in rewritten(
        body, images, [KeyedItem(b"k" * 32, Grid(1, 2, 2))], "qwen3_vl", ""
    )


def test_addresses_are_the_services_to_fetch() -> None:
    (item,) = images_of(body_of(image_part("https://example.org/a.png"))).items
    assert isinstance(item, UrlItem)
    assert item.url == "https://example.org/a.png"


@pytest.mark.parametrize(
    "body",
    [
        body_of(image_part("file:///etc/passwd")),
        body_of(image_part("data:image/png;base64,%%%")),
        body_of(image_part("data:image/png,abc")),
        body_of(image_part(7)),
        body_of({"type": "image_url"}),
        body_of({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}),
        body_of(image_part(data_url(b"x")), mm_processor_kwargs={"do_resize": False}),
        body_of(image_part(data_url(b"x")), mm_processor_kwargs=3),
        body_of(image_part(data_url(b"x")), mm_processor_kwargs={"min_pixels": "many"}),
        {"messages": 5},
    ],
)
def test_p33_requests_without_meaning_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        images_of(body)


def test_p33_what_is_no_list_of_parts_has_no_images() -> None:
    for messages in ([], [{"role": "user", "content": "text"}], [7], [{"content": [7, None]}], None):
        assert images_of({"messages": messages}).items == ()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no"), 400),
        (ItemFailed("broken image", reason="UNSUPPORTED_CONTENT", status=3), 400),
        (ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=2500), 429),
        (InvalidRows("width", "width is 9, expected 12", found=9, expected=12), 502),
        (EncoderUnavailable("away"), 503),
        (EncoderOverloaded("busy"), 429),
    ],
)
def test_failures_have_a_status_and_say_why(error: Any, status: int) -> None:
    failure = failure_of(error)
    assert failure.status == status
    assert failure.body()["error"]["message"] == error.message
    assert failure.body()["error"]["code"] == error.reason


def test_a_retry_is_announced_in_whole_seconds() -> None:
    failure = failure_of(
        ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=2500)
    )
    assert failure.headers() == {"retry-after": "3"}
    assert Failure(400, "X", "no").headers() == {}


@pytest.mark.parametrize(
    "params",
    [
        {"vision_encoder": []},
        {"vision_encoder": {}},
        {"vision_encoder": {"items": {}}},
        {"vision_encoder": {"items": [None]}},
        {"vision_encoder": {"items": [{"key": 5, "grid_thw": [1, 2, 2]}]}},
        {"vision_encoder": {"items": [{"key": "zz", "grid_thw": [1, 2, 2]}]}},
        {"vision_encoder": {"items": [{"key": "00" * 32, "grid_thw": [1, 2]}]}},
        {"vision_encoder": {"items": [{"key": "00" * 32, "grid_thw": [1, 2, True]}]}},
        {"vision_encoder": {"items": [{"key": "00" * 32, "grid_thw": "122"}]}},
        {"vision_encoder": {"items": [], "reply": "r" * 65}},
        {"vision_encoder": {"items": [], "reply": 5}},
    ],
)
def test_p33_parameters_without_meaning_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequest):
        read_params(params)


def test_parameters_of_others_are_none_of_ours() -> None:
    for params in (None, {}, {"elsewhere": 1}, 5):
        assert read_params(params) == ([], "")
    assert transfer_params([]) == {"vision_encoder": {"items": []}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "model_type": "qwen3_vl",
                "image_token_id": 5,
                "vision_config": {"spatial_merge_size": 2, "deepstack_visual_indexes": [1, 2]},
            },
            (96, 2, False),
        ),
        (
            {
                "model_type": "qwen3_5",
                "image_token_id": 5,
                "vision_config": {"spatial_merge_size": 2, "deepstack_visual_indexes": []},
            },
            (32, 0, False),
        ),
        (
            {"model_type": "kimi_k25", "image_token_id": 5, "vision_config": {"merge_kernel_size": [2, 2]}},
            (32, 0, True),
        ),
    ],
)
def test_the_geometry_follows_from_the_models_config(
    config: dict[str, Any], expected: tuple[int, int, bool]
) -> None:
    hf_config = SimpleNamespace(
        to_dict=lambda: config, get_text_config=lambda: SimpleNamespace(hidden_size=32)
    )
    found = Geometry.of_model(SimpleNamespace(hf_config=hf_config, dtype="torch.bfloat16"))
    assert (found.width, found.num_levels, found.merges_time) == expected
    assert found.num_rows(Grid(2, 4, 6)) == (6 if expected[2] else 12)
    with pytest.raises(InvalidRequest, match="int8"):
        Geometry.of_model(SimpleNamespace(hf_config=hf_config, dtype="torch.int8"))
