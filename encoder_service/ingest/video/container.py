"""Checks of a clip file's bytes before a demuxer opens it.

Owns the accepted containers, the check that a file was not truncated, and the limit on the sample tables of
an MP4 file. FFmpeg does none of the three: it would try all its demuxers (among them playlists, which name
other files), it stops without an error where a truncated file ends, and it allocates an entry for every
sample that a table announces. Nothing here decodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias

from encoder_service.errors import ClipTooLarge, UndecodableClip

Container: TypeAlias = Literal["mov", "matroska", "gif", "webp"]
# From FFmpeg's name of the demuxer to the name in error messages.
CONTAINER_NAMES: dict[Container, str] = {
    "mov": "MP4",
    "matroska": "Matroska",
    "gif": "GIF",
    "webp": "WebP",
}
ACCEPTED = "MP4, WebM, Matroska, GIF and animated WebP"

# Boxes that begin an ISO or QuickTime file. Old files have no ftyp.
_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_IMAGE_BRANDS = frozenset({b"avif", b"heic", b"heix", b"mif1"})
_EBML, _SEGMENT = 0x1A45DFA3, 0x18538067
_TABLES = re.compile(rb"cmov|stsz|stz2|trun|elst")

MAX_BOXES = 1 << 20  # at the outermost level
MIN_ENTRIES = 1 << 20
ENTRIES_PER_FRAME = 4  # a video sample and the audio samples that belong to it


def container_of(data: bytes) -> Container:
    """The container that the first bytes indicate. Raises UndecodableClip for any other file."""
    if data[4:8] in _FIRST_BOXES and not (data[4:8] == b"ftyp" and data[8:12] in _IMAGE_BRANDS):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise UndecodableClip(
        f"the file of {len(data)} bytes starts with {bytes(data[:16])!r}, which is no clip; accepted are "
        f"{ACCEPTED}",
        found_bytes=len(data),
    )


def check_whole(data: bytes, container: Container) -> None:
    """Raises UndecodableClip for a file that is shorter than it states, ClipTooLarge for an MP4 file with too
    many boxes."""
    match container:
        case "mov":
            needed = max(
                (end for kind, _, end in _outer_boxes(data) if kind in (b"mdat", b"moof", b"moov")), default=0
            )
        case "matroska":
            needed = _matroska_end(data)
        case "webp":
            needed = 8 + int.from_bytes(data[4:8], "little")
        case "gif":
            needed = _gif_end(data)
    if needed > len(data):
        raise UndecodableClip(
            f"the {CONTAINER_NAMES[container]} file is truncated: it has {len(data)} bytes, needs at least "
            f"{needed}",
            found_bytes=len(data),
            needed_bytes=needed,
        )


def _gif_end(data: bytes) -> int:
    """The offset after a GIF's trailer. If there is no trailer, an offset beyond the data (GIF89a, sections
    15 and 18 to 27)."""

    def table_bytes(place: int) -> int:
        flags = data[place] if place < len(data) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    at = 13 + table_bytes(10)
    while at < len(data) and data[at] != 0x3B:
        if data[at] not in (0x21, 0x2C):
            raise UndecodableClip(
                f"the GIF file is damaged: byte {at} is 0x{data[at]:02x}, which begins no block", byte=at
            )
        at += 2 if data[at] == 0x21 else 11 + table_bytes(at + 9)
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
    return at + 1


def _matroska_end(data: bytes) -> int:
    """The offset at which the segment states that it ends; 0 if it does not state this, as in a live
    recording (RFC 8794, sections 4 and 5)."""
    at = 0
    for expected in (_EBML, _SEGMENT):
        numbers = []
        for _ in range(2):
            width = 9 - data[at].bit_length() if at < len(data) and data[at] else 9
            if at + width > len(data):
                return len(data) + 1
            numbers.append((int.from_bytes(data[at : at + width], "big"), width))
            at += width
        (identity, _), (raw, width) = numbers
        size = raw & ((1 << 7 * width) - 1)
        if identity != expected or size == (1 << 7 * width) - 1:
            return 0
        at += size
    return at


def check_tables(data: bytes, max_source_frames: int) -> None:
    """Limits the sample tables of an MP4 file. The demuxer keeps up to 150 bytes per entry, and a few bytes
    can announce hundreds of millions of entries: one size for that many samples, a fragment with as many, or
    an edit list that repeats them.

    Tables are found by their four-letter names anywhere outside the outermost mdat boxes, because the demuxer
    descends into more boxes than a walk of our own would. Raises ClipTooLarge; UndecodableClip for a
    compressed header (cmov), which would hide the tables.
    """
    limit = max(MIN_ENTRIES, ENTRIES_PER_FRAME * max_source_frames)
    headers = b"".join(data[start:end] for kind, start, end in _outer_boxes(data) if kind != b"mdat")
    num_samples = num_edits = num_plain_bytes = num_tables = 0
    for num_tables, table in enumerate(_TABLES.finditer(headers), 1):
        first, second = (
            int.from_bytes(headers[place : place + 4], "big")
            for place in (table.start() + 8, table.start() + 12)
        )
        match table.group():
            case b"cmov":
                raise UndecodableClip("the MP4 file's header is compressed, which is not supported")
            case b"elst":
                num_edits += max(0, first - 1)
            case b"trun":
                num_samples += first
            case _:
                # Samples of equal size that are all in the file are uncompressed audio. The demuxer keeps one
                # entry per chunk for them.
                num_plain_bytes += first * second
                num_samples += 0 if first and num_plain_bytes <= len(data) else second
        found = max(num_tables, num_samples * (1 + num_edits))
        if found > limit:
            raise ClipTooLarge(
                f"the MP4 file's tables name {found} samples, with repeats; the limit is {limit}",
                found=found,
                max_entries=limit,
            )


def _outer_boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of the outermost boxes. After a damaged box, the rest of the file is one box without
    a kind. Raises ClipTooLarge for more than MAX_BOXES."""
    start = num_boxes = 0
    while start < len(data):
        size, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16], "big")
        if size < 8:
            size, kind = len(data) - start, b"" if size else kind
        num_boxes += 1
        if num_boxes > MAX_BOXES:
            raise ClipTooLarge(f"the MP4 file has over {MAX_BOXES} boxes, the limit", max_boxes=MAX_BOXES)
        yield kind, start, start + size
        start += size
