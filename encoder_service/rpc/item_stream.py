"""The response stream of one Encode or Fetch: runs a task per item and writes each outcome when it is ready.

Owns which items run, the order of messages on the stream, the rows that the caller has not read yet, and the
cancellation of items whose caller leaves. ``scheduler.admission`` limits the unread rows of all calls
together. The pipeline owns the work on an item, ``convert`` the fields of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import torch

from encoder_service.errors import DeadlineExceeded
from encoder_service.ops.shares import Holder
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.rpc import convert
from encoder_service.rpc.delivery import Delivery, Wanted
from encoder_service.rpc.observed import Call
from encoder_service.scheduler.admission import UnreadBytes
from encoder_service.store.embedding_store import Location
from vision_encoder.v1 import encoder_pb2 as pb

Request = TypeVar("Request")
Context = grpc.aio.ServicerContext[Any, Any]

# A call with this many unread bytes starts no further item until its caller has read some of them.
MAX_BYTES_PER_CALL = 64 << 20
# Longest time that a caller may leave a message of a megabyte unread.
UNREAD_S = 30.0


class OutboundBudget:
    """The unread rows of one call."""

    def __init__(self, unread: UnreadBytes, holder: Holder) -> None:
        self._unread, self._holder = unread, holder
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Waits until the call has less than MAX_BYTES_PER_CALL unread."""
        while self._num_bytes >= MAX_BYTES_PER_CALL:
            self._has_room.clear()
            await self._has_room.wait()

    def add(self, delivered: EncodeResult) -> None:
        """Counts rows that are ready, until ``remove``."""
        encoded = delivered.encoded
        self._unread.add(encoded, encoded.spec.num_bytes, self._holder)
        self._num_bytes += encoded.spec.num_bytes

    def remove(self, delivered: EncodeResult) -> None:
        """Releases rows that were written or never will be. Call once for each ``add``."""
        encoded = delivered.encoded
        self._unread.remove(encoded, encoded.spec.num_bytes)
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
        wanted: Wanted,
    ) -> None:
        self._pipeline = pipeline
        self._delivery = delivery
        self._context = context
        self._call = call
        self._wanted = wanted
        self._budget = OutboundBudget(pipeline.unread, call.holder_of(wanted.namespace))
        self._writing = asyncio.Lock()
        self._num_items = 0

    async def run(
        self, encode: Callable[[Request], Awaitable[EncodeResult]], requests: Sequence[Request]
    ) -> None:
        """Runs ``encode`` for all requests concurrently and writes each outcome when it is ready. While the
        caller leaves much unread, items that have not begun wait. If cancelled, cancels the items. Raises
        CancelledError when a write fails: the caller has left, but gRPC has not cancelled this task yet;
        DeadlineExceeded when the caller stops reading; the failure of a routed call."""
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
            await self._budget.wait_for_room()
            delivered, place = await self._delivery.prepare(await encode(request), self._wanted)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the caller has left
                raise
            failure = self._call.item_failure(self._pipeline.metrics, error, index, self._num_items)
            async with self._writing:
                await self._send(pb.ItemEvent(item_index=index, failure=failure))
            return
        self._budget.add(delivered)
        try:
            async with self._writing:
                await self._write(index, delivered, place)
            transport = "inline" if place is None else place.tier
            self._call.delivered(self._pipeline.metrics, delivered, index, transport, self._pipeline.clock())
        finally:
            self._budget.remove(delivered)

    async def _write(self, index: int, delivered: EncodeResult, place: Location | None) -> None:
        delivery_ms = (self._pipeline.clock() - delivered.ready_s) * 1e3
        await self._send(convert.result_event(index, delivered, place, delivery_ms))
        if place is None:
            rows: torch.Tensor = delivered.encoded.rows
            for chunk in convert.chunk_events(index, rows):
                await self._send(chunk)

    async def _send(self, message: object) -> None:
        """Raises DeadlineExceeded when the caller takes no message for UNREAD_S: its rows count against the
        limit of all callers."""
        try:
            async with asyncio.timeout(UNREAD_S):
                await self._context.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"the caller has read nothing for {UNREAD_S} s") from None
