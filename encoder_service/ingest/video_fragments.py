"""What a fragmented MP4 file says of its own length beyond its boxes, and whether it has it.

Such a file is a header and then fragments, each whole by itself: cut between two, it is a shorter file whose
boxes are all there. Owns finding that out where the file says more: an index of what follows (sidx), a count
of fragments behind them (mfra), a duration in the header (mehd, else mvhd). Where none does, nothing is
missed. ISO/IEC 14496-12, sections 8.2.2, 8.8 and 8.16. Decodes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from encoder_service.errors import UndecodableClip

MAX_INNER_BOXES = 1 << 22
# What the last frames' order and rounding may make a duration differ by.
MIN_TOLERANCE_S = 0.1
TOLERATED_SAMPLES = 4


@dataclass
class Track:
    """ticks: of a second; end: of its samples, in ticks; shift_s: before which it shows nothing."""

    ticks: int = 0
    end: int = 0
    num_samples: int = 0
    sample_ticks: int = 0
    shift_s: float = 0.0


@dataclass
class Fragments:
    """stated_s: duration of the longest track by the header, 0 where it says none."""

    tracks: dict[int, Track] = field(default_factory=dict)
    num_fragments: int = 0
    num_named: int = 0
    stated_s: float = 0.0
    num_boxes: int = 0


def check_fragments(data: bytes) -> None:
    """data: an MP4 file whose outermost boxes are all there. Raises UndecodableClip, with both numbers, for
    one that says of itself that it has more fragments or lasts longer."""
    if data.find(b"moof") < 0 and data.find(b"sidx") < 0:
        return
    found = Fragments()
    try:
        for kind, start, end in _boxes(data, 0, len(data), found):
            if kind == b"sidx":
                _check_index(data, start, end)
            elif kind == b"moov":
                _read_header(data, start, end, found)
            elif kind == b"moof":
                found.num_fragments += 1
                _read_fragment(data, start, end, found)
            elif kind == b"mfra":
                found.num_named = max(found.num_named, _num_named(data, start, end, found))
    except (struct.error, ValueError, IndexError):
        return  # a box too short for its own numbers: the demuxer says what is wrong
    if found.num_named > found.num_fragments:
        raise UndecodableClip(
            f"the MP4 file is truncated: it names {found.num_named} fragments and has {found.num_fragments}",
            found=found.num_fragments,
            needed=found.num_named,
        )
    _check_duration(found)


def _check_duration(found: Fragments) -> None:
    tracks = [track for track in found.tracks.values() if track.ticks and track.num_samples]
    if not found.num_fragments or not tracks:
        return
    lasts_s = max(track.end / track.ticks + track.shift_s for track in tracks)
    sample_s = max(track.end / track.ticks / track.num_samples for track in tracks)
    if found.stated_s > lasts_s + max(MIN_TOLERANCE_S, TOLERATED_SAMPLES * sample_s):
        raise UndecodableClip(
            f"the MP4 file is truncated: its header says that it lasts {found.stated_s:.3f} s, its fragments "
            f"end at {lasts_s:.3f} s",
            found_s=round(lasts_s, 3),
            needed_s=round(found.stated_s, 3),
        )


def _boxes(data: bytes, start: int, end: int, found: Fragments) -> Iterator[tuple[bytes, int, int]]:
    """(kind, first byte of the body, end) of the boxes in a row."""
    while start + 8 <= end:
        found.num_boxes += 1
        if found.num_boxes > MAX_INNER_BOXES:
            raise UndecodableClip(
                f"the MP4 file has over {MAX_INNER_BOXES} boxes, which is the limit",
                max_boxes=MAX_INNER_BOXES,
            )
        size, kind = struct.unpack_from(">I4s", data, start)
        body = start + 8
        if size == 1 and start + 16 <= end:
            (size,) = struct.unpack_from(">Q", data, body)
            body += 8
        elif size == 0:
            size = end - start
        if size < body - start:
            return
        yield kind, body, min(end, start + size)
        start += size


def _check_index(data: bytes, start: int, end: int) -> None:
    """Raises UndecodableClip for a segment index of more bytes than follow it."""
    wide = data[start] > 0
    (offset,) = struct.unpack_from(">Q" if wide else ">I", data, start + (20 if wide else 16))
    at = start + (28 if wide else 20)
    (count,) = struct.unpack_from(">H", data, at + 2)
    sizes = [struct.unpack_from(">I", data, at + 4 + 12 * place)[0] & 0x7FFFFFFF for place in range(count)]
    needed = end + offset + sum(sizes)
    if needed > len(data):
        raise UndecodableClip(
            f"the MP4 file is truncated: it has {len(data)} bytes of {needed}",
            found_bytes=len(data),
            needed_bytes=needed,
        )


def _num_named(data: bytes, start: int, end: int, found: Fragments) -> int:
    """Different fragments that the table behind them names, wherever it says that they are."""
    named: set[int] = set()
    for kind, body, body_end in _boxes(data, start, end, found):
        if kind != b"tfra":
            continue
        wide = data[body] > 0
        widths, count = struct.unpack_from(">II", data, body + 8)
        tail = sum((widths >> shift & 3) + 1 for shift in (0, 2, 4))
        stride = (16 if wide else 8) + tail
        count = min(count, max(0, body_end - body - 16) // stride, MAX_INNER_BOXES)
        for place in range(count):
            at = body + 16 + place * stride
            (offset,) = struct.unpack_from(">Q" if wide else ">I", data, at + (8 if wide else 4))
            named.add(offset)
    return len(named)


def _read_header(data: bytes, start: int, end: int, found: Fragments) -> None:
    movie_ticks = movie = longest = 0
    shifts: dict[int, int] = {}
    for kind, body, body_end in _boxes(data, start, end, found):
        if kind == b"mvhd":
            movie_ticks, movie = _ticks_and_duration(data, body)
        elif kind == b"trak":
            identity, track, shift = _track(data, body, body_end, found)
            found.tracks[identity] = track
            shifts[identity] = shift
        elif kind == b"mvex":
            for inner, at, _ in _boxes(data, body, body_end, found):
                if inner == b"mehd":
                    (longest,) = struct.unpack_from(">Q" if data[at] else ">I", data, at + 4)
                elif inner == b"trex":
                    identity, _, ticks = struct.unpack_from(">III", data, at + 4)
                    found.tracks.setdefault(identity, Track()).sample_ticks = ticks
    if movie_ticks:
        found.stated_s = (longest or movie) / movie_ticks
        for identity, shift in shifts.items():
            found.tracks[identity].shift_s = shift / movie_ticks


def _ticks_and_duration(data: bytes, body: int) -> tuple[int, int]:
    """Of an mvhd or mdhd; a duration of ones is unknown, here 0."""
    wide = data[body] > 0
    ticks, duration = struct.unpack_from(">IQ" if wide else ">II", data, body + (20 if wide else 12))
    return ticks, 0 if duration == (1 << (64 if wide else 32)) - 1 else duration


def _track(data: bytes, start: int, end: int, found: Fragments) -> tuple[int, Track, int]:
    """Its id, what the header has of it, and the movie's ticks before it begins."""
    identity, shift, track = 0, 0, Track()
    pending = [(start, end)]
    while pending:
        for kind, body, body_end in _boxes(data, *pending.pop(), found):
            if kind in (b"mdia", b"minf", b"stbl", b"edts"):
                pending.append((body, body_end))
            elif kind == b"tkhd":
                (identity,) = struct.unpack_from(">I", data, body + (20 if data[body] else 12))
            elif kind == b"mdhd":
                track.ticks, _ = _ticks_and_duration(data, body)
            elif kind == b"stts":
                (count,) = struct.unpack_from(">I", data, body + 4)
                count = min(count, max(0, body_end - body - 8) // 8)
                table = np.frombuffer(data, ">u4", 2 * count, body + 8).reshape(-1, 2).astype(np.float64)
                track.end += int((table[:, 0] * table[:, 1]).sum())
                track.num_samples += int(table[:, 0].sum())
            elif kind == b"elst":
                wide = data[body] > 0
                length, media = struct.unpack_from(">Qq" if wide else ">Ii", data, body + 8)
                shift = length if media == -1 else 0
    return identity, track, shift


def _read_fragment(data: bytes, start: int, end: int, found: Fragments) -> None:
    for kind, body, body_end in _boxes(data, start, end, found):
        if kind != b"traf":
            continue
        track, sample_ticks, at = Track(), 0, None
        for inner, place, inner_end in _boxes(data, body, body_end, found):
            if inner == b"tfhd":
                flags, identity = struct.unpack_from(">II", data, place)
                track = found.tracks.setdefault(identity, Track())
                sample_ticks = track.sample_ticks
                if flags & 0x8:
                    where = place + 8 + 8 * (flags & 1) + 4 * (flags >> 1 & 1)
                    (sample_ticks,) = struct.unpack_from(">I", data, where)
            elif inner == b"tfdt":
                (at,) = struct.unpack_from(">Q" if data[place] else ">I", data, place + 4)
            elif inner == b"trun":
                flags, count = struct.unpack_from(">II", data, place)
                first = place + 8 + 4 * (flags & 1) + 4 * (flags >> 2 & 1)
                width = (flags >> 8 & 15).bit_count()
                lasts = count * sample_ticks
                if flags & 0x100:
                    held = min(count, max(0, inner_end - first) // (4 * width))
                    each = np.frombuffer(data, ">u4", held * width, first).reshape(-1, width)[:, 0]
                    lasts = int(each.sum(dtype=np.int64))
                at = (track.end if at is None else at) + lasts
                track.end = max(track.end, at)
                track.num_samples += count
