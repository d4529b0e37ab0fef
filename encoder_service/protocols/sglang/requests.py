"""The bodies of SGLang's requests and of the answers to those that fail, from bytes to records.

Owns the fields and their limits, and the content of inline items. Pure: without I/O and without state.
"""

from __future__ import annotations

import base64
import hashlib
import json
import reprlib
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from encoder_service.errors import InvalidDigest, InvalidRequest, VisionEncoderError
from encoder_service.protocols.sglang.push import Part
from encoder_service.rpc.convert import MAX_ITEMS_PER_REQUEST
from encoder_service.types import Modality
from vision_encoder.v1 import encoder_pb2 as pb

Fields = TypeVar("Fields", bound="Body")

HASH_PREFIX = "sha256:"
# Limit on the commas, lists and objects of a body, counted before it is parsed, because each becomes objects
# many times its size. A data URI has one comma.
MAX_JSON_MARKS = 65_536
MAX_REQ_ID_CHARS = 1024
MAX_PARTS = 65_536
MAX_RECEIVERS = 1024
# Limit on the invalid fields that an error message names.
MAX_NAMED_FIELDS = 4


class Body(BaseModel):
    """The fields that every request has. Fields that are not declared are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    req_id: str = Field(min_length=1, max_length=MAX_REQ_ID_CHARS)


class MediaItem(BaseModel):
    """One of ``mm_items``: a URL, a data URI or base64, or an object with one of these as ``url``. Other
    fields of the object are ignored, as SGLang's encoder ignores them for these models. content_hash: of the
    item's bytes."""

    model_config = Body.model_config

    url: str
    content_hash: str | None = Field(default=None, pattern=rf"^{HASH_PREFIX}[0-9a-fA-F]{{64}}$")

    @model_validator(mode="before")
    @classmethod
    def of_text(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @property
    def digest(self) -> bytes | None:
        if self.content_hash is None:
            return None
        return bytes.fromhex(self.content_hash.removeprefix(HASH_PREFIX))

    @property
    def is_url(self) -> bool:
        """Whether the service has to fetch the content."""
        return self.url[:8].lower().startswith(("http://", "https://"))


class EncodeRequest(Body):
    """The body of ``/encode``. embedding_port: of the tokenizer's socket on ``prefill_host``. Without it, the
    scheduler's processes name their sockets by ``/scheduler_receive_url``."""

    modality: Annotated[
        Literal["IMAGE", "VIDEO"],
        BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
    ]
    mm_items: list[MediaItem] = Field(min_length=1)
    num_parts: int = Field(ge=1, le=MAX_PARTS)
    part_idx: int = Field(ge=0, lt=MAX_PARTS)
    prefill_host: str | None = None
    embedding_port: int | None = Field(default=None, ge=1, le=65535)

    @property
    def part(self) -> Part:
        return Part(self.req_id, self.num_parts, self.part_idx, Modality[self.modality])


class ReceiverRequest(Body):
    """The body of ``/scheduler_receive_url``. receive_url: host:port of one of receive_count processes."""

    receive_count: int = Field(ge=1, le=MAX_RECEIVERS)
    receive_url: str


def parse_object(data: bytes) -> Mapping[str, object]:
    """The object of a request's body. Raises InvalidRequest."""
    num_marks = sum(map(data.count, (b",", b"[", b"{")))
    if num_marks > MAX_JSON_MARKS:
        raise InvalidRequest(
            f"the body has {num_marks} commas and brackets, at most {MAX_JSON_MARKS} are taken"
        )
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{len(data)} bytes are no JSON") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a {type(body).__name__}, needed is an object")
    return body


def parse_encode(body: Mapping[str, object]) -> EncodeRequest:
    """Raises InvalidRequest."""
    request, max_items = _parse(EncodeRequest, body), MAX_ITEMS_PER_REQUEST
    if len(request.mm_items) > max_items:
        raise InvalidRequest(f"mm_items has {len(request.mm_items)} items, at most {max_items} are taken")
    if request.part_idx >= request.num_parts:
        raise InvalidRequest(f"part_idx is {request.part_idx}, num_parts is {request.num_parts}")
    return request


def parse_receiver(body: Mapping[str, object]) -> ReceiverRequest:
    """Raises InvalidRequest."""
    return _parse(ReceiverRequest, body)


def _parse(fields: type[Fields], body: Mapping[str, object]) -> Fields:
    """Raises InvalidRequest, which names invalid fields with their values."""
    try:
        return fields.model_validate(body)
    except ValidationError as error:
        invalid = [
            f"{'.'.join(map(str, entry['loc']))} is {reprlib.repr(entry['input'])}: {entry['msg']}"
            for entry in error.errors()[:MAX_NAMED_FIELDS]
        ]
        raise InvalidRequest("; ".join(invalid)) from None


def inline_content(item: MediaItem) -> bytes:
    """The bytes of a data URI, or of base64 alone, verified. As in SGLang's encoder, the media type of a data
    URI is ignored, and its content is padded base64 without white space. The content may be percent-encoded
    (RFC 2397). Raises InvalidRequest, InvalidDigest."""
    is_uri = item.url[:5].lower() == "data:"
    text: str | bytes = item.url.partition(",")[2] if is_uri and "," in item.url else item.url
    try:
        if is_uri and "%" in item.url:
            text = urllib.parse.unquote_to_bytes(text)
        data = base64.b64decode(text, validate=True)
    except ValueError:
        reason = "the item is neither a URL nor a data URI, and as base64 it cannot be decoded"
        if is_uri:
            reason = "the data URI cannot be decoded: use a data URI in base64, padded, without white space"
        raise InvalidRequest(reason) from None
    verify(data, item.digest)
    return data


def verify(data: bytes, digest: bytes | None) -> None:
    """Raises InvalidDigest, with both digests, if the data has another one. digest: None for any."""
    if digest is not None and (actual := hashlib.sha256(data).digest()) != digest:
        raise InvalidDigest(
            f"content_hash is {HASH_PREFIX}{digest.hex()}, the content's is {HASH_PREFIX}{actual.hex()}"
        )


def url_message(item: MediaItem, modality: Modality) -> pb.Item:
    """A URL item as a message of the service's own contract. Raises InvalidRequest."""
    if not item.url.isascii():
        raise InvalidRequest("the URL has characters outside of ASCII")
    value = pb.Modality.Value(f"MODALITY_{modality.name}")
    return pb.Item(modality=value, url=item.url, content_digest=item.digest or b"")


def error_body(error: VisionEncoderError, req_id: str) -> str:
    """The JSON object that SGLang reads from an answer that is not 200. req_id: empty if it is not known."""
    content = {"status": "error", "message": error.message, "req_id": req_id or None}
    return json.dumps(content)  # in ASCII, because a req_id may have lone surrogates
