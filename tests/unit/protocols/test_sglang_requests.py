"""Bodies of SGLang's requests: what is parsed, and what is refused with a short reason."""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.parse
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from encoder_service.errors import ImageTooLarge, InvalidDigest, InvalidRequest
from encoder_service.ops.http_requests import json_object
from encoder_service.protocols.sglang.requests import (
    MediaItem,
    error_body,
    inline_content,
    parse_encode,
    parse_receiver,
    url_message,
)
from encoder_service.types import Modality
from vision_encoder.v1 import encoder_pb2 as pb

DATA = b"the bytes of a file"
TEXT = base64.b64encode(DATA).decode()
QUOTED = urllib.parse.quote(TEXT, safe="")
DIGEST = hashlib.sha256(DATA).digest()
ENCODE: dict[str, Any] = {
    "req_id": "r",
    "modality": "image",
    "mm_items": [TEXT, {"url": TEXT, "content_hash": None, "detail": "low"}],
    "num_parts": 3,
    "part_idx": 1,
    "prefill_host": "127.0.0.1",
    "embedding_port": 9,
    "encoder_url": "ignored",
}
RECEIVER: dict[str, Any] = {"req_id": "r", "receive_count": 2, "receive_url": "127.0.0.1:9"}
# What SGLang's answer may repeat of a body.
MAX_MESSAGE_CHARS = 1000


def refusal(parse: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(InvalidRequest) as refused:
        parse(*arguments)
    assert len(refused.value.message) < MAX_MESSAGE_CHARS
    return refused.value.message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "0 bytes are no JSON"),
        (b"\xff\x00", "2 bytes are no JSON"),
        (b"[1]", "the body is a list"),
        (b"[" * 70_000, "70000 commas and brackets, at most 65536"),
        (b"[" * 60_000, "no JSON"),
        (b'{"a":' * 60_000, "no JSON"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_body_that_is_no_object(content: bytes, text: str) -> None:
    assert text in refusal(json_object, content)


def test_requests_are_parsed() -> None:
    request = parse_encode(json_object(json.dumps(ENCODE).encode()))
    assert (request.part.req_id, request.part.num_parts, request.part.part_idx) == ("r", 3, 1)
    assert request.part.modality is Modality.IMAGE
    assert [item.url for item in request.mm_items] == [TEXT, TEXT]
    assert (request.prefill_host, request.embedding_port) == ("127.0.0.1", 9)
    receiver = parse_receiver(RECEIVER)
    assert (receiver.req_id, receiver.receive_count, receiver.receive_url) == ("r", 2, "127.0.0.1:9")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mm_items": []}, "mm_items has 0 entries, needed is at least 1"),
        ({"mm_items": None}, "mm_items is None"),
        ({"mm_items": ["x"] * 257}, "257 items, at most 256"),
        ({"mm_items": [7]}, "mm_items.0 is 7"),
        ({"mm_items": [{"format": "processor_output"}]}, "mm_items.0.url is missing"),
        ({"mm_items": [{"url": None}]}, "mm_items.0.url is None"),
        ({"mm_items": [{"url": "x", "content_hash": "md5:00"}]}, "content_hash is 'md5:00'"),
        ({"mm_items": [{"url": "x", "content_hash": 3}]}, "content_hash is 3"),
        ({"mm_items": [{"url": "x", "content_hash": DIGEST.hex()}]}, "content_hash is '"),
        ({"modality": "AUDIO"}, "modality is 'AUDIO', needed is 'IMAGE' or 'VIDEO'"),
        ({"modality": None}, "modality is None"),
        ({"num_parts": 0}, "num_parts is 0, needed is at least 1"),
        ({"num_parts": 1 << 40}, "num_parts is 1099511627776"),
        ({"part_idx": 3}, "part_idx is 3, num_parts is 3"),
        ({"part_idx": True}, "part_idx is True"),
        ({"req_id": ""}, "req_id"),
        ({"req_id": 5}, "req_id"),
        ({"req_id": "r" * 1025}, "req_id"),
        ({"embedding_port": 70_000}, "embedding_port is 70000"),
        ({"embedding_port": "1"}, "embedding_port is '1'"),
        ({"prefill_host": 5}, "prefill_host is 5"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_field_is_refused_with_its_value(fields: dict[str, Any], text: str) -> None:
    assert text in refusal(parse_encode, ENCODE | fields)


@pytest.mark.parametrize("name", RECEIVER)
def test_a_receiver_has_all_fields(name: str) -> None:
    assert name in refusal(parse_receiver, {key: value for key, value in RECEIVER.items() if key != name})


# -- items ---------------------------------------------------------------------------------------------


content_of = partial(inline_content, modality=Modality.IMAGE, max_bytes=1000)


@pytest.mark.parametrize("prefix", ["", "data:;base64,"])
def test_a_file_above_the_limit_is_refused_before_it_is_decoded(prefix: str) -> None:
    with pytest.raises(ImageTooLarge, match="has 1002 bytes, the limit is 1000"):
        content_of(MediaItem(url=prefix + "QUFB" * 334))


@pytest.mark.parametrize(
    "text",
    [TEXT, f"data:image/png;base64,{TEXT}", f"data:image/png;charset=x;base64,{TEXT}"]
    + [f"DATA:image/png; BASE64 ,{TEXT}", f"data: image/png ; base64 ,{TEXT}"]
    # SGLang's encoder drops what precedes the comma.
    + [f"data:,{TEXT}", f"data:image/png,{TEXT}"]
    + [f"data:image/png;base64,{QUOTED}"],
)
def test_an_item_is_a_data_uri_or_base64(text: str) -> None:
    assert content_of(MediaItem(url=text)) == DATA


@given(st.binary(), st.booleans())
def test_any_content_comes_back(data: bytes, is_quoted: bool) -> None:
    text = base64.b64encode(data).decode()
    uri = f"data:image/png;base64,{urllib.parse.quote(text, safe='') if is_quoted else text}"
    digest = hashlib.sha256(data).hexdigest()
    assert content_of(MediaItem(url=uri, content_hash=f"sha256:{digest}")) == data


NO_BASE64 = ("!", "-_-_", "QUI", "Q", "QQ==QQ==", "Q\nUJD", "QUJD ", "%", "%zz", "%41%41%41%41", "\ud800%")


@pytest.mark.parametrize(
    "text",
    ["data:", "data:image/png;base64", f"data:image/png;base64{TEXT}", f"data:{TEXT}"]  # no comma
    + [f"data:;base64,{text}" for text in NO_BASE64]
    + [f" data:;base64,{TEXT}", f"date:;base64,{TEXT}", f"file:///{TEXT}", "/etc/passwd"]
    + ["é", QUOTED, f"{TEXT[:4]}\n{TEXT[4:]}"],
)
def test_content_that_is_no_base64_is_refused(text: str) -> None:
    """As by SGLang's encoder and vLLM: no other alphabet, no white space, no padding left out."""
    assert "cannot be decoded" in refusal(content_of, MediaItem(url=text))


def test_p48_a_stated_hash_is_verified() -> None:
    item = MediaItem(url=TEXT, content_hash=f"sha256:{DIGEST.hex().upper()}")
    assert item.digest == DIGEST
    assert content_of(item) == DATA
    with pytest.raises(InvalidDigest, match=f"{32 * '00'}.*{DIGEST.hex()}"):
        content_of(MediaItem(url=TEXT, content_hash=f"sha256:{32 * '00'}"))


def test_a_url_becomes_a_message_of_the_services_contract() -> None:
    item = MediaItem(url="HTTPS://a.test/b", content_hash=f"sha256:{DIGEST.hex()}")
    assert item.is_url
    assert not MediaItem(url=f"data:,{TEXT}").is_url
    expected = pb.Item(modality=pb.MODALITY_VIDEO, url="HTTPS://a.test/b", content_digest=DIGEST)
    assert url_message(item, Modality.VIDEO) == expected
    assert "ASCII" in refusal(url_message, MediaItem(url="http://ä.test"), Modality.IMAGE)


# -- answers -------------------------------------------------------------------------------------------


def test_an_error_is_an_object_in_ascii() -> None:
    body = error_body(InvalidRequest("words"), "\ud800").encode("ascii")
    assert json.loads(body) == {"status": "error", "message": "words", "req_id": "\ud800"}
    assert json.loads(error_body(InvalidRequest("words"), ""))["req_id"] is None
