"""The stream of one Encode or Fetch: its items, run at once, each written as it ends.

Owns what a call's items wait for, what becomes of those whose caller leaves, and what is written of each.
What an item's work is made of is the pipeline's, the words of a message ``convert``'s. A call with one item,
which most are, runs it in its own task: another for each, with a queue, costs more than making the key does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
import torch

from encoder_service import traces
from encoder_service.clip_run import RowsAhead
from encoder_service.errors import TransportUnavailable
from encoder_service.pipeline import Delivered, Pipeline
from encoder_service.rpc import convert
from encoder_service.rpc.observed import Call
from encoder_service.rpc.status import failure_of
from encoder_service.rpc.unread import Unread
from encoder_service.store.embedding_store import Tier
from encoder_service.store.tiers import tier_of
from encoder_service.transport.shared_memory import LeasedRows, LeaseTerms, SharedMemory
from vision_encoder.v1 import encoder_pb2 as pb

Request = TypeVar("Request")
Work: TypeAlias = Callable[[Request], Coroutine[Any, Any, Delivered]]
Context = grpc.aio.ServicerContext[Any, Any]


class ItemStream:
    """One call's. ``run`` once."""

    def __init__(
        self,
        pipeline: Pipeline,
        shared: SharedMemory | None,
        context: Context,
        watched: Call,
        *,
        namespace: str,
        tier: Tier,
        terms: LeaseTerms | None,
        chunk_bytes: int,
    ) -> None:
        """tier: where the caller reads rows; terms: of its leases, None for rows in chunks."""
        self._pipeline = pipeline
        self._shared = shared
        self._context = context
        self._watched = watched
        self._namespace = namespace
        self._tier = tier
        self._terms = terms
        self._chunk_bytes = chunk_bytes
        self._unread = Unread(pipeline.undelivered)

    async def run(self, one: Work[Request], requests: Sequence[Request]) -> None:
        """Runs ``one`` for every request at once and writes each outcome as it comes; while the caller leaves
        much unread, items that have not begun wait. When the caller leaves, the tasks of what it still waits
        for are cancelled."""
        try:
            # A span is its task's from the start to the end: with spans, each item has a task of its own.
            if len(requests) == 1 and not traces.is_on():
                await self._run_alone(one, requests[0])
            else:
                await self._run_all(one, requests)
        finally:
            self._unread.clear()

    async def _run_alone(self, one: Work[Request], request: Request) -> None:
        try:
            delivered = await self._ready(one, request)
            leased = self._lease(delivered)
            if leased is None and tier_of(delivered.held) == "device":
                delivered = await self._lowered(delivered)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the caller has left
                raise
            await self._write_failure(0, error)
        except Exception as error:
            await self._write_failure(0, error)
        else:
            await self._write(0, delivered, leased, is_last=leased is not None)

    async def _run_all(self, one: Work[Request], requests: Sequence[Request]) -> None:
        finished: asyncio.Queue[int] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[Delivered]] = {}

        def begin(index: int, work: Coroutine[Any, Any, Delivered]) -> None:
            tasks[index] = asyncio.ensure_future(work)
            tasks[index].add_done_callback(lambda _: finished.put_nowait(index))

        async def when_read(request: Request) -> Delivered:
            await self._unread.wait_for_room()
            return await self._ready(one, request)

        for index, request in enumerate(requests):
            begin(index, self._watched.item(index, when_read(request)))
        lowering: set[int] = set()
        try:
            while tasks:
                index = await finished.get()
                delivered = None
                try:
                    delivered = tasks.pop(index).result()
                    leased = None if index in lowering else self._lease(delivered)
                except (Exception, asyncio.CancelledError) as error:
                    if delivered is not None:  # makes room for those that wait for it
                        self._unread.remove(delivered)
                    await self._write_failure(index, error)
                    continue
                if leased is None and tier_of(delivered.held) == "device":  # chunks are cut on the host
                    lowering.add(index)
                    begin(index, self._lowered(delivered))
                    continue
                await self._write(index, delivered, leased)
                del delivered  # sent: the rows are the store's alone again
        finally:
            for task in tasks.values():
                task.cancel()

    # -- one item --------------------------------------------------------------------------------------

    async def _ready(self, one: Work[Request], request: Request) -> Delivered:
        """The item's rows where their caller reads them, unread from now on."""
        if self._terms is not None:  # nothing is encoded for a delivery that cannot be
            self._shared_memory().check_owner(self._terms.owner_id, self._namespace)
        delivered = await one(request)
        if tier_of(delivered.held) != self._tier:
            try:
                delivered = await self._pipeline.placed(delivered, self._namespace, self._tier)
            except BaseException:
                delivered.release()
                raise
        self._unread.add(delivered)
        return delivered

    async def _lowered(self, delivered: Delivered) -> Delivered:
        """The same rows on the host, unread in their place."""
        try:
            lowered = await self._pipeline.placed(delivered, self._namespace, "host")
        except BaseException:
            self._unread.remove(delivered)
            raise
        self._unread.replace(delivered, lowered)
        return lowered

    def _lease(self, delivered: Delivered) -> LeasedRows | None:
        """The rows under a lease; None when they go inline. Raises TransportUnavailable."""
        if self._terms is None or delivered.held is None:
            return None
        return self._shared_memory().lease(delivered.held, self._namespace, self._terms)

    def _shared_memory(self) -> SharedMemory:
        if self._shared is None:
            raise TransportUnavailable("this server shares no memory; ask for inline rows")
        return self._shared

    async def _write(
        self, index: int, delivered: Delivered, leased: LeasedRows | None, *, is_last: bool = False
    ) -> None:
        """is_last: nothing of the call comes behind it."""
        clock, write = self._pipeline.clock, self._context.write
        if is_last:
            write = getattr(self._context, "write_last", write)  # which gRPC's own has not
        delivery_ms = (clock() - delivered.ready_s) * 1e3
        await write(convert.result_event(index, delivered, self._chunk_bytes, leased, delivery_ms))
        if delivered.ahead is not None:
            try:
                await self._write_ahead(index, delivered.encoded.rows, delivered.ahead)
            except Exception as error:
                self._unread.remove(delivered)
                await self._write_failure(index, error)
                return
        elif leased is None:
            await self._write_chunks(index, delivered.encoded.rows)
        transport = "inline" if leased is None else leased.arena.kind
        self._watched.delivered(self._pipeline.metrics, delivered, index, transport, clock())
        self._unread.remove(delivered)

    async def _write_chunks(self, index: int, rows: torch.Tensor) -> None:
        """Each is made while gRPC's threads send the one before it."""
        chunks = convert.chunk_events(index, rows, self._chunk_bytes)
        chunk: bytes | None = next(chunks)
        if rows.nbytes <= self._chunk_bytes:
            await self._context.write(chunk)
            return
        while chunk is not None:
            sending = asyncio.ensure_future(self._context.write(chunk))
            try:
                await asyncio.sleep(0)  # it begins
                chunk = next(chunks, None)
                await sending
            finally:
                sending.cancel()  # where the caller has left

    async def _write_ahead(self, index: int, rows: torch.Tensor, ahead: RowsAhead) -> None:
        """Rows of a clip as they come, in whole chunks but for the last. Raises what the clip ends with."""
        num_ready, row_bytes = 0, rows.shape[1] * rows.itemsize
        payload = rows.reshape(-1).view(torch.uint8).numpy().data
        offset = 0
        while offset < len(payload):
            num_ready = await ahead.beyond(num_ready)
            ready_bytes, is_last = num_ready * row_bytes, num_ready == len(rows)
            while offset < ready_bytes and (is_last or offset + self._chunk_bytes <= ready_bytes):
                end = min(offset + self._chunk_bytes, len(payload))
                await self._context.write(convert.chunk_event(index, offset, payload[offset:end]))
                offset = end
        await ahead.whole()

    async def _write_failure(self, index: int, error: BaseException) -> None:
        failure = failure_of(error)
        self._watched.failed(self._pipeline.metrics, failure, index)
        await self._context.write(pb.ItemEvent(item_index=index, failure=failure))
