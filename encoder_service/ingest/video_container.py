"""What kind of file a clip is, and whether all of it is there, before a demuxer is let near it.

Owns the containers that are taken and the names of their demuxers: FFmpeg would else try them all, playlists
that name other files among them. A file that was cut off is found by the lengths that it states of itself;
demuxers only stop early there. The blocks of a GIF are ``video_gif``'s. Reads with bounds and decodes
nothing.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

from encoder_service.errors import UndecodableClip
from encoder_service.ingest.headers import UNKNOWN_FORMAT, format_name
from encoder_service.ingest.video_gif import gif_blocks

Container: TypeAlias = Literal["mov", "matroska", "gif", "webp"]
CONTAINER_NAMES: dict[Container, str] = {
    "mov": "MP4",
    "matroska": "Matroska",
    "gif": "GIF",
    "webp": "WebP",
}
TAKEN = "MP4, WebM, Matroska, GIF and animated WebP"

# Boxes that an ISO or QuickTime file begins with; old ones have no ftyp.
_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_IMAGE_BRANDS = frozenset({b"avif", b"heic", b"heix", b"mif1"})
MAX_BOXES = 1 << 22  # of the outermost level
_EBML, _SEGMENT = 0x1A45DFA3, 0x18538067


def container_of(data: bytes) -> Container:
    """The container that the first bytes announce. Raises UndecodableClip for any other."""
    found: Container | None = None
    if data[4:8] in _FIRST_BOXES and not (data[4:8] == b"ftyp" and data[8:12] in _IMAGE_BRANDS):
        found = "mov"
    elif data[:4] == b"\x1a\x45\xdf\xa3":
        found = "matroska"
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        found = "gif"
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = "webp"
    if found is None:
        if not data:
            raise UndecodableClip("the clip file has 0 bytes", found_bytes=0)
        name = format_name(data)
        what = (
            f"the {len(data)} bytes start with {bytes(data[:8]).hex(' ')}, which is no clip"
            if name == UNKNOWN_FORMAT
            else f"the file of {len(data)} bytes is {name}"
        )
        raise UndecodableClip(f"{what}; taken are {TAKEN}", found_bytes=len(data))
    return found


def check_whole(data: bytes, container: Container) -> None:
    """Raises UndecodableClip, with both lengths, for a file that is shorter than it says, and for what no
    lengths lead through."""
    match container:
        case "mov":
            needed = _end_of_boxes(data)
        case "matroska":
            needed = _end_of_segment(data)
        case "webp":
            needed = 8 + struct.unpack_from("<I", data, 4)[0] if len(data) >= 8 else 12
        case "gif":
            needed = gif_blocks(data).end
    if needed > len(data):
        least = "at least " if container == "gif" else ""
        raise UndecodableClip(
            f"the {CONTAINER_NAMES[container]} file is truncated: it has {len(data)} bytes of "
            f"{least}{needed}",
            found_bytes=len(data),
            needed_bytes=needed,
        )


def _end_of_boxes(data: bytes) -> int:
    """Where the last box of the outermost level says that it ends; a header that is cut off counts whole.
    Raises UndecodableClip for more boxes than a fragment for each frame would make."""
    start = num_boxes = 0
    while start < len(data):
        num_boxes += 1
        if num_boxes > MAX_BOXES:
            raise UndecodableClip(
                f"the MP4 file has over {MAX_BOXES} boxes, which is the limit", max_boxes=MAX_BOXES
            )
        if start + 8 > len(data):
            # Some writers end in a few zeros.
            return len(data) if not any(data[start:]) else start + 8
        (size,) = struct.unpack_from(">I", data, start)
        if size == 1:
            if start + 16 > len(data):
                return start + 16
            (size,) = struct.unpack_from(">Q", data, start + 8)
        elif size == 0:  # to the end of the file
            return len(data)
        if size < 8:
            return len(data)  # no box: the demuxer says what is wrong
        start += size
    return start


def _end_of_segment(data: bytes) -> int:
    """Where the segment says that it ends; len(data) where it does not say, as in a live recording."""
    start = 0
    for expected in (_EBML, _SEGMENT):
        element = _ebml_element(data, start)
        if element is None:
            return len(data) + 1
        found, body, size = element
        if found != expected or size is None:
            return len(data)
        start = body + size
    return start


def _ebml_element(data: bytes, start: int) -> tuple[int, int, int | None] | None:
    """(id, first byte of the body, bytes of the body or None where unknown), RFC 8794 sections 4 and 5; None
    for a header that is cut off."""
    lengths = []
    for _ in range(2):
        if start >= len(data) or not data[start]:
            return None
        width = 9 - data[start].bit_length()
        if start + width > len(data):
            return None
        lengths.append((int.from_bytes(data[start : start + width], "big"), width))
        start += width
    (identity, _), (raw, width) = lengths
    size = raw & ((1 << 7 * width) - 1)
    return identity, start, None if size == (1 << 7 * width) - 1 else size
