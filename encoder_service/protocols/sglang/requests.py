"""The bodies of SGLang's requests and of the answers to those that fail, from bytes to records.

Owns the fields and their limits, and the content of inline items. Pure: without I/O and without state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from encoder_service.errors import InvalidDigest, InvalidRequest, VisionEncoderError
from encoder_service.ops.http_requests import base64_content, data_uri_content, is_data_uri, validated
from encoder_service.protocols.sglang.push import Part
from encoder_service.rpc.convert import MAX_ITEMS_PER_REQUEST
from encoder_service.types import Modality
from vision_encoder.v1 import encoder_pb2 as pb

HASH_PREFIX = "sha256:"
MAX_REQ_ID_CHARS = 1024
MAX_PARTS = 65_536
MAX_RECEIVERS = 1024


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


def parse_encode(body: Mapping[str, object]) -> EncodeRequest:
    """Raises InvalidRequest."""
    request, max_items = validated(EncodeRequest, body), MAX_ITEMS_PER_REQUEST
    if len(request.mm_items) > max_items:
        raise InvalidRequest(f"mm_items has {len(request.mm_items)} items, at most {max_items} are taken")
    if request.part_idx >= request.num_parts:
        raise InvalidRequest(f"part_idx is {request.part_idx}, num_parts is {request.num_parts}")
    return request


def parse_receiver(body: Mapping[str, object]) -> ReceiverRequest:
    """Raises InvalidRequest."""
    return validated(ReceiverRequest, body)


def inline_content(item: MediaItem, modality: Modality, max_bytes: int) -> bytes:
    """The bytes of a data URI, or of base64 alone, verified, as SGLang's encoder takes them. max_bytes: of
    the file. Raises InvalidRequest, InvalidDigest, ImageTooLarge, ClipTooLarge."""
    if is_data_uri(item.url):
        data = data_uri_content(item.url, modality, max_bytes)
    else:
        problem = "the item is neither a URL nor a data URI, and as base64 it cannot be decoded"
        data = base64_content(item.url, modality, max_bytes, problem)
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
