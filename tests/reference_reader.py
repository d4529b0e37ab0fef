"""A reader of arenas in the plainest form: the read rules over ``vision_encoder.layout``, without a client.

It maps the three descriptors of an arena read-only. ``find`` searches the directory, ``is_current`` compares
a place with the control page; what is copied in between is the caller's.
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType

from encoder_service.store.arena import Arena
from vision_encoder.layout import directory as layout
from vision_encoder.layout.control_page import (
    CLOSED_WORD,
    FIRST_GENERATION_WORD,
    WORD_BYTES,
    fence,
    read_header,
)
from vision_encoder.layout.directory import Record


class ReferenceReader:
    """Of one host arena."""

    def __init__(self, descriptors: tuple[int, int, int], arena_id: bytes) -> None:
        """Maps and closes the descriptors. Raises LayoutError."""
        try:
            self.data, self.page, self.directory = (
                mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
                for descriptor in descriptors
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.header = read_header(memoryview(self.page), len(self.page))
        header = layout.read_header(memoryview(self.directory), len(self.directory))
        assert self.header.arena_id == header.arena_id == arena_id
        assert self.header.instance == header.instance
        assert self.header.num_slots == header.num_slots
        self._generations = memoryview(self.page).cast("Q")
        self._words = memoryview(self.directory).cast("Q")
        self._num_slots, self._mask = header.num_slots, header.num_cells - 1

    def __enter__(self) -> ReferenceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generations.release()
        self._words.release()
        for mapping in (self.data, self.page, self.directory):
            mapping.close()

    @property
    def closed(self) -> bool:
        return bool(self._generations[CLOSED_WORD])

    def find(self, namespace: str, key: bytes) -> Record | None:
        """The record of a name, where it is listed and whole."""
        tag = layout.namespace_tag(self.header.arena_id, namespace)
        hashed = layout.name_hash(key, tag)
        for step in range(layout.MAX_PROBES):
            word = self._words[layout.FIRST_CELL_WORD + ((hashed + step) & self._mask)]
            if not word:
                return None
            slot_index = layout.cell_slot(word)
            if layout.cell_matches(word, hashed) and slot_index < self._num_slots:
                record = self._record(slot_index)
                if record is not None and (record.key, record.tag) == (key, tag):
                    return record
        return None

    def is_current(self, slot_index: int, generation: int) -> bool:
        """After a copy: whether the slot still has the content of this generation."""
        fence()
        found = self._generations[FIRST_GENERATION_WORD + slot_index]
        return not self.closed and found == generation and generation % 2 == 1

    def read(self, record: Record) -> bytes | None:
        """A copy of the rows; None where they were gone before it was complete."""
        copied = self.data[record.offset_bytes : record.offset_bytes + record.rows_bytes]
        return copied if self.is_current(record.slot_index, record.generation) else None

    def _record(self, slot_index: int) -> Record | None:
        start = layout.record_offset(self._num_slots, slot_index)
        data = self.directory[start : start + layout.RECORD.size]
        fence()
        record = layout.read_record(data, self._words[start // WORD_BYTES])
        return record if record is not None and record.slot_index == slot_index else None


def reader_of(arena: Arena) -> ReferenceReader:
    return ReferenceReader(arena.export_all(), arena.arena_id)
