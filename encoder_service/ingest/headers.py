"""What the first bytes of a file state, read before a decoder opens it.

Owns the canvas size of WebP, and PNG metadata that follows the pixels. Damage is reported by the decoder.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that can hold an orientation: EXIF, or text with an EXIF profile or XMP.
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})


class ImageSize(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


def webp_size(data: bytes) -> ImageSize | None:
    """The canvas size of a WebP file (RFC 9649, sections 2.5 to 2.7); None for other data. Pillow's plugin
    allocates the canvas while it opens the file."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return ImageSize(height & 0x3FFF, width & 0x3FFF)
        case b"VP8L" if data[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", data, 21)
            return ImageSize((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
        case b"VP8X":
            width, height = (int.from_bytes(data[place : place + 3], "little") + 1 for place in (24, 27))
            return ImageSize(height, width)
    return None


def png_without_pixels(data: bytes) -> bytes:
    """The header and metadata of a PNG, so that Pillow can read an orientation that follows the pixels
    without decoding them. Other data is returned unchanged. Chunks that Pillow does not reach when it decodes
    are left out. ``lm_adapter.engines.plugin.images`` has the same function; tests hold the two equal."""
    if not data.startswith(PNG_SIGNATURE):
        return data
    kept, start = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    has_pixels = is_animated = False
    while start + 12 <= len(data):
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        kind = data[start + 4 : start + 8]
        if end > len(data) or kind == b"IEND" or not kind.isalnum():
            break
        if kind == b"fcTL" and has_pixels and is_animated:
            break  # a second frame
        if kind in _PNG_METADATA:
            # Pillow verifies checksums only before the pixels; those of moved chunks are recomputed.
            kept.append(data[start : end - 4] + struct.pack(">I", zlib.crc32(data[start + 4 : end - 4])))
        elif not has_pixels:
            if kind == b"IHDR":
                kept.append(data[start:end])
            is_animated |= kind == b"acTL"
            has_pixels = kind == b"IDAT"
        start = end
    return b"".join(kept) + b"\0\0\0\0IEND\xaeB`\x82"
