"""Calls that are wrong in ways that know the wire contract.

Owns the making of requests: bad images and tensors among good items, messages whose fields have values that
mean nothing, and bytes that are nearly a message. All of it follows from one random generator.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.chaos.fuzz_images import bad_image, flip, good_images, truncate
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
DTYPES = {pb.DTYPE_FLOAT32: 4, pb.DTYPE_BFLOAT16: 2, pb.DTYPE_FLOAT16: 2, pb.DTYPE_UINT8: 1}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Call(NamedTuple):
    """kind: what is wrong with it, for reports."""

    kind: str
    method: str
    request: bytes


def make_call(rng: random.Random) -> Call:
    """One input."""
    return rng.choice((images, images, tensors, fields, wire))(rng)


def images(rng: random.Random) -> Call:
    request = pb.EncodeRequest(namespace=rng.choice(("", "fuzz")))
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(good_images()) if rng.random() < 0.2 else bad_image(rng)
        item = pb.Item(modality=pb.MODALITY_IMAGE, encoded=data)
        if rng.random() < 0.2:
            fill(rng, item.options, depth=1)
        if rng.random() < 0.1:
            item.content_digest = rng.randbytes(rng.choice((0, 1, 31, 32, 33)))
        request.items.append(item)
    if rng.random() < 0.15:
        prefetch = pb.PrefetchRequest(items=request.items, namespace=request.namespace)
        return Call("images", "Prefetch", prefetch.SerializeToString())
    return Call("images", "Encode", request.SerializeToString())


def tensors(rng: random.Random) -> Call:
    items = [tensor_item(rng) for _ in range(rng.randint(1, 3))]
    return Call("tensors", "Encode", pb.EncodeRequest(items=items).SerializeToString())


def tensor_item(rng: random.Random) -> pb.Item:
    """A pixel tensor that is right but for some of what it says of itself."""
    t, h, w = rng.choice(((1, 2, 2), (1, 4, 6), (1, 2, 4), (2, 2, 2)))
    shape, dtype = [t * h * w, PATCH_DIM], rng.choice(list(DTYPES))
    num_bytes = shape[0] * shape[1] * DTYPES[dtype]
    data = rng.randbytes(num_bytes) if dtype == pb.DTYPE_UINT8 else floats(rng, shape, dtype)
    lie = rng.randrange(8)
    if lie == 0:
        shape[rng.randrange(2)] = rng.choice(INTEGERS)
    if lie == 1:
        shape = [rng.choice(INTEGERS) for _ in range(rng.randint(0, 5))]
    if lie == 2:
        t, h, w = (rng.choice(INTEGERS) & 0xFFFFFFFF for _ in range(3))
    if lie == 3:
        data = (
            data[: rng.randint(0, len(data))]
            if rng.random() < 0.5
            else data + rng.randbytes(rng.randint(1, 9))
        )
    pixels = pb.PixelTensor(grid_thw=pb.GridTHW(t=t, h=h, w=w))
    if lie == 4:
        shm = pixels.shm
        fill(rng, shm, depth=1)
        shm.name = rng.choice(
            ("", "ve-pixels-x", "../../etc/passwd", "ve-pixels-" + "a" * 300, "a/b", "\x01")
        )
        shm.shape.extend((4, PATCH_DIM))
    else:
        pixels.inline.CopyFrom(pb.InlineTensor(dtype=dtype, shape=shape, data=data))
    modality = rng.choice((pb.MODALITY_IMAGE, pb.MODALITY_VIDEO))
    item = pb.Item(modality=modality, pixels=pixels)
    if lie == 5:
        item.pixels.inline.dtype = rng.choice((0, 5, 99))  # type: ignore[assignment]
    return item


def floats(rng: random.Random, shape: list[int], dtype: int) -> bytes:
    """Values of which some may be NaN or infinite."""
    values = np.random.default_rng(rng.getrandbits(32)).standard_normal(shape, dtype=np.float32)
    if rng.random() < 0.3:
        with np.errstate(over="ignore"):
            values[rng.randrange(shape[0]), rng.randrange(shape[1])] = rng.choice(FLOATS)
    if dtype == pb.DTYPE_FLOAT32:
        return values.tobytes()
    if dtype == pb.DTYPE_FLOAT16:
        return values.astype(np.float16).tobytes()
    return values.view(np.uint16)[:, 1::2].tobytes()  # the upper halves are bfloat16


# -- messages by their fields --------------------------------------------------------------------------


def fields(rng: random.Random) -> Call:
    method = rng.choice(list(REQUESTS))
    request = REQUESTS[method]()
    fill(rng, request, depth=4)
    return Call("fields", method, request.SerializeToString())


def fill(rng: random.Random, message: Message, depth: int) -> None:
    """Some fields of a message, with values that its types allow and its meaning mostly not."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            container = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 1, 2, 5, 300) if rng.random() < 0.1 else (0, 1, 2))):
                if field.message_type is None:
                    container.append(scalar(rng, field))
                elif depth:
                    fill(rng, container.add(), depth - 1)
        elif field.message_type is None:
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
    if kind == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 16, 31, 32, 33, 1000)))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(
            ("", "fuzz", "qwen3_vl", "x" * 300, "\0", "ä\u202e", "http://169.254.169.254/", "../..")
        )
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    value = rng.choice(INTEGERS) & ((1 << bits - 1) - 1 if signed else (1 << bits) - 1)
    return -value if signed and rng.random() < 0.4 else value


# -- bytes that are nearly a message -------------------------------------------------------------------


def wire(rng: random.Random) -> Call:
    base = rng.choice((images, tensors, fields))(rng)
    data = base.request
    for _ in range(rng.randint(1, 3)):
        data = rng.choice((unknown_field, wrong_type, nested, truncate, flip))(rng, data)
    return Call("wire", base.method, data)


def unknown_field(rng: random.Random, data: bytes) -> bytes:
    number, kind = rng.choice((15, 100, 19000, (1 << 29) - 1)), rng.choice((VARINT, FIXED64, BYTES, FIXED32))
    body = {VARINT: encode_varint(rng.choice(INTEGERS)), FIXED64: bytes(8), FIXED32: bytes(4)}.get(
        kind, encode_varint(3) + b"abc"
    )
    return data + encode_varint(number << 3 | kind) + body


def wrong_type(rng: random.Random, data: bytes) -> bytes:
    """A known field number under another wire type, groups and reserved types included."""
    return (
        data + encode_varint(rng.randint(1, 12) << 3 | rng.randrange(8)) + rng.randbytes(rng.randint(0, 12))
    )


def nested(rng: random.Random, data: bytes) -> bytes:
    """Groups within groups."""
    return data + b"\x0b" * rng.choice((10, 99, 101, 5000))
