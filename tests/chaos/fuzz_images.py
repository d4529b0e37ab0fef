"""Image files that are wrong in ways that know the format.

Owns mutations of good files that keep enough of the structure right (signatures, lengths, checksums) to get
past the first look of a decoder. All of it follows from one random generator.
"""

from __future__ import annotations

import functools
import random
import struct
import zlib

from tests.unit.ingest.image_files import bombs, every_file, png_chunk

EDGES = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
PNG = b"\x89PNG"


@functools.cache
def good_images() -> tuple[bytes, ...]:
    return tuple(every_file().values())


def bad_image(rng: random.Random) -> bytes:
    """A file that somebody might send."""
    data = rng.choice(good_images())
    if rng.random() < 0.05:
        return rng.choice(list(bombs(rng.choice((5000, 16_383)), rng.choice((1, 16_383))).values()))
    generic = (truncate, flip, overwrite_number, splice, repeat_part)
    for _ in range(rng.randint(1, 3)):
        is_png = data.startswith(PNG) and rng.random() < 0.6
        data = (mutate_png if is_png else rng.choice(generic))(rng, data)
    return data


# -- any format ----------------------------------------------------------------------------------------


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def flip(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 1 + len(out) // 50)):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite_number(rng: random.Random, data: bytes) -> bytes:
    """An edge case as a number of two or four bytes, early in the file: where sizes and offsets are."""
    if len(data) < 8:
        return data
    out = bytearray(data)
    width = rng.choice(("<I", ">I", "<H", ">H"))
    at = rng.randrange(min(len(out) - 4, 200))
    number = rng.choice(EDGES) & (0xFFFF if width[1] == "H" else 0xFFFFFFFF)
    struct.pack_into(width, out, at, number)
    return bytes(out)


def splice(rng: random.Random, data: bytes) -> bytes:
    """The head of one file with the tail of another."""
    other = rng.choice(good_images())
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def repeat_part(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:end] + data[start:end] * rng.randint(1, 20) + data[end:]


# -- PNG -----------------------------------------------------------------------------------------------


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def mutate_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks moved, doubled, rewritten; their checksums right again."""
    chunks = png_chunks(data)
    if not chunks:
        return data
    at = rng.randrange(len(chunks))
    kind, body = chunks[at]
    match rng.randrange(7):
        case 0:
            header = bytearray((chunks[0][1] + bytes(13))[:13])
            struct.pack_into(">II", header, 0, rng.choice(EDGES), rng.choice(EDGES))
            chunks[0] = (b"IHDR", bytes(header))
        case 1:
            header = bytearray((chunks[0][1] + bytes(13))[:13])
            header[8:13] = rng.randbytes(5) if rng.random() < 0.5 else bytes((16, 6, 0, 0, 1))
            chunks[0] = (b"IHDR", bytes(header))
        case 2:
            chunks.insert(rng.randint(0, len(chunks)), (kind, body))
        case 3:
            del chunks[at]
        case 4:
            chunks[at] = (kind, flip(rng, body))
        case 5:
            chunks = [
                (name, zlib.compress(rng.randbytes(50)) if name == b"IDAT" else old) for name, old in chunks
            ]
        case _:
            name = rng.choice(
                (b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"tRNS", b"acTL", b"fcTL", b"PLTE", b"qqQq")
            )
            swollen = b"a\0\0" + zlib.compress(bytes(rng.randint(0, 4_000_000)))
            chunks.insert(1, (name, swollen if rng.random() < 0.5 else rng.randbytes(40)))
    return data[:8] + b"".join(png_chunk(*chunk) for chunk in chunks)
