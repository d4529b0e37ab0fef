"""A PNG without its pixels: both sides compute an image's grid from what is left.

An orientation can follow the pixels, where Pillow finds it only by decoding them.
"""

from __future__ import annotations

import struct
import zlib

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that can hold an orientation: EXIF, or text with an EXIF profile or XMP.
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})


def png_without_pixels(data: bytes) -> bytes:
    """The header and metadata of a PNG, so that Pillow can read an orientation that follows the pixels
    without decoding them. Other data is returned unchanged. Chunks that Pillow does not reach when it decodes
    are left out."""
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
