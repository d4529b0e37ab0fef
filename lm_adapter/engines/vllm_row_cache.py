"""Rows that vLLM's requests share, and which image each of vLLM's identifiers stands for.

Owns the entries, pending or resident, their bytes, and the bounded memory of identifiers. vLLM's encoder
cache and prefix cache go by an identifier that clients choose (``vllm_items``); two images under one
identifier, or two grids of one image, would share rows and KV. Therefore an identifier is bound to the first
key and grid whose rows have arrived, or to the grid of pixels that vLLM encodes by itself. What a request
claims binds nothing. ``vllm_tracker`` decides when to check and when to bind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lm_adapter.engines.vllm_items import WantedRows
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

__all__ = ["CacheEntry", "RowCache", "check_same"]


@dataclass(eq=False)
class CacheEntry:
    """The rows of one identifier, key and grid. rows: None while they are pending. holders: (request id,
    index of the feature). is_dropped: no longer in the cache."""

    wanted: WantedRows
    rows: EncodedRows | None = None
    holders: set[tuple[str, int]] = field(default_factory=set)
    is_dropped: bool = False


class _Image(NamedTuple):
    """key: None for pixels that vLLM encodes by itself."""

    key: bytes | None
    grid: Grid


class RowCache:
    """Requests that differ in key or grid of an identifier have entries of their own, so that no request
    fails because of another's claim. At most one entry of an identifier has rows."""

    def __init__(self, max_bytes: int, max_identifiers: int) -> None:
        self._max_bytes = max_bytes
        self._max_identifiers = max_identifiers
        self._entries: dict[str, list[CacheEntry]] = {}
        self._images: OrderedDict[str, _Image | None] = OrderedDict()
        self.used_bytes = 0
        """Bytes of resident rows, and those reserved for pending ones."""

    def find(self, wanted: WantedRows) -> CacheEntry | None:
        """The entry with the same identifier, key and grid."""
        for entry in self._entries.get(wanted.identifier, ()):
            if _claim(entry.wanted) == _claim(wanted):
                return entry
        return None

    def resident(self, identifier: str) -> CacheEntry | None:
        """The entry of this identifier that has rows."""
        for entry in self._entries.get(identifier, ()):
            if entry.rows is not None:
                return entry
        return None

    def rivals(self, entry: CacheEntry) -> list[CacheEntry]:
        """The other entries of the same identifier."""
        return [other for other in self._entries[entry.wanted.identifier] if other is not entry]

    def has_pending(self) -> bool:
        return any(entry.rows is None for entries in self._entries.values() for entry in entries)

    def num_bytes(self, several: Iterable[WantedRows]) -> int:
        """Bytes of these rows; rows that several features share count once."""
        return sum({_claim(wanted): wanted.num_bytes for wanted in several}.values())

    def has_room(self, several: Iterable[WantedRows]) -> bool:
        """Whether those that have no entry yet fit in as well."""
        new_bytes = self.num_bytes(wanted for wanted in several if self.find(wanted) is None)
        return self.used_bytes + new_bytes <= self._max_bytes

    def add(self, wanted: WantedRows) -> CacheEntry:
        entry = CacheEntry(wanted)
        self._entries.setdefault(wanted.identifier, []).append(entry)
        self.used_bytes += wanted.num_bytes
        return entry

    def drop(self, entry: CacheEntry) -> None:
        entry.is_dropped = True
        self.used_bytes -= entry.wanted.num_bytes
        entries = self._entries[entry.wanted.identifier]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.wanted.identifier]

    def check(self, several: Iterable[WantedRows]) -> None:
        """Compares features with the binding of their identifier, with resident rows, which may outlive the
        binding, and with one another. Raises InvalidRequest."""
        first_of: dict[str, WantedRows] = {}
        for wanted in several:
            if wanted.identifier in self._images:
                self._images.move_to_end(wanted.identifier)
                image = self._images[wanted.identifier]
                if image is None:
                    raise _reused(f"identifier {wanted.identifier} was computed without an image's rows")
                check_same(wanted, image.key, image.grid)
            resident = self.resident(wanted.identifier)
            first = first_of.setdefault(wanted.identifier, wanted)
            for other in (first, resident.wanted if resident is not None else first):
                check_same(wanted, other.key, other.grid)

    def bind(self, wanted: WantedRows) -> None:
        """Binds a checked feature's identifier. A key that pixels left open is filled in."""
        bound = self._images.get(wanted.identifier)
        key = bound.key if wanted.key is None and bound is not None else wanted.key
        self._set(wanted.identifier, _Image(key, wanted.grid))

    def bar(self, identifier: str) -> None:
        """Refuses the identifier from now on: vLLM has cached KV of no image under it."""
        self._set(identifier, None)

    def _set(self, identifier: str, image: _Image | None) -> None:
        self._images[identifier] = image
        self._images.move_to_end(identifier)
        if len(self._images) > self._max_identifiers:
            self._images.popitem(last=False)


def check_same(wanted: WantedRows, key: bytes | None, grid: Grid) -> None:
    """Raises InvalidRequest, with both figures, if the identifier stands for another key or grid. Pixels have
    no key and are compared by grid, if vLLM keeps it."""
    if key is not None and wanted.key is not None and key != wanted.key:
        raise _reused(
            f"identifier {wanted.identifier} stands for key {key.hex()}, the request has "
            f"{wanted.key.hex()}: one UUID cannot name two images"
        )
    if grid.t and wanted.grid.t and grid != wanted.grid:
        raise _reused(
            f"identifier {wanted.identifier} stands for an image with grid_thw {list(grid)}, the request has "
            f"{list(wanted.grid)}"
        )


def _claim(wanted: WantedRows) -> tuple[str, bytes | None, Grid]:
    return wanted.identifier, wanted.key, wanted.grid


def _reused(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="IDENTIFIER_REUSED")
