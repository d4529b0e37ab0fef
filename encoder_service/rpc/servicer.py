"""The calls of vision_encoder.v1.VisionEncoder on the pipeline.

Owns what a call is made of: its items, deadline, cancellation and stream. Every item's failure stays its
own; only a call that cannot be read at all fails as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import structlog

from encoder_service.errors import InvalidRequest, UnknownLease, UnknownModel, VisionEncoderError
from encoder_service.flights import Flight
from encoder_service.pipeline import Delivered, Pipeline
from encoder_service.rpc import convert
from encoder_service.rpc.status import FAILURE_METADATA_KEY, failure_of, status_of
from encoder_service.types import EncodedItem, Item
from vision_encoder.v1 import encoder_pb2 as pb

log = structlog.get_logger(__name__)
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]

MAX_NAMESPACE_BYTES = 256
# A converted tensor below this is copied on the event loop.
CONVERT_INLINE_BYTES = 1 << 20


class VisionEncoderServicer:
    """Handlers by method name; ``rpc.server`` registers them."""

    def __init__(
        self,
        pipeline: Pipeline,
        info: pb.GetServerInfoResponse,
        *,
        max_items: int,
        chunk_bytes: int,
    ) -> None:
        self._pipeline = pipeline
        self._info = info
        self._max_items = max_items
        self._chunk_bytes = chunk_bytes

    # -- unary calls -----------------------------------------------------------------------------------

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async def answer() -> pb.GetServerInfoResponse:
            # Zero is a caller that does not say; it is shown the versions and decides for itself.
            version = request.protocol_version
            if version and version < convert.MIN_PROTOCOL_VERSION:
                least = convert.MIN_PROTOCOL_VERSION
                raise InvalidRequest(f"protocol version {version} is too old, at least {least} is needed")
            return self._info

        return await self._unary("GetServerInfo", context, answer)

    async def lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        async def answer() -> pb.LookupResponse:
            self._check_call(request.namespace, "", len(request.keys))
            return pb.LookupResponse(
                statuses=[self._key_status(key, request.namespace) for key in request.keys]
            )

        return await self._unary("Lookup", context, answer)

    async def prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        async def one(message: pb.Item) -> pb.PrefetchStatus:
            try:
                item = await self._read_item(message)
                announced = await self._pipeline.prefetch(
                    item, namespace=request.namespace, priority=request.priority
                )
            except VisionEncoderError as error:
                self._pipeline.metrics.failures.labels(error.reason).inc()
                return pb.PrefetchStatus(failure=failure_of(error))
            return pb.PrefetchStatus(
                key=announced.key,
                content_digest=announced.content_digest,
                state=pb.KEY_STATE_RESIDENT if announced.resident else pb.KEY_STATE_IN_FLIGHT,
                grid_thw=convert.grid_to_proto(announced.grid),
                num_rows=announced.num_rows,
            )

        async def answer() -> pb.PrefetchResponse:
            self._check_call(request.namespace, request.model, len(request.items))
            return pb.PrefetchResponse(statuses=await asyncio.gather(*map(one, request.items)))

        return await self._unary("Prefetch", context, answer)

    async def release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        async def answer() -> pb.ReleaseResponse:
            return pb.ReleaseResponse(num_released=0, unknown_lease_ids=request.lease_ids)

        return await self._unary("Release", context, answer)

    async def renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        async def answer() -> pb.RenewResponse:
            return pb.RenewResponse(
                statuses=[
                    pb.LeaseStatus(
                        lease_id=lease_id,
                        failure=failure_of(UnknownLease(f"lease {lease_id.hex()} is not held here")),
                    )
                    for lease_id in request.lease_ids
                ]
            )

        return await self._unary("Renew", context, answer)

    # -- streams ---------------------------------------------------------------------------------------

    async def encode(
        self, request: pb.EncodeRequest, context: Context
    ) -> AsyncIterator[pb.ItemEvent | bytes]:
        deadline_s = deadline_of(context, self._pipeline.clock)

        async def one(message: pb.Item) -> Delivered:
            item = await self._read_item(message)
            return await self._pipeline.encode(
                item, namespace=request.namespace, priority=request.priority, deadline_s=deadline_s
            )

        async def check() -> None:
            self._check_call(request.namespace, request.model, len(request.items))
            convert.check_delivery(request.delivery)

        async for event in self._stream("Encode", context, check, one, request.items):
            yield event

    async def fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.ItemEvent | bytes]:
        deadline_s = deadline_of(context, self._pipeline.clock)

        async def one(key: bytes) -> Delivered:
            return await self._pipeline.fetch(key, namespace=request.namespace, deadline_s=deadline_s)

        async def check() -> None:
            self._check_call(request.namespace, "", len(request.keys))
            convert.check_delivery(request.delivery)

        async for event in self._stream("Fetch", context, check, one, request.keys):
            yield event

    async def _stream(
        self,
        method: str,
        context: Context,
        check: Callable[[], Awaitable[None]],
        one: Callable[[Any], Awaitable[Delivered]],
        requests: Sequence[Any],
    ) -> AsyncIterator[pb.ItemEvent | bytes]:
        """Runs ``one`` for every request at once and yields each outcome as it comes. When the caller
        leaves, the tasks of what it still waits for are cancelled."""
        try:
            await check()
        except VisionEncoderError as error:
            await self._abort(method, context, error)
        finished: asyncio.Queue[int] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[Delivered]] = {}
        for index, request in enumerate(requests):
            tasks[index] = asyncio.ensure_future(one(request))
            tasks[index].add_done_callback(lambda _, index=index: finished.put_nowait(index))  # type: ignore[misc]
        status = "CANCELLED"
        try:
            while tasks:
                index = await finished.get()
                try:
                    delivered = tasks.pop(index).result()
                except (Exception, asyncio.CancelledError) as error:
                    failure = failure_of(error)
                    if failure.reason == "INTERNAL":
                        log.error("item failed", method=method, item=index, error=failure.message)
                    self._pipeline.metrics.failures.labels(failure.reason).inc()
                    yield pb.ItemEvent(item_index=index, failure=failure)
                    continue
                yield convert.result_event(index, delivered, self._chunk_bytes)
                for chunk in convert.chunk_events(index, delivered.encoded.rows, self._chunk_bytes):
                    yield chunk
                del delivered  # sent: the rows are the store's alone again
            status = "OK"
        finally:
            for task in tasks.values():
                task.cancel()
            self._pipeline.metrics.requests.labels(method, status).inc()

    # -- shared ----------------------------------------------------------------------------------------

    def _check_call(self, namespace: str, model: str, num_items: int) -> None:
        """Raises what concerns the call as a whole: InvalidRequest, UnknownModel."""
        if len(namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise InvalidRequest(
                f"namespace has {len(namespace.encode())} bytes, at most {MAX_NAMESPACE_BYTES} are taken"
            )
        if model not in ("", self._pipeline.model.name):
            raise UnknownModel(
                f"model {model!r} is not served here, {self._pipeline.model.name!r} is", model=model
            )
        if not 1 <= num_items <= self._max_items:
            raise InvalidRequest(f"the call has {num_items} items, 1 to {self._max_items} are taken")

    async def _read_item(self, message: pb.Item) -> Item:
        """The item of a message; a large pixel tensor is copied off the event loop."""
        if message.ByteSize() > CONVERT_INLINE_BYTES and message.WhichOneof("content") == "pixels":
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pipeline.workers, convert.item_from_proto, message)
        return convert.item_from_proto(message)

    def _key_status(self, key: bytes, namespace: str) -> pb.KeyStatus:
        match self._pipeline.lookup(key, namespace=namespace):
            case EncodedItem() as encoded:
                return pb.KeyStatus(
                    key=key,
                    state=pb.KEY_STATE_RESIDENT,
                    grid_thw=convert.grid_to_proto(encoded.grid),
                    num_rows=encoded.spec.num_rows,
                    tier=pb.CACHE_TIER_HOST,
                )
            case Flight():
                return pb.KeyStatus(key=key, state=pb.KEY_STATE_IN_FLIGHT)
            case _:
                return pb.KeyStatus(key=key, state=pb.KEY_STATE_ABSENT)

    async def _unary(
        self, method: str, context: Context, answer: Callable[[], Awaitable[Response]]
    ) -> Response:
        try:
            response = await answer()
        except VisionEncoderError as error:
            await self._abort(method, context, error)
        self._pipeline.metrics.requests.labels(method, "OK").inc()
        return response

    async def _abort(self, method: str, context: Context, error: VisionEncoderError) -> NoReturn:
        status = status_of(error)
        self._pipeline.metrics.requests.labels(method, status.name).inc()
        await context.abort(
            status,
            f"{error.reason}: {error.message}",
            ((FAILURE_METADATA_KEY, failure_of(error).SerializeToString()),),
        )
        raise AssertionError("abort returned")


def deadline_of(context: Context, clock: Callable[[], float] = time.monotonic) -> float | None:
    """The call's deadline in the pipeline's clock, or None when the caller set none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else clock() + remaining_s
