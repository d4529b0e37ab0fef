"""One item through the device and into the store, or there from the tier that replicas share.

Owns what happens between an item's pixels and its rows' being held: room is reserved on the device where
the store has such room, so that the engine writes rows where readers will find them; else they come through
memory of the engine's and are copied into the store. Room is taken when an item is queued, as long as what
waits has little of the device's, and else when the item's batch is planned: a long queue does not push out
rows that are asked for meanwhile, for items whose turn is far away. Callers that leave meanwhile leave no
room behind. What became of an item before and who waits for it are ``pipeline``'s and ``flights``'. Used from
the event loop only.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import torch

from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.jobs import TowerResult
from encoder_service.engine.returns import Returns
from encoder_service.engine.rows import Destination
from encoder_service.errors import DeviceFault, Draining
from encoder_service.flights import Flight
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import Held, RowStore, Writing
from encoder_service.store.shared_tier import SharedTier
from encoder_service.store.tiers import TieredStore
from encoder_service.towers.tower import Tower
from encoder_service.types import CacheTier, EncodedItem, Grid, TowerItem

# Of a device arena: what items may hold of it from when they are queued.
QUEUED_SHARE = 1 / 4
# Rows below this are copied into their slot on the event loop: a thread hop costs more than the copy.
COPY_INLINE_BYTES = 1 << 20
# Of rows to come, which are kept for the next item of the same size.
MAX_SHAPES = 1024


class Room:
    """Where on the device an item's rows will lie. writing: None where there is no room, or none yet.
    is_late: it is looked for when the item's batch is planned."""

    def __init__(
        self, store: RowStore, namespace: str, coming: EncodedItem, queued: dict[ArenaStore, int]
    ) -> None:
        """Reserves it now where it may. coming: the item without its rows. queued: bytes that items hold from
        when they are queued until they end, by the arena that they are of; counted here."""
        self.writing: Writing | None = None
        self._store, self._namespace, self._coming, self._queued = store, namespace, coming, queued
        self._part: ArenaStore | None = None
        self._has_ended = False
        part = store.part("device", namespace) if isinstance(store, TieredStore) else None
        num_bytes = coming.spec.num_bytes
        held_bytes = 0 if part is None else queued.get(part, 0)
        # One may always, or an arena whose share is smaller than an item would have each wait for the loop.
        self.is_late = (
            part is not None and held_bytes > 0 and (held_bytes + num_bytes > part.max_bytes * QUEUED_SHARE)
        )
        if self.is_late:
            return
        self.writing = store.reserve(namespace, coming)
        if self.writing is not None and part is not None:
            self._part = part
            queued[part] = held_bytes + num_bytes

    def find(self) -> Destination:
        """The room of an item that is late; None where there is none, or the item has ended."""
        if self._has_ended:
            return None
        self.writing = self._store.reserve(self._namespace, self._coming)
        return None if self.writing is None else self.writing.target

    def end(self) -> None:
        """The item waits no more, and from now on no room is found for it. Once."""
        self._has_ended = True
        if self._part is not None:
            self._queued[self._part] -= self._coming.spec.num_bytes

    def give_back(self) -> None:
        """Nothing will be written there."""
        if self.writing is not None:
            self._store.cancel_put(self.writing)


@dataclass(frozen=True)
class TowerRun:
    """clock: seconds, the engine's. workers: make large copies. returns: how the engine's threads tell the
    loop. shared: asked before an item is encoded."""

    engine: DeviceEngine
    store: RowStore
    workers: Executor
    tower: Tower
    clock: Callable[[], float]
    returns: Returns
    shared: SharedTier | None = None
    _shapes: dict[int, torch.Tensor] = field(default_factory=dict)
    _queued: dict[ArenaStore, int] = field(default_factory=dict)

    async def find(self, flight: Flight) -> Held | None:
        """The flight's rows from the tier that replicas share, kept in the store from now on; None where they
        have to be made. Takes at most half of the time that the flight has left."""
        if self.shared is None:
            return None
        started_s = self.clock()
        within_s = self._time_to_look(flight.ticket.deadline_s)
        encoded = await self.shared.get(flight.namespace, flight.key, within_s=within_s)
        if encoded is None:
            return None
        flight.tier = CacheTier.SHARED
        if not flight.announced.done():
            flight.announced.set_result(encoded.grid)
        held = await self.keep(flight.namespace, encoded)
        flight.timings.store_ms = (self.clock() - started_s) * 1e3
        return held

    async def grids(
        self, namespace: str, keys: Sequence[bytes], deadline_s: float | None
    ) -> Mapping[bytes, Grid]:
        """Those of the keys that lie in the tier that replicas share, with the grids that are told there."""
        if self.shared is None or not keys:
            return {}
        return await self.shared.grids(namespace, keys, within_s=self._time_to_look(deadline_s))

    def _time_to_look(self, deadline_s: float | None) -> float | None:
        """Half of what is left: the rest is for what follows a miss."""
        return None if deadline_s is None else max(0.0, deadline_s - self.clock()) / 2

    def share(self, flight: Flight, held: Held) -> None:
        """Offers rows that were made here to the tier that replicas share; nobody waits for that."""
        if self.shared is not None:
            self.shared.put(flight.namespace, held.share())

    async def run(self, flight: Flight, tower_item: TowerItem) -> Held:
        """The item's rows, held where the store keeps them, or as they came when it had no room. Fills in the
        flight's timings. Raises what the engine's future ends with."""
        room = Room(self.store, flight.namespace, self._rows_to_come(flight, tower_item.grid), self._queued)
        if room.writing is not None or room.is_late:
            return await self._run_into(flight, tower_item, room)
        return await self._stored(flight, await self._run_through_host(flight, tower_item))

    async def _stored(self, flight: Flight, encoded: EncodedItem) -> Held:
        """Rows that came to memory of their own."""
        stored_s = self.clock()
        held = await self.keep(flight.namespace, encoded)
        flight.timings.store_ms = (self.clock() - stored_s) * 1e3
        return held

    def _rows_to_come(self, flight: Flight, grid: Grid) -> EncodedItem:
        """The flight's item but for its rows, whose shape and dtype it tells."""
        tower = self.tower
        num_rows = tower.num_rows(grid)
        rows = self._shapes.get(num_rows)
        if rows is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            rows = torch.empty(num_rows, tower.width, dtype=tower.dtype, device="meta")
            self._shapes[num_rows] = rows
        return EncodedItem(flight.key, flight.content_digest, grid, rows, tower.num_deepstack_levels)

    async def _run_through_host(self, flight: Flight, tower_item: TowerItem) -> EncodedItem:
        """The item with rows of its own."""
        queued_s = self.clock()
        future = self.engine.submit(tower_item, flight.ticket)
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.engine.discard(flight.ticket)
            raise
        _note_times(flight, result, queued_s)
        return replace(self._rows_to_come(flight, tower_item.grid), rows=result.rows)

    async def _run_into(self, flight: Flight, tower_item: TowerItem, room: Room) -> Held:
        """The item's rows in their room. It is the engine's until the engine says how the item ended, also
        when every caller has left before. Late room that was not to be had by then is done without."""
        landed: asyncio.Future[tuple[TowerResult, Held | None]] = asyncio.get_running_loop().create_future()

        def end(done: Future[TowerResult]) -> None:
            try:
                found = self._landed(flight, room, done)
            except BaseException as error:  # a defect of the store's would else leave everybody waiting
                if not landed.cancelled():
                    landed.set_exception(error)
                return
            if not landed.cancelled():
                landed.set_result(found)
            elif found[1] is not None:
                found[1].drop()

        queued_s = self.clock()
        try:
            target = None if room.writing is None else room.writing.target
            late = room.find if room.is_late else None
            future = self.engine.submit(tower_item, flight.ticket, target, late)
        except BaseException:
            room.end()
            room.give_back()
            raise
        future.add_done_callback(functools.partial(self.returns.post, end))
        try:
            result, held = await landed
        except asyncio.CancelledError:
            self.engine.discard(flight.ticket)
            if landed.done() and not landed.cancelled() and landed.exception() is None:
                held = landed.result()[1]
                if held is not None:
                    held.drop()
            raise
        _note_times(flight, result, queued_s)
        if held is None:
            coming = self._rows_to_come(flight, tower_item.grid)
            return await self._stored(flight, replace(coming, rows=result.rows))
        return held

    def _landed(
        self, flight: Flight, room: Room, done: Future[TowerResult]
    ) -> tuple[TowerResult, Held | None]:
        """What the engine's future ended with, and the rows held, or None where they have no room. Raises its
        error, Draining after the store was closed; the room is given back then, or kept from everybody where
        the device may still write."""
        room.end()
        error = done.exception()
        if error is not None:
            if not isinstance(error, DeviceFault):
                room.give_back()
            raise error
        if room.writing is None:
            return done.result(), None
        self.store.finish_put(room.writing)
        # In the same step, so that nothing evicts it before it is held.
        held = self.store.hold(flight.namespace, flight.key, is_lookup=False)
        if held is None:
            raise Draining("the service stopped before the item was delivered")
        return done.result(), held

    async def keep(self, namespace: str, encoded: EncodedItem) -> Held:
        """The item's rows into the store; a large copy is made on a worker, whose slot is not given back
        while it still writes."""
        writing = self.store.begin_put(namespace, encoded)
        if writing is not None and encoded.spec.num_bytes < COPY_INLINE_BYTES:
            writing.copy()
            self.store.finish_put(writing)
        elif writing is not None:

            def end(copying: asyncio.Future[None]) -> None:
                if copying.cancelled() or copying.exception() is not None:
                    self.store.cancel_put(writing)
                else:
                    self.store.finish_put(writing)

            # Its end is seen to also when every caller has left by then.
            copying = asyncio.get_running_loop().run_in_executor(self.workers, writing.copy)
            copying.add_done_callback(end)
            await asyncio.shield(copying)
        return self.store.hold(namespace, encoded.key, is_lookup=False) or Held(encoded)


def _note_times(flight: Flight, result: TowerResult, queued_s: float) -> None:
    flight.timings.queue_ms = (result.started_s - queued_s) * 1e3
    flight.timings.tower_ms = result.tower_ms
