"""Calls that are wrong in ways that know the wire contract: damaged images among good ones, messages whose
fields have values that mean nothing, and bytes that are nearly a message. A call follows from its generator.
And the judgement of its answer.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.unit.ingest.image_files import bombs, every_file
from vision_encoder.layout.varint import encode_varint
from vision_encoder.v1 import encoder_pb2 as pb

PATCH_DIM = 1536
REQUESTS: dict[str, type[Message]] = {
    "GetServerInfo": pb.GetServerInfoRequest,
    "Lookup": pb.LookupRequest,
    "Prefetch": pb.PrefetchRequest,
    "Encode": pb.EncodeRequest,
    "Fetch": pb.FetchRequest,
    "Touch": pb.TouchRequest,
}
INTEGERS = (0, 1, 2, 3, 7, 255, 256, 65535, 65536, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, 6e4, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "fuzz",
    "qwen3_vl",
    "ve-pixels-x",
    "x" * 300,
    "\0",
    "ä\u202e",
    "http://169.254.169.254/",
    "../..",
)
LENGTHS = (0, 1, 16, 31, 32, 33, 1000)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Statuses of a caller's own mistake, and reasons that are the service's.
CALLERS_FAULT = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED")
OUR_FAULT = ("INTERNAL", "DEVICE_FAULT", "")
METHOD = "/vision_encoder.v1.VisionEncoder/"
STREAMS = ("Encode", "Fetch")
TIMEOUT_S = 60.0


class Call(NamedTuple):
    """kind: what is wrong with it, for reports."""

    kind: str
    method: str
    request: bytes


def make_call(rng: random.Random) -> Call:
    kind = rng.choice(("images", "images", "tensors", "fields", "wire"))
    if kind == "wire":
        base = make_call(rng)
        data = base.request
        for _ in range(rng.randint(1, 3)):
            data = rng.choice((unknown_field, wrong_type, nested, truncate, flip))(rng, data)
        return Call(kind, base.method, data)
    if kind == "fields":
        method = rng.choice(list(REQUESTS))
        request: Any = REQUESTS[method]()
        fill(rng, request, depth=4)
    else:
        method = rng.choice(("Encode", "Encode", "Encode", "Prefetch"))
        request = REQUESTS[method]()
        for _ in range(rng.randint(1, 4)):
            item = image_item(rng) if kind == "images" else tensor_item(rng)
            if rng.random() < 0.4:
                pixels = item.pixels
                parts = (item.options, pixels.grid_thw, pixels.inline, pixels.shm)
                fill(rng, item.options if kind == "images" else rng.choice(parts), depth=1)
            request.items.append(item)
    return Call(kind, method, request.SerializeToString())


@functools.cache
def good_images() -> tuple[bytes, ...]:
    return tuple(every_file().values())


def image_item(rng: random.Random) -> pb.Item:
    """A file of any format, as it is or damaged."""
    data = rng.choice(good_images())
    if rng.random() < 0.05:
        data = rng.choice(list(bombs(rng.choice((5000, 16_383)), rng.choice((1, 16_383))).values()))
    elif rng.random() < 0.8:
        data = rng.choice((truncate, flip, splice))(rng, data)
    item = pb.Item(modality=pb.MODALITY_IMAGE, encoded=data)
    if rng.random() < 0.1:
        item.content_digest = rng.randbytes(rng.choice(LENGTHS))
    return item


def tensor_item(rng: random.Random) -> pb.Item:
    """A pixel tensor of one of its dtypes, in which a value may be NaN or infinite."""
    t, h, w = rng.choice(((1, 2, 2), (1, 4, 6), (1, 2, 4), (2, 2, 2)))
    shape = (t * h * w, PATCH_DIM)
    values = np.random.default_rng(rng.getrandbits(32)).standard_normal(shape, dtype=np.float32)
    with np.errstate(over="ignore"):
        values[rng.randrange(shape[0]), rng.randrange(shape[1])] = rng.choice(FLOATS)
        kinds: dict[Any, np.ndarray] = {
            pb.DTYPE_FLOAT32: values,
            pb.DTYPE_FLOAT16: values.astype(np.float16),
            pb.DTYPE_BFLOAT16: values.view(np.uint16)[:, 1::2],  # the upper halves
            pb.DTYPE_UINT8: values.view(np.uint8)[:, ::4],
        }
    dtype, data = rng.choice(list(kinds.items()))
    tensor = pb.InlineTensor(dtype=dtype, shape=shape, data=data.tobytes())
    pixels = pb.PixelTensor(grid_thw=pb.GridTHW(t=t, h=h, w=w), inline=tensor)
    return pb.Item(modality=rng.choice((pb.MODALITY_IMAGE, pb.MODALITY_VIDEO)), pixels=pixels)


def fill(rng: random.Random, message: Message, depth: int) -> None:
    """Some fields of a message, with values that its types allow and its meaning mostly not."""
    for field in message.DESCRIPTOR.fields:
        nested = field.message_type
        if rng.random() < 0.4 or (nested is not None and nested.GetOptions().map_entry):
            continue
        if field.is_repeated:
            container = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 1, 2, 5, 300) if rng.random() < 0.1 else (0, 1, 2))):
                if nested is None:
                    container.append(scalar(rng, field))
                elif depth:
                    fill(rng, container.add(), depth - 1)
        elif nested is None:
            setattr(message, field.name, scalar(rng, field))
        elif depth:
            child = getattr(message, field.name)
            child.SetInParent()
            fill(rng, child, depth - 1)


def scalar(rng: random.Random, field: Any) -> object:
    kind = field.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 99, (1 << 31) - 1, -1))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return rng.randbytes(rng.choice(LENGTHS)) if is_bytes else rng.choice(TEXTS)
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    value = rng.choice(INTEGERS) & ((1 << bits - 1) - 1 if signed else (1 << bits) - 1)
    return -value if signed and rng.random() < 0.4 else value


# -- bytes that are nearly a file or a message ---------------------------------------------------------


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def flip(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 1 + len(out) // 50)):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def splice(rng: random.Random, data: bytes) -> bytes:
    """The head of one file with the tail of another."""
    other = rng.choice(good_images())
    return truncate(rng, data) + other[rng.randint(0, len(other)) :]


def unknown_field(rng: random.Random, data: bytes) -> bytes:
    number, kind = rng.choice((15, 100, 19000, (1 << 29) - 1)), rng.choice((VARINT, FIXED64, BYTES, FIXED32))
    body = {VARINT: encode_varint(rng.choice(INTEGERS)), FIXED64: bytes(8), FIXED32: bytes(4)}
    return data + encode_varint(number << 3 | kind) + body.get(kind, encode_varint(3) + b"abc")


def wrong_type(rng: random.Random, data: bytes) -> bytes:
    """A known field number under another wire type, groups and reserved types included."""
    tag = encode_varint(rng.randint(1, 12) << 3 | rng.randrange(8))
    return data + tag + rng.randbytes(rng.randint(0, 12))


def nested(rng: random.Random, data: bytes) -> bytes:
    """Groups within groups."""
    return data + b"\x0b" * rng.choice((10, 99, 101, 5000))


# -- what they are answered with -----------------------------------------------------------------------


def events_of(channel: grpc.Channel, method: str, request: bytes) -> list[pb.ItemEvent]:
    stream: Any = channel.unary_stream(METHOD + method)
    return [pb.ItemEvent.FromString(event) for event in stream(request, timeout=TIMEOUT_S)]


def answers_of(channel: grpc.Channel, call: Call) -> list[str]:
    """What one input is answered with; what must not happen begins with "fault"."""
    try:
        if call.method in STREAMS:
            return judge_events(call, events_of(channel, call.method, call.request))
        unary: Any = channel.unary_unary(METHOD + call.method)
        unary(call.request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        status, details = error.code().name, str(error.details())  # type: ignore[attr-defined]
        is_callers = status in CALLERS_FAULT
        return [f"{status} {details.partition(':')[0]}" if is_callers else f"fault {status}: {details}"]
    return ["answered"]


def judge_events(call: Call, events: list[pb.ItemEvent]) -> list[str]:
    """The answers by item, and whether each item has just one."""
    answers, answered = list[str](), Counter[int]()
    for event in events:
        if event.HasField("chunk"):
            continue
        reason = "rows" if event.HasField("result") else event.failure.reason
        answers.append(f"fault {reason}: {event.failure.message}" if reason in OUR_FAULT else reason)
        answered[event.item_index] += 1
    if call.method == "Encode":
        number = len(pb.EncodeRequest.FromString(call.request).items)
    else:
        number = len(pb.FetchRequest.FromString(call.request).keys)
    if answered != Counter(range(number)):
        answers.append(f"fault: {number} items were asked for, answered were {dict(answered)}")
    return answers
