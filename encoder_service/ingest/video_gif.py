"""The blocks of a GIF file: where it ends, and how many pictures it has.

A GIF states no length. It ends in a trailer of one byte, which may as well stand anywhere in a picture, so
that only a walk along the lengths of its blocks tells a file that was cut off (GIF89a specification, sections
15 and 18 to 27). Decodes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from encoder_service.errors import UndecodableClip

MAX_BLOCKS = 1 << 22  # of up to 255 bytes
_HEADER_BYTES = 13  # signature and logical screen
_EXTENSION, _PICTURE, _TRAILER = 0x21, 0x2C, 0x3B


class GifBlocks(NamedTuple):
    """num_pictures: before the trailer; end: of the trailer, beyond the file's last byte where there is
    none."""

    num_pictures: int
    end: int


def gif_blocks(data: bytes) -> GifBlocks:
    """data: that begin as a GIF does; a file too short for a header is left to the demuxer. What follows the
    trailer is no part of it. Raises UndecodableClip for a byte that begins no block and for too many of
    them."""
    size = len(data)
    if size < _HEADER_BYTES:
        return GifBlocks(0, size)
    at = _HEADER_BYTES + _table_bytes(data[10])
    num_pictures = num_blocks = 0
    while at < size:
        kind = data[at]
        if kind == _TRAILER:
            return GifBlocks(num_pictures, at + 1)
        if kind == _EXTENSION:
            at += 2
        elif kind == _PICTURE:
            if at + 10 > size:
                return GifBlocks(num_pictures, at + 10)
            num_pictures += 1
            at += 11 + _table_bytes(data[at + 9])  # with the size of its first codes
        else:
            raise UndecodableClip(
                f"the GIF file of {size} bytes is damaged: byte {at} is 0x{kind:02x}, where a block begins "
                f"with 0x{_EXTENSION:02x}, 0x{_PICTURE:02x} or 0x{_TRAILER:02x}",
                found_bytes=size,
            )
        length = -1
        while length and at < size:
            length = data[at]
            at += 1 + length
            num_blocks += 1
            if num_blocks > MAX_BLOCKS:
                raise UndecodableClip(
                    f"the GIF file has over {MAX_BLOCKS} blocks, which is the limit", max_blocks=MAX_BLOCKS
                )
    # The trailer is missing, and perhaps more.
    return GifBlocks(num_pictures, at + 1)


def _table_bytes(flags: int) -> int:
    """Of the table of colours that these flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
