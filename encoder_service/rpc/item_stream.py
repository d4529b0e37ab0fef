"""The response stream of one Encode or Fetch: runs a task per item and writes each outcome when it is ready.

Owns which items run, the order of messages on the stream, the rows of the call that are not delivered yet,
and the cancellation of items when the caller leaves. ``scheduler.admission`` limits the undelivered rows of
all calls together. The pipeline owns the work on an item, ``convert`` the fields of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from encoder_service.ops.shares import Holder
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.rpc import convert
from encoder_service.rpc.delivery import Delivery, RowsRequest
from encoder_service.rpc.observed import Call
from encoder_service.rpc.response import write
from encoder_service.scheduler.admission import UndeliveredBytes
from encoder_service.store.embedding_store import Location
from vision_encoder.v1 import encoder_pb2 as pb

Request = TypeVar("Request")
Context = grpc.aio.ServicerContext[Any, Any]

# A call with this many undelivered bytes starts no further item until its caller has read some of them.
MAX_BYTES_PER_CALL = 64 << 20


class UndeliveredRows:
    """The rows of one call that are ready and not written yet. all_calls: counts those of all calls."""

    def __init__(self, all_calls: UndeliveredBytes, holder: Holder) -> None:
        self._all_calls, self._holder = all_calls, holder
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Waits until the call has less than MAX_BYTES_PER_CALL undelivered."""
        while self._num_bytes >= MAX_BYTES_PER_CALL:
            self._has_room.clear()
            await self._has_room.wait()

    def add(self, delivered: EncodeResult) -> None:
        """Counts rows that are ready, until ``remove``."""
        encoded = delivered.encoded
        self._all_calls.add(encoded, encoded.spec.num_bytes, self._holder)
        self._num_bytes += encoded.spec.num_bytes

    def remove(self, delivered: EncodeResult) -> None:
        """Releases rows that were written, or that never will be. Call it once for each ``add``."""
        encoded = delivered.encoded
        self._all_calls.remove(encoded, encoded.spec.num_bytes)
        self._num_bytes -= encoded.spec.num_bytes
        delivered.release()
        if self._num_bytes < MAX_BYTES_PER_CALL:
            self._has_room.set()


class ItemStream:
    """The stream of one call. Call ``run`` once."""

    def __init__(
        self,
        pipeline: Pipeline,
        delivery: Delivery,
        context: Context,
        call: Call,
        *,
        requested: RowsRequest,
    ) -> None:
        self._pipeline = pipeline
        self._delivery = delivery
        self._context = context
        self._call = call
        self._requested = requested
        self._undelivered = UndeliveredRows(pipeline.undelivered, call.holder_of(requested.namespace))
        self._writing = asyncio.Lock()
        self._num_items = 0

    async def run(
        self, encode: Callable[[Request], Awaitable[EncodeResult]], requests: Sequence[Request]
    ) -> None:
        """Runs ``encode`` for all requests concurrently and writes each outcome when it is ready. Items that
        have not begun wait while the call has too many undelivered bytes. If cancelled, cancels the items.

        Raises CancelledError if a write fails, because the caller has left and gRPC has not cancelled this
        task yet; DeadlineExceeded if the caller stops reading; the failure of a routed call."""
        self._num_items = len(requests)
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(self._run_item(index, encode, request))
        except ExceptionGroup as failed:
            if failed.subgroup(grpc.aio.BaseError):
                raise asyncio.CancelledError from None
            raise failed.exceptions[0] from None

    async def _run_item(
        self, index: int, encode: Callable[[Request], Awaitable[EncodeResult]], request: Request
    ) -> None:
        self._call.open_item(index)
        try:
            await self._undelivered.wait_for_room()
            delivered, place = await self._delivery.prepare(await encode(request), self._requested)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the caller has left
                raise
            failure = self._call.item_failure(self._pipeline.metrics, error, index, self._num_items)
            async with self._writing:
                await write(self._context, pb.ItemEvent(item_index=index, failure=failure))
            return
        self._undelivered.add(delivered)
        try:
            async with self._writing:
                await self._write(index, delivered, place)
            transport = "inline" if place is None else place.tier
            self._call.delivered(self._pipeline.metrics, delivered, index, transport, self._pipeline.clock())
        finally:
            self._undelivered.remove(delivered)

    async def _write(self, index: int, delivered: EncodeResult, place: Location | None) -> None:
        delivery_ms = (self._pipeline.clock() - delivered.ready_s) * 1e3
        await write(self._context, convert.result_event(index, delivered, place, delivery_ms))
        if place is None:
            for chunk in convert.chunk_events(index, delivered.encoded.rows):
                await write(self._context, chunk)
