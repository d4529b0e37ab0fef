"""The control page beside each arena: which arena it is, whether it is open, and one generation per slot.

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
starts at a random value, so a value never returns. The protocol is a seqlock whose writer never waits:

- Writer: the generation becomes even, then a fence, then the memory range may be allocated and written again.
  When the new rows are complete (their device event was waited for), a fence, then the generation becomes
  odd.
- Reader: copies the rows, waits on the host until the copy is complete, then a fence, then compares instance,
  closed flag and generation with the place it was given. Equal: the copy is whole. Different: the copy is
  discarded.

Why it holds: if the copy saw one byte of the next content, that byte was written after the even store, and
the reader's load of the generation comes after its copy, so it sees the even value or a later one.
Generations are aligned words, which x86-64 and aarch64 load and store whole.
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
CLOSED_WORD, FIRST_GENERATION_WORD = 13, 16

_FENCE = threading.Lock()


class LayoutError(ValueError):
    """These bytes are not the layout that was expected. ``found`` and ``expected`` are in the message."""


class Probe(NamedTuple):
    """Bytes of the arena that never change; a reader tests its mapping with them."""

    offset_bytes: int
    num_bytes: int
    sha256: bytes

    def matches(self, data: bytes) -> bool:
        """Whether ``data``, read through a mapping at ``offset_bytes``, is what the encoder wrote."""
        return len(data) == self.num_bytes and hashlib.sha256(data).digest() == self.sha256


class PageHeader(NamedTuple):
    arena_id: bytes
    instance: int
    num_slots: int
    probe: Probe


def page_bytes(num_slots: int) -> int:
    """Size of a control page."""
    return (FIRST_GENERATION_WORD + num_slots) * WORD_BYTES


def checksum(header: bytes) -> int:
    """BLAKE2b in 64 bits, little-endian."""
    return int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little")


def pack_header(header: PageHeader) -> bytes:
    """Words 0 to 12."""
    packed = HEADER.pack(
        MAGIC, LAYOUT_VERSION, header.arena_id, header.instance, header.num_slots, *header.probe
    )
    return packed + checksum(packed).to_bytes(WORD_BYTES, "little")


def read_header(page: bytes | memoryview, size_bytes: int) -> PageHeader:
    """The header of a page of ``size_bytes``. Raises LayoutError for another magic, version or size."""
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
    """Raises LayoutError unless both are equal."""
    if found != expected:
        raise LayoutError(f"the {what} is {found}, expected {expected}")


def fence() -> None:
    """A full memory fence: accesses of this thread before it are ordered before those after it.

    Two rounds of a lock. The release of the first keeps earlier accesses before it, the acquire of the
    second keeps later ones behind it, and aarch64 does not reorder a release with a following acquire; on
    x86-64 each locked instruction is a full barrier.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass
