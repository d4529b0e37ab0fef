"""One clip from its content to its rows, in pieces: decoded, encoded and, where a caller wants them early,
handed on one after another.

Owns the order of a clip's pieces: each is decoded on a worker while the device has the one before, and waits
like any other item in the planner, so that images and clips share batches and graphs. A clip has a few pieces
decoded at a time, whatever its length. What becomes of a piece on the device is the engine's; decoding and
the cut are ``ingest.clips``'. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import structlog
import torch

from encoder_service.engine.faults import first_line
from encoder_service.engine.jobs import TowerResult
from encoder_service.errors import ClipTooLarge, DeviceFault, Draining, InternalError, UnsupportedContent
from encoder_service.flights import Flight
from encoder_service.ingest.clips import Clip, ClipPlan
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.load import DeviceLoad
from encoder_service.scheduler.admission import Permit
from encoder_service.scheduler.planner import Ticket
from encoder_service.store.embedding_store import Held, Writing
from encoder_service.store.mover import read_failure
from encoder_service.store.rows_prefix import RowsPrefix
from encoder_service.tower_run import COPY_INLINE_BYTES, TowerRun
from encoder_service.types import (
    ClipFacts,
    EncodedFile,
    EncodedItem,
    FrameArray,
    FrameItem,
    Grid,
    PreprocessOptions,
)

log = structlog.get_logger(__name__)

# Pieces of one clip that are decoded and not yet encoded.
MAX_PIECES_AHEAD = 3


@dataclass(frozen=True)
class ClipRun:
    """max_patches: of one clip; max_piece_patches: of a piece, unless what is attended together has more;
    following: what copies rows ahead of a clip's end."""

    towers: TowerRun
    preprocessor: Preprocessor
    load: DeviceLoad
    max_patches: int
    max_piece_patches: int
    following: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(
        self, flight: Flight, content: EncodedFile | FrameArray, options: PreprocessOptions, permit: Permit
    ) -> Held:
        """The clip's rows, held where the store keeps them, or as they came when it had no room. Announces
        the
        flight and fills in its timings.

        Raises UnsupportedContent, UndecodableClip, ClipTooLarge, AspectRatioExceeded, PixelTensorMismatch,
        QueueFull, and what the engine's futures end with.
        """
        rules = self.preprocessor.clips
        if rules is None:
            raise UnsupportedContent("the checkpoint has no settings for clips; send a clip as pixel tensors")
        towers = self.towers
        started_s = towers.clock()
        clip = await towers.loop.run_in_executor(towers.workers, rules.open, content, options)
        try:
            self._admit(flight, clip.plan, permit)
            flight.timings.admit_ms = (towers.clock() - started_s) * 1e3
            return await Pieces(self, flight, clip).run()
        finally:
            clip.close()

    def num_rows(self, plan: ClipPlan) -> int:
        return sum(self.towers.tower.num_rows(grid) for grid in plan.chunk_grids or (plan.grid,))

    def _admit(self, flight: Flight, plan: ClipPlan, permit: Permit) -> None:
        """Takes room for the clip's patches and tells its grid. Raises ClipTooLarge, QueueFull."""
        num_patches, tower = plan.grid.num_patches, self.towers.tower
        if num_patches > self.max_patches:
            raise ClipTooLarge(
                f"the clip has {num_patches} patches (grid {tuple(plan.grid)}), at most {self.max_patches} "
                "are taken",
                num_patches=num_patches,
                max_patches=self.max_patches,
            )
        for grid in {*plan.chunk_grids} or {plan.grid}:
            tower.check_grid(grid)
        permit.add_patches(num_patches)
        flight.ticket.num_patches = num_patches
        flight.ticket.num_sequences = len(plan.chunk_grids) or plan.grid.t
        self.load.add(flight.ticket)
        flight.num_rows = self.num_rows(plan)
        flight.announced.set_result(plan.grid)


class Piece(NamedTuple):
    """One on its way. first, num_rows: its place among the clip's rows."""

    ticket: Ticket
    future: Future[TowerResult]
    first: int
    num_rows: int
    queued_s: float


class Pieces:
    """One clip's. ``run`` once."""

    def __init__(self, owner: ClipRun, flight: Flight, clip: Clip) -> None:
        self._owner = owner
        self._towers = owner.towers
        self._flight = flight
        self._clip = clip
        self._ahead: deque[Piece] = deque()
        self._futures: list[Future[TowerResult]] = []
        self._num_queued = 0
        coming = self._rows_to_come()
        # Rows that a caller reads as they come are on the host; else they go where the store will keep them.
        self._reserved: Writing | None = None
        self._placed: RowsPrefix | None = None
        self._following: asyncio.Task[None] | None = None
        if not flight.wants_rows_ahead:
            self._reserved = self._towers.store.reserve(flight.namespace, coming)
        if self._reserved is None:
            flight.rows_ahead = on_host(coming)
        else:
            self._placed = RowsPrefix(replace(coming, rows=self._reserved.target))
            flight.begin_rows_ahead = self._begin_rows_ahead

    async def run(self) -> Held:
        """Raises as ``ClipRun.run``."""
        towers = self._towers
        try:
            while (piece := await towers.loop.run_in_executor(towers.workers, self._read)) is not None:
                if len(self._ahead) == MAX_PIECES_AHEAD:
                    await self._take_oldest()
                self._submit(piece)
            while self._ahead:
                await self._take_oldest()
            stored_s = towers.clock()
            held = await self._keep()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._flight.begin_rows_ahead = None  # it would keep all this alive for as long as the flight
        if self._placed is not None:
            self._placed.end()
        if self._following is not None:
            share = held.share()  # it goes on where the rows are held
            self._following.add_done_callback(lambda _: share.drop())
        elif self._flight.rows_ahead is not None:
            self._flight.rows_ahead.end()
        self._flight.timings.store_ms = (towers.clock() - stored_s) * 1e3
        return held

    def _rows_to_come(self) -> EncodedItem:
        """The flight's item but for its rows, whose shape and dtype it tells."""
        flight, tower, plan = self._flight, self._towers.tower, self._clip.plan
        rows = torch.empty(self._owner.num_rows(plan), tower.width, dtype=tower.dtype, device="meta")
        facts = ClipFacts(plan.timestamps_s, plan.chunk_grids)
        levels = tower.num_deepstack_levels
        return EncodedItem(flight.key, flight.content_digest, plan.grid, rows, levels, facts)

    def _read(self) -> FrameItem | None:
        """On a worker: the next piece where the device can read it."""
        piece, tower = self._clip.read_piece(self._owner.max_piece_patches), self._towers.tower
        if piece is None:
            return None
        return pinned(piece, tower.device, tower.dtype)

    def _submit(self, piece: FrameItem) -> None:
        """Queues a piece. It has no deadline of its own: the flight ends with its last caller. Raises as the
        engine's ``submit``."""
        towers, flight, timings = self._towers, self._flight, self._flight.timings
        timings.decode_ms, timings.resize_ms = self._clip.decode_ms, self._clip.resize_ms
        grid = piece.grid
        ticket = ticket_of(grid, flight, merges_time=towers.tower.merges_time)
        first, num_rows = self._num_queued, towers.tower.num_rows(grid)
        place = None if self._reserved is None else self._reserved.target[first : first + num_rows]
        queued_s = towers.clock()
        future = towers.engine.submit(piece, ticket, place)
        self._futures.append(future)
        self._ahead.append(Piece(ticket, future, first, num_rows, queued_s))
        self._num_queued += num_rows

    async def _take_oldest(self) -> None:
        """Waits for the oldest piece; its rows are in their place then. Raises what its future ends with."""
        piece, timings = self._ahead[0], self._flight.timings
        result = await asyncio.wrap_future(piece.future)
        self._ahead.popleft()
        timings.tower_ms += result.tower_ms
        if not piece.first:
            timings.queue_ms = (result.started_s - piece.queued_s) * 1e3
        ahead = self._flight.rows_ahead
        if self._placed is not None:
            self._placed.add(piece.num_rows)
            return
        assert ahead is not None
        target = ahead.item.rows[piece.first : piece.first + piece.num_rows]
        if result.rows.nbytes < COPY_INLINE_BYTES:
            target.copy_(result.rows)
        else:
            await self._towers.loop.run_in_executor(self._towers.workers, target.copy_, result.rows)
        ahead.add(piece.num_rows)

    async def _keep(self) -> Held:
        """All rows into the store. Raises Draining after it was closed."""
        flight, store = self._flight, self._towers.store
        if self._reserved is None:
            assert flight.rows_ahead is not None
            return await self._towers.keep(flight.namespace, flight.rows_ahead.item)
        store.finish_put(self._reserved)
        self._reserved = None
        # In the same step, so that nothing evicts it before it is held.
        held = store.hold(flight.namespace, flight.key, is_lookup=False)
        if held is None:
            raise Draining("the service stopped before the item was delivered")
        return held

    def _begin_rows_ahead(self) -> None:
        """For a caller that joined and reads rows as they come: those that are in the room reserved for them,
        and those that come there, are copied to the host as well."""
        if self._reserved is None or self._placed is None or self._flight.rows_ahead is not None:
            return
        try:
            ahead = on_host(self._rows_to_come())
        except (RuntimeError, MemoryError) as error:
            log.warning("no room for a clip's rows ahead of its end", cause=first_line(error))
            return
        self._flight.rows_ahead = ahead
        self._following = following = asyncio.ensure_future(self._follow(self._placed, ahead))
        self._owner.following.add(following)
        following.add_done_callback(self._owner.following.discard)

    async def _follow(self, placed: RowsPrefix, ahead: RowsPrefix) -> None:
        """Until all rows were copied, or nobody reads them any more. Where it fails, the rest does not come
        to who reads ahead."""
        towers, done, num_rows = self._towers, 0, len(ahead.item.rows)
        try:
            while done < num_rows and ahead.num_readers:
                ready = await placed.beyond(done)
                if ready == done:
                    break
                target = ahead.item.rows[done:ready]
                await towers.loop.run_in_executor(towers.workers, target.copy_, placed.item.rows[done:ready])
                ahead.add(ready - done)
                done = ready
        except Exception as error:
            log.error("a clip's rows were not copied ahead of its end", cause=first_line(error))
            towers.engine.report(error)
        finally:
            ahead.end()
            if done < num_rows and self._flight.rows_ahead is ahead:
                self._flight.rows_ahead = None  # the next to come begins anew

    def _abandon(self) -> None:
        """Drops what waits; room that was reserved goes back once no piece is being written there, and never
        where the device may still write."""
        if self._following is not None:
            self._following.cancel()
        if self._flight.rows_ahead is not None:
            self._flight.rows_ahead.end()
        reserved, self._reserved = self._reserved, None
        for piece in self._ahead:
            self._towers.engine.discard(piece.ticket)
        if reserved is None:
            return
        left = len(self._futures)

        def count(_: Future[TowerResult]) -> None:
            nonlocal left
            left -= 1
            if left <= 0 and not any(isinstance(future.exception(), DeviceFault) for future in self._futures):
                self._towers.store.cancel_put(reserved)

        if not self._futures:
            self._towers.store.cancel_put(reserved)
        for future in self._futures:
            with contextlib.suppress(RuntimeError):
                future.add_done_callback(functools.partial(self._towers.post, count))


def on_host(coming: EncodedItem) -> RowsPrefix:
    """Room on the host for rows to come."""
    return RowsPrefix(replace(coming, rows=torch.empty(coming.rows.shape, dtype=coming.rows.dtype)))


def ticket_of(grid: Grid, flight: Flight, *, merges_time: bool) -> Ticket:
    """A piece's place in the queue."""
    return Ticket(
        grid.num_patches,
        is_prefetch=flight.ticket.is_prefetch,
        num_sequences=1 if merges_time else grid.t,
        num_frames=grid.t if merges_time else 1,
    )


class RowsAhead:
    """A clip's rows for one caller, who reads them as they come. item: what is known of them beforehand."""

    def __init__(self, prefix: RowsPrefix, waiting: asyncio.Task[Held]) -> None:
        """prefix: counts this reader already."""
        self.item = prefix.item
        self._prefix = prefix
        self._waiting = waiting
        self._is_released = False

    async def beyond(self, num_rows: int) -> int:
        """How many rows are ready once that is more than ``num_rows``, which is not all. Raises the flight's
        failure."""
        ready = await self._prefix.beyond(num_rows)
        if ready <= num_rows:
            await self.whole()
        return ready

    async def whole(self) -> None:
        """Returns once the flight has ended and all rows are there. Raises its failure."""
        await asyncio.shield(self._waiting)
        num_rows = len(self.item.rows)
        ready = await self._prefix.beyond(num_rows - 1)
        if ready < num_rows:
            raise InternalError(f"the clip ended with {ready} of {num_rows} rows")

    def release(self) -> None:
        """The caller reads no more; before the flight has ended, that may end it. Twice is once."""
        self._prefix.num_readers -= not self._is_released
        self._is_released = True
        if not self._waiting.cancel():
            drop_rows(self._waiting)

    @classmethod
    async def of(cls, flight: Flight, waiting: Coroutine[Any, Any, Held]) -> Held | RowsAhead:
        """The flight's first rows while there are more to come, else all of them. waiting: of the flight, for
        this caller. Raises its failure."""
        task = asyncio.ensure_future(waiting)
        try:
            await _first_of(task, flight.announced)
            if not task.done() and flight.begin_rows_ahead is not None:
                flight.begin_rows_ahead()
            prefix = flight.rows_ahead
            if not task.done() and prefix is not None:
                prefix.num_readers += 1
                found = None
                first = asyncio.ensure_future(prefix.beyond(0))
                try:
                    await _first_of(task, first)
                    if not prefix.is_ended:
                        task.add_done_callback(read_failure)
                        found = cls(prefix, task)
                        return found
                finally:
                    first.cancel()
                    prefix.num_readers -= found is None
            return await task
        except BaseException:
            if not task.cancel():
                drop_rows(task)
            raise


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Returns once one of them has ended, however."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def drop_rows(task: asyncio.Task[Held]) -> None:
    """Gives up the hold that a task ended with, if it did."""
    if not task.cancelled() and task.exception() is None:
        task.result().drop()
