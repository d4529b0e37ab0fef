"""Reads rows in the encoder's shared memory: those that its directory lists, or that an answer locates.

Owns the checks, the thread and the reports of these reads. Rows that were overwritten before they were copied
are lost; the request that follows, in ``calls``, brings them inline."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from lm_adapter.assembly import PlacedRows, out_of_memory
from lm_adapter.checks import RowsHeader, check_header, check_models
from lm_adapter.errors import InvalidRows, MappingFailed
from lm_adapter.items import Grid
from lm_adapter.read_reports import ReadReports
from lm_adapter.shm.attachment import AttachedMemory
from lm_adapter.shm.reader import MappedArena
from lm_adapter.types import CacheTier, EncodedRows, ModelInfo, Outcome
from vision_encoder.layout.directory import Record

MAX_LOOP_COPY_S = 150e-6
"""Copies that are estimated to take longer are made on a worker thread."""

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
_Listed: TypeAlias = Mapping[int, tuple[MappedArena, Record]]


@dataclass
class ResidentRows:
    """The rows in attached memory, for one call. models: whose geometry they may have. max_bytes: limit of
    one item. stream: the CUDA stream that uses them. lost: keys of rows that were lost in this call."""

    memory: AttachedMemory
    models: Sequence[ModelInfo]
    max_bytes: int
    reports: ReadReports
    stream: Any
    lost: set[bytes] = field(default_factory=set)

    def read_all(self, keys: Mapping[int, bytes]) -> list[Outcome] | None:
        """Reads on the calling thread. keys: by index. None if any rows are not listed or were lost."""
        listed = self._find(keys)
        rows = self._read_listed(listed) if len(listed) == len(keys) else {}
        return [rows[index] for index in range(len(keys))] if len(rows) == len(keys) else None

    async def read_listed(self, keys: Mapping[int, bytes]) -> Mapping[int, EncodedRows]:
        """Those rows of the keys, by the caller's index, that are listed and were not lost."""
        listed = self._find(keys)
        num_bytes = sum(record.rows_bytes for _, record in listed.values())
        return await self._copied(num_bytes, functools.partial(self._read_listed, listed)) if listed else {}

    async def read_placed(self, placed: PlacedRows) -> Outcome | None:
        """None for rows that were lost or that the driver does not copy."""
        place, num_bytes = placed.place, placed.header.num_bytes
        read = functools.partial(self.memory.read_place, place, num_bytes, stream=self.stream)
        try:
            payload = await self._copied(num_bytes, read)
        except MemoryError:
            return out_of_memory(num_bytes)
        except MappingFailed as error:
            _log.warning("rows were not copied: %s", error.message)
            return None
        if payload is None:
            self.lost.add(placed.result.key)
            return None  # the request that follows reports the loss
        self.reports.note(placed.result.key, place.generation, is_lost=False)
        return placed.rows(payload, self.memory.name)

    def _find(self, keys: Mapping[int, bytes]) -> _Listed:
        find = self.memory.find
        return {index: record for index, key in keys.items() if (record := find(key)) is not None}

    def _read_listed(self, listed: _Listed) -> Mapping[int, EncodedRows]:
        """On any thread."""
        rows = {index: self._read_record(arena, record) for index, (arena, record) in listed.items()}
        return {index: read for index, read in rows.items() if read is not None}

    def _read_record(self, arena: MappedArena, record: Record) -> EncodedRows | None:
        """Rows of a directory record, checked as those of an answer; None if they were lost or do not fit."""
        shape = record.num_rows, record.width, record.dtype, record.num_deepstack_levels
        header = RowsHeader(Grid(*record.grid), *shape, record.rows_bytes)
        try:
            check_models(header, self.models)
            check_header(header)
        except InvalidRows:
            return None
        if record.rows_bytes > self.max_bytes:
            return None
        location = record.slot_index, record.generation, record.offset_bytes, record.rows_bytes
        try:
            payload = arena.read(*location, stream=self.stream)
        except (MemoryError, MappingFailed):
            return None  # the request that follows meets the same error and states it
        self.reports.note(record.key, record.generation, is_lost=payload is None)
        if payload is None:
            self.lost.add(record.key)
            return None
        tier = CacheTier.DEVICE if arena.is_device else CacheTier.HOST
        keys = {"key": record.key, "content_digest": record.content_digest}
        return header.rows(payload, **keys, tier=tier, transport=self.memory.name)

    async def _copied(self, num_bytes: int, read: Callable[[], ResultT]) -> ResultT:
        """The result of a read: made on the loop if it is short, as a change of threads would take longer."""
        is_short = self.memory.copy_s(num_bytes) <= MAX_LOOP_COPY_S
        return read() if is_short else await asyncio.to_thread(read)
