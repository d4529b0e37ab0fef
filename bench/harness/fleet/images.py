"""The image files that the fleet's callers send.

Owns their making: small PNG files that follow from a number, padded to a size where a test wants a large
body, and marks that the test's encoders act on. Padding and marks are private chunks, which decoders skip.
"""

from __future__ import annotations

import io
import random
import struct
import zlib

from PIL import Image

CRASH = b"fleet-crash"
"""In a file: its encoder dies when it decodes it."""
HOLD = b"fleet-hold:"
"""In a file, with two digits after it: decoding takes that many seconds more, the first time in the fleet."""
SIDE = 32
MIB = 1 << 20
END_CHUNK_BYTES = 12


def image_file(number: int, num_bytes: int = 0, mark: bytes = b"") -> bytes:
    """The PNG file of a number. num_bytes: of the whole file, where that is more than the image needs."""
    pixels = random.Random(number).randbytes(SIDE * SIDE * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), pixels).save(out, "PNG", compress_level=1)
    whole = out.getvalue()
    head, end = whole[:-END_CHUNK_BYTES], whole[-END_CHUNK_BYTES:]
    if mark:
        head += chunk(mark)
    left = num_bytes - len(head) - len(end) - END_CHUNK_BYTES
    if left > 0:
        head += chunk(bytes(left))
    return head + end


def chunk(data: bytes) -> bytes:
    kind = b"veFl"  # ancillary, private, safe to copy
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
