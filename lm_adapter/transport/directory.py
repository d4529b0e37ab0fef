"""The reader of an arena's directory: where a key's rows lie, found without asking anybody.

Owns the layout as its readers see it and the checks of its header; ``encoder_service.store.directory`` writes
it and explains it. What is found here is a claim: the rows are copied, and then the control page says whether
the slot still has the record's generation. A search that finds nothing says nothing: the rows may have come
just now.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from typing import NamedTuple

from lm_adapter.transport.mapping import MappingFailed, check_sealed

__all__ = ["DirectoryReader", "Found", "namespace_tag"]

_MAGIC = int.from_bytes(b"VEDIRECT", "little")
_VERSION = 1
_HEADER = struct.Struct("<QQ16sQQQQ")
_CHECKSUM_WORD, _FIRST_PLACE_WORD = 8, 16
_WORD_BYTES = 8
# sequence, key and tag as bytes, generation, offset_bytes, the shape's bytes, content digest, slot, CRC-32.
_RECORD = struct.Struct("<Q40sQQ32s32sII")
_CRC_BYTES = 4
_MAX_PROBES = 64
_LOW = (1 << 32) - 1
SHAPE = struct.Struct("<QIIIIIHH")
"""rows_bytes, t, h, w, num_rows, width, dtype, deepstack levels."""


class Found(NamedTuple):
    """Where rows were when their record was written. shape: ``SHAPE``, packed."""

    slot_index: int
    generation: int
    offset_bytes: int
    shape: bytes
    content_digest: bytes


def namespace_tag(arena_id: bytes, namespace: str) -> bytes:
    """What tells a namespace's entries from those of others that share the arena."""
    return hashlib.blake2b(namespace.encode(), digest_size=8, key=arena_id).digest()


class DirectoryReader:
    """A read-only view of one arena's directory. ``find`` after ``close`` raises ValueError."""

    def __init__(self, fd: int, size_bytes: int, *, arena_id: bytes) -> None:
        """The descriptor stays the caller's. Raises MappingFailed for a directory that is damaged, of another
        version, or another arena's."""
        check_sealed(fd, size_bytes)
        if size_bytes < _FIRST_PLACE_WORD * _WORD_BYTES or size_bytes % _WORD_BYTES:
            raise MappingFailed(f"a directory of {size_bytes} bytes is none")
        self.num_torn = 0
        """Records that were being written when they were read."""
        self._mapping = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        self._words = memoryview(self._mapping).cast("Q")
        header = self._mapping[: _HEADER.size]
        magic, version, found_id, self.instance, self.num_slots, num_places, record_bytes = _HEADER.unpack(
            header
        )
        self._mask = num_places - 1
        self._first_record = (_FIRST_PLACE_WORD + num_places) * _WORD_BYTES
        for what, found, wanted in (
            ("magic number", magic, _MAGIC),
            ("version", version, _VERSION),
            (
                "checksum",
                self._words[_CHECKSUM_WORD],
                int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little"),
            ),
            ("arena", found_id.hex(), arena_id.hex()),
            ("size of a record", record_bytes, _RECORD.size),
            ("number of places modulo a power of two", num_places & self._mask, 0),
            ("size", size_bytes, self._first_record + self.num_slots * _RECORD.size),
        ):
            if found != wanted:
                self.close()
                raise MappingFailed(
                    f"the directory's {what} is {found}, expected {wanted}",
                    details={"found": found, "expected": wanted},
                )

    def find(self, key: bytes, tag: bytes) -> Found | None:
        """key: 32 bytes. tag: ``namespace_tag``. Looks at a bounded number of places."""
        words, mask = self._words, self._mask
        hashed = int.from_bytes(key[:8], "little") ^ int.from_bytes(tag, "little")
        mark = hashed >> 32
        for place in range(hashed, hashed + _MAX_PROBES):
            word = words[_FIRST_PLACE_WORD + (place & mask)]
            if not word:
                return None
            if word >> 32 == mark:
                found = self._record((word & _LOW) - 1, key + tag)
                if found is not None:
                    return found
        return None

    def close(self) -> None:
        """Unmaps. Twice is once."""
        self._words.release()
        self._mapping.close()

    def _record(self, index: int, name: bytes) -> Found | None:
        """The slot's record, where it is whole and this name's."""
        if not 0 <= index < self.num_slots:
            return None
        start = self._first_record + index * _RECORD.size
        data = self._mapping[start : start + _RECORD.size]
        sequence, found, generation, offset_bytes, shape, digest, slot_index, crc = _RECORD.unpack(data)
        if (
            sequence & 1
            or crc != zlib.crc32(data[:-_CRC_BYTES])
            or self._words[start // _WORD_BYTES] != sequence
        ):
            self.num_torn += 1
            return None
        if found != name or slot_index != index:
            return None
        return Found(index, generation, offset_bytes, shape, digest)
