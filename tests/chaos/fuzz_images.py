"""Image files that are wrong in ways that know the format.

Owns the making of files: good ones of every format, and mutations of them that keep enough of the structure
right (signatures, lengths, checksums) to get past the first look of a decoder. All of it follows from one
random generator.
"""

from __future__ import annotations

import io
import random
import struct
import zlib

from PIL import Image

from tests.unit.ingest.image_files import bombs, png_chunk

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA")
MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "L", "P", "1", "I;16", "LA"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "RGBA", "L", "F", "CMYK"),
    "PPM": ("RGB", "L"),
    "TGA": ("RGB", "RGBA", "L"),
}
EDGES = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def good_image(rng: random.Random) -> tuple[str, bytes]:
    """A file that decodes, and its format."""
    kind = rng.choice(FORMATS)
    mode = rng.choice(MODES[kind])
    size = (rng.randint(1, 96), rng.randint(1, 96))
    image = noise(rng, mode, size)
    out = io.BytesIO()
    options: dict[str, object] = {}
    if kind == "JPEG":
        options = {"quality": rng.randint(1, 95), "progressive": rng.random() < 0.5}
        if rng.random() < 0.5:
            exif = Image.Exif()
            exif[0x0112] = rng.choice((1, 3, 6, 8, 9, 0, 65535))
            options["exif"] = exif.tobytes()
    if kind == "WEBP":
        options = {"lossless": rng.random() < 0.5}
    if kind in ("GIF", "WEBP", "TIFF") and rng.random() < 0.3:
        frames = [noise(rng, mode, size) for _ in range(rng.randint(1, 3))]
        options |= {"save_all": True, "append_images": frames}
    image.save(out, kind, **options)
    return kind, out.getvalue()


def noise(rng: random.Random, mode: str, size: tuple[int, int]) -> Image.Image:
    if mode == "I;16":
        return Image.frombytes("I;16", size, rng.randbytes(size[0] * size[1] * 2))
    grey = Image.frombytes("L", size, rng.randbytes(size[0] * size[1]))
    return grey.convert("RGB").convert(mode) if mode == "P" else grey.convert(mode)


def bad_image(rng: random.Random) -> bytes:
    """A file that somebody might send."""
    kind, data = good_image(rng)
    if rng.random() < 0.05:
        return rng.choice(list(bombs(rng.choice((5000, 16_383)), rng.choice((1, 16_383))).values()))
    by_format = {"PNG": mutate_png, "JPEG": mutate_jpeg}
    generic = (truncate, flip, overwrite_number, splice, repeat_part)
    for _ in range(rng.randint(1, 3)):
        mutate = by_format.get(kind) if rng.random() < 0.6 else None
        data = (mutate or rng.choice(generic))(rng, data)
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
    _, other = good_image(rng)
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


# -- JPEG ----------------------------------------------------------------------------------------------


def jpeg_segments(data: bytes) -> list[bytes]:
    """Segments before the scan, and the scan with all that follows."""
    found, at = [data[:2]], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, at + 2)
        found.append(data[at : at + 2 + length])
        at += 2 + length
    return [*found, data[at:]]


def mutate_jpeg(rng: random.Random, data: bytes) -> bytes:
    segments = jpeg_segments(data)
    at = rng.randrange(len(segments))
    match rng.randrange(6):
        case 0:
            for index, segment in enumerate(segments):
                if len(segment) > 9 and segment[1] in (0xC0, 0xC1, 0xC2):
                    frame = bytearray(segment)
                    struct.pack_into(">HH", frame, 5, rng.choice(EDGES) & 0xFFFF, rng.choice(EDGES) & 0xFFFF)
                    frame[9] = rng.choice((frame[9], 0, 1, 3, 4, 255))
                    segments[index] = bytes(frame)
        case 1:
            segments.insert(at, segments[at])
        case 2:
            del segments[at]
        case 3:
            segments[at] = segments[at][:4] + flip(rng, segments[at][4:])
        case 4:
            segments[-1] = segments[-1][:12] + flip(rng, segments[-1][12:])
        case _:
            body = rng.randbytes(rng.randint(0, 200))
            marker = rng.choice((0xE0, 0xE1, 0xE2, 0xFE, 0xDB, 0xC4, 0xDD, 0xC3, 0xC9))
            segments.insert(1, struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body)
    return b"".join(segments)
