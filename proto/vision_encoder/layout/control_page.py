"""The control page of an arena: the arena's identity, whether it is open, and one generation per slot.

A control page is a sealed memfd that readers map with PROT_READ. 64-bit little-endian words:

====== ================================================================
word   content
====== ================================================================
0      magic
1      layout version
2..3   arena_id
4      instance
5      num_slots
6..11  probe: offset_bytes, num_bytes, SHA-256 of these bytes of the arena
12     BLAKE2b (8 bytes) of words 0..11
13     closed: 0 or 1
14..15 zero
16...  one generation per slot
====== ================================================================

Generations. Even: the slot has no readable rows. Odd: its rows are complete. A generation only grows and
starts at a random value, so a value never occurs twice. The protocol is a seqlock whose writer never waits:

- Writer: makes the generation even, then a fence; now the memory range may be allocated and written again.
  When the new rows are complete (after waiting for their device event): a fence, then makes the generation
  odd.
- Reader: copies the rows, waits on the host until the copy is complete, then a fence, then compares instance,
  closed flag and generation with those of the place that it was given. If they are equal, the copy is valid;
  otherwise it is discarded.

Correctness: if a copy contains a byte of the next content, that byte was written after the store of the even
value. The reader loads the generation after its copy, so it sees the even value or a later one.
Generations are aligned words, which x86-64 and aarch64 load and store atomically.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from typing import NamedTuple

from vision_encoder.layout import LAYOUT_VERSION

MAGIC = int.from_bytes(b"VEARENA\0", "little")
HEADER = struct.Struct("<QQ16sQQQQ32s")
WORD_BYTES = 8
INSTANCE_WORD, CLOSED_WORD, FIRST_GENERATION_WORD = 4, 13, 16

_FENCE = threading.Lock()


class LayoutError(ValueError):
    """The bytes do not have the expected layout. The message has the found and the expected value."""


class Probe(NamedTuple):
    """Bytes of the arena that never change, with which a reader tests its mapping."""

    offset_bytes: int
    num_bytes: int
    sha256: bytes

    def matches(self, data: bytes) -> bool:
        """Whether ``data``, read through a mapping at ``offset_bytes``, equals what the encoder wrote."""
        return len(data) == self.num_bytes and hashlib.sha256(data).digest() == self.sha256


class PageHeader(NamedTuple):
    arena_id: bytes
    instance: int
    num_slots: int
    probe: Probe


def page_bytes(num_slots: int) -> int:
    """The size of a control page in bytes."""
    return (FIRST_GENERATION_WORD + num_slots) * WORD_BYTES


def checksum(header: bytes) -> int:
    """BLAKE2b of the header, 8 bytes, as a little-endian integer."""
    return int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little")


def pack_header(header: PageHeader) -> bytes:
    """Words 0 to 12 of a control page."""
    packed = HEADER.pack(
        MAGIC, LAYOUT_VERSION, header.arena_id, header.instance, header.num_slots, *header.probe
    )
    return packed + checksum(packed).to_bytes(WORD_BYTES, "little")


def read_header(page: bytes | memoryview, size_bytes: int) -> PageHeader:
    """Reads the header of a page of ``size_bytes``. Raises LayoutError for a wrong magic, version, checksum
    or size."""
    if size_bytes < page_bytes(0) or size_bytes % WORD_BYTES:
        raise LayoutError(f"a control page has {size_bytes} bytes, needs {page_bytes(0)} and a multiple of 8")
    packed = bytes(page[: HEADER.size])
    magic, version, arena_id, instance, num_slots, offset_bytes, num_bytes, sha256 = HEADER.unpack(packed)
    stored = int.from_bytes(page[HEADER.size : HEADER.size + WORD_BYTES], "little")
    check("control page's magic number", magic, MAGIC)
    check("control page's layout version", version, LAYOUT_VERSION)
    check("control page's checksum", stored, checksum(packed))
    check("control page's size in bytes", size_bytes, page_bytes(num_slots))
    return PageHeader(arena_id, instance, num_slots, Probe(offset_bytes, num_bytes, sha256))


def check(what: str, found: object, expected: object) -> None:
    """Raises LayoutError unless ``found`` equals ``expected``."""
    if found != expected:
        raise LayoutError(f"the {what} is {found}, expected {expected}")


def fence() -> None:
    """A full memory fence: orders this thread's earlier accesses before its later ones.

    It acquires and releases a lock twice. The first release keeps earlier accesses before it, the second
    acquire keeps later accesses after it, and aarch64 does not reorder a release with a following acquire. On
    x86-64 each locked instruction is a full barrier.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass
