"""The directory of an arena: which keys are resident, in which slots, and the shape of their rows.

A directory is a sealed memfd that readers map with PROT_READ. Its content is a hint: a reader copies the rows
that it found and then compares the slot's generation in the control page, so a stale or torn entry costs one
useless copy.

64-bit little-endian words:

====== ==========================================
word   content
====== ==========================================
0      magic
1      layout version
2..3   arena_id
4      instance, equal to the control page's
5      num_slots
6      num_cells, a power of two
7      bytes of a record
8      BLAKE2b (8 bytes) of words 0..7
9..15  zero
16...  cells: a hash table with linear probing
then   one record per slot
====== ==========================================

The hash of a key in a namespace is the first eight bytes of the key, exclusive-or the namespace's tag. A
cell is one aligned word: 0 if it is empty, else the upper 32 bits of the hash above the slot's index plus 1.
The search starts at the cell given by the low bits of the hash and covers at most MAX_PROBES cells.

A record starts with a sequence word, which is odd while the record is written, and ends with a CRC-32. Stores
to a record may become visible in any order. A reader accepts a record if the sequence was even and equal
before and after its copy, and the CRC is right.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import NamedTuple

from vision_encoder.layout import LAYOUT_VERSION
from vision_encoder.layout.control_page import WORD_BYTES, check, checksum

MAGIC = int.from_bytes(b"VEDIRECT", "little")
HEADER = struct.Struct("<QQ16sQQQQ")
FIRST_CELL_WORD = 16
MAX_PROBES = 64
PLACES_PER_SLOT = 2
# sequence; key, tag, generation, offset_bytes; rows_bytes, t, h, w, num_rows, width, dtype, deepstack levels;
# content digest; slot index, CRC-32
RECORD = struct.Struct("<Q32sQQQ QIIIIIHH 32s II")
CRC_BYTES = 4
DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
_DTYPES = {code: name for name, code in DTYPE_CODES.items()}
_LOW = (1 << 32) - 1


class Record(NamedTuple):
    """What a reader must know about resident rows. tag: ``namespace_tag``; grid: t, h, w in patches."""

    key: bytes
    tag: int
    generation: int
    offset_bytes: int
    rows_bytes: int
    grid: tuple[int, int, int]
    num_rows: int
    width: int
    dtype: str
    num_deepstack_levels: int
    content_digest: bytes
    slot_index: int


class DirectoryHeader(NamedTuple):
    arena_id: bytes
    instance: int
    num_slots: int
    num_cells: int


def num_cells(num_slots: int) -> int:
    """The number of cells: a power of two, so large that at most half of the cells are used."""
    return 1 << (PLACES_PER_SLOT * num_slots - 1).bit_length()


def directory_bytes(num_slots: int) -> int:
    """The size of a directory in bytes."""
    return (FIRST_CELL_WORD + num_cells(num_slots)) * WORD_BYTES + num_slots * RECORD.size


def record_offset(num_slots: int, slot_index: int) -> int:
    """The byte offset of a slot's record; a multiple of 8."""
    return (FIRST_CELL_WORD + num_cells(num_slots)) * WORD_BYTES + slot_index * RECORD.size


def pack_header(arena_id: bytes, instance: int, num_slots: int) -> bytes:
    """Words 0 to 8 of a directory."""
    packed = HEADER.pack(
        MAGIC, LAYOUT_VERSION, arena_id, instance, num_slots, num_cells(num_slots), RECORD.size
    )
    return packed + checksum(packed).to_bytes(WORD_BYTES, "little")


def read_header(directory: bytes | memoryview, size_bytes: int) -> DirectoryHeader:
    """Reads the header of a directory of ``size_bytes``. Raises LayoutError."""
    check("directory's header fits its bytes", size_bytes >= FIRST_CELL_WORD * WORD_BYTES, True)
    packed = bytes(directory[: HEADER.size])
    magic, version, arena_id, instance, num_slots, cells, record_bytes = HEADER.unpack(packed)
    stored = int.from_bytes(directory[HEADER.size : HEADER.size + WORD_BYTES], "little")
    check("directory's magic number", magic, MAGIC)
    check("directory's layout version", version, LAYOUT_VERSION)
    check("directory's checksum", stored, checksum(packed))
    check("directory's record size", record_bytes, RECORD.size)
    check("directory's number of cells", cells, num_cells(num_slots))
    check("directory's size in bytes", size_bytes, directory_bytes(num_slots))
    return DirectoryHeader(arena_id, instance, num_slots, cells)


def namespace_tag(arena_id: bytes, namespace: str) -> int:
    """64 bits that separate the entries of namespaces in one arena: keyed BLAKE2b of the namespace's name."""
    return int.from_bytes(hashlib.blake2b(namespace.encode(), digest_size=8, key=arena_id).digest(), "little")


def name_hash(key: bytes, tag: int) -> int:
    """The 64-bit hash. Its low bits select the first cell; its upper 32 bits are stored in the cell."""
    return int.from_bytes(key[:8], "little") ^ tag


def pack_cell(hashed: int, slot_index: int) -> int:
    """The word of a used cell."""
    return (hashed >> 32) << 32 | slot_index + 1


def cell_slot(word: int) -> int:
    """The slot index in the word of a used cell."""
    return (word & _LOW) - 1


def cell_matches(word: int, hashed: int) -> bool:
    """Whether the word of a used cell may belong to this hash."""
    return word >> 32 == hashed >> 32


def pack_record(record: Record, sequence: int) -> bytes:
    """Packs a record. sequence: even. Raises struct.error for a value out of range, and KeyError for a dtype
    without a code."""
    packed = RECORD.pack(
        sequence,
        record.key,
        record.tag,
        record.generation,
        record.offset_bytes,
        record.rows_bytes,
        *record.grid,
        record.num_rows,
        record.width,
        DTYPE_CODES[record.dtype],
        record.num_deepstack_levels,
        record.content_digest,
        record.slot_index,
        0,
    )[:-CRC_BYTES]
    return packed + zlib.crc32(packed).to_bytes(CRC_BYTES, "little")


def read_record(data: bytes, sequence_after: int) -> Record | None:
    """Unpacks the copy of a record; None if it was being written or its dtype code is unknown.
    sequence_after: the record's sequence word, loaded after the copy."""
    sequence, key, tag, generation, offset, *shape, digest, slot, crc = RECORD.unpack(data)
    rows_bytes, t, h, w, num_rows, width, dtype, levels = shape
    name = _DTYPES.get(dtype)
    is_torn = sequence != sequence_after or sequence_after & 1 or crc != zlib.crc32(data[:-CRC_BYTES])
    if is_torn or name is None:
        return None
    return Record(
        key, tag, generation, offset, rows_bytes, (t, h, w), num_rows, width, name, levels, digest, slot
    )
