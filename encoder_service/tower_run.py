"""One item through the device and into the store, or there from the tier that replicas share.

Owns what happens between an item's pixels and its rows' being held: room is reserved on the device where
the store has such room, so that the engine writes rows where readers will find them; else they come through
memory of the engine's and are copied into the store. Room is taken while an item is decoded. Callers that
leave meanwhile leave no room behind. What became of an item before and who waits for it are ``pipeline``'s
and ``flights``'. Used from the event loop only, but for what a ``Handover`` does on a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import torch

from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.jobs import TowerResult, cancelled_error
from encoder_service.errors import DeviceFault, Draining, InternalError
from encoder_service.flights import Flight
from encoder_service.ingest.workers import WorkerThreads
from encoder_service.store.embedding_store import Held, RowStore, Writing
from encoder_service.store.shared_tier import SharedTier
from encoder_service.towers.tower import Tower
from encoder_service.types import CacheTier, EncodedItem, Grid, LoadPixels, TowerItem

# Rows below this are copied into their slot on the event loop: a thread hop costs more than the copy.
COPY_INLINE_BYTES = 1 << 20
# Of rows to come, which are kept for the next item of the same size.
MAX_SHAPES = 1024


class Room:
    """Where on the device an item's rows will lie. writing: None where there is no room."""

    def __init__(self, store: RowStore, namespace: str, coming: EncodedItem) -> None:
        """Reserves it. coming: the item without its rows."""
        self._store = store
        self.writing: Writing | None = store.reserve(namespace, coming)

    def give_back(self) -> None:
        """Nothing will be written there."""
        if self.writing is not None:
            self._store.cancel_put(self.writing)


@dataclass(frozen=True)
class TowerRun:
    """clock: seconds, the engine's. workers: make large copies. loop: the one that this runs on. shared:
    asked before an item is encoded."""

    engine: DeviceEngine
    store: RowStore
    workers: Executor
    tower: Tower
    clock: Callable[[], float]
    loop: asyncio.AbstractEventLoop
    shared: SharedTier | None = None
    _shapes: dict[int, torch.Tensor] = field(default_factory=dict)

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Has the loop call ``function``, from any thread; does nothing once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

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

    async def run(self, flight: Flight, grid: Grid, load: LoadPixels) -> Held:
        """The rows of an item whose pixels ``load`` makes on a worker, held where the store keeps them, or as
        they came when it had no room. Fills in the flight's timings. Raises what ``load`` does, and what the
        engine's future ends with."""
        handover = Handover(self, flight, grid, load)
        result, held = await handover.landed_rows()
        if held is None:
            return await self._stored(flight, replace(self.rows_to_come(flight, grid), rows=result.rows))
        return held

    async def _stored(self, flight: Flight, encoded: EncodedItem) -> Held:
        """Rows that came to memory of their own."""
        stored_s = self.clock()
        held = await self.keep(flight.namespace, encoded)
        flight.timings.store_ms = (self.clock() - stored_s) * 1e3
        return held

    def rows_to_come(self, flight: Flight, grid: Grid) -> EncodedItem:
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


def as_future_exception(error: BaseException) -> BaseException:
    """The error in a form that a future accepts, which refuses StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    made = InternalError(f"StopIteration: {error}")
    made.__cause__ = error
    return made


def start_soon(workers: Executor, job: Callable[[], object]) -> None:
    """Runs a job that does not raise on a worker. Raises as the executor's ``submit``."""
    if isinstance(workers, WorkerThreads):
        workers.start_soon(job)
    else:
        workers.submit(job)


class Handover:
    """One item from its worker to the engine, and its rows back to the loop.

    Its worker hands the pixels to the engine itself, into room that the loop has taken meanwhile: by way of
    the loop they would wait for two of its turns, and for the room, with the device idle. The room is the
    engine's until the engine says how the item ended, also when every caller has left before.
    """

    def __init__(self, towers: TowerRun, flight: Flight, grid: Grid, load: LoadPixels) -> None:
        self._towers, self._flight, self._grid = towers, flight, grid
        # What is done with is let go of at once: flights that were given up stay until they are collected.
        self._load: LoadPixels | None = load
        self._landed: asyncio.Future[tuple[TowerResult, Held | None]] = (
            asyncio.get_running_loop().create_future()
        )
        self._item: TowerItem | None = None
        self._room: Room | None = None

    async def landed_rows(self) -> tuple[TowerResult, Held | None]:
        """What the engine made, and the rows held in their room; None where they had none. Once."""
        towers, flight, landed = self._towers, self._flight, self._landed
        start_soon(towers.workers, self._work)
        try:
            return await landed
        except asyncio.CancelledError:
            flight.ticket.cancelled = True  # the worker may be about to hand it over
            towers.engine.discard(flight.ticket)
            if landed.done() and not landed.cancelled() and landed.exception() is None:
                held = landed.result()[1]
                if held is not None:
                    held.drop()
            raise

    # -- on the worker ---------------------------------------------------------------------------------

    def _work(self) -> None:
        post = self._towers.post
        try:
            self._make_pixels()
            if self._item is None:
                post(self._fail, cancelled_error())
            elif self._room is None:  # the loop is not so far
                post(self._submit_on_loop)
            else:
                self._submit(self._room)
        except BaseException as error:
            post(self._fail, error)

    def _make_pixels(self) -> None:
        """None where every caller has left."""
        load, self._load = self._load, None
        if load is None or self._landed.cancelled():
            return
        self._towers.post(self._take_room)
        item, decode_ms, resize_ms = load()
        timings = self._flight.timings
        timings.decode_ms, timings.resize_ms = decode_ms, resize_ms
        if not self._landed.cancelled():
            self._item = item

    def _submit(self, room: Room) -> None:
        """Hands the item over. Raises as ``DeviceEngine.submit``."""
        towers, flight, item = self._towers, self._flight, self._item
        assert item is not None
        self._item = None  # the engine's now
        target = None if room.writing is None else room.writing.target
        flight.queued_s = towers.clock()
        future = towers.engine.submit(item, flight.ticket, target)
        future.add_done_callback(functools.partial(towers.post, self._end))
        if self._landed.cancelled():  # in this moment: whoever gave it up did not find it with the engine
            towers.engine.discard(flight.ticket)

    # -- on the loop -----------------------------------------------------------------------------------

    def _take_room(self) -> None:
        """While the worker decodes, which does not need the interpreter's lock: sooner, the worker would wait
        for that."""
        if not self._landed.cancelled():
            towers, flight = self._towers, self._flight
            coming = towers.rows_to_come(flight, self._grid)
            self._room = Room(towers.store, flight.namespace, coming)

    def _submit_on_loop(self) -> None:
        try:
            if self._room is None:
                self._take_room()
            if self._room is None or self._landed.cancelled():
                raise cancelled_error()
            self._submit(self._room)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing was handed over."""
        self._item = None
        try:
            if self._room is not None:
                self._room.give_back()
        finally:  # a defect of the store's would else leave everybody waiting
            if not self._landed.done():
                self._landed.set_exception(as_future_exception(error))

    def _end(self, done: Future[TowerResult]) -> None:
        try:
            found = self._found(done)
        except BaseException as error:  # a defect of the store's would else leave everybody waiting
            if not self._landed.cancelled():
                self._landed.set_exception(error)
            return
        if not self._landed.cancelled():
            self._landed.set_result(found)
            self._flight.wake()
        elif found[1] is not None:
            found[1].drop()

    def _found(self, done: Future[TowerResult]) -> tuple[TowerResult, Held | None]:
        """What the engine's future ended with, and the rows held, or None where they have no room. Raises its
        error, Draining after the store was closed; the room is given back then, or kept from everybody where
        the device may still write."""
        room, flight, store = self._room, self._flight, self._towers.store
        assert room is not None
        error = done.exception()
        if error is not None:
            if not isinstance(error, DeviceFault):
                room.give_back()
            raise error
        result = done.result()
        flight.timings.queue_ms = (result.started_s - flight.queued_s) * 1e3
        flight.timings.tower_ms = result.tower_ms
        if room.writing is None:
            return result, None
        store.finish_put(room.writing)
        # In the same step, so that nothing evicts it before it is held.
        held = store.hold(flight.namespace, flight.key, is_lookup=False)
        if held is None:
            raise Draining("the service stopped before the item was delivered")
        return result, held
