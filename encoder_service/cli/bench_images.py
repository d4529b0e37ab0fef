"""The images that ``bench`` sends: generated ones or the user's files, and which one comes next.

Generated images and the user's JPEG and PNG files get a comment with a number of their own, which makes them
new content at no cost for the decoder. Other files are sent as they are."""

from __future__ import annotations

import io
import itertools
import random
import re
import secrets
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAX_SIDE = 16_384
NUM_PICTURES = 8
"""Of each size. They differ in what they show, and so in bytes and in the time of decoding."""
MAX_FILE_BYTES = 1 << 30
"""Of all files that are held in memory."""
MAX_RECENT = 1000
"""A repeat is of one of this many latest contents."""
DETAIL = 24
"""Pixels between the colours that a picture is interpolated from: about as large a file as a photograph's."""
_JPEG_START, _PNG_START = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_IHDR_END = 33


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Width and height of each size in ``448x448,1024x768``. Raises ValueError."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", part.strip())
        width, height = (int(match[1]), int(match[2])) if match else (0, 0)
        if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
            raise ValueError(f"{part!r} is no size, needs WIDTHxHEIGHT of 1 to {MAX_SIDE} pixels: 448x448")
        sizes.append((width, height))
    return sizes


def generated(sizes: Sequence[tuple[int, int]], *, as_png: bool) -> list[bytes]:
    """Files of these sizes, in turn. JPEG needs Pillow: raises MissingDependency."""
    generator = np.random.default_rng(secrets.randbits(64))
    make = png_file if as_png else jpeg_file
    return [make(picture(generator, *size)) for _ in range(NUM_PICTURES) for size in sizes]


def picture(generator: np.random.Generator, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: smooth colours with a little noise."""
    coarse = generator.integers(0, 256, (height // DETAIL + 2, width // DETAIL + 2, 3)).astype(np.float32)
    for axis, length in enumerate((height, width)):
        at = np.linspace(0, coarse.shape[axis] - 1.001, length)
        low = at.astype(int)
        share = (at - low).astype(np.float32).reshape([-1 if each == axis else 1 for each in range(3)])
        coarse = coarse.take(low, axis) * (1 - share) + coarse.take(low + 1, axis) * share
    noise = generator.normal(0, 3.0, coarse.shape).astype(np.float32)
    pixels: np.ndarray = np.clip(coarse + noise, 0, 255).astype(np.uint8)
    return pixels


def jpeg_file(pixels: np.ndarray) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        from lm_adapter import MissingDependency

        raise MissingDependency("pillow", "generating JPEG (--png does without)") from error
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def png_file(pixels: np.ndarray) -> bytes:
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(lines.tobytes(), 1)
    return _PNG_START + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_comment(data: bytes, text: bytes) -> bytes:
    """The same picture with a comment, if the file is JPEG or PNG; any other file as it is."""
    if data.startswith(_JPEG_START):
        return b"".join((data[:2], b"\xff\xfe", struct.pack(">H", 2 + len(text)), text, data[2:]))
    if data.startswith(_PNG_START):
        return b"".join((data[:_IHDR_END], _chunk(b"tEXt", b"Comment\0" + text), data[_IHDR_END:]))
    return data


def read_files(names: Sequence[str]) -> tuple[list[bytes], int]:
    """The files' bytes as far as they fit in MAX_FILE_BYTES, and the number of files that do not. Raises
    OSError."""
    files: list[bytes] = []
    num_bytes = 0
    for name in names:
        data = Path(name).read_bytes()
        num_bytes += len(data)
        if num_bytes > MAX_FILE_BYTES and files:
            break
        files.append(data)
    return files, len(names) - len(files)


class Contents:
    """What is sent next. repeats: the share of contents that were sent before."""

    def __init__(self, files: Sequence[bytes], repeats: float) -> None:
        self._files = files
        self._repeats = repeats
        self._random = random.Random()  # noqa: S311 - only mixes a load
        self._run = secrets.token_hex(8)  # contents of no other run
        self._numbers = itertools.count()
        self._recent: deque[int] = deque(maxlen=MAX_RECENT)

    def next(self) -> bytes:
        if self._recent and self._random.random() < self._repeats:
            return self._file(self._random.choice(self._recent))
        number = next(self._numbers)
        self._recent.append(number)
        return self._file(number)

    def _file(self, number: int) -> bytes:
        return with_comment(self._files[number % len(self._files)], f"{self._run}-{number}".encode())
