"""How much the tables of an MP4 file make its demuxer keep, found before it is let near them.

Owns that bound. A demuxer keeps an entry for each sample of each track as soon as it reads the header, and a
few bytes can ask for hundreds of millions: a size that holds for so many samples, a fragment of as many, an
edit list that shows all of them again and again.

Tables are found by their four letters wherever they may stand, not by walking the tree of boxes: what a
demuxer descends into that a walk of ours would not cannot hide any.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from encoder_service.errors import ClipTooLarge, UndecodableClip

MIN_ENTRIES = 1 << 20
ENTRIES_PER_FRAME = 4  # pictures and the sounds beside them


def max_entries(max_source_frames: int) -> int:
    """Entries of a file's tables, of all its tracks together; each takes the demuxer up to 150 bytes."""
    return max(MIN_ENTRIES, ENTRIES_PER_FRAME * max_source_frames)


def check_tables(data: bytes, max_source_frames: int) -> None:
    """data: of an MP4 file that is whole. Raises ClipTooLarge for tables of more entries than any clip of the
    limits needs, with both numbers; UndecodableClip for a compressed header, which would hide them."""
    most = max_entries(max_source_frames)
    media = _media_ranges(data, most)
    if next(_places(data, b"cmov", media), None) is not None:
        raise UndecodableClip("the MP4 file's header is compressed, which is not taken")
    has_plain_sound = _has_even_times(data, media)
    num_samples, num_edits = 0, 0
    for kind in (b"stsz", b"stz2", b"trun", b"elst"):
        for num_tables, place in enumerate(_places(data, kind, media), 1):
            body = place + 4
            if kind == b"elst":
                num_edits += max(0, _u32(data, body + 4) - 1)
            elif kind == b"trun":
                num_samples += _u32(data, body + 4)
            else:
                size, count = _u32(data, body + 4), _u32(data, body + 8)
                # Of uncompressed sound each value is a sample, but the demuxer keeps an entry for each chunk.
                is_plain_sound = has_plain_sound and 0 < size * count <= len(data)
                num_samples += 0 if is_plain_sound else count
            found = max(num_tables, num_samples * (1 + num_edits))
            if found > most:
                raise ClipTooLarge(
                    f"the MP4 file's tables name {found} samples, edits that repeat them "
                    f"counted; the limit is {most}",
                    found=found,
                    max_entries=most,
                )


def _has_even_times(data: bytes, media: list[tuple[int, int]]) -> bool:
    """Whether a track's time table is a single line of length 1, as that of uncompressed sound."""
    return any(
        (_u32(data, place + 8), _u32(data, place + 16)) == (1, 1) for place in _places(data, b"stts", media)
    )


def _u32(data: bytes, place: int) -> int:
    """0 beyond the end, where a demuxer reads nothing either."""
    return int(struct.unpack_from(">I", data, place)[0]) if place + 4 <= len(data) else 0


def _media_ranges(data: bytes, most: int) -> list[tuple[int, int]]:
    """[start, end) of the outermost mdat boxes, ascending: pictures and sound, in which any letters may
    stand. Raises ClipTooLarge for more boxes than ``most``."""
    ranges: list[tuple[int, int]] = []
    start = num_boxes = 0
    while start + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        if size == 1 and start + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, start + 8)
        elif size == 0:
            size = len(data) - start
        if size < 8:
            break
        num_boxes += 1
        if num_boxes > most:
            raise ClipTooLarge(f"the MP4 file has over {most} boxes, which is the limit", max_entries=most)
        if kind == b"mdat":
            ranges.append((start, start + size))
        start += size
    return ranges


def _places(data: bytes, letters: bytes, media: list[tuple[int, int]]) -> Iterator[int]:
    """Where these letters stand outside of media."""
    start = 0
    for media_start, media_end in [*media, (len(data), len(data))]:
        while (place := data.find(letters, start, media_start)) >= 0:
            yield place
            start = place + 4
        start = media_end
