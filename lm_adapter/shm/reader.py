"""Finds rows in a mapped arena, copies them, and accepts the copy if the slot's generation did not change.

Owns the reader's side of the protocol in ``vision_encoder.layout.control_page``. A read is: copy to private
memory, wait until the copy is complete, fence, then compare instance, closed flag and generation. A copy that
fails the comparison is discarded, and the caller requests the rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import MappingFailed
from lm_adapter.shm.mapping import HostMemory, map_words
from vision_encoder.layout import control_page, directory
from vision_encoder.layout.control_page import (
    CLOSED_WORD,
    FIRST_GENERATION_WORD,
    INSTANCE_WORD,
    WORD_BYTES,
    LayoutError,
)
from vision_encoder.layout.directory import FIRST_CELL_WORD, RECORD, Record
from vision_encoder.v1 import broker_pb2

if TYPE_CHECKING:
    import torch

    from lm_adapter.shm.broker import Attachment
    from lm_adapter.shm.device import DeviceMemory


class MappedArena:
    """A mapped arena with its control page and directory. Thread-safe."""

    def __init__(self, attachment: Attachment, namespace: str, device: torch.device | None) -> None:
        """device: the GPU that reads a device arena, None for a host arena. Raises MappingFailed, with reason
        LAYOUT_MISMATCH for layouts that this version cannot read."""
        geometry = attachment.geometry
        self.arena_id = geometry.arena_id
        self.size_bytes = geometry.size_bytes
        self.is_device = geometry.kind == broker_pb2.ARENA_KIND_DEVICE
        if self.is_device != (device is not None):
            raise MappingFailed(f"arena {self.arena_id.hex()} is of kind {geometry.kind}")
        self._page = map_words(attachment.page_fd, geometry.page_bytes)
        self._directory = map_words(attachment.directory_fd, geometry.directory_bytes)
        self._records = self._directory.cast("B")
        try:
            header = control_page.read_header(self._page.cast("B"), geometry.page_bytes)
            listed = directory.read_header(self._records, geometry.directory_bytes)
            found = (header.arena_id, listed.arena_id, listed.instance, listed.num_slots)
            expected = (self.arena_id, self.arena_id, header.instance, header.num_slots)
            control_page.check("arena, instance and number of slots", found, expected)
        except LayoutError as error:
            raise MappingFailed(f"arena {self.arena_id.hex()}: {error}", reason="LAYOUT_MISMATCH") from error
        self.instance = header.instance
        self.num_slots = header.num_slots
        self._num_cells = listed.num_cells
        self._tag = directory.namespace_tag(self.arena_id, namespace)
        self._users = threading.Condition()
        self._num_users = 0
        self._is_closing = False
        self._memory: HostMemory | DeviceMemory
        if device is None:
            self._memory = HostMemory(attachment.data_fd, geometry.size_bytes)
        else:
            from lm_adapter.shm.device import DeviceMemory

            self._memory = DeviceMemory(attachment.data_fd, geometry.size_bytes, device)

    def check_probe(self, probe: broker_pb2.BrokerProbeSlot) -> None:
        """Reads the broker's probe through the mapping. Raises MappingFailed, with reason PROBE_MISMATCH if
        the bytes differ."""
        expected = control_page.Probe(probe.offset_bytes, probe.num_bytes, probe.sha256)
        end_bytes = expected.offset_bytes + expected.num_bytes
        if expected.num_bytes < 1 or end_bytes > self.size_bytes:
            raise MappingFailed(f"the probe ends at byte {end_bytes}, the arena has {self.size_bytes}")
        if not expected.matches(self._memory.read(expected.offset_bytes, expected.num_bytes)):
            raise MappingFailed(
                f"the {expected.num_bytes} bytes of the probe are different through the mapping",
                reason="PROBE_MISMATCH",
            )

    def find(self, key: bytes) -> Record | None:
        """The directory's record for a key in this namespace, None if it is not listed. The record is a hint
        until ``read`` has succeeded. Takes a few microseconds."""
        hashed, mask = directory.name_hash(key, self._tag), self._num_cells - 1
        with self._use() as is_mapped:
            if not is_mapped:
                return None
            for probe in range(hashed, hashed + directory.MAX_PROBES):
                word = self._directory[FIRST_CELL_WORD + (probe & mask)]
                if not word:
                    return None
                if directory.cell_matches(word, hashed):
                    record = self._record(directory.cell_slot(word))
                    if record is not None and record.key == key and record.tag == self._tag:
                        return record
        return None

    def read(
        self, slot_index: int, generation: int, offset_bytes: int, num_bytes: int, *, stream: Any = None
    ) -> npt.NDArray[np.uint8] | torch.Tensor | None:
        """A private copy of the rows, uint8 [num_bytes]; None if they changed, or if the arena is closed or
        unmapped. stream: see ``DeviceMemory.copy``."""
        is_possible = (
            generation % 2 == 1
            and 0 <= slot_index < self.num_slots
            and num_bytes >= 1
            and 0 <= offset_bytes <= self.size_bytes - num_bytes
        )
        with self._use() as is_mapped:
            if not is_mapped or not is_possible:
                return None
            copied = self._memory.copy(offset_bytes, num_bytes, stream)
            control_page.fence()
            page = self._page
            is_whole = (
                page[FIRST_GENERATION_WORD + slot_index] == generation
                and not page[CLOSED_WORD]
                and page[INSTANCE_WORD] == self.instance
            )
            return copied if is_whole else None

    def unmap(self, timeout_s: float) -> None:
        """Rejects new reads, waits for reads in progress, then unmaps. Can be repeated. Raises MappingFailed
        if reads do not end in time or the driver fails; it can then be repeated."""
        ends_s = time.monotonic() + timeout_s
        with self._users:
            self._is_closing = True
            while self._num_users:
                if not self._users.wait(max(0.0, ends_s - time.monotonic())) and self._num_users:
                    raise MappingFailed(f"{self._num_users} reads did not end within {timeout_s} s")
        self._memory.unmap()
        empty = memoryview(b"").cast("Q")
        self._page, self._directory, self._records = empty, empty, empty.cast("B")

    @contextmanager
    def _use(self) -> Iterator[bool]:
        """Keeps the arena mapped inside the block. Yields False if the arena is being unmapped."""
        with self._users:
            is_mapped = not self._is_closing
            self._num_users += is_mapped
        try:
            yield is_mapped
        finally:
            if is_mapped:
                with self._users:
                    self._num_users -= 1
                    if self._is_closing:
                        self._users.notify_all()

    def _record(self, slot_index: int) -> Record | None:
        """The slot's record; None if it was being written."""
        if not 0 <= slot_index < self.num_slots:
            return None
        start = directory.record_offset(self.num_slots, slot_index)
        data = bytes(self._records[start : start + RECORD.size])
        control_page.fence()
        record = directory.read_record(data, self._directory[start // WORD_BYTES])
        return record if record is not None and record.slot_index == slot_index else None
