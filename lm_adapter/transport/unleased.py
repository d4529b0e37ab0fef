"""Rows that are resident, read without a lease and without a word to anybody: found in the directory, copied,
checked by the slot's generation.

Owns what makes such a read as trustworthy as one under a lease: the record's shape is held to the models'
before a byte is copied, and the copy counts only when the slot's generation is the record's after the last
byte. Nothing holds the rows meanwhile: whoever loses has copied in vain and goes the leased way. What was
read is told to the encoder afterwards, by ``broker_link``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from lm_adapter.checks import RowsHeader, check_header, check_models
from lm_adapter.errors import InvalidRows
from lm_adapter.transport.arenas import AttachedArena
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.buffers import Bytes
from lm_adapter.transport.directory import SHAPE, DirectoryReader, namespace_tag
from lm_adapter.transport.mapping import MappingFailed
from lm_adapter.types import CacheTier, EncodedRows, Grid, ModelInfo, StageTimings

__all__ = ["CheckedShapes", "Place", "UnleasedRows"]

MAX_SHAPES = 4096
_DTYPES = {1: "float32", 2: "bfloat16", 3: "float16"}
_TIERS = {"device": CacheTier.DEVICE, "host": CacheTier.HOST}
_OF_SHAPE = ("grid_thw", "num_rows", "width", "dtype", "num_deepstack_levels")
# What rows have that need no more than a record says.
_REST: Mapping[str, Any] = {
    each.name: each.default for each in fields(EncodedRows) if each.default is not MISSING
} | {"timings": StageTimings()}


class Shape(NamedTuple):
    """A shape that rows may have. fields: of ``EncodedRows``, as far as they follow from it."""

    rows_bytes: int
    fields: Mapping[str, Any]


class CheckedShapes:
    """Which shapes rows of these models may have; each is looked at once."""

    def __init__(self, models: Sequence[ModelInfo], max_rows_bytes: int) -> None:
        self._models = models
        self._max_rows_bytes = max_rows_bytes
        self._known: dict[bytes, Shape | None] = {}

    def of(self, packed: bytes) -> Shape | None:
        """``directory.SHAPE``, packed, where it holds; None for what the ordinary way is to judge."""
        try:
            return self._known[packed]
        except KeyError:
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            shape = self._known[packed] = self._checked(packed)
            return shape

    def _checked(self, packed: bytes) -> Shape | None:
        rows_bytes, t, h, w, num_rows, width, dtype, levels = SHAPE.unpack(packed)
        header = RowsHeader(Grid(t, h, w), num_rows, width, _DTYPES.get(dtype, ""), levels, rows_bytes)
        try:
            check_models(header, self._models)
            check_header(header)
        except InvalidRows:
            return None
        if rows_bytes > self._max_rows_bytes:
            return None
        return Shape(rows_bytes, {**_REST} | {name: getattr(header, name) for name in _OF_SHAPE})


class Place(NamedTuple):
    """Rows that were readable when they were looked up."""

    key: bytes
    content_digest: bytes
    shape: Shape
    arena: AttachedArena
    slot_index: int
    generation: int
    offset_bytes: int


class UnleasedRows:
    """One session's directories of the memory that its client reads. Thread-safe."""

    def __init__(self, arenas: Sequence[AttachedArena], namespace: str, link: BrokerLink) -> None:
        """arenas: with a directory. link: where reads are told."""
        self._directories: list[tuple[AttachedArena, DirectoryReader, bytes]] = [
            (arena, arena.directory, namespace_tag(arena.arena_id, namespace))
            for arena in arenas
            if arena.directory is not None
        ]
        self._uses = link.uses_of(arenas[0].kind)
        self._tier = _TIERS[arenas[0].kind]

    def find(self, key: bytes, content_digest: bytes | None, shapes: CheckedShapes) -> Place | None:
        """Where the key's rows lie; None where they are to be asked for. content_digest: what theirs has to
        be, where that is known."""
        for arena, directory, tag in self._directories:
            try:
                found = directory.find(key, tag)
            except ValueError:  # unmapped meanwhile
                continue
            if found is None or content_digest not in (None, found.content_digest):
                continue
            slot_index, generation, offset_bytes, packed, found_digest = found
            shape = shapes.of(packed)
            if shape is None or offset_bytes + shape.rows_bytes > arena.memory.size_bytes:
                continue
            return Place(key, found_digest, shape, arena, slot_index, generation, offset_bytes)
        return None

    def read(self, place: Place, out: Bytes | None) -> EncodedRows | None:
        """The rows, copied into ``out`` or fresh memory on the caller's current stream, and whole; None when
        they changed meanwhile: what was copied is nothing then. Counts once its caller says ``note_read``."""
        key, content_digest, shape, arena, slot_index, generation, offset_bytes = place
        if not arena.use():
            return None
        try:
            payload = arena.memory.copy_now(offset_bytes, shape.rows_bytes, out)
            is_whole = arena.page.unchanged(slot_index, generation)
        except MappingFailed:
            return None
        finally:
            arena.drop()
        if not is_whole:
            self._uses.note_stale()
            return None
        # A frozen dataclass's own __init__ sets field after field, which takes four times as long.
        rows = object.__new__(EncodedRows)
        rows.__dict__.update(
            shape.fields, key=key, content_digest=content_digest, payload=payload, tier=self._tier
        )
        return rows

    def note_read(self, key: bytes) -> None:
        """Rows that were read go to whoever asked for them: the encoder is told of it."""
        self._uses.note(key)
