"""What a file's first bytes say, read before a decoder opens it.

Owns the name of a format for messages, the canvas size of the formats whose Pillow plugin allocates or
decodes while opening (WebP, ICO), and PNG metadata written behind the pixels. All reads are bounded; where a
file is too short or damaged the answer is ``None``, and the decoder reports the damage.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

UNKNOWN_FORMAT = "unknown"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that can hold an orientation: EXIF itself, or text with an EXIF profile or XMP.
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (PNG_SIGNATURE, "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"qoif", "QOI"),
    (b"\x01\xda", "SGI"),
    (b"8BPS", "Photoshop"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"DDS ", "DDS"),
    (b"icns", "ICNS"),
    (b"\x1aE\xdf\xa3", "Matroska or WebM video"),
)
_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
    b"isom": "MP4 video",
    b"mp41": "MP4 video",
    b"mp42": "MP4 video",
    b"qt  ": "QuickTime video",
}


def format_name(data: bytes) -> str:
    """The format that the first bytes announce, for messages; UNKNOWN_FORMAT for none."""
    head = bytes(data[:512])
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "WebP", b"AVI ": "AVI video"}.get(head[8:12], "RIFF")
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "ISO media")
    if len(head) > 2 and head[:1] == b"P" and head[1:2] in b"1234567fFy" and head[2:3].isspace():
        return "PPM"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if text.startswith((b"<?xml", b"<svg")):
        return "SVG" if b"<svg" in text else "XML"
    if text.startswith((b'{"', b"[{", b"{\n", b"{ ")):
        return "JSON"
    return UNKNOWN_FORMAT


class Canvas(NamedTuple):
    """Pixels of an image as its header states them, before any rotation."""

    width: int
    height: int


def webp_canvas(data: bytes) -> Canvas | None:
    """Canvas of a WebP file (RFC 9649, section 2.5 to 2.7). Pillow's plugin allocates it while opening."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return Canvas(width & 0x3FFF, height & 0x3FFF)
        case b"VP8L" if data[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", data, 21)
            return Canvas((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        case b"VP8X":
            return Canvas(
                int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
            )
    return None


def ico_canvas(data: bytes) -> Canvas | None:
    """Size of the icon that Pillow picks: the largest, among equals the one with the fewest colours, as its
    own header states it (the directory's stops at 256). Pillow's plugin decodes it while opening."""
    if len(data) < 6 or data[:4] != b"\x00\x00\x01\x00":
        return None
    (num_icons,) = struct.unpack_from("<H", data, 4)
    if num_icons == 0 or len(data) < 6 + 16 * num_icons:
        return None

    def rank(entry: bytes) -> tuple[int, int]:
        num_colours, (bits,) = entry[2], struct.unpack_from("<H", entry, 6)
        depth = bits or (math.ceil(math.log2(num_colours)) if num_colours else 0) or 256
        return -(entry[0] or 256) * (entry[1] or 256), depth

    entries = [data[6 + 16 * i : 22 + 16 * i] for i in range(num_icons)]
    (start,) = struct.unpack_from("<I", min(entries, key=rank), 12)
    icon = data[start : start + 24]
    if icon.startswith(PNG_SIGNATURE):
        return _sound(*struct.unpack_from(">II", icon, 16)) if len(icon) == 24 else None
    if len(icon) < 12:
        return None
    if struct.unpack_from("<I", icon)[0] == 12:
        width, height = struct.unpack_from("<HH", icon, 4)
    else:
        width, height = struct.unpack_from("<II", icon, 4)
        if height >> 24 == 0xFF:  # negative: rows stand top down
            height = (1 << 32) - height
    return _sound(width, height // 2)  # the height covers the colour and the mask rows


def _sound(width: int, height: int) -> Canvas | None:
    return Canvas(width, height) if width > 0 and height > 0 else None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each whole chunk, length and checksum included."""
    start = len(PNG_SIGNATURE)
    while start + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, start)
        end = start + 12 + length
        if end > len(data):
            return
        yield data[start + 4 : start + 8], start, end
        start = end


def png_metadata_first(data: bytes) -> bytes:
    """The same PNG with metadata chunks that stand behind the pixels moved before them, so that opening
    the file reads the orientation without decoding. The pixels are cut off; other data passes unchanged."""
    if not data.startswith(PNG_SIGNATURE):
        return data
    first_pixels: int | None = None
    late: list[bytes] = []
    for kind, start, end in _png_chunks(data):
        if kind == b"IDAT" and first_pixels is None:
            first_pixels = start
        elif kind in _PNG_METADATA and first_pixels is not None:
            # Pillow does not check the sums of chunks behind the pixels, but those of chunks before them.
            checksum = struct.pack(">I", zlib.crc32(data[start + 4 : end - 4]))
            late.append(data[start : end - 4] + checksum)
    if first_pixels is None or not late:
        return data
    return data[:first_pixels] + b"".join(late) + data[first_pixels : first_pixels + 12]
