"""Baseline JPEG files, straight from the file's bytes to RGB, where simplejpeg is installed.

Owns which files take this way, all of whose pixels are then those that Pillow gives: both are libjpeg-turbo
with its exact inverse transform and its smooth chroma upsampling, and only the kinds of file are taken on
which versions of that library agree. Pillow stays the one that opens a file, refuses it and says why;
whatever is not taken here, for whatever reason, is decoded by it.

Why at all: Pillow's decoder fills four bytes a pixel and hands them to Python in two copies more, with the
interpreter's lock held. This one fills the array itself, without the lock: half the time of a core, and
threads that decode side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

# Upsampled in the same way by every libjpeg-turbo; other ratios are rare, and some of them newer.
_SUBSAMPLINGS = frozenset({"444", "422", "420"})
# Start of frame: baseline and extended sequential with Huffman codes. In a progressive file that lacks its
# last scans versions of the library smooth differently.
_SEQUENTIAL = frozenset({0xC0, 0xC1})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# By EXIF orientation, of [H, W].
_TURNS: dict[object, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.T,
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].T,
    8: np.rot90,
}
# Markers without a length, between segments or of the image's end and start.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
_SCAN, _APP1, _APP2 = 0xDA, 0xE1, 0xE2
_ORIENTATION = 0x0112


def decode_jpeg(data: bytes, height: int, width: int, out: np.ndarray | None = None) -> np.ndarray | None:
    """uint8 [height, width, 3], or None for a file that Pillow has to decode, or refuse: one of another kind,
    size or with anything wrong in it. height, width: pixels before any rotation, as the caller knows them.
    out: memory of so many bytes to decode into; what it has after None says nothing."""
    if simplejpeg is None or not _is_sequential(data):
        return None
    try:
        header = simplejpeg.decode_jpeg_header(data, strict=True)
        if header[:3] != (height, width, "YCbCr") or header[3] not in _SUBSAMPLINGS:
            return None
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, buffer=out, strict=True
        )
    except ValueError:  # also of what libjpeg only warns of, and Pillow may let pass
        return None
    return pixels


def upright_pixels(pixels: np.ndarray, orientation: object) -> np.ndarray:
    """uint8 [H, W, 3] as the orientation says, contiguous. By numpy, which copies without the interpreter's
    lock and, unlike torch, starts no threads of its own for each worker that copies."""
    turn = _TURNS.get(orientation)
    if turn is None:
        return pixels
    # A pixel as one element moves in one piece, twice as fast as byte by byte.
    turned = np.ascontiguousarray(turn(pixels.view("V3")[..., 0]))
    return turned.view(np.uint8).reshape(*turned.shape, 3)


class JpegHead(NamedTuple):
    """What stands before a file's pixels. height, width: before any rotation; orientation: EXIF's, 1 where
    there is none; is_sequential: whether its one frame is of three components of eight bits in sequential
    Huffman code."""

    height: int
    width: int
    orientation: int
    is_sequential: bool


def read_jpeg_head(data: bytes) -> JpegHead | None:
    """The head of a plain JPEG file, read as Pillow would read it and in a tenth of its time; None for
    whatever is unusual about it: a second frame or EXIF segment, XMP, several pictures, damage."""
    if data[:2] != b"\xff\xd8":
        return None
    frame: JpegHead | None = None
    orientation: int | None = None
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF or marker in _BARE:  # fill, and what should not stand here
            return None
        start, end = position + 4, position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == _SCAN:
            return None if frame is None else frame._replace(orientation=orientation or 1)
        if end < start or end > len(data):
            return None
        if marker in _FRAMES:
            if frame is not None or end < start + 6:
                return None
            sides = (
                int.from_bytes(data[start + 1 : start + 3], "big"),
                int.from_bytes(data[start + 3 : start + 5], "big"),
            )
            if not all(sides) or data[start] != 8 or data[start + 5] not in (1, 3):
                return None
            frame = JpegHead(*sides, 1, marker in _SEQUENTIAL and data[start + 5] == 3)
        elif marker == _APP1:
            orientation = None if orientation is not None else _exif_orientation(data[start:end])
            if orientation is None:
                return None
        elif marker == _APP2 and data[start : start + 4] == b"MPF\0":
            return None
        position = end
    return None


def _exif_orientation(segment: bytes) -> int | None:
    """The orientation in an EXIF segment, 1 where it names none; None for one that is not read here."""
    tiff = segment[6:]
    order: Literal["little", "big"]
    if segment[:6] != b"Exif\0\0" or len(tiff) < 14:
        return None
    if tiff[:4] == b"II*\0":
        order = "little"
    elif tiff[:4] == b"MM\0*":
        order = "big"
    else:
        return None
    first = int.from_bytes(tiff[4:8], order)
    count = int.from_bytes(tiff[first : first + 2], order)
    if first < 8 or first + 2 + 12 * count > len(tiff):
        return None
    for at in range(first + 2, first + 2 + 12 * count, 12):
        if int.from_bytes(tiff[at : at + 2], order) != _ORIENTATION:
            continue
        kind, number = (
            int.from_bytes(tiff[at + 2 : at + 4], order),
            int.from_bytes(tiff[at + 4 : at + 8], order),
        )
        value = int.from_bytes(tiff[at + 8 : at + 10], order)
        return value if (kind, number) == (3, 1) and 1 <= value <= 8 else None
    return 1


def _is_sequential(data: bytes) -> bool:
    """Whether the first frame is one of three components of eight bits in sequential Huffman code."""
    position = 2
    while position + 10 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # fill
            position += 1
        elif marker in _BARE:
            position += 2
        elif marker in _FRAMES:
            return marker in _SEQUENTIAL and data[position + 4] == 8 and data[position + 9] == 3
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False
