"""Rows that requests share, under way or here: what ``vllm_book`` holds for vLLM, and how many bytes it has.

An item is what requests agree on: name, key and grid. Requests that differ in any of them have items of their
own, so that none is failed by what another says; at most one item of a name has rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lm_adapter.engines.vllm_items import WantedRows
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

__all__ = ["Item", "Shelf"]


@dataclass(eq=False)
class Item:
    """holders: (request, index of its feature); is_over: no longer on the shelf, whatever comes of it."""

    wanted: WantedRows
    rows: EncodedRows | None = None
    holders: set[tuple[str, int]] = field(default_factory=set)
    is_over: bool = False


class Shelf:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: dict[str, list[Item]] = {}
        self.used_bytes = 0
        """Of rows that are here, and of room promised to those under way."""

    def find(self, wanted: WantedRows) -> Item | None:
        for item in self._items.get(wanted.identifier, ()):
            if _claim(item.wanted) == _claim(wanted):
                return item
        return None

    def resident(self, identifier: str) -> Item | None:
        """The one item of this name that has rows."""
        for item in self._items.get(identifier, ()):
            if item.rows is not None:
                return item
        return None

    def rivals(self, item: Item) -> list[Item]:
        """Others of its name."""
        return [other for other in self._items[item.wanted.identifier] if other is not item]

    def is_waiting(self) -> bool:
        """Whether any rows are under way."""
        return any(item.rows is None for items in self._items.values() for item in items)

    def num_bytes(self, several: Iterable[WantedRows]) -> int:
        """Each once, whether it is here or not."""
        return sum({_claim(wanted): wanted.num_bytes for wanted in several}.values())

    def has_room(self, several: Iterable[WantedRows]) -> bool:
        """For all of those that are not here yet."""
        new_bytes = self.num_bytes(wanted for wanted in several if self.find(wanted) is None)
        return self.used_bytes + new_bytes <= self._max_bytes

    def put(self, wanted: WantedRows) -> Item:
        item = Item(wanted)
        self._items.setdefault(wanted.identifier, []).append(item)
        self.used_bytes += wanted.num_bytes
        return item

    def drop(self, item: Item) -> None:
        item.is_over = True
        self.used_bytes -= item.wanted.num_bytes
        alike = self._items[item.wanted.identifier]
        alike.remove(item)
        if not alike:
            del self._items[item.wanted.identifier]


def _claim(wanted: WantedRows) -> tuple[str, bytes | None, Grid]:
    """What a request says of an image. What several say alike is fetched once."""
    return wanted.identifier, wanted.key, wanted.grid
