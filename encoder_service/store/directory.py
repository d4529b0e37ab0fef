"""Writes the directory of an arena: which keys are stored, in which slot, with which shape.

Owns the cells of the hash table and the order of the stores into them. ``vision_encoder.layout.directory``
describes the layout. ``arena`` decides when a slot is listed.
"""

from __future__ import annotations

import struct

from encoder_service.errors import InternalError
from encoder_service.store.host_memory import SealedFile
from vision_encoder.layout.control_page import WORD_BYTES, fence
from vision_encoder.layout.directory import (
    FIRST_CELL_WORD,
    MAX_PROBES,
    RECORD,
    Record,
    cell_slot,
    directory_bytes,
    name_hash,
    num_cells,
    pack_cell,
    pack_header,
    pack_record,
    record_offset,
)
from vision_encoder.layout.keys import DIGEST_BYTES


class Directory:
    """The only writer of the table. Not thread-safe."""

    def __init__(self, *, arena_id: bytes, instance: int, num_slots: int) -> None:
        """arena_id, instance: those of the control page. Raises ConfigurationError if the host has too little
        memory."""
        self.num_slots = num_slots
        self.num_cells = num_cells(num_slots)
        self._mask = self.num_cells - 1
        self._file = SealedFile("vision-encoder-directory", directory_bytes(num_slots))
        packed = pack_header(arena_id, instance, num_slots)
        self._file.mapping[: len(packed)] = packed
        self._words = memoryview(self._file.mapping).cast("Q")
        self._listed: dict[int, Record] = {}  # by slot
        self._slots: dict[tuple[int, bytes], int] = {}  # by tag and key
        fence()

    def __len__(self) -> int:
        """Number of listed slots."""
        return len(self._listed)

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def put(self, record: Record) -> bool:
        """Lists readable rows, replacing rows of the same name. Returns False if the table has no free cell
        near the name, or if a value does not fit the record."""
        self.remove(record.slot_index)
        before = self._slots.get((record.tag, record.key))
        if before is not None:
            self.remove(before)
        hashed = name_hash(record.key, record.tag)
        cell = self._free_cell(hashed)
        if cell is None or not self._write(record):
            return False
        self._listed[record.slot_index] = record
        self._slots[record.tag, record.key] = record.slot_index
        self._words[FIRST_CELL_WORD + cell] = pack_cell(hashed, record.slot_index)
        fence()
        return True

    def remove(self, slot_index: int) -> None:
        """Unlists the slot. Does nothing if it is not listed."""
        record = self._listed.get(slot_index)
        if record is None:
            return
        self._open(slot_index)
        self._vacate(self._cell_of(record))
        del self._listed[slot_index], self._slots[record.tag, record.key]
        fence()

    def export_fd(self) -> int:
        """A new descriptor that can be mapped with PROT_READ only. The caller closes it."""
        return self._file.export_fd()

    def close(self) -> None:
        """Unlists everything. Idempotent."""
        for slot_index in list(self._listed):
            self.remove(slot_index)
        self._file.close()

    # -- cells ----------------------------------------------------------------------------------------

    def _free_cell(self, hashed: int) -> int | None:
        for step in range(MAX_PROBES):
            cell = (hashed + step) & self._mask
            if not self._words[FIRST_CELL_WORD + cell]:
                return cell
        return None

    def _cell_of(self, record: Record) -> int:
        hashed = name_hash(record.key, record.tag)
        content = pack_cell(hashed, record.slot_index)
        for step in range(MAX_PROBES):
            cell = (hashed + step) & self._mask
            if self._words[FIRST_CELL_WORD + cell] == content:
                return cell
        raise InternalError(f"slot {record.slot_index} is listed and has no cell", slot=record.slot_index)

    def _vacate(self, cell: int) -> None:
        """Frees a cell and moves the following entries back, each at most to the start of its own search, so
        that no search ends early. At most half of the cells are in use, so the loop finds a free one."""
        words, mask = self._words, self._mask
        following = cell
        while word := words[FIRST_CELL_WORD + (following := (following + 1) & mask)]:
            record = self._listed[cell_slot(word)]
            start = name_hash(record.key, record.tag)
            if (following - start) & mask >= (following - cell) & mask:
                words[FIRST_CELL_WORD + cell] = word
                cell = following
        words[FIRST_CELL_WORD + cell] = 0

    # -- records ---------------------------------------------------------------------------------------

    def _open(self, slot_index: int) -> None:
        """Makes the record's sequence odd, so that readers reject the record until it is written."""
        self._words[record_offset(self.num_slots, slot_index) // WORD_BYTES] |= 1
        fence()

    def _write(self, record: Record) -> bool:
        """Writes the record with the next even sequence. False, without writing, if a value does not fit."""
        if not 0 <= record.slot_index < self.num_slots:
            return False
        if not len(record.key) == len(record.content_digest) == DIGEST_BYTES:  # struct would pad or truncate
            return False
        start = record_offset(self.num_slots, record.slot_index)
        sequence = (self._words[start // WORD_BYTES] | 1) + 1
        try:
            data = pack_record(record, sequence)
        except (struct.error, KeyError):
            return False
        self._open(record.slot_index)
        self._file.mapping[start + WORD_BYTES : start + RECORD.size] = data[WORD_BYTES:]
        fence()
        self._words[start // WORD_BYTES] = sequence
        return True
