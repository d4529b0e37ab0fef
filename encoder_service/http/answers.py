"""The bodies of the answers to ``POST /v1/encode``: safetensors, or JSON with rows in base64.

Owns the fields, which ``/docs`` shows with their descriptions, and the bytes. Rows are copied a chunk at a
time. The format of safetensors: eight bytes with the header's length, little-endian; the header in JSON; the
tensors (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from pydantic import BaseModel, Field
from python_multipart.multipart import parse_options_header

from encoder_service.http.requests import RequestedItem
from encoder_service.pipeline import EncodeResult, Pipeline

SAFETENSORS_TYPE, JSON_TYPE = "application/octet-stream", "application/json"
# Divisible by 3: each chunk's base64 has no padding but the last one's.
CHUNK_BYTES = 3 << 18
ALIGNMENT = 8
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Failure(BaseModel):
    """Why a call or an item failed."""

    status: int = Field(description="The HTTP status of this kind of failure.")
    reason: str = Field(description="A stable code: UNDECODABLE_IMAGE, QUEUE_FULL, ...")
    message: str
    retryable: bool = Field(description="The same request may succeed later.")
    retry_after_ms: int = Field(description="When there will be room, as estimated; 0: no advice.")
    details: dict[str, str] = Field(description="The numbers of the message.")


class ErrorAnswer(BaseModel):
    """The answer to a call that failed as a whole, or whose only item failed."""

    error: Failure


class AnsweredItem(BaseModel):
    """An item with rows, or with `failure` and only `index` and `name`. Rows are little-endian, row-major
    [num_rows, width]: the main level first, then the deepstack levels."""

    index: int = Field(description="Position in the request.")
    name: str = Field("", description="The file's name, if it was sent with one.")
    key: str = Field("", description="The embedding key, in hexadecimal.")
    content_digest: str = Field("", description="In hexadecimal.")
    grid_thw: list[int] = Field([], description="[t, h, w] in patches, before the spatial merge.")
    num_rows: int = Field(0, description="Visual tokens.")
    width: int = Field(0, description="The language model's width times (1 + num_deepstack_levels).")
    dtype: str = Field("", description="float32 or bfloat16.")
    num_deepstack_levels: int = 0
    tier: str = Field("", description="Where the rows came from: miss (encoded), in_flight, device, host.")
    timings: dict[str, float] = Field({}, description="Milliseconds by stage.")
    timestamps_s: list[float] = Field([], description="Clips: of the sampled frames.")
    chunk_grids: list[list[int]] = Field(
        [], description="Clips of a model that merges time: of the chunks, in the order of their rows."
    )
    failure: Failure | None = None
    rows: str = Field(
        "", description="Base64; only in JSON. In safetensors they are the tensor `rows.INDEX`."
    )


class JsonAnswer(BaseModel):
    """The answer in JSON."""

    model: str
    request_id: str
    items: list[AnsweredItem]


class FailedItem(NamedTuple):
    """The outcome of an item that failed. fields: of ``Failure``."""

    fields: Mapping[str, Any]


Outcome: TypeAlias = EncodeResult | FailedItem


@dataclass(frozen=True)
class AnsweredCall:
    """A call with the outcomes of its items, which are in their order."""

    pipeline: Pipeline
    request_id: str
    items: Sequence[RequestedItem]
    outcomes: Sequence[Outcome]


@dataclass(frozen=True)
class Answer:
    """num_bytes: of all chunks."""

    media_type: str
    num_bytes: int
    chunks: Iterator[bytes]


def described(call: AnsweredCall) -> list[dict[str, Any]]:
    """The fields of ``AnsweredItem``, without rows."""
    answered: list[dict[str, Any]] = []
    for index, (item, outcome) in enumerate(zip(call.items, call.outcomes, strict=True)):
        entry: dict[str, Any] = {"index": index} | ({"name": item.name} if item.name else {})
        if isinstance(outcome, FailedItem):
            answered.append({**entry, "failure": outcome.fields})
        else:
            answered.append({**entry, **_result_fields(outcome, call.pipeline.clock())})
    return answered


def _result_fields(result: EncodeResult, now_s: float) -> dict[str, Any]:
    encoded, spec = result.encoded, result.encoded.spec
    timings = {**vars(result.timings), "delivery_ms": (now_s - result.ready_s) * 1e3}
    fields = {
        "key": encoded.key.hex(),
        "content_digest": encoded.content_digest.hex(),
        "grid_thw": list(encoded.grid),
        "num_rows": spec.num_rows,
        "width": spec.width,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "num_deepstack_levels": spec.num_deepstack_levels,
        "tier": result.tier.value,
        "timings": {name: round(value, 3) for name, value in timings.items()},
    }
    if (clip := encoded.clip) is not None:
        fields["timestamps_s"] = list(clip.timestamps_s)
        fields["chunk_grids"] = [list(grid) for grid in clip.chunk_grids]
    return fields


async def rows_answer(call: AnsweredCall, accept: str) -> Answer:
    """accept: the request's header. JSON if the caller prefers that to safetensors."""
    if preference(accept, JSON_TYPE) > preference(accept, SAFETENSORS_TYPE):
        return json_answer(call)
    return safetensors_answer(call)


def preference(accept: str, media_type: str) -> tuple[float, int]:
    """How much an Accept header wants a type: the quality of the most specific range that has it (RFC 9110,
    12.5.1), then how specific that is. (0, 0) if it is not wanted."""
    ranges = (media_type, media_type.partition("/")[0] + "/*", "*/*")
    found: dict[str, float] = {}
    for part in accept.split(","):
        name, options = parse_options_header(part)
        try:
            found[name.decode().lower()] = float(options.get(b"q", b"1"))
        except ValueError:
            continue
    for rank, wanted in zip((2, 1, 0), ranges, strict=True):
        if wanted in found:
            return found[wanted], rank if found[wanted] else 0
    return 0.0, 0


def safetensors_answer(call: AnsweredCall) -> Answer:
    """A tensor ``rows.INDEX`` for each item with rows; the items as JSON in the metadata's ``items``."""
    header: dict[str, Any] = {
        "__metadata__": {
            "items": json.dumps(described(call)),
            "model": call.pipeline.model.name,
            "request_id": call.request_id,
        }
    }
    rows: list[torch.Tensor] = []
    offset = 0
    for index, outcome in enumerate(call.outcomes):
        if isinstance(outcome, EncodeResult):
            spec = outcome.encoded.spec
            header[f"rows.{index}"] = {
                "dtype": SAFETENSORS_DTYPES[spec.dtype],
                "shape": [spec.num_rows, spec.width],
                "data_offsets": [offset, offset + spec.num_bytes],
            }
            offset += spec.num_bytes
            rows.append(outcome.encoded.rows)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text

    def chunks() -> Iterator[bytes]:
        yield head
        for tensor in rows:
            yield from row_chunks(tensor)

    return Answer(SAFETENSORS_TYPE, len(head) + offset, chunks())


def json_answer(call: AnsweredCall) -> Answer:
    """The fields of ``JsonAnswer``."""
    head = json.dumps({"model": call.pipeline.model.name, "request_id": call.request_id}).encode()
    items = [json.dumps(entry).encode() for entry in described(call)]
    # The text around the rows; where an item has rows, they come between its two parts.
    texts: list[tuple[bytes, torch.Tensor | None]] = []
    before = head[:-1] + b', "items": ['
    for text, outcome in zip(items, call.outcomes, strict=True):
        if isinstance(outcome, EncodeResult):
            texts.append((before + text[:-1] + b', "rows": "', outcome.encoded.rows))
            before = b'"}, '
        else:
            texts.append((before + text, None))
            before = b", "
    texts.append((before.removesuffix(b", ") + b"]}", None))

    def chunks() -> Iterator[bytes]:
        for text, rows in texts:
            yield text
            if rows is not None:
                yield from map(base64.b64encode, row_chunks(rows))

    num_bytes = sum(len(text) + (0 if rows is None else 4 * -(-rows.nbytes // 3)) for text, rows in texts)
    return Answer(JSON_TYPE, num_bytes, chunks())


def row_chunks(rows: torch.Tensor) -> Iterator[bytes]:
    """The bytes of rows [R, W] in host memory, CHUNK_BYTES at a time."""
    payload = rows.reshape(-1).view(torch.uint8).numpy().data
    for offset in range(0, len(payload), CHUNK_BYTES):
        yield bytes(payload[offset : offset + CHUNK_BYTES])
