"""Rows that requests share, one entry for each identifier, and what the next step does with them.

Owns who holds which rows, from their order until the last holder lets go, and which rows the next step hands
over to vLLM's own cache or drops. The bytes are counted by ``room``; ``orders`` makes the ranks read and drop
rows. Imports neither vLLM nor torch. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from lm_adapter.engines.vllm.scheduler.items import RequestItem
from lm_adapter.engines.vllm.scheduler.room import Room
from lm_adapter.engines.vllm.step_rows import StepRows

Holder = tuple[str, int]
"""A request's id and the index of its feature."""


class RowsStage(Enum):
    """How far rows have come."""

    ORDERED = "ordered"
    """Some rank has yet to read them."""
    PRESENT = "present"
    """Every rank has them, under their number."""
    IN_STEP = "in step"
    """A step has been given them, which may not have begun on every rank."""


@dataclass(eq=False)
class RowsEntry:
    """The rows of one identifier. item: of the first holder. number: by which every rank has them, and
    arrived_s: since when; 0 while they are ordered. holders: with the time at which each came."""

    item: RequestItem
    ordered_s: float
    stage: RowsStage = RowsStage.ORDERED
    number: int = 0
    arrived_s: float = 0.0
    holders: dict[Holder, float] = field(default_factory=dict)

    @property
    def is_present(self) -> bool:
        return self.stage is not RowsStage.ORDERED


class Orders(Protocol):
    """What makes the ranks read and drop rows. No method waits."""

    def start(self, entry: RowsEntry) -> None:
        """Has every rank read the rows."""

    def cancel(self, entry: RowsEntry) -> None:
        """Ends what ``start`` began."""

    def drop(self, number: int) -> None:
        """Frees the rows of this number on every rank."""


class SharedRows:
    """The rows that ranks have or will have. room: takes the bytes of each entry from its order until its
    rows have left the ranks."""

    def __init__(self, room: Room[Any], orders: Orders) -> None:
        self._room = room
        self._orders = orders
        self._entries: dict[str, RowsEntry] = {}
        self._step = StepRows()
        self._takers: dict[str, str] = {}
        """By identifier that the next step hands over: the request that was given it last."""
        self._not_handed_over: set[str] = set()
        """Identifiers that vLLM counts as in its own cache, though no step has handed over their rows."""
        self._leaving_bytes = 0
        """Of rows that leave the ranks with the next step."""
        self.arrived_s = 0.0
        """When rows arrived last."""

    def get(self, identifier: str) -> RowsEntry | None:
        return self._entries.get(identifier)

    def is_current(self, entry: RowsEntry) -> bool:
        """Whether the entry has neither been dropped nor failed."""
        return self._entries.get(entry.item.identifier) is entry

    @property
    def is_any_ordered(self) -> bool:
        """Whether some rows are on their way."""
        return any(not entry.is_present for entry in self._entries.values())

    # -- holders ---------------------------------------------------------------------------------------

    def hold(self, item: RequestItem, holder: Holder, now_s: float) -> RowsEntry | None:
        """The rows of the item, which are ordered if nobody holds them yet; None if there is no room for
        them. Raises InvalidRequest if the identifier stands for another item."""
        entry = self._entries.get(item.identifier)
        if entry is not None:
            item.check_same(entry.item)
        elif self._room.try_take(item.num_bytes):
            entry = self._entries[item.identifier] = RowsEntry(item, now_s)
            self._orders.start(entry)
        else:
            return None
        entry.holders[holder] = now_s
        return entry

    def let_go(self, entry: RowsEntry, holder: Holder) -> None:
        """The last holder's rows leave the ranks."""
        entry.holders.pop(holder, None)
        if not entry.holders and self.is_current(entry):
            self._discard(entry)

    def arrived(self, entry: RowsEntry, number: int, now_s: float) -> None:
        """Every rank has read the rows. Those of an entry that is not current any more are dropped."""
        if not self.is_current(entry):
            self._orders.drop(number)
            return
        entry.stage, entry.number = RowsStage.PRESENT, number
        entry.arrived_s = self.arrived_s = now_s

    def failed(self, entry: RowsEntry) -> None:
        """The rows are not available. The entry keeps its holders, but nobody else joins it."""
        self._discard(entry)

    def _discard(self, entry: RowsEntry) -> None:
        del self._entries[entry.item.identifier]
        if entry.stage is RowsStage.IN_STEP:
            # Workers may be some steps behind: the rows leave with the next one.
            self._step.drop.append(entry.number)
            self._leaving_bytes += entry.item.num_bytes
            return
        self._room.release(entry.item.num_bytes)
        if entry.stage is RowsStage.PRESENT:
            self._orders.drop(entry.number)
        else:
            self._orders.cancel(entry)

    # -- steps -----------------------------------------------------------------------------------------

    def hand_over(self, entry: RowsEntry, request_id: str) -> None:
        """The next step gives the rows, which are present, to vLLM's own cache, for this request."""
        identifier = entry.item.identifier
        entry.stage = RowsStage.IN_STEP
        self._not_handed_over.discard(identifier)
        self._takers[identifier] = request_id
        self._step.hand_over.append((entry.number, identifier))

    def hand_over_missing(self, entries: Iterable[RowsEntry], request_id: str) -> None:
        """Hands over those that vLLM counts as in its own cache already, though no step has handed them
        over."""
        if self._not_handed_over:
            for entry in entries:
                if entry.item.identifier in self._not_handed_over:
                    self.hand_over(entry, request_id)

    def are_handed_over(self, identifiers: Iterable[str]) -> bool:
        """Whether workers have what vLLM counts as in its own cache, once the next step has begun."""
        return self._not_handed_over.isdisjoint(identifiers)

    def freed(self, identifiers: Iterable[str], scheduled: Container[str]) -> None:
        """vLLM freed these identifiers in this pass. Those last given to a request scheduled in this pass
        stay; the others are not handed over. scheduled: ids of requests."""
        gone = {name for name in identifiers if self._takers.get(name) not in scheduled}
        self._not_handed_over -= gone
        self._step.hand_over = [rows for rows in self._step.hand_over if rows[1] not in gone]

    def take_step(self) -> tuple[StepRows, bool]:
        """What goes with the next step, and whether that released room."""
        taken, self._step = self._step, StepRows()
        self._takers.clear()
        return taken, self._release_leaving()

    def flush(self) -> bool:
        """Drops rows now that would leave with the next step. All steps have begun. Returns whether that
        released room.

        vLLM counts the rows that were allocated as in its own cache, and does not allocate them again: the
        next request for them hands over its own."""
        dropped, hand_over = set(self._step.drop), self._step.hand_over
        for number in dropped:
            self._orders.drop(number)
        self._not_handed_over.update(name for number, name in hand_over if number in dropped)
        self._step = StepRows([(number, name) for number, name in hand_over if number not in dropped])
        return self._release_leaving()

    def _release_leaving(self) -> bool:
        num_bytes, self._leaving_bytes = self._leaving_bytes, 0
        self._room.release(num_bytes)
        return bool(num_bytes)
