"""The items of one call: runs a task per item and hands each outcome to the call's writer when it is ready.

Owns which items run, the rows of the call that are not delivered yet, and the cancellation of items when the
caller leaves; ``EventWriter`` owns the order of messages on the stream of an Encode or Fetch.
``scheduler.admission`` limits the undelivered rows of all calls together. The pipeline owns the work on an
item, ``convert`` the fields of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from encoder_service.errors import VisionEncoderError, forget_traceback
from encoder_service.ops.shares import Holder
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.rpc import convert
from encoder_service.rpc.delivery import Delivery, RowsRequest
from encoder_service.rpc.observed import Call
from encoder_service.rpc.response import write
from encoder_service.rpc.status import as_service_error, failure_of
from encoder_service.scheduler.admission import UndeliveredBytes
from encoder_service.store.embedding_store import Location
from vision_encoder.v1 import encoder_pb2 as pb

Request = TypeVar("Request")
Context = grpc.aio.ServicerContext[Any, Any]

# A call with this many undelivered bytes starts no further item until its caller has read some of them.
MAX_BYTES_PER_CALL = 64 << 20


class UndeliveredRows:
    """The rows of one call that are ready and not written yet. all_calls: counts those of all calls.
    max_bytes: None for a call that is bounded elsewhere."""

    def __init__(self, all_calls: UndeliveredBytes, holder: Holder, max_bytes: int | None) -> None:
        self._all_calls, self._holder, self._max_bytes = all_calls, holder, max_bytes
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Waits until the call has less than its limit undelivered."""
        while self._max_bytes is not None and self._num_bytes >= self._max_bytes:
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
        if self._max_bytes is None or self._num_bytes < self._max_bytes:
            self._has_room.set()


class ItemWriter(Protocol):
    """Takes the outcomes of a call's items, in any order and several at a time."""

    async def failed(self, index: int, error: VisionEncoderError) -> None:
        """Returns once the failure was handed to the caller."""

    async def rows(self, index: int, delivered: EncodeResult, place: Location | None) -> None:
        """Returns once the rows, or their place, were handed to the caller. They are released then."""


class EventWriter:
    """The gRPC stream of one call, one item's messages at a time. clock: the pipeline's."""

    def __init__(self, context: Context, clock: Callable[[], float]) -> None:
        self._context, self._clock = context, clock
        self._writing = asyncio.Lock()

    async def failed(self, index: int, error: VisionEncoderError) -> None:
        async with self._writing:
            await write(self._context, pb.ItemEvent(item_index=index, failure=failure_of(error)))

    async def rows(self, index: int, delivered: EncodeResult, place: Location | None) -> None:
        async with self._writing:
            delivery_ms = (self._clock() - delivered.ready_s) * 1e3
            await write(self._context, convert.result_event(index, delivered, place, delivery_ms))
            if place is None:
                for chunk in convert.chunk_events(index, delivered.encoded.rows):
                    await write(self._context, chunk)


class ItemStream:
    """The items of one call. Call ``run`` once."""

    def __init__(
        self,
        pipeline: Pipeline,
        delivery: Delivery,
        writer: ItemWriter,
        call: Call,
        *,
        requested: RowsRequest,
        needs_all: bool = False,
    ) -> None:
        """needs_all: the writer hands over no rows before it has those of all items, so that
        MAX_BYTES_PER_CALL delays none; the call's rows are bounded elsewhere."""
        self._pipeline = pipeline
        self._delivery = delivery
        self._writer = writer
        self._call = call
        self._requested = requested
        holder = call.holder_of(requested.namespace)
        max_bytes = None if needs_all else MAX_BYTES_PER_CALL
        self._undelivered = UndeliveredRows(pipeline.undelivered, holder, max_bytes)
        self._num_items = 0

    async def run(
        self, encode: Callable[[Request], Awaitable[EncodeResult]], requests: Sequence[Request]
    ) -> None:
        """Runs ``encode`` for all requests concurrently and writes each outcome when it is ready. Items that
        have not begun wait while the call has too many undelivered bytes. If cancelled, cancels the items.

        Raises CancelledError if a write fails, because the caller has left and gRPC has not cancelled this
        task yet; DeadlineExceeded if the caller stops reading; the failure of a routed call."""
        self._num_items = len(requests)
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(self._run_item(index, encode, request))
        except ExceptionGroup as failed:
            failure = (
                asyncio.CancelledError() if failed.subgroup(grpc.aio.BaseError) else failed.exceptions[0]
            )
            forget_traceback(failed)
            if isinstance(failure, VisionEncoderError):  # of a defect it is logged
                forget_traceback(failure)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, group  # they would keep the requests until a garbage collection

    async def _run_item(
        self, index: int, encode: Callable[[Request], Awaitable[EncodeResult]], request: Request
    ) -> None:
        self._call.open_item(index)
        try:
            await self._undelivered.wait_for_room()
            delivered, place = await self._delivery.prepare(await encode(request), self._requested)
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():  # the caller has left
                raise
            self._call.item_failure(self._pipeline.metrics, error, index, self._num_items)
            await self._writer.failed(index, as_service_error(error))
            return
        self._undelivered.add(delivered)
        try:
            await self._writer.rows(index, delivered, place)
            transport = "inline" if place is None else place.tier
            self._call.delivered(self._pipeline.metrics, delivered, index, transport, self._pipeline.clock())
        finally:
            self._undelivered.remove(delivered)


def _is_cancelled() -> bool:
    """Of the current task, which a frame that raises should not hold: it would keep its own failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
