"""One item through the device and into the store, or there from the tier that replicas share.

Owns what happens between an item's pixels and its rows' being held: room is reserved on the device where
the store has such room, so that the engine writes rows where readers will find them; else they come through
memory of the engine's and are copied into the store. Callers that leave meanwhile leave no room behind. What
became of an item before and who waits for it are ``pipeline``'s and ``flights``'. Used from the event loop
only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import torch

from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.jobs import TowerResult
from encoder_service.errors import DeviceFault, Draining
from encoder_service.flights import Flight
from encoder_service.store.embedding_store import Held, RowStore, Writing
from encoder_service.store.shared_tier import SharedTier
from encoder_service.towers.tower import Tower
from encoder_service.types import CacheTier, EncodedItem, Grid, TowerItem

# Rows below this are copied into their slot on the event loop: a thread hop costs more than the copy.
COPY_INLINE_BYTES = 1 << 20


@dataclass(frozen=True)
class TowerRun:
    """clock: seconds, the engine's. workers: make large copies. shared: asked before an item is encoded."""

    engine: DeviceEngine
    store: RowStore
    workers: Executor
    tower: Tower
    clock: Callable[[], float]
    shared: SharedTier | None = None

    async def find(self, flight: Flight) -> Held | None:
        """The flight's rows from the tier that replicas share, kept in the store from now on; None where they
        have to be made. Takes at most half of the time that the flight has left."""
        if self.shared is None:
            return None
        started_s, deadline_s = self.clock(), flight.ticket.deadline_s
        within_s = None if deadline_s is None else max(0.0, deadline_s - started_s) / 2
        encoded = await self.shared.get(flight.namespace, flight.key, within_s=within_s)
        if encoded is None:
            return None
        flight.tier = CacheTier.SHARED
        if not flight.announced.done():
            flight.announced.set_result(encoded.grid)
        held = await self._keep(flight.namespace, encoded)
        flight.timings.store_ms = (self.clock() - started_s) * 1e3
        return held

    def share(self, flight: Flight, held: Held) -> None:
        """Offers rows that were made here to the tier that replicas share; nobody waits for that."""
        if self.shared is not None:
            self.shared.put(flight.namespace, held.share())

    async def run(self, flight: Flight, tower_item: TowerItem) -> Held:
        """The item's rows, held where the store keeps them, or as they came when it had no room. Fills in the
        flight's timings. Raises what the engine's future ends with."""
        reserved = self.store.reserve(flight.namespace, self._rows_to_come(flight, tower_item.grid))
        if reserved is not None:
            return await self._run_into(flight, tower_item, reserved)
        encoded = await self._run_through_host(flight, tower_item)
        stored_s = self.clock()
        held = await self._keep(flight.namespace, encoded)
        flight.timings.store_ms = (self.clock() - stored_s) * 1e3
        return held

    def _rows_to_come(self, flight: Flight, grid: Grid) -> EncodedItem:
        """The flight's item but for its rows, whose shape and dtype it tells."""
        tower = self.tower
        rows = torch.empty(tower.num_rows(grid), tower.width, dtype=tower.dtype, device="meta")
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

    async def _run_into(self, flight: Flight, tower_item: TowerItem, reserved: Writing) -> Held:
        """The item's rows in the room that was reserved for them. It is the engine's until the engine says
        how the item ended, also when every caller has left before."""
        loop = asyncio.get_running_loop()
        landed: asyncio.Future[tuple[TowerResult, Held]] = loop.create_future()

        def end(done: Future[TowerResult]) -> None:
            try:
                found = self._landed(flight, reserved, done)
            except BaseException as error:  # a defect of the store's would else leave everybody waiting
                if not landed.cancelled():
                    landed.set_exception(error)
                return
            if landed.cancelled():
                found[1].drop()
            else:
                landed.set_result(found)

        def tell(done: Future[TowerResult]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the store with it
                loop.call_soon_threadsafe(end, done)

        queued_s = self.clock()
        try:
            future = self.engine.submit(tower_item, flight.ticket, reserved.target)
        except BaseException:
            self.store.cancel_put(reserved)
            raise
        future.add_done_callback(tell)
        try:
            result, held = await landed
        except asyncio.CancelledError:
            self.engine.discard(flight.ticket)
            if landed.done() and not landed.cancelled() and landed.exception() is None:
                landed.result()[1].drop()
            raise
        _note_times(flight, result, queued_s)
        return held

    def _landed(
        self, flight: Flight, reserved: Writing, done: Future[TowerResult]
    ) -> tuple[TowerResult, Held]:
        """What the engine's future ended with, and the rows held. Raises its error, Draining after the store
        was closed; the room is given back then, or kept from everybody where the device may still write."""
        error = done.exception()
        if error is not None:
            if not isinstance(error, DeviceFault):
                self.store.cancel_put(reserved)
            raise error
        self.store.finish_put(reserved)
        # In the same step, so that nothing evicts it before it is held.
        held = self.store.hold(flight.namespace, flight.key, is_lookup=False)
        if held is None:
            raise Draining("the service stopped before the item was delivered")
        return done.result(), held

    async def _keep(self, namespace: str, encoded: EncodedItem) -> Held:
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
