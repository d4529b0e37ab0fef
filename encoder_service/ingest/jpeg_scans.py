"""Whether a JPEG file is whole and plain, from its markers alone: what a decoder may be given that would not
say if it was not.

Owns the walk over every segment and scan, to the end of the image. libjpeg and a GPU's decoder agree on files
that are in order; of a file that is cut off, lacks scans or numbers its restarts wrongly each makes what it
can, one with an error and the other without. Such files are recognised here, without decoding, and stay with
the host. Bits that were changed between two markers do not show. Progressive files with restarts
stay with the host too: of such files nvJPEG makes other pictures, without a word.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Baseline, extended sequential, progressive; all in Huffman code.
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_PROGRESSIVE, _SCAN, _END, _RESTARTS = 0xC2, 0xDA, 0xD9, 0xDD
_JFIF, _ADOBE = 0xE0, 0xEE
_CODES, _QUANTISATIONS = 0xC4, 0xDB
# Comments and what applications add.
_PASSED = frozenset({0xFE, *range(0xE0, 0xF0)})
# Factors of luma by name; chroma has one sample where luma has so many.
_SUBSAMPLINGS = {0x11: "444", 0x21: "422", 0x22: "420"}
_MARKER = re.compile(rb"\xff[^\x00]")
_NUM_COEFFICIENTS = 64
_UNSEEN = -1


class PlainJpeg(NamedTuple):
    """A file in order. height, width: before any rotation. subsampling: 444, 422, 420 or grey."""

    height: int
    width: int
    subsampling: str
    is_progressive: bool


class _Frame(NamedTuple):
    """components: their ids, in order. quantisations: their tables."""

    height: int
    width: int
    components: bytes
    quantisations: bytes
    subsampling: str
    is_progressive: bool


def read_plain_jpeg(data: bytes) -> PlainJpeg | None:
    """The file, if it is grey or YCbCr of eight bits in 4:4:4, 4:2:2 or 4:2:0, and every scan is there; None
    for any other. Nothing may follow the end of the image, and a progressive file has no restarts."""
    frame: _Frame | None = None
    is_jfif, adobe = False, None
    restart_interval = num_scans = 0
    # Of each component and coefficient: the bits that are still missing.
    missing: dict[int, list[int]] = {}
    # As (class, number) and as number.
    codes: set[tuple[int, int]] = set()
    quantisations: set[int] = set()
    position = 2
    if data[:2] != b"\xff\xd8":
        return None
    while position + 2 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == _END:
            if frame is None or position + 2 != len(data) or not num_scans:
                return None
            if frame.is_progressive and any(any(bits) for bits in missing.values()):
                return None
            if not _is_ycbcr(frame, adobe, is_jfif=is_jfif):
                return None
            return PlainJpeg(frame.height, frame.width, frame.subsampling, frame.is_progressive)
        start, end = position + 4, position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if end < start or end > len(data):
            return None
        segment = data[start:end]
        if marker == _SCAN:
            if frame is None or not quantisations.issuperset(frame.quantisations):
                return None
            if frame.is_progressive and restart_interval:
                return None
            if not _takes_scan(frame, segment, codes, missing):
                return None
            num_scans += 1
            if not frame.is_progressive and num_scans > 1:
                return None
            scan_end = _end_of_scan(data, end, restart_interval)
            if scan_end is None:
                return None
            position = scan_end
            continue
        if marker in _FRAMES:
            if frame is not None or (frame := _read_frame(marker, segment)) is None:
                return None
            missing = {component: [_UNSEEN] * _NUM_COEFFICIENTS for component in frame.components}
        elif marker == _CODES:
            if not _takes_codes(segment, codes):
                return None
        elif marker == _QUANTISATIONS:
            if not _takes_quantisations(segment, quantisations):
                return None
        elif marker == _RESTARTS:
            if len(segment) != 2:
                return None
            restart_interval = int.from_bytes(segment, "big")
        elif marker not in _PASSED:  # other frames, a height that follows later, and what should not be here
            return None
        elif marker == _JFIF and segment.startswith(b"JFIF\0"):
            is_jfif = True
        elif marker == _ADOBE and segment.startswith(b"Adobe") and len(segment) >= 12:
            adobe = segment[11]
        position = end
    return None


def _read_frame(marker: int, segment: bytes) -> _Frame | None:
    if len(segment) < 6 or segment[0] != 8 or len(segment) != 6 + 3 * segment[5]:
        return None
    height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
    components, factors = segment[6::3], segment[7::3]
    if not height or not width or len(set(components)) != len(components):
        return None
    if len(components) == 1:
        subsampling = "grey" if factors == b"\x11" else None
    elif len(components) == 3 and factors[1:] == b"\x11\x11":
        subsampling = _SUBSAMPLINGS.get(factors[0])
    else:
        return None
    if subsampling is None:
        return None
    return _Frame(height, width, bytes(components), segment[8::3], subsampling, marker == _PROGRESSIVE)


def _is_ycbcr(frame: _Frame, adobe: int | None, *, is_jfif: bool) -> bool:
    """Whether the samples are grey or YCbCr to every reader. adobe: the transform that its segment names."""
    if frame.subsampling == "grey":
        return True
    if frame.components == b"RGB" or adobe not in (None, 1):
        return False
    return adobe == 1 or is_jfif or frame.components == b"\x01\x02\x03"


def _takes_codes(segment: bytes, codes: set[tuple[int, int]]) -> bool:
    """Whether tables of Huffman codes are ones that can be (T.81, B.2.4.2 and annex C); notes which."""
    position = 0
    while position + 17 <= len(segment):
        kind, number = segment[position] >> 4, segment[position] & 15
        lengths = segment[position + 1 : position + 17]
        values = segment[position + 17 : position + 17 + sum(lengths)]
        if kind > 1 or number > 3 or len(values) != sum(lengths) or len(values) > 256:
            return False
        room = 1
        for num_codes in lengths:
            room = 2 * room - num_codes
            if room < 0:
                return False
        if kind == 0 and values and max(values) > 15:
            return False
        codes.add((kind, number))
        position += 17 + len(values)
    return position == len(segment)


def _takes_quantisations(segment: bytes, quantisations: set[int]) -> bool:
    position = 0
    while position < len(segment):
        precision, number = segment[position] >> 4, segment[position] & 15
        if precision > 1 or number > 3:
            return False
        quantisations.add(number)
        position += 1 + _NUM_COEFFICIENTS * (1 + precision)
    return position == len(segment)


def _takes_scan(
    frame: _Frame, segment: bytes, codes: set[tuple[int, int]], missing: dict[int, list[int]]
) -> bool:
    """Whether a scan's header fits what came before it (ITU-T T.81, B.2.3 and G.1.1.1); notes what it
    brings."""
    if not segment or len(segment) != 4 + 2 * segment[0]:
        return False
    components = segment[1:-3:2]
    first, last, high, low = segment[-3], segment[-2], segment[-1] >> 4, segment[-1] & 15
    if not components or not set(components) <= set(frame.components):
        return False
    is_dc = first == last == 0
    for tables in segment[2:-3:2]:
        # Refining a first coefficient needs no codes.
        if (not frame.is_progressive or (is_dc and not high)) and (0, tables >> 4) not in codes:
            return False
        if not is_dc and (1, tables & 15) not in codes:
            return False
    if not frame.is_progressive:
        return components == frame.components and (first, last, high, low) == (0, 63, 0, 0)
    if not is_dc and (not 0 < first <= last < _NUM_COEFFICIENTS or len(components) != 1):
        return False
    if high and low != high - 1:
        return False
    for component in components:
        bits = missing[component]
        for place in range(first, last + 1):
            if bits[place] != (high or _UNSEEN):
                return False
            bits[place] = low
    return True


def _end_of_scan(data: bytes, start: int, restart_interval: int) -> int | None:
    """Where the first marker stands that ends a scan's bits; None where there is none, or a restart that is
    not its turn."""
    turn = 0
    for found in _MARKER.finditer(data, start):
        position = found.start()
        number = data[position + 1] - 0xD0
        if not 0 <= number < 8:
            return position
        if not restart_interval or number != turn:
            return None
        turn = (turn + 1) % 8
    return None
