"""One entry of the shared tier: its name, its header, its checksum.

Owns the format that replicas of one release read and write, and what is believed of it: nothing without a
checksum under the secret that replicas share. Where entries lie is ``shared_tier_server``'s, when they are
read and written ``shared_tier``'s.

An entry is ``checksum | fields | rows``: 32 bytes, FIELDS little-endian, and the rows as they lie in memory,
row-major. Names and checksums are BLAKE3 in keyed mode. The name covers namespace and embedding key, the
checksum name, fields and rows, so that nobody without the secret can tell what an entry is of, make one, or
put one in another's place. The rows themselves are not encrypted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3

from encoder_service.types import EncodedItem, Grid

VERSION = 1
MAGIC = b"VEST"
# magic, version, dtype, deepstack levels; grid, rows, width; bytes of rows, unix milliseconds; digest.
FIELDS = struct.Struct("<4sHBB3IIIQQ32s")
CHECKSUM_BYTES = 32
HEADER_BYTES = CHECKSUM_BYTES + FIELDS.size

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

NAME_CONTEXT = "vision-encoder 2025 shared tier v1: names of entries"
CHECKSUM_CONTEXT = "vision-encoder 2025 shared tier v1: checksums of entries"


class UnusableEntry(Exception):
    """Bytes that are no entry of ours. outcome: how that counts. is_ours: written under a name that is, in a
    format that this release knows, and therefore of no use to anybody."""

    def __init__(self, outcome: str, message: str, *, is_ours: bool) -> None:
        super().__init__(message)
        self.outcome, self.is_ours = outcome, is_ours


def corrupt(message: str) -> UnusableEntry:
    return UnusableEntry("corrupt", message, is_ours=True)


class Layout(Protocol):
    """What the rows of the model served look like; its tower is one. width: elements of a row, deepstack
    included."""

    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def num_deepstack_levels(self) -> int: ...
    def num_rows(self, grid: Grid) -> int: ...


@dataclass(frozen=True)
class Header:
    """checksum: claimed. fields: the bytes that it covers."""

    grid: Grid
    num_rows: int
    width: int
    dtype: torch.dtype
    num_deepstack_levels: int
    num_bytes: int
    written_unix_ms: int
    content_digest: bytes
    checksum: bytes
    fields: bytes

    def check_layout(self, layout: Layout) -> None:
        """Raises UnusableEntry unless these are rows of the model served, all of them."""
        found = (self.num_rows, self.width, self.dtype, self.num_deepstack_levels)
        needed = (layout.num_rows(self.grid), layout.width, layout.dtype, layout.num_deepstack_levels)
        num_bytes = self.num_rows * self.width * self.dtype.itemsize
        if found != needed or self.num_bytes != num_bytes:
            raise corrupt(f"rows, width, dtype, levels are {found}, needed are {needed}")


class Seal:
    """Names and checksums under a secret."""

    def __init__(self, secret: bytes) -> None:
        self._name_key = blake3(secret, derive_key_context=NAME_CONTEXT).digest()
        self._checksum_key = blake3(secret, derive_key_context=CHECKSUM_CONTEXT).digest()

    def name(self, namespace: str, key: bytes) -> bytes:
        """32 bytes that stand for a namespace's embedding key."""
        text = namespace.encode()
        return bytes(blake3(struct.pack("<I", len(text)) + text + key, key=self._name_key).digest())

    def checksum(self, name: bytes, fields: bytes, rows: memoryview) -> bytes:
        """32 bytes over an entry and the name that it lies under. Takes a millisecond for megabytes."""
        hasher = blake3(name + fields, key=self._checksum_key)
        hasher.update(rows)
        return bytes(hasher.digest())


def entry_header(seal: Seal, name: bytes, item: EncodedItem, written_unix_ms: int) -> bytes:
    """HEADER_BYTES in front of the item's rows, which are hashed for it."""
    spec = item.spec
    fields = FIELDS.pack(
        MAGIC,
        VERSION,
        DTYPE_CODES[spec.dtype],
        spec.num_deepstack_levels,
        *item.grid,
        spec.num_rows,
        spec.width,
        spec.num_bytes,
        written_unix_ms,
        item.content_digest,
    )
    return seal.checksum(name, fields, rows_view(item.rows)) + fields


def read_header(data: bytes) -> Header:
    """The header that an entry begins with. Nothing of it is proven yet. Raises UnusableEntry."""
    if len(data) < HEADER_BYTES:
        raise corrupt(f"the entry has {len(data)} bytes, its header alone {HEADER_BYTES}")
    checksum, fields = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:HEADER_BYTES]
    magic, version, dtype_code, levels, t, h, w, num_rows, width, num_bytes, written, digest = FIELDS.unpack(
        fields
    )
    if magic != MAGIC or version != VERSION:
        message = f"the entry is of format {magic!r} {version}, this release reads {MAGIC!r} {VERSION}"
        raise UnusableEntry("foreign", message, is_ours=False)
    dtype = DTYPES.get(dtype_code)
    if dtype is None:
        raise corrupt(f"dtype code {dtype_code} has no meaning")
    return Header(Grid(t, h, w), num_rows, width, dtype, levels, num_bytes, written, digest, checksum, fields)


def open_entry(
    seal: Seal, name: bytes, key: bytes, header: Header, pieces: Sequence[bytes | memoryview]
) -> EncodedItem:
    """The item with rows of their own, once the checksum has proven them. pieces: the rows' bytes in order.
    Copies and hashes all of them: not for the event loop. Raises UnusableEntry."""
    num_bytes = sum(map(len, pieces))
    if num_bytes != header.num_bytes:
        raise corrupt(f"the rows have {num_bytes} bytes, the header says {header.num_bytes}")
    rows = torch.empty(header.num_rows, header.width, dtype=header.dtype)
    target, offset = rows.view(torch.uint8).reshape(-1).numpy(), 0
    for piece in pieces:  # numpy copies without the interpreter's lock, a memoryview with it
        target[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
        offset += len(piece)
    if seal.checksum(name, header.fields, rows_view(rows)) != header.checksum:
        raise corrupt(f"the checksum of {num_bytes} bytes of rows is wrong")
    return EncodedItem(key, header.content_digest, header.grid, rows, header.num_deepstack_levels)


def rows_view(rows: torch.Tensor) -> memoryview:
    """The bytes of contiguous rows on the host, without a copy."""
    return rows.detach().view(torch.uint8).reshape(-1).numpy().data
