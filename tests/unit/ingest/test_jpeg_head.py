"""A JPEG file's head by hand against Pillow: the same size and orientation, or no answer."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
from PIL import ExifTags, Image

from encoder_service.errors import ImageTooLarge
from encoder_service.ingest.decode import DecodeLimits, decode_rgb, glance_at_size, read_size
from encoder_service.ingest.jpeg import read_jpeg_head

LIMITS = DecodeLimits(1 << 24, 1 << 24)


def picture(
    width: int, height: int, *, mode: str = "RGB", orientation: int | None = None, **options: object
) -> bytes:
    values = np.random.default_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)
    if orientation is not None:
        options["exif"] = exif = Image.Exif()
        exif[ExifTags.Base.Make] = "camera"
        exif[ExifTags.Base.Orientation] = orientation
        exif[ExifTags.Base.Software] = "x" * random.randrange(50)
    file = io.BytesIO()
    Image.fromarray(values).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def by_pillow(data: bytes) -> tuple[int, int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.height, image.width, image.getexif().get(ExifTags.Base.Orientation, 1)


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + data[2:]


def sides() -> tuple[int, int]:
    return random.randint(1, 90), random.randint(1, 90)


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_size_and_orientation_are_pillows(orientation: int | None, progressive: bool, mode: str) -> None:
    data = picture(*sides(), mode=mode, orientation=orientation, progressive=progressive)
    head = read_jpeg_head(data)
    assert head is not None
    assert head[:3] == by_pillow(data)
    assert head.is_sequential is (not progressive and mode == "RGB")
    assert read_jpeg_head(with_segment(data, 0xFE, bytes(random.randrange(60000)))) == head


def test_exif_of_either_byte_order_is_read() -> None:
    plain = picture(30, 20)
    for order, mark in (("<", b"II*\0"), (">", b"MM\0*")):
        tiff = mark + struct.pack(order + "IH", 8, 1) + struct.pack(order + "HHIHH", 0x0112, 3, 1, 6, 0)
        data = with_segment(plain, 0xE1, b"Exif\0\0" + tiff + bytes(4))
        head = read_jpeg_head(data)
        assert head is not None
        assert head.orientation == by_pillow(data)[2] == 6
        assert glance_at_size(data, LIMITS) == read_size(data, LIMITS) == (30, 20)


def test_whatever_is_unusual_is_left_to_pillow() -> None:
    data = picture(40, 30)
    frame = data.index(b"\xff\xc0")
    second = data[frame : frame + 19]
    for unusual in (
        with_segment(data, 0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
        with_segment(data, 0xE1, b"Exif\0\0II*\0" + bytes(3)),
        with_segment(picture(40, 30, orientation=6), 0xE1, b"Exif\0\0MM\0*" + bytes(20)),
        with_segment(data, 0xE2, b"MPF\0" + bytes(20)),
        data[:frame] + second + data[frame:],
        picture(40, 30, mode="CMYK"),
        data[: frame + 8],
        b"",
        b"\xff\xd8",
        b"\x89PNG" + data,
    ):
        assert read_jpeg_head(unusual) is None
    for value in (0, 9):
        assert read_jpeg_head(picture(40, 30, orientation=value)) is None


def test_damaged_files_have_pillows_size_or_none() -> None:
    """Bytes changed at random: what is still answered is what Pillow answers."""
    answered = 0
    for _ in range(400):
        data = bytearray(picture(*sides(), orientation=random.choice([None, 3, 6])))
        end = data.index(b"\xff\xda") + 2
        for _ in range(random.randint(1, 3)):
            data[random.randrange(2, end)] = random.randrange(256)
        head = read_jpeg_head(bytes(data))
        if head is None:
            continue
        try:
            found = by_pillow(bytes(data))
        except Exception:  # what Pillow refuses is refused when its pixels are read
            continue
        answered += 1
        assert head[:3] == found
    assert answered > 50


def test_limits_hold_before_any_pixel() -> None:
    data = picture(64, 64)
    tight = DecodeLimits(1 << 24, 64 * 64 - 1)
    assert glance_at_size(data, tight) is None
    with pytest.raises(ImageTooLarge, match="64x64"):
        read_size(data, tight)
    with pytest.raises(ImageTooLarge, match="64x64"):
        decode_rgb(data, tight)
    assert glance_at_size(data, DecodeLimits(len(data) - 1, 1 << 24)) is None
