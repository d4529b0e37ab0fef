"""Bodies of ``POST /v1/encode``: what is taken, and what is wrong with others."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic import ValidationError

from encoder_service.errors import (
    BodyTooLarge,
    ClipTooLarge,
    ImageTooLarge,
    InvalidDigest,
    InvalidInput,
    InvalidRequest,
    UnsupportedContent,
    UnsupportedMediaType,
)
from encoder_service.http.requests import (
    MAX_JSON_BYTES,
    EncodeBody,
    EncodeCall,
    FileItem,
    RequestedItem,
    parse_call,
)
from encoder_service.ops.http_requests import NEEDED
from encoder_service.protocols.sglang.requests import EncodeRequest, ReceiverRequest
from encoder_service.types import EncodedFile, Modality, PreprocessOptions

JSON, MULTIPART = "application/json", "multipart/form-data; boundary=b"
DATA = b"\x00\r\n--the bytes\r\n of a file\r\n"
LIMITS = {Modality.IMAGE: 100_000, Modality.VIDEO: 200_000}
OPTIONS = {"max_pixels": 5, "fps": 2}
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()


def part(field: str, content: bytes, filename: str = "") -> bytes:
    name = f'; filename="{filename}"' if filename else ""
    head = f'--b\r\nContent-Disposition: form-data; name="{field}"{name}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> EncodeCall:
    return parse_call(MULTIPART, b"".join(parts) + end, LIMITS)


def from_json(**body: object) -> EncodeCall:
    return parse_call(JSON, json.dumps(body).encode(), LIMITS)


def refusal(function: Callable[[], object]) -> str:
    with pytest.raises(InvalidRequest) as raised:
        function()
    return raised.value.message


def test_files_of_a_form_are_items_in_their_order() -> None:
    call = form(
        part("image", DATA, "a.png"),
        part("namespace", "täglich".encode()),
        part("video", b"clip"),
        part("model", b"m"),
        part(
            "items", b'[{"options": {"max_pixels": 5, "fps": 2}, "content_digest": "%s"}, {}]' % (b"ab" * 32)
        ),
    )
    first, second = call.items
    assert (call.namespace, call.model) == ("täglich", "m")
    assert (first.modality, first.content, first.name) == (Modality.IMAGE, DATA, "a.png")
    assert (second.modality, second.content, second.name) == (Modality.VIDEO, b"clip", "")
    item = first.inline()
    assert item.content == EncodedFile(DATA)
    assert item.content_digest == b"\xab" * 32
    assert item.options == PreprocessOptions(max_pixels=5, fps=2.0)
    assert second.inline().content_digest is None


def test_items_in_json() -> None:
    call = from_json(
        items=[
            {"url": URL, "modality": "video", "options": {"min_frames": 2}},
            {"url": "https://a.example/b.png"},
            {"content_digest": "AB" * 32},
        ],
        namespace="n",
    )
    inline, url, digest = call.items
    assert inline.inline().content == EncodedFile(DATA)
    assert inline.inline().options.min_frames == 2
    assert (url.is_inline, url.message().url) == (False, "https://a.example/b.png")
    assert digest.message().WhichOneof("content") == "digest_only"
    assert digest.message().content_digest == b"\xab" * 32


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({}, InvalidRequest, "neither a url nor a content_digest"),
        ({"content": "ftp://a/b"}, UnsupportedContent, "none of data:, http:// and https://"),
        ({"content": "http://ä/"}, InvalidRequest, "outside of ASCII"),
        ({"content": DATA, "content_digest": "xy"}, InvalidDigest, "64 hexadecimal digits"),
        ({"content": DATA, "content_digest": "ab"}, InvalidDigest, "32"),
    ],
)
def test_what_is_wrong_with_one_item_is_that_item_s(
    fields: Mapping[str, str], error: type[InvalidInput], text: str
) -> None:
    item = RequestedItem(Modality.IMAGE, **{"content": None, **fields})  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        item.inline() if item.is_inline else item.message()


@pytest.mark.parametrize("url", ["data:image/png;base64,?", "data:", "data:;base64,%41" * 9])
def test_a_data_uri_that_cannot_be_decoded_fails_its_item_alone(url: str) -> None:
    bad, good = from_json(items=[{"url": url}, {"url": URL}]).items
    assert good.inline().content == EncodedFile(DATA)
    with pytest.raises(InvalidRequest, match="cannot be decoded: use a data URI in base64"):
        bad.message()


@pytest.mark.parametrize(
    ("modality", "error", "text"), [("image", ImageTooLarge, "100000"), ("video", ClipTooLarge, "200000")]
)
@pytest.mark.parametrize("content", ["QUFB" * (1 << 20), "%41" * (1 << 20)])
def test_content_above_the_file_limit_is_not_decoded(
    modality: str, error: type[InvalidInput], text: str, content: str
) -> None:
    """Percent escapes took a hundred times their size in memory."""
    body = json.dumps({"items": [{"url": f"data:;base64,{content}", "modality": modality}]}).encode()
    tracemalloc.start()
    try:
        (item,) = parse_call(JSON, body, LIMITS).items
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
    with pytest.raises(error, match=f"the limit is {text}"):
        item.message()


def test_the_largest_file_is_taken_and_one_byte_more_is_not() -> None:
    for num_bytes in range(99_998, 100_003):
        url = "data:;base64," + base64.b64encode(bytes(num_bytes)).decode()
        (item,) = from_json(items=[{"url": url}]).items
        assert item.is_inline == (num_bytes <= 100_000)


def test_json_has_a_limit_of_its_own() -> None:
    text = f"{MAX_JSON_BYTES + 1} bytes, at most {MAX_JSON_BYTES}"
    data = bytes(MAX_JSON_BYTES + 1)
    for call in (partial(parse_call, JSON, data, LIMITS), partial(form, part("items", data))):
        with pytest.raises(BodyTooLarge, match=f"{text} of JSON are taken; send large files as multipart"):
            call()


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([part("file", DATA)], "'file' is unknown; files are image or video"),
        ([part("image", DATA), part("model", b"a"), part("model", b"b")], "'model' comes twice"),
        ([part("image", DATA), part("model", b"\xff")], "model is no UTF-8"),
        (
            [part("image", DATA), part("items", b"[{}, {}]")],
            "has 2 entries, needed is a list",
        ),
        ([part("image", DATA), part("items", b"{}")], "has a dict"),
        ([part("image", DATA), part("items", b"[3]")], "is a int"),
        ([part("image", DATA), part("items", b"[{")], "no JSON"),
        ([part("image", DATA), part("items", b'[{"url": "data:,"}]')], "url is no field here"),
        ([part("image", DATA)] * 257 + [part("model", b"")] * 3, "more than 259 parts"),
        ([b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n"], "'' is unknown"),
        ([b"--b\r\nbad header\r\n\r\nx\r\n"], "cannot be parsed"),
        ([b"--c\r\n\r\nx\r\n"], "cannot be parsed"),
    ],
)
def test_a_form_that_is_no_call(parts: list[bytes], text: str) -> None:
    assert text in refusal(lambda: form(*parts))


def test_a_form_that_ends_early_is_refused() -> None:
    """A body that a proxy has cut off has no half of an image."""
    for end in (b"", b"--b", b"--b\r\n"):
        whole = part("image", DATA) + end
        assert "does not end with its boundary" in refusal(partial(parse_call, MULTIPART, whole, LIMITS))
    assert "no boundary" in refusal(lambda: parse_call("multipart/form-data", b"", LIMITS))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "items is missing"),
        ({"items": []}, "items has 0 entries, needed is at least 1"),
        ({"items": [{}] * 257}, "items has 257 entries, at most 256 are taken"),
        ({"items": [{"modality": "audio"}]}, "items.0.modality is 'audio', needed is 'image' or 'video'"),
        ({"items": 3}, "items is 3, needed is a list"),
        ({"items": [3]}, "items.0 is 3, needed is an object"),
        ({"items": [{"options": {"fps": "x"}}]}, "items.0.options.fps is 'x', needed is a number"),
        ({"items": [{"options": {"min_pixels": 1.5}}]}, "min_pixels is 1.5, needed is a whole number"),
        ({"items": [{}], "model": 3}, "model is 3, needed is a text"),
        ({"items": [{"options": {"max_pixel": 1}}]}, "items.0.options.max_pixel is no field here"),
        ({"items": [{"options": {"max_pixels": -1}}]}, "max_pixels is -1, needed is at least 0"),
        ({"items": [{"options": {"max_patches": 1 << 32}}]}, "items.0.options.max_patches"),
        ({"items": [{"options": {"fps": float("nan")}}]}, "fps is nan, needed is a finite number"),
        ({"items": [{}], "namespace": "\ud800"}, "namespace is '\\ud800', needed is text without"),
        ({"items": [{}], "\ud800": "a"}, "needed is text without lone surrogates"),
        ({"items": [{}], "namspace": "a"}, "namspace is no field here"),
    ],
)
def test_json_that_is_no_call(body: Mapping[str, object], text: str) -> None:
    assert text in refusal(lambda: from_json(**body))


def test_every_problem_of_a_field_has_words_of_its_own() -> None:
    """Also of SGLang's requests: none of the library's, which name its own classes."""
    kinds = set[str]()
    for model in (EncodeBody, FileItem, EncodeRequest, ReceiverRequest):
        for value in (None, 3, "x", {}, {"": 1}):
            for name in model.model_fields:
                try:
                    model.model_validate({name: value})
                except ValidationError as error:
                    kinds |= {entry["type"] for entry in error.errors()}
    assert kinds - {"missing", "extra_forbidden"} <= set(NEEDED)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonx", "image/png"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="taken are application/json and multipart/form-data"):
        parse_call(kind, DATA, LIMITS)


@given(st.binary(max_size=400), st.sampled_from([MULTIPART, JSON]))
def test_any_bytes_are_a_call_or_an_invalid_request(data: bytes, kind: str) -> None:
    for body in (data, b"--b\r\n" + data, part("image", data) + data + b"\r\n--b--\r\n"):
        try:
            call = parse_call(kind, body, LIMITS)
        except InvalidRequest:
            continue
        assert all(isinstance(item.content, bytes) for item in call.items)


@given(st.binary(max_size=400).filter(lambda data: b"\r\n--b" not in data))
def test_a_file_arrives_as_it_was_sent(data: bytes) -> None:
    (item,) = form(part("image", data)).items
    assert item.content == data
