"""A PNG reduced to what its pixels and its orientation depend on: both sides compute an image's grid from the
second part.

An orientation can follow the pixels, where Pillow finds it only by decoding them. Other metadata (texts,
colour profiles, times) is left out, because Pillow refuses the whole image if such a chunk has a wrong
checksum or inflates to over 1 MiB.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Texts in which Pillow finds an orientation, by their keywords: EXIF or XMP.
_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_ORIENTATION_TEXTS = frozenset({b"Raw profile type exif", b"XML:com.adobe.xmp", b"xmp", b"exif"})
# What pixels are decoded from. The last two belong to further frames of an animation.
_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"acTL", b"fcTL", b"fdAT"})
MAX_TEXT_BYTES = 1 << 20  # of one inflated text, as in Pillow
MAX_METADATA_BYTES = 16 << 20  # of all chunks that may hold an orientation


def png_without_pixels(data: bytes) -> bytes:
    """The header of a PNG and the metadata that may hold its orientation, so that Pillow can read an
    orientation that follows the pixels without decoding them. Other data is returned unchanged. Chunks that
    Pillow does not reach when it decodes are left out."""
    if not data.startswith(PNG_SIGNATURE):
        return data
    kept = [PNG_SIGNATURE]
    has_pixels = is_animated = False
    orientations = _Orientations(data)
    for kind, start, end in _chunks(data):
        if kind == b"fcTL" and has_pixels and is_animated:
            break  # a second frame
        if orientations.may_be_in(kind, start, end):
            kept.append(_with_checksum(data[start : end - 4]))
        elif not has_pixels:
            if kind == b"IHDR":
                kept.append(data[start:end])
            is_animated |= kind == b"acTL"
            has_pixels = kind == b"IDAT"
    return b"".join(kept) + b"\0\0\0\0IEND\xaeB`\x82"


def png_without_metadata(data: bytes) -> bytes:
    """The PNG without the chunks that neither its pixels nor its orientation depend on. Other data, and a PNG
    without such chunks, is returned unchanged, and so is what follows damage to the list of chunks."""
    if not data.startswith(PNG_SIGNATURE):
        return data
    kept, position, is_changed = [PNG_SIGNATURE], len(PNG_SIGNATURE), False
    orientations = _Orientations(data)
    for kind, start, end in _chunks(data):
        if kind in _PIXELS:
            kept.append(data[start:end])
        elif orientations.may_be_in(kind, start, end):
            kept.append(_with_checksum(data[start : end - 4]))
            is_changed |= kept[-1] != data[start:end]
        else:
            is_changed = True
        position = end
    return b"".join([*kept, data[position:]]) if is_changed else data


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of each chunk with its length and checksum; ends before IEND, and before a chunk
    that is cut off or has no name."""
    start = len(PNG_SIGNATURE)
    while start + 12 <= len(data):
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        kind = data[start + 4 : start + 8]
        if end > len(data) or kind == b"IEND" or not kind.isalnum():
            return
        yield kind, start, end
        start = end


def _with_checksum(chunk: bytes) -> bytes:
    """The chunk with a checksum that is right. Pillow verifies checksums only before the pixels."""
    return chunk + struct.pack(">I", zlib.crc32(chunk[4:]))


class _Orientations:
    """Which chunks of one PNG may hold its orientation, within MAX_METADATA_BYTES of inflated bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MAX_METADATA_BYTES

    def may_be_in(self, kind: bytes, start: int, end: int) -> bool:
        if kind != b"eXIf" and kind not in _TEXTS:
            return False
        keyword, _, rest = self._data[start + 8 : end - 4].partition(b"\0")
        if kind != b"eXIf" and keyword not in _ORIENTATION_TEXTS:
            return False
        self._left -= end - start
        if kind in (b"eXIf", b"tEXt") or (kind == b"iTXt" and rest[:1] == b"\0"):
            return self._left >= 0
        if kind == b"iTXt":  # is compressed, method, language, translated keyword, text
            rest = rest[1:2] + rest[2:].split(b"\0", 2)[-1]
        self._left -= MAX_TEXT_BYTES
        return self._left >= 0 and rest[:1] == b"\0" and _inflates(rest[1:])


def _inflates(text: bytes) -> bool:
    """Whether the text inflates to at most MAX_TEXT_BYTES."""
    inflater = zlib.decompressobj()
    try:
        inflater.decompress(text, MAX_TEXT_BYTES)
    except zlib.error:
        return False
    return not inflater.unconsumed_tail
