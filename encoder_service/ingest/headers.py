"""What the first bytes of a file state, read before a decoder opens it.

Owns the canvas size of WebP. Damage is reported by the decoder.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


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
